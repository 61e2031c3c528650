"""Which loops over a block of logits run.

A loop is what is done to a block [tokens, words] between its matrix products: elementwise work and a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from klamp.kernels import torch_loops
from klamp.kernels.head import Head
from klamp.whole import Kind


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
    return torch_loops
