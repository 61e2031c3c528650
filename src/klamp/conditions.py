"""Conditions: regions that need more than the log-ratio of one token: its probability, the vocabulary, the whole step.

Each says which tokens are outside, like the interval of ``klamp.regions``; ``condition(...)`` builds any of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from klamp.binary import BINARY, binary_divergence
from klamp.errors import UserError, did_you_mean
from klamp.measures import FAMILIES, MEASURES, Measure, measure
from klamp.radii import Moving, Scaled, moved, number, per_token
from klamp.regions import Radius, Region, region
from klamp.whole import NAMES, TOP_K, split

if TYPE_CHECKING:
    from torch import Tensor

    from klamp.batch import Batch

WHOLE = tuple(name for name in NAMES if "(" not in name)  # without the power families


@dataclass(frozen=True)
class Distance:
    """A region {D <= radius} of a measure that is not a function of w alone, in natural units, a radius per side.

    ``binary_*`` (Qi et al. 2026, DPPO, arXiv 2602.04879) reads the token's probability under the ratio's denominator.
    ``topk_*`` and ``exact_*`` (``klamp.whole``) need the divergence over the vocabulary as ``divergences[name]`` of the batch;
    ``top_k``: how many of the old policy's likeliest tokens have a bucket of their own.
    """

    measure: str
    radius_low: Radius
    radius_high: Radius
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not self.measure.startswith("topk_"):
            if self.top_k is not None:
                raise UserError(f"top_k={self.top_k!r} belongs to a measure topk_*; {self.measure} has no such buckets")
            return
        size = TOP_K if self.top_k is None else self.top_k
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UserError(f"top_k={self.top_k!r} must be a whole number of tokens, at least 1; {TOP_K} is usual")
        object.__setattr__(self, "top_k", size)

    @property
    def radius(self) -> Radius | None:
        return self.radius_low if self.radius_low == self.radius_high else None

    @property
    def needs(self) -> frozenset[str]:
        whole = frozenset() if self.measure in BINARY else frozenset({f"divergences[{self.measure}]"})
        return whole.union(*(radius.needs for radius in self.moves if isinstance(radius, Scaled)))

    @property
    def moves(self) -> tuple[Moving, ...]:
        radii = (self.radius_low, self.radius_high)
        return tuple(dict.fromkeys(radius for radius in radii if isinstance(radius, Moving)))

    @property
    def notes(self) -> tuple[str, ...]:
        if self.measure in BINARY:
            return ("natural units; the bounds on w depend on the token's probability",)
        return ("natural units; over the vocabulary, which the batch must bring",)

    def now(self, state: dict[str, float], key: str) -> Distance:
        low, high = moved(self.radius_low, state, f"{key}.low"), moved(self.radius_high, state, f"{key}.high")
        return Distance(self.measure, low, high, self.top_k) if self.moves else self

    def outside(self, log_ratio: Tensor, batch: Batch, denominator: str) -> tuple[Tensor, Tensor]:
        distance = self.divergence(log_ratio, batch, denominator)
        below, above = (per_token(radius, batch, denominator) for radius in (self.radius_low, self.radius_high))
        return (log_ratio < 0) & (distance > below), (log_ratio >= 0) & (distance > above)

    def divergence(self, log_ratio: Tensor, batch: Batch, denominator: str) -> Tensor:
        """D of each token [B, T], float64."""
        if self.measure in BINARY:
            found: Tensor = binary_divergence(self.measure, log_ratio.double(), batch.select(batch.logp(denominator)))
            return found
        return batch.select(batch.divergences[self.measure])

    def arguments(self) -> dict[str, object]:
        buckets = {"top_k": self.top_k} if self.top_k not in (None, TOP_K) else {}
        if self.radius is not None:
            return {"measure": self.measure, "radius": self.radius, **buckets}
        return {"measure": self.measure, "radius_low": self.radius_low, "radius_high": self.radius_high, **buckets}


@dataclass(frozen=True)
class Level:
    """{D <= radius} by evaluating the measure: what a budget becomes once its radius is known."""

    measure: Measure
    radius: float

    def outside(self, log_ratio: Tensor, batch: Batch, denominator: str) -> tuple[Tensor, Tensor]:
        far = self.measure.divergence(log_ratio.double()) > self.radius
        return (log_ratio < 0) & far, (log_ratio > 0) & far


@dataclass(frozen=True)
class Budget:
    """The largest region {D <= r} whose tokens keep the mean of D within ``budget``: r follows from the whole step.

    Of the tokens where the gate applies, those with the largest D are outside until sum of D over the rest / N <=
    budget. N: ``over='all'`` unmasked tokens of the step, or the ``kept`` ones alone. Zheng et al. 2025, M2PO,
    arXiv 2510.01161, is the measure k2 (half the squared log-ratio).
    """

    measure: Measure
    budget: float
    over: str = "all"

    def __post_init__(self) -> None:
        if isinstance(self.budget, bool) or not isinstance(self.budget, (int, float)) or not self.budget >= 0.0:
            raise UserError(f"budget={self.budget!r} must be a mean divergence >= 0")
        object.__setattr__(self, "budget", float(self.budget))
        if self.over not in ("all", "kept"):
            raise UserError(f"over={self.over!r} is unknown; {did_you_mean(str(self.over), ('all', 'kept'))}")

    needs: ClassVar[frozenset[str]] = frozenset()
    moves: ClassVar[tuple[Moving, ...]] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        return ("the radius follows from the divergences of the whole step",)

    def now(self, state: dict[str, float], key: str) -> Budget:
        return self

    def collect(self, log_ratio: Tensor, applies: Tensor, batch: Batch) -> Tensor:
        """D and whether the rule applies, of each unmasked token, [n, 2]."""
        import torch

        distance = torch.where(applies, self.measure.divergence(log_ratio.double()), 0.0).expand(batch.shape)
        rows = torch.stack([distance, applies.expand(batch.shape).double()], dim=-1)
        return rows[batch.mask]

    def settle(self, samples: Tensor) -> Tensor:
        """The radius, from the samples of the whole step."""
        distance = samples[samples[:, 1] > 0.0, 0].sort().values
        total = distance.cumsum(0)
        count = samples.shape[0] if self.over == "all" else 1.0 + total.new_ones(total.shape).cumsum(0) - 1.0
        over = total > self.budget * count
        if not bool(over.any()):
            return total.new_tensor(math.inf)
        first = distance[int(over.int().argmax())]
        below = distance[distance < first]  # equal divergences stay or go together
        return below[-1] if below.numel() else total.new_tensor(0.0)

    def given(self, statistic: Tensor) -> Level:
        return Level(self.measure, float(statistic))

    def arguments(self) -> dict[str, object]:
        found: dict[str, object] = {"measure": str(self.measure), "budget": self.budget}
        return found | ({"over": self.over} if self.over != "all" else {})


@dataclass(frozen=True)
class Nowhere:
    """No token is inside: the gate alone decides what is cut."""

    needs: ClassVar[frozenset[str]] = frozenset()
    moves: ClassVar[tuple[Moving, ...]] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        return ("nothing is inside: the gate alone selects what is cut",)

    def now(self, state: dict[str, float], key: str) -> Nowhere:
        return self

    def outside(self, log_ratio: Tensor, batch: Batch, denominator: str) -> tuple[Tensor, Tensor]:
        return log_ratio < 0, log_ratio >= 0

    def arguments(self) -> dict[str, object]:
        return {"region": "nowhere"}


Condition = Region | Distance | Budget | Nowhere


def condition(
    measure_: Any = None, radius: Any = None, *, measure: Any = None, radius_low: Any = None, radius_high: Any = None,
    ratio_low: float | None = None, ratio_high: float | None = None, budget: float | None = None, over: str = "all",
    region: str | None = None, top_k: int | None = None,
) -> Condition:  # fmt: skip
    """Any region, from the arguments of a guard: an interval, a binary or whole-vocabulary measure, a budget, nowhere.

    Raises UserError for arguments of two kinds at once and for unknown names, with the nearest valid choice.
    """
    which = measure if measure_ is None else measure_
    plain = {"radius": radius, "radius_low": radius_low, "radius_high": radius_high, "ratio_low": ratio_low,
             "ratio_high": ratio_high}  # fmt: skip
    given = [name for name, value in plain.items() if value is not None]
    if over != "all" and budget is None:
        raise UserError(f"over={over!r} belongs to a budget: give budget=")
    if region is not None:
        if region != "nowhere" or given or which is not None or budget is not None:
            raise UserError(f"region={region!r} takes no other bound; region='nowhere' leaves the choice to the gate")
        return Nowhere()
    if budget is not None:
        if given or which is None:
            raise UserError("a budget needs a measure and no radius, for example measure='k2', budget=0.02")
        return Budget(_of_ratio(which), budget, over)
    whole = split(which) if isinstance(which, str) else None
    if whole is not None or (isinstance(which, str) and which in BINARY):
        name = f"{whole[0]}_{whole[1].name}" if whole is not None else str(which)
        return _distance(name, radius, radius_low, radius_high, ratio_low, ratio_high, top_k)
    if top_k is not None:
        raise UserError(f"top_k={top_k!r} belongs to a measure topk_*, for example measure='topk_tv'")
    if isinstance(which, str) and which not in MEASURES and ":" not in which and "(" not in which:
        known = [*MEASURES, *(f"{family}(a)" for family in FAMILIES), *BINARY, *NAMES, "package.module:function"]
        raise UserError(f"unknown measure {which!r}; {did_you_mean(which, known)}")
    return _region(which, **plain)  # type: ignore[arg-type]


_region = region
_measure = measure


def _of_ratio(which: Any) -> Measure:
    if isinstance(which, str) and (which in BINARY or split(which) is not None):
        raise UserError(f"a budget is over a measure of the ratio; {which} is not one: take k2, k3, tv, ...")
    return _measure(which)


def _distance(which: str, radius: Any, low: Any, high: Any, ratio_low: Any, ratio_high: Any, top_k: Any) -> Distance:
    if ratio_low is not None or ratio_high is not None:
        raise UserError("a region is either a measure with a radius or ratio_low and ratio_high; give one of the two")
    if radius is not None and (low is not None or high is not None):
        raise UserError("give radius for both sides, or radius_low and radius_high, not both")
    below, above = (radius, radius) if radius is not None else (low, high)
    if below is None and above is None:
        raise UserError(f"measure {which} needs a radius in natural units, for example radius=0.15")
    found = []
    for value in (below, above):
        value = math.inf if value is None else value
        size = number(value)
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not size >= 0.0:
            raise UserError(f"radius={value!r} is not a radius: give a number >= 0")
        found.append(value if isinstance(value, Moving) else float(value) + 0.0)
    return Distance(which, found[0], found[1], top_k)
