"""What guards decide, written from their definitions: regions, gates, budgets and selections, with plain loops.

Nothing here calls the code that the objective decides with, but for the solved bounds of an interval (law 8 compares
them with the measure), measures and gates of a user's own, and the numbers of the lottery.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.binary import BINARY
from klamp.conditions import Budget, Distance, Nowhere
from klamp.gates import CovarianceTop, CovarianceWindow, EntropyBelow, Likely, Ring
from klamp.guards import Guard
from klamp.measures import Measure
from klamp.radii import Adaptive, Cosine, Linear, Scaled, number
from klamp.regions import Region
from klamp.testing.live import LiveBatch

State = dict[str, float]


class Ruling(NamedTuple):
    """``cut``: whose gradient the guard takes (or turns); ``inside`` its region; ``ties``: too near for a verdict.

    ``dropped``: out of the mean as well. ``low``, ``high``: the bounds of the ratio, where the region is an interval.
    """

    cut: Tensor
    inside: Tensor
    ties: Tensor
    dropped: Tensor
    low: float
    high: float


class Setting(NamedTuple):
    """How to look: ``by_measure``, D <= radius rather than two bounds; ``tolerance`` of a tie, relative."""

    state: State
    by_measure: bool = False
    tolerance: float = 1e-9


class Where(NamedTuple):
    """Tokens, and those of which it is not certain."""

    found: Tensor
    ties: Tensor


def ruling(key: str, guard: Guard, batch: LiveBatch, setting: Setting) -> Ruling:
    """The verdict of one guard on every token; ``key``: its name in the objective's state."""
    own, region = measured(guard, batch).detach(), now(guard.region, setting.state, key)
    token = batch.log_ratio(guard.ratio).detach()
    seen = token if guard.after else own
    gate = applies(guard.gate, seen, batch, setting)
    if isinstance(region, Nowhere):
        outside = Where(batch.mask, torch.zeros_like(batch.mask))
    elif isinstance(region, Budget):
        outside = beyond_budget(region, own, gate, batch, setting.tolerance)
    elif guard.after:
        outside = _beyond(own, torch.full_like(own, float(region.radius)), 0.0 * own, setting.tolerance)
    else:
        outside = _outside(guard, region, own, batch, setting)
    cut = outside.found & gate.found & batch.mask
    ties = (outside.ties & (gate.found | gate.ties) | gate.ties & (outside.found | outside.ties)) & batch.mask
    inside = ~outside.found & batch.mask
    if guard.action == "drop_row":
        for cell in batch.cells("sequence"):
            if bool(cut.reshape(-1)[cell].any()):
                cut = _including(cut, cell)
            if bool(ties.reshape(-1)[cell].any()):
                ties = _including(ties, cell)
    if guard.action.startswith("drop") and bool(ties.any()):
        ties = batch.mask  # every token's weight in the mean depends on it
    unsure = ties | (outside.ties & batch.mask)
    dropped = cut if guard.action.startswith("drop") else torch.zeros_like(cut)
    low, high = ends(region) if isinstance(region, Region) else (0.0, math.inf)
    return Ruling(cut, inside, unsure, dropped, low, high)


def _including(flags: Tensor, cell: list[int]) -> Tensor:
    flat = flags.reshape(-1).clone()
    flat[cell] = True
    return flat.reshape(flags.shape)


def ends(region: Region) -> tuple[float, float]:
    """The bounds as ratios."""
    return math.exp(region.log_low), math.exp(region.log_high) if region.log_high < 709.0 else math.inf


# --- regions --------------------------------------------------------------------------------------------------


def now(region: Any, state: State, key: str) -> Any:
    """The region with the radii of this step as numbers; one per token stays as it is."""
    if not region.moves:
        return region
    low, high = (_moved(getattr(region, f"radius_{side}"), state, f"{key}.{side}") for side in ("low", "high"))
    if isinstance(region, Distance):
        return dataclasses.replace(region, radius_low=low, radius_high=high)
    return type(region)(region.measure, low, high)


