"""slime: command-line flags on top of Megatron's."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_CLIP = {"--eps-clip": "=1 - low", "--eps-clip-high": "=high - 1"}
_DUAL = {"--eps-clip-c": "=c"}
_KIND = "--advantage-estimator"
_TIS = {"--use-tis": True, "--tis-clip": "=high", "--tis-clip-low": "=low"}
_ICEPOP = {"--custom-tis-function-path": "slime.backends.megatron_utils.loss.icepop_function"}


def _kl(estimator: str, **more: bool) -> tuple[Way, ...]:
    flags = {"--use-kl-loss": True, "--kl-loss-coef": "=beta", "--kl-loss-type": estimator}
    return ways(Way(flags | ({"--use-unbiased-kl": True} if more.get("weighted") else {}), edges=("float32",)))


SLIME = Framework(
    name="slime",
    title="slime",
    version="main at 624b824a (2026-08-21)",
    syntax="flags",
    call="",
    base={_KIND: "grpo", "--kl-coef": 0.0, "--entropy-coef": 0.0},
    forms={
        "clip": ways(Way(_CLIP)),
        "dual_clip": ways(Way(_CLIP | _DUAL, needs=("c > 1",))),
        "sequence_clip": ways(Way(_CLIP | {_KIND: "gspo"}, edges=("gradient_per_response",))),
        "sequence_dual_clip": ways(Way(_CLIP | _DUAL | {_KIND: "gspo"}, needs=("c > 1",), edges=("gradient_per_response",))),
        "capped_weight": ways(Way(_CLIP | {_KIND: "cispo"})),
    },
    means={
        "token_mean": ways(Way({"--calculate-per-token-loss": True})),
        "sequence_mean": ways(
            Way(rows="all", notes=("samples of one rollout share a denominator: exact where a rollout is one sample",))
        ),
    },
    anchors={"old": {}, "rollout": {"--use-rollout-logprobs": True}},
    corrections={
        "token_truncate": ways(Way(_TIS)),
        "token_mask": ways(Way(_TIS | _ICEPOP)),
        "negatives_same": ways(Way({"--use-opsm": True, "--opsm-delta": "=delta"})),
    },
    penalties={
        "kl_k1": _kl("k1"),
        "kl_k2": _kl("k2"),
        "kl_k3": _kl("k3"),
        "kl_k1_weighted": _kl("k1", weighted=True),
        "kl_k2_weighted": _kl("k2", weighted=True),
        "kl_k3_weighted": _kl("k3", weighted=True),
        "entropy": ways(Way({"--entropy-coef": "=coefficient"})),
    },
    hook=(
        "--loss-type custom_loss --custom-loss-function-path module:function (gets the logits), or for a correction "
        "--custom-tis-function-path, which sees old and rollout log-probs"
    ),
    related={
        "old/rollout": (
            "--custom-tis-function-path examples/train_infer_mismatch_helper/mis.py has truncation, masks and vetoes per token, "
            "response and geometric mean, and weights normalised to mean 1"
        ),
    },
    notes=("advantages are divided by the group's deviation unless --disable-grpo-std-normalization",),
    traps=(
        "the loss is chosen by --advantage-estimator",
        "for cispo --eps-clip must be 1 or more for no lower bound",
        "only kl-loss-type low_var_kl is clamped; --opsm-delta defaults to 1e-4",
    ),
)  # fmt: skip
