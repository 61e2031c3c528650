"""Sequence-level methods: the ratio of a whole response."""

from __future__ import annotations

from klamp.aggregates import Aggregate
from klamp.factors import Factor
from klamp.guards import GATES, Guard
from klamp.language import register_preset
from klamp.regions import region
from klamp.spec import Spec

_GSPO = "J = min(s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A), s = exp(mean_t log w_t); mean over responses"
_SOURCE = "Zheng et al. 2025, Group Sequence Policy Optimization, arXiv 2507.18071"


@register_preset(_GSPO, f"{_SOURCE}, eq. 5")
def gspo(epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Spec:
    """The geometric mean of a response's ratios, clipped and weighed as one."""
    where = region(ratio_low=1.0 - epsilon_low, ratio_high=1.0 + epsilon_high)
    return Spec((Guard(where, scope="sequence"),), (Factor(scope="sequence"),), (), Aggregate("sequence_mean"))


@register_preset(_GSPO + ", A per token", f"{_SOURCE}, eq. 11", "the same value as gspo: g = s A_t covers both forms")
def gspo_token(epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Spec:
    """GSPO's token form: advantages may differ within a response."""
    return gspo(epsilon_low, epsilon_high)


@register_preset(
    "J = v A where low <= v <= high, else 0, v = prod_t pi_old / pi_rollout of the response",
    "TRL 1.16, GRPOConfig vllm_importance_sampling_mode='sequence_mask' (its default, cap 3.0)",
    "a correction to compose with a method: it has no mean of its own",
)
def sequence_mask(high: float = 3.0, low: float = 0.0) -> Spec:
    """Drop responses whose sampler and trainer disagree, and weigh the others by their ratio."""
    where = region(ratio_low=low, ratio_high=high)
    guard = Guard(where, "old/rollout", "sequence", "sum", GATES["always"], cut_value="zero")
    return Spec((guard,), (Factor(ratio="old/rollout", scope="sequence", reduce="sum"),))
