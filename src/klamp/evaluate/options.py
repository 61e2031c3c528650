"""What ``klamp eval`` was asked, checked before anything slow is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from klamp.data import options as data_options
from klamp.errors import UserError, check_choice

ENGINES = ("auto", "transformers", "vllm")
COLDEST = 1e-3  # temperature of sampling
MOST_SAMPLES = 100_000
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Options:
    """What ``klamp eval`` was asked; ``None`` where the task, the data, the engine or ``n`` decides."""

    model: str | None = None
    data: str | None = None
    task: str | None = None
    reward: str | None = None
    prompt_field: str | None = None
    answer_field: str | None = None
    split: str | None = None
    data_dir: str | None = None
    plain_prompts: bool = False
    skip_bad_rows: bool = False
    system: str | None = None
    instruction: str | None = None
    few_shot: int = 0
    few_shot_data: str | None = None
    max_prompt_tokens: int | None = None
    limit: int | None = None
    n: int = 8
    k: tuple[int, ...] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int = 0
    engine: str = "auto"
    dtype: str = "auto"
    batch_size: int | None = None
    trust_remote_code: bool = False
    out: str | None = None

    def __post_init__(self) -> None:
        if self.task and self.data:
            raise UserError("--task is data with its reward; give either --task or --data, not both")
        if self.data and not (self.reward or data_options.default_reward(self.data)):
            raise UserError(
                "--data needs --reward: math, numeric, exact, multiple_choice, reasoning_gym:NAME, module:function, "
                f"file.py:function, or a weighted sum{data_options.nearest_benchmark(self.data)}"
            )
        data_options.check(self, self.data, "--data")
        for name in ("n", "limit", "max_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if self.k is not None and (not self.k or min(self.k) < 1):
            raise UserError(f"--k {','.join(map(str, self.k))} must be whole numbers of at least 1, as in 1,4,16")
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise UserError(f"--temperature {self.temperature} must be at least 0 (0: greedy)")
        if 0.0 < self.temperature < COLDEST:
            raise UserError(f"--temperature {self.temperature} is below {COLDEST}, where logits overflow; 0 is greedy")
        if self.n > MOST_SAMPLES:
            raise UserError(f"--n {self.n} is more than {MOST_SAMPLES:,} samples of a question")
        if self.temperature == 0.0 and self.n > 1:
            raise UserError(
                f"at --temperature 0 all {self.n} samples of a question would be the same; give --n 1, or a temperature"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"--top-p {self.top_p} must be in (0, 1]; 1 keeps every token")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k} must be at least 0; 0 keeps every token")
        check_choice("--engine", self.engine, ENGINES)
        check_choice("--dtype", self.dtype, DTYPES)

    @property
    def ks(self) -> tuple[int, ...]:
        """The k asked for, ascending; by default 1, 4, 16, ... below n, and n."""
        if self.k is not None:
            return tuple(sorted(set(self.k)))
        return (*(k for k in (4**i for i in range(16)) if k < self.n), self.n)
