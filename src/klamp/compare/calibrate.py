"""Calibration: a spec with its radius changed until its trust region is as large as the reference's, by one rule.

Comparing measures at radii of their own compares sizes, not shapes: the size comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from klamp.compare.respell import respelled, with_guard
from klamp.compare.specs import labels
from klamp.conditions import Budget, Distance
from klamp.errors import UserError, check_choice
from klamp.guards import Guard
from klamp.regions import Region
from klamp.solver import crossing, log_of
from klamp.spec import Spec, part_text

if TYPE_CHECKING:
    from klamp.batch import Batch

RULES: dict[str, str] = {
    "upper": "the upper bound of w",
    "lower": "the lower bound of w",
    "log_width": "log(upper bound / lower bound)",
    "worst_tv": "the largest TV(old, new) of policies whose ratios stay inside, (u - 1)(1 - l) / (u - l)",
    "removed": "guard/removed_active_share on the given batches: tokens whose gradient the guards remove, of those with A != 0",
}
_SAME = 1e-12  # relative: a factor this near 1 changes nothing
_WIDEST = 1e12  # by which a radius is scaled at most in search of a share


@dataclass(frozen=True)
class Calibrated:
    """A spec matched to a reference.

    ``spec`` parses back from its text; it is the given one where ``note`` says why nothing was changed. ``factor``
    multiplied the radius (both radii of two; of ratio bounds, their logarithms), ``radius_before`` and ``radius_after``
    are numbers where the guard has one radius, or a budget. ``reference``, ``before`` and ``after``: the rule's quantity of the
    reference, of the spec as it was, and of ``spec``; None where it has none.
    """

    spec: Spec
    how: str
    factor: float = 1.0
    radius_before: float | None = None
    radius_after: float | None = None
    reference: float | None = None
    before: float | None = None
    after: float | None = None
    note: str = ""

    @property
    def changed(self) -> bool:
        return self.factor != 1.0


class _Impossible(Exception):
    """Why a spec stays as it is."""


def calibrate(reference: Spec, spec: Spec, how: str, batches: Sequence[Batch] | None = None) -> Calibrated:
    """``spec`` with the radius at which its region is as large as the reference's, by one of ``RULES``.

    By a bound or a width a spec can be matched if it has one interval of a fixed radius on tokens' ratios new/...;
    corrections on old/rollout stay as they are. By ``removed`` any fixed radius can, over a response too; it is the
    share over ``batches``, one per optimizer step, each evaluated as it is. Raises UserError for an unknown rule, and
    for ``removed`` without batches.
    """
    check_choice("how", how, tuple(RULES))
    if how == "removed" and not batches:
        raise UserError("how='removed' is measured: give batches, for example diff.recorded_steps(run / 'tokens')")
    try:
        return _by_share(reference, spec, list(batches or ())) if how == "removed" else _by_size(reference, spec, how)
    except _Impossible as reason:
        return Calibrated(spec, how, note=str(reason))


def _short(spec: Spec) -> str:
    return labels([spec])[0]


# --- by bounds ------------------------------------------------------------------------------------------------

Interval = tuple[float, float]  # of log w


def _size(how: str, bounds: Interval) -> float:
    """The size of an interval by a rule, 0 for {1}, increasing with its bounds."""
    low, high = bounds
    if how in ("upper", "lower"):
        return high if how == "upper" else -low
    return high - low if how == "log_width" else _worst_tv(low, high)


def _worst_tv(low: float, high: float) -> float:
    """(u - 1)(1 - l) / (u - l), for bounds of any size."""
    down, up = -math.expm1(low), math.expm1(min(high, 700.0))
    if high > 700.0:
        return down
    return up * down / (up + down) if up + down > 0.0 else 0.0


def _bounds(guard: Guard) -> Interval:
    assert isinstance(guard.region, Region)
    return guard.region.log_low, guard.region.log_high


def _reported(how: str, region: Region) -> float:
    """The quantity as a reader knows it: bounds as ratios."""
    if how in ("upper", "lower"):
        return region.high if how == "upper" else region.low
    return _size(how, (region.log_low, region.log_high))


def _by_size(reference: Spec, spec: Spec, how: str) -> Calibrated:
    mine = _guard_of(spec, share=False)
    try:
        other = _guard_of(reference, share=False)
    except _Impossible as reason:
        raise _Impossible(f"the reference has no interval to match: {reason}") from None
    assert isinstance(mine.region, Region)
    assert isinstance(other.region, Region)
    known = {"reference": _reported(how, other.region), "before": _reported(how, mine.region)}
    note = "" if mine.ratio == other.ratio else f"its ratio is {mine.ratio}, the reference's {other.ratio}"
    try:
        factor = _factor(mine.region, other.region, how)
    except _Impossible as reason:
        return _unchanged(spec, mine, how, known, f"{_short(spec)}: {reason}")
    if abs(factor - 1.0) <= _SAME:
        return _unchanged(spec, mine, how, known, "matches the reference already")
    wanted = replace(mine, region=_exact(_scaled_region(mine.region, factor), mine.region, other.region, how))
    found, now = respelled(spec, mine, wanted)
    assert isinstance(now.region, Region)
    after = _reported(how, now.region)
    return Calibrated(found, how, factor, _radius(mine), _radius(now), **known, after=after, note=note)


def _exact(scaled: Region, mine: Region, other: Region, how: str) -> Region:
    """The scaled region, its matched side in closed form: the factor's rounding may be an ulp off."""
    if how not in ("upper", "lower"):
        return scaled
    if mine.measure is None:
        return replace(scaled, ratio_high=other.high) if how == "upper" else replace(scaled, ratio_low=other.low)
    radius = float(mine.measure.divergence(other.log_high if how == "upper" else other.log_low))
    if mine.radius is not None:
        return Region(mine.measure, radius, radius)
    return replace(scaled, radius_high=radius) if how == "upper" else replace(scaled, radius_low=radius)


