"""Sentences for what differs, by key: anywhere in the loss, or only at its edges.

Braces are numbers of the spec, or ``theirs`` and ``ours``: what the framework does and what the spec asks for.
"""

from __future__ import annotations

DIFFERENCES: dict[str, str] = {
    "aggregate": (
        "the mean: it averages by {theirs}, the spec by {ours}; each token's own loss and gradient are the same, their "
        "weights in the mean are not"
    ),
    "anchor": (
        "the ratio is pi_new / pi_{theirs}, the spec's is pi_new / pi_{ours}: the same only where both hold the same "
        "log-probs"
    ),
    "cut_value": (
        "the value of a cut token: it counts A times the bound, the spec counts 0; gradients are the same"
    ),
    "weight_value": (
        "the value of a token: it counts sg(weight) A log pi_new, the spec weight A; gradients are the same"
    ),
    "ratio_value": (
        "the value of a token: it counts w A, the spec sg(w) A log pi_new; gradients are the same"
    ),
    "gradient_per_response": (
        "the gradient goes through the response's mean log-ratio: what a correction takes from single tokens is taken from all "
        "tokens of the response alike; the loss's value is the same"
    ),
    "kl_score": (
        "the KL penalty's gradient: beta * KL is multiplied by exp(log pi_new - sg(log pi_new)), so each token's slope is "
        "larger by beta times the KL estimate's value; the loss's value is the same"
    ),
    "penalty_corrected": (
        "the penalty is multiplied by the correction too; the spec corrects the policy term alone"
    ),
    "penalty_mean": (
        "the mean of the penalty: it averages the penalty by the mean over responses of token means, whichever mean the policy "
        "term has"
    ),
    "penalty_summed": (
        "the penalty is summed over tokens, where the policy term is averaged through its advantages: divide the coefficient "
        "by the tokens of a mini-batch"
    ),
    "penalty_anchor": "the KL penalty is weighted by new/rollout too; the spec weighs it by new/old",
    "entropy_of_micro_batch": (
        "the entropy bonus is the token mean of each micro-batch, averaged over micro-batches, whichever mean the policy term has"
    ),
    "correction_denominator": (
        "responses cut by this correction leave the mean's denominator too; the spec keeps them there"
    ),
    "rejected_rows": (
        "a rejected response leaves the mask but still counts in the mean over responses; the spec takes it out of both"
    ),
    "split_by_score": (
        "positive and negative are told apart by the raw score (> 0), the spec does by the sign of A: the same where "
        "these agree"
    ),
    "covariance_of_micro_batch": (
        "the covariance is taken over each micro-batch, the spec takes it over the whole step"
    ),
}  # fmt: skip

# The same in a word or two, for tables.
LABELS: dict[str, str] = {
    "aggregate": "mean",
    "anchor": "ratio",
    "cut_value": "value",
    "weight_value": "value",
    "ratio_value": "value",
    "gradient_per_response": "slope",
    "kl_score": "slope",
    "penalty_corrected": "penalty",
    "penalty_mean": "penalty",
    "penalty_summed": "penalty",
    "penalty_anchor": "penalty",
    "entropy_of_micro_batch": "entropy",
    "correction_denominator": "count",
    "rejected_rows": "count",
    "split_by_score": "sign",
    "covariance_of_micro_batch": "micro-batch",
}

EDGES: dict[str, str] = {
    "log_ratio_20": "log-ratios are clamped to [-20, 20] before exp, without gradient outside: w > 4.85e8 or w < 2.06e-9",
    "log_ratio_10": "the response's log-ratio is clamped at 10 before exp, without gradient beyond: ratios above 22026",
    "rho_20": "log(old/rollout) is clamped to [-20, 20] before exp",
    "rho_10": "log(old/rollout) is clamped to [-10, 10] before exp",
    "empty_rows": (
        "responses without an unmasked token: its mean over responses {theirs}, the spec's {ours}"
    ),
    "count_1e-8": "counts in denominators are larger by 1e-8: the loss is smaller by about 1e-8, relatively",
    "kl_clamp": "the k3 estimate is clamped (log-ratio to [-20, 20], value to at most 10), without gradient beyond",
    "kl_value_clamp": "the KL estimate is clamped to [-10, 10], without gradient beyond",
    "kl_log_40": "log(new/ref) is clamped to [-40, 40], without gradient beyond",
    "empty_geometric": "the loss of a response without a token is -A, without gradient; the spec's is 0",
    "sign_of_response": "the sign of A is that of its mean over the response, where A varies within it",
    "covariance_ties": "of tokens with the same covariance it takes any, the spec draws among them",
    "strict_bounds": "a ratio exactly on a bound is outside; the spec has it inside",
    "advantage_per_response": (
        "one ratio and one advantage per response: where A varies within a response its mean is used"
    ),
    "gradient_per_response": (
        "the gradient goes through the response's mean log-ratio: where A varies within a response it is spread evenly"
    ),
    "binary_kl_1e-8": "1e-8 is added to both probabilities of the rest in the binary KL: for tokens of probability near 1",
    "gamma_clamp": "the log-weight of a response is clamped to [log 1e-8, 20], and each token's log-ratio to [-20, 20]",
    "masked_advantage": "token-mean sums over masked positions as well: their advantages must be 0",
    "float32_numbers": "the constants of the weight are held in float32",
    "float32": "log-ratios of this part are computed in float32",
}  # fmt: skip
