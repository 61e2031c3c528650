"""Tasks: prompts, answers, a reward and good training defaults under one name."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module, resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from klamp.errors import UserError, did_you_mean

Row = dict[str, str]
Reward = Callable[..., "list[float | None]"]

HELDOUT_SIZE = 256
HELDOUT_ONE_IN = 16
EMBEDDED_PREFIX = "embedded:"
REASONING_GYM_PREFIX = "reasoning_gym:"


@dataclass(frozen=True)
class Task:
    """A verifiable task: rows ``{"prompt": str, "answer": str}`` and a reward for them.

    ``train(seed)`` is deterministic in the seed, ``heldout()`` is fixed, and the two share no problem.
    ``reward(prompts, completions, **columns) -> list[float | None]`` is a TRL reward function.
    ``model`` is what ``--model`` defaults to, ``defaults`` the TRL option values of a good run of that model.
    """

    name: str
    description: str
    train: Callable[[int], list[Row]]
    heldout: Callable[[], list[Row]]
    reward: Reward
    max_completion_length: int
    model: str
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "defaults", MappingProxyType(dict(self.defaults)))


def task(name: str) -> Task:
    """The task of that name; ``reasoning_gym:NAME`` makes one. Raises UserError if there is none."""
    if name.startswith(REASONING_GYM_PREFIX):
        made: Task = import_module("klamp.rewards").reasoning_gym_task(name)
        return made
    if name not in TASKS:
        raise UserError(f"there is no task {name!r}; {did_you_mean(name, TASKS)}, or {REASONING_GYM_PREFIX}NAME")
    return TASKS[name]


def embedded_model(name: str) -> Path:
    """The folder of the model ``embedded:NAME`` that ships with the package, in Hugging Face format."""
    assets = Path(str(resources.files("klamp"))) / "assets"
    shipped = sorted(EMBEDDED_PREFIX + folder.parent.name for folder in assets.glob("*/config.json"))
    if name not in shipped:
        raise UserError(f"there is no embedded model {name!r}; {did_you_mean(name, shipped)}")
    return assets / name.removeprefix(EMBEDDED_PREFIX)


def exact_match(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float | None]:
    """1 where the stripped completion (of a chat: its last message) is the answer, else 0."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(text.strip() == gold.strip()) for text, gold in zip(texts, answer, strict=True)]


def distinct(rows: Iterator[Row], count: int) -> list[Row]:
    """The first ``count`` rows with different prompts."""
    found: dict[str, Row] = {}
    while len(found) < count:
        row = next(rows)
        found.setdefault(row["prompt"], row)
    return list(found.values())


def heldout_side(key: str) -> bool:
    """Whether what has this key is held out: decided by a checksum, the same for every seed and the warm start."""
    return zlib.crc32(key.encode()) % HELDOUT_ONE_IN == 0


# 32 prompts x 8 completions a rollout, 8 optimizer steps on each, 40 rollouts: all but the first step of a
# rollout are off-policy, so that the trust region acts (3 % of the tokens at first, less as the rate decays).
_DEFAULTS = {
    "num_generations": 8,
    "per_device_train_batch_size": 32,
    "steps_per_generation": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": 320,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "linear",
    "adam_beta2": 0.99,
}

# --- sort ---------------------------------------------------------------------------------------------------
SORT_DIGITS = 10
SORT_TRAIN_SIZE = 8192


def sort_rows(rng: random.Random, *, heldout: bool = False) -> Iterator[Row]:
    """Endless random sorting problems, ``3905112746=`` -> ``0112345679``, from one side of the split.

    The side is a checksum of the *answer*: every order of the same digits is on the same side, so that a
    held-out answer is never seen in training, neither in the warm start nor by any seed.
    """
    while True:
        digits = "".join(rng.choices("0123456789", k=SORT_DIGITS))
        answer = "".join(sorted(digits))
        if heldout_side(answer) == heldout:
            yield {"prompt": f"{digits}=", "answer": answer}


SORT = Task(
    name="sort",
    description=f"sort {SORT_DIGITS} digits: 3905112746= -> 0112345679",
    train=lambda seed: distinct(sort_rows(random.Random(f"sort train {seed}")), SORT_TRAIN_SIZE),
    heldout=lambda: distinct(sort_rows(random.Random("sort heldout"), heldout=True), HELDOUT_SIZE),
    reward=exact_match,
    max_completion_length=SORT_DIGITS + 2,
    model=EMBEDDED_PREFIX + "sort",
    defaults=_DEFAULTS,
)


# --- split --------------------------------------------------------------------------------------------------
SPLIT_DIGITS = 4
SPLIT_TRAIN_SIZE = 6400


def split_rows(rng: random.Random, *, heldout: bool = False) -> Iterator[Row]:
    """Endless numbers of four digits with one way to make each of two such numbers, ``5407=`` -> ``2113+3294``.

    Every way is right, and ``answer`` is any of them. A number is on one side of the split.
    """
    least = 10 ** (SPLIT_DIGITS - 1)
    while True:
        total = rng.randrange(2 * least, 10 * least)
        first = rng.randrange(least, total - least + 1)
        if heldout_side(str(total)) == heldout:
            yield {"prompt": f"{total}=", "answer": f"{first}+{total - first}"}


def split_match(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float | None]:
    """1 where the completion is a sum of two numbers of four digits that is as large as the answer's, else 0."""
    sums = [_sum_of_two(text if isinstance(text, str) else text[-1]["content"]) for text in completions]
    return [float(total is not None and total == _sum_of_two(gold)) for total, gold in zip(sums, answer, strict=True)]


def _sum_of_two(text: str) -> int | None:
    found = re.fullmatch(rf"([1-9][0-9]{{{SPLIT_DIGITS - 1}}})\+([1-9][0-9]{{{SPLIT_DIGITS - 1}}})", text.strip())
    return int(found[1]) + int(found[2]) if found else None


SPLIT = Task(
    name="split",
    description="write a number as a sum of two: 5407= -> 2113+3294, or any other",
    train=lambda seed: distinct(split_rows(random.Random(f"split train {seed}")), SPLIT_TRAIN_SIZE),
    heldout=lambda: distinct(split_rows(random.Random("split heldout"), heldout=True), HELDOUT_SIZE),
    reward=split_match,
    max_completion_length=2 * SPLIT_DIGITS + 3,
    model=EMBEDDED_PREFIX + "split",
    defaults=_DEFAULTS,
)

TASKS: Mapping[str, Task] = MappingProxyType({one.name: one for one in (SORT, SPLIT)})
