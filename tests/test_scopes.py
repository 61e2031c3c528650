"""Scopes against loops over responses: any reduction, packed or not, with holes, and lotteries that follow the token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.batches import Fields, packed, random_fields

import klamp

SCOPES = ("segment", "prefix", "suffix", "sequence", "group")


def _fields(seed: int, rows: int = 5, tokens: int = 9) -> Fields:
    rng = torch.Generator().manual_seed(seed)
    fields = random_fields(seed, rows, tokens, per_token=True)
    fields["row"] = torch.randperm(100, generator=rng)[:rows]
    fields["segment"] = torch.randint(0, 3, (rows, tokens), generator=rng).sort(dim=1).values
    return fields


def _batch(fields: Fields) -> klamp.Batch:
    return klamp.Batch(**fields)


def _neighbours(fields: Fields, i: int, j: int, scope: str) -> list[tuple[int, int, int]]:
    """(row, column, distance in unmasked tokens) of what the scope of token (i, j) holds."""
    mask = fields["mask"]
    own = [k for k in range(mask.shape[1]) if mask[i, k]]
    place = {k: n for n, k in enumerate(own)}
    if scope == "group":
        rows = [r for r in range(mask.shape[0]) if fields["group"][r] == fields["group"][i]]
        return [(r, k, 0) for r in rows for k in range(mask.shape[1]) if mask[r, k]]
    chosen = {
        "sequence": lambda k: True,
        "segment": lambda k: fields["segment"][i, k] == fields["segment"][i, j],
        "prefix": lambda k: k <= j,
        "suffix": lambda k: k >= j,
    }[scope]
    return [(i, k, abs(place[k] - place[j])) for k in own if chosen(k)]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("how", ["mean", "sum", "max"])
@settings(max_examples=10)
@given(st.integers(0, 2**31), st.sampled_from([1.0, 0.8, 0.05]))
def test_reductions_are_loops_over_the_scope(scope: str, how: str, seed: int, discount: float) -> None:
    discount = discount if scope in ("prefix", "suffix") and how != "max" else 1.0
    fields = _fields(seed)
    batch = _batch(fields)
    values = batch.log_ratio("new/old")
    found = batch.reduce(values, scope, how, discount).expand(batch.shape)
    for i, j in fields["mask"].nonzero().tolist():
        near = [(float(values[r, k]), discount**d) for r, k, d in _neighbours(fields, i, j, scope)]
        total, weight = sum(v * w for v, w in near), sum(w for _, w in near)
        wanted = {"sum": total, "mean": total / weight, "max": max(v for v, _ in near)}[how]
        assert float(found[i, j]) == pytest.approx(wanted, rel=1e-12, abs=1e-13), (i, j)


@pytest.mark.parametrize("scope", ["segment", "prefix", "suffix", "sequence"])
@settings(max_examples=10)
@given(st.integers(0, 2**31))
def test_packing_does_not_matter(scope: str, seed: int) -> None:
    fields = _fields(seed)
    laid = packed({name: value for name, value in fields.items() if name not in ("row", "group")}, 4)
    plain, dense = _batch(fields), _batch({**laid, "group": None})
    for how in ("mean", "sum", "max"):
        discount = 0.7 if scope in ("prefix", "suffix") and how != "max" else 1.0
        one = plain.reduce(plain.log_ratio("new/old"), scope, how, discount).expand(plain.shape)[plain.mask]
        other = dense.reduce(dense.log_ratio("new/old"), scope, how, discount).expand(dense.shape)[dense.mask]
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


def test_a_long_discounted_suffix() -> None:
    """Against the recursion y_t = x_t + gamma y_(t+1), over 3000 tokens; by powers gamma^-t it would overflow."""
    x = torch.randn(1, 3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 3000, dtype=torch.bool)
    batch = klamp.Batch(x, torch.zeros_like(x), torch.ones(1), mask)
    found = batch.log_ratio("new/old", "suffix", "sum", 0.5)
    y, wanted = 0.0, []
    for value in reversed(x[0].tolist()):
        y = value + 0.5 * y
        wanted.append(y)
    assert torch.allclose(found[0], torch.tensor(wanted[::-1], dtype=torch.float64), rtol=1e-12, atol=1e-13)


# --- lotteries ------------------------------------------------------------------------------------------------


def test_a_lottery_number_belongs_to_seed_step_row_and_position() -> None:
    fields = _fields(3, rows=8, tokens=12)
    batch = _batch(fields)
    number = batch.lottery(0, 0)
    assert float(number.min()) >= 0.0
    assert float(number.max()) < 1.0
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    moved = _batch({name: value[order] for name, value in fields.items()})
    assert torch.equal(moved.lottery(0, 0)[moved.mask], number[order][moved.mask])
    wide = {n: torch.nn.functional.pad(v, (3, 2)) if v.ndim == 2 else v for n, v in fields.items()}
    assert torch.equal(_batch(wide).lottery(0, 0)[:, 3:-2][batch.mask], number[batch.mask])
    for seed, step in ((1, 0), (0, 1), (2**31 - 1, 99)):
        assert not bool((batch.lottery(seed, step) == number)[batch.mask].any())
    laid = packed({**{n: v for n, v in fields.items() if n not in ("row", "group")}}, 4)
    laid["row"] = fields["row"][laid["row"]]
    dense = _batch(laid)
    assert torch.equal(dense.lottery(0, 0)[dense.mask], number[batch.mask])


def test_lottery_numbers_are_uniform_and_independent() -> None:
    rows, tokens = 400, 250
    zeros = torch.zeros(rows, tokens, dtype=torch.float64)
    batch = klamp.Batch(
        zeros, zeros, torch.ones(rows), torch.ones(rows, tokens, dtype=torch.bool), row=torch.arange(rows)
    )
    number = batch.lottery(0, 0)
    assert number.unique().numel() == rows * tokens
    counts = torch.histc(number, 100, 0.0, 1.0)
    chi2 = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    assert 50.0 < chi2 < 170.0  # 99 degrees of freedom
    for other in (batch.lottery(0, 1), batch.lottery(1, 0), number.roll(1, 0), number.roll(1, 1)):
        correlation = float(torch.corrcoef(torch.stack([number.flatten(), other.flatten()]))[0, 1])
        assert abs(correlation) < 5.0 / math.sqrt(rows * tokens)
