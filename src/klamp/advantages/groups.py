"""Rewards by group, and what an estimator may subtract from a reward or divide it by.

A baseline is a function from ``Groups`` to the rewards less it, [B]; a scale is a function from ``Groups`` and eps to
the divisor, [B], in which 0 means that there is nothing to scale by. A new one is an entry in ``BASELINES`` or
``SCALES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Groups:
    """Scored rewards by group; every statistic is float64 and [B], the group's own value at each of its rows.

    ``rewards`` [B], NaN where unscored; ``group`` [B], ids in any order; ``lengths`` [B], tokens of each response.
    """

    def __init__(
        self, rewards: Float[Tensor, "B"], group: Int[Tensor, "B"], lengths: Float[Tensor, "B"] | None = None
    ) -> None:
        identity, self.index = torch.unique(group, return_inverse=True)
        self.slots = identity.numel()
        self.scored = ~torch.isnan(rewards)
        self.value = torch.where(self.scored, rewards, 0.0).double()
        self.lengths = lengths
        self.count = self.total(self.scored)
        self.most, self.least = self.largest(self.value), -self.largest(-self.value)

    def total(self, items: Tensor) -> Float[Tensor, "B"]:
        """Sums over the scored rows of each group."""
        zero = torch.zeros(self.slots, dtype=torch.float64, device=self.value.device)
        return zero.index_add(0, self.index, torch.where(self.scored, items.double(), 0.0))[self.index]

    def largest(self, items: Tensor) -> Float[Tensor, "B"]:
        """Largest over the scored rows of each group, -inf in a group without any."""
        least = torch.full((self.slots,), -torch.inf, dtype=torch.float64, device=self.value.device)
        return least.scatter_reduce(0, self.index[self.scored], items[self.scored], "amax")[self.index]

    def largest_other(self, items: Tensor) -> Float[Tensor, "B"]:
        """Largest over the other scored rows of the group, -inf for a row alone."""
        most = self.largest(items)
        at_most = items == most
        runner_up = self.largest(torch.where(at_most, -torch.inf, items))
        return torch.where(at_most & (self.total(at_most) == 1.0), runner_up, most)

    @cached_property
    def tied(self) -> Bool[Tensor, "B"]:
        """All rewards of the group are equal, by comparison: a mean of equal floats may differ from them."""
        return self.most <= self.least

    @cached_property
    def alone(self) -> Bool[Tensor, "B"]:
        return self.scored & (self.count == 1.0)

    @cached_property
    def mean(self) -> Float[Tensor, "B"]:
        return self.total(self.value) / self.count.clamp(min=1.0)

    @cached_property
    def deviation(self) -> Float[Tensor, "B"]:
        return torch.where(self.scored, self.value - self.mean, 0.0)

    @cached_property
    def spread(self) -> Float[Tensor, "B"]:
        """The range of the group, 1 where tied: squares are taken of fractions of it, so that none underflows."""
        return torch.where(self.tied, 1.0, self.most - self.least)

    @cached_property
    def whole(self) -> Groups:
        """The same rows as one group."""
        return Groups(torch.where(self.scored, self.value, torch.nan), torch.zeros_like(self.index), self.lengths)

    def std(self, ddof: int) -> Float[Tensor, "B"]:
        """sqrt(sum (r - mean)^2 / (n - ddof)), exactly 0 where tied."""
        squares = self.total((self.deviation / self.spread) ** 2)
        return torch.where(self.tied, 0.0, self.spread * (squares / (self.count - ddof).clamp(min=1.0)).sqrt())


# --- baselines ------------------------------------------------------------------------------------------------

Baseline = Callable[[Groups], Tensor]


def _leave_one_out(groups: Groups) -> Tensor:
    n = groups.count
    return groups.deviation * n / (n - 1.0).clamp(min=1.0)


def _length_mean(groups: Groups) -> Tensor:
    assert groups.lengths is not None
    tokens = groups.total(groups.lengths)
    return groups.value - groups.total(groups.value * groups.lengths) / tokens.clamp(min=1.0)


def _best_of_others(groups: Groups) -> Tensor:
    """What the row adds to the best of its group: max(group) - max(group without it)."""
    return torch.where(groups.count > 1.0, (groups.value - groups.largest_other(groups.value)).clamp(min=0.0), 0.0)


BASELINES: dict[str, Baseline] = {
    "mean": lambda groups: groups.deviation,
    "leave_one_out": _leave_one_out,
    "length_mean": _length_mean,
    "best_of_others": _best_of_others,
    "none": lambda groups: groups.value,
}


# --- scales ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """``divisor(groups, eps)`` [B]; ``of_group``: a statistic of the row's group, so that a row alone has none."""

    divisor: Callable[[Groups, float], Tensor]
    of_group: bool = True


def _add(scale: Tensor, eps: float) -> Tensor:
    return torch.where(scale > 0.0, scale + eps, 0.0)


def _leave_one_out_std(groups: Groups, eps: float) -> Tensor:
    """Sample std of the other rows; a row whose others are equal is not divided."""
    n, part = groups.count, groups.deviation / groups.spread
    squares = (groups.total(part**2) - part**2 * n / (n - 1.0).clamp(min=1.0)).clamp(min=0.0)
    std = groups.spread * (squares / (n - 2.0).clamp(min=1.0)).sqrt()
    equal = groups.largest_other(groups.value) <= -groups.largest_other(-groups.value)
    return torch.where(equal, 1.0, std + eps)


def _nonzero_share(groups: Groups, eps: float) -> Tensor:
    whole = groups.whole
    return whole.total(groups.value != 0.0).clamp(min=1.0) / whole.count.clamp(min=1.0) + eps


SCALES: dict[str, Scale] = {
    "std": Scale(lambda groups, eps: _add(groups.std(ddof=1), eps)),
    "population_std": Scale(lambda groups, eps: _add(groups.std(ddof=0), eps)),
    "leave_one_out_std": Scale(_leave_one_out_std),
    "batch_std": Scale(lambda groups, eps: _add(groups.whole.std(ddof=1), eps), of_group=False),
    "mean": Scale(lambda groups, eps: _add(groups.mean, eps)),
    "nonzero_share": Scale(_nonzero_share, of_group=False),
    "none": Scale(lambda groups, eps: torch.ones_like(groups.value), of_group=False),
}
