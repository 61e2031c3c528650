"""AReaL: the actor section of the YAML. One mean: over tokens."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_A = "actor."
_CLIP = {f"{_A}eps_clip": "=1 - low", f"{_A}eps_clip_higher": "=high - 1"}
_DUAL = {f"{_A}c_clip": "=c"}
_SEQUENCE = {f"{_A}importance_sampling_level": "sequence"}
_SAPO = {f"{_A}use_sapo_loss": True, f"{_A}sapo_tau_pos": "=tau_pos", f"{_A}sapo_tau_neg": "=tau_neg"}
_PER_RESPONSE = ("advantage_per_response", "gradient_per_response")
_R = f"{_A}rejection_sampling."


def _correction(level: str, action: str, *needs: str) -> tuple[Way, ...]:
    flags = {
        f"{_A}use_decoupled_loss": True,
        f"{_R}level": level,
        f"{_R}action": action,
        f"{_R}metric": "ratio",
        f"{_R}agg": "mean",
        f"{_R}upper": "=high",
        f"{_R}lower": "=low or none",
    }
    return ways(Way(flags, needs=("high > 1", *needs), edges=("float32",)))


_CORRECTIONS = {
    "token_truncate": _correction("token", "clamp"),
    "token_mask": _correction("token", "mask"),
    "geometric_truncate": _correction("sequence", "clamp"),
    "geometric_mask": _correction("sequence", "mask"),
}
# A masked token leaves the response's own ratio too, so that beside one only whole responses may be masked.
_WHOLE = {name: way for name, way in _CORRECTIONS.items() if name != "token_mask"}

AREAL = Framework(
    name="areal",
    title="AReaL",
    version="main at 4aef98d8 (2026-05-21)",
    syntax="yaml",
    call="",
    base={
        f"{_A}importance_sampling_level": "token",
        f"{_A}use_sapo_loss": False,
        f"{_A}c_clip": None,
        f"{_A}m2_threshold": None,
        f"{_A}use_decoupled_loss": False,
        f"{_A}kl_ctl": 0.0,
    },
    forms={
        "clip": ways(Way(_CLIP)),
        "dual_clip": ways(Way(_CLIP | _DUAL, needs=("c > 1",))),
        "sequence_clip": ways(Way(_CLIP | _SEQUENCE, edges=_PER_RESPONSE, corrections=_WHOLE)),
        "sequence_dual_clip": ways(Way(_CLIP | _SEQUENCE | _DUAL, needs=("c > 1",), edges=_PER_RESPONSE, corrections=_WHOLE)),
        "soft_gate": ways(Way(_SAPO, corrections={})),
        "sequence_soft_gate": ways(Way(_SAPO | _SEQUENCE, edges=_PER_RESPONSE, corrections={})),
    },
    means={"token_mean": ways(Way())},
    anchors={"old": {f"{_A}recompute_logprob": True}, "rollout": {f"{_A}recompute_logprob": False}},
    corrections=_CORRECTIONS,
    penalties={},
    hook="a PPOActor subclass that overrides _ppo_update: engine.train_batch(input_, loss_fn, loss_weight_fn), packed 1-D",
    related={
        "budget": (
            "m2_threshold drops the largest squared log(old/rollout) of each micro-batch, on both sides and before anything "
            "else: another ratio and another order"
        ),
        "kl": "kl_ctl puts the penalty in the reward, on the log-probs of the sampler or the recomputed ones",
    },
    notes=(
        "advantages follow adv_norm and reward_norm (deviation + 1e-5)",
        "use_decoupled_loss with rejection_sampling=null applies no weight at all, only a warning",
    ),
    traps=(
        "by default the ratio is to the sampler (recompute_logprob=false)",
        "kl_ctl = 0.1 is on by default, in the reward",
        "rejection_sampling metric kl_k3 is rollout/old - 1 + log(old/rollout): the other direction from its own help text",
        "level=sequence weighs by the geometric mean",
    ),
)  # fmt: skip
