"""The output layer of a language model, block by block: logits of some tokens for some of the vocabulary.

z = f(h W^T + b) / temperature, f(y) = scale y, or softcap tanh(scale y / softcap). A block is small enough to stay in the
processor's cache; what is computed from it is reduced over the vocabulary before the next one is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klamp.errors import UserError

TOKENS, WORDS = 1024, 1024  # of a block on a CPU: 4 MiB in float32
STRIP = 64  # tokens of a block that are worked on at once: several such strips fit a core's cache
CUDA_TOKENS, CUDA_WORDS = 4096, 8192  # on a GPU, where one product must be large enough to fill it: 128 MiB
LOWEST = -1e30  # stands for a logit of -inf: its probability is 0, and its products with 0 are 0


@dataclass(frozen=True)
class Head:
    """An output layer: ``weight`` [V, H], ``bias`` [V], and what is done to its logits. Arithmetic in ``dtype``."""

    weight: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "scale"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0.0 < value < float("inf")):
                raise UserError(f"{name}={value!r} must be a number above 0")
        if self.softcap is not None and not 0.0 < self.softcap < float("inf"):
            raise UserError(f"softcap={self.softcap!r} must be a number above 0, or None")
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if type(value) not in (Tensor, torch.nn.Parameter, type(None)):
                raise UserError(
                    f"the output layer's {name} is a {type(value).__name__}, which cannot be cut into blocks: give a plain tensor "
                    "(of FSDP's DTensor its full_tensor(), of a quantised layer the dequantised weight)"
                )
        if self.weight.dim() != 2 or (self.bias is not None and self.bias.shape != self.weight.shape[:1]):
            raise UserError(
                f"the output layer has a weight [vocabulary, width] and a bias [vocabulary]; got {list(self.weight.shape)} and "
                f"{None if self.bias is None else list(self.bias.shape)}"
            )
        if not self.weight.is_floating_point():
            raise UserError(
                f"the output layer's weight is {self.weight.dtype}: quantised heads are not supported; leave lm_head out of "
                "the quantisation, or give the dequantised weight"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Of the sums and results: float32 for narrower weights."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def size(self) -> int:
        return self.weight.shape[0]

    @property
    def factors(self) -> torch.dtype:
        """What is multiplied: on a GPU in the weight's own precision, whose products are summed in ``dtype``."""
        return self.weight.dtype if self.weight.is_cuda else self.dtype

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """z of a block [tokens, words], written into ``out``."""
        z = product(hidden, weight.t(), out[: hidden.shape[0], : weight.shape[0]])
        if bias is not None:
            z += bias
        if self.scale != 1.0:
            z *= self.scale
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1.0:
            z /= self.temperature
        return z if bias is None else z.clamp_(min=LOWEST)

    def back(self, slope: Tensor, z: Tensor) -> Tensor:
        """d/d(h W^T + b) from d/dz, in place of ``slope``; ``z`` as ``logits`` gave it."""
        if self.softcap is not None:
            slope *= 1.0 - (z * (self.temperature / self.softcap)) ** 2
        factor = self.scale / self.temperature
        return slope if factor == 1.0 else slope.mul_(factor)


def strips(here: slice, *blocks: Tensor) -> Iterator[tuple[Any, ...]]:
    """(tokens, their rows of each block) for a few tokens of a block at a time; on a GPU for all of them."""
    step = here.stop - here.start if blocks[0].is_cuda else STRIP
    for start in range(here.start, here.stop, max(step, 1)):
        stop = min(start + step, here.stop)
        yield slice(start, stop), *(block[start - here.start : stop - here.start] for block in blocks)


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """left @ right into ``out``; a GPU sums products of narrow factors in the precision of ``out``."""
    if left.dtype != out.dtype:
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    return torch.mm(left, right, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, ``left`` rounded to the precision of ``right``."""
    if right.dtype != total.dtype:
        torch.addmm(total, left.to(right.dtype), right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left, right)


class Blocks:
    """The logits of one policy, block by block: ``parts`` of the vocabulary outside, ``tokens`` inside.

    ``hidden`` [N, H] and the head's weight are detached. One block is alive at a time: the next overwrites it.
    """

    def __init__(self, head: Head, hidden: Tensor, chunk: int | None = None) -> None:
        self.head, self.states = head, hidden.detach().to(head.factors)
        self.count, self.dtype = hidden.shape[0], hidden.dtype
        most = (CUDA_TOKENS, CUDA_WORDS) if hidden.is_cuda else (TOKENS, WORDS)
        self._tokens, self._words = min(chunk or most[0], max(self.count, 1)), min(most[1], head.size)
        self.buffer = self.new_empty(self._tokens, self._words)
        self._part: slice | None = None
        self._rows, self._bias = head.weight, head.bias

    def new_empty(self, *shape: int) -> Tensor:
        """An empty tensor of the sums' precision."""
        return self.states.new_empty(shape, dtype=self.head.dtype)

    @property
    def parts(self) -> Iterator[slice]:
        for start in range(0, self.head.size, self._words):
            yield slice(start, min(start + self._words, self.head.size))

    @property
    def tokens(self) -> Iterator[slice]:
        for start in range(0, self.count, self._tokens):
            yield slice(start, min(start + self._tokens, self.count))

    def rows(self, part: slice) -> Tensor:
        """The rows of the weight for a part of the vocabulary, in the precision of the factors."""
        if self._part != part:
            self._part = part
            self._rows = self.head.weight[part].detach().to(self.head.factors)
            own = self.head.bias
            self._bias = None if own is None else own[part].detach().to(self.head.dtype)
        return self._rows

    def logits(self, here: slice, part: slice) -> Tensor:
        """z of a block [tokens, words]; may be overwritten."""
        rows = self.rows(part)
        return self.head.logits(self.states[here], rows, self._bias, self.buffer)


class OutOfMemory(UserError, MemoryError):
    """There is not enough memory; the message names what to change."""


@contextmanager
def named_memory(way: str) -> Iterator[None]:
    """Turn the end of the memory, of a GPU or a CPU, into a message that says ``way`` out."""
    try:
        yield
    except (RuntimeError, OutOfMemory) as error:  # torch.OutOfMemoryError is the first; the outermost way counts
        if isinstance(error, (torch.OutOfMemoryError, OutOfMemory)) or "allocate memory" in str(error):
            said = str(error).splitlines()[0].removeprefix("out of memory: ").partition("; ")[0]
            raise OutOfMemory(f"out of memory: {said}; {way}") from error
        raise


@contextmanager
def narrow_products(*tensors: Tensor) -> Iterator[None]:
    """Where all factors came in bfloat16, let a CPU multiply in it: their products are exact, the sums are float32."""
    settings = torch.backends.mkldnn
    own = getattr(settings, "matmul", None)
    if own is None or any(one.dtype != torch.bfloat16 or one.is_cuda for one in tensors):
        yield
        return
    before = own.fp32_precision
    own.fp32_precision = "bf16"
    try:
        yield
    finally:
        own.fp32_precision = before
