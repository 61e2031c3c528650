"""Liger 0.8.5: ``chunked_loss.grpo_loss``, its loss types and options."""

from __future__ import annotations

from typing import Any

from conformance.rows import DIFFERS, Row


def _loss(name: str, **options: Any) -> dict[str, Any]:
    return {"options": {"loss_type": name, "beta": 0.0, **options}}


ROWS: tuple[Row, ...] = (
    Row("loss_type=grpo", ("loss_type grpo", "importance_sampling_level token"), _loss("grpo"), "grpo()"),
    Row("loss_type=bnpo", ("loss_type bnpo",), _loss("bnpo"), "bnpo()"),
    Row("loss_type=dr_grpo", ("loss_type dr_grpo",), _loss("dr_grpo", max_completion_length=9), "dr_grpo(divisor=9)"),
    Row("loss_type=dapo", ("loss_type dapo",), _loss("dapo", epsilon_high=0.28), "dapo()"),
    Row("loss_type=cispo", ("loss_type cispo",), _loss("cispo", epsilon_high=1.3), "cispo_absolute(high=1.3)"),
    Row("loss_type=sapo", ("loss_type sapo",), _loss("sapo"), "sapo()"),
    Row("loss_type=vespo", ("loss_type vespo",), _loss("vespo"), "vespo()"),
    Row(
        "loss_type=vespo, vllm_is_ratio", ("loss_type vespo", "option vllm_is_ratio"),
        {"options": {"loss_type": "vespo", "beta": 0.0, "vllm": True}}, "vespo(ratio='new/rollout')", DIFFERS,
        "Liger sums the logarithm of the sampler's ratio over padding too (TRL has 1 there); equal where the ratio is 1 "
        "in padding.",
        adjust="padding_in_the_product",
    ),
    Row(
        "loss_type=luspo, importance_sampling_level=sequence", ("loss_type luspo", "importance_sampling_level sequence"),
        _loss("luspo", importance_sampling_level="sequence", epsilon_low=2e-3, epsilon_high=2.5e-3), "luspo()",
        cases=("near-0", "near-1", "near-2"),
    ),
    Row(
        "loss_type=luspo, token ratios", ("loss_type luspo",), _loss("luspo"), "dr_grpo(divisor=1)", DIFFERS,
        "Liger weighs each position by the response's length and divides by the padded width, over padding too, where "
        "TRL sums the unmasked tokens.",
        test="test_liger.test_luspo_over_tokens_includes_padding",
    ),
    Row(
        "importance_sampling_level=sequence (GSPO)", ("importance_sampling_level sequence",),
        _loss("grpo", importance_sampling_level="sequence", epsilon_low=0.1, epsilon_high=0.15),
        "gspo(epsilon_low=0.1, epsilon_high=0.15)",
    ),
    Row("delta", ("option delta",), _loss("grpo", delta=1.5), "two_sided(delta=1.5)"),
    Row(
        "beta", ("option beta", "option use_bias_correction_kl"), _loss("grpo", beta=0.3), "grpo() + kl_reference(beta=0.3)"
    ),
    Row(
        "beta, use_bias_correction_kl", ("option use_bias_correction_kl",),
        _loss("grpo", beta=0.3, use_bias_correction_kl=True), "grpo() + kl_reference(beta=0.3, weighted=True)",
    ),
    Row(
        "beta, use_bias_correction_kl at sequence level", ("option use_bias_correction_kl",),
        _loss("grpo", beta=0.3, use_bias_correction_kl=True, importance_sampling_level="sequence"),
        "gspo(epsilon_low=0.2, epsilon_high=0.2) + kl_reference(beta=0.3, weighted=True)", DIFFERS,
        "Liger multiplies each token's penalty by the response's geometric-mean ratio, Klamp by the token's own, which is "
        "what makes it unbiased.",
        test="test_liger.test_the_kl_is_weighed_by_the_response",
    ),
    Row("vllm_is_ratio", ("option vllm_is_ratio",), {"options": {"loss_type": "dapo", "beta": 0.0, "vllm": True}},
        "ppo() + tis(high=inf)"),
    Row(
        "LigerFusedLinearGRPOLoss, the whole layer", ("loss_type dapo", "loss_type grpo", "loss_type cispo"), _loss("dapo"),
        "ppo()", DIFFERS,
        "From hidden states and the output matrix Liger makes its logits in float32, whatever the inputs are: equal to 2e-6. "
        "The rows above are of its loss on given log-probs.",
        test="test_liger.test_the_fused_layer",
    ),
    Row(
        "a response without a token", ("loss_type grpo",), _loss("grpo"), "grpo()", DIFFERS,
        "Liger counts it in the mean over responses; Klamp does with rows=all.",
        cases=("empty-0", "empty-1"), exactly="grpo(aggregate=sequence_mean(rows=all))",
    ),
)  # fmt: skip
