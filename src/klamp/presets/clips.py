"""Token clips: min(w A, clip(w) A) for some region of the ratio new/old."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from klamp.aggregates import Aggregate
from klamp.conditions import condition
from klamp.errors import UserError, check_choice
from klamp.factors import Factor
from klamp.gates import Likely
from klamp.guards import GATES, Guard, gate
from klamp.language import guard, parse, register_preset
from klamp.measures import Measure, Phi
from klamp.regions import Radius, Region, region
from klamp.spec import Spec
from klamp.transforms import Cap

_CLIP = "J = min(w A, clip(w, low, high) A)"
_PPO = "Schulman et al. 2017, Proximal Policy Optimization, arXiv 1707.06347, eq. 7"


def _clip(ratio_low: float, ratio_high: float, aggregate: Aggregate) -> Spec:
    return Spec((Guard(region(ratio_low=ratio_low, ratio_high=ratio_high)),), (Factor(),), (), aggregate)


@register_preset(f"{_CLIP}, low = 1 - epsilon, high = 1 + epsilon; mean over all tokens", _PPO)
def ppo(epsilon: float = 0.2) -> Spec:
    """PPO's symmetric ratio clip, mean over tokens (time steps)."""
    return _clip(1.0 - epsilon, 1.0 + epsilon, Aggregate("token_mean"))


@register_preset(
    f"{_CLIP}, low = 1 - epsilon, high = 1 + epsilon; mean over responses of token means",
    "Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, eq. 3; clip of Schulman et al. 2017, arXiv 1707.06347, eq. 7",
    "responses without a token do not count in the mean (TRL counts them: aggregate=sequence_mean(rows='all')); the KL "
    "to the reference is a penalty of its own: + kl_reference(beta=0.04)",
)
def grpo(epsilon: float = 0.2) -> Spec:
    """PPO's symmetric ratio clip with GRPO's mean over responses."""
    return _clip(1.0 - epsilon, 1.0 + epsilon, Aggregate("sequence_mean"))


@register_preset(
    f"{_CLIP}, low = 1 - epsilon_low, high = 1 + epsilon_high; mean over all tokens",
    "Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 8 (clip-higher, token-level loss)",
    "dynamic sampling and overlong shaping are matters of data and reward, not of the loss",
)
def dapo(epsilon_low: float = 0.2, epsilon_high: float = 0.28) -> Spec:
    """Clip-higher: a wider bound above than below, mean over tokens."""
    return _clip(1.0 - epsilon_low, 1.0 + epsilon_high, Aggregate("token_mean"))


@register_preset(
    f"{_CLIP}, low = 1 - epsilon, high = 1 + epsilon; sum over tokens / divisor, mean over responses",
    "Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2",
    "the divisor is a constant that must be given (a trainer takes its maximum completion length); advantages without "
    "the division by the standard deviation are the run's choice (TRL: scale_rewards='none')",
)
def dr_grpo(epsilon: float = 0.2, divisor: float | None = None) -> Spec:
    """GRPO without the length bias: a constant divisor in place of each response's length."""
    return _clip(1.0 - epsilon, 1.0 + epsilon, Aggregate("sequence_sum", divisor))


@register_preset(
    f"{_CLIP}, low = 1 - epsilon, high = 1 + epsilon; mean over micro-batches of token means",
    "TRL, GRPOConfig loss_type='bnpo'; named after Xiao et al. 2025, BNPO, arXiv 2506.02864",
    "the loss depends on how a step is cut into micro-batches, as TRL documents; the paper's beta-normalised "
    "advantage is the run's choice, not the loss's",
)
def bnpo(epsilon: float = 0.2) -> Spec:
    """The clip with a token mean taken in each micro-batch."""
    return _clip(1.0 - epsilon, 1.0 + epsilon, Aggregate("local_token_mean"))


@register_preset(
    f"{_CLIP}, [low, high] = {{w : w - 1 - log w <= delta}}; mean over responses of token means",
    "Wu et al. 2026, A Unified Framework for Rethinking Policy Divergence Measures in GRPO, arXiv 2602.05494",
    "restated from the abstract: the paper's own delta was not available; 0.02 is about a ratio of 1 +- 0.2",
)
def atr_grpo(delta: Radius = 0.02) -> Spec:
    """GRPO with the KL3 estimator as the constraint: an asymmetric ratio clip."""
    return trust_region("k3", delta)


@register_preset(
    f"{_CLIP}, [low, high] = {{w : (w^a - 1 - a(w - 1)) / (a(a - 1)) <= radius}}",
    "Cressie and Read 1984 for the family; every two-sided clip is one (a, radius)",
)
def power_clip(a: float = 0.0, radius: Radius = 0.02) -> Spec:
    """GRPO with a power divergence as the constraint: a = 2 is GRPO's own clip, a = 0 is KL3."""
    return trust_region(f"power({float(a)!r})", radius)


@register_preset(
    "J = min(w A, clip(w, 1 - epsilon, 1 + epsilon) A), and for A < 0 at least c A",
    "Ye et al. 2020, Mastering Complex Control in MOBA Games, arXiv 1912.09729, eq. 6",
    "verl applies it with c = 3 in every run, ROLL with c = 1 + 2 epsilon; here it is there when it is written",
)
def dual_clip(c: float = 3.0, epsilon: float = 0.2, base: str | Spec | None = None) -> Spec:
    """A second bound for A < 0: no gradient from tokens whose ratio exceeds c."""
    if not c > 1.0:
        raise UserError(f"c={c!r} must exceed 1: it bounds the ratio from above (3.0 is usual)")
    return (grpo(epsilon) if base is None else parse(base)) + guard(ratio_high=c, gate="negative")


