"""TRL 1.16.0: every switch of ``GRPOTrainer._compute_loss``, and the trainers that replace it."""

from __future__ import annotations

from typing import Any

from conformance.rows import DIFFERS, Row

TAU32 = 1.0499999523162842  # 1.05 rounded to float32
_VLLM = {"use_vllm": True, "loss_type": "grpo"}


def _loss(name: str, **options: Any) -> dict[str, Any]:
    return {"loss_type": name, **options}


def _rho(mode: str, spec: str, label: str = "", **options: Any) -> Row:
    call = {**_VLLM, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.5, **options}
    return Row(f"vllm_importance_sampling_mode={mode}{label}", (f"vllm_importance_sampling_mode {mode}",), call, spec)


OUTSIDE = {
    "A2POTrainer": "a regression of beta log(new/ref) of a response onto its reward: no ratio, no region, no advantage",
    "SDFTTrainer": "distillation", "GKDTrainer": "distillation", "GOLDTrainer": "distillation", "IWOPDTrainer": "distillation",
    "DistillationTrainer": "distillation", "AsyncDistillationTrainer": "distillation",
    "ServerDistillationTrainer": "distillation",
    "DPOTrainer": "pairs of answers", "OnlineDPOTrainer": "pairs of answers", "CPOTrainer": "pairs of answers",
    "ORPOTrainer": "pairs of answers", "TPOTrainer": "triples of answers", "KTOTrainer": "labelled answers",
    "RewardTrainer": "a reward model", "SFTTrainer": "supervised",
}  # fmt: skip
"""Trainers whose loss is no policy gradient on sampled answers, and what it is."""

