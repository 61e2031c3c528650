"""Methods that penalise a divergence in place of cutting it."""

from __future__ import annotations

from klamp.aggregates import Aggregate
from klamp.factors import Factor
from klamp.language import register_preset
from klamp.measures import Measure, Phi, measure
from klamp.penalties import FPenalty
from klamp.spec import Spec

_measure = measure


@register_preset(
    "J = w A - beta f(w), f = w - 1 - log w, an estimator of KL(old||new); beta doubles or halves around target",
    "Schulman et al. 2017, arXiv 1707.06347, eq. 8",
    "the KL is estimated at the sampled tokens, not summed over the vocabulary",
)
def ppo_kl_penalty(beta: float = 1.0, target: float | None = None, measure: str | Measure | Phi = "k3") -> Spec:
    """PPO's KL penalty, fixed or adaptive, with any measure."""
    return Spec((), (Factor(),), (FPenalty(_measure(measure), beta, target=target),), Aggregate("sequence_mean"))
