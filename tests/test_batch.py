"""Batch: what is checked, what an error names, missing log-probs, and the log-ratios."""

from __future__ import annotations

import math
from typing import Any

import jaxtyping
import pytest
import torch
from oracles.batches import packed, random_fields

import klamp


def fields(**changes: Any) -> dict[str, Any]:
    """Two rows of three tokens with every optional field."""
    base: dict[str, Any] = {
        "logp_new": torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -0.25, -4.0]]),
        "logp_old": torch.tensor([[-1.5, -2.0, -2.0], [-0.5, -0.5, -1.0]]),
        "advantages": torch.tensor([1.0, -1.0]),
        "mask": torch.tensor([[True, True, True], [True, True, False]]),
        "logp_rollout": torch.tensor([[-1.0, -2.5, -3.0], [-0.5, -0.75, -4.0]]),
        "logp_ref": torch.full((2, 3), -1.0),
        "entropy": torch.ones(2, 3),
        "divergences": {"tv": torch.zeros(2, 3)},
        "group": torch.tensor([0, 0]),
        "row": torch.tensor([0, 1]),
        "segment": torch.zeros(2, 3, dtype=torch.int64),
        "reward": torch.tensor([1.0, 0.0]),
    }
    return base | changes


def test_what_a_batch_offers() -> None:
    batch = klamp.Batch(**fields())
    assert batch.shape == (2, 3)
    assert batch.offers == {
        "logp_rollout",
        "logp_ref",
        "entropy",
        "group",
        "row",
        "segment",
        "reward",
        "divergences[tv]",
    }
    bare = {name: value for name, value in fields().items() if name in ("logp_new", "logp_old", "advantages", "mask")}
    assert klamp.Batch(**bare).offers == frozenset()


def test_token_ratios() -> None:
    batch = klamp.Batch(**fields())
    assert batch.log_ratio("new/old").tolist() == [[0.5, 0.0, -1.0], [0.0, 0.25, 0.0]]  # the last is masked
    assert batch.log_ratio("new/rollout").tolist() == [[0.0, 0.5, 0.0], [0.0, 0.5, 0.0]]
    assert batch.log_ratio("old/rollout").tolist() == [[-0.5, 0.5, 1.0], [0.0, 0.25, 0.0]]
    assert batch.log_ratio("new/ref").tolist() == [[0.0, -1.0, -2.0], [0.5, 0.75, 0.0]]


def test_sequence_ratios() -> None:
    batch = klamp.Batch(**fields())
    assert batch.log_ratio("new/old", "sequence", "sum").tolist() == [[-0.5], [0.25]]
    assert batch.log_ratio("new/old", "sequence", "mean").squeeze(1).tolist() == pytest.approx([-0.5 / 3, 0.125])
    empty = klamp.Batch(**fields(mask=torch.zeros(2, 3, dtype=torch.bool)))
    assert empty.log_ratio("new/old", "sequence", "mean").tolist() == [[0.0], [0.0]]


def test_ratios_carry_no_gradient_and_are_wide() -> None:
    new = fields()["logp_new"].bfloat16().requires_grad_()
    batch = klamp.Batch(**fields(logp_new=new, logp_old=fields()["logp_old"].bfloat16()))
    x = batch.log_ratio("new/old")
    assert not x.requires_grad
    assert x.dtype == torch.float32
    double = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in fields().items()
    }
    assert klamp.Batch(**double).log_ratio("new/old").dtype == torch.float64


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e10])
def test_masked_rubbish_is_selected_away(value: float) -> None:
    dirty = fields()
    for name in ("logp_new", "logp_old", "logp_rollout", "logp_ref", "entropy"):
        dirty[name] = dirty[name].clone()
        dirty[name][1, 2] = value
    clean, found = klamp.Batch(**fields()), klamp.Batch(**dirty)
    for ratio in ("new/old", "new/rollout", "old/rollout", "new/ref"):
        for scope, reduce in (("token", "mean"), ("sequence", "mean"), ("sequence", "sum")):
            assert torch.equal(clean.log_ratio(ratio, scope, reduce), found.log_ratio(ratio, scope, reduce))
    assert int(found.missing_rows) == 0


def test_a_missing_field_is_named() -> None:
    batch = klamp.Batch(**fields(logp_rollout=None, logp_ref=None))
    with pytest.raises(klamp.UserError, match="logp_rollout="):
        batch.log_ratio("old/rollout")
    with pytest.raises(klamp.UserError, match="logp_ref="):
        batch.log_ratio("new/ref")


# --- errors ---------------------------------------------------------------------------------------------------