ROWS: tuple[Row, ...] = (
    Row("loss_type=grpo", ("loss_type grpo", "importance_sampling_level token"), _loss("grpo"), "grpo()"),
    Row("loss_type=bnpo", ("loss_type bnpo",), _loss("bnpo"), "bnpo()"),
    Row("loss_type=dr_grpo", ("loss_type dr_grpo",), _loss("dr_grpo", max_completion_length=9), "dr_grpo(divisor=9)"),
    Row("loss_type=dapo", ("loss_type dapo",), _loss("dapo", epsilon_high=0.28), "dapo()"),
    Row("loss_type=cispo", ("loss_type cispo",), _loss("cispo", epsilon_high=1.3), "cispo_absolute(high=1.3)"),
    Row(
        "loss_type=sapo, temperatures that float32 holds", ("loss_type sapo",),
        _loss("sapo", sapo_temperature_neg=1.5), "sapo(tau_neg=1.5)",
    ),
    Row(
        "loss_type=sapo, the default temperatures", ("loss_type sapo",), _loss("sapo"), "sapo()", DIFFERS,
        "TRL holds the temperatures in float32 whatever the log-probs are: 1.05 is 1.04999995.",
        exactly=f"sapo(tau_neg={TAU32!r})",
    ),
    Row("loss_type=vespo", ("loss_type vespo",), _loss("vespo"), "vespo()"),
    Row(
        "loss_type=vespo, vLLM's ratio within its cap", ("loss_type vespo",),
        _loss("vespo", use_vllm=True, vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1e6),
        "vespo(ratio='new/rollout')",
    ),
    Row(
        "loss_type=vespo, vLLM's ratio above its cap", ("loss_type vespo",),
        _loss("vespo", use_vllm=True, vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1.2),
        "vespo(ratio='new/rollout')", DIFFERS,
        "TRL caps old/rollout of each token before it enters the product W; equal where the sampler's log-probs are "
        "raised until no token is above the cap.",
        adjust="rollout_within_cap",
    ),
    Row(
        "loss_type=luspo", ("loss_type luspo",),
        _loss("luspo", importance_sampling_level="sequence", epsilon=2e-3, epsilon_high=2.5e-3), "luspo()",
        cases=("near-0", "near-1", "near-2"),
    ),
    Row("loss_type=luspo, token ratios", ("loss_type luspo",), _loss("luspo"), "dr_grpo(divisor=1)"),
    Row(
        "importance_sampling_level=sequence (GSPO)", ("importance_sampling_level sequence",),
        _loss("grpo", importance_sampling_level="sequence", epsilon=0.1, epsilon_high=0.15),
        "gspo(epsilon_low=0.1, epsilon_high=0.15)",
    ),
    Row(
        "importance_sampling_level=sequence, GSPO's own bounds", ("importance_sampling_level sequence",),
        _loss("grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4), "gspo()",
        cases=("near-0", "near-1", "near-2"),
    ),
    Row(
        "importance_sampling_level=sequence, loss_type=dapo", ("importance_sampling_level sequence",),
        _loss("dapo", importance_sampling_level="sequence", epsilon=0.1),
        "gspo(epsilon_low=0.1, epsilon_high=0.1, aggregate=token_mean)",
    ),
    Row(
        "importance_sampling_level=sequence, loss_type=cispo", ("importance_sampling_level sequence",),
        _loss("cispo", importance_sampling_level="sequence", epsilon_high=1.05),
        "factor(transform=cap(high=1.05), scope='sequence') + token_mean()",
    ),
    Row(
        "importance_sampling_level=sequence, loss_type=sapo", ("importance_sampling_level sequence",),
        _loss("sapo", importance_sampling_level="sequence", sapo_temperature_neg=1.5),
        "factor(transform=soft_gate(tau_negative=1.5), scope='sequence') + sequence_mean()",
    ),
    Row("delta", ("option delta",), _loss("grpo", delta=1.5), "two_sided(delta=1.5)"),
    Row("delta, loss_type=dapo", ("option delta",), _loss("dapo", delta=1.5), "two_sided(delta=1.5, base='ppo()')"),
    Row(
        "delta below 1 + epsilon_high", ("option delta",), _loss("grpo", delta=1.1, epsilon_high=0.3),
        "two_sided(delta=1.3, base='dapo(epsilon_high=0.1, aggregate=sequence_mean)')",
    ),
    Row(
        "off_policy_mask_threshold", ("option off_policy_mask_threshold",), _loss("grpo", off_policy_mask_threshold=0.05),
        "grpo() + opsm(delta=0.05, ratio='new/old')",
    ),
    Row(
        "off_policy_mask_threshold with vLLM's log-probs", ("option off_policy_mask_threshold",),
        {**_VLLM, "off_policy_mask_threshold": 0.05, "vllm_importance_sampling_correction": False},
        "grpo() + opsm(delta=0.05)",
    ),
    Row(
        "top_entropy_quantile", ("option top_entropy_quantile",), _loss("grpo", top_entropy_quantile=0.3),
        "grpo() + guard(region='nowhere', gate=entropy_below(quantile=0.7))",
    ),
    Row(
        "top_entropy_quantile over micro-batches", ("option top_entropy_quantile",),
        _loss("grpo", top_entropy_quantile=0.3), "grpo() + guard(region='nowhere', gate=entropy_below(quantile=0.7))",
        DIFFERS, "TRL takes the quantile of each micro-batch (over ranks), Klamp of the whole step.",
        test="test_micro_batches.test_trls_gradient_depends_on_the_cut",
    ),
    Row(
        "beta, use_bias_correction_kl=False", ("option beta", "option use_bias_correction_kl"),
        _loss("grpo", beta=0.3, use_bias_correction_kl=False), "grpo() + kl_reference(beta=0.3)",
    ),
    Row(
        "beta, use_bias_correction_kl=True (the default)", ("option beta", "option use_bias_correction_kl"),
        _loss("grpo", beta=0.3), "grpo() + kl_reference(beta=0.3, weighted=True)",
    ),
    Row(
        "beta, loss_type=dapo", ("option beta",), _loss("dapo", beta=0.3), "ppo() + kl_reference(beta=0.3, weighted=True)"
    ),
    Row(
        "beta, use_bias_correction_kl=True at sequence level", ("option use_bias_correction_kl",),
        _loss("grpo", beta=0.3, importance_sampling_level="sequence"),
        "gspo(epsilon_low=0.2, epsilon_high=0.2) + kl_reference(beta=0.3, weighted=True)", DIFFERS,
        "TRL multiplies each token's penalty by the response's geometric-mean ratio, Klamp by the token's own, which is what "
        "makes it unbiased.",
        test="test_trl.test_the_kl_is_weighed_by_the_response",
    ),
    _rho("token_truncate", "grpo() + tis(high=1.5)"),
    _rho("token_truncate", "grpo() + tis(high=1.5, low=0.8)", ", clip_min", vllm_importance_sampling_clip_min=0.8),
    _rho("token_mask", "grpo() + mis(low=0.0, high=1.5)"),
    _rho("token_mask", "grpo() + icepop(low=0.8, high=1.5)", ", clip_min", vllm_importance_sampling_clip_min=0.8),
    _rho("sequence_truncate", "grpo() + tis(high=1.5, scope='sequence')"),
    _rho("sequence_mask", "grpo() + sequence_mask(high=1.5)"),
    _rho("sequence_mask", "grpo() + sequence_mask(high=1.5, low=0.6)", ", clip_min", vllm_importance_sampling_clip_min=0.6),
    Row(
        "a token that vLLM did not score", ("vllm_importance_sampling_mode token_truncate",),
        {**_VLLM, "vllm_importance_sampling_mode": "token_truncate"}, "grpo() + tis(high=3.0)", DIFFERS,
        "TRL gives a missing log-prob the ratio 1; Klamp leaves its response out and counts it, or with "
        "missing='token' the token.",
        cases=("unscored-0", "unscored-1"), adjust="rollout_is_old_where_missing",
    ),
    Row("entropy_coef", ("option entropy_coef",), _loss("bnpo", entropy_coef=0.02), "bnpo() + entropy_bonus(coefficient=0.02)"),
    Row(
        "entropy_coef, loss_type=grpo", ("option entropy_coef",), _loss("grpo", entropy_coef=0.02),
        "grpo() + entropy_bonus(coefficient=0.02)", DIFFERS,
        "TRL averages the bonus over tokens whatever the loss is averaged over; Klamp averages both alike.",
        test="test_trl.test_the_entropy_bonus_is_a_token_mean",
    ),
    Row(
        "use_adaptive_entropy", ("option use_adaptive_entropy",), _loss("bnpo", entropy_coef=0.02, use_adaptive_entropy=True),
        "bnpo() + entropy_bonus(coefficient=0.02)", DIFFERS,
        "TRL moves the coefficient after each step and leaves the bonus out while the entropy is above its target; in Klamp "
        "the coefficient is a constant. In each step the loss is bnpo() with the coefficient of that step.",
        test="test_trl.test_the_adaptive_entropy_coefficient_is_one_number_per_step",
    ),
    Row(
        "top_entropy_quantile with entropy_coef", ("option top_entropy_quantile", "option entropy_coef"),
        _loss("bnpo", top_entropy_quantile=0.3, entropy_coef=0.02),
        "bnpo() + guard(region='nowhere', gate=entropy_below(quantile=0.7)) + entropy_bonus(coefficient=0.02)", DIFFERS,
        "TRL averages the bonus over the tokens of high entropy alone; Klamp's is on every token.",
        test="test_trl.test_the_entropy_bonus_is_of_the_tokens_of_high_entropy",
    ),
    Row(
        "a response without a token", ("loss_type grpo",), _loss("grpo"), "grpo()", DIFFERS,
        "TRL counts it in the mean over responses; Klamp does with rows=all.",
        cases=("empty-0", "empty-1"), exactly="grpo(aggregate=sequence_mean(rows=all))",
    ),
    Row(
        "a window that is not the generation batch", ("loss_type dapo",), {**_loss("dapo"), "window": 2.0}, "ppo()", DIFFERS,
        "TRL divides by the mean window of the generation batch, Klamp by the tokens of the window that is summed.",
        adjust="half_the_weight",
    ),
    Row("GMPOTrainer", ("trainer GMPOTrainer",), {"trainer": "GMPOTrainer"}, "gmpo()"),
    Row(
        "GMPOTrainer, a response without a token", ("trainer GMPOTrainer",), {"trainer": "GMPOTrainer"}, "gmpo()", DIFFERS,
        "TRL counts it in the mean over responses, as Klamp does with rows=all, and has -A for its loss: the geometric "
        "mean of no ratio is 1.",
        test="test_trl.test_gmpo_has_a_loss_for_a_response_without_a_token",
    ),
    Row(
        "GMPOTrainer, epsilon and beta", ("trainer GMPOTrainer",), {"trainer": "GMPOTrainer", "epsilon": 0.1, "beta": 0.3},
        "gmpo(epsilon=0.1) + kl_reference(beta=0.3)",
    ),
    Row(
        "RLOOTrainer", ("trainer RLOOTrainer",), {"trainer": "RLOOTrainer"},
        "guard(ratio_low=0.8, ratio_high=1.2, scope='sequence', reduce='sum') + "
        "factor(scope='sequence', reduce='sum') + sequence_sum(divisor=1)", DIFFERS,
        "The gradient is equal. The value is not: Klamp sums a response's value over its tokens, TRL has it once.",
        test="test_trl.test_rloo_is_the_product_of_ratios",
    ),
    *(
        Row(f"SDPOTrainer, the policy term, loss_type={name}", ("trainer SDPOTrainer",), {"trainer": "SDPOTrainer", **call}, spec)
        for name, call, spec in (
            ("grpo", _loss("grpo"), "grpo()"),
            ("bnpo", _loss("bnpo"), "bnpo()"),
            ("dr_grpo", _loss("dr_grpo", max_completion_length=9), "dr_grpo(divisor=9)"),
            ("dapo", _loss("dapo", epsilon_high=0.28), "dapo()"),
        )
    ),
    Row("AsyncGRPOTrainer", ("trainer AsyncGRPOTrainer",), {"trainer": "AsyncGRPOTrainer"}, "ppo()"),
)  # fmt: skip
