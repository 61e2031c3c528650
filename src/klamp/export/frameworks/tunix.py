"""tunix: GRPOConfig of the agentic learner (JAX)."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_CLIP = {"epsilon": "=1 - low", "epsilon_high": "=high - 1"}
_DUAL = {".epsilon_c": "=c"}
_NOTE = ("epsilon_c is read from the configuration but is no field of it: set it after construction",)
_SEQUENCE = {"loss_algo": "gspo-token"}
_R20 = ("log_ratio_20", "float32")


def _kl(mode: str) -> tuple[Way, ...]:
    return ways(Way({"beta": "=beta", "kl_loss_mode": mode}))


TUNIX = Framework(
    name="tunix",
    title="tunix",
    version="main at c7d8950f (2026-08-21)",
    syntax="python",
    call="GRPOConfig",
    base={"loss_algo": "grpo", "beta": 0.0, "sampler_is": None},
    forms={
        "clip": ways(Way(_CLIP, edges=_R20)),
        "dual_clip": ways(Way(_CLIP | _DUAL, needs=("c > 1",), edges=_R20, notes=_NOTE)),
        "sequence_clip": ways(Way(_CLIP | _SEQUENCE, edges=(*_R20, "log_ratio_10"))),
        "sequence_dual_clip": ways(
            Way(_CLIP | _SEQUENCE | _DUAL, needs=("c > 1",), edges=(*_R20, "log_ratio_10"), notes=_NOTE)
        ),
    },
    means={
        "sequence_mean": ways(Way({"loss_agg_mode": "sequence-mean-token-mean"}, rows="nonempty")),
        "token_mean": ways(Way({"loss_agg_mode": "token-mean"})),
        "sequence_sum": ways(Way({"loss_agg_mode": "seq-mean-token-sum"}, needs=("divisor = 1",), rows="nonempty")),
    },
    anchors={"old": {"use_rollout_logps": False}, "rollout": {"use_rollout_logps": True}},
    corrections={
        "token_truncate": ways(
            Way(
                {"sampler_is": "token", "sampler_is_threshold": "=high"},
                needs=("no lower bound", "an upper bound"),
                edges=("rho_20",),
            )
        )
    },
    penalties={"kl_k1": _kl("kl"), "kl_k2": _kl("mse_kl"), "kl_k3": _kl("low_var_kl")},
    hook="register_policy_loss_fn(name), then policy_loss_fn=name",
    notes=("advantages are divided by the group's deviation + 1e-6, except by the drgrpo estimator",),
    traps=(
        "use_rollout_logps=True is the default: the ratio is to the sampler",
        "beta = 0.04 (k1) is on by default",
        "sequence-mean-token-scale divides by the padded width, sequence-mean-token-sum-norm by the number of rows",
    ),
)  # fmt: skip
