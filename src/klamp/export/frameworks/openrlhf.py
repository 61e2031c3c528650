"""OpenRLHF: command-line flags. One mean: over tokens for ppo, over responses for gspo."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_CLIP = {"--actor.eps_clip_low_high": "=[1 - low, high - 1]"}
_DUAL = {"--actor.dual_clip": "=c"}
_SEQUENCE = {"--actor.policy_loss_type": "gspo"}
_MEAN = {"sequence_mean": ways(Way(edges=("count_1e-8",), rows="all"))}
_ANCHORS = {"old": {}, "rollout": {"--algo.advantage.is_correction_enable": True}}
_I = "--algo.advantage.is_correction_"


def _correction(kind: str) -> tuple[Way, ...]:
    return ways(Way({f"{_I}enable": True, f"{_I}type": kind, f"{_I}threshold": "=[low, high]"}))


def _kl(estimator: str) -> tuple[Way, ...]:
    flags = {"--algo.kl.use_loss": True, "--algo.kl.init_coef": "=beta", "--algo.kl.estimator": estimator}
    return ways(Way(flags, edges=("kl_value_clamp", "float32")))


OPENRLHF = Framework(
    name="openrlhf",
    title="OpenRLHF",
    version="main at 3c3be623 (2026-08-13)",
    syntax="flags",
    call="",
    base={"--actor.policy_loss_type": "ppo", "--algo.kl.init_coef": 0.0},
    forms={
        "clip": ways(Way(_CLIP, edges=("log_ratio_20",))),
        "dual_clip": ways(Way(_CLIP | _DUAL, needs=("c > 1",), edges=("log_ratio_20",))),
        "sequence_clip": ways(
            Way(
                _CLIP | _SEQUENCE,
                edges=("gradient_per_response",),
                means=_MEAN,
                anchors=_ANCHORS,
                corrections={},
                penalties={},
            )
        ),
        "sequence_dual_clip": ways(
            Way(
                _CLIP | _DUAL | _SEQUENCE,
                needs=("c > 1",),
                edges=("gradient_per_response",),
                means=_MEAN,
                anchors=_ANCHORS,
                corrections={},
                penalties={},
            )
        ),
    },
    means={"token_mean": ways(Way())},
    anchors={"old": {}},
    corrections={
        "token_truncate": _correction("tis"),
        "token_mask": _correction("icepop"),
        "geometric_mask_token_weight": _correction("seq-mask-tis"),
    },
    penalties={
        "kl_k1": _kl("k1"),
        "kl_k2": _kl("k2"),
        "kl_k3": _kl("k3"),
        "entropy": ways(Way({"--actor.entropy_coef": "=coefficient"})),
    },
    hook="no hook: subclass openrlhf.models.loss.PolicyLoss and put it in place of the actor_loss_fn of ppo_actor.py",
    notes=("advantages follow --algo.advantage.estimator: group_norm divides by the group's deviation + 1e-9, dr_grpo does not",),
    traps=(
        "--algo.kl.init_coef = 0.01 is on by default, as a k1 penalty in the reward",
        "policy_loss_type=gspo takes the ratio to the sampler once the sampler correction is enabled, and applies no weight",
    ),
)  # fmt: skip
