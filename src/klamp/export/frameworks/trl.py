"""TRL: GRPOConfig. The mean and the loss share one flag, loss_type."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_CLIP = {"epsilon": "=1 - low", "epsilon_high": "=high - 1"}
_SEQUENCE = {"importance_sampling_level": "sequence"}
_EVEN = ("gradient_per_response",)
_MEANS = {
    "token_mean": ways(Way({"loss_type": "dapo"})),
    "sequence_mean": ways(Way({"loss_type": "grpo"}, rows="all")),
    "sequence_sum": ways(
        Way({"loss_type": "luspo"}, needs=("divisor = 1",), rows="all"),
        Way(
            {"loss_type": "dr_grpo", "max_completion_length": "=divisor"},
            needs=("whole divisor",),
            rows="all",
            notes=("the divisor is max_completion_length, which is also the longest completion that is generated",),
        ),
    ),
    "local_token_mean": ways(Way({"loss_type": "bnpo"})),
}
_SAMPLER = {"use_vllm": True, "vllm_importance_sampling_correction": True}
_BOUNDS = {"vllm_importance_sampling_clip_max": "=high", "vllm_importance_sampling_clip_min": "=low or none"}


def _correction(mode: str) -> tuple[Way, ...]:
    return ways(Way(_SAMPLER | {"vllm_importance_sampling_mode": mode} | _BOUNDS))


_KL = {"kl_k3": ways(Way({"beta": "=beta", "use_bias_correction_kl": False}))}
_GMPO = ("with GMPOConfig and GMPOTrainer of trl.experimental.gmpo, which applies no sampler correction",)

TRL = Framework(
    name="trl",
    title="TRL",
    version="1.16.0",
    syntax="python",
    call="GRPOConfig",
    base={
        "importance_sampling_level": "token",
        "beta": 0.0,
        "delta": None,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "off_policy_mask_threshold": None,
        "vllm_importance_sampling_correction": False,
    },
    forms={
        "clip": ways(Way(_CLIP)),
        "dual_clip": ways(Way(_CLIP | {"delta": "=c"}, needs=("c >= high",))),
        "sequence_clip": ways(Way(_CLIP | _SEQUENCE, edges=_EVEN, penalties=_KL)),
        "sequence_dual_clip": ways(
            Way(_CLIP | _SEQUENCE | {"delta": "=c"}, needs=("c >= high",), edges=_EVEN, penalties=_KL)
        ),
        "capped_weight": ways(
            Way({"epsilon_high": "=high"}, ("no lower bound",), means={"token_mean": ways(Way({"loss_type": "cispo"}))})
        ),
        "soft_gate": ways(
            Way(
                {"sapo_temperature_pos": "=tau_pos", "sapo_temperature_neg": "=tau_neg"},
                edges=("float32_numbers",),
                means={"sequence_mean": ways(Way({"loss_type": "sapo"}, rows="all"))},
            )
        ),
        "gamma": ways(
            Way(
                {"vespo_k_pos": "=k_positive", "vespo_lambda_pos": "=lambda_positive", "vespo_k_neg": "=k_negative",
                 "vespo_lambda_neg": "=lambda_negative"},
                edges=("gamma_clamp", "float32_numbers"),
                means={"token_mean": ways(Way({"loss_type": "vespo"}))},
                corrections={},
            )
        ),
        "clipped_geometric": ways(
            Way(
                {"epsilon": "=-log low", "epsilon_high": "=log high"},
                edges=("advantage_per_response", "empty_geometric"),
                notes=_GMPO,
                call="GMPOConfig",
                means={"sequence_mean": ways(Way(rows="all"))},
                corrections={},
                penalties=_KL,
            )
        ),
    },
    means=_MEANS,
    anchors={"old": {}},
    corrections={
        "token_truncate": _correction("token_truncate"),
        "token_mask": _correction("token_mask"),
        "sequence_truncate": _correction("sequence_truncate"),
        "sequence_mask": _correction("sequence_mask"),
        "negatives_rollout": ways(Way({"use_vllm": True, "off_policy_mask_threshold": "=delta"})),
        "negatives_old": ways(Way({"use_vllm": False, "off_policy_mask_threshold": "=delta"})),
    },
    penalties=_KL | {
        "kl_k3_weighted": ways(Way({"beta": "=beta", "use_bias_correction_kl": True})),
        "entropy": ways(Way({"entropy_coef": "=coefficient"}, differs=("entropy_of_micro_batch unless local_token_mean",))),
    },
    hook="subclass GRPOTrainer and override _compute_loss(model, inputs); there is no loss registry",
    related={
        "plain": "loss_type='cispo' with epsilon_high=inf weighs by the detached ratio, which is 1 on-policy",
        "new/rollout": "trl.experimental.async_grpo takes the ratio to the sampler",
        "product": "RLOOTrainer clips the product of a response's ratios",
        "entropy": "top_entropy_quantile drops the tokens of low entropy, by a quantile of each micro-batch",
    },
    notes=(
        "advantages are divided by the group's standard deviation + 1e-4 unless scale_rewards='none'",
        "loss_type grpo, bnpo, dr_grpo, luspo and sapo are means per micro-batch: exact for equal micro-batches; dapo, "
        "cispo and vespo where steps_per_generation equals gradient_accumulation_steps",
    ),
    traps=(
        "epsilon_high is an offset for a clip, but the absolute cap of loss_type='cispo' (no lower bound); its default "
        "there is epsilon = 0.2, which would clamp every weight to 0.2",
        "with vLLM a sequence_mask of the product old/rollout at 3.0 is on by default",
        "use_bias_correction_kl=True is the default: k3 times the differentiable ratio",
        "loss_type's default is dapo",
        "use_liger_kernel no longer changes the loss",
    ),
)  # fmt: skip
