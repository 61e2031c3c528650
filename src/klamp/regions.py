"""Intervals: which log-ratios a measure and a radius allow, as two numbers x_low <= x <= x_high.

Every measure decreases to its minimum at x = 0 and increases after it, so {D <= radius} is an interval around
w = 1. The bounds are solved once, in log space, when the region is built; a token costs two comparisons.
Regions that need more than w are in ``klamp.conditions``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from klamp.errors import UserError, did_you_mean
from klamp.measures import MEASURES, Measure, Phi, measure, power
from klamp.radii import Moving, Scaled, moved, number, per_token
from klamp.solver import EPSILON, MAX, crossing, log_of

if TYPE_CHECKING:
    from torch import Tensor

    from klamp.batch import Batch

Radius = float | Moving


class Coordinates(NamedTuple):
    """The one power-family measure and radius with a given two-sided region: {D_power(a) <= radius}."""

    a: float
    radius: float


@dataclass(frozen=True)
class Region:
    """The log-ratios that a guard lets pass: a measure with a radius per side, or absolute ratio bounds.

    ``log_low``, ``log_high``: bounds of x = log w, -inf and inf where there is none; ``low``, ``high``: the same
    as ratios (0 and inf where there is none). Radii are in units of the normalised measure. Of a radius that moves
    (``klamp.radii``) the bounds are those before the first step; ``now(state, key)`` has those of a step.
    """

    measure: Measure | None = None
    radius_low: Radius | None = None
    radius_high: Radius | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None

    @cached_property
    def log_low(self) -> float:
        if self.measure is None:
            return -math.inf if not self.ratio_low else math.log(self.ratio_low)
        assert self.radius_low is not None
        return -_bound(self.measure, -1.0, number(self.radius_low))

    @cached_property
    def log_high(self) -> float:
        if self.measure is None:
            return math.inf if self.ratio_high in (None, math.inf) else math.log(self.ratio_high or 1.0)
        assert self.radius_high is not None
        return _bound(self.measure, 1.0, number(self.radius_high))

    @property
    def low(self) -> float:
        return self.ratio_low or 0.0 if self.measure is None else math.exp(self.log_low)

    @property
    def high(self) -> float:
        if self.measure is None:
            return math.inf if self.ratio_high is None else self.ratio_high
        return math.exp(self.log_high) if self.log_high < math.log(MAX) else math.inf

    @property
    def radius(self) -> Radius | None:
        """The radius, where both sides share one."""
        return self.radius_low if self.radius_low == self.radius_high else None

    @cached_property
    def coordinates(self) -> Coordinates | None:
        """(a, radius) of the power family with this region; None where a side has no bound or is {1}."""
        if self.measure is not None and self.measure.power is not None and self.radius is not None:
            radius = float(number(self.radius))
            two_sided = math.isfinite(self.log_low) and math.isfinite(self.log_high) and radius > 0.0
            return Coordinates(self.measure.power, radius) if two_sided else None
        return coordinates(self.log_low, self.log_high)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the bounds must know: missing sides and measures that saturate."""
        found = []
        if self.log_low == -math.inf:
            found.append("no lower bound: every w below 1 is inside")
        if self.log_high == math.inf:
            found.append("no upper bound: every w above 1 is inside")
        if self.measure is not None:
            for side, sign in (("low", -1.0), ("high", 1.0)):
                edge = saturation(self.measure, sign)
                if edge is not None:
                    w = math.exp(sign * edge)
                    found.append(f"{self.measure} saturates on the {side} side: no radius reaches beyond w = {w:.6g}")
        return tuple(found)

    @property
    def needs(self) -> frozenset[str]:
        radii = (self.radius_low, self.radius_high)
        return frozenset().union(*(radius.needs for radius in radii if isinstance(radius, Scaled)))

    @property
    def moves(self) -> tuple[Moving, ...]:
        """The radii that differ by step or token."""
        return tuple(
            dict.fromkeys(radius for radius in (self.radius_low, self.radius_high) if isinstance(radius, Moving))
        )

    def now(self, state: dict[str, float], key: str) -> Region:
        """The region of a step, given the objective's state."""
        if not self.moves:
            return self
        low, high = (moved(radius, state, f"{key}.{side}") for side, radius in
                     (("low", self.radius_low), ("high", self.radius_high)))  # fmt: skip
        return Region(self.measure, low, high)

    def outside(self, log_ratio: Tensor, batch: Batch, denominator: str) -> tuple[Tensor, Tensor]:
        """(below the region, above it) for log-ratios that broadcast to [B, T]."""
        if any(isinstance(radius, Scaled) for radius in self.moves):
            below, above = (per_token(radius, batch, denominator) for radius in (self.radius_low, self.radius_high))
            distance = self.divergence(log_ratio, batch, denominator)
            return (log_ratio < 0) & (distance > below), (log_ratio > 0) & (distance > above)
        return log_ratio < self.log_low, log_ratio > self.log_high

    def divergence(self, log_ratio: Tensor, batch: Batch, denominator: str) -> Tensor:
        """D of each token, float64."""
        assert self.measure is not None
        found: Tensor = self.measure.divergence(log_ratio.double())
        return found

    def arguments(self) -> dict[str, object]:
        """The keyword arguments of ``region`` that give this value back."""
        if self.measure is None:
            pairs = {"ratio_low": self.ratio_low, "ratio_high": self.ratio_high}
            return {name: bound for name, bound in pairs.items() if bound is not None}
        if self.radius is not None:
            return {"measure": str(self.measure), "radius": self.radius}
        return {"measure": str(self.measure), "radius_low": self.radius_low, "radius_high": self.radius_high}


