"""verl: ``policy_loss.loss_mode=klamp`` is the loss of a spec, called and averaged by verl's own actor.

Importing this module registers the loss. verl does so through its entry points ``verl.plugins``, where this package has
one, or through ``VERL_USE_EXTERNAL_MODULES=klamp.bridges.verl``.

    L_t = value_t.detach() + c_t - c_t.detach(),   c_t = -(g_t - penalty slope_t) log pi_new_t
    loss = agg_loss(L, mask, loss_agg_mode, **global_batch_info)

verl passes log-probs of two policies, advantages, the mask and the counts of the whole step, and nothing else: a spec that
needs more is refused when the loss is built.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.workers.config import PolicyLossConfig

from klamp.aggregates import Aggregate
from klamp.batch import Batch, segments
from klamp.errors import UserError, did_you_mean
from klamp.export import export
from klamp.objective import LossOutput, Objective
from klamp.presets import parse
from klamp.spec import Spec, part_text

NAME = "klamp"
SPEC = "KLAMP_SPEC"
_POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
_CORRECTION = "algorithm.rollout_correction"
_LINK = f"+{_POLICY_LOSS}.rollout_correction='${{{_CORRECTION}}}'"

# verl's means as ours: the count that each divides by, and the means of a spec that are the same.
_COUNTS = {
    "token-mean": "batch_num_tokens", "token-sum": None, "seq-mean-token-mean": "global_batch_size",
    "seq-mean-token-sum": "global_batch_size", "seq-mean-token-sum-norm": "global_batch_size",
}  # fmt: skip
_MEANS = {
    "token_mean": "token-mean", "token_sum": "token-sum", "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum-norm",
}  # fmt: skip
# verl's own constraints, which this loss does not read.
_UNREAD = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
_ELSEWHERE = frozenset({"guard/removed_active_share"})  # its count is not the tokens, and may be 0 in a micro-batch


@dataclass
class KlampLossConfig(PolicyLossConfig):  # type: ignore[misc]
    """verl's ``policy_loss`` with a spec; in Hydra by ``policy_loss._target_=klamp.bridges.verl.KlampLossConfig``.

    ``spec``: the text of a spec; empty means the environment's KLAMP_SPEC. ``rollout_correction``, a field of verl's own:
    ``${algorithm.rollout_correction}`` where the spec reads the rollout's log-probs; its default says nothing of them. Raises
    UserError where verl does not pass what the spec needs.
    """

    loss_mode: str = NAME
    spec: str = ""

    def __post_init__(self) -> None:
        if self.loss_mode != NAME:
            raise UserError(f"{type(self).__name__} is the configuration of loss_mode={NAME}; got {self.loss_mode!r}")
        _asked(self)


@dataclass(frozen=True)
class Correction:
    """What ``algorithm.rollout_correction`` makes of the log-probs that verl passes.

    ``bypass``: the old policy is the rollout's. ``raw``: the weights are old/rollout itself, token by token, so that the
    rollout's log-probs follow from them. Otherwise the weights are a correction of verl's, and multiply the loss.
    """

    bypass: bool = False
    raw: bool = False

    @classmethod
    def of(cls, setting: Mapping[str, Any]) -> Correction:
        """From verl's configuration. Raises UserError for what bypass_mode leaves to verl's own loss."""
        level, threshold = setting.get("rollout_is"), setting.get("rollout_is_threshold")
        if not setting.get("bypass_mode", False):
            unbounded = "_" not in str(threshold) and float(threshold or 0.0) == math.inf
            return cls(raw=level == "token" and unbounded and not setting.get("rollout_is_batch_normalize", False))
        for name, value in (("rollout_is", level), ("rollout_rs", setting.get("rollout_rs"))):
            if value is not None:
                raise UserError(
                    f"{_CORRECTION}.{name}={value!r} has no effect with bypass_mode=true and loss_mode={NAME}: set it to null "
                    "and write it in the spec, for example + guard(ratio='new/rollout', ratio_high=2.0, gate='always')"
                )
        return cls(bypass=True)

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"segment"} | ({"logp_rollout"} if self.bypass or self.raw else set()))


@register_policy_loss(NAME)  # type: ignore[untyped-decorator]
def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of the configured spec over one micro-batch, and its metrics, as verl's actor calls it; tensors [B, T].

    Raises UserError for a spec that verl cannot serve, a mean that is not the spec's, or a count that verl did not pass.
    """
    if config is None:
        raise UserError("the loss needs verl's ActorConfig: it holds the spec and the counts of the whole step")
    objective, mean, correction = _asked(config.policy_loss)
    _check_unread(config)
    _check_mean(mean, objective.spec, loss_agg_mode, config.global_batch_info)
    mask = response_mask.bool()
    batch = _batch(objective.spec, correction, mask, old_log_prob, log_prob, advantages, rollout_is_weights)
    out = objective(batch)
    carried = (out.grad_penalty - out.grad_policy) * torch.where(mask, log_prob, 0.0)
    losses = out.per_token + (carried - carried.detach())
    if rollout_is_weights is not None and batch.logp_rollout is None:
        losses = losses * torch.where(mask, rollout_is_weights, 0.0)
    loss: Tensor = agg_loss(loss_mat=losses, loss_mask=mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return loss, _metrics(out, mask, mean)


# --- the spec -------------------------------------------------------------------------------------------------


def _asked(setting: Any) -> tuple[Objective, Aggregate | None, Correction]:
    """What verl's ``policy_loss`` asks for: the objective, the mean that its spec wants, the meaning of the weights."""
    own, environment = str(getattr(setting, "spec", "") or ""), os.environ.get(SPEC, "")
    if own and environment and parse(own) != parse(environment):
        raise UserError(f"{_POLICY_LOSS}.spec={own!r} and {SPEC}={environment!r} differ; give one of them")
    if not own and not environment:
        raise UserError(
            f"loss_mode={NAME} needs a spec: {_POLICY_LOSS}._target_={__name__}.KlampLossConfig and "
            f"+{_POLICY_LOSS}.spec='atr_grpo(delta=0.02)', or the environment variable {SPEC}"
        )
    return _built(own or environment, Correction.of(setting.rollout_correction))


@cache
def _built(text: str, correction: Correction) -> tuple[Objective, Aggregate | None, Correction]:
    spec = parse(text)
    _require(spec, correction)
    # verl averages: the objective's own mean is never used.
    return Objective(dataclasses.replace(spec, aggregate=None, name=str(spec))), spec.aggregate, correction


def _require(spec: Spec, correction: Correction) -> None:
    """Raise UserError unless verl passes what the spec needs."""
    ratios = [guard.ratio for guard in spec.guards] + [factor.ratio for factor in spec.factors]
    if correction.bypass and "old/rollout" in ratios:
        raise UserError(
            f"{spec} corrects by old/rollout, which is 1 with {_CORRECTION}.bypass_mode=true: leave the correction out, or "
            "set bypass_mode=false"
        )
    if spec.mean.kind not in _MEANS:
        raise _refused(spec, f"averages by {spec.mean.kind}, and verl has only {', '.join(_MEANS)}")
    lacking = sorted(spec.needs - correction.offers)
    if lacking == ["logp_rollout"]:
        raise UserError(
            f"{spec} reads the rollout's log-probs, which verl passes only as {_CORRECTION}.rollout_is=token with "
            f"rollout_is_threshold=inf (or as the old ones, with bypass_mode=true), and the loss must be told: {_LINK}"
        )
    if lacking:
        raise _refused(spec, f"needs {', '.join(lacking)}, which verl does not pass to a policy loss")
    if spec.asks_step:
        raise _refused(spec, "asks the whole step first, and verl shows a policy loss one micro-batch at a time")
    state = Objective(dataclasses.replace(spec, aggregate=None)).init()
    if state:
        raise _refused(
            spec, f"changes from step to step ({', '.join(state)}), and verl does not count steps for a policy loss"
        )
    if "moves_unsampled" in spec.traits:
        raise _refused(spec, "moves tokens that were not sampled, and verl passes only the sampled ones' log-probs")


def _refused(spec: Spec, why: str) -> UserError:
    found = export(dataclasses.replace(spec, aggregate=None, name=str(spec)), "verl")
    other = f"verl has no flags for it either ({found.reason})" if found.reason else "verl has flags of its own for it"
    return UserError(f"{spec} {why}; {other}: klamp export '{spec}' --to verl")


def _check_unread(config: Any) -> None:
    usual = {field.name: field.default for field in dataclasses.fields(config)}
    for name in _UNREAD:
        value = getattr(config, name, None)
        if name in usual and value != usual[name]:
            raise UserError(
                f"actor.{name}={value!r} has no effect with loss_mode={NAME}: remove it, and say it in the spec, for "
                "example dapo(epsilon_low=0.2, epsilon_high=0.28)"
            )


def _check_mean(mean: Aggregate | None, spec: Spec, mode: str, info: Mapping[str, Any]) -> None:
    """Raise UserError unless ``loss_agg_mode`` is the spec's mean, and verl passes the counts that make it exact."""
    if mode not in _COUNTS:
        raise UserError(f"loss_agg_mode={mode!r} is unknown; {did_you_mean(mode, _COUNTS)}")
    divisor = info.get("loss_scale_factor") if mode == "seq-mean-token-sum-norm" else 1.0
    if divisor is None:
        raise UserError(
            f"loss_agg_mode={mode} without actor.loss_scale_factor divides by the width of each micro-batch: set it, for "
            "example to the longest response"
        )
    absent = [name for name in ("dp_size", _COUNTS[mode]) if name is not None and info.get(name) is None]
    if absent:
        raise UserError(
            f"verl passed no {' and '.join(absent)}, so loss_agg_mode={mode} would be a mean of this micro-batch alone; "
            "verl.workers.utils.losses.ppo_loss puts the counts of the whole step into config.global_batch_info"
        )
    if mean is None:
        return
    same = "seq-mean-token-sum" if mean.divisor == 1.0 else _MEANS[mean.kind]
    if same != mode or (mean.kind == "sequence_sum" and mean.divisor not in (None, divisor)):
        with_divisor = f" with loss_scale_factor={divisor}" if mode.endswith("norm") else ""
        also = f" actor.loss_scale_factor={mean.divisor or 1024:g}" if same.endswith("norm") else ""
        raise UserError(
            f"{spec} averages by {part_text(mean)}, verl by loss_agg_mode={mode}{with_divisor}: set "
            f"actor.loss_agg_mode={same}{also}, or give the spec another aggregate="
        )


# --- the batch ------------------------------------------------------------------------------------------------


def _batch(
    spec: Spec,
    correction: Correction,
    mask: Tensor,
    old: Tensor,
    new: Tensor,
    advantages: Tensor,
    weights: Tensor | None,
) -> Batch:
    """Klamp's batch of what verl passes."""
    rollout = None
    if correction.bypass:
        if weights is not None:
            raise UserError(
                f"verl passed rollout_is_weights, but {_CORRECTION}.bypass_mode=true has none; set it to false"
            )
        rollout = old
    elif "logp_rollout" in spec.needs:
        if weights is None:
            raise UserError(
                f"{spec} reads the rollout's log-probs, and verl passed no rollout_is_weights: set {_CORRECTION}.rollout_is="
                "token and actor_rollout_ref.rollout.calculate_log_probs=true"
            )
        rollout = torch.where(mask, old - weights.log(), 0.0)
    turns = segments(mask) if "segment" in spec.needs else None
    return Batch(new, old, advantages, mask, logp_rollout=rollout, segment=turns, missing="raise")


# --- metrics --------------------------------------------------------------------------------------------------


def _metrics(out: LossOutput, mask: Tensor, mean: Aggregate | None) -> dict[str, float]:
    """Means and counts of this micro-batch by Klamp's names; verl averages them over micro-batches and ranks.

    Every micro-batch has the same names, as verl's collection over ranks wants it; 0 where there is no token.
    """
    pairs = {name: pair for name, pair in out.metrics.means.items() if name not in _ELSEWHERE}
    values = {name: total.double() / count.clamp(min=1) for name, (total, count) in pairs.items()}
    values |= {name: value for name, value in out.metrics.sums.items() if value.ndim == 0}
    values["batch/empty_rows_count"] = (~mask.any(dim=1)).sum()
    shown = dict(zip(values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True))
    broken = shown.pop("batch/nonfinite_count", 0.0)
    if broken:
        raise UserError(f"{int(broken)} non-finite log-probs or advantages at unmasked positions of this micro-batch")
    if shown["batch/empty_rows_count"] and mean is not None and mean.kind.startswith("sequence") and mean.rows != "all":
        warnings.warn(
            "a response without a token counts in verl's mean over responses, and not in the spec's; rows=all says so",
            stacklevel=2,
        )
    return shown
