"""Methods whose ratio is of a whole response, or of a turn."""

from __future__ import annotations

import math

from klamp.aggregates import Aggregate
from klamp.errors import UserError
from klamp.factors import Factor
from klamp.guards import Guard
from klamp.language import register_preset
from klamp.regions import region
from klamp.spec import Spec

_GSPO = "J = min(s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A), s = exp(mean_t log w_t)"
_SOURCE = "Zheng et al. 2025, Group Sequence Policy Optimization, arXiv 2507.18071"


def _geometric(low: float, high: float, scope: str, aggregate: Aggregate) -> Spec:
    return Spec((Guard(region(ratio_low=low, ratio_high=high), scope=scope),), (Factor(scope=scope),), (), aggregate)


@register_preset(
    f"{_GSPO}; mean over responses", f"{_SOURCE}, eq. 5",
    "per token g = s A; SkyRL adds 1e-8 to the length, as verl does where the mask is floating-point; verl clamps log s at 10",
)  # fmt: skip
def gspo(epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Spec:
    """The geometric mean of a response's ratios, clipped and weighed as one."""
    return _geometric(1.0 - epsilon_low, 1.0 + epsilon_high, "sequence", Aggregate("sequence_mean"))


@register_preset(
    f"{_GSPO}; mean over responses, A per token", f"{_SOURCE}, eq. 11", "the same value as gspo: g = s A_t covers both forms"
)  # fmt: skip
def gspo_token(epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Spec:
    """GSPO's token form: advantages may differ within a response."""
    return gspo(epsilon_low, epsilon_high)


@register_preset(
    f"{_GSPO}; sum over tokens, mean over responses: length x the response's loss",
    "Liu et al. 2026, Length-Unbiased Sequence Policy Optimization, arXiv 2602.05261",
    "the bounds are those of TRL's recipe; Liger sums over padding too where the loss is per token",
)
def luspo(epsilon_low: float = 2e-3, epsilon_high: float = 2.5e-3) -> Spec:
    """GSPO without its length bias: every token of a response counts, however long it is."""
    return _geometric(1.0 - epsilon_low, 1.0 + epsilon_high, "sequence", Aggregate("sequence_sum", 1.0))


@register_preset(
    "J = A R, R = exp(mean_t clamp(log w_t)), log w_t held at -+epsilon on the side that A pushes to; mean over responses",
    "Zhao et al. 2025, Geometric-Mean Policy Optimization, arXiv 2507.20673, eq. 4",
    "epsilon bounds log w, (e^-0.4, e^0.4); verl averages A over the response and takes a plain mean of each "
    "micro-batch, which scales the gradient with their number",
)
def gmpo(epsilon: float = 0.4) -> Spec:
    """The geometric mean of token ratios that are clipped one by one."""
    if not 0.0 <= epsilon <= 700.0:
        raise UserError(
            f"epsilon={epsilon!r} bounds log w: it must be from 0 to 700 (e^700 is near the largest number)"
        )
    where = region(ratio_low=math.exp(-epsilon), ratio_high=math.exp(epsilon))
    return Spec((Guard(where),), (Factor(scope="sequence", clipped=True),), (), Aggregate("sequence_mean"))


@register_preset(
    "J = min(s A, clip(s, 1 - epsilon, 1 + epsilon) A), s = exp(mean of log w over the token's turn); mean over responses",
    "ROLL, agentic training, ratio_type='segment'",
    "a turn is a run of unmasked tokens between tool outputs, numbered by the batch's segment",
)
def segment(epsilon: float = 0.2) -> Spec:
    """The geometric mean of the ratios of each turn, clipped and weighed as one."""
    return _geometric(1.0 - epsilon, 1.0 + epsilon, "segment", Aggregate("sequence_mean"))
