"""Every metric by name: ``room/quantity_stat``, with its definition and range. The one page of meanings.

``share`` is a count over unmasked tokens unless the definition says otherwise; "removed" (the gradient is zeroed)
and "outside" (beyond a bound, whatever the sign of the advantage) are two things. Low is w < 1, high is w > 1.
"""

from __future__ import annotations

HISTOGRAM_LIMIT = 1.6  # edges of the ratio histogram in log w; outliers fall into the end bins
HISTOGRAM_BINS = 64
# Bins of the old policy's probability of the sampled token: (0, 0.001], (0.001, 0.01], ..., (0.99, 1].
PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)

OBJECTIVE: dict[str, tuple[str, str]] = {
    "policy/loss_mean": ("policy term -J per unmasked token; not a measure of progress", "any"),
    "policy/kl_old_new_mean": (
        "mean of w - 1 - log w, w = new/old: an estimate of KL(old||new) per token, nats",
        ">= 0",
    ),
    "policy/kl_old_new_sequence_mean": (
        "mean over responses of the sum of their tokens' w - 1 - log w (those that overflow left out): an estimate of "
        "KL(old||new) of whole responses, nats",
        ">= 0",
    ),
    "policy/kl_new_ref_mean": (
        "mean of 1/w - 1 + log w, w = new/ref: an estimate of KL(new||ref) per token, nats",
        ">= 0",
    ),
    "policy/overflow_count": ("tokens whose w - 1 - log w overflows; they are left out of that mean", ">= 0"),
    "policy/overflow_ref_count": (
        "tokens whose 1/w - 1 + log w, w = new/ref, overflows; they are left out of that mean",
        ">= 0",
    ),
    "policy/entropy_mean": ("mean entropy of the new policy per token, nats", ">= 0"),
    "policy/ratio_max": ("largest w = new/old of the step; null where it overflows", "> 0"),
    "policy/ratio_histogram": (f"counts of log w in {HISTOGRAM_BINS} equal bins on +-{HISTOGRAM_LIMIT}", "counts"),
    "guard/removed_low_share": (
        "tokens whose policy gradient a guard removed (or rolled back), w below its region",
        "0..1",
    ),
    "guard/removed_high_share": (
        "tokens whose policy gradient a guard removed (or rolled back), w above its region",
        "0..1",
    ),
    "guard/removed_active_share": ("tokens removed, of the tokens with a nonzero advantage", "0..1"),
    "guard/removed_positive_share": ("tokens removed with an advantage above 0", "0..1"),
    "guard/removed_negative_share": ("tokens removed with an advantage below 0", "0..1"),
    "guard/removed_low_histogram": (
        "tokens removed, w below, by the old policy's probability, in the bins of batch/probability_histogram",
        "counts",
    ),
    "guard/removed_high_histogram": ("the same, w above", "counts"),
    "guard/outside_low_share": ("tokens below the region of some guard", "0..1"),
    "guard/outside_high_share": ("tokens above the region of some guard", "0..1"),
    "guard/dropped_count": (
        "tokens that guards took out of the denominator too, where a guard of the spec drops",
        ">= 0",
    ),
    "factor/reweighted_share": ("kept tokens whose weight differs from the plain ratio w = new/old", "0..1"),
    "explore/kept_surprise_mean": (
        "mean of -log q(a) - H, weighted by |g|, over tokens that this spec keeps and the clip [0.8, 1.2] would cut, nats",
        "any",
    ),
    "explore/cut_surprise_mean": (
        "the same, weighted by |A| w, over tokens that this spec cuts and that clip would keep, nats",
        "any",
    ),
    "explore/entropy_push_mean": (
        "mean of (g - g of that clip)(-log q(a) - H): above 0 the spec raises the entropy more than the clip does, to first "
        "order of a natural-gradient step",
        "any",
    ),
    "explore/vanilla_push_mean": (
        "the same of a step of the vanilla gradient, exactly: mean of (g - g of that clip)(Phi - q(a)(log q(a) + H)), Phi = sum q^2 (log q + "
        "H); where the batch has phi_mean, as klamp train has with exact_* and topk_* measures",
        "any",
    ),
    "penalty/loss_mean": ("penalties per unmasked token, as added to the loss", "any"),
    "batch/tokens_count": ("unmasked tokens", ">= 0"),
    "batch/probability_histogram": (
        f"tokens by the old policy's probability of them, in bins with the upper ends {', '.join(map(str, PROBABILITY_EDGES[1:]))}",
        "counts",
    ),
    "batch/zero_advantage_share": ("tokens with an advantage of exactly 0", "0..1"),
    "batch/missing_rows_count": ("responses excluded because a rollout log-prob was missing", ">= 0"),
    "batch/missing_tokens_count": ("tokens excluded for it, where missing='token'", ">= 0"),
    "batch/nonfinite_count": ("non-finite values at unmasked positions, counted on the device", ">= 0"),
}

TRAINER: dict[str, tuple[str, str]] = {
    "train/reward_mean": ("mean reward over the scored completions of the latest rollout", "any"),
    "train/reward_std": ("mean over groups of the standard deviation of rewards", ">= 0"),
    "train/completion_length_mean": ("mean tokens of a completion", ">= 0"),
    "train/truncated_share": ("completions cut at the length limit, of all", "0..1"),
    "train/tied_groups_share": ("groups whose rewards are all equal and give no signal, of all", "0..1"),
    "train/unscored_share": ("completions without a reward, of all", "0..1"),
    "reward/no_answer_count": ("completions of the latest rollout without an answer (wrong)", ">= 0"),
    "reward/timeouts_count": ("answers of the latest rollout that took longer than the time limit (wrong)", ">= 0"),
    "reward/errors_count": ("answers of the latest rollout on which the verifier failed (wrong)", ">= 0"),
    "reward/late_count": ("completions of the latest rollout unscored because the time for all was over", ">= 0"),
    "reward/lost_count": ("completions of the latest rollout unscored because a verifier process was lost", ">= 0"),
    "train/grad_norm": ("norm of the gradient before clipping", ">= 0"),
    "train/learning_rate": ("learning rate of the step", ">= 0"),
    "eval/accuracy_greedy": ("held-out prompts answered correctly, greedy decoding", "0..1"),
    "eval/accuracy_sampled": (
        "held-out prompts answered correctly, one sample at temperature 1; of --eval-samples at both ends of a run",
        "0..1",
    ),
    "eval/pass_share": ("held-out prompts with a correct answer among --eval-samples, where there are several", "0..1"),
    "eval/distinct_correct_mean": ("different texts among those samples that are correct, per prompt", ">= 0"),
}

METRICS: dict[str, tuple[str, str]] = OBJECTIVE | TRAINER
