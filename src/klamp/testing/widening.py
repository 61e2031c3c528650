"""The laws of regions: a larger radius keeps more, and the bounds are those of the measure (7, 8)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from klamp.binary import BINARY, binary_bounds
from klamp.conditions import Budget, Distance, Nowhere
from klamp.guards import Guard
from klamp.radii import Scaled, number
from klamp.regions import Region
from klamp.testing.court import Trial, law
from klamp.testing.draws import Draw, every_guard
from klamp.testing.rulings import binary, inside_by_bounds, inside_by_measure
from klamp.testing.written import written


@law(7, "a larger fixed radius keeps a superset; an infinite one equals the spec without that guard")
def _wider(trial: Trial) -> int | str:
    guards = [guard for guard in trial.spec.guards if not isinstance(guard.region, Nowhere)]
    limits = [part for part in trial.spec.penalties if _limited(part)]
    if not guards and not limits:
        return "no guard of the spec has a radius" if trial.spec.guards else "the spec has no guard"
    count = 0
    for draw, _ in trial.draws():
        for guard in guards:
            count += _widened(trial, draw, guard)
        for part in limits:
            count += _penalised(trial, draw, part)
    return count


def _limited(part: Any) -> bool:
    """Whether a penalty is on the tokens outside a region."""
    guard = getattr(part, "on", None)
    return isinstance(guard, Guard) and not isinstance(guard.region, Nowhere)


def _penalised(trial: Trial, draw: Draw, part: Any) -> int:
    """The radius of a penalty's guard times 1, 2, 10 and infinity: fewer tokens are penalised, and at last none."""
    others = tuple(other for other in trial.spec.penalties if other != part)
    before, scales = draw.mask, (1.0, 2.0, 10.0, math.inf)
    for scale in scales:
        wide = replace(part, on=replace(part.on, region=wider(part.on.region, scale)))
        alone = trial.outcome(draw, trial.make_objective(replace(trial.spec, penalties=(wide,), name="")))
        now = alone.out.grad_penalty != 0.0
        trial.same(
            "tokens penalised by a wider region alone", draw.having(f"radius times {scale}", {}),
            torch.zeros_like(now), now & ~before,
        )  # fmt: skip
        before = now
    found, without = (
        trial.outcome(draw, trial.make_objective(replace(trial.spec, penalties=penalties, name="")))
        for penalties in ((*others, wide), others)
    )
    trial.same("slope of the penalties without the part", draw, without.out.grad_penalty, found.out.grad_penalty)
    trial.close("loss without the part", draw, without.out.loss, found.out.loss, 1e-15)
    return len(scales)


def _widened(trial: Trial, draw: Draw, guard: Guard) -> int:
    """One guard's radius times 1, 2, 10 and infinity."""
    others = tuple(other for other in trial.spec.guards if other != guard)
    kept, scales = torch.zeros_like(draw.mask), (1.0, 2.0, 10.0, math.inf)
    for scale in scales:
        spec = replace(trial.spec, guards=(*others, replace(guard, region=wider(guard.region, scale))), name="")
        found = trial.outcome(draw, trial.make_objective(spec))
        lost = kept & ~found.out.kept
        trial.same(
            "tokens lost by a wider region", draw.having(f"radius times {scale}", {}), torch.zeros_like(lost), lost
        )
        kept = found.out.kept
    without = trial.outcome(draw, trial.make_objective(replace(trial.spec, guards=others, name="")))
    for name in ("kept", "inside", "grad_policy", "per_token"):
        trial.same(f"{name} without the guard", draw, getattr(without.out, name), getattr(found.out, name))
    trial.same("gradient without the guard", draw, without.grads[0], found.grads[0])
    return len(scales)


def wider(region: Any, scale: float) -> Any:
    """The region with its radii or budget, or its bounds in log space, times ``scale``; a radius that moves is held."""
    if isinstance(region, Budget):
        return replace(region, budget=region.budget * scale if region.budget else 0.0 if scale < math.inf else scale)
    if region.measure is None:
        return _stretched(region, scale)
    below, above = (_longer(radius, scale) for radius in (region.radius_low, region.radius_high))
    return replace(region, radius_low=below, radius_high=above)


def _longer(radius: Any, scale: float) -> Any:
    if isinstance(radius, Scaled) and scale < math.inf:
        return replace(radius, start=radius.start * scale)
    return math.inf if scale == math.inf else float(number(radius)) * scale


def _stretched(region: Region, scale: float) -> Region:
    if scale == 1.0:
        return region
    if scale == math.inf:
        return replace(region, ratio_low=None, ratio_high=None)
    high = None if scale * region.log_high > 700.0 else math.exp(scale * region.log_high)
    return replace(region, ratio_low=math.exp(scale * region.log_low) or None, ratio_high=high)


