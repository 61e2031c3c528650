"""Methods that penalise a divergence in place of cutting it."""

from __future__ import annotations

from klamp.aggregates import Aggregate
from klamp.conditions import condition
from klamp.factors import Factor
from klamp.guards import GATES, Guard
from klamp.language import register_preset
from klamp.measures import MEASURES, Measure, Phi
from klamp.measures import measure as measure_of
from klamp.penalties import DivergencePenalty, FPenalty
from klamp.spec import Spec

_SAMPLED = "the KL is estimated at the sampled tokens, not summed over the vocabulary"


@register_preset(
    "J = w A - beta f(w), f = w - 1 - log w, an estimator of KL(old||new); beta doubles or halves around target",
    "Schulman et al. 2017, arXiv 1707.06347, eq. 8",
    _SAMPLED,
)
def ppo_kl_penalty(beta: float = 1.0, target: float | None = None, measure: str | Measure | Phi = "k3") -> Spec:
    """PPO's KL penalty, fixed or adaptive, with any measure."""
    return Spec((), (Factor(),), (FPenalty(measure_of(measure), beta, target=target),), Aggregate("sequence_mean"))


@register_preset(
    "J = w A - beta (w - 1 - log w); beta doubles where the step's mean exceeds 1.5 target, halves below target / 1.5",
    "Schulman et al. 2017, arXiv 1707.06347, section 4",
    _SAMPLED,
)
def ppo_kl_adaptive(target: float = 0.01, beta: float = 1.0) -> Spec:
    """PPO's KL penalty with a coefficient that follows a target."""
    return ppo_kl_penalty(beta, target)


@register_preset(
    "J = A log pi_new - beta / 2 (log pi_new - log pi_old)^2; mean over all tokens",
    "Richemond et al. 2024, Offline Regularised RL for LLM Alignment (DRO), arXiv 2405.19107; Kimi Team 2025, Kimi k1.5, "
    "arXiv 2501.12599, eq. 3",
    "beta 0.05 is Tinker's example, whose anchor is the rollout policy; ROLL's kimi15 has 0.1, verl no default",
)
def dro(beta: float = 0.05) -> Spec:
    """The policy gradient with a squared log-ratio as regulariser."""
    return Spec((), (), (FPenalty(MEASURES["k2"], beta),), Aggregate("token_mean"))


@register_preset(
    "J = w A - alpha KL(old||new) where KL(old||new) > delta and A (w - 1) >= 0, w A elsewhere; the KL over the whole vocabulary",
    "Wang et al. 2019, Truly Proximal Policy Optimization, arXiv 1903.07940 (combined)",
    "from memory of the paper: delta 0.03 and alpha 5 are those of its control tasks. Where the penalty is off the paper's value has "
    "-delta in its place: another constant, the same gradient",
)
def truly_ppo(delta: float = 0.03, alpha: float = 5.0, measure: str = "exact_kl_old_new") -> Spec:
    """No clip; a step that would leave the region is pulled back by the exact KL, which also moves unsampled tokens."""
    beyond = Guard(condition(measure, delta), gate=GATES["not_inward"])
    return Spec((), (Factor(),), (DivergencePenalty(measure, alpha, on=beyond),), Aggregate("sequence_mean"))