def _unchanged(spec: Spec, guard: Guard, how: str, known: dict[str, float], note: str) -> Calibrated:
    radius = _radius(guard)
    return Calibrated(spec, how, 1.0, radius, radius, **known, after=known["before"], note=note)


def _factor(mine: Region, other: Region, how: str) -> float:
    """What multiplies the radii, or the logarithms of ratio bounds."""
    goal = _size(how, (other.log_low, other.log_high))
    size = _size(how, (mine.log_low, mine.log_high))
    if goal == math.inf or (how == "worst_tv" and goal == 1.0):
        raise _Impossible("the reference has no bound there: nothing to match")
    if size == goal:
        return 1.0
    if mine.measure is None:
        if not 0.0 < size < math.inf or (how == "worst_tv" and size == 1.0):
            raise _Impossible("no factor moves a bound that is not there, or is w = 1")
        if how != "worst_tv" or goal == 0.0:
            return goal / size
        low, high = mine.log_low, mine.log_high
        return _reached(lambda f: _worst_tv(f * low, f * high), goal, "its ratio bounds")
    radii: tuple[Any, Any] = (mine.radius_low, mine.radius_high)
    if how in ("upper", "lower"):
        radius, to = (radii[1], other.log_high) if how == "upper" else (radii[0], other.log_low)
        wanted = float(mine.measure.divergence(to))
        if radius in (0.0, math.inf) or wanted < 0.0:
            raise _Impossible(f"no factor of its radius moves the {how} bound")
        if wanted == math.inf:
            raise _Impossible(_saturated(mine, how))
        return wanted / float(radius)
    if not any(0.0 < radius < math.inf for radius in radii):
        raise _Impossible("no factor moves a radius of 0 or infinity")
    if goal == 0.0:
        return 0.0

    def at(factor: float) -> float:
        wide = _scaled_region(mine, factor)
        return _size(how, (wide.log_low, wide.log_high))

    return _reached(at, goal, _saturated(mine, how))


