"""The laws at the ends of floating point: what low precision and overflow may do (10, 13)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from klamp.binary import BINARY, binary_divergence
from klamp.conditions import Distance
from klamp.coupled import Normalized
from klamp.errors import UserError
from klamp.measures import MEASURES, Measure
from klamp.testing.court import Trial, law
from klamp.testing.draws import ROLES, Draw, every_guard, run
from klamp.testing.live import LiveBatch
from klamp.testing.weights import pointwise, ratio_of
from klamp.testing.written import Written, written


@law(10, "log-ratios of +-50 in float32 and bfloat16 keep masks, g and signs right; k3 is never negative")
def _reduced_precision(trial: Trial) -> int | str:
    count = 0
    least = 1e-30 if "group_coupled" in trial.spec.traits else 1.4e-45  # such a weight is over |A|, and must fit
    for draw, generator in trial.draws():
        for dtype in (torch.float32, torch.bfloat16):
            for size in (50.0, 20.0, 2.0):  # the largest that float32 can weigh; beyond it law 13 speaks
                low = _spread(draw, size, least, generator).cast(dtype)
                where = low.having(f"ratios e^+-{size:g}, {dtype}", {})
                expected = written(trial.spec, low, trial.start, tolerance=2e-6)
                if not (_fits(expected) and _divides(trial, low)):
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
    regions = [guard.region for guard in every_guard(trial.spec)]
    for name in sorted({region.measure for region in regions if isinstance(region, Distance)} & BINARY.keys()):
        _binary_signs(trial, name)
    return count


def _measures(trial: Trial) -> list[Measure]:
    regions = (guard.region for guard in every_guard(trial.spec))
    holders: list[object] = [*regions, *trial.spec.penalties, *(factor.transform for factor in trial.spec.factors)]
    found = [getattr(holder, "measure", None) for holder in holders]
    return [measure for measure in found if isinstance(measure, Measure)]


def _binary_signs(trial: Trial, name: str) -> None:
    size = torch.logspace(-30, 2, 200, dtype=torch.float64)
    x, logp = torch.meshgrid(torch.cat([-size, size]), -torch.logspace(-12, 3, 60, dtype=torch.float64), indexing="ij")
    found = binary_divergence(name, x, logp)
    wrong = ((found < 0.0) | torch.isnan(found)) & (x + logp <= 0.0)
    trial.same(f"sign of {name}", "probabilities of 0 to 1", torch.zeros_like(wrong), wrong)


def _signs(trial: Trial, measure: Measure) -> None:
    size = torch.logspace(-30, math.log10(50.0), 400, dtype=torch.float32)
    x = torch.cat([-size, size])
    exact, rounded = measure.divergence(x.double()), measure.divergence(x)
    wrong = (rounded < 0.0) & (exact >= 0.0) | torch.isnan(rounded)
    trial.same(f"sign of {measure} in float32", "log-ratios of 1e-30 to 50", torch.zeros_like(wrong), wrong)


def _spread(draw: Draw, size: float, least: float, generator: torch.Generator) -> Draw:
    """One token of each row at +-size for a ratio, and advantages too small for a product of signs."""
    rows, columns = draw.shape
    far = torch.zeros(draw.shape, dtype=torch.float64)
    far[torch.arange(rows), torch.randint(0, columns, (rows,), generator=generator)] = size
    up = torch.rand((rows, 1), generator=generator) < 0.5
    roles = [name for name in ROLES if name in draw.fields]
    moved = {name: draw[name] - far * (up if index % 2 else ~up) for index, name in enumerate(roles)}
    value = draw["advantages"]
    pick = torch.rand(value.shape, generator=generator)
    value = torch.where(pick < 0.15, value.sign() * least, torch.where(pick < 0.3, value * max(1e-30, least), value))
    return draw.having("", {**moved, "advantages": value})


def _fits(expected: Written) -> bool:
    numbers = (expected.g, expected.policy, expected.slope, expected.penalty)
    return all(float(value.abs().sum()) < 1e36 for value in numbers)


def _divides(trial: Trial, low: Draw) -> bool:
    """Whether float32 can hold the means that normalised weights are divided by."""
    batch = low.cast(torch.float64).build(LiveBatch)
    for factor in trial.spec.factors:
        if isinstance(factor.transform, Normalized):
            x = ratio_of(factor, batch, [], False).detach()
            own = pointwise(factor.transform.transform, x, batch.signal)[batch.mask]
            if own.numel() and float(own.amax()) < 1e-30:
                return False
    return True


@law(13, "a kept weight that overflows is capped by a factor of the spec or raised; nothing else clamps")
def _overflow(trial: Trial) -> int | str:
    count = 0
    roles = [name for name in ROLES if name in trial.spec.needs or name in ("logp_new", "logp_old")]
    template, objective, start = next(trial.draws())[0], trial.objective, trial.start
    for size, role, sign in itertools.product((25.0, 300.0, 800.0), roles, (1.0, -1.0)):
        draw = _alone(trial, template, role, size, sign)
        expected = _by_differences(trial, draw, written(trial.spec, draw, start))
        if bool((torch.isnan(expected.g) & torch.isfinite(expected.policy)).any()):
            continue  # what g is cannot be told
        try:
            out = run(objective, draw).out
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
    saturated = torch.isnan(expected.g) & torch.isfinite(expected.policy)
    if len(trial.spec.factors) != 1 or trial.spec.factors[0].scope != "token":
        return expected  # a difference would see what is detached, and what a wider scope shares
    g = expected.g.clone()
    for row, column in saturated.nonzero().tolist():
        step = torch.zeros_like(g)
        step[row, column] = 1e-3
        up, down = (draw.having("", {"logp_new": draw["logp_new"] + side * step}) for side in (1.0, -1.0))
        change = written(trial.spec, up, trial.start).policy.sum() - written(trial.spec, down, trial.start).policy.sum()
        g[row, column] = change / 2e-3
    return replace(expected, g=g)


def _alone(trial: Trial, template: Draw, role: str, size: float, sign: float) -> Draw:
    """Two rows of three tokens, on-policy but for one token whose log-prob under ``role`` is lower by ``size``."""
    logp = -torch.tensor([[0.5, 1.0, 2.0], [0.25, 0.75, 1.5]], dtype=torch.float64)
    fields = {name: logp.clone() for name in ROLES if name in trial.spec.needs or name in ("logp_new", "logp_old")}
    fields[role][0, 1] -= size
    fields["mask"] = torch.ones_like(logp, dtype=torch.bool)
    fields["advantages"] = sign * torch.tensor([1.0, 0.5], dtype=torch.float64)
    for name in template.fields.keys() - fields.keys():
        value = template[name]
        fields[name] = torch.ones(logp.shape if value.ndim == 2 else (2,), dtype=value.dtype)
    if "row" in fields:
        fields["row"] = torch.arange(2)
    for name in ("entropy", *(name for name in fields if name.startswith("divergences"))):
        if name in fields:
            fields[name] = 0.01 * torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)
    return Draw(f"{role} lower by {size:g} at [0, 1], A {'>' if sign > 0 else '<'} 0", fields)
