"""Corrections for a sampler that is not the trainer: guards and factors on old/rollout, composed with a method.

They have no mean of their own: ``dapo() + tis(high=2.0)``.
"""

from __future__ import annotations

import math

from klamp.conditions import Condition, condition
from klamp.coupled import Normalized
from klamp.errors import UserError, check_choice
from klamp.factors import Factor
from klamp.guards import GATES, Guard
from klamp.language import register_preset
from klamp.regions import region
from klamp.spec import Spec
from klamp.transforms import Cap, Identity

_RHO = "old/rollout"
_SCOPES = {"token": ("token", "mean"), "sequence": ("sequence", "sum"), "geometric": ("sequence", "mean")}
_REDUCED = {
    "token": ("token", "mean"),
    "sequence_mean": ("sequence", "mean_after"),
    "sequence_sum": ("sequence", "sum_after"),
    "sequence_max": ("sequence", "max_after"),
}
_COMPOSED = "a correction to compose with a method: it has no mean of its own"


@register_preset(
    "J = clamp(v, low, high) J_base, v = old/rollout per token, per response (product) or its geometric mean; detached",
    "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy Training (truncated importance sampling)",
    f"{_COMPOSED}; normalize divides the weights by their mean over the step, as verl's rollout_is_batch_normalize",
)
def tis(high: float = 2.0, low: float = 0.0, scope: str = "token", normalize: bool = False) -> Spec:
    """Truncated importance sampling from the sampler's policy to the trainer's."""
    check_choice("scope", scope, tuple(_SCOPES))
    if not isinstance(normalize, bool):
        raise UserError(f"normalize={normalize!r} must be True or False")
    cap, (over, how) = Cap(low, high), _SCOPES[scope]
    return Spec((), (Factor(Normalized(cap) if normalize else cap, _RHO, over, how),))


def _masked(low: float, high: float, scope: str) -> Spec:
    over, how = _SCOPES[scope]
    found = Guard(region(ratio_low=low, ratio_high=high), _RHO, over, how, gate=GATES["always"], cut_value="zero")
    return Spec((found,), (Factor(Identity(), _RHO, over, how),))


@register_preset(
    "J = v J_base where low <= v <= high, else 0, v = old/rollout per token, per response (product) or its geometric mean",
    "Liu et al. 2025, When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch (MIS)",
    _COMPOSED,
)
def mis(low: float = 0.5, high: float = 5.0, scope: str = "token") -> Spec:
    """Masked importance sampling: no gradient where sampler and trainer disagree, their ratio as the weight elsewhere."""
    check_choice("scope", scope, tuple(_SCOPES))
    return _masked(low, high, scope)


@register_preset(
    "J = v J_base where low <= v <= high, else 0, v = old/rollout per token",
    "Ling Team 2025, Every Step Evolves, arXiv 2510.18855 (IcePop)",
    _COMPOSED,
)
def icepop(low: float = 0.5, high: float = 5.0) -> Spec:
    """Double-sided masking of tokens whose sampler and trainer disagree."""
    return _masked(low, high, "token")


@register_preset(
    "J = v J_base where low <= v <= high, else 0, v = prod_t pi_old / pi_rollout of the response",
    "TRL 1.16, GRPOConfig vllm_importance_sampling_mode='sequence_mask' (its default, cap 3.0)",
    _COMPOSED,
)
def sequence_mask(high: float = 3.0, low: float = 0.0) -> Spec:
    """Cut responses whose sampler and trainer disagree, and weigh the others by their ratio."""
    return _masked(low, high, "sequence")


@register_preset(
    "J = J_base where low <= exp(mean_t log v_t) <= high, else 0, v = old/rollout",
    "verl rollout_correction, rollout_rs='seq_mean_k1' with 0.999_1.001; Liu et al. 2025, When Speed Kills Stability",
    f"{_COMPOSED}; no weight: add tis() for one. verl drops such responses from the denominator: rs_k1",
)
def geometric_mask(low: float = 0.999, high: float = 1.001) -> Spec:
    """Cut responses whose mean log-ratio between sampler and trainer is far from 0."""
    where = region(ratio_low=low, ratio_high=high)
    return Spec((Guard(where, _RHO, "sequence", gate=GATES["always"], cut_value="zero"),))


