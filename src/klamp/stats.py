"""Stats: the counts of a whole step, and the weights of an aggregate: loss = sum_t weight_t * loss_t.

Counts travel, averages never do: the weights use the sums over every micro-batch, rank and accumulation window,
so that any cut of a step gives the same loss and gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from klamp.aggregates import Aggregate
from klamp.errors import UserError

if TYPE_CHECKING:
    from klamp.batch import Batch


@dataclass(frozen=True)
class Stats:
    """Sums over one or more batches of a step; additive: ``sum(objective.stats(b) for b in micro_batches)``.

    ``counts``: int64 [3]: unmasked tokens, responses with a token, all responses. ``group_tokens``: tokens of each
    group id, where the spec averages over groups.
    """

    counts: Tensor
    group_tokens: Tensor | None = None

    def __add__(self, other: Stats) -> Stats:
        return Stats(self.counts + other.counts, _padded_sum(self.group_tokens, other.group_tokens))

    def __radd__(self, other: int | Stats) -> Stats:
        return self if isinstance(other, int) else other + self

    def all_reduce(self, reduce_sum: Callable[[Tensor], Tensor], reduce_max: Callable[[Tensor], Tensor]) -> Stats:
        """The sum over ranks, given the two collective reductions; every rank ends with the same value."""
        counts, tokens = reduce_sum(self.counts), self.group_tokens
        if tokens is not None:
            length = int(reduce_max(torch.tensor(tokens.numel(), device=tokens.device)))
            tokens = reduce_sum(torch.nn.functional.pad(tokens, (0, length - tokens.numel())))
        return Stats(counts, tokens)


def _padded_sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    length = max(one.numel(), other.numel())
    pad = torch.nn.functional.pad
    return pad(one, (0, length - one.numel())) + pad(other, (0, length - other.numel()))


def collect(aggregate: Aggregate, batch: Batch) -> Stats:
    """The counts of one batch that ``weights`` needs."""
    if aggregate.rows == "all" and batch.packed:
        raise UserError("rows='all' counts responses without a token, which a packed batch cannot hold; unpack it")
    filled, every = batch.sequence_count()
    tokens = batch.mask.sum()
    group_tokens = None
    if aggregate.kind == "prompt_mean":
        group = _groups(batch)
        size = int(group.max()) + 1 if group.numel() else 0
        if size > 10_000_000:
            raise UserError(
                f"group ids count up from 0 within a step; got {size - 1}: renumber them, torch.unique does"
            )
        group = group.long()
        group_tokens = torch.zeros(size, dtype=torch.int64, device=group.device)
        group_tokens.index_add_(0, group, batch.mask.sum(dim=1))
    return Stats(torch.stack([tokens, filled, every]), group_tokens)


def _groups(batch: Batch) -> Tensor:
    if batch.group is None:
        raise UserError(
            "prompt_mean averages over groups: give group= (one id >= 0 per row, also of packed rows) to Batch"
        )
    if batch.group.numel() and bool((batch.group < 0).any()):
        raise UserError(f"group ids must be >= 0; got {int(batch.group.min())}")
    return batch.group


def weights(aggregate: Aggregate, batch: Batch, stats: Stats, dtype: torch.dtype) -> Tensor:
    """Weight of each token in the loss, broadcastable to [B, T]; 0 where there is nothing to average."""
    tokens, filled, every = stats.counts.unbind()
    if aggregate.kind == "token_mean":
        return _inverse(tokens, dtype)
    rows = every if aggregate.rows == "all" else filled
    if aggregate.kind == "sequence_sum":
        if aggregate.divisor is None:
            raise UserError("sequence_sum needs its constant divisor, for example sequence_sum(divisor=1024)")
        return _inverse(rows, dtype) / aggregate.divisor
    if aggregate.kind == "sequence_mean":
        return _inverse(rows, dtype) * _inverse(batch.sequence_sum(batch.mask), dtype)
    assert stats.group_tokens is not None
    groups = (stats.group_tokens > 0).sum()
    return _inverse(groups, dtype) * _inverse(stats.group_tokens, dtype)[_groups(batch)].unsqueeze(1)


def _inverse(count: Tensor, dtype: torch.dtype) -> Tensor:
    return (count > 0).to(dtype) / count.clamp(min=1).to(dtype)