def region(
    measure_: str | Measure | Phi | None = None,
    radius: Radius | None = None,
    *,
    measure: str | Measure | Phi | None = None,
    radius_low: Radius | None = None,
    radius_high: Radius | None = None,
    ratio_low: float | None = None,
    ratio_high: float | None = None,
) -> Region:
    """The region {D(w) <= radius} of a measure, or the interval [ratio_low, ratio_high] of the ratio itself.

    radius 0 is the region {1}; infinity is no bound; ``linear(...)``, ``cosine(...)``, ``adaptive(...)`` and
    ``scaled(...)`` of ``klamp.radii`` are radii that move. Raises UserError on a negative radius, NaN, an interval
    that is empty or does not contain w = 1, and on arguments of both kinds at once.
    """
    which = measure if measure_ is None else measure_
    if which is None:
        if radius is not None or radius_low is not None or radius_high is not None:
            raise UserError(f"a radius needs a measure: give measure= one of {', '.join(MEASURES)}, power(a), renyi(a)")
        return _interval(ratio_low, ratio_high)
    if ratio_low is not None or ratio_high is not None:
        raise UserError("a region is either a measure with a radius or ratio_low and ratio_high; give one of the two")
    if radius is not None and (radius_low is not None or radius_high is not None):
        raise UserError("give radius for both sides, or radius_low and radius_high, not both")
    low, high = (radius, radius) if radius is not None else (radius_low, radius_high)
    if low is None and high is None:
        raise UserError(f"measure {which} needs a radius, for example radius=0.02")
    found = _checked(_resolve(which))
    return Region(
        found,
        _radius("radius_low" if radius is None else "radius", math.inf if low is None else low),
        _radius("radius_high" if radius is None else "radius", math.inf if high is None else high),
    )


def _resolve(which: str | Measure | Phi) -> Measure:
    return measure(which)


def _radius(name: str, value: Any) -> Any:
    if isinstance(value, Moving):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0.0:
        raise UserError(f"{name}={value!r} is not a radius: give a number >= 0 (0.02 is about a ratio of 1 +- 0.2)")
    return float(value) + 0.0


