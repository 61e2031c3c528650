"""Methods without a hard guard: detached or soft weights of the gradient."""

from __future__ import annotations

from klamp.aggregates import Aggregate
from klamp.factors import Cap, Factor, SoftGate
from klamp.language import register_preset
from klamp.spec import Spec


@register_preset("J = A log pi_new", "Williams 1992; the policy gradient without importance weights")
def reinforce() -> Spec:
    """The plain policy gradient: no ratio, no region."""
    return Spec((), (), (), Aggregate("token_mean"))


@register_preset(
    "J = stop_gradient(clip(w, low, high)) A log pi_new; mean over all tokens",
    "MiniMax 2025, MiniMax-M1, arXiv 2506.13585, eq. 4",
    "low and high are absolute ratio bounds, as in TRL's epsilon_high, not offsets from 1",
)
def cispo(high: float = 5.0, low: float = 0.0) -> Spec:
    """Capped importance weights: the gradient survives outside the region."""
    return Spec((), (Factor(Cap(low, high)),), (), Aggregate("token_mean"))


@register_preset(
    "J = (4 / tau) sigmoid(tau (w - 1)) A, tau = tau_pos for A > 0, else tau_neg; mean over responses",
    "Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv 2511.20347",
)
def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05) -> Spec:
    """A soft gate in place of the clip: the weight fades with the distance of w from 1."""
    return Spec((), (Factor(SoftGate(tau_pos, tau_neg)),), (), Aggregate("sequence_mean"))