def _moved(radius: Any, state: State, key: str) -> Any:
    if isinstance(radius, (Linear, Cosine)):
        done = min(state.get("step", 0.0) / radius.steps, 1.0)
        if isinstance(radius, Cosine):
            done = (1.0 - math.cos(math.pi * done)) / 2.0
        return radius.start + (radius.end - radius.start) * done
    return state.get(key, radius.start) if isinstance(radius, Adaptive) else radius


def measured(guard: Guard, batch: LiveBatch) -> Tensor:
    """What is compared with the region: a log-ratio over the scope, or D reduced over it."""
    if not guard.after:
        return batch.log_ratio(guard.ratio, guard.scope, guard.reduce, guard.discount)
    distance = divergence(guard.region, batch, guard.ratio)
    return batch.reduce(distance, guard.scope, guard.reduce.removesuffix("_after"), guard.discount)


def divergence(region: Any, batch: LiveBatch, ratio: str) -> Tensor:
    """D of each token, from its definition where it is not a function of the ratio."""
    x = batch.log_ratio(ratio).detach()
    if isinstance(region.measure, Measure):
        return torch.where(batch.mask, region.measure.divergence(x), 0.0)
    if region.measure not in BINARY:
        return torch.where(batch.mask, batch.divergences[region.measure], 0.0).detach()
    numerator, denominator = ratio.split("/")
    logq, logp = (torch.where(batch.mask, batch.logp(role), -1.0).detach() for role in (numerator, denominator))
    return torch.where(batch.mask, binary(region.measure, logp, logq), 0.0)


def binary(measure: str, logp: Tensor, logq: Tensor) -> Tensor:
    """|q - p|, or the sum of p log(p/q) over {token, any other}, either way round."""
    p, q, p_rest, q_rest = logp.exp(), logq.exp(), -logp.expm1(), -logq.expm1()
    if measure == "binary_tv":
        return (q - p).abs()
    if measure == "binary_kl_old_new":
        return p * (logp - logq) + p_rest * (p_rest / q_rest).log()
    return q * (logq - logp) + q_rest * (q_rest / p_rest).log()


def _beyond(value: Tensor, radius: Tensor, size: Tensor, tolerance: float) -> Where:
    """value > radius; ``size``: what the value is a difference of."""
    near = tolerance * (radius.abs() + size) + 1e-14
    return Where(value > radius, ((value - radius).abs() <= near) & (radius < math.inf))


def _outside(guard: Guard, region: Any, own: Tensor, batch: LiveBatch, setting: Setting) -> Where:
    """Outside an interval, or {D <= radius} with a radius per side or token."""
    radii = (getattr(region, "radius_low", None), getattr(region, "radius_high", None))
    scaled = any(isinstance(radius, Scaled) for radius in radii)
    if isinstance(region, Region) and not scaled:
        inside = inside_by_measure(region, own) if setting.by_measure else inside_by_bounds(region, own)
        near = setting.tolerance * (own.abs() + _terms(guard, batch))
        ties = ((own - region.log_low).abs() <= near) | ((own - region.log_high).abs() <= near)
        return Where(~inside, ties)
    below, above = (_per_token(radius, batch, guard.ratio.split("/")[1]) for radius in radii)
    radius = torch.where(own < 0.0, below, above)
    plain = isinstance(region.measure, Measure)
    distance = region.measure.divergence(own) if plain else divergence(region, batch, guard.ratio)
    found = _beyond(distance, radius, 1e-3 * torch.ones_like(own), setting.tolerance)
    return Where(found.found & ~((own == 0.0) & isinstance(region, Region)), found.ties)