def _reached(size: Callable[[float], float], goal: float, otherwise: str) -> float:
    """The factor at which an increasing size is the goal; otherwise says why there is none."""
    factor = crossing(lambda f: log_of(size(f) / goal), 1.0)
    if not 0.0 < factor < math.inf or not abs(size(factor) / goal - 1.0) <= 1e-9:
        raise _Impossible(otherwise)
    return factor


def _saturated(region: Region, how: str) -> str:
    """The nearest that a measure's bounds come to one that no radius reaches."""
    widest = Region(region.measure, *(1e300 if radius else 0.0 for radius in (region.radius_low, region.radius_high)))
    if how in ("upper", "lower"):
        return f"{region.measure} saturates: the {how} bound comes no nearer than {_reported(how, widest):.6g}"
    most = _reported(how, widest)
    if most == math.inf:
        return f"{region.measure} has a side without a bound, so it has no width"
    return f"{region.measure} saturates: {RULES[how]} stays below {most:.6g}"


# --- by the share removed -------------------------------------------------------------------------------------


def _by_share(reference: Spec, spec: Spec, batches: list[Batch]) -> Calibrated:
    how, mine = "removed", _guard_of(spec, share=True)
    try:
        wanted, active = _removed(reference, batches)
        before, _ = _removed(spec, batches)
    except UserError as error:
        raise _Impossible(f"it cannot be measured on these batches: {error}") from error
    if not active:
        raise _Impossible("no token of these batches has an advantage other than 0: nothing to measure")
    known = {"reference": wanted / active, "before": before / active}
    if before == wanted:
        return _unchanged(spec, mine, how, known, "matches the reference already")
    if not wanted:
        return _unchanged(
            spec, mine, how, known, "the reference removes nothing on these batches: every radius large enough matches"
        )
    counts: dict[float, int] = {1.0: before}

    def count(factor: float) -> int:
        if factor not in counts:
            counts[factor] = _removed(with_guard(spec, mine, _scaled(mine, factor)), batches)[0]
        return counts[factor]

    narrow, wide = _bracket(count, wanted)
    if narrow is None or wide is None:
        nearest = count(1.0 / _WIDEST if narrow is None else _WIDEST) / active
        side = "more" if narrow is None else "less"
        note = (
            f"no radius of {_short(spec)} removes {wanted / active:.6g} of the tokens: none {side} than {nearest:.6g}"
        )
        return _unchanged(spec, mine, how, known, note)
    factor = _nearest(count, wanted, narrow, wide)
    found, now = respelled(spec, mine, _scaled(mine, factor))
    after = _removed(found, batches)[0]
    note = "" if after == wanted else f"nearest: {after} of {active} tokens, the reference removes {wanted}"
    return Calibrated(found, how, factor, _radius(mine), _radius(now), **known, after=after / active, note=note)


def _bracket(count: Callable[[float], int], wanted: int) -> tuple[float | None, float | None]:
    """Factors that remove at least and at most as many tokens as wanted; None on a side that has none."""
    narrow = wide = 1.0
    while count(narrow) < wanted:
        if narrow < 1.0 / _WIDEST:
            return None, wide
        narrow, wide = narrow / 4.0, narrow
    while count(wide) > wanted:
        if wide > _WIDEST:
            return narrow, None
        narrow, wide = wide, wide * 4.0
    return narrow, wide


def _nearest(count: Callable[[float], int], wanted: int, narrow: float, wide: float) -> float:
    """The factor whose count is nearest to the one wanted, in the middle of those that have it."""

    def edge(least: int) -> tuple[float, float]:
        """Neighbouring factors: the first removes at least so many tokens, the second fewer."""
        low, high = narrow, wide * 4.0
        for _ in range(60):
            middle = math.sqrt(low * high)
            if not low < middle < high or high / low < 1.0 + 1e-9:
                break
            low, high = (middle, high) if count(middle) >= least else (low, middle)
        return low, high

    more, fewer = edge(wanted)
    best = min(more, fewer, key=lambda factor: abs(count(factor) - wanted))
    first = edge(count(best) + 1)[1] if count(narrow) > count(best) else narrow
    last = edge(count(best))[0]
    return math.sqrt(first * last) if first <= last and count(math.sqrt(first * last)) == count(best) else best


