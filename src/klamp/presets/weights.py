"""Methods that weigh the policy gradient rather than cut it."""

from __future__ import annotations

import math

from klamp.aggregates import Aggregate
from klamp.coupled import Contrast
from klamp.errors import UserError, check_choice
from klamp.factors import Factor
from klamp.gates import AnyGate, Ring
from klamp.guards import GATES, Guard
from klamp.language import register_preset
from klamp.measures import Measure, Phi
from klamp.measures import measure as measure_of
from klamp.presets.clips import dapo
from klamp.regions import region
from klamp.spec import Spec
from klamp.transforms import BySign, Cap, DivergenceGate, ExpAdvantage, Gamma, SoftGate, Transform

_TOKENS = Aggregate("token_mean")


@register_preset("J = A log pi_new", "Williams 1992; the policy gradient without importance weights")
def reinforce() -> Spec:
    """The plain policy gradient: no ratio, no region."""
    return Spec((), (), (), _TOKENS)


@register_preset(
    "J = A log pi_new",
    "Chu et al. 2025, GPG: Group Policy Gradient, arXiv 2504.02546, eq. 5",
    "the same value as reinforce(); its scaling by the share of groups with a signal is the advantage estimator 'gpg'",
)
def gpg() -> Spec:
    """Group policy gradient: the plain policy gradient on group advantages."""
    return reinforce()


@register_preset(
    "J = sg(clip(w, 1 - epsilon_low, 1 + epsilon_high)) A log pi_new; mean over all tokens",
    "MiniMax 2025, MiniMax-M1, arXiv 2506.13585, eq. 4",
    "the paper has no lower bound in effect and does not print epsilon_high; [0, 5] is SkyRL's. TRL, Liger and ms-swift "
    "take epsilon_high as the absolute cap: cispo_absolute",
)
def cispo(epsilon_high: float = 4.0, epsilon_low: float = 1.0) -> Spec:
    """Capped importance weights, bounds as offsets from 1: the gradient survives outside the region."""
    return cispo_absolute(1.0 + epsilon_high, 0.0 if epsilon_low > 1.0 else 1.0 - epsilon_low)


@register_preset(
    "J = sg(clip(w, low, high)) A log pi_new; mean over all tokens",
    "MiniMax 2025, arXiv 2506.13585, eq. 4, with TRL's absolute bound (epsilon_high=5.0, after arXiv 2510.13786)",
)
def cispo_absolute(high: float = 5.0, low: float = 0.0) -> Spec:
    """Capped importance weights, bounds as absolute ratios."""
    return Spec((), (Factor(Cap(low, high)),), (), _TOKENS)


@register_preset(
    "J = sg(clip(w, low, high)) A log pi_new; mean over all tokens", "ROLL, pg_variant='tis' (bounds 0 and 1)"
)
def tis_loss(high: float = 1.0, low: float = 0.0) -> Spec:
    """Truncated importance weights as the loss: no token counts more than on-policy."""
    return cispo_absolute(high, low)


@register_preset(
    "J = A log pi_new for A > 0, sg(min(w, 1)) A log pi_new for A < 0, w of the whole response; sum over tokens, mean over responses",
    "Le Roux et al. 2025, Tapered Off-Policy REINFORCE, arXiv 2503.14286, eq. 8",
    "the sign is the advantage's, where the paper's is the reward's; ROLL takes w per token: scope='token'",
)
def topr(scope: str = "sequence") -> Spec:
    """Right answers as they are, wrong ones with a truncated weight."""
    check_choice("scope", scope, ("sequence", "token"))
    weight = BySign(negative=Cap(0.0, 1.0))
    factor = Factor(weight, scope=scope, reduce="sum" if scope == "sequence" else "mean")
    return Spec((), (factor,), (), Aggregate("sequence_sum", 1.0))


@register_preset(
    "J = (4 / tau) sigmoid(tau (w - 1)) A, tau = tau_pos for A > 0, else tau_neg; mean over responses",
    "Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv 2511.20347",
    "TRL holds the temperatures in float32",
)
def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05) -> Spec:
    """A soft gate in place of the clip: the weight fades with the distance of w from 1."""
    return Spec((), (Factor(SoftGate(tau_pos, tau_neg)),), (), Aggregate("sequence_mean"))


@register_preset(
    "J = sg(W^k exp(lambda (1 - W))) A log pi_new, W = prod_t w_t, k and lambda by the sign of A; mean over all tokens",
    "Shen et al. 2026, VESPO, arXiv 2602.10693",
    "W is of new/old; where the sampler is another engine the paper's W is ratio='new/rollout'. TRL clamps log W to "
    "[log 1e-8, 20], where the weight is 0 to rounding",
)
def vespo(
    k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0, ratio: str = "new/old"
) -> Spec:
    """A gamma-shaped weight of the whole response's ratio, 1 on-policy."""
    factor = Factor(Gamma(k_pos, lambda_pos, k_neg, lambda_neg), ratio, "sequence", "sum")
    return Spec((), (factor,), (), _TOKENS)


