"""ROLL: YAML of the RLVR pipeline. Variants other than a clip need another worker class."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_CLIP = {"use_pg_clip_range": True, "pg_clip_low": "=1 - low", "pg_clip_high": "=high - 1"}
_DUAL = {"dual_clip_loss": True, "pg_clip": "=(c - 1) / 2"}
_W = "actor_train."
_SEQUENCE = {"importance_sampling": "seq"}
_I = "train_infer_correction.is_weight."


def _worker(variant: str) -> dict[str, object]:
    return {f"{_W}worker_cls": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker", f"{_W}pg_variant": variant}


def _correction(kind: str) -> tuple[Way, ...]:
    flags = {f"{_I}enabled": True, f"{_I}weight_type": kind, f"{_I}upper_bound": "=high or none"}
    return ways(Way(flags, needs=("no lower bound",), edges=("count_1e-8",) if kind == "geometric" else ()))


ROLL = Framework(
    name="roll",
    title="ROLL",
    version="main at 8eb27cc2 (2026-08-19)",
    syntax="yaml",
    call="",
    base={
        "importance_sampling": "token",
        "dual_clip_loss": False,
        "use_kl_loss": False,
        "init_kl_coef": 0.0,
        "entropy_loss_coef": 0.0,
    },
    forms={
        "clip": ways(Way(_CLIP)),
        "dual_clip": ways(Way(_CLIP | _DUAL, needs=("c > 1",))),
        "sequence_clip": ways(Way(_CLIP | _SEQUENCE, edges=("gradient_per_response", "count_1e-8"))),
        "sequence_dual_clip": ways(
            Way(_CLIP | _SEQUENCE | _DUAL, needs=("c > 1",), edges=("gradient_per_response", "count_1e-8"))
        ),
        "segment_clip": ways(
            Way(
                _CLIP | {"ratio_type": "segment"},
                edges=("gradient_per_response", "count_1e-8"),
                notes=("ratio_type belongs to the agentic pipeline's configuration; a segment is a run of unmasked tokens",),
            )
        ),
        "capped_weight": ways(
            Way(_worker("tis"), needs=("[0, 1]",)),
            Way(_worker("cispo"), needs=("[0.9, 1.1]",)),
        ),
        "plain": ways(Way(_worker("vanilla"))),
        "plain + k2_to_old": ways(Way(_worker("kimi15"), needs=("beta = 0.1",))),
        "signed_cap": ways(Way(_worker("topr"), needs=("[0, 1]",), differs=("split_by_score",))),
    },
    means={
        "sequence_mean": ways(Way({"loss_agg_mode": "seq-mean-token-mean"}, edges=("count_1e-8",), rows="nonempty")),
        "token_mean": ways(Way({"loss_agg_mode": "token-mean"}, edges=("masked_advantage",))),
        "sequence_sum": ways(
            Way({"loss_agg_mode": "seq-mean-token-sum"}, needs=("divisor = 1",), edges=("count_1e-8",), rows="nonempty")
        ),
    },
    anchors={"old": {}},
    corrections={
        "token_truncate": _correction("token"),
        "sequence_truncate": _correction("sequence"),
        "geometric_truncate": _correction("geometric"),
        "segment_truncate": _correction("segment"),
    },
    penalties={
        "kl_k3": ways(Way({"use_kl_loss": True, "kl_loss_coef": "=beta"}, edges=("kl_value_clamp",))),
        "entropy": ways(Way({"entropy_loss_coef": "=coefficient"})),
    },
    hook="subclass ActorWorker.loss_func(data, output_tensor) and name it in actor_train.worker_cls",
    related={
        "old/rollout": (
            "train_infer_correction.filters masks by ratio or by probability difference (token, geometric, sequence, segment) "
            "and changes the mask; in token-mean they do not reach the policy loss"
        ),
        "capped_weight": (
            "cispo_epsilon_low, cispo_epsilon_high, tis_lower_bound, tis_upper_bound and kimi15_tau are read from actor_train, "
            "whose WorkerConfig has no such fields, so YAML values for them are dropped: add them in a subclass"
        ),
    },
    notes=(
        "advantages follow norm_mean_type and norm_std_type (deviation + 1e-6), whiten_advantages and advantage_clip",
        "seq-mean-token-sum-norm divides by the padded width and not by the number of responses, so it is never written",
    ),
    traps=(
        "dual_clip_loss has c = 1 + 2 pg_clip (1.4 at the default); with use_pg_clip_range pg_clip is free to carry c",
        "pg_clip_low and pg_clip_high count only with use_pg_clip_range",
        "init_kl_coef = 0.2 stands by default, for the reward",
        "agg_loss token-mean never multiplies by the mask",
    ),
)  # fmt: skip
