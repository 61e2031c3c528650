"""Stats: what a whole step must be asked before its first loss: counts, and samples of order statistics.

Counts travel, averages never do: the weights of loss = sum_t weight_t * loss_t use the sums over every micro-batch,
rank and accumulation window, and quantiles and budgets see every token of the step, so that any cut of a step gives
the same loss and gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from klamp.aggregates import PROMPTS, Aggregate
from klamp.errors import UserError

if TYPE_CHECKING:
    from klamp.batch import Batch


Collective = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stats:
    """Sums over one or more batches of a step; additive: ``sum(objective.stats(b) for b in micro_batches)``.

    ``counts``: int64 [4]: tokens in the mean, responses with one, all responses, batches. ``group_tokens``: tokens of
    each group id, where the spec averages over groups. ``samples``: by survey, what a part read of each token or
    response, float64 [n, k].
    """

    counts: Tensor
    group_tokens: Tensor | None = None
    samples: Mapping[str, Tensor] = field(default_factory=dict)
    _settled: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __add__(self, other: Stats) -> Stats:
        samples = {name: torch.cat([value, other.samples[name]]) for name, value in self.samples.items()}
        return Stats(self.counts + other.counts, _padded_sum(self.group_tokens, other.group_tokens), samples)

    def __radd__(self, other: int | Stats) -> Stats:
        return self if isinstance(other, int) else other + self

    def all_reduce(self, reduce_sum: Collective, reduce_max: Collective, gather: Collective | None = None) -> Stats:
        """The sum over ranks, given the collective reductions; every rank ends with the same value.

        ``gather`` concatenates equally shaped tensors of all ranks along the first dimension; specs without
        statistics of the step never call it. Raises UserError where it is needed and not given.
        """
        counts, tokens = reduce_sum(self.counts), self.group_tokens
        if tokens is not None:
            length = int(reduce_max(torch.tensor(tokens.numel(), device=tokens.device)))
            tokens = reduce_sum(torch.nn.functional.pad(tokens, (0, length - tokens.numel())))
        samples = {}
        for name, value in sorted(self.samples.items()):
            if gather is None:
                raise UserError(f"{name} samples the whole step: give all_reduce a gather= of all ranks' samples")
            length = int(reduce_max(torch.tensor(value.shape[0], device=value.device)))
            filled = torch.zeros((length, value.shape[1] + 1), dtype=value.dtype, device=value.device)
            filled[: value.shape[0], :-1], filled[: value.shape[0], -1] = value, 1.0
            every = gather(filled)
            samples[name] = every[every[:, -1] > 0.0, :-1]
        return Stats(counts, tokens, samples)

    def settled(self, name: str, settle: Callable[[Tensor], Tensor]) -> Tensor:
        """The statistic of one survey, computed once."""
        if name not in self._settled:
            self._settled[name] = settle(self.samples[name])
        return self._settled[name]


def _padded_sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    length = max(one.numel(), other.numel())
    pad = torch.nn.functional.pad
    return pad(one, (0, length - one.numel())) + pad(other, (0, length - other.numel()))


def collect(aggregate: Aggregate, batch: Batch, kept: Batch, samples: Mapping[str, Tensor]) -> Stats:
    """The counts of one batch that ``weights`` needs; ``kept`` is the batch without what a guard dropped."""
    if aggregate.rows == "all" and batch.packed:
        raise UserError("rows='all' counts responses without a token, which a packed batch cannot hold; unpack it")
    filled, every = batch.sequence_count()
    left = kept.sequence_count()[0]
    tokens = kept.mask.sum()
    group_tokens = None
    if aggregate.kind in PROMPTS:
        group = _groups(batch)
        size = int(group.max()) + 1 if group.numel() else 0
        if size > 10_000_000:
            raise UserError(
                f"group ids count up from 0 within a step; got {size - 1}: renumber them, torch.unique does"
            )
        group = group.long()
        group_tokens = torch.zeros(size, dtype=torch.int64, device=group.device)
        group_tokens.index_add_(0, group, kept.mask.sum(dim=1))
    return Stats(torch.stack([tokens, left, every - (filled - left), torch.ones_like(tokens)]), group_tokens, samples)


def _groups(batch: Batch) -> Tensor:
    if batch.group is None:
        raise UserError(
            "the spec averages over prompts: give group= (one id >= 0 per row, also of packed rows) to Batch"
        )
    if batch.group.numel() and bool((batch.group < 0).any()):
        raise UserError(f"group ids must be >= 0; got {int(batch.group.min())}")
    return batch.group


def weights(aggregate: Aggregate, batch: Batch, stats: Stats, dtype: torch.dtype) -> Tensor:
    """Weight of each token in the loss, broadcastable to [B, T]; 0 where there is nothing to average."""
    tokens, filled, every, batches = stats.counts.unbind()
    if aggregate.kind == "token_mean":
        return _inverse(tokens, dtype)
    if aggregate.kind == "local_token_mean":
        return _inverse(batches, dtype) * _inverse(batch.mask.sum(), dtype)
    if aggregate.kind == "token_sum":
        return torch.ones((), dtype=dtype, device=tokens.device)
    rows = every if aggregate.rows == "all" else filled
    if aggregate.kind == "sequence_sum":
        if aggregate.divisor is None:
            raise UserError("sequence_sum needs its constant divisor, for example sequence_sum(divisor=1024)")
        return _inverse(rows, dtype) / aggregate.divisor
    if aggregate.kind == "sequence_mean":
        return _inverse(rows, dtype) * _inverse(batch.sequence_sum(batch.mask), dtype)
    assert stats.group_tokens is not None
    groups = (stats.group_tokens > 0).sum()
    if aggregate.kind == "prompt_sum":
        return _inverse(groups, dtype) * _inverse(batch.sequence_sum(batch.mask), dtype)
    return _inverse(groups, dtype) * _inverse(stats.group_tokens, dtype)[_groups(batch)].unsqueeze(1)


def _inverse(count: Tensor, dtype: torch.dtype) -> Tensor:
    return (count > 0).to(dtype) / count.clamp(min=1).to(dtype)
