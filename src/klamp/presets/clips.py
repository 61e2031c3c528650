"""Token clips: min(w A, clip(w) A) for some region of the ratio new/old."""

from __future__ import annotations

from dataclasses import replace

from klamp.aggregates import Aggregate
from klamp.errors import UserError
from klamp.factors import Factor
from klamp.guards import Guard, check_choice, gate
from klamp.language import guard, parse, register_preset
from klamp.measures import Measure, Phi
from klamp.regions import region
from klamp.spec import Spec

_CLIP = "J = min(w A, clip(w, low, high) A)"


def _clip(ratio_low: float, ratio_high: float, aggregate: Aggregate) -> Spec:
    return Spec((Guard(region(ratio_low=ratio_low, ratio_high=ratio_high)),), (Factor(),), (), aggregate)


@register_preset(
    f"{_CLIP}, low = 1 - epsilon, high = 1 + epsilon; mean over responses of token means",
    "Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, eq. 3; clip of Schulman et al. 2017, arXiv 1707.06347, eq. 7",
    "responses without a token do not count in the mean",
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
    f"{_CLIP}, [low, high] = {{w : w - 1 - log w <= delta}}; mean over responses of token means",
    "Wu et al. 2026, A Unified Framework for Rethinking Policy Divergence Measures in GRPO, arXiv 2602.05494",
    "restated from the abstract: the paper's own delta was not available; 0.02 is about a ratio of 1 +- 0.2",
)
def atr_grpo(delta: float = 0.02) -> Spec:
    """GRPO with the KL3 estimator as the constraint: an asymmetric ratio clip."""
    return trust_region("k3", delta)


@register_preset(
    f"{_CLIP}, [low, high] = {{w : (w^a - 1 - a(w - 1)) / (a(a - 1)) <= radius}}",
    "Cressie and Read 1984 for the family; every two-sided clip is one (a, radius)",
)
def power_clip(a: float = 0.0, radius: float = 0.02) -> Spec:
    """GRPO with a power divergence as the constraint: a = 2 is GRPO's own clip, a = 0 is KL3."""
    return trust_region(f"power({float(a)!r})", radius)


@register_preset(
    "J = min(w A, clip(w, 1 - epsilon, 1 + epsilon) A), and for A < 0 at least c A",
    "Ye et al. 2020, Mastering Complex Control in MOBA Games, arXiv 1912.09729, eq. 6",
)
def dual_clip(c: float = 3.0, epsilon: float = 0.2, base: str | Spec | None = None) -> Spec:
    """A second bound for A < 0: no gradient from tokens whose ratio exceeds c."""
    if not c > 1.0:
        raise UserError(f"c={c!r} must exceed 1: it bounds the ratio from above (3.0 is usual)")
    return (grpo(epsilon) if base is None else parse(base)) + guard(ratio_high=c, gate="negative")


@register_preset(
    "keep = (D(w) <= radius) | ~gate, everything else from the base",
    "Wu et al. 2026, arXiv 2602.05494 (any divergence as the constraint)",
)
def trust_region(
    measure: str | Measure | Phi,
    radius: float | None = None,
    ratio: str = "new/old",
    scope: str = "token",
    gate: str = "outward",
    base: str | Spec = "grpo",
    reduce: str = "mean",
    radius_low: float | None = None,
    radius_high: float | None = None,
) -> Spec:
    """Any measure as the constraint of any method: the base with its policy guards replaced by this one."""
    method = parse(base)
    where = region(measure, radius, radius_low=radius_low, radius_high=radius_high)
    check_choice("ratio", ratio, ("new/old", "new/rollout", "new/ref", "old/rollout"))
    clips = any(factor.integrated and factor.of == (ratio, scope, reduce) for factor in method.factors)
    found = Guard(where, ratio, scope, reduce, _gate(gate), cut_value="bound" if clips else "zero")
    kept = tuple(other for other in method.guards if not other.ratio.startswith("new/"))
    return replace(method, guards=(*kept, found), name="")


_gate = gate
