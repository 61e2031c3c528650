"""verl: Hydra overrides of the actor and of algorithm.rollout_correction."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_A = "actor_rollout_ref.actor."
_MODE = f"{_A}policy_loss.loss_mode"
_C = "algorithm.rollout_correction."
_CLIP = {f"{_A}clip_ratio_low": "=1 - low", f"{_A}clip_ratio_high": "=high - 1"}
_RADII = {f"{_A}clip_ratio_low": "=low", f"{_A}clip_ratio_high": "=high"}
_NEVER = {f"{_A}clip_ratio_c": 1e9}
_OLD = {"old": {f"{_C}bypass_mode": False}}
# The workers read the loss and its correction from policy_loss alone: bypass_mode does not reach them.
_TO_ROLLOUT = {
    "rollout": {
        f"{_C}bypass_mode": True,
        f"{_C}loss_type": "reinforce",
        _MODE: "bypass_mode",
        f"+{_A}policy_loss.rollout_correction": "${algorithm.rollout_correction}",
    }
}
_PER_RESPONSE = {
    "sequence_mean": ways(Way({f"{_A}loss_agg_mode": "seq-mean-token-mean"}, edges=("count_1e-8",), rows="all"))
}


def _truncate(level: str) -> tuple[Way, ...]:
    flags = {f"{_C}rollout_is": level, f"{_C}rollout_is_threshold": "=high"}
    return ways(Way(flags, needs=("no lower bound", "an upper bound"), edges=("rho_20",)))


def _mask(level: str) -> tuple[Way, ...]:
    flags = {f"{_C}rollout_is": level, f"{_C}rollout_is_threshold": "={low}_{high}"}
    return ways(Way(flags, needs=("an upper bound",), edges=("rho_20",)))


def _binary(mode: str, *edges: str) -> dict[str, tuple[Way, ...]]:
    where = ("log_ratio_20", *edges)
    return {
        mode.replace("dppo", "binary"): ways(
            Way(_RADII | _NEVER | {_MODE: mode}, differs=("weight_value",), edges=where, anchors=_OLD)
        ),
        mode.replace("dppo", "binary") + "_capped": ways(
            Way(_RADII | {_MODE: mode, f"{_A}clip_ratio_c": "=cap"}, edges=where, anchors=_OLD)
        ),
    }


def _kl(estimator: str, *edges: str) -> tuple[Way, ...]:
    return ways(
        Way(
            {f"{_A}use_kl_loss": True, f"{_A}kl_loss_coef": "=beta", f"{_A}kl_loss_type": estimator},
            edges=edges,
        )
    )


def _reject(value: str, *needs: str) -> tuple[Way, ...]:
    return ways(
        Way(
            {f"{_C}rollout_rs": "=option", f"{_C}rollout_rs_threshold": value},
            needs=needs,
            differs=("rejected_rows unless token_mean",),
            edges=("rho_20",),
        )
    )


_CORRECTIONS = {
    "token_truncate": _truncate("token"),
    "token_mask": _mask("token"),
    "sequence_truncate": _truncate("sequence"),
    "sequence_mask": _mask("sequence"),
}
_REJECTIONS = {
    "reject_ratio": _reject("={1 / high}_{1 / low}", "two bounds"),
    "reject_k2": _reject("=radius"),
    "reject_k3": _reject("=radius"),
}
# A rejected token leaves the response's own ratio too, so that beside one only whole responses may be rejected.
_WHOLE = _CORRECTIONS | {
    "reject_ratio": _reject("={1 / high}_{1 / low}", "two bounds", "whole responses"),
    "reject_k2": _reject("=radius", "whole responses"),
    "reject_k3": _reject("=radius", "whole responses"),
}

VERL = Framework(
    name="verl",
    title="verl",
    version="main at 1dda039b (2026-08-22)",
    syntax="overrides",
    call="",
    base={
        _MODE: "vanilla",
        f"{_A}use_kl_loss": False,
        f"{_A}entropy_coeff": 0.0,
        "algorithm.use_kl_in_reward": False,
        f"{_C}rollout_is": None,
        f"{_C}rollout_rs": None,
        f"{_C}bypass_mode": False,
    },
    forms={
        "clip": ways(Way(_CLIP | _NEVER, edges=("log_ratio_20",))),
        "dual_clip": ways(Way(_CLIP | {f"{_A}clip_ratio_c": "=c"}, needs=("c > 1",), edges=("log_ratio_20",))),
        "sequence_clip": ways(
            Way(
                _CLIP | {_MODE: "gspo"},
                edges=("log_ratio_10",),
                anchors=_OLD,
                means=_PER_RESPONSE,
                corrections=_WHOLE,
            )
        ),
        "capped_weight": ways(
            Way(_CLIP | {_MODE: "cispo"}, edges=("log_ratio_20",), anchors=_OLD),
            Way(
                {f"{_C}rollout_is": "token", f"{_C}rollout_is_threshold": "=high"},
                needs=("no lower bound", "an upper bound"),
                edges=("log_ratio_20",),
                anchors=_TO_ROLLOUT,
            ),
        ),
        "masked_weight": ways(
            Way(
                {f"{_C}rollout_is": "token", f"{_C}rollout_is_threshold": "={low}_{high}"},
                needs=("an upper bound",),
                edges=("log_ratio_20",),
                anchors=_TO_ROLLOUT,
            )
        ),
        "soft_gate": ways(
            Way(
                {_MODE: "sapo", f"{_A}tau_pos": "=tau_pos", f"{_A}tau_neg": "=tau_neg"},
                edges=("log_ratio_20",),
                anchors=_OLD,
                means=_PER_RESPONSE,
            )
        ),
        **_binary("dppo_tv"),
        **_binary("dppo_kl", "binary_kl_1e-8"),
        "clipped_geometric": ways(
            Way(
                {_MODE: "geo_mean", f"{_A}clip_ratio_low": "=-log low", f"{_A}clip_ratio_high": "=log high"},
                edges=("count_1e-8", "advantage_per_response"),
                notes=(
                    "geo_mean averages each micro-batch without a global count: with FSDP the gradient grows with the "
                    "number of micro-batches",
                ),
                anchors=_OLD,
                means={"sequence_mean": ways(Way(rows="all"))},
                corrections={},
                penalties={},
            )
        ),
        "plain": ways(Way({_MODE: "gpg"})),
        "plain + k2_to_old": ways(Way({_MODE: "dro", f"{_A}policy_loss.dro_beta": "=beta"}, anchors=_OLD)),
        "clip + log_ratio_to_old_on_top_covariance": ways(
            Way(
                {_MODE: "kl_cov", f"{_A}policy_loss.kl_cov_ratio": "=share", f"{_A}policy_loss.ppo_kl_coef": "=beta"},
                needs=("no bounds",),
                edges=("covariance_ties",),
                differs=("covariance_of_micro_batch",),
                anchors=_OLD,
            )
        ),
    },
    means={
        "token_mean": ways(Way({f"{_A}loss_agg_mode": "token-mean"})),
        "sequence_mean": _PER_RESPONSE["sequence_mean"],
        "sequence_sum": ways(
            Way({f"{_A}loss_agg_mode": "seq-mean-token-sum"}, needs=("divisor = 1",), rows="all"),
            Way(
                {f"{_A}loss_agg_mode": "seq-mean-token-sum-norm", f"{_A}loss_scale_factor": "=divisor"},
                needs=("whole divisor",),
                rows="all",
            ),
        ),
        "token_sum": ways(Way({f"{_A}loss_agg_mode": "token-sum"})),
    },
    anchors=_OLD | {"rollout": {f"{_C}bypass_mode": True, f"{_C}loss_type": "ppo_clip"}},
    corrections=_CORRECTIONS | _REJECTIONS,
    penalties={
        "kl_k1": _kl("k1"),
        "kl_k2": _kl("k2"),
        "kl_k3": _kl("k3", "kl_clamp"),
        "kl_abs": _kl("abs"),
        "kl_k1_as_k2": _kl("k1+"),
        "kl_k3_as_k2": _kl("k3+", "kl_clamp"),
        "entropy": ways(Way({f"{_A}entropy_coeff": "=coefficient"})),
    },
    hook=(
        "loss_mode=klamp (docs/verl.md) is any spec that reads no more than verl passes; or register_policy_loss(name) of "
        "verl.trainer.ppo.core_algos, imported in the workers through VERL_USE_EXTERNAL_MODULES or the entry-point group "
        "verl.plugins; the function never sees rollout or reference log-probs"
    ),
    related={
        "random": "loss_mode=clip_cov draws tokens by covariance, with each micro-batch's own means and its own random draw",
        "drop": "rollout_rs takes comma-separated token_k1, token_k2, token_k3, seq_sum_*, seq_mean_*, seq_max_k2, seq_max_k3",
    },
    notes=(
        "advantages are divided by the group's standard deviation + 1e-6 unless algorithm.norm_adv_by_std_in_grpo=false",
        "loss_mode gspo and sapo average by seq-mean-token-mean whatever loss_agg_mode says",
    ),
    traps=(
        "clip_ratio_c = 3.0 is always on in loss_mode=vanilla: a dual clip; 1e9 is beyond the largest ratio, so it never acts",
        "for dppo_tv and dppo_kl clip_ratio_low and clip_ratio_high are divergences in natural units, and clip_ratio_c caps "
        "the weight (the configuration's 3.0 wins over the code's 20)",
        "for geo_mean clip_ratio_low and clip_ratio_high are log-ratios",
        "rollout_rs k1 bounds are of rollout/old, the inverse ratio; with bypass_mode every rollout_rs measures new/rollout",
        "bypass_mode leaves the workers' loss_mode as it is (verl issue 4912): loss_type=reinforce, and rollout_is and rollout_rs in "
        "bypass_mode, need loss_mode=bypass_mode and policy_loss.rollout_correction",
        "loss_scale_factor=null divides by the padded width, which varies",
    ),
)  # fmt: skip
