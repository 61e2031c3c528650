"""ms-swift: command-line flags of swift rlhf --rlhf_type grpo."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_CLIP = {"--epsilon": "=1 - low", "--epsilon_high": "=high - 1"}
_SEQUENCE = {"--importance_sampling_level": "sequence_token"}
_I = "--rollout_importance_sampling_"


def _correction(mode: str) -> tuple[Way, ...]:
    return ways(Way({f"{_I}mode": mode, f"{_I}threshold": "=high"}, needs=("no lower bound",), edges=("rho_20",)))


MS_SWIFT = Framework(
    name="ms-swift",
    title="ms-swift",
    version="main at 3602360a (2026-08-22)",
    syntax="flags",
    call="",
    base={
        "--importance_sampling_level": "token",
        "--beta": 0.0,
        "--top_entropy_quantile": 1.0,
        "--advantage_estimator": "grpo",
        "--kl_in_reward": "false",
    },
    forms={
        "clip": ways(Way(_CLIP)),
        "dual_clip": ways(Way(_CLIP | {"--delta": "=c"}, needs=("c >= high",))),
        "sequence_clip": ways(Way(_CLIP | _SEQUENCE)),
        "sequence_dual_clip": ways(Way(_CLIP | _SEQUENCE | {"--delta": "=c"}, needs=("c >= high",))),
        "capped_weight": ways(
            Way({"--epsilon_high": "=high"}, ("no lower bound",), means={"token_mean": ways(Way({"--loss_type": "cispo"}))})
        ),
        "soft_gate": ways(
            Way(
                {"--tau_pos": "=tau_pos", "--tau_neg": "=tau_neg"},
                means={"sequence_mean": ways(Way({"--loss_type": "sapo"}, rows="all"))},
            )
        ),
    },
    means={
        "token_mean": ways(Way({"--loss_type": "dapo"})),
        "sequence_mean": ways(Way({"--loss_type": "grpo"}, rows="all")),
        "sequence_sum": ways(
            Way(
                {"--loss_type": "dr_grpo", "--max_completion_length": "=divisor"},
                needs=("whole divisor",),
                rows="all",
                notes=("the divisor is max_completion_length, which is also the longest completion that is generated",),
            )
        ),
        "local_token_mean": ways(Way({"--loss_type": "bnpo"})),
    },
    anchors={"old": {}},
    corrections={
        "token_truncate": _correction("token_truncate"),
        "token_mask": _correction("token_mask"),
        "geometric_truncate": _correction("sequence_truncate"),
        "geometric_mask_token_weight": _correction("sequence_mask"),
        "negatives_rollout": ways(
            Way(
                {"--off_policy_sequence_mask_delta": "=delta"},
                differs=("correction_denominator if local_token_mean",),
                edges=("sign_of_response",),
            )
        ),
    },
    penalties={"kl_k3": ways(Way({"--beta": "=beta"}, edges=("kl_clamp",)))},
    hook="subclass its GRPOTrainer and override _compute_loss_and_metrics(model, model_inputs, grpo_batch); no registry",
    related={
        "suffix": (
            "--loss_type fipo weighs a clip by the discounted future log-ratio (half-life --fipo_decay_rate), but leaves tokens "
            "above --delta out of it and holds A < 0 with w > --fipo_safety_threshold 4.0 to [0.8, 1]"
        ),
        "group": "--loss_type real, --real_tau, with A <= 0 as the negative class and scale_rewards none",
        "entropy": "--top_entropy_quantile, by a quantile of each rank's micro-batch",
    },
    notes=("advantages are divided by the group's deviation + 1e-4 unless --scale_rewards none",),
    traps=(
        "--epsilon_high is the absolute cap of --loss_type cispo, whose default 0.2 would clamp every weight to 0.2",
        "--rollout_importance_sampling_mode sequence_truncate and sequence_mask use the geometric mean, with TRL's names",
        "--use_liger_kernel goes around this loss",
        "the sampler correction multiplies the KL penalty too",
    ),
    weighs_penalties=True,
)  # fmt: skip