@register_preset(
    "J = min(min(w, delta) A, clip(w, 1 - epsilon, 1 + epsilon) A)",
    "Prime Intellect 2025, INTELLECT-2, arXiv 2505.07291, section 3.4; TRL and Liger: delta",
    "the same value and gradient as dual_clip(c=delta) for delta > 1 + epsilon",
)
def two_sided(delta: float = 4.0, epsilon: float = 0.2, base: str | Spec | None = None) -> Spec:
    """INTELLECT-2's two-sided clip: the unclipped ratio is bounded too."""
    if not delta > 1.0:
        raise UserError(f"delta={delta!r} must exceed 1: it bounds the ratio from above (4.0 is usual)")
    found = dual_clip(delta, epsilon, base)
    bounds = [
        one.region.high for one in found.guards if isinstance(one.region, Region) and one.gate == GATES["outward"]
    ]
    if any(delta < high < math.inf for high in bounds):
        high = max(bound for bound in bounds if bound < math.inf)
        raise UserError(
            f"delta={delta!r} lies below the clip's upper bound {high!r}; J then has delta as the bound for A > 0 and {high!r} for "
            f"A < 0: write two_sided(delta={high!r}) with a base whose upper bound is {delta!r}"
        )
    return found


@register_preset(
    "J = min(w A, clip(w) A); where clipped, J = (-alpha w + (1 + alpha) bound) A",
    "Wang et al. 2019, Truly Proximal Policy Optimization, arXiv 1903.07940, section 4.1 (PPO-RB)",
    "alpha 0.3 is the value of that paper's continuous-control experiments",
)
def rollback(alpha: float = 0.3, epsilon: float = 0.2) -> Spec:
    """Outside the region the gradient points back, with a share alpha of its size."""
    where = region(ratio_low=1.0 - epsilon, ratio_high=1.0 + epsilon)
    return Spec((Guard(where, action="rollback", strength=alpha),), (Factor(),), (), Aggregate("token_mean"))


@register_preset(
    f"{_CLIP} v, w = new/old, v = min(old/rollout, cap) detached; mean over all tokens",
    "Hilton et al. 2021, Batch size-invariance for policy optimization, arXiv 2110.00641, eq. 4; Fu et al. 2025, "
    "AReaL, arXiv 2505.24298, eq. 5",
    "the papers do not cap v (cap=inf); AReaL's code has no v at all unless it is asked for, and 5.0 as its cap",
)
def decoupled_ppo(epsilon: float = 0.2, cap: float = 5.0) -> Spec:
    """The proximal policy is not the sampler: clip against old, correct from the rollout to old."""
    return ppo(epsilon) + Factor(Cap(0.0, cap), ratio="old/rollout")


@register_preset(
    "keep = (1 - epsilon_low <= v <= 1 + epsilon_high) | ~outward | (p < probability), J = min(v, cap) keep A log pi_new, detached weight",
    "Qi et al. 2026, DPPO, arXiv 2602.04879 (ablation: ratio clipping relaxed for improbable tokens); Stable-RL "
    "ppo_ablation_both",
    "v = new/rollout and p of the rollout policy, as in Stable-RL; there the probability thresholds are set through its "
    "clip ratios",
)
def ppo_lowprob_relaxed(
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    probability_low: float = 0.2,
    probability_high: float = 0.2,
    cap: float = 3.0,
    ratio: str = "new/rollout",
) -> Spec:
    """A ratio clip that spares tokens which the sampler thought improbable."""
    check_choice("ratio", ratio, ("new/old", "new/rollout"))
    where = region(ratio_low=1.0 - epsilon_low, ratio_high=1.0 + epsilon_high)
    applies = Likely(probability_low, probability_high, ratio.partition("/")[2])
    found = Guard(where, ratio, gate=applies, cut_value="zero")
    return Spec((found,), (Factor(Cap(0.0, cap), ratio),), (), Aggregate("token_mean"))


@register_preset(
    "keep = (D(w) <= radius) | ~gate, everything else from the base",
    "Wu et al. 2026, arXiv 2602.05494 (any divergence as the constraint)",
    usual="trust_region('k3', 0.02)",
)
def trust_region(
    measure: str | Measure | Phi,
    radius: Radius | None = None,
    ratio: str = "new/old",
    scope: str = "token",
    gate: Any = "outward",
    base: str | Spec = "grpo",
    reduce: str = "mean",
    radius_low: Radius | None = None,
    radius_high: Radius | None = None,
    discount: float = 1.0,
    top_k: int | None = None,
) -> Spec:
    """Any measure as the constraint of any method: the base with its policy guards replaced by this one."""
    method = parse(base)
    where = condition(measure, radius, radius_low=radius_low, radius_high=radius_high, top_k=top_k)
    check_choice("ratio", ratio, ("new/old", "new/rollout", "new/ref", "old/rollout"))
    found = Guard(where, ratio, scope, reduce, _gate(gate), discount=discount)
    if not any(factor.integrated and factor.of == (ratio, scope, reduce, discount) for factor in method.factors):
        found = replace(found, cut_value="zero")
    kept = tuple(other for other in method.guards if not other.ratio.startswith("new/"))
    return replace(method, guards=(*kept, found), name="")


_gate = gate
