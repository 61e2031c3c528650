"""Tally: metrics as sums and counts, which add exactly over micro-batches and ranks; divided only when shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from klamp.errors import UserError


@dataclass
class Tally:
    """name -> (sum, count) for means and shares, name -> sum for counts, and name -> maximum."""

    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        means = dict(self.means)
        for name, (total, count) in other.means.items():
            mine = means.get(name)
            means[name] = (total, count) if mine is None else (mine[0] + total, mine[1] + count)
        sums = dict(self.sums)
        for name, value in other.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        return Tally(means, sums, maxima)

    def __radd__(self, other: int | Tally) -> Tally:
        return self if isinstance(other, int) else other + self

    def all_reduce(self, reduce_sum: Callable[[Tensor], Tensor], reduce_max: Callable[[Tensor], Tensor]) -> Tally:
        """The tally over ranks; all ranks must hold the same names."""
        means = {name: (reduce_sum(total), reduce_sum(count)) for name, (total, count) in sorted(self.means.items())}
        sums = {name: reduce_sum(value) for name, value in sorted(self.sums.items())}
        return Tally(means, sums, {name: reduce_max(value) for name, value in sorted(self.maxima.items())})

    def mean(self, name: str) -> float | None:
        """One mean as a number, None where its count is 0."""
        total, count = self.means[name]
        return float(total) / float(count) if float(count) else None

    def show(self) -> dict[str, float | int | list[int] | None]:
        """Plain numbers by name; what is over nothing or not representable is None. Raises UserError if non-finite values were counted."""
        broken = int(self.sums.get("batch/nonfinite_count", 0))
        if broken:
            raise UserError(f"{broken} non-finite log-probs or advantages at unmasked positions since the last log")
        shown: dict[str, float | int | list[int] | None] = {name: self.mean(name) for name in self.means}
        for name, value in self.sums.items():
            shown[name] = value.tolist() if isinstance(value, Tensor) else value
        maxima = {name: float(value) for name, value in self.maxima.items()}
        return shown | {name: value if 0.0 < value < float("inf") else None for name, value in maxima.items()}
