"""The output layer of a language model, block by block: logits of some tokens for some of the vocabulary.

z = f(h W^T + b) / temperature, f(y) = scale y, or softcap tanh(scale y / softcap). A block is small enough to stay in the
processor's cache; what is computed from it is reduced over the vocabulary before the next one is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.errors import UserError

TOKENS, WORDS = 512, 1024  # of a block: 2 MiB in float32
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
        if self.weight.dim() != 2 or (self.bias is not None and self.bias.shape != self.weight.shape[:1]):
            raise UserError(
                f"the output layer has a weight [vocabulary, width] and a bias [vocabulary]; got {list(self.weight.shape)} and "
                f"{None if self.bias is None else list(self.bias.shape)}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic: float32 for narrower weights."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def size(self) -> int:
        return self.weight.shape[0]

    def blocks(self, words: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """(words, their rows of the weight, of the bias), in the dtype of the arithmetic."""
        for start in range(0, self.size, words):
            part = slice(start, min(start + words, self.size))
            bias = None if self.bias is None else self.bias[part].detach().to(self.dtype)
            yield part, self.weight[part].detach().to(self.dtype), bias

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """z of a block [tokens, words], written into ``out``."""
        z = torch.mm(hidden, weight.t(), out=out[: hidden.shape[0], : weight.shape[0]])
        if bias is not None:
            z += bias
        if self.scale != 1.0:
            z *= self.scale
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1.0:
            z /= self.temperature
        return z.clamp_(min=LOWEST)

    def back(self, slope: Tensor, z: Tensor) -> Tensor:
        """d/d(h W^T + b) from d/dz, in place of ``slope``; ``z`` as ``logits`` gave it."""
        if self.softcap is not None:
            slope *= 1.0 - (z * (self.temperature / self.softcap)) ** 2
        factor = self.scale / self.temperature
        return slope if factor == 1.0 else slope.mul_(factor)
