"""Guards: where a policy gradient is cut. Every guard is the same rule, keep = inside | ~gate.

A guard is ratio x scope x reduce x region x gate x action: which two policies, over what, how far apart they may
be, where the rule applies, and what happens outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from klamp.conditions import Budget, Condition, Distance, Nowhere
from klamp.errors import UserError, check_choice
from klamp.gates import GATES, AnyGate, Gate, PlainGate, SelectingGate, gate
from klamp.radii import Scaled
from klamp.regions import Region

if TYPE_CHECKING:
    from torch import Tensor

    from klamp.batch import Batch

SCOPES = ("token", "segment", "prefix", "suffix", "sequence", "group")
RATIOS = ("new/old", "new/rollout", "old/rollout", "new/ref")
BEFORE = ("mean", "sum")  # of log-ratios, before D
AFTER = ("mean_after", "sum_after", "max_after")  # of D
CUT_VALUES = ("bound", "zero")
ACTIONS = ("zero", "drop", "drop_row", "rollback")


class Verdict(NamedTuple):
    """What a guard says of each token: outside on which side, and whether the rule applies there."""

    outside_low: Tensor
    outside_high: Tensor
    applies: Tensor

    @property
    def cuts(self) -> Tensor:
        return (self.outside_low | self.outside_high) & self.applies


class Settled(NamedTuple):
    """A guard once the state and the statistics of the step are known; ``own``: its reduction over a group."""

    region: Any
    gate: PlainGate
    own: Tensor | None = None


@dataclass(frozen=True)
class Guard:
    """keep = inside | ~gate, inside: D <= radius, for an interval log_low <= x <= log_high, x over ``scope``.

    ``reduce``: the ``mean`` or ``sum`` of log-ratios, from which D is taken, or ``mean_after``, ``sum_after``,
    ``max_after``: of the tokens' D, while side and gate see the token's own log-ratio. ``discount`` ** distance
    weighs a prefix or suffix. ``action`` outside: ``zero`` the gradient, ``drop`` the token from the mean's
    denominator too, ``drop_row`` its response, ``rollback`` g times -``strength``. ``cut_value``: the value of a cut
    token in the loss, A times the nearest ``bound`` (a clip), or ``zero`` (a mask); the gradient is the same
    (theory: pessimistic clip = directional mask). A bound is usual for an interval, zero elsewhere.
    """

    region: Condition
    ratio: str = "new/old"
    scope: str = "token"
    reduce: str = "mean"
    gate: AnyGate = GATES["outward"]
    action: str = "zero"
    cut_value: str | None = None
    strength: float = 0.0
    discount: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate", gate(self.gate))
        if self.cut_value is None:
            object.__setattr__(self, "cut_value", self.usual_cut_value)
        for name, choices in (("ratio", RATIOS), ("scope", SCOPES), ("reduce", BEFORE + AFTER), ("action", ACTIONS),
                              ("cut_value", CUT_VALUES)):  # fmt: skip
            check_choice(name, getattr(self, name), choices)
        check_scope(self)
        self._check_region()
        self._check_action()

    def _check_region(self) -> None:
        region = self.region
        if self.after:
            if isinstance(region, (Budget, Nowhere)) or (isinstance(region, Region) and region.measure is None):
                raise UserError(f"reduce={self.reduce!r} is of divergences: give the guard a measure and a radius")
            if region.radius is None or isinstance(region.radius, Scaled):
                raise UserError(f"reduce={self.reduce!r} needs one radius for both sides, the same for all tokens")
        elif not isinstance(region, Region) and self.scope != "token":
            least = "mean_after" if isinstance(region, Distance) else None
            hint = f"; reduce={least!r} takes the mean of D over the {self.scope}" if least else ""
            raise UserError(f"this region is of single tokens; scope={self.scope!r} cannot be taken before it{hint}")
        if isinstance(region, Budget) and isinstance(self.gate, SelectingGate):
            raise UserError("a budget and a gate that selects would need each other's statistic; use two guards")
        if self.cut_value == "bound" and self.usual_cut_value != "bound":
            raise UserError("cut_value='bound' needs an interval of the ratio; this region has none: use 'zero'")

    def _check_action(self) -> None:
        if self.action == "rollback":
            if isinstance(self.strength, bool) or not isinstance(self.strength, (int, float)) or not self.strength > 0:
                raise UserError(f"action='rollback' needs strength= above 0 (0.3 is usual); got {self.strength!r}")
            if self.cut_value != "bound" or self.strength == math.inf:
                raise UserError("action='rollback' needs an interval, cut_value='bound' and a finite strength")
            object.__setattr__(self, "strength", float(self.strength))
        elif isinstance(self.strength, bool) or self.strength != 0.0:
            raise UserError(f"strength={self.strength!r} belongs to action='rollback'")
        if self.action.startswith("drop") and self.surveyed:
            raise UserError(
                f"action={self.action!r} changes the counts that this guard's statistic is taken of; use 'zero'"
            )

    @property
    def usual_cut_value(self) -> str:
        interval = isinstance(self.region, Region) and self.reduce in BEFORE
        return "bound" if interval and not any(isinstance(r, Scaled) for r in self.region.moves) else "zero"

    @property
    def after(self) -> bool:
        """Whether the reduction is of D rather than of log-ratios."""
        return self.reduce in AFTER

    @cached_property
    def surveyed(self) -> bool:
        """Whether the guard needs a statistic of the whole step."""
        return isinstance(self.region, Budget) or isinstance(self.gate, SelectingGate) or self.scope == "group"

    @property
    def reads_new(self) -> bool:
        """Whether what the whole step must be asked first depends on the new policy."""
        own = self.action.startswith("drop") or isinstance(self.region, Budget) or self.scope == "group"
        return (own and self.ratio.startswith("new/")) or getattr(self.gate, "reads_new", False)

    @property
    def needs(self) -> frozenset[str]:
        return ratio_needs(self.ratio) | scope_needs(self.scope) | self.gate.needs | self.region.needs

    @property
    def traits(self) -> frozenset[str]:
        found = {"selects"} if isinstance(self.region, Nowhere) else set()
        return frozenset(found | ({"pushes_back"} if self.action == "rollback" else set()))

    @property
    def denominator(self) -> str:
        return self.ratio.partition("/")[2]

    def measured(self, batch: Batch) -> Tensor:
        """What is compared with the region: the log-ratio over the scope, or D reduced over it."""
        if not self.after:
            return batch.log_ratio(self.ratio, self.scope, self.reduce, self.discount)
        return batch.reduce(self.distances(batch), self.scope, self.reduce.removesuffix("_after"), self.discount)

    def distances(self, batch: Batch) -> Tensor:
        """D of each token, 0 where masked."""
        assert isinstance(self.region, (Region, Distance))
        return batch.select(self.region.divergence(batch.log_ratio(self.ratio), batch, self.denominator))

    def judge(self, advantages: Tensor, batch: Batch, settled: Settled | None = None) -> Verdict:
        """The verdict on each token; ``settled`` where state or statistics of the step have a say."""
        if settled is None:
            assert isinstance(self.gate, PlainGate)
            settled = Settled(self.region, self.gate)
        region, where, own = settled
        own = self.measured(batch) if own is None else own
        if not self.after:
            low, high = region.outside(own, batch, self.denominator)
            return Verdict(low, high, where.predicate(own, advantages, batch))
        x, far = batch.log_ratio(self.ratio), own > region.radius
        return Verdict(far & (x < 0), far & (x >= 0), where.predicate(x, advantages, batch))


def check_scope(part: Any) -> None:
    """Refuse a reduction over one token, and a discount where there is no distance."""
    if part.scope == "token" and part.reduce != "mean":
        raise UserError(f"reduce={part.reduce!r} needs scope='sequence' or another: one token has nothing to reduce")
    number = isinstance(part.discount, (int, float)) and not isinstance(part.discount, bool)
    if not number or not 0.0 < part.discount <= 1.0:
        raise UserError(f"discount={part.discount!r} must be above 0 and at most 1")
    object.__setattr__(part, "discount", float(part.discount))
    if part.discount != 1.0 and (part.scope not in ("prefix", "suffix") or part.reduce == "max_after"):
        raise UserError("discount= weighs the mean or sum over scope='prefix' or 'suffix'")


def ratio_needs(ratio: str) -> frozenset[str]:
    """The optional batch fields that a ratio reads."""
    return frozenset(f"logp_{role}" for role in ratio.split("/") if role in ("rollout", "ref"))


def scope_needs(scope: str) -> frozenset[str]:
    return frozenset({scope} if scope in ("segment", "group") else ())


__all__ = ["GATES", "Gate", "Guard", "Settled", "Verdict", "gate"]