@register_preset(
    "no gradient from a response with A < 0 and mean_t log(pi_rollout / pi_new) > delta",
    "DeepSeek-AI 2025, DeepSeek-V3.2, arXiv 2512.02556, section 3.1 (off-policy sequence masking)",
    f"{_COMPOSED}; ratio='new/old' measures from the recomputed policy, as slime does by default (delta 1e-4)",
)
def opsm(delta: float = 0.5, ratio: str = "new/rollout") -> Spec:
    """Cut wrong responses that the policy has already moved away from."""
    check_choice("ratio", ratio, ("new/rollout", "new/old"))
    found = Guard(condition("k1", delta), ratio, "sequence", gate=GATES["negative"], cut_value="zero")
    return Spec((found,))


@register_preset(
    "keep = (mean_t |v - 1| <= radius over the response) | ~outward of v, J = min(v, cap) keep J_base, v = old/rollout",
    "open-instruct, rho_mask_tv_divergence (after VACO, arXiv 2603.01365)",
    f"{_COMPOSED}; open-instruct's configuration accepts no radius below 1 in this mode, so it has no default of its own",
)
def vaco(radius: float = 0.2, cap: float = 2.0) -> Spec:
    """A total-variation mask: in responses far from the sampler, cut the tokens that would move further."""
    found = Guard(condition("ratio_dev", radius), _RHO, "sequence", "mean_after")
    return Spec((found,), (Factor(Cap(0.0, cap), _RHO),))


def _rejected(where: Condition, scope: str) -> Spec:
    check_choice("scope", scope, tuple(_REDUCED))
    over, how = _REDUCED[scope]
    action = "drop" if scope == "token" else "drop_row"
    return Spec((Guard(where, _RHO, over, how, gate=GATES["always"], action=action, cut_value="zero"),))


_REJECTION = "verl rollout_correction, rollout_rs"


@register_preset(
    "drop where v = old/rollout (its product, or geometric mean, over the response) is outside [1 / high, 1 / low]",
    f"{_REJECTION}='token_k1', 'seq_sum_k1', 'seq_mean_k1'",
    "low and high bound rollout/old, the inverse ratio, as verl's thresholds do; what is dropped leaves the denominator",
)
def rs_k1(low: float = 0.5, high: float = 2.0, scope: str = "token") -> Spec:
    """Rejection of tokens or responses by the log-ratio between sampler and trainer."""
    over = {"token": ("token", "mean"), "sequence_mean": ("sequence", "mean"), "sequence_sum": ("sequence", "sum")}
    check_choice("scope", scope, tuple(over))
    if not 0.0 < low <= 1.0 <= high < math.inf:
        raise UserError(
            f"low={low!r} and high={high!r} bound rollout/old: 0 < low <= 1 <= high < inf; 0.5 and 2.0 are usual"
        )
    where = region(ratio_low=1.0 / high, ratio_high=1.0 / low)
    action = "drop" if scope == "token" else "drop_row"
    found = Guard(where, _RHO, *over[scope], gate=GATES["always"], action=action, cut_value="zero")
    return Spec((found,))


@register_preset(
    "drop where (log v)^2 / 2 > radius, v = old/rollout, of the token or its mean, sum or maximum over the response",
    f"{_REJECTION}='token_k2', 'seq_mean_k2', 'seq_sum_k2', 'seq_max_k2'",
    "what is dropped leaves the denominator of the mean",
)
def rs_k2(radius: float = 0.1, scope: str = "token") -> Spec:
    """Rejection of tokens or responses by half the squared log-ratio between sampler and trainer."""
    return _rejected(condition("k2", radius), scope)


@register_preset(
    "drop where v - 1 - log v > radius, v = old/rollout, of the token or its mean, sum or maximum over the response",
    f"{_REJECTION}='token_k3', 'seq_mean_k3', 'seq_sum_k3', 'seq_max_k3'",
    "what is dropped leaves the denominator of the mean; AReaL's kl_k3 is of the inverse ratio",
)
def rs_k3(radius: float = 0.1, scope: str = "token") -> Spec:
    """Rejection of tokens or responses by the KL3 estimator between sampler and trainer."""
    return _rejected(condition("k3", radius), scope)