def _interval(ratio_low: float | None, ratio_high: float | None) -> Region:
    for name, value in (("ratio_low", ratio_low), ("ratio_high", ratio_high)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value)):
            raise UserError(f"{name}={value!r} is not a ratio")
    low, high = float(ratio_low or 0.0), math.inf if ratio_high is None else float(ratio_high)
    if low > high:
        raise UserError(f"the interval [{low!r}, {high!r}] is empty: ratio_low must not exceed ratio_high")
    if not 0.0 <= low <= 1.0 <= high:
        nearest = f"[{min(max(low, 0.0), 1.0)!r}, {max(high, 1.0)!r}]"
        hint = f"; bounds are absolute ratios: for 1 + {high!r} write {1.0 + high!r}" if 0.0 < high < 1.0 else ""
        raise UserError(
            f"the interval [{low!r}, {high!r}] does not contain w = 1; the nearest that does is {nearest}{hint}"
        )
    return Region(ratio_low=low or None, ratio_high=None if high == math.inf else high)


def _checked(found: Measure) -> Measure:
    """Refuse a user's function that is not a divergence: phi(0) = 0, and growth away from 0."""
    if found.name in MEASURES and not found.equation:
        raise UserError(
            f"the name {found.name!r} belongs to a measure of the catalogue; leave name= out, or give another"
        )
    if found.name in MEASURES or found.power is not None or found.name.startswith("renyi("):
        return found
    steps = (1e-3, 0.1, 1.0, 3.0, 10.0, 100.0, MAX)
    try:
        values = [float(found.divergence(x)) for x in (0.0, *(-step for step in steps), *steps)]
    except Exception as error:  # whatever a user's function raises
        raise UserError(
            f"measure {found} cannot be evaluated on arrays of log-ratios of any size ({type(error).__name__}: {error}); "
            "write it with NumPy's functions, or torch's"
        ) from error
    zero, low, high = values[0], values[1 : 1 + len(steps)], values[1 + len(steps) :]
    if not abs(zero) <= 1e-12:
        raise UserError(f"measure {found} is {zero!r} at w = 1; a divergence is 0 there")
    grows = [0.0 < side[0] < side[1] < side[2] and side[2:] == sorted(side[2:]) for side in (low, high)]
    if not all(grows) or any(math.isnan(value) for value in values):
        raise UserError(f"measure {found} does not grow away from w = 1, so no radius gives an interval")
    return found


# --- bounds ---------------------------------------------------------------------------------------------------


def _bound(found: Measure, sign: float, radius: float) -> float:
    """|x| at which phi(sign |x|) = radius; inf where the measure never exceeds the radius on that side."""
    if radius in (0.0, math.inf):
        return radius
    if float(found.divergence(sign * MAX)) <= radius:
        return math.inf

    def excess(x: float) -> float:
        value = float(found.divergence(sign * x))
        return -math.inf if not value > 0.0 else log_of(value / radius)

    scale = math.sqrt(2.0) * math.sqrt(radius)
    return crossing(excess, scale if scale < 1.0 else 1.0)


def saturation(found: Measure, sign: float) -> float | None:
    """|x| from which the measure is infinite, where that is a property of it and not of the range of doubles."""
    if float(found.divergence(sign * 300.0)) < math.inf:
        return None
    edge = crossing(lambda x: -1.0 if math.isfinite(float(found.divergence(sign * x))) else 1.0, 1.0)
    # Before a true asymptote the value stays small to the last double; before an overflow it is near the largest one.
    return edge if float(found.divergence(sign * math.nextafter(edge, 0.0) * (1.0 - 4.0 * EPSILON))) < 1e100 else None


# --- coordinates and calibration ------------------------------------------------------------------------------


