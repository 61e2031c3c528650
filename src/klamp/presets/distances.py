"""Masks by a divergence that reads more than the ratio: the token's probability, or the whole step."""

from __future__ import annotations

import math

from klamp.aggregates import Aggregate
from klamp.conditions import Budget, Nowhere, condition
from klamp.errors import check_choice
from klamp.factors import Factor
from klamp.gates import CovarianceTop, CovarianceWindow, EntropyBelow
from klamp.gates import gate as gate_of
from klamp.guards import GATES, Guard
from klamp.language import register_preset
from klamp.measures import MEASURES
from klamp.penalties import FPenalty, check_positive
from klamp.presets.clips import ppo
from klamp.regions import Radius
from klamp.spec import Spec
from klamp.transforms import Cap, Identity, Transform
from klamp.whole import TOP_K

_TOKENS = Aggregate("token_mean")
_DPPO = "Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879"
_CAPPED = (
    "the ratio is to old; ratio='new/rollout' is the paper's sampler. verl and Stable-RL cap the weight: 20 and 10 in their "
    "code, 3 in effect (their actor's clip_ratio_c wins): cap=3.0, and read clip_ratio_low and clip_ratio_high, never clip_ratio alone. A = 0 has no gradient either way"
)


def _masked(measure: str, delta: Radius, cap: float, ratio: str, top_k: int | None = None) -> Spec:
    check_choice("ratio", ratio, ("new/old", "new/rollout"))
    weight: Transform = Identity() if cap == math.inf else Cap(0.0, cap)
    return Spec((Guard(condition(measure, delta, top_k=top_k), ratio),), (Factor(weight, ratio),), (), _TOKENS)


@register_preset(
    "J = w A keep, keep = (|p_new - p_old| <= delta) | ~outward; with a cap: sg(min(w, cap)) keep A log pi_new",
    f"{_DPPO} (binary TV)", _CAPPED,
)  # fmt: skip
def dppo_tv(delta: Radius = 0.15, cap: float = math.inf, ratio: str = "new/old") -> Spec:
    """A mask by the total variation of {token, any other}: rare tokens may move far, likely ones may not."""
    return _masked("binary_tv", delta, cap, ratio)


@register_preset(
    "J = w A keep, keep = (KL of {token, any other}, old to new, <= delta) | ~outward; with a cap: sg(min(w, cap)) keep A log pi_new",
    f"{_DPPO} (binary KL)",
    f"{_CAPPED}; those add 1e-8 to both complements, so that at 0.05 their mask never fires above p = 0.996",
)
def dppo_kl(delta: Radius = 0.05, cap: float = math.inf, ratio: str = "new/old") -> Spec:
    """A mask by the KL divergence of {token, any other}."""
    return _masked("binary_kl_old_new", delta, cap, ratio)


_BUCKETS = (
    "the old policy's k likeliest tokens, the sampled token and the rest, whose mass is its own log-sum-exp; Stable-RL takes the sampler's "
    "k, puts the sampled token in the place of the last, floors the mass of the rest at 1e-12, and caps the weight"
)


@register_preset(
    "J = w A keep, keep = (TV over {token}, the k likeliest tokens and the rest, <= delta) | ~outward; with a cap: sg(min(w, cap)) keep A log pi_new",
    f"{_DPPO} (top-K TV)", _BUCKETS,
)  # fmt: skip
def dppo_topk_tv(delta: Radius = 0.15, k: int = TOP_K, cap: float = math.inf) -> Spec:
    """A mask by the total variation of the whole distribution, nearly: the likeliest tokens and the rest."""
    return _masked("topk_tv", delta, cap, "new/old", k)


@register_preset(
    "J = w A keep, keep = (KL over {token}, the k likeliest tokens and the rest, old to new, <= delta) | ~outward; with a cap: sg(min(w, cap)) keep A log pi_new",
    f"{_DPPO} (top-K KL)", _BUCKETS,
)  # fmt: skip
def dppo_topk_kl(delta: Radius = 0.05, k: int = TOP_K, cap: float = math.inf) -> Spec:
    """A mask by the KL divergence of the whole distribution, nearly: the likeliest tokens and the rest."""
    return _masked("topk_kl_old_new", delta, cap, "new/old", k)


