"""Group advantages against a plain Python oracle, and the rows of bug reports that they answer."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import klamp
from klamp.advantages import BASELINES, SCALES

NAN = math.nan


def by_hand(rewards: list[float], group: list[int], baseline: str, scale: str, eps: float) -> list[float]:
    found = []
    for r, g in zip(rewards, group, strict=True):
        peers = [q for q, h in zip(rewards, group, strict=True) if h == g and not math.isnan(q)]
        alone = len(peers) < 2 and (baseline == "leave_one_out" or scale != "none" or baseline == "mean")
        if math.isnan(r) or (len(set(peers)) == 1 and baseline != "none"):
            found.append(0.0)
            continue
        if baseline == "leave_one_out":
            value = r - (sum(peers) - r) / (len(peers) - 1)
        else:
            value = r - statistics.fmean(peers) if baseline == "mean" else r
        if scale != "none":
            std = 0.0 if alone else (statistics.stdev if scale == "std" else statistics.pstdev)(peers)
            value = value / (std + eps) if std + eps else math.nan
        found.append(value)
    return found


REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.5, NAN]), st.floats(-10.0, 10.0, width=16))
ROWS = st.lists(st.tuples(REWARD, st.integers(-2, 3)), min_size=1, max_size=14)


@given(ROWS, st.sampled_from(BASELINES), st.sampled_from(SCALES), st.sampled_from([0.0, 1e-4]))
def test_against_plain_python(rows: list[tuple[float, int]], baseline: str, scale: str, eps: float) -> None:
    rewards, group = [r for r, _ in rows], [g for _, g in rows]
    found = klamp.group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(group), baseline=baseline, scale=scale, eps=eps
    )
    wanted = by_hand(rewards, group, baseline, scale, eps)
    for got, value in zip(found.values.tolist(), wanted, strict=True):
        if not math.isnan(value):  # r / 0: a tied group without a baseline has no scale
            assert got == pytest.approx(value, rel=1e-11, abs=1e-12)
    assert found.scored.tolist() == [not math.isnan(r) for r in rewards]
    for g, tied in zip(group, found.tied.tolist(), strict=True):
        peers = {q for q, h in zip(rewards, group, strict=True) if h == g and not math.isnan(q)}
        assert tied == (len(peers) <= 1)


def run(
    rewards: list[float], group: list[int] | None = None, **options: Any
) -> tuple[list[float], list[bool], list[bool]]:
    found = klamp.group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(group or [0] * len(rewards)), **options
    )
    return found.values.tolist(), found.scored.tolist(), found.tied.tolist()


def test_c22_ties_and_scales() -> None:
    assert run([1.0] * 4) == ([0.0] * 4, [True] * 4, [True] * 4)
    assert run([1.0, 0.0, 0.0, 0.0])[0] == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-12)
    population = run([1.0, 0.0, 0.0, 0.0], scale="population_std")[0]
    assert population == pytest.approx([1.7320508075688772] + [-0.5773502691896257] * 3, rel=1e-12)
    assert run([1.0, 0.0, 0.0, 0.0], scale="none")[0] == [0.75, -0.25, -0.25, -0.25]
    assert run([1.0, 0.0, 0.0, 0.0], scale="none", baseline="leave_one_out")[0] == pytest.approx([1.0] + [-1 / 3] * 3)


@pytest.mark.parametrize("value", [1 / 3, 0.1, 1e-8, 7e5 + 0.1])
def test_ties_are_exact_zeros(value: float) -> None:
    """The mean of equal rewards may differ from them by rounding, and 1 ulp / (std = 1 ulp) is not 0."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rewards = torch.full((7,), value, dtype=dtype)
        for scale in SCALES:
            found = klamp.group_advantages(rewards, torch.zeros(7, dtype=torch.int64), scale=scale)
            assert found.values.tolist() == [0.0] * 7
            assert found.tied.all()
            assert found.values.dtype == dtype


def test_c25_unscored_rewards() -> None:
    values, scored, tied = run([1.0, NAN, 0.0, NAN, NAN], [0, 0, 0, 1, 1], scale="none")
    assert values == [0.5, 0.0, -0.5, 0.0, 0.0]
    assert scored == [True, False, True, False, False]
    assert tied == [False, False, False, True, True]


def test_groups_in_any_order() -> None:
    rewards, group = [1.0, 5.0, 0.0, 7.0], [9, -4, 9, -4]
    assert run(rewards, group, scale="none")[0] == [0.5, -1.0, -0.5, 1.0]


def test_eps_shifts_the_scale() -> None:
    assert run([1.0, 0.0], eps=1.0)[0] == pytest.approx([0.5 / (0.5**0.5 + 1.0), -0.5 / (0.5**0.5 + 1.0)])


@pytest.mark.usefixtures("unchecked")
def test_refusals() -> None:
    with pytest.raises(klamp.UserError, match="baseline='median' is unknown; did you mean 'mean'"):
        run([1.0], baseline="median")
    with pytest.raises(klamp.UserError, match="scale='stdev' is unknown; did you mean 'std'"):
        run([1.0], scale="stdev")
    with pytest.raises(klamp.UserError, match=r"must be \[B\]; got \[2\] and \[3\]"):
        klamp.group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(klamp.UserError, match=r"must be \[B\]"):
        klamp.group_advantages(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64))