def coordinates(log_low: float, log_high: float) -> Coordinates | None:
    """The unique (a, radius) with {power(a) <= radius} = [e^log_low, e^log_high] (theorem 1: existence by
    monotonicity of f_a(u) - f_a(l) in a); None unless log_low < 0 < log_high are finite."""
    if not (-math.inf < log_low < 0.0 < log_high < math.inf):
        return None

    def excess(a: float) -> float:
        up, down = float(power(a).divergence(log_high)), float(power(a).divergence(log_low))
        return log_of(up / down) if down > 0.0 else math.inf

    if excess(0.0) == 0.0:
        return Coordinates(0.0, float(power(0.0).divergence(log_high)))
    sign = 1.0 if excess(0.0) < 0.0 else -1.0
    a = sign * crossing(lambda t: sign * excess(sign * t), 1.0)
    radius = float(power(a).divergence(log_high)) if math.isfinite(a) else math.inf
    return Coordinates(a, radius) if 0.0 < radius < math.inf else None


def _log_width(r: Region) -> float:
    return r.log_high - r.log_low


def _lin_width(r: Region) -> float:
    return math.expm1(r.log_high) - math.expm1(r.log_low)


def _worst_case_tv(r: Region) -> float:
    """The largest TV(old, new) of two policies whose ratio stays inside: (u-1)(1-l)/(u-l)."""
    up, down = math.expm1(r.log_high), -math.expm1(r.log_low)
    return down if up == math.inf else up * down / (up + down)


def _lognormal_mass(r: Region, sigma: float) -> float:
    """Probability inside for log w ~ N(-sigma^2/2, sigma^2), as an increasing function: -log(outside)."""
    scale = sigma * math.sqrt(2.0)
    outside = math.erfc((r.log_high + 0.5 * sigma**2) / scale) + math.erfc(-(r.log_low + 0.5 * sigma**2) / scale)
    return log_of(2.0 / outside) if outside > 0.0 else math.inf


_SIZES: dict[str, Callable[[Region], float]] = {
    "log_width": _log_width,
    "lin_width": _lin_width,
    "worst_case_tv": _worst_case_tv,
}
CALIBRATION_RULES = ("upper", "lower", "inscribed", "circumscribed", *_SIZES, "lognormal_mass")


def calibrate(
    measure_: str | Measure | Phi, ratio_low: float, ratio_high: float, rule: str = "log_width", *, sigma: float = 0.1
) -> float:
    """The (normalised) radius at which a measure's region matches the clip [ratio_low, ratio_high].

    Rules: ``upper``/``lower`` share that bound; ``inscribed``/``circumscribed`` are the smaller and larger of the
    two; ``log_width``, ``lin_width``, ``worst_case_tv`` have equal log(u/l), u - l, (u-1)(1-l)/(u-l);
    ``lognormal_mass`` has equal probability outside for log w ~ N(-sigma^2/2, sigma^2).
    """
    found, target = measure(measure_), region(ratio_low=ratio_low, ratio_high=ratio_high)
    if not (0.0 < target.low < 1.0 < target.high < math.inf):
        raise UserError(f"calibration needs a two-sided clip, 0 < low < 1 < high; got [{ratio_low!r}, {ratio_high!r}]")
    if isinstance(sigma, bool) or not isinstance(sigma, (int, float)) or not 0.0 < sigma < 10.0:
        raise UserError(f"sigma={sigma!r} must be a standard deviation of log w above 0 and below 10")
    upper, lower = float(found.divergence(target.log_high)), float(found.divergence(target.log_low))
    ends = {"upper": upper, "lower": lower, "inscribed": min(upper, lower), "circumscribed": max(upper, lower)}
    if not (upper > 0.0 and lower > 0.0):
        raise UserError(f"{found} is signed: it bounds one side only and matches no two-sided clip")
    if rule in ends:
        return ends[rule]
    if rule == "lognormal_mass":
        size: Callable[[Region], float] = lambda r: _lognormal_mass(r, sigma)  # noqa: E731
    elif rule in _SIZES:
        size = _SIZES[rule]
    else:
        raise UserError(f"unknown calibration rule {rule!r}; {did_you_mean(rule, CALIBRATION_RULES)}")
    goal = size(target)
    return crossing(lambda radius: log_of(size(region(found, radius)) / goal), 0.5 * (upper + lower))
