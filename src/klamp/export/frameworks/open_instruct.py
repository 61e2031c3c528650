"""open-instruct: command-line flags of grpo_fast. One mean: over tokens."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_CLIP = {"--clip_lower": "=1 - low", "--clip_higher": "=high - 1"}


def _correction(clamp: bool, sequence: bool) -> tuple[Way, ...]:
    on, off = ("clamp", "mask") if clamp else ("mask", "clamp")
    flags = {
        "--use_rho_correction": "true",
        f"--rho_{on}_lower_bound": "=low",
        f"--rho_{on}_upper_bound": "=high or 0",
        f"--rho_{off}_lower_bound": 0.0,
        f"--rho_{off}_upper_bound": 0.0,
        "--rho_mask_sequence_level": "true" if sequence else "false",
    }
    return ways(Way(flags, needs=("around 1",), edges=("rho_10",)))


def _kl(estimator: int) -> tuple[Way, ...]:
    flags = {"--beta": "=beta", "--load_ref_policy": "true", "--kl_estimator": estimator}
    return ways(Way(flags, edges=("kl_log_40",)))


OPEN_INSTRUCT = Framework(
    name="open-instruct",
    title="open-instruct",
    version="main at e6c3044a (2026-08-20)",
    syntax="flags",
    call="",
    base={"--beta": 0.0, "--load_ref_policy": "false", "--use_rho_correction": "false"},
    forms={
        "clip": ways(Way(_CLIP | {"--loss_fn": "dapo"})),
        "capped_weight": ways(Way({"--loss_fn": "cispo", "--clip_higher": "=high - 1"}, needs=("no lower bound",))),
    },
    means={"token_mean": ways(Way({"--loss_denominator": "token"}))},
    anchors={"old": {"--use_vllm_logprobs": "false"}, "rollout": {"--use_vllm_logprobs": "true"}},
    corrections={
        "token_truncate": _correction(clamp=True, sequence=False),
        "token_mask": _correction(clamp=False, sequence=False),
        "geometric_truncate": _correction(clamp=True, sequence=True),
        "geometric_mask": _correction(clamp=False, sequence=True),
    },
    penalties={"kl_k1": _kl(0), "kl_k2": _kl(1), "kl_k3": _kl(2), "kl_k1_weighted": _kl(3)},
    hook="no hook: replace grpo_utils.compute_grpo_loss, or compute_rho_correction for a correction",
    related={
        "mean_after": (
            "--rho_mask_tv_divergence drops tokens by the response's mean |old/rollout - 1|, but its validation wants a bound "
            "above 1"
        ),
    },
    notes=(
        "advantages are centred per group (advantage_normalization_type centered), not divided by a deviation",
        "--loss_denominator with a number divides the sum over the batch by it, not by the number of responses",
    ),
    traps=(
        "a clamp of old/rollout to at most 2 is on by default (--use_rho_correction)",
        "--clip_higher = 0.272 is the default upper offset",
        "--beta = 0.05 with estimator 2 (k3) is on by default",
        "--use_vllm_logprobs applies with a single mini-batch",
        "cispo's cap is 1 + clip_higher, without a lower bound",
    ),
)  # fmt: skip
