"""NeMo-RL: the loss_fn section of the YAML, read by ClippedPGLossFn."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_L = "loss_fn."
_CLIP = {f"{_L}ratio_clip_min": "=1 - low", f"{_L}ratio_clip_max": "=high - 1"}
_DUAL = {f"{_L}ratio_clip_c": "=c"}
_SEQUENCE = {f"{_L}sequence_level_importance_ratios": True}
_MEAN = {"sequence_mean": ways(Way({f"{_L}token_level_loss": False}, edges=("count_1e-8",), rows="all"))}
_T = f"{_L}truncated_importance_sampling_"


def _correction(kind: str) -> tuple[Way, ...]:
    flags = {
        f"{_L}use_importance_sampling_correction": True,
        f"{_T}type": kind,
        f"{_T}ratio": "=high",
        f"{_T}ratio_min": "=low",
    }
    return ways(Way(flags, edges=("count_1e-8",) if kind == "seq-mask-tis" else ()))


def _kl(estimator: str) -> tuple[Way, ...]:
    flags = {
        f"{_L}reference_policy_kl_penalty": "=beta",
        f"{_L}reference_policy_kl_type": estimator,
        f"{_L}kl_input_clamp_value": None,
        f"{_L}kl_output_clamp_value": None,
    }
    return ways(Way(flags, differs=("kl_score",)))


_OF_RESPONSES = {"sequence_truncate": _correction("tis")}
_PER_RESPONSE = ("gradient_per_response", "count_1e-8")

NEMO_RL = Framework(
    name="nemo-rl",
    title="NeMo-RL",
    version="main at 7ea279ab (2026-08-22)",
    syntax="yaml",
    call="",
    base={
        f"{_L}disable_ppo_ratio": False,
        f"{_L}force_on_policy_ratio": False,
        f"{_L}use_cispo": False,
        f"{_L}sequence_level_importance_ratios": False,
        f"{_L}ratio_clip_c": None,
        f"{_L}reference_policy_kl_penalty": 0.0,
        f"{_L}use_kl_in_reward": False,
        f"{_L}use_importance_sampling_correction": False,
        f"{_T}type": None,
        f"{_T}ratio": None,
        f"{_L}positive_example_nll_weight": 0.0,
    },
    forms={
        "clip": ways(Way(_CLIP)),
        "dual_clip": ways(Way(_CLIP | _DUAL, needs=("c > 1",))),
        "sequence_clip": ways(Way(_CLIP | _SEQUENCE, edges=_PER_RESPONSE, means=_MEAN, corrections=_OF_RESPONSES)),
        "sequence_dual_clip": ways(
            Way(_CLIP | _DUAL | _SEQUENCE, needs=("c > 1",), edges=_PER_RESPONSE, means=_MEAN, corrections=_OF_RESPONSES)
        ),
        "capped_weight": ways(Way(_CLIP | {f"{_L}use_cispo": True})),
        "plain": ways(Way({f"{_L}disable_ppo_ratio": True})),
    },
    means={
        "token_mean": ways(Way({f"{_L}token_level_loss": True}, edges=("count_1e-8",))),
        **_MEAN,
    },
    anchors={"old": {}},
    corrections={
        "token_truncate": _correction("tis"),
        "token_mask": _correction("icepop"),
        "geometric_mask_token_weight": _correction("seq-mask-tis"),
    },
    penalties={"kl_k1": _kl("k1"), "kl_k2": _kl("k2"), "kl_k3": _kl("k3")},
    hook=(
        "a LossFunction of one's own passed as loss_fn to grpo_train in an entry script (setup() builds ClippedPGLossFn); its "
        "value must be divided by the given global_valid_toks or global_valid_seqs"
    ),
    related={"sequence": "grpo.seq_logprob_error_threshold drops responses by their mean exp|log old/rollout|"},
    notes=(
        "advantages use a leave-one-out mean and a leave-one-out deviation by default",
    ),
    traps=(
        "reference_policy_kl_penalty = 0.01 (k3) is on by default",
        "asynchronous runs want use_importance_sampling_correction=true; exported as the spec says",
        "use_cispo is refused together with ratio_clip_c and without token_level_loss",
        "no clip fraction is logged",
    ),
)  # fmt: skip