def _per_token(radius: Any, batch: LiveBatch, denominator: str) -> Tensor:
    if not isinstance(radius, Scaled):
        return torch.full(batch.shape, float(radius), dtype=torch.float64)
    if radius.by == "entropy":
        assert batch.entropy is not None
        surprise = batch.entropy
    else:
        surprise = -batch.logp(denominator)
    return radius.start * (radius.exponent * torch.where(batch.mask, surprise, 0.0).detach()).exp()


def _terms(guard: Guard, batch: LiveBatch) -> Tensor:
    """The size of what a log-ratio is the sum of: its rounding is relative to that."""
    size = torch.zeros(batch.shape, dtype=torch.float64)
    for role in guard.ratio.split("/"):
        size = size + torch.where(batch.mask, batch.logp(role), 0.0).detach().abs()
    return batch.reduce(size, guard.scope, "sum", guard.discount)


def inside_by_bounds(region: Region, x: Tensor) -> Tensor:
    return (x >= region.log_low) & (x <= region.log_high)


def inside_by_measure(region: Region, x: Tensor) -> Tensor:
    """D(w) <= radius by evaluating the measure; an interval by evaluating w."""
    if region.measure is None:
        low, high = region.ratio_low or 0.0, math.inf if region.ratio_high is None else region.ratio_high
        return torch.ge(x.exp(), low) & torch.le(x.exp(), high)
    radii = (region.radius_low, region.radius_high)
    below, above = (torch.full_like(x, float(number(radius) or 0.0)) for radius in radii)
    return torch.le(region.measure.divergence(x), torch.where(x < 0.0, below, above))


def beyond_budget(region: Budget, x: Tensor, gate: Where, batch: LiveBatch, tolerance: float) -> Where:
    """Drop the largest divergences, equal ones together, until the mean of the rest is within the budget."""
    distance = torch.where(batch.mask, region.measure.divergence(x), 0.0)
    left = sorted(distance[gate.found & batch.mask].tolist())
    every = int(batch.mask.sum())
    close, radius = False, math.inf
    while left:
        total = math.fsum(value for value in left if value < math.inf) if left[-1] < math.inf else math.inf
        allowed = region.budget * (every if region.over == "all" else len(left))
        close = close or (total < math.inf and abs(total - allowed) <= tolerance * max(total, allowed))
        if total <= allowed:
            radius = left[-1] if radius < math.inf else math.inf
            break
        radius = 0.0
        left = [value for value in left if value < left[-1]]
    far = (distance > radius) & (x != 0.0)
    near = (
        ((distance - radius).abs() <= tolerance * radius) & (distance != radius) if radius < math.inf else far & False
    )
    return Where(far, batch.mask if close else near)


# --- gates ----------------------------------------------------------------------------------------------------


def applies(gate: Any, x: Tensor, batch: LiveBatch, setting: Setting) -> Where:
    """Where a guard may cut, x being what it measures."""
    a, step, tolerance = batch.signal, int(setting.state.get("step", 0.0)), setting.tolerance
    nothing = torch.zeros_like(batch.mask)
    up, down = (a > 0) & (x > 0), (a < 0) & (x < 0)
    if isinstance(gate, EntropyBelow):
        return _improbable(gate.quantile, batch, tolerance)
    if isinstance(gate, CovarianceTop):
        return _most_covarying(gate, batch, step, tolerance)
    if isinstance(gate, CovarianceWindow):
        return _window(gate, batch, step, setting)
    if isinstance(gate, Ring):
        ends = (math.log(gate.low), math.log(gate.high))
        near = [(x - end).abs() <= tolerance * (1.0 + x.abs()) for end in ends]
        return Where(~((a > 0) & (x <= ends[0]) | (a < 0) & (x >= ends[1])), near[0] | near[1])
    if isinstance(gate, Likely):
        p = torch.where(batch.mask, batch.logp(gate.policy).detach().exp(), 0.0)
        near = [up & ((p - gate.high).abs() <= tolerance), down & ((p - gate.low).abs() <= tolerance)]
        return Where(up & (p >= gate.high) | down & (p >= gate.low), (near[0] | near[1]) & (p != 0.0))
    known = {"outward": up | down, "always": torch.ones_like(nothing), "positive": a > 0, "negative": a < 0}
    found = known[gate.name] if gate.name in known else gate.predicate(x, a, batch)
    return Where(found.expand(batch.shape), nothing)


