"""verl 0.9.1: every registered policy loss, rollout correction, KL estimator and aggregation."""

from __future__ import annotations

from typing import Any

from conformance.rows import DIFFERS, NOT_EXPRESSIBLE, PLAIN, Row

_DUAL = "dual_clip(c=3.0, base='ppo()')"
_BYPASS = ("bypass-0", "bypass-1", "bypass-2")
_WIDE = ("wide-0", "wide-1", "wide-2")
_NEAR_REF = ("plain-0", "plain-1", "some_zero-3")  # k3 of ref/new below 10, where verl clamps it
_HUGE = 1e30
_TIS = {"rollout_is": "token", "rollout_is_threshold": 1.3}
_WEIGHED = (
    "verl multiplies the penalty by the importance weight of the policy term too; Klamp's factors weigh the policy term. "
    "Equal to Klamp's policy term plus that weight times Klamp's penalty, token by token."
)


def _loss(name: str, **call: Any) -> dict[str, Any]:
    return {"loss": name, **call}


def _config(name: str, **config: Any) -> dict[str, Any]:
    return {"loss": name, "config": config}


def _within(name: str, bound: float, **config: Any) -> dict[str, Any]:
    """Both bounds: ``clip_ratio`` alone changes nothing."""
    return _config(name, clip_ratio_low=bound, clip_ratio_high=bound, **config)


def _rs(option: str, threshold: str | float, spec: str) -> Row:
    correction = {"rollout_rs": option, "rollout_rs_threshold": threshold}
    return Row(
        f"rollout_rs={option}", (f"rollout_rs {option}",), _loss("vanilla", correction=correction), f"{_DUAL} + {spec}"
    )


def _is(level: str, threshold: str | float, spec: str, label: str = "", normalize: bool = False, **more: Any) -> Row:
    correction = {
        "rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize, **more,
    }  # fmt: skip
    covers = (f"rollout_is {level}", *(("option rollout_is_batch_normalize",) if normalize else ()))
    return Row(f"rollout_is={level}{label}", covers, _loss("vanilla", correction=correction), f"{_DUAL} + {spec}")


def _bypass(label: str, spec: str, agg: str = "token-mean", status: str = "equal", **options: Any) -> Row:
    kind = options["loss_type"]
    more = {name: options.pop(name) for name in ("sentence", "exactly", "test") if name in options}
    covers = ("loss bypass_mode", f"bypass loss_type {kind}")
    call = _loss("bypass_mode", bypass=options, agg=agg)
    return Row(f"bypass_mode, {label}", covers, call, spec, status, cases=_BYPASS, **more)


def _kl(name: str, estimator: str, gradient: str = "") -> Row:
    """Advantages of 0: the loss is the penalty alone."""
    straight = f", gradient='{gradient}'" if gradient else ""
    base = name.removesuffix("+")
    return Row(
        f"kl_penalty={name}", (f"kl {base}",), {"kl": name, "coefficient": 0.3},
        f"reinforce() + kl_reference(beta=0.3, estimator='{estimator}'{straight})",
        cases=("zero-0", "zero-1", "zero-2"), kind="verl.kl",
    )  # fmt: skip


