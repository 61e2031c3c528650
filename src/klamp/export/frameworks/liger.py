"""Liger: the constructor of LigerFusedLinearGRPOLoss. A closed set of losses with scalar bounds."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_CLIP = {"epsilon_low": "=1 - low", "epsilon_high": "=high - 1"}
_SEQUENCE = {"importance_sampling_level": "sequence"}
_EVEN = ("gradient_per_response",)
_KL = {"kl_k3": ways(Way({"beta": "=beta", "use_ref_model": True, "use_bias_correction_kl": False}))}

LIGER = Framework(
    name="liger",
    title="Liger",
    version="0.8.5, and main at ead96b61 (2026-08-21)",
    syntax="python",
    call="LigerFusedLinearGRPOLoss",
    base={"importance_sampling_level": "token", "beta": 0.0, "use_ref_model": False, "delta": None},
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
                means={"sequence_mean": ways(Way({"loss_type": "sapo"}, rows="all"))},
            )
        ),
        "gamma": ways(
            Way(
                {"vespo_k_pos": "=k_positive", "vespo_lambda_pos": "=lambda_positive", "vespo_k_neg": "=k_negative",
                 "vespo_lambda_neg": "=lambda_negative"},
                edges=("gamma_clamp", "float32_numbers"),
                means={"token_mean": ways(Way({"loss_type": "vespo"}))},
            )
        ),
    },
    means={
        "token_mean": ways(Way({"loss_type": "dapo"})),
        "sequence_mean": ways(Way({"loss_type": "grpo"}, rows="all")),
        "sequence_sum": ways(
            Way({"loss_type": "dr_grpo", "max_completion_length": "=divisor"}, needs=("whole divisor",), rows="all")
        ),
        "local_token_mean": ways(Way({"loss_type": "bnpo"})),
    },
    anchors={"old": {}},
    corrections={},
    penalties=_KL | {
        "kl_k3_weighted": ways(Way({"beta": "=beta", "use_ref_model": True, "use_bias_correction_kl": True})),
    },
    hook="none: the set of losses is closed and the bounds are scalars; a loss of one's own needs its own fused head",
    related={
        "old/rollout": "the call takes weights of one's own as vllm_is_ratio=, [B, T] or [B, 1], which multiply the policy term",
    },
    notes=(
        "pass num_items_in_batch= at the call: without it dapo, cispo and vespo divide by this micro-batch's tokens",
        "advantages are given by the caller",
    ),
    traps=(
        "beta = 0.04 (k3) is on by default",
        "epsilon_high is the absolute cap of loss_type='cispo'",
        "loss_type='luspo' at token level averages over padding too, so dr_grpo is written for every divisor",
        "sequence level with cispo, sapo or vespo is refused; so is delta with them in the Triton kernel",
    ),
)  # fmt: skip
