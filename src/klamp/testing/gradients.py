"""The laws of the gradient: what g, the cuts and the values must be (1, 3, 6, 9)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from klamp.advantages import group_advantages
from klamp.objective import LossOutput
from klamp.spec import Spec
from klamp.tally import Tally
from klamp.testing.court import Trial, law
from klamp.testing.draws import ROLES, Draw
from klamp.testing.live import LiveBatch
from klamp.testing.written import Written, shares, written

CLOSE = 1e-10  # autograd against the closed form in float64: both round a chain of a dozen operations


@law(
    1, "on-policy the policy term is the plain policy gradient", selects="g = A is asked of the tokens it leaves",
    own_scale="g need only have the sign of A", group_coupled="g may have any size and sign",
)  # fmt: skip
def _on_policy(trial: Trial) -> int | str:
    spec, traits = trial.policy_spec, trial.spec.traits
    count, objective = 0, trial.make_objective(spec)
    for draw, _ in trial.draws():
        equal = {name: draw["logp_new"] for name in ROLES if name in draw.fields}
        equal |= {name: torch.zeros_like(draw[name]) for name in draw.fields if name.startswith("divergences")}
        same = draw.having("all policies equal", equal)
        found = trial.outcome(same, objective)
        kept, ties, share = same.mask, ~same.mask, shares(spec.mean, same.build(LiveBatch))
        if "selects" in traits:
            expected = written(spec, same)
            kept, ties, share = same.mask & ~expected.cut, expected.ties, expected.share
        g = torch.where(kept, same.advantages, 0.0)
        trial.same("kept", same, kept, found.out.kept, but=ties)
        if "own_scale" in traits or "group_coupled" in traits:
            sign, g = g.sign(), found.out.grad_policy
            free = ties | (g == 0.0) if "group_coupled" not in traits else ties | same.mask
            trial.close("sign of the policy gradient g", same, sign, g.sign(), 0.0, but=free)
        trial.close("policy gradient g (expected: A)", same, g, found.out.grad_policy, 1e-14, but=ties)
        trial.close("gradient of the loss", same, -g * share, found.grads[0], 1e-13, but=ties)
        count += 1
    return count


@law(
    3, "a cut token has policy gradient exactly 0, even if its ratio overflows",
    pushes_back="a token that is rolled back, and not masked, keeps a gradient, which law 9 holds",
)  # fmt: skip
def _cut_is_zero(trial: Trial) -> int | str:
    spec = trial.policy_spec
    if not spec.guards:
        return "the spec has no guard"
    count, objective = 0, trial.make_objective(spec)
    for silent, generator in trial.draws():
        value = silent["advantages"]
        draw = silent.having("", {"advantages": torch.where(value == 0.0, 1.0, value)})  # law 6 speaks of A = 0
        for extreme, expected in ((draw, written(spec, draw)), *_overflowing(trial, draw, generator)):
            if not expected.finite:
                continue  # the value at the bound overflows by itself
            found = trial.outcome(extreme, objective)
            cut = expected.cut & (extreme.advantages != 0.0)
            still, zero = cut & ~expected.turned, torch.zeros_like(found.grads[0])
            trial.close("policy gradient g of a cut token", extreme, zero, found.out.grad_policy, 0.0, but=~still)
            trial.close("gradient of a cut token", extreme, zero, found.grads[0], 0.0, but=~still)
            trial.same("kept", extreme, extreme.mask & ~expected.cut, found.out.kept, but=expected.ties)
            _count_removed(trial, spec, extreme, found.out.metrics, expected)
            count += int(cut.sum())
    return count or "no token was cut"


def _count_removed(trial: Trial, spec: Spec, where: Draw, metrics: Tally, expected: Written | None = None) -> None:
    """Each removed token is counted once, on one side; no token without a signal is; dropped ones are counted too."""
    names = ("guard/removed_low_share", "guard/removed_high_share")
    drops = any(guard.action.startswith("drop") for guard in spec.guards)
    if not all(name in metrics.means for name in names):
        return
    removed, dropped, live = 0, 0, where.advantages != 0.0
    if bool(live.any()) or drops:
        expected = expected or written(spec, where)
        if bool(expected.ties.any()):
            return
        removed, dropped = int((expected.cut & live).sum()), int(expected.dropped.sum())
    got = sum(int(metrics.means[name][0]) for name in names)
    trial.holds(f"tokens counted by {' and '.join(names)}", where, got == removed, removed, got)
    if drops:
        got = int(metrics.sums.get("guard/dropped_count", -1))
        trial.holds("tokens counted by guard/dropped_count", where, got == dropped, dropped, got)


def _overflowing(trial: Trial, draw: Draw, generator: torch.Generator) -> Iterator[tuple[Draw, Written]]:
    """Draws in which some ratios are e^+-800, wherever every weight that is kept stays finite."""
    for role in (name for name in ROLES if name in draw.fields):
        share = torch.tensor([0.3, 1.0])[torch.randint(0, 2, (draw.shape[0], 1), generator=generator)]
        far = torch.rand(draw.shape, generator=generator) < share
        lower = {role: draw[role] - 800.0 * far.to(torch.float64)}
        extreme = draw.having(f"{role} lower by 800 at some tokens", lower)
        expected = written(trial.policy_spec, extreme)
        broken = ~torch.isfinite(expected.g).all(dim=1, keepdim=True)
        if bool(broken.any()):
            extreme = extreme.having("", {role: torch.where(broken, draw[role], lower[role])})
            expected = written(trial.policy_spec, extreme)
        yield extreme, expected


@law(6, "A = 0 or equal rewards give exactly zero policy gradient and are not counted as cut")
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
            _count_removed(trial, spec, silent, found.out.metrics)
            count += 1
    return count


# --- law 9 ----------------------------------------------------------------------------------------------------


@law(9, "g equals autograd of the written-out objective in float64, away from ties")
def _autograd(trial: Trial) -> int | str:
    count, objective, start = 0, trial.objective, trial.start
    for index, (draw, _) in enumerate(trial.draws()):
        moved = {name: 1.0 + index if name == "step" else 3.0 * value for name, value in start.items()}
        for state in (start, *([moved] if moved else [])):
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
