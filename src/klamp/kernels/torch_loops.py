"""The loops over a block in PyTorch: for a CPU, for float64, and where Triton is not installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from klamp.kernels.head import LOWEST, Head
from klamp.kernels.terms import Pair, slope, value
from klamp.whole import Kind


def take(most: Tensor, total: Tensor, moment: Tensor | None, z: Tensor) -> None:
    """m = max z, s = sum e^(z - m), t = sum e^(z - m) z with a block more; z is overwritten unless there is a moment."""
    _add(most, total, moment, z, None if moment is None else z)


def take_tilted(
    streams: Sequence[tuple[float, bool]], most: Tensor, total: Tensor, moment: Tensor, z: Tensor, y: Tensor
) -> None:
    """m and s of u = y + a (z - y) for the streams (a, with t) [S, N], and t = sum e^(u - m) (z - y); overwrites z and y."""
    x = z - y
    for index, (a, with_moment) in enumerate(streams):
        u = z if a == 1.0 else y if a == 0.0 else torch.add(y, x, alpha=a)
        _add(most[index], total[index], moment[index] if with_moment else None, u, x if with_moment else None)


def _add(most: Tensor, total: Tensor, moment: Tensor | None, z: Tensor, x: Tensor | None) -> None:
    """m, s and t = sum e^(z - m) x; z is overwritten unless it is x."""
    high = torch.maximum(most, z.amax(1))
    shrink = (most - high).exp_()
    weights = (z - high[:, None] if z is x else z.sub_(high[:, None])).exp_()
    if moment is not None and x is not None:
        moment.mul_(shrink).add_(torch.linalg.vecdot(weights, x))
    total.mul_(shrink).add_(weights.sum(1))
    most.copy_(high)


def lift(z: Tensor, ids: Tensor, start: int, into: Tensor, leave: bool) -> None:
    """Copy the logits of the words ``ids`` [tokens, K] in a block from ``start`` on into ``into``; ``leave`` LOWEST there."""
    rows, columns = ((ids >= start) & (ids < start + z.shape[1])).nonzero(as_tuple=True)
    places = ids[rows, columns] - start
    into[rows, columns] = z[rows, places]
    if leave:
        z[rows, places] = LOWEST


def logprob_slopes(
    z: Tensor, out: Tensor, head: Head, start: int, lse: Tensor, entropy: Tensor, ids: Tensor, one: Tensor | None,
    two: Tensor | None,
) -> None:  # fmt: skip
    """d/d(h W^T + b) of g1 log q(id) + g2 H, g1 (1[v = id] - q) - g2 q (log q + H) through ``head.back``, into out (or z)."""
    found = _logprob_slopes(z, _place(out, z, head), lse, entropy, one, two)
    if one is not None:
        rows = ((ids >= start) & (ids < start + z.shape[1])).nonzero()[:, 0]
        found.index_put_((rows, ids[rows] - start), one[rows], accumulate=True)
    _leave(head.back(found, z), out)


def _logprob_slopes(
    z: Tensor, out: Tensor | None, lse: Tensor, entropy: Tensor, one: Tensor | None, two: Tensor | None
) -> Tensor:
    """-g1 q - g2 q (log q + H)."""
    if one is None and two is None:
        return torch.zeros_like(z)
    logq = torch.sub(z, lse[:, None], out=out)
    if two is None:
        return logq.exp_().mul_(-one[:, None])  # type: ignore[index]
    q = logq.exp()
    inner = logq.add_(entropy[:, None]).mul_(-two[:, None])
    return (inner if one is None else inner.sub_(one[:, None])).mul_(q)


def pair_sums(
    z: Tensor, y: Tensor, lses: tuple[Tensor, Tensor], kinds: Sequence[Kind], found: Tensor, mean: Tensor
) -> None:
    """Add the values and slopes (``klamp.kernels.terms``) of a pair of blocks to [tokens, kinds]; overwrites both blocks."""
    pair = Pair(z.sub_(lses[0][:, None]), y.sub_(lses[1][:, None]))
    for index, which in enumerate(kinds):
        found[:, index] += value(which, pair).sum(1)
        mean[:, index] += slope(which, pair).sum(1)


def pair_slopes(
    z: Tensor, y: Tensor, out: Tensor, lses: tuple[Tensor, Tensor], kinds: Sequence[Kind], head: Head, upstream: Tensor,
    shift: Tensor,
) -> None:  # fmt: skip
    """d/d(h W^T + b) of sum_k g_k D_k, sum_k g_k s_k - q shift through ``head.back``, into out (or z); overwrites y."""
    pair = Pair(z - lses[0][:, None], y.sub_(lses[1][:, None]))
    total = torch.mul(pair.q, -shift[:, None], out=_place(out, z, head))
    for index, which in enumerate(kinds):
        total.addcmul_(slope(which, pair), upstream[:, index, None])
    _leave(head.back(total, z), out)


def _place(out: Tensor, z: Tensor, head: Head) -> Tensor | None:
    """Where slopes may be made: in ``out`` itself, unless ``head.back`` still needs z there or ``out`` is too narrow."""
    return None if head.softcap is not None or out.dtype != z.dtype else out


def _leave(found: Tensor, out: Tensor) -> None:
    if found is not out:
        out.copy_(found)
