"""SkyRL: overrides of trainer.algorithm."""

from __future__ import annotations

from collections.abc import Mapping

from klamp.export.model import Flags, Framework, Way, ways

_T = "trainer.algorithm."
_KIND = f"{_T}policy_loss_type"
_O = f"{_T}off_policy_correction."
_CLIP = {f"{_T}eps_clip_low": "=1 - low", f"{_T}eps_clip_high": "=high - 1"}
_DPPO = {_KIND: "dppo", f"{_T}dppo.delta_low": "=low", f"{_T}dppo.delta_high": "=high"}
_ROLLOUT: Mapping[str, Flags] = {"rollout": {}}
_R20 = ("log_ratio_20",)


def _kl(estimator: str, *edges: str) -> tuple[Way, ...]:
    flags = {f"{_T}use_kl_loss": True, f"{_T}kl_loss_coef": "=beta", f"{_T}kl_estimator_type": estimator}
    return ways(Way(flags, differs=("penalty_mean unless sequence_mean",), edges=edges))


_TOKEN = {f"{_O}tis_ratio_type": "token", f"{_O}token_tis_ratio_clip_high": "=high"}
_SEQUENCE = {f"{_O}tis_ratio_type": "sequence", f"{_O}sequence_tis_ratio_clip_high": "=high"}
_TOKEN_BOUNDS = {f"{_O}token_mask_is_threshold_low": "=low", f"{_O}token_mask_is_threshold_high": "=high"}
_PRODUCT = {f"{_O}sequence_mask_metric": "product", f"{_O}product_mask_low": "=low", f"{_O}product_mask_high": "=high"}
_GEOMETRIC = {f"{_O}sequence_mask_metric": "geometric", f"{_O}geo_mask_low": "=low", f"{_O}geo_mask_high": "=high"}
_RAW = {f"{_O}tis_ratio_type": "token", f"{_O}token_tis_ratio_clip_high": 1e9}


def _correction(flags: Flags, *needs: str) -> tuple[Way, ...]:
    return ways(Way(flags, needs=needs, edges=("rho_20",)))


SKYRL = Framework(
    name="skyrl",
    title="SkyRL",
    version="main at a9564572 (2026-08-21)",
    syntax="overrides",
    call="",
    base={
        f"{_T}use_kl_loss": False,
        f"{_T}use_kl_in_reward": False,
        f"{_T}use_entropy_loss": False,
        f"{_O}tis_ratio_type": None,
        f"{_O}sequence_mask_metric": None,
    },
    forms={
        "clip": ways(Way(_CLIP | {_KIND: "regular"}, edges=_R20)),
        "dual_clip": ways(Way(_CLIP | {_KIND: "dual_clip", f"{_T}clip_ratio_c": "=c"}, needs=("c > 1",), edges=_R20)),
        "sequence_clip": ways(Way(_CLIP | {_KIND: "gspo"}, edges=("log_ratio_10",))),
        "capped_weight": ways(
            Way(
                {_KIND: "cispo", f"{_T}cispo.cispo_eps_clip_low": "=1 - low", f"{_T}cispo.cispo_eps_clip_high": "=high - 1"},
                edges=_R20,
                anchors={"old": {f"{_T}cispo.cispo_anchor": "old"}, "rollout": {f"{_T}cispo.cispo_anchor": "rollout"}},
            )
        ),
        "masked_weight": ways(
            Way(_CLIP | {_KIND: "rollout_is"}, edges=("strict_bounds", *_R20), anchors=_ROLLOUT)
        ),
        "soft_gate": ways(
            Way({_KIND: "sapo", f"{_T}sapo.tau_pos": "=tau_pos", f"{_T}sapo.tau_neg": "=tau_neg"}, edges=_R20)
        ),
        "binary_tv": ways(Way(_DPPO | {f"{_T}dppo.dppo_type": "binary_tv"}, edges=_R20, anchors=_ROLLOUT)),
        "binary_kl": ways(
            Way(_DPPO | {f"{_T}dppo.dppo_type": "binary_kl"}, edges=(*_R20, "binary_kl_1e-8"), anchors=_ROLLOUT)
        ),
        "clip + log_ratio_to_old_on_top_covariance": ways(
            Way(
                {_KIND: "kl_cov", f"{_T}kl_cov.kl_cov_frac": "=share", f"{_T}kl_cov.ppo_kl_coef": "=beta"},
                needs=("no bounds",),
                edges=("covariance_ties",),
                differs=("covariance_of_micro_batch", "penalty_summed"),
                corrections={},
            )
        ),
    },
    means={
        "token_mean": ways(Way({f"{_T}loss_reduction": "token_mean"})),
        "sequence_mean": ways(Way({f"{_T}loss_reduction": "sequence_mean"}, rows="all")),
        "sequence_sum": ways(
            Way(
                {f"{_T}loss_reduction": "seq_mean_token_sum_norm", f"{_T}max_seq_len": "=divisor"},
                needs=("whole divisor",),
                rows="all",
            )
        ),
        "prompt_mean": ways(Way({f"{_T}loss_reduction": "prompt_mean"})),
        "local_token_mean": ways(Way({f"{_T}loss_reduction": "token_mean_legacy"})),
    },
    anchors={"old": {}},
    corrections={
        "token_truncate": _correction(_TOKEN, "no lower bound", "an upper bound"),
        "sequence_truncate": _correction(_SEQUENCE, "no lower bound", "an upper bound"),
        "token_mask": _correction(_TOKEN | _TOKEN_BOUNDS, "an upper bound"),
        "sequence_mask": _correction(_SEQUENCE | _PRODUCT, "an upper bound"),
        "token_filter": _correction(_TOKEN_BOUNDS, "an upper bound"),
        "sequence_filter": _correction(_PRODUCT, "an upper bound"),
        "geometric_filter": _correction(_GEOMETRIC, "an upper bound"),
        "geometric_mask_token_weight": _correction(_GEOMETRIC | _RAW, "an upper bound"),
    },
    penalties={
        "kl_k1": _kl("k1"),
        "kl_k2": _kl("k2"),
        "kl_k3": _kl("k3", "kl_clamp"),
        "kl_abs": _kl("abs"),
        "entropy": ways(
            Way({f"{_T}use_entropy_loss": True, f"{_T}entropy_loss_coef": "=coefficient"}, differs=("entropy_of_micro_batch unless local_token_mean",))
        ),
    },
    hook=(
        "@register_policy_loss(name), before or after ray.init with sync_registries(); it returns a sum, linear in the "
        "advantages, which carry the mean's weights"
    ),
    related={"random": "policy_loss_type=clip_cov draws tokens by covariance within each micro-batch"},
    notes=(
        "advantages are divided by the group's standard deviation + 1e-6 unless grpo_norm_by_std=false",
        "the mean is folded into the advantages of each mini-batch",
    ),
    traps=(
        "use_kl_loss=true at 0.001 (k3) is on by default",
        "policy_loss_type=dual_clip has clip_ratio_c = 3.0; regular has none",
        "cispo has knobs of its own, offsets from 1 (default [0, 5]); dppo's deltas are divergences",
        "cispo's rollout anchor refuses a sampler correction, dppo takes the sampler's log-probs whenever they are there",
    ),
)  # fmt: skip
