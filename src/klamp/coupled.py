"""Transforms of a response that depend on other responses: on the mean of the step, or on its group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from klamp.errors import UserError
from klamp.transforms import Cap, Transform, as_numbers

if TYPE_CHECKING:
    from torch import Tensor

    from klamp.batch import Batch


@dataclass(frozen=True)
class Normalized:
    """A detached transform divided by its mean over the step, of tokens, or of responses where the scope is one."""

    transform: Transform = Cap()

    def __post_init__(self) -> None:
        if not hasattr(self.transform, "evaluate"):
            raise UserError(f"normalized() takes a transform such as cap(high=2.0); got {self.transform!r}")

    @property
    def integrated(self) -> bool:
        return False

    def collect(self, log_ratio: Tensor, advantages: Tensor, batch: Batch, where: Tensor) -> Tensor:
        return self.transform.evaluate(log_ratio, advantages)[0].double().expand(batch.shape)[where].unsqueeze(1)

    def settle(self, samples: Tensor) -> Tensor:
        mean = samples.mean() if samples.numel() else samples.new_ones(())
        return mean.where(mean.isfinite(), math.nan)  # x / inf would silently be 0: the objective raises on NaN

    def given(self, statistic: Tensor, batch: Batch) -> _Divided:
        return _Divided(self.transform, statistic)


@dataclass(frozen=True)
class _Divided:
    transform: Transform
    mean: Tensor
    integrated = False

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.transform.evaluate(log_ratio, advantages)[0] / self.mean.to(log_ratio.dtype)
        return weight, weight


@dataclass(frozen=True)
class Contrast:
    """REAL's weight p / (temperature |A|): the groups' right against wrong answers, p from the whole group.

    S = x / temperature of a response; p = e^-S / (1 + sum of e^-S over the group's responses with A > 0) where A > 0,
    e^S / (1 + sum of e^S over those with A < 0) where A < 0; 0 in a group without both.
    """

    temperature: float = 0.5

    def __post_init__(self) -> None:
        as_numbers(self)
        if not 0.0 < self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature!r} must be a finite number above 0")

    traits = frozenset({"group_coupled", "own_scale"})
    needs = frozenset({"group"})
    scope = "sequence"  # one score per response

    @property
    def integrated(self) -> bool:
        return False

    def collect(self, log_ratio: Tensor, advantages: Tensor, batch: Batch, where: Tensor) -> Tensor:
        """(group, sign of the response's A, -+S) of each response, [n, 3]."""
        import torch

        side, score = self._scores(log_ratio, advantages, batch)
        assert batch.group is not None
        group = batch.group.double().unsqueeze(1)
        return torch.stack([value.expand(batch.shape)[where] for value in (group, side, score)], dim=-1)

    def settle(self, samples: Tensor) -> Tensor:
        """(group, log(1 + sum e^-S) of the right, log(1 + sum e^S) of the wrong), [groups, 3]; inf where one is missing."""
        import torch

        ids, index = torch.unique(samples[:, 0], return_inverse=True)
        columns = [ids]
        present = [torch.zeros_like(ids).index_add(0, index, (samples[:, 1] == side).double()) > 0 for side in (1, -1)]
        for side in (1.0, -1.0):
            score = torch.where(samples[:, 1] == side, samples[:, 2], -math.inf)
            top = torch.zeros_like(ids).scatter_reduce(0, index, score, "amax")  # with the 1 = e^0
            total = (-top).exp() + torch.zeros_like(ids).index_add(0, index, (score - top[index]).exp())
            columns.append(torch.where(present[0] & present[1], top + total.log(), math.inf))
        return torch.stack(columns, dim=-1)

    def given(self, statistic: Tensor, batch: Batch) -> _Contrasted:
        return _Contrasted(self, statistic, batch)

    def _scores(self, log_ratio: Tensor, advantages: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        side = batch.sequence_sum(batch.select(advantages.expand(batch.shape))).sign()
        return side, -side * log_ratio.double() / self.temperature


@dataclass(frozen=True)
class _Contrasted:
    contrast: Contrast
    table: Tensor
    batch: Batch
    integrated = False

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        assert self.batch.group is not None
        side, score = self.contrast._scores(log_ratio, advantages, self.batch)
        if not self.table.shape[0]:
            return torch.zeros_like(log_ratio), torch.zeros_like(log_ratio)
        ids = self.table[:, 0].contiguous()
        row = self.table[torch.searchsorted(ids, self.batch.group.double()).clamp(max=max(ids.numel() - 1, 0))]
        base = torch.where(side > 0, row[:, 1:2], row[:, 2:3])
        p = torch.where(side == 0, 0.0, (score - base).exp())
        size = side * advantages.double()
        weight = p / (self.contrast.temperature * torch.where(size == 0, 1.0, size))
        return weight.to(log_ratio.dtype), weight.to(log_ratio.dtype)