@register_preset(
    "g = w A h(D(w) / radius), h(y) = exp(-y^power) or 1 / (1 + y^power); mean over responses of token means",
    "the soft form of the constraint D(w) <= radius of Wu et al. 2026, arXiv 2602.05494; SAPO is its neighbour",
    "no publication of its own: the value of J is that of a detached weight, sg(w h) A log pi_new",
)
def divergence_gate(
    measure: str | Measure | Phi = "k3",
    radius: float = 0.02,
    shape: str = "exp",
    power: float = 1.0,
    outward: bool = True,
) -> Spec:
    """A soft trust region of any measure: the weight fades with D in place of a cut."""
    gate = DivergenceGate(measure_of(measure), radius, shape, power, outward)
    return Spec((), (Factor(gate),), (), Aggregate("sequence_mean"))


@register_preset(
    "J = sg(v 1[1 - epsilon_low <= v <= 1 + epsilon_high]) A log pi_new, v = new/rollout; mean over all tokens",
    "SkyRL, policy_loss_type='rollout_is' (GLM-5's IcePop policy gradient)",
    "SkyRL's inequalities are strict",
)
def rollout_is(epsilon_low: float = 0.2, epsilon_high: float = 0.2) -> Spec:
    """Importance weights from the sampler's policy, cut on both sides whatever the sign of A."""
    where = region(ratio_low=1.0 - epsilon_low, ratio_high=1.0 + epsilon_high)
    found = Guard(where, "new/rollout", gate=GATES["always"], cut_value="zero")
    return Spec((found,), (Factor(Cap(), "new/rollout"),), (), _TOKENS)


@register_preset(
    "J = sg(weight) keep A log pi_new; keep by no, a one-sided (outward), a two-sided region, or all but a ring around it",
    "Yao et al. 2025, Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203, section 4 (REC)",
    "ring_low and ring_high are offsets from 1 as epsilon is; with weight='is' and clip='one_side' the gradient is PPO's",
)
def rec(
    clip: str = "one_side",
    weight: str = "is",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    ring_low: float = 0.6,
    ring_high: float = 2.0,
    temperature: float = 1.0,
) -> Spec:
    """REINFORCE with clipping: where the gradient is cut and how it is weighed, chosen apart."""
    gates: dict[str, AnyGate] = {
        "one_side": GATES["outward"],
        "two_side": GATES["always"],
        "ring": Ring(1.0 - ring_low, 1.0 + ring_high),
    }
    weights: dict[str, Transform | None] = {"none": None, "is": Cap(), "exp_advantage": ExpAdvantage(temperature)}
    check_choice("clip", clip, ("none", *gates))
    check_choice("weight", weight, tuple(weights))
    where = region(ratio_low=1.0 - epsilon_low, ratio_high=1.0 + epsilon_high)
    guards = () if clip == "none" else (Guard(where, gate=gates[clip], cut_value="zero"),)
    transform = weights[weight]
    return Spec(guards, () if transform is None else (Factor(transform),), (), _TOKENS)


@register_preset(
    "J = sg(clamp(exp(sum_{j >= t} gamma^(j - t) log w_j), 1, high)) min(w A, clip(w) A), gamma = 2^(-1 / half_life)",
    "ms-swift, loss_type='fipo' (future-KL influenced policy optimization)",
    "its two exceptions are not here: tokens above a dual clip leave the future sum, and for A < 0 with w > 4 the "
    "weight is held in [0.8, 1]",
)
def fipo(
    epsilon_low: float = 0.2, epsilon_high: float = 0.28, half_life: float = 32.0, high: float = 1.2, low: float = 1.0
) -> Spec:
    """A token weighs more if what follows it in the response has become more likely."""
    if not 1e-2 < half_life < math.inf:
        raise UserError(f"half_life={half_life!r} must be a finite number of tokens above 0.01")
    influence = Factor(Cap(low, high), "new/old", "suffix", "sum", 2.0 ** (-1.0 / half_life))
    return dapo(epsilon_low, epsilon_high) + influence


@register_preset(
    "L = log(1 + sum_{A < 0} e^S) + log(1 + sum_{A > 0} e^-S) of each prompt's responses, S = mean_t log w_t / tau; mean over prompts",
    "ms-swift, loss_type='real' (rewards as labels: a classification of the group's responses)",
    "a loss of a whole group, not a constraint: the gradient is the loss's, the value of a token is sg(g) log pi_new; "
    "groups whose answers are all right or all wrong give 0 and count in the mean, and A = 0 is neither right nor wrong",
)
def real(tau: float = 0.5) -> Spec:
    """Right against wrong answers of a prompt, as a classifier with the ratio as its score."""
    if not 0.0 < tau < math.inf:
        raise UserError(f"tau={tau!r} must be a finite number above 0; 0.5 is usual")
    return Spec((), (Factor(Contrast(tau), scope="sequence"),), (), Aggregate("prompt_sum"))