LOSSES: tuple[Row, ...] = (
    Row("vanilla", ("loss vanilla", "aggregate token-mean"), _loss("vanilla"), _DUAL, cases=(*PLAIN, *_WIDE)),
    Row(
        "vanilla, clip-higher and another c", ("loss vanilla",),
        _config("vanilla", clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5), "dual_clip(c=1.5, base='dapo()')",
    ),
    Row(
        "vanilla, as the clip alone", ("loss vanilla",), _loss("vanilla"), "ppo()", DIFFERS,
        "A dual clip at clip_ratio_c = 3.0 is always on: for A < 0 there is no gradient where the ratio exceeds 3.",
        cases=_WIDE[:2], exactly=_DUAL, visible=1e-3,
    ),
    Row("dppo_tv", ("loss dppo_tv",), _within("dppo_tv", 0.15, clip_ratio_c=1e4), "dppo_tv(cap=10000.0)"),
    Row("dppo_kl", ("loss dppo_kl",), _within("dppo_kl", 0.05, clip_ratio_c=1e4), "dppo_kl(cap=10000.0)"),
    Row(
        "dppo_tv, clip_ratio alone", ("loss dppo_tv",), _config("dppo_tv", clip_ratio=0.05, clip_ratio_c=1e4),
        "dppo_tv(delta=0.05, cap=10000.0)", DIFFERS,
        "clip_ratio is read only where clip_ratio_low and clip_ratio_high are None; they are 0.2 by default, which wins.",
        exactly="dppo_tv(delta=0.2, cap=10000.0)", visible=1e-3,
    ),
    Row(
        "dppo_tv, clip_ratio_c left alone", ("loss dppo_tv",), _within("dppo_tv", 0.15), "dppo_tv(cap=20.0)",
        DIFFERS, "Its code says 20; the configuration's default 3.0 wins.", cases=_WIDE[:2], exactly="dppo_tv(cap=3.0)",
        visible=1e-3,
    ),
    Row(
        "dppo_kl, clip_ratio_c left alone", ("loss dppo_kl",), _within("dppo_kl", 0.05), "dppo_kl(cap=20.0)",
        DIFFERS, "Its code says 20; the configuration's default 3.0 wins.", cases=_WIDE[:2], exactly="dppo_kl(cap=3.0)",
        visible=1e-3,
    ),
    Row(
        "dppo_kl, tokens of probability above 0.996", ("loss dppo_kl",),
        _within("dppo_kl", 0.05, clip_ratio_c=1e4), "dppo_kl(cap=10000.0)", DIFFERS,
        "verl adds 1e-8 to both complements, which bounds its divergence: at delta = 0.05 such tokens are never cut, "
        "as at a delta of 0.1.",
        cases=("likely-0", "likely-1"), exactly="dppo_kl(delta=0.1, cap=10000.0)",
    ),
    Row(
        "log-ratios beyond 20", ("loss dppo_tv",), _within("dppo_tv", 0.15, clip_ratio_c=_HUGE),
        f"dppo_tv(cap={_HUGE!r})", DIFFERS,
        "verl clamps the log-ratio to [-20, 20] before the exponential; equal where the old log-probs are moved to 20 "
        "from the new. A clip or cap below e^20 hides it.",
        cases=("far-0", "far-1"), adjust="old_within_20", visible=1e-3,
    ),
    Row(
        "gspo, token-mean", ("loss gspo",), _config("gspo", clip_ratio_low=0.1, clip_ratio_high=0.15),
        "gspo(epsilon_low=0.1, epsilon_high=0.15, aggregate=token_mean)",
    ),
    Row(
        "gspo, seq-mean-token-mean", ("loss gspo",),
        _loss("gspo", agg="seq-mean-token-mean", config={"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}), "gspo()",
        cases=("near-0", "near-1", "near-2"),
    ),
    Row(
        "gspo, a mean log-ratio beyond 10", ("loss gspo",), _config("gspo"),
        "gspo(epsilon_low=0.2, epsilon_high=0.2, aggregate=token_mean)", DIFFERS,
        "verl clamps the mean log-ratio at 10, without a gradient beyond; equal where the response is moved to 10 and "
        "its gradient left out.",
        cases=("far_sequence-0", "far_sequence-1"), adjust="mean_within_10", visible=1e-3,
    ),
    Row("sapo", ("loss sapo",), _loss("sapo"), "sapo()"),
    Row(
        "sapo, another loss_agg_mode", ("loss sapo",), _loss("sapo", agg="token-mean"), "sapo(aggregate=token_mean)", DIFFERS,
        "The mean is over responses whatever loss_agg_mode says.", exactly="sapo()", visible=1e-3,
    ),
    Row("gpg", ("loss gpg",), _loss("gpg"), "gpg()"),
    Row(
        "clip_cov, every token in the window", ("loss clip_cov",),
        _loss("clip_cov", policy_loss={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 1.5}),
        "clip_cov(share=1.0, low=0.2, high=1.5)",
    ),
    Row(
        "clip_cov, a share of them", ("loss clip_cov",),
        _loss("clip_cov", policy_loss={"clip_cov_ratio": 0.1, "clip_cov_lb": 0.2, "clip_cov_ub": 1.5}),
        "clip_cov(share=0.1, low=0.2, high=1.5)", DIFFERS,
        "verl draws with torch's generator, Klamp by a hash of (seed, step, row, position): as many tokens of the same "
        "window, others.",
        test="test_verl.test_clip_cov_draws_as_many_tokens_of_the_same_window",
    ),
    Row(
        "clip_cov over micro-batches", ("loss clip_cov",), _loss("clip_cov"), "clip_cov()", DIFFERS,
        "verl takes means, window and draw of each micro-batch, Klamp of the whole step.",
        test="test_micro_batches.test_verls_gradient_depends_on_the_cut",
    ),
    Row(
        "kl_cov", ("loss kl_cov",), _loss("kl_cov", policy_loss={"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}),
        "kl_cov(share=0.2, coefficient=0.5)",
    ),
    Row(
        "kl_cov over micro-batches", ("loss kl_cov",), _loss("kl_cov"), "kl_cov()", DIFFERS,
        "verl takes means and selection of each micro-batch, Klamp of the whole step.",
        test="test_micro_batches.test_verls_gradient_depends_on_the_cut",
    ),
    Row("geo_mean", ("loss geo_mean",), _within("geo_mean", 0.4), "gmpo()"),
    Row(
        "geo_mean with rollout_is", ("loss geo_mean",), {**_within("geo_mean", 0.4), "correction": _TIS},
        "gmpo() + tis(high=1.3, scope='geometric')", DIFFERS,
        "verl caps the weights of tokens and then takes their geometric mean, Klamp caps the mean; verl adds 1e-10 to each "
        "weight. Equal where no token is above the cap, and with that 1e-10.",
        adjust="weights_within_1_3", visible=1e-3,
    ),
    Row(
        "geo_mean over micro-batches", ("loss geo_mean",), _within("geo_mean", 0.4), "gmpo()", DIFFERS,
        "verl takes the plain mean of each micro-batch and adds these up: the gradient grows with their number.",
        test="test_micro_batches.test_verls_gradient_depends_on_the_cut",
    ),
    Row("dro", ("loss dro",), _loss("dro", policy_loss={"dro_beta": 0.05}), "dro()"),
    Row(
        "cispo", ("loss cispo",), _config("cispo", clip_ratio_low=0.3, clip_ratio_high=0.2),
        "cispo(epsilon_low=0.3, epsilon_high=0.2)",
    ),
    Row(
        "cispo, no lower bound", ("loss cispo",), _config("cispo", clip_ratio_low=10.0, clip_ratio_high=0.2),
        "cispo(epsilon_low=10.0, epsilon_high=0.2)",
    ),
    _bypass("ppo_clip", _DUAL, loss_type="ppo_clip"),
    _bypass("reinforce", "gpg()", loss_type="reinforce"),
    _bypass("reinforce, token IS", "tis_loss(high=1.5)", loss_type="reinforce", rollout_is="token", rollout_is_threshold=1.5),
    _bypass(
        "reinforce, token IS within two bounds", "rollout_is(epsilon_low=0.3, epsilon_high=0.5)",
        loss_type="reinforce", rollout_is="token", rollout_is_threshold="0.7_1.5",
    ),
    _bypass(
        "reinforce, sequence IS", "factor(transform=cap(high=2.0), scope='sequence', reduce='sum') + sequence_sum(divisor=1)",
        agg="seq-mean-token-sum", loss_type="reinforce", rollout_is="sequence",
    ),
    _bypass(
        "reinforce, normalised token IS", "factor(transform=normalized(transform=cap(high=1.5))) + token_mean()",
        loss_type="reinforce", rollout_is="token", rollout_is_threshold=1.5, rollout_is_batch_normalize=True,
    ),
    _bypass(
        "normalised IS over micro-batches", "factor(transform=normalized(transform=cap(high=1.5))) + token_mean()",
        status=DIFFERS, loss_type="reinforce", rollout_is="token",
        sentence="In bypass mode verl divides by the mean of each micro-batch, Klamp by that of the whole step.",
        test="test_micro_batches.test_verls_gradient_depends_on_the_cut",
    ),
    _bypass(
        "ppo_clip, rejection", f"{_DUAL} + guard(measure='k3', radius=0.05, ratio='new/rollout', gate='always', cut_value='zero')",
        loss_type="ppo_clip", rollout_rs="token_k3", rollout_rs_threshold=0.05,
    ),
    _bypass(
        "ppo_clip, rejected tokens in the denominator",
        f"{_DUAL} + guard(measure='k3', radius=0.05, ratio='new/rollout', gate='always', action='drop')", status=DIFFERS,
        loss_type="ppo_clip", rollout_rs="token_k3", rollout_rs_threshold=0.05,
        sentence="In bypass mode rejected tokens still count in the denominator; without bypass they leave it (action='drop').",
        exactly=f"{_DUAL} + guard(measure='k3', radius=0.05, ratio='new/rollout', gate='always', cut_value='zero')",
    ),
    Row(
        "dro with rollout_is", ("loss dro",), _loss("dro", policy_loss={"dro_beta": 0.05}, correction=_TIS),
        "dro() + tis(high=1.3)", DIFFERS, _WEIGHED, test="test_verl.test_the_rollouts_weight_is_on_the_penalty_too",
    ),
    Row(
        "kl_cov with rollout_is", ("loss kl_cov",),
        _loss("kl_cov", policy_loss={"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}, correction=_TIS),
        "kl_cov(share=0.2, coefficient=0.5) + tis(high=1.3)", DIFFERS, _WEIGHED,
        test="test_verl.test_the_rollouts_weight_is_on_the_penalty_too",
    ),
    *(
        Row(f"{name} with rollout_is", (f"loss {name}",), {**call, "correction": _TIS}, f"{spec} + tis(high=1.3)")
        for name, call, spec in (
            ("gpg", _loss("gpg"), "gpg()"),
            ("sapo", _loss("sapo"), "sapo()"),
            ("gspo", _within("gspo", 0.1), "gspo(epsilon_low=0.1, epsilon_high=0.1, aggregate=token_mean)"),
            ("cispo", _within("cispo", 0.2), "cispo(epsilon_low=0.2, epsilon_high=0.2)"),
            ("dppo_tv", _within("dppo_tv", 0.15, clip_ratio_c=1e4), "dppo_tv(cap=10000.0)"),
            ("dppo_kl", _within("dppo_kl", 0.05, clip_ratio_c=1e4), "dppo_kl(cap=10000.0)"),
        )
    ),
)  # fmt: skip

CORRECTIONS: tuple[Row, ...] = (
    _is("token", 1.3, "tis(high=1.3)"),
    _is("token", "0.8_1.5", "icepop(low=0.8, high=1.5)", " within two bounds"),
    _is("sequence", 1.5, "tis(high=1.5, scope='sequence')"),
    _is("sequence", "0.6_1.6", "mis(low=0.6, high=1.6, scope='sequence')", " within two bounds"),
    _is("token", 1.3, "tis(high=1.3, normalize=True)", " normalised", normalize=True),
    _is("sequence", 1.5, "tis(high=1.5, scope='sequence', normalize=True)", " normalised", normalize=True),
    _is(
        "token", 1.3, "tis(high=1.3) + rs_k1(low=0.7, high=1.4) + rs_k3(radius=0.8, scope='sequence_sum')",
        ", rollout_rs=token_k1,seq_sum_k3", rollout_rs="token_k1,seq_sum_k3", rollout_rs_threshold="0.7_1.4,0.8",
    ),
    Row(
        "rollout_is normalised, with rejection", ("option rollout_is_batch_normalize",),
        _loss("vanilla", correction={
            "rollout_is": "token", "rollout_is_threshold": 1.3, "rollout_is_batch_normalize": True,
            "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4",
        }), f"{_DUAL} + tis(high=1.3, normalize=True) + rs_k1(low=0.7, high=1.4)",
    ),
    _rs("token_k1", "0.8_1.5", "rs_k1(low=0.8, high=1.5)"),
    _rs("token_k2", 0.05, "rs_k2(radius=0.05)"),
    _rs("token_k3", 0.05, "rs_k3(radius=0.05)"),
    _rs("seq_mean_k1", "0.9_1.2", "rs_k1(low=0.9, high=1.2, scope='sequence_mean')"),
    _rs("seq_mean_k2", 0.08, "rs_k2(radius=0.08, scope='sequence_mean')"),
    _rs("seq_mean_k3", 0.08, "rs_k3(radius=0.08, scope='sequence_mean')"),
    _rs("seq_sum_k1", "0.5_1.6", "rs_k1(low=0.5, high=1.6, scope='sequence_sum')"),
    _rs("seq_sum_k2", 0.3, "rs_k2(radius=0.3, scope='sequence_sum')"),
    _rs("seq_sum_k3", 0.3, "rs_k3(radius=0.3, scope='sequence_sum')"),
    _rs("seq_max_k2", 0.15, "rs_k2(radius=0.15, scope='sequence_max')"),
    _rs("seq_max_k3", 0.15, "rs_k3(radius=0.15, scope='sequence_max')"),
)  # fmt: skip

MEANS: tuple[Row, ...] = (
    Row("token-sum", ("aggregate token-sum",), _loss("vanilla", agg="token-sum"),
        "dual_clip(c=3.0, base='ppo(aggregate=token_sum)')"),
    Row("seq-mean-token-sum", ("aggregate seq-mean-token-sum",), _loss("vanilla", agg="seq-mean-token-sum"),
        "dual_clip(c=3.0, base='dr_grpo(divisor=1)')"),
    Row("seq-mean-token-sum-norm", ("aggregate seq-mean-token-sum-norm",),
        _loss("vanilla", agg="seq-mean-token-sum-norm", divisor=100), "dual_clip(c=3.0, base='dr_grpo(divisor=100)')"),
    Row(
        "seq-mean-token-sum-norm, loss_scale_factor left alone", ("aggregate seq-mean-token-sum-norm",),
        _loss("vanilla", agg="seq-mean-token-sum-norm"), "dual_clip(c=3.0, base='dr_grpo(divisor=100)')", DIFFERS,
        "verl then divides by the padded width of the batch, which varies (here 7); Klamp's divisor is a constant.",
        exactly="dual_clip(c=3.0, base='dr_grpo(divisor=7)')",
    ),
    Row("seq-mean-token-mean", ("aggregate seq-mean-token-mean",), _loss("vanilla", agg="seq-mean-token-mean"),
        "dual_clip(c=3.0)"),
    Row(
        "seq-mean-token-mean, a mask of float64", ("aggregate seq-mean-token-mean",),
        _loss("vanilla", agg="seq-mean-token-mean", mask="float64"), "dual_clip(c=3.0)", DIFFERS,
        "verl adds 1e-8 to each length. With the engine's mask of booleans the sum is float32 and nothing is added; with a "
        "float64 mask the two are 1e-8 apart. Equal where A is scaled by n / (n + 1e-8).", adjust="lengths_plus_1e8",
    ),
    Row(
        "a response without a token", ("aggregate seq-mean-token-sum",), _loss("vanilla", agg="seq-mean-token-sum"),
        "dual_clip(c=3.0, base='dr_grpo(divisor=1)')", DIFFERS,
        "verl divides by the responses of the mini-batch, empty or not; Klamp does with rows=all.",
        cases=("empty-0", "empty-1"),
        exactly="dual_clip(c=3.0, base='dr_grpo(aggregate=sequence_sum(divisor=1, rows=all))')",
    ),
)  # fmt: skip

_FAR = Row(
    "kl_penalty=k3 beyond its clamps", ("kl k3",), {"kl": "k3", "coefficient": 0.3}, "reinforce() + kl_reference(beta=0.3)",
    DIFFERS,
    "verl clamps the log-ratio to 20 and the estimate to 10, without a gradient beyond: from ref/new above 13.6 on there "
    "is no pull back. Equal where such tokens have the value 10 and no gradient.",
    cases=("far_reference-0", "far_reference-1"), adjust="k3_within_10", visible=1e-2, kind="verl.kl",
)  # fmt: skip
ESTIMATORS: tuple[Row, ...] = (
    _kl("kl", "k1"), _kl("k1", "k1"), _kl("abs", "abs"), _kl("mse", "k2"), _kl("k2", "k2"), _kl("low_var_kl", "k3"),
    _kl("k3", "k3"), _kl("kl+", "k1", "k2"), _kl("k1+", "k1", "k2"), _kl("abs+", "abs", "k2"), _kl("k3+", "k3", "k2"),
    _kl("low_var_kl+", "k3", "k2"), _FAR,
    Row("kl_penalty=full", ("kl full",), {"kl": "full", "coefficient": 0.3}, "", NOT_EXPRESSIBLE,
        "verl raises NotImplementedError for it: there is nothing to compare with.", kind="verl.kl"),
)  # fmt: skip

BESIDE: tuple[Row, ...] = (
    Row(
        "entropy_coeff and use_kl_loss", ("option entropy_coeff", "option use_kl_loss"),
        {"loss": "vanilla", "config": {"entropy_coeff": 0.02, "use_kl_loss": True, "kl_loss_coef": 0.3}},
        f"{_DUAL} + entropy_bonus(coefficient=0.02) + kl_reference(beta=0.3)", cases=_NEAR_REF, kind="verl.ppo_loss",
    ),
    Row(
        "entropy_coeff and use_kl_loss, seq-mean-token-mean", ("option entropy_coeff", "option use_kl_loss"),
        {"loss": "vanilla", "config": {"entropy_coeff": 0.02, "use_kl_loss": True, "kl_loss_coef": 0.3,
                                       "kl_loss_type": "k3+", "loss_agg_mode": "seq-mean-token-mean"}},
        "dual_clip(c=3.0) + entropy_bonus(coefficient=0.02) + kl_reference(beta=0.3, gradient='k2')", cases=_NEAR_REF, kind="verl.ppo_loss",
    ),
)  # fmt: skip

ROWS = LOSSES + BESIDE + CORRECTIONS + MEANS + ESTIMATORS
