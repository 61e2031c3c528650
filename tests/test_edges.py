"""Edges that once gave a wrong number or a traceback: each is right now, or one clear message."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

import klamp
from klamp.gates import Ring
from klamp.guards import Guard
from klamp.regions import region


def batch(x: list[list[float]], advantages: list[float], **fields: Any) -> klamp.Batch:
    gap = torch.tensor(x, dtype=torch.float64)
    old = torch.full_like(gap, -1.0)
    return klamp.Batch(
        old + gap, old, torch.tensor(advantages).double(), torch.ones(gap.shape, dtype=torch.bool), **fields
    )


REFUSED = {
    "tis(normalize='no')": "normalize='no' must be True or False",
    "cispo(epsilon_low=nan)": "must satisfy 0 <= low",
    "rs_k1(high=-inf)": "0 < low <= 1 <= high < inf",
    "rs_k1(low=0)": "0 < low <= 1 <= high < inf",
    "gmpo(epsilon=1000)": "from 0 to 700",
    "gmpo(epsilon=-1000)": "from 0 to 700",
    "ppo_lowprob_relaxed(ratio=5)": "ratio=5 is unknown",
    "grpo(penalty='guard(ratio_high=2.0)')": "must be penalties alone: f_penalty, kl_reference, entropy_bonus, divergence_penalty; guard",
    "grpo(penalty='dapo() + kl_reference()')": "would be lost: add it with +",
    "guard(measure=measure('k3', curvature=-1), radius=0.1)": "k3 has its curvature",
    "guard(region='nowhere', over='kept')": "belongs to a budget",
    "trust_region('k3', adaptive(0.02, removed=5))": "is a share of tokens: it must be below 1",
    "f_penalty(on=guard(ratio_high=1.2, action='drop'))": "action='drop' would do nothing there",
    "guard(ratio_high=1.2, gate={'a': 1})": "unknown gate",
    "guard(ratio_high=1.2, strength=[])": "belongs to action='rollback'",
    "guard(ratio_high=1.2, gate=likely(policy=5))": "policy=5 is unknown",
    "guard(measure=['k3'], budget=0.1)": "unknown measure",
    "two_sided(delta=0.5)": "delta=0.5 must exceed 1",
    "ipo(kl_tau=0)": "kl_tau=0 must be a finite number above 0",
    "kl_cov(coefficient=0)": "coefficient=0 must be a finite number above 0",
    "fipo(half_life=0.0001)": "half_life=0.0001 must be",
    "real(tau=0)": "tau=0 must be",
    "linear(0.1, 0.2, 5)": "is a value inside a part",
    "guard(region='nowhere', gate=covariance_window(unless=guard(measure='k3', radius=linear(0.001, 10.0, 1))))": "fixed guard",
    "grpo(" * 3000: "cannot read the spec",
}


@pytest.mark.parametrize("text", REFUSED, ids=[text[:60] for text in REFUSED])
def test_refused_with_the_argument_that_was_given(text: str) -> None:
    with pytest.raises(klamp.UserError) as found:
        klamp.parse(text)
    assert REFUSED[text] in str(found.value)
    assert len(str(found.value)) < 2100


DICTIONARIES: list[Any] = [
    None, 5, [], {}, {"unknown": 1}, {"guards": 5}, {"guards": [5]}, {"aggregate": "token_mean"},
    {"factors": [{"part": "guard", "ratio_high": 1.2}]}, {"guards": [{"part": "factor"}]}, {"guards": [{"part": "cap"}]},
    {"aggregate": {"part": "guard", "ratio_high": 1.2}}, {"aggregate": [{"part": "token_mean"}, {"part": "token_sum"}]},
]  # fmt: skip


@pytest.mark.parametrize("data", DICTIONARIES, ids=[str(data) for data in DICTIONARIES])
def test_dictionaries_of_another_shape_are_refused(data: Any) -> None:
    with pytest.raises(klamp.UserError):
        klamp.Spec.from_dict(data)


def test_python_values_of_another_type_are_refused() -> None:
    for call in (
        lambda: klamp.parse("grpo") + None,
        lambda: klamp.preset(["grpo"]),
        lambda: Ring("a", 2),  # type: ignore[arg-type]
        lambda: Guard(region(ratio_high=1.2), strength={}),  # type: ignore[arg-type]
    ):
        with pytest.raises(klamp.UserError):
            call()


def test_another_specs_state_is_refused() -> None:
    objective = klamp.Objective("atr_grpo(delta=adaptive(0.02, removed=0.01))")
    given = batch([[0.1, 0.3]], [1.0])
    out = objective(given)
    with pytest.raises(klamp.UserError, match=r"this state lacks guard 0\.high"):
        objective.update({}, objective.stats(given), out.metrics)


def test_numbers_of_numpy_are_numbers() -> None:
    spec = klamp.preset("grpo", epsilon=np.float64(0.2))
    assert str(spec) == "grpo(epsilon=0.2)"
    assert klamp.parse(str(spec)) == klamp.parse("grpo")


def test_infinities_are_text_in_json() -> None:
    spec = klamp.parse("guard(region='nowhere', gate=covariance_window(low=-inf, high=inf)) + factor()")
    assert klamp.Spec.from_dict(json.loads(json.dumps(spec.to_dict(), allow_nan=False))) == spec


def test_nested_bases_grow_with_their_depth() -> None:
    depth = 40
    spec = klamp.parse("trust_region('k3', 0.02, base=" * depth + "grpo() + sequence_mask()" + ")" * depth)
    assert len(str(spec)) < 60 * depth
    assert klamp.parse(str(spec)) == spec


def test_a_mean_weight_that_overflows_is_said() -> None:
    spec = "factor(normalized(cap())) + guard(ratio_high=10, gate='always', cut_value='zero') + token_mean()"
    with pytest.raises(klamp.UserError, match=r"the policy gradient weight at \[0, 0\] overflows"):
        klamp.Objective(spec)(batch([[0.1, 800.0]], [1.0]))


def test_an_overflowing_divergence_leaves_beta_finite() -> None:
    objective = klamp.Objective(
        "guard(ratio_high=1.2, cut_value='zero') + factor() + f_penalty('k2', 1.0, target=0.01, rate=0.1)"
    )
    given = batch([[0.1, 800.0]], [1.0])
    state = objective.init()
    for _ in range(3):
        out = objective(given, state=state)
        state = objective.update(state, objective.stats(given, state), out.metrics)
    assert state["beta"] == 8.0  # doubled three times
    json.dumps(state, allow_nan=False)


def test_a_controller_at_its_smallest_comes_back() -> None:
    penalty = klamp.parse("ppo_kl_adaptive(target=0.01)").penalties[0]
    beta = 1.0
    for _ in range(2000):
        beta = penalty.adapt(beta, 0.0)  # type: ignore[attr-defined]
    assert beta > 0.0
    assert penalty.adapt(beta, 1.0) == 2.0 * beta  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_ids_of_any_integer_width_mean_the_same(dtype: torch.dtype) -> None:
    x, a = [[0.1, 0.2], [0.3, -0.1], [0.0, 0.2], [-0.2, 0.1]], [1.0, -1.0, 0.5, -0.5]
    ids = torch.tensor([0, 1, 0, 1])
    for spec, name in (
        ("grpo(aggregate=prompt_mean)", "group"),
        ("kl_cov(share=0.3)", "row"),
        ("clip_cov(low=-9, seed=7)", "row"),
    ):
        values = torch.arange(4) if name == "row" else ids
        one, other = (klamp.Objective(spec)(batch(x, a, **{name: v})) for v in (values, values.to(dtype)))
        assert torch.equal(one.loss, other.loss)


def test_a_discount_that_underflows_is_nothing() -> None:
    x = [[0.001] + [0.0] * 298 + [800.0]]
    spec = (
        "factor() + guard(measure='k3', radius=1e-9, scope='suffix', reduce='sum_after', discount=0.01, gate='always')"
    )
    out = klamp.Objective(spec)(batch(x, [-1.0]))
    assert not bool(out.inside[0, 0])  # its own D is 5e-7
    assert not bool(out.inside[0, 299])
    assert math.isfinite(float(out.loss))


def test_a_token_that_a_mask_and_a_rollback_cut_is_zero_whatever_their_order() -> None:
    for text in ("rollback() + guard(measure='k3', radius=0.01, cut_value='zero')",
                 "guard(measure='k3', radius=0.01, cut_value='zero') + rollback()"):  # fmt: skip
        out = klamp.Objective(text)(batch([[0.5, 0.0]], [1.0]))
        assert out.grad_policy[0].tolist() == [0.0, 1.0]
        assert float(out.per_token[0, 0]) == 0.0
