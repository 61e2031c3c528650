"""Which loops over a block of logits run: Triton's for float32 on CUDA, where Triton is installed, else PyTorch's.

A loop is what is done to a block [tokens, words] between its matrix products: elementwise work and a reduction, several
passes over memory in PyTorch and one in Triton. Both versions have the same functions; Triton is loaded when first chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Literal, Protocol

import torch
from torch import Tensor

from klamp.kernels import torch_loops
from klamp.kernels.head import Head
from klamp.whole import Kind

choice: Literal["torch", "triton"] | None = None  # None: by the device; "triton" on a CPU needs TRITON_INTERPRET=1
_OLDEST = (7, 0)  # the compute capability that Triton needs


class Loops(Protocol):
    """Equations: ``klamp.kernels.torch_loops``. Tensors of one number per token are the rows of the block."""

    def take(self, most: Tensor, total: Tensor, moment: Tensor | None, z: Tensor) -> None: ...

    def take_tilted(
        self, streams: Sequence[tuple[float, bool]], most: Tensor, total: Tensor, moment: Tensor, z: Tensor, y: Tensor
    ) -> None: ...

    def lift(self, z: Tensor, ids: Tensor, start: int, into: Tensor, leave: bool) -> None: ...

    def logprob_slopes(
        self, z: Tensor, out: Tensor, head: Head, start: int, lse: Tensor, entropy: Tensor, ids: Tensor, one: Tensor | None,
        two: Tensor | None,
    ) -> None: ...  # fmt: skip

    def pair_sums(
        self, z: Tensor, y: Tensor, lses: tuple[Tensor, Tensor], kinds: Sequence[Kind], found: Tensor, mean: Tensor
    ) -> None: ...

    def pair_slopes(
        self, z: Tensor, y: Tensor, out: Tensor, lses: tuple[Tensor, Tensor], kinds: Sequence[Kind], head: Head,
        upstream: Tensor, shift: Tensor,
    ) -> None: ...  # fmt: skip


def loops(z: Tensor) -> Loops:
    """The loops for blocks like this one."""
    if z.dtype != torch.float32 or not (_fits(z) if choice is None else choice == "triton"):
        return torch_loops
    from klamp.kernels import triton_loops

    return triton_loops


def _fits(z: Tensor) -> bool:
    return z.is_cuda and _installed() and torch.cuda.get_device_capability(z.device) >= _OLDEST


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
