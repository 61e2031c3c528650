"""Sampled completions: the engines, and where the chance of each sample comes from.

Every sample has its own random numbers, made from (seed, question, index) alone. The next token is the point where the
cumulative distribution passes the sample's next number, so chance does not depend on which samples share a batch. The
logits may, in their last bits; the fixed plan of batches in the store removes this too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from klamp.errors import UserError

BATCH = {"transformers": 64, "vllm": 1024}


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; temperature 0 is greedy, ``top_p`` 1 and ``top_k`` 0 keep every token."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True)
class Request:
    """One sample to draw: the prompt's tokens, and the seed of the sample's own random numbers."""

    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """A text without special tokens; ``ids`` with its end token; ``truncated``: it ran into the length limit."""

    text: str
    ids: tuple[int, ...]
    truncated: bool


class Engine(Protocol):
    """Draws one completion per request, in order."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


def sample_seed(seed: int, question: str, index: int) -> int:
    """63 bits from the seed of the evaluation, the question's id and the sample's index."""
    digest = hashlib.blake2b(f"{seed}:{question}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniforms(seeds: Sequence[int], count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[len(seeds), count] numbers in [0, 1), each row from its own seed; the same on every machine."""
    rows = [np.random.Philox(key=seed).random_raw(count) for seed in seeds]
    return np.asarray((np.stack(rows) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def engine_name(asked: str) -> str:
    """``auto`` is vLLM where it is installed and there is a CUDA device, else transformers."""
    import torch

    installed = importlib.util.find_spec("vllm") is not None
    if asked == "auto":
        return "vllm" if installed and torch.cuda.is_available() else "transformers"
    if asked == "vllm" and not installed:
        raise UserError("--engine vllm: vLLM is not installed; pip install vllm, or leave out --engine")
    return asked


def device_name() -> str:
    """The device that transformers generates on."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def dtype_name(asked: str, config: Any, device: str) -> str:
    """``auto`` is float32 on the CPU, else the model's own."""
    if asked != "auto":
        return asked
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return "float32" if device == "cpu" else own


def make_engine(
    name: str, path: str, tokenizer: Any, sampling: Sampling, dtype: str, device: str, trust_remote_code: bool = False
) -> Engine:
    """The engine of that name with the model loaded. Raises UserError if it cannot be."""
    kind = Vllm if name == "vllm" else Transformers
    try:
        return kind(path, tokenizer, sampling, dtype, device, trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # every library below raises its own kind
        lines = str(error).strip().splitlines() or [""]
        raise UserError(f"the model {path!r} cannot be loaded by {name}: {type(error).__name__}: {lines[0]}") from error


def end_tokens(tokenizer: Any, *configs: Any) -> list[int]:
    """Every token that ends a completion: the tokenizer's and those of the model's configurations."""
    found: set[int] = set()
    for source in (tokenizer, *configs):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(found)


# --- transformers ---------------------------------------------------------------------------------------------


class Transformers:
    """The model's own ``generate``, left-padded, on one device; its generation defaults other than end tokens do not count."""

    def __init__(
        self, path: str, tokenizer: Any, sampling: Sampling, dtype: str, device: str, trust_remote_code: bool
    ) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code
        )
        self.model = model.to(device).eval()
        self.tokenizer, self.sampling = tokenizer, sampling
        self.ends = end_tokens(tokenizer, model.generation_config, model.config)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (self.ends or [0])[0]
        # Repetition penalties and the like of the model's own file would make it another distribution.
        model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=self.ends or None, pad_token_id=self.pad,
            max_new_tokens=sampling.max_tokens, max_length=None,
        )  # fmt: skip

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        import torch

        width = max(len(request.prompt) for request in requests)
        ids = torch.full((len(requests), width), self.pad)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        device = self.model.device
        try:
            with torch.inference_mode():
                out = self.model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    logits_processor=self._processors(requests, width),
                )
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"a batch of {len(requests)} samples does not fit into the memory of {device}; start in another --out with "
                f"a lower --batch-size, or lower --max-tokens {self.sampling.max_tokens}"
            ) from error
        return [self._completion(row) for row in out[:, width:].tolist()]

    def _processors(self, requests: Sequence[Request], width: int) -> Any:
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        how = self.sampling
        if how.temperature == 0.0:
            return LogitsProcessorList()
        found: list[Any] = [TemperatureLogitsWarper(how.temperature)] if how.temperature != 1.0 else []
        found += [TopKLogitsWarper(how.top_k)] if how.top_k else []
        found += [TopPLogitsWarper(how.top_p)] if how.top_p < 1.0 else []
        draws = uniforms([request.seed for request in requests], how.max_tokens)
        return LogitsProcessorList([*found, OwnDraws(draws, width, self.model.device)])

    def _completion(self, ids: list[int]) -> Completion:
        end = next((place for place, token in enumerate(ids) if token in self.ends), None)
        kept = ids if end is None else ids[: end + 1]
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return Completion(text, tuple(kept), end is None)


class OwnDraws:
    """Leaves of each row only the token where its cumulative distribution passes the row's own next number."""

    def __init__(self, draws: np.ndarray[Any, np.dtype[np.float64]], width: int, device: Any) -> None:
        import torch

        self.wide = torch.float32 if device.type == "mps" else torch.float64
        self.draws, self.width = torch.from_numpy(draws).to(device, self.wide), width

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        import torch

        step = input_ids.shape[1] - self.width
        total = torch.softmax(scores.to(self.wide), dim=-1).cumsum(dim=-1)
        last = total[:, -1:]
        # strictly below the last sum, so that the token found has a probability above 0
        point = torch.minimum(self.draws[:, step : step + 1] * last, torch.nextafter(last, torch.zeros_like(last)))
        token = torch.searchsorted(total, point, right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


# --- vLLM -----------------------------------------------------------------------------------------------------


class Vllm:
    """vLLM with a seed per request; bit for bit only where vLLM itself is (VLLM_BATCH_INVARIANT=1)."""

    def __init__(
        self, path: str, tokenizer: Any, sampling: Sampling, dtype: str, device: str, trust_remote_code: bool
    ) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the results
        vllm = importlib.import_module("vllm")
        self.ends = end_tokens(tokenizer)  # vLLM adds those of the model's files
        self.sampling = sampling
        self._params = vllm.SamplingParams
        self.llm = vllm.LLM(model=path, dtype=dtype, seed=0, trust_remote_code=trust_remote_code)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        how = self.sampling
        params = [
            self._params(
                n=1, temperature=how.temperature, top_p=how.top_p, top_k=how.top_k, max_tokens=how.max_tokens,
                seed=request.seed, stop_token_ids=self.ends, skip_special_tokens=True,
            )
            for request in requests
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        found = self.llm.generate(prompts, params, use_tqdm=False)
        first = [one.outputs[0] for one in found]
        return [Completion(one.text, tuple(one.token_ids), one.finish_reason == "length") for one in first]