WRONG = [
    ({"mask": torch.ones(2, 3)}, r"mask must be boolean; got torch.float32: write mask.bool\(\)"),
    ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask must be a tensor of shape \[B, T\]; got \[3\]"),
    ({"mask": None}, "mask must be a tensor"),
    ({"logp_new": torch.zeros(2, 4)}, r"logp_new must be a tensor of shape \[2, 3\] .*got \[2, 4\]"),
    ({"logp_old": torch.zeros(3, 2)}, r"logp_old must be .*\[2, 3\].*got \[3, 2\]"),
    ({"logp_old": None}, "logp_old must be a tensor.*got NoneType"),
    ({"logp_new": [[0.0] * 3] * 2}, "logp_new must be a tensor.*got list"),
    ({"advantages": torch.zeros(3)}, r"advantages must be a tensor of shape \[2\] or \[2, 3\].*got \[3\]"),
    ({"advantages": torch.zeros(2, 1)}, r"advantages must be .*got \[2, 1\]"),
    ({"advantages": torch.tensor([1, -1])}, "advantages must be floating-point; got torch.int64"),
    ({"logp_rollout": torch.zeros(2)}, r"logp_rollout must be .*got \[2\]"),
    ({"logp_ref": torch.zeros(2, 3, dtype=torch.int32)}, "logp_ref must be floating-point; got torch.int32"),
    ({"entropy": torch.zeros(2, 2)}, "entropy must be"),
    ({"divergences": {"kl": torch.zeros(2)}}, r"divergences\[kl\] must be"),
    ({"group": torch.zeros(2)}, "group must be integer; got torch.float32"),
    ({"group": torch.zeros(2, 3, dtype=torch.int64)}, r"group must be a tensor of shape \[2\]"),
    ({"group": torch.tensor([True, False])}, "group must be integer; got torch.bool"),
    ({"row": torch.zeros(3, dtype=torch.int64)}, r"row must be a tensor of shape \[2\] or \[2, 3\]"),
    ({"segment": torch.zeros(2, dtype=torch.int64)}, "segment must be"),
    ({"reward": torch.zeros(2, 3)}, "reward must be"),
    ({"logp_new": torch.zeros(2, 3, device="meta")}, "logp_new is on meta, mask on cpu"),
    ({"missing": "ignore"}, "missing='ignore' is unknown"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("changes", "words"), WRONG, ids=[next(iter(c)) + str(i) for i, (c, _) in enumerate(WRONG)])
def test_wrong_fields_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(klamp.UserError, match=words):
        klamp.Batch(**fields(**changes))


@pytest.mark.parametrize("name", ["logp_new", "logp_old", "logp_ref", "entropy", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_are_named_with_their_position(name: str, value: float) -> None:
    changed = fields()[name].clone()
    changed[(1,) if name == "advantages" else (1, 1)] = value
    column = 0 if name == "advantages" else 1
    with pytest.raises(klamp.UserError, match=rf"{name}\[1, {column}\] = {value} at an unmasked position"):
        klamp.Batch(**fields(**{name: changed}))
    klamp.Batch(**fields(**{name: changed}), validate=False)


def test_infinite_rollout_is_not_missing() -> None:
    rollout = fields()["logp_rollout"].clone()
    rollout[0, 1] = -math.inf
    with pytest.raises(klamp.UserError, match=r"logp_rollout\[0, 1\] = -inf"):
        klamp.Batch(**fields(logp_rollout=rollout))


def test_annotations_are_asserted() -> None:
    """The shape strings are law: under the test suite's import hook jaxtyping checks them."""
    with pytest.raises(jaxtyping.TypeCheckError):
        klamp.Batch(**fields(logp_new=torch.zeros(2, 4)))


# --- missing log-probs ----------------------------------------------------------------------------------------


def _with_missing() -> dict[str, Any]:
    rollout = fields()["logp_rollout"].clone()
    rollout[0, 1] = math.nan
    rollout[1, 2] = math.nan  # masked: not missing
    return fields(logp_rollout=rollout)


def test_missing_row() -> None:
    batch = klamp.Batch(**_with_missing())
    assert batch.mask.tolist() == [[False] * 3, [True, True, False]]
    assert int(batch.missing_rows) == 1
    assert torch.isfinite(batch.log_ratio("old/rollout")).all()


def test_missing_token() -> None:
    batch = klamp.Batch(**_with_missing(), missing="token")
    assert batch.mask.tolist() == [[True, False, True], [True, True, False]]


def test_missing_raises() -> None:
    with pytest.raises(klamp.UserError, match=r"logp_rollout\[0, 1\] = nan"):
        klamp.Batch(**_with_missing(), missing="raise")
    klamp.Batch(**fields(), missing="raise")


def test_missing_in_a_packed_row_excludes_that_response_only() -> None:
    row = torch.tensor([[7, 7, 3], [3, 9, 9]])
    rollout = torch.full((2, 3), -1.0)
    rollout[0, 2] = math.nan
    batch = klamp.Batch(**fields(logp_rollout=rollout, row=row, mask=torch.ones(2, 3, dtype=torch.bool)))
    assert batch.mask.tolist() == [[True, True, False], [False, True, True]]
    assert int(batch.missing_rows) == 1


# --- packing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4, 9, 64])
def test_packed_responses_sum_over_their_own_tokens(width: int) -> None:
    flat = random_fields(3, rows=6, tokens=5)
    laid = packed(flat, width)
    one, other = klamp.Batch(**flat), klamp.Batch(**laid)
    assert other.packed
    assert not one.packed
    for reduce in ("sum", "mean"):
        wanted = one.log_ratio("new/old", "sequence", reduce).expand(one.shape)[one.mask]
        got = other.log_ratio("new/old", "sequence", reduce)[other.mask]
        assert torch.allclose(got, wanted, rtol=1e-14, atol=1e-15)
    filled, _ = other.sequence_count()
    assert int(filled) == int(one.mask.any(1).sum())


def test_counts() -> None:
    mask = torch.tensor([[True, True, True], [False, False, False]])
    assert [int(n) for n in klamp.Batch(**fields(mask=mask)).sequence_count()] == [1, 2]
    row = torch.tensor([[0, 0, 1], [1, 2, 2]])
    assert [int(n) for n in klamp.Batch(**fields(mask=mask, row=row)).sequence_count()] == [
        2,
        2,
    ]  # a packed response without a token is not seen
