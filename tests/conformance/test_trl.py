"""TRL's own losses, in float64 and without a model, against the specs of the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance import cases
from conformance.cases import Arrays
from conformance.comparing import TOLERANCE, check, runnable
from conformance.formulas import kl_of_the_response
from conformance.rows import PLAIN, Row
from conformance.sides import Result, apart, ours
from conformance.table import ROWS, shipped
from conformance.trl_rows import OUTSIDE
from conformance.trl_side import shipped as trl_ships
from conformance.trl_side import theirs
from conformance.trl_side import trainers as trl_trainers

RUNNABLE = runnable(ROWS["trl"])


def _theirs(row: Row, arrays: Arrays) -> Result:
    return theirs(arrays, **row.call)


@pytest.mark.parametrize("row", RUNNABLE, ids=[row.mode for row in RUNNABLE])
def test_row(row: Row) -> None:
    check(row, _theirs)


def test_every_switch_of_trls_loss_has_a_row() -> None:
    assert trl_ships() == shipped("trl")


@pytest.mark.parametrize("name", PLAIN)
def test_rloo_is_the_product_of_ratios(name: str) -> None:
    """Equal gradients; TRL's value is of a response, ours of each of its tokens."""
    arrays = cases.make(name)
    spec = next(row.spec for row in ROWS["trl"] if row.mode == "RLOOTrainer")
    loss, gradient = ours(spec, arrays)
    original = theirs(arrays, trainer="RLOOTrainer")
    assert apart((0.0, gradient), (0.0, original[1])) <= TOLERANCE
    assert abs(loss - original[0]) > 1e-3
    x = ((arrays["new"] - arrays["old"]) * arrays["mask"]).sum(1)
    a, w, n = arrays["advantages"], np.exp(x), arrays["mask"].sum(1)
    values = -np.minimum(w * a, w.clip(0.8, 1.2) * a)
    assert original[0] == pytest.approx(values.mean(), rel=1e-12)
    assert loss == pytest.approx((n * values).mean(), rel=1e-12)


def test_gmpo_has_a_loss_for_a_response_without_a_token() -> None:
    arrays = cases.make("empty-0")
    original = theirs(arrays, trainer="GMPOTrainer")
    assert apart(ours("gmpo()", arrays), original) > 0.1
    loss, gradient = ours("gmpo(aggregate=sequence_mean(rows=all))", arrays)
    constant = -arrays["advantages"][3] / len(arrays["mask"])
    assert abs(constant) > 1e-3
    assert apart((loss + constant, gradient), original) <= TOLERANCE


@pytest.mark.parametrize("name", PLAIN)
def test_the_entropy_bonus_is_a_token_mean(name: str) -> None:
    """grpo with a bonus is TRL's grpo plus TRL's bonus of bnpo."""
    arrays = cases.make(name)
    options: dict[str, Any] = {"entropy_coef": 0.02}
    original = theirs(arrays, loss_type="grpo", **options)
    apart_by = apart(ours("grpo() + entropy_bonus(coefficient=0.02)", arrays), original)
    assert apart_by > 1e-6
    policy, gradient = ours("grpo()", arrays)
    bonus, whole = ours(
        "reinforce() + entropy_bonus(coefficient=0.02)", arrays | {"advantages": 0.0 * arrays["advantages"]}
    )
    rows = len(arrays["mask"])
    whole[:rows] += gradient
    assert apart((policy + bonus, whole), original) <= TOLERANCE


def _row_of(test: str) -> Row:
    return next(row for row in ROWS["trl"] if row.test.endswith(f".{test}"))


@pytest.mark.parametrize("name", PLAIN)
def test_the_kl_is_weighed_by_the_response(name: str) -> None:
    arrays, row = cases.make(name), _row_of("test_the_kl_is_weighed_by_the_response")
    original = _theirs(row, arrays)
    assert apart(ours(row.spec, arrays), original) > 1e-6
    assert apart(kl_of_the_response(arrays, "gspo(epsilon_low=0.2, epsilon_high=0.2)", 0.3), original) <= TOLERANCE


def test_the_adaptive_entropy_coefficient_is_one_number_per_step() -> None:
    arrays, row = cases.make("plain-0"), _row_of("test_the_adaptive_entropy_coefficient_is_one_number_per_step")
    mean = arrays["entropy"][arrays["mask"]].mean()
    for target, coefficient in ((mean + 0.1, 0.02), (mean - 0.1, None)):
        moved: dict[str, float] = {}
        original = theirs(arrays, **row.call, entropy_target=float(target), last_entropy=float(mean), moved=moved)
        policy, gradient = ours("bnpo()", arrays)
        if coefficient is None:
            wanted = (policy, np.concatenate([gradient, np.zeros_like(gradient)]))
        else:
            wanted = ours(f"bnpo() + entropy_bonus(coefficient={coefficient})", arrays)
        assert apart(wanted, original) <= TOLERANCE
        assert moved["entropy_coef"] != 0.02  # the next step has another


@pytest.mark.parametrize("name", PLAIN[:3])
def test_the_entropy_bonus_is_of_the_tokens_of_high_entropy(name: str) -> None:
    arrays, row = cases.make(name), _row_of("test_the_entropy_bonus_is_of_the_tokens_of_high_entropy")
    original = _theirs(row, arrays)
    assert apart(ours(row.spec, arrays), original) > 1e-6
    policy, gradient = ours(row.spec.rpartition(" + ")[0], arrays)
    high = arrays["mask"] & (arrays["entropy"] >= np.quantile(arrays["entropy"][arrays["mask"]], 0.7))
    bonus = -0.02 * arrays["entropy"][high].mean()
    slope = np.where(high, -0.02 / high.sum(), 0.0)
    assert apart((policy + bonus, np.concatenate([gradient, slope])), original) <= TOLERANCE


def test_every_trainer_of_trl_is_in_the_table_or_named_as_outside() -> None:
    found = trl_trainers()
    rows = {item.removeprefix("trainer ") for item in shipped("trl") if item.startswith("trainer ")} | {"GRPOTrainer"}
    assert found == rows | set(OUTSIDE)
    assert not rows & set(OUTSIDE)