def _removed(spec: Spec, batches: Sequence[Batch]) -> tuple[int, int]:
    """(tokens whose gradient the guards remove, tokens with A != 0), each batch a whole step in the first state.

    The same tokens as in the objective's metric, but no weight is evaluated that could overflow in a wide region.
    """
    import torch

    from klamp.objective import Objective
    from klamp.survey import Moment, judge, signal

    alone = Spec(spec.guards)  # no mean, no weights: neither has a say
    objective = Objective(alone, diagnostics=False)
    state = objective.init()
    removed = active = 0
    for batch in batches:
        alone.require(batch.offers, "a batch")
        moment = Moment(objective.stats(batch, state), state)
        advantages = signal(batch)
        live = batch.mask & (advantages != 0)
        cut = torch.zeros_like(batch.mask)
        for index, guard in enumerate(alone.guards):
            found = judge(f"guard {index}", guard, batch, advantages, moment).cuts.expand(batch.shape) & batch.mask
            cut |= batch.sequence_sum(found) > 0 if guard.action == "drop_row" else found
        removed, active = removed + int((cut & live).sum()), active + int(live.sum())
    return removed, active


# --- the guard that is scaled, and its text -------------------------------------------------------------------


def _guard_of(spec: Spec, share: bool) -> Guard:
    """The one guard whose radius is changed, of those on a ratio of the new policy."""
    name = _short(spec)
    if not spec.guards:
        raise _Impossible(f"{name} has no guard: nothing to match")
    policy = [guard for guard in spec.guards if guard.ratio.startswith("new/")]
    if not policy:
        raise _Impossible(f"{name} guards only {spec.guards[0].ratio}, which no update moves: nothing to match")
    kinds: tuple[type, ...] = (Region, Distance, Budget) if share else (Region,)
    sized = [guard for guard in policy if isinstance(guard.region, kinds)]
    if not sized:
        which = "no radius to change" if share else "no interval of the ratio; the rule removed may match it"
        raise _Impossible(f"{name} has {which}")
    if len(sized) > 1:
        raise _Impossible(f"{name} has {len(sized)} guards with a region: nothing says which one to change")
    (guard,) = sized
    if guard.region.moves:
        raise _Impossible(f"{name} has a radius that moves, {part_text(guard.region.moves[0])}: no one size to match")
    if not share and (guard.scope != "token" or guard.after):
        raise _Impossible(
            f"{name} bounds the {guard.reduce.removesuffix('_after')} over a {guard.scope}, in other units than a token's "
            "ratio; the rule removed may match it"
        )
    return guard


def _scaled(guard: Guard, factor: float) -> Guard:
    """The guard with its radii times a factor; of ratio bounds, their logarithms."""
    region = guard.region
    if isinstance(region, Budget):
        return replace(guard, region=replace(region, budget=region.budget * factor))
    if isinstance(region, Distance):
        low, high = (_times(radius, factor) for radius in (region.radius_low, region.radius_high))
        return replace(guard, region=replace(region, radius_low=low, radius_high=high))
    assert isinstance(region, Region)
    return replace(guard, region=_scaled_region(region, factor))


def _scaled_region(region: Region, factor: float) -> Region:
    if region.measure is not None:
        return Region(region.measure, _times(region.radius_low, factor), _times(region.radius_high, factor))
    low = math.exp(factor * region.log_low) if region.ratio_low else None
    high = math.exp(min(factor * region.log_high, 700.0)) if region.log_high < math.inf else None
    return Region(ratio_low=low or None, ratio_high=high)


def _times(radius: Any, factor: float) -> float:
    return math.inf if radius == math.inf else float(radius) * factor


def _radius(guard: Guard) -> float | None:
    region = guard.region
    if isinstance(region, Budget):
        return region.budget
    radius = getattr(region, "radius", None)
    return None if radius is None else float(radius)


__all__ = ["RULES", "Calibrated", "calibrate"]