@register_preset(
    "J = v A where |p_new - p_rollout| <= threshold, else 0, v = new/rollout; minus kl_tau (log v)^2 on every token",
    "prime-rl, loss type='ipo'",
)
def ipo(threshold: float = 0.1, kl_tau: float = 1e-3) -> Spec:
    """A two-sided probability mask and a squared log-ratio penalty, both to the sampler's policy."""
    ratio = "new/rollout"
    found = Guard(condition("binary_tv", threshold), ratio, gate=GATES["always"])
    penalty = FPenalty(MEASURES["k2"], 2.0 * check_positive("kl_tau", kl_tau), ratio)
    return Spec((found,), (Factor(Identity(), ratio),), (penalty,), _TOKENS)


@register_preset(
    "J = w A keep; of the outward tokens those with the largest (log w)^2 are cut until its mean over all tokens <= threshold",
    "Zheng et al. 2025, Prosperity before Collapse (M2PO), arXiv 2510.01161",
    "of the whole step, where Trinity takes a mini-batch; AReaL's takes both tails of old/rollout in each micro-batch and "
    "the mean over what is kept: ratio='old/rollout', gate='always', over='kept'",
)
def m2po(threshold: float = 0.04, ratio: str = "new/old", gate: str = "outward", over: str = "all") -> Spec:
    """A budget for the second moment of the log-ratios: only the furthest tokens are cut."""
    found = Guard(Budget(MEASURES["k2"], 0.5 * threshold, over), ratio, gate=gate_of(gate))
    return Spec((found,), (Factor(),), (), _TOKENS)


_COV = (
    "Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617"
)


@register_preset(
    "J = w A - coefficient |log w| on the share of tokens with the largest (A - mean A)(log pi_new - its mean)",
    f"{_COV} (KL-Cov)",
    "means and selection are of the whole step; verl (coefficient 0.1) and SkyRL (share 0.2) take each micro-batch's",
)
def kl_cov(share: float = 2e-4, coefficient: float = 1.0) -> Spec:
    """A penalty on the few tokens that drive the entropy down."""
    chosen = Guard(Nowhere(), gate=CovarianceTop(share))
    penalty = FPenalty(MEASURES["log_ratio"], check_positive("coefficient", coefficient), on=chosen)
    return Spec((), (Factor(),), (penalty,), _TOKENS)


@register_preset(
    "J = min(w A, clip(w) A), and 0 for a random share of the tokens with low < (A - mean A)(log pi_new - its mean) < high",
    f"{_COV} (Clip-Cov)",
    "means and draw are of the whole step, the draw by the smallest hash(seed, step, row, position); verl and SkyRL "
    "draw in each micro-batch",
)
def clip_cov(share: float = 2e-4, low: float = 1.0, high: float = 5.0, epsilon: float = 0.2, seed: int = 0) -> Spec:
    """PPO's clip, and no gradient from a few of the tokens that drive the entropy down."""
    base = ppo(epsilon)
    chosen = Guard(Nowhere(), gate=CovarianceWindow(share, low, high, base.guards[0], seed))
    return base + chosen


@register_preset(
    "keep = H >= the quantile of the entropies of the whole step",
    "Wang et al. 2025, Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective RL for LLM Reasoning, arXiv 2506.01939",
    "cut tokens stay in the mean's denominator; TRL (top_entropy_quantile=0.2 is quantile=0.8 here) takes each micro-batch's quantile",
)
def entropy_mask(quantile: float = 0.8) -> Spec:
    """Only the tokens of highest entropy train: 0.8 leaves a fifth of them."""
    return Spec((Guard(Nowhere(), gate=EntropyBelow(quantile)),))