# --- law 8 ----------------------------------------------------------------------------------------------------


@law(8, "predicate and bounds give the same cuts away from ties")
def _bounds(trial: Trial) -> int | str:
    guards = every_guard(trial.spec)
    intervals = [guard.region for guard in guards if isinstance(guard.region, Region) and not guard.after]
    distances = [guard.region for guard in guards if isinstance(guard.region, Distance)]
    others = [region for region in distances if region.measure in BINARY]
    if not intervals and not others:
        return "no region of the spec has bounds" if guards else "the spec has no guard"
    count = 0
    for index, region in enumerate(intervals):
        where = f"region {index + 1} of {len(intervals)}, x over +-700"
        x = _grid((region.log_low, region.log_high), trial.generator(index))
        bad = (inside_by_measure(region, x) != inside_by_bounds(region, x)) & ~_near_radius(region, x)
        if bool(bad.any()):
            at = float(x[bad][x[bad].abs().argmin()])
            raise trial.violation(f"D(w) <= radius and the bounds disagree at log w = {at!r}", where, (),
                                  f"inside = {at >= region.log_low and at <= region.log_high} by the bounds "
                                  f"[{region.log_low!r}, {region.log_high!r}]", _shown(region, at))  # fmt: skip
        count += x.numel()
    for binary_region in others:
        count += _binary_bounds(trial, binary_region)
    for draw, _ in trial.draws():
        expected, found = written(trial.spec, draw, by_measure=True, tolerance=1e-7), trial.outcome(draw)
        trial.same("kept, by D(w) <= radius", draw, draw.mask & ~expected.cut, found.out.kept, but=expected.ties)
        trial.same("inside, by D(w) <= radius", draw, expected.inside, found.out.inside, but=expected.ties)
        if any(map(_limited, trial.spec.penalties)):
            slope, ties = found.out.grad_penalty, expected.ties
            what = "gradient of the penalties, by D(w) <= radius"
            trial.close(what, draw, expected.slope, slope, 1e-10, 1e-12, but=ties)
        count += 1
    return count


def _binary_bounds(trial: Trial, region: Distance) -> int:
    """The solved bounds of a binary divergence against its definition, at likely and unlikely tokens."""
    count = 0
    for side, radius in ((-1.0, number(region.radius_low)), (1.0, number(region.radius_high))):
        for p in (1e-6, 0.01, 0.3, 0.5, 0.9, 0.999):
            low, high = binary_bounds(region.measure, p, radius)
            x = _grid((low, high), trial.generator(count))
            x = x[(side * x >= 0.0) & (x < -math.log(p) * (1.0 - 1e-9))]  # no probability exceeds 1
            logp = torch.full_like(x, math.log(p))
            distance = binary(region.measure, logp, logp + x)
            inside, bounded = torch.le(distance, radius), (x >= low) & (x <= high)
            near = (distance - radius).abs() <= 1e-7 * radius + 1e-14
            where = f"{region.measure} of a token of probability {p}"
            trial.same(f"D <= {radius} and the bounds [{low}, {high}]", where, inside, bounded, but=near)
            count += x.numel()
    return count


def _shown(region: Region, x: float) -> str:
    if region.measure is None:
        return f"w = {math.exp(x)!r}"
    radii = f"{number(region.radius_low)!r} below, {number(region.radius_high)!r} above"
    return f"D = {float(region.measure.divergence(x))!r}, radius {radii}"


def _grid(bounds: tuple[float, float], generator: torch.Generator) -> Tensor:
    ends = [abs(bound) for bound in bounds if 0.0 < abs(bound) < 700.0]
    noise = torch.randn(200, generator=generator, dtype=torch.float64)
    near = [side * end * torch.linspace(0.0, 3.0, 301, dtype=torch.float64) for end in ends for side in (-1.0, 1.0)]
    return torch.cat([noise, 30.0 * noise, torch.linspace(-700.0, 700.0, 281, dtype=torch.float64), *near])


def _near_radius(region: Region, x: Tensor) -> Tensor:
    near = torch.zeros_like(x, dtype=torch.bool)
    for bound in (region.log_low, region.log_high):
        near = near | ((x - bound).abs() <= 1e-9 * x.abs())
    if region.measure is None:
        return near
    divergence = region.measure.divergence(x)
    for radius in (number(region.radius_low), number(region.radius_high)):
        if radius is not None and radius < math.inf:
            near = near | ((divergence - radius).abs() <= 1e-9 * radius)
    return near
