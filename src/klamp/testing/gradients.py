"""The laws of the gradient: what g, the cuts and the values must be (1, 3, 6, 7, 8, 9, 10, 13)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from klamp.advantages import group_advantages
from klamp.errors import UserError
from klamp.guards import Guard
from klamp.measures import MEASURES, Measure
from klamp.objective import LossOutput
from klamp.penalties import FPenalty
from klamp.regions import Region
from klamp.spec import Spec
from klamp.testing.court import Trial, law
from klamp.testing.draws import Draw, run
from klamp.testing.written import LiveBatch, Written, inside_by_bounds, inside_by_measure, shares, written

CLOSE = 1e-10  # autograd against the closed form in float64: both round a chain of a dozen operations
_ROLES = ("logp_new", "logp_old", "logp_rollout", "logp_ref")


@law(1, "on-policy the policy term is the plain policy gradient", "selects", "group_coupled", "own_scale")
def _on_policy(trial: Trial) -> int | str:
    count, objective = 0, trial.make_objective(trial.policy_spec)
    for draw, _ in trial.draws():
        equal = {name: draw["logp_new"] for name in _ROLES if name in draw.fields}
        same = draw.having("all policies equal", equal)
        found = trial.outcome(same, objective)
        trial.close("policy gradient g (expected: A)", same, same.advantages, found.out.grad_policy, 1e-14)
        share = shares(trial.spec.mean, same.build(LiveBatch))
        trial.close("gradient of the loss", same, -same.advantages * share, found.grads[0], 1e-13)
        trial.same("kept", same, same.mask, found.out.kept)
        count += 1
    return count


@law(3, "a cut token has policy gradient exactly 0, even if its ratio overflows", "pushes_back")
def _cut_is_zero(trial: Trial) -> int | str:
    spec = trial.policy_spec
    if not spec.guards:
        return "the spec has no guard"
    count, objective = 0, trial.make_objective(spec)
    for silent, generator in trial.draws():
        value = silent["advantages"]
        draw = silent.having("", {"advantages": torch.where(value == 0.0, 1.0, value)})  # law 6 speaks of A = 0
        for extreme in (draw, *_overflowing(trial, draw, generator)):
            found, expected = trial.outcome(extreme, objective), written(spec, extreme)
            if not expected.finite:
                continue  # the value at the bound overflows by itself
            cut = expected.cut & (extreme.advantages != 0.0)
            zero = torch.zeros_like(found.grads[0])
            trial.close("policy gradient g of a cut token", extreme, zero, found.out.grad_policy, 0.0, but=~cut)
            trial.close("gradient of a cut token", extreme, zero, found.grads[0], 0.0, but=~cut)
            trial.same("kept", extreme, extreme.mask & ~expected.cut, found.out.kept, but=expected.ties)
            _count_removed(trial, spec, extreme, found.out.metrics.means, expected)
            count += int(cut.sum())
    return count or "no token was cut"


def _count_removed(trial: Trial, spec: Spec, where: Draw, means: dict[str, tuple[Tensor, Tensor]],
                   expected: Written | None = None) -> None:  # fmt: skip
    """Each removed token is counted once, on one side; no token without a signal is counted."""
    names = ("guard/removed_low_share", "guard/removed_high_share")
    if not all(name in means for name in names):
        return
    removed, live = 0, where.advantages != 0.0
    if bool(live.any()):
        expected = expected or written(spec, where)
        if bool(expected.ties.any()):
            return
        removed = int((expected.cut & live).sum())
    got = sum(int(means[name][0]) for name in names)
    trial.holds(f"tokens counted by {' and '.join(names)}", where, got == removed, removed, got)


def _overflowing(trial: Trial, draw: Draw, generator: torch.Generator) -> Iterator[Draw]:
    """Draws in which some ratios are e^+-800, wherever every weight that is kept stays finite."""
    for role in (name for name in _ROLES if name in draw.fields):
        share = torch.tensor([0.3, 1.0])[torch.randint(0, 2, (draw.shape[0], 1), generator=generator)]
        far = torch.rand(draw.shape, generator=generator) < share
        lower = {role: draw[role] - 800.0 * far.to(torch.float64)}
        extreme = draw.having(f"{role} lower by 800 at some tokens", lower)
        broken = ~torch.isfinite(written(trial.policy_spec, extreme).g)
        yield extreme.having("", {role: torch.where(broken.any(dim=1, keepdim=True), draw[role], lower[role])})


@law(6, "A = 0 or equal rewards give exactly zero policy gradient and are not counted as cut", "group_coupled")
def _no_signal(trial: Trial) -> int | str:
    spec = trial.policy_spec
    count, objective = 0, trial.make_objective(spec)
    for draw, generator in trial.draws():
        tied = group_advantages(torch.full(draw.shape[:1], 0.7, dtype=torch.float64), torch.arange(draw.shape[0]) // 2)
        some = draw.advantages * (torch.rand(draw.shape, generator=generator) < 0.5)
        zeros, lower = torch.zeros(draw.shape, dtype=torch.float64), draw["logp_old"] - 800.0
        for silent in (
            draw.having("A = 0", {"advantages": zeros}),
            draw.having("A = -0.0, ratios e^800", {"advantages": -zeros[:, 0], "logp_old": lower}),
            draw.having("equal rewards", {"advantages": tied.values}),
            draw.having("A = 0 for some tokens", {"advantages": some}),
        ):
            found = trial.outcome(silent, objective)
            still = silent.mask & (silent.advantages == 0.0)
            zero = torch.zeros_like(found.grads[0])
            trial.close("policy gradient g", silent, zero, found.out.grad_policy, 0.0, but=~still)
            trial.close("gradient", silent, zero, found.grads[0], 0.0, but=~still)
            trial.close("loss of the token", silent, zero, found.out.per_token, 0.0, but=~still)
            _count_removed(trial, spec, silent, found.out.metrics.means)
            count += 1
    return count


# --- laws 7 and 8 ---------------------------------------------------------------------------------------------


@law(7, "a larger fixed radius keeps a superset; an infinite one equals the spec without that guard")
def _wider(trial: Trial) -> int | str:
    if not trial.spec.guards:
        return "the spec has no guard"
    count = 0
    for draw, _ in trial.draws():
        for guard in trial.spec.guards:
            others = tuple(other for other in trial.spec.guards if other != guard)
            kept = torch.zeros_like(draw.mask)
            for scale in (1.0, 2.0, 10.0, math.inf):
                wide = replace(guard, region=_scaled(guard.region, scale))
                spec = replace(trial.spec, guards=(*others, wide), name="")
                found = trial.outcome(draw, trial.make_objective(spec))
                where = draw.having(f"radius times {scale}", {})
                lost = kept & ~found.out.kept
                trial.same("tokens lost by a wider region", where, torch.zeros_like(lost), lost)
                kept = found.out.kept
                count += 1
            without = trial.outcome(draw, trial.make_objective(replace(trial.spec, guards=others, name="")))
            for name in ("kept", "inside", "grad_policy", "per_token"):
                trial.same(f"{name} without the guard", draw, getattr(without.out, name), getattr(found.out, name))
            trial.same("gradient without the guard", draw, without.grads[0], found.grads[0])
    return count


def _scaled(region: Region, scale: float) -> Region:
    """The region with its radii, or its bounds in log space, times ``scale``."""
    if scale == 1.0:
        return region
    if region.measure is not None:
        radii = (float(radius or 0.0) for radius in (region.radius_low, region.radius_high))
        below, above = (math.inf if scale == math.inf else radius * scale for radius in radii)
        return replace(region, radius_low=below, radius_high=above)
    if scale == math.inf:
        return replace(region, ratio_low=None, ratio_high=None)
    high = None if scale * region.log_high > 700.0 else math.exp(scale * region.log_high)
    return replace(region, ratio_low=math.exp(scale * region.log_low) or None, ratio_high=high)


@law(8, "predicate and bounds give the same cuts away from ties")
def _bounds(trial: Trial) -> int | str:
    if not trial.spec.guards:
        return "the spec has no guard"
    count = 0
    for index, guard in enumerate(trial.spec.guards):
        where = f"guard {index + 1} of {len(trial.spec.guards)}, x over +-700"
        x = _grid(guard, trial.generator(index))
        inside = inside_by_measure(guard, x)
        bad = (inside != inside_by_bounds(guard, x)) & ~_near_radius(guard, x)
        if bool(bad.any()):
            at = float(x[bad][x[bad].abs().argmin()])
            raise trial.violation(f"D(w) <= radius and the bounds disagree at log w = {at!r}", where, (),
                                  f"inside = {at >= guard.region.log_low and at <= guard.region.log_high} by the bounds "
                                  f"[{guard.region.log_low!r}, {guard.region.log_high!r}]", _shown(guard, at))  # fmt: skip
        count += x.numel()
    for draw, _ in trial.draws():
        expected, found = written(trial.spec, draw, by_measure=True, tolerance=1e-7), trial.outcome(draw)
        trial.same("kept, by D(w) <= radius", draw, draw.mask & ~expected.cut, found.out.kept, but=expected.ties)
        trial.same("inside, by D(w) <= radius", draw, expected.inside, found.out.inside, but=expected.ties)
        count += 1
    return count


def _shown(guard: Guard, x: float) -> str:
    region = guard.region
    if region.measure is None:
        return f"w = {math.exp(x)!r}"
    return (
        f"D = {float(region.measure.divergence(x))!r}, radius {region.radius_low!r} below, {region.radius_high!r} above"
    )


def _grid(guard: Guard, generator: torch.Generator) -> Tensor:
    ends = [abs(bound) for bound in (guard.region.log_low, guard.region.log_high) if 0.0 < abs(bound) < 700.0]
    noise = torch.randn(200, generator=generator, dtype=torch.float64)
    near = [side * end * torch.linspace(0.0, 3.0, 301, dtype=torch.float64) for end in ends for side in (-1.0, 1.0)]
    return torch.cat([noise, 30.0 * noise, torch.linspace(-700.0, 700.0, 281, dtype=torch.float64), *near])


def _near_radius(guard: Guard, x: Tensor) -> Tensor:
    region = guard.region
    near = torch.zeros_like(x, dtype=torch.bool)
    for bound in (region.log_low, region.log_high):
        near = near | ((x - bound).abs() <= 1e-9 * x.abs())
    if region.measure is None:
        return near
    divergence = region.measure.divergence(x)
    for radius in (region.radius_low, region.radius_high):
        if radius is not None and radius < math.inf:
            near = near | ((divergence - radius).abs() <= 1e-9 * radius)
    return near


# --- law 9 ----------------------------------------------------------------------------------------------------


@law(9, "g equals autograd of the written-out objective in float64, away from ties")
def _autograd(trial: Trial) -> int | str:
    count, objective = 0, trial.objective
    moved = {name: 3.0 * value for name, value in objective.init().items()}
    for draw, _ in trial.draws():
        for state in (objective.init(), *([moved] if moved else [])):
            found = trial.outcome(draw, objective, None, state)
            for clip in (False, True) if trial.spec.guards else (False,):
                where = draw.having("clip as a minimum" if clip else "guards as constraints", {})
                expected = written(trial.spec, draw, state, clip=clip)
                _same_objective(trial, where, expected, found.out, found.grads)
                count += 1
    return count


def _same_objective(trial: Trial, where: Draw, expected: Written, out: LossOutput, grads: list[Tensor]) -> None:
    ties = expected.ties
    floor = CLOSE * (1.0 + float(expected.penalty.abs().amax()) + float(expected.policy.abs().amax()))
    trial.close("policy gradient g", where, expected.g, out.grad_policy, CLOSE, 1e-13, but=ties)
    trial.close("gradient of the penalty", where, expected.slope, out.grad_penalty, CLOSE, 1e-12, but=ties)
    trial.close("loss of the token", where, expected.penalty - expected.policy, out.per_token, CLOSE, floor, but=ties)
    for one, other in zip(expected.grads, grads, strict=True):
        trial.close("gradient of the loss", where, one, other, CLOSE, 1e-12, but=ties)
    if not bool(ties.any()):
        trial.close("loss", where, expected.loss, out.loss, CLOSE, floor)


# --- laws 10 and 13 -------------------------------------------------------------------------------------------


@law(10, "log-ratios of +-50 in float32 and bfloat16 keep masks, g and signs right; k3 is never negative")
def _reduced_precision(trial: Trial) -> int | str:
    count = 0
    for draw, generator in trial.draws():
        for dtype in (torch.float32, torch.bfloat16):
            for size in (50.0, 20.0, 2.0):  # the largest that float32 can weigh; beyond it law 13 speaks
                low = _spread(draw, size, generator).cast(dtype)
                where = low.having(f"ratios e^+-{size:g}, {dtype}", {})
                expected = written(trial.spec, low, trial.objective.init(), tolerance=2e-6)
                if not _fits(expected):
                    continue
                exact, out = trial.outcome(low.cast(torch.float64)).out, trial.outcome(low).out
                rtol = 2e-6 * (50.0 + size + float(low["logp_new"].abs().float().sum(dim=1).amax()))
                trial.same("kept", where, low.mask & ~expected.cut, out.kept, but=expected.ties)
                trial.same("inside", where, expected.inside, out.inside, but=expected.ties)
                trial.close(
                    "policy gradient g", where, exact.grad_policy, out.grad_policy, rtol, 1e-36, but=expected.ties
                )
                divergence = out.metrics.means.get("policy/kl_old_new_mean", (torch.zeros(()),))[0]
                trial.holds("sum of k3", where, float(divergence) >= 0.0, ">= 0", float(divergence))
                count += 1
                break
    for measure in {MEASURES["k3"], *_measures(trial)}:
        _signs(trial, measure)
    return count


def _measures(trial: Trial) -> list[Measure]:
    found = [guard.region.measure for guard in trial.spec.guards if guard.region.measure is not None]
    return found + [part.measure for part in trial.spec.penalties if isinstance(part, FPenalty)]


def _signs(trial: Trial, measure: Measure) -> None:
    size = torch.logspace(-30, math.log10(50.0), 400, dtype=torch.float32)
    x = torch.cat([-size, size])
    exact, rounded = measure.divergence(x.double()), measure.divergence(x)
    wrong = (rounded < 0.0) & (exact >= 0.0) | torch.isnan(rounded)
    trial.same(f"sign of {measure} in float32", "log-ratios of 1e-30 to 50", torch.zeros_like(wrong), wrong)


def _spread(draw: Draw, size: float, generator: torch.Generator) -> Draw:
    """One token of each row at +-size for a ratio, and advantages too small for a product of signs."""
    rows, columns = draw.shape
    far = torch.zeros(draw.shape, dtype=torch.float64)
    far[torch.arange(rows), torch.randint(0, columns, (rows,), generator=generator)] = size
    up = torch.rand((rows, 1), generator=generator) < 0.5
    roles = [name for name in _ROLES if name in draw.fields]
    moved = {name: draw[name] - far * (up if index % 2 else ~up) for index, name in enumerate(roles)}
    value = draw["advantages"]
    pick = torch.rand(value.shape, generator=generator)
    value = torch.where(pick < 0.15, value.sign() * 1.4e-45, torch.where(pick < 0.3, value * 1e-30, value))
    return draw.having("", {**moved, "advantages": value})


def _fits(expected: Written) -> bool:
    numbers = (expected.g, expected.policy, expected.slope, expected.penalty)
    return all(float(value.abs().sum()) < 1e36 for value in numbers)


@law(13, "a kept weight that overflows is capped by a factor of the spec or raised; nothing else clamps")
def _overflow(trial: Trial) -> int | str:
    count = 0
    roles = [name for name in _ROLES if name in trial.spec.needs or name in ("logp_new", "logp_old")]
    for size, role, sign in itertools.product((25.0, 300.0, 800.0), roles, (1.0, -1.0)):
        draw = _alone(trial, role, size, sign)
        expected = _by_differences(trial, draw, written(trial.spec, draw, trial.objective.init()))
        try:
            out = run(trial.objective, draw).out
        except UserError as error:
            # A slope may overflow before its value does.
            fine = expected.finite and bool(torch.isfinite(expected.slope).all())
            trial.holds(f"raised although every weight is finite ({error})", draw, not fine)
        else:
            trial.holds("overflow of a loss or a weight", draw, expected.finite, "UserError", float(out.loss.detach()))
            unknown = expected.ties | ~torch.isfinite(expected.slope)
            trial.close("policy gradient g", draw, expected.g, out.grad_policy, 1e-9, 1e-14, but=expected.ties)
            trial.close("gradient of the penalty", draw, expected.slope, out.grad_penalty, 1e-9, 1e-12, but=unknown)
        count += 1
    return count


def _by_differences(trial: Trial, draw: Draw, expected: Written) -> Written:
    """Central differences for g where J is finite and autograd is not (0 times infinity in a saturated surrogate)."""
    at = torch.zeros_like(draw.mask)
    at[0, 1] = True
    if not bool((at & torch.isnan(expected.g) & torch.isfinite(expected.policy)).any()):
        return expected
    step = 1e-3 * at.to(torch.float64)
    up, down = (draw.having("", {"logp_new": draw["logp_new"] + side * step}) for side in (1.0, -1.0))
    change = written(trial.spec, up).policy.sum() - written(trial.spec, down).policy.sum()
    return replace(expected, g=torch.where(at, change / 2e-3, expected.g))


def _alone(trial: Trial, role: str, size: float, sign: float) -> Draw:
    """Two rows of three tokens, on-policy but for one token whose log-prob under ``role`` is lower by ``size``."""
    logp = -torch.tensor([[0.5, 1.0, 2.0], [0.25, 0.75, 1.5]], dtype=torch.float64)
    fields = {name: logp.clone() for name in _ROLES if name in trial.spec.needs or name in ("logp_new", "logp_old")}
    fields[role][0, 1] -= size
    fields["mask"] = torch.ones_like(logp, dtype=torch.bool)
    fields["advantages"] = sign * torch.tensor([1.0, 0.5], dtype=torch.float64)
    template = next(trial.draws())[0]
    for name in template.fields.keys() - fields.keys():
        value = template[name]
        fields[name] = torch.ones(logp.shape if value.ndim == 2 else (2,), dtype=value.dtype)
    return Draw(f"{role} lower by {size:g} at [0, 1], A {'>' if sign > 0 else '<'} 0", fields)