def _improbable(quantile: float, batch: LiveBatch, tolerance: float) -> Where:
    assert batch.entropy is not None
    entropy = batch.entropy.detach()
    ordered = sorted(entropy[batch.mask].tolist())
    if not ordered:
        return Where(torch.zeros_like(batch.mask), torch.zeros_like(batch.mask))
    place = quantile * (len(ordered) - 1)
    low, share = math.floor(place), place - math.floor(place)
    limit = ordered[low] + (share * (ordered[low + 1] - ordered[low]) if share else 0.0)
    return Where(entropy < limit, (entropy != limit) & ((entropy - limit).abs() <= tolerance * abs(limit)))


def _covariances(batch: LiveBatch) -> tuple[list[int], list[float]]:
    """The unmasked flat positions, and (A - mean A)(log pi_new - its mean) of each."""
    places = batch.mask.reshape(-1).nonzero().reshape(-1).tolist()
    a, logp = (value.detach().reshape(-1)[places].tolist() for value in (batch.signal, batch.logp_new))
    mean_a, mean_logp = (math.fsum(value) / max(len(places), 1) for value in (a, logp))
    return places, [(one - mean_a) * (other - mean_logp) for one, other in zip(a, logp, strict=True)]


def _flags(batch: LiveBatch, places: list[int]) -> Tensor:
    flat = torch.zeros(batch.mask.numel(), dtype=torch.bool)
    flat[places] = True
    return flat.reshape(batch.shape)


def _tickets(batch: LiveBatch, seed: int, step: int, places: list[int]) -> list[float]:
    found: list[float] = batch.lottery(seed, step).reshape(-1)[places].tolist()
    return found


def _most_covarying(gate: CovarianceTop, batch: LiveBatch, step: int, tolerance: float) -> Where:
    places, covariance = _covariances(batch)
    if not places:
        return Where(_flags(batch, []), _flags(batch, []))
    ticket = _tickets(batch, gate.seed, step, places)
    count = max(int(gate.share * len(places)), 1)
    order = sorted(range(len(places)), key=lambda i: (-covariance[i], ticket[i]))
    last, scale = covariance[order[count - 1]], max(map(abs, covariance)) + 1.0
    close = [i for i in range(len(places)) if covariance[i] != last and abs(covariance[i] - last) <= tolerance * scale]
    # order and lottery are certain unless another covariance is nearly the last one chosen
    unsure = [*close, *([i for i in range(len(places)) if covariance[i] == last] if close else [])]
    return Where(_flags(batch, [places[i] for i in order[:count]]), _flags(batch, [places[i] for i in unsure]))


def _window(gate: CovarianceWindow, batch: LiveBatch, step: int, setting: Setting) -> Where:
    places, covariance = _covariances(batch)
    blocked, unsure = batch.mask & False, batch.mask & False
    if gate.unless is not None:
        other = ruling("unless", gate.unless, batch, setting)
        blocked, unsure = other.cut, other.ties
    free = [not flag for flag in blocked.reshape(-1)[places].tolist()]
    open_ = [i for i, value in enumerate(covariance) if gate.low < value < gate.high and free[i]]
    ticket = _tickets(batch, gate.seed, step, places)
    drawn = sorted(open_, key=lambda i: ticket[i])[: max(int(gate.share * len(places)), 1)]
    near = any(
        abs(value - end) <= setting.tolerance * (1.0 + abs(end))
        for value in covariance
        for end in (gate.low, gate.high)
    )
    found = _flags(batch, [places[i] for i in drawn])
    return Where(found, batch.mask if near or bool(unsure.any()) else batch.mask & False)
