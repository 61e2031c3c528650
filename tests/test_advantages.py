"""Advantage estimators against plain Python oracles and TRL's torch code, and the rows of bug reports that they answer."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.advantages import ORACLES, Row, discounted, dr_grpo, grpo, rloo, whitened

import klamp
from klamp.advantages import BASELINES, ESTIMATORS, SCALES, Advantages, Estimator, Whiten, estimator
from klamp.errors import UserError

NAN = math.nan
NAMES = [(name, framework) for name, found in ESTIMATORS.items() for framework in (None, *found.frameworks)]
DISTINCT = list({estimator(*item): item for item in reversed(NAMES)}.values())
FEW = settings(max_examples=10)
UNGROUPED = ("reinforce", "reinforce_plus_plus")  # without a baseline: equal rewards are a signal too


def of(rows: list[Row], value: Estimator, dtype: torch.dtype = torch.float64, **more: Any) -> Advantages:
    rewards = torch.tensor([row[0] for row in rows], dtype=dtype)
    if value.components == "each" and rewards.ndim == 1:
        rewards = rewards.unsqueeze(1)
    more.setdefault("lengths", torch.tensor([row[2] for row in rows]))
    return value(rewards, torch.tensor([row[1] for row in rows]), **more)


REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.5, NAN]), st.integers(-80, 80).map(lambda n: n / 8))
ROWS = st.lists(st.tuples(REWARD, st.integers(-2, 3), st.integers(1, 5)), min_size=1, max_size=14)


def test_there_is_an_oracle_for_every_name_and_framework() -> None:
    assert set(ORACLES) == set(NAMES)


@pytest.mark.parametrize(("name", "framework"), NAMES)
def test_against_plain_python(name: str, framework: str | None) -> None:
    @settings(max_examples=25)
    @given(ROWS)
    def check(rows: list[Row]) -> None:
        found, wanted = of(rows, estimator(name, framework)), ORACLES[name, framework](rows)
        assert found.values.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-11)
        assert found.scored.tolist() == [not math.isnan(row[0]) for row in rows]
        for (_, group, _), tied in zip(rows, found.tied.tolist(), strict=True):
            peers = {r for r, g, _ in rows if g == group and not math.isnan(r)}
            assert tied == (len(peers) <= 1)

    check()


@given(ROWS, st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["std", "none"]), st.sampled_from([0.0, 1e-4]))
def test_the_function_is_the_estimator(rows: list[Row], baseline: str, scale: str, eps: float) -> None:
    rewards, group = torch.tensor([row[0] for row in rows], dtype=torch.float64), torch.tensor([row[1] for row in rows])
    found = klamp.group_advantages(rewards, group, baseline=baseline, scale=scale, eps=eps)
    if (baseline, scale) == ("leave_one_out", "std"):
        wanted = [a * n / (n - 1) if n > 1 else 0.0 for a, n in zip(grpo(rows, eps), sizes(rows), strict=True)]
    elif scale == "std":
        wanted = grpo(rows, eps)
    else:
        wanted = dr_grpo(rows) if baseline == "mean" else rloo(rows)
    assert found.values.tolist() == pytest.approx(wanted, rel=1e-11, abs=1e-12)


def sizes(rows: list[Row]) -> list[int]:
    return [sum(g == group and not math.isnan(r) for r, g, _ in rows) for _, group, _ in rows]


@pytest.mark.parametrize(("name", "framework"), DISTINCT)
def test_order_and_names_of_groups_do_not_matter(name: str, framework: str | None) -> None:
    @FEW
    @given(ROWS, st.randoms(use_true_random=False))
    def check(rows: list[Row], random: Any) -> None:
        order = list(range(len(rows)))
        random.shuffle(order)
        renamed = [(rows[i][0], 7 - 3 * rows[i][1], rows[i][2]) for i in order]
        straight = of(rows, estimator(name, framework)).values
        found = of(renamed, estimator(name, framework)).values
        assert found.tolist() == pytest.approx(straight[order].tolist(), rel=1e-9, abs=1e-12)

    check()


@pytest.mark.parametrize(("name", "framework"), DISTINCT)
def test_an_unscored_row_is_as_good_as_absent(name: str, framework: str | None) -> None:
    @FEW
    @given(ROWS)
    def check(rows: list[Row]) -> None:
        kept = [row for row in rows if not math.isnan(row[0])]
        found = of(rows, estimator(name, framework))
        assert found.values[~found.scored].tolist() == [0.0] * (len(rows) - len(kept))
        if kept:
            alone = of(kept, estimator(name, framework)).values
            assert found.values[found.scored].tolist() == pytest.approx(alone.tolist(), rel=1e-12, abs=1e-14)

    check()


@pytest.mark.parametrize(("name", "framework"), DISTINCT)
@pytest.mark.parametrize("value", [0.7, 1 / 3, 0.1, 1e-8, 7e5 + 0.1, -0.7])
def test_a_tied_group_is_exactly_zero(name: str, framework: str | None, value: float) -> None:
    """The mean of equal rewards may differ from them by rounding, and 1 ulp / (std = 1 ulp) is not 0."""
    live: list[Row] = [(1.0, 5, 3), (0.0, 5, 1), (0.0, 5, 2)]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        chosen = estimator(name, framework)
        tied: list[Row] = [(value, 0, n % 3 + 1) for n in range(7)]
        found = of(tied, chosen, dtype)
        assert found.tied.all()
        assert found.values.dtype == dtype
        if name == "reinforce":
            assert framework or found.values.tolist() == torch.tensor([value] * 7, dtype=dtype).tolist()
        else:
            assert found.values.tolist() == [0.0] * 7
        mixed = of(tied + live, chosen, dtype).values
        if name not in UNGROUPED and chosen.ties == "zero":
            assert mixed[:7].tolist() == [0.0] * 7
        if name not in UNGROUPED:
            assert mixed[7] != 0.0


SHIFTS = [name for name in DISTINCT if name[0] not in ("reinforce", "gpg", "maxrl")]


@pytest.mark.parametrize(("name", "framework"), SHIFTS)
def test_a_constant_added_to_every_reward_changes_nothing(name: str, framework: str | None) -> None:
    @FEW
    @given(ROWS, st.integers(-20, 20))
    def check(rows: list[Row], shift: int) -> None:
        chosen = estimator(name, framework, alone="zero")
        moved: list[Row] = [(r + shift, g, n) for r, g, n in rows]
        wanted = of(rows, chosen).values.tolist()
        assert of(moved, chosen).values.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)

    check()


@pytest.mark.parametrize("name", ["grpo", "batch_std", "passk", "maxrl", "gdpo"])
@settings(max_examples=40)
@given(ROWS, st.sampled_from([1e-6, 0.25, 3.0, 1e6]))
def test_scaled_estimators_forget_the_unit_of_the_reward(name: str, rows: list[Row], factor: float) -> None:
    other: list[Row] = [(r * factor, g, n) for r, g, n in rows]
    wanted = of(rows, estimator(name)).values.tolist()
    assert of(other, estimator(name)).values.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "opo", "gpg", "reinforce"])
@settings(max_examples=40)
@given(ROWS, st.sampled_from([-3.0, 0.25, 1e6]))
def test_centred_estimators_keep_the_unit_of_the_reward(name: str, rows: list[Row], factor: float) -> None:
    other: list[Row] = [(r * factor, g, n) for r, g, n in rows]
    wanted = (of(rows, estimator(name)).values * factor).tolist()
    assert of(other, estimator(name)).values.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(ROWS)
def test_means_that_are_zero(rows: list[Row]) -> None:
    group, weight = torch.tensor([row[1] for row in rows]), torch.tensor([float(row[2]) for row in rows])
    for name, by in (
        ("grpo", None),
        ("dr_grpo", None),
        ("rloo", None),
        ("maxrl", None),
        ("gpg", None),
        ("opo", weight),
    ):
        found = of(rows, estimator(name)).values * (1.0 if by is None else by)
        for one in group.unique():
            assert float(found[group == one].sum()) == pytest.approx(0.0, abs=1e-8)
    for over in ("tokens", "rows"):
        every = of(rows, Estimator("none", "none", whiten=Whiten(over))).values
        assert float((every * (weight if over == "tokens" else 1.0)).sum()) == pytest.approx(0.0, abs=1e-8)


# --- TRL's own code, on batches of equal groups ------------------------------------------------------------------

GRID = st.lists(st.lists(REWARD, min_size=4, max_size=4), min_size=1, max_size=4)


@given(GRID)
def test_trl_scale_rewards(grid: list[list[float]]) -> None:
    """GRPOTrainer 1.16, scale_rewards group, batch and none; RLOOTrainer. Its nanstd has float32's precision."""
    from trl.trainer.utils import nanstd

    grouped = torch.tensor(grid, dtype=torch.float64)
    rewards, group = grouped.flatten(), torch.arange(len(grid)).repeat_interleave(4)
    centred = (grouped - torch.nanmean(grouped, dim=1, keepdim=True)).flatten()
    spreads = {"group": nanstd(grouped, dim=1).repeat_interleave(4), "batch": nanstd(rewards).expand_as(rewards)}
    names = {"group": "grpo", "batch": "batch_std", "none": "dr_grpo"}
    for mode, name in names.items():
        wanted = centred if mode == "none" else centred / (spreads[mode] + 1e-4)
        found = estimator(name, "trl")(rewards, group).values
        assert found.tolist() == pytest.approx(torch.nan_to_num(wanted).tolist(), rel=1e-7, abs=1e-9)
    count = (~grouped.isnan()).sum(1, keepdim=True)
    left = (grouped - (grouped.nansum(1, keepdim=True) - grouped) / (count - 1)).flatten()
    plain = torch.nan_to_num(torch.where(count.repeat_interleave(4) > 1, left, torch.nan))
    assert estimator("rloo", "trl")(rewards, group).values.tolist() == pytest.approx(plain.tolist(), rel=1e-7, abs=1e-9)


@given(st.lists(st.lists(st.tuples(REWARD, REWARD), min_size=3, max_size=3), min_size=1, max_size=4))
def test_trl_normalize_then_sum(grid: list[list[tuple[float, float]]]) -> None:
    from trl.trainer.utils import nanstd

    grouped, weights = torch.tensor(grid, dtype=torch.float64), torch.tensor([1.0, 0.25], dtype=torch.float64)
    flat, group = grouped.view(-1, 2), torch.arange(len(grid)).repeat_interleave(3)
    part = (grouped - torch.nanmean(grouped, 1, keepdim=True)) / (nanstd(grouped, 1, keepdim=True) + 1e-4)
    total = (part.view(-1, 2) * weights).nansum(1)
    total[flat.isnan().all(1)] = torch.nan
    wanted = torch.nan_to_num((total - torch.nanmean(total)) / (nanstd(total) + 1e-4))
    found = estimator("gdpo", "trl", weights=(1.0, 0.25))(flat, group).values
    assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-7, abs=1e-9)


# --- tokens ---------------------------------------------------------------------------------------------------


def test_discounted_returns_are_whitened_over_tokens() -> None:
    rows: list[Row] = [(1.0, 0, 3), (0.0, 0, 1), (-2.0, 1, 2), (NAN, 1, 2)]
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]).bool()
    returns = [discounted(n, r, 0.9) for r, _, n in rows[:3]]
    plain = of(rows, Estimator("none", "none", discount=0.9), lengths=None, mask=mask).values
    assert plain[mask][:6].tolist() == pytest.approx([a for one in returns for a in one], rel=1e-14)
    assert not plain[~mask].any()
    assert not plain[3].any()
    tokens: list[Row] = [(a, 0, 1) for one in returns for a in one]
    for framework, floor in (("verl", False), ("openrlhf", True)):
        chosen = estimator("reinforce_plus_plus", framework, discount=0.9)
        found = of(rows, chosen, lengths=None, mask=mask).values
        assert found[mask][:6].tolist() == pytest.approx(whitened(tokens, [t[0] for t in tokens], floor), rel=1e-12)
        assert not found[~mask].any()
        assert not found[3].any()
    hole = torch.tensor([[True, False, True]])  # a tool's token: distance counts unmasked tokens
    value = Estimator("none", "none", discount=0.5)(torch.ones(1), torch.zeros(1, dtype=torch.int64), mask=hole).values
    assert value.tolist() == [[0.5, 0.0, 1.0]]


@given(ROWS)
def test_a_mask_gives_the_lengths(rows: list[Row]) -> None:
    mask = torch.arange(6) < torch.tensor([row[2] for row in rows]).unsqueeze(1)
    for name in ("opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        by_mask = of(rows, estimator(name), lengths=None, mask=mask).values
        assert by_mask.tolist() == of(rows, estimator(name)).values.tolist()
        assert estimator(name).needs == {"lengths"}
        assert estimator(name, discount=0.5).needs == {"mask"}
    assert estimator("grpo").needs == frozenset()


def test_rewards_that_cancel_are_a_signal_for_gdpo() -> None:
    """Two rewards whose sums are equal: grpo on the sum says nothing, gdpo still compares each."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    group = torch.zeros(3, dtype=torch.int64)
    assert estimator("grpo")(rewards.sum(1), group).values.tolist() == [0.0] * 3
    heavy = estimator("gdpo", weights=(3.0, 1.0))(rewards, group)
    assert heavy.values.tolist() == pytest.approx([2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], rel=1e-12)
    assert not heavy.tied.any()
    assert estimator("gdpo", whiten=None)(torch.full((3, 2), 0.7), group).values.tolist() == [0.0] * 3


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


def test_c25_unscored_rewards() -> None:
    values, scored, tied = run([1.0, NAN, 0.0, NAN, NAN], [0, 0, 0, 1, 1], scale="none")
    assert values == [0.5, 0.0, -0.5, 0.0, 0.0]
    assert scored == [True, False, True, False, False]
    assert tied == [False, False, False, True, True]


def test_groups_in_any_order() -> None:
    rewards, group = [1.0, 5.0, 0.0, 7.0], [9, -4, 9, -4]
    assert run(rewards, group, scale="none")[0] == [0.5, -1.0, -0.5, 1.0]


def test_eps_shifts_the_scale() -> None:
    assert run([1.0, 0.0], eps=1.0, scale="none")[0] == [0.5, -0.5]  # no scale, nothing to add to
    assert run([1.0, 0.0], eps=1.0)[0] == pytest.approx([0.5 / (0.5**0.5 + 1.0), -0.5 / (0.5**0.5 + 1.0)])


@pytest.mark.usefixtures("unchecked")
def test_refusals() -> None:
    with pytest.raises(klamp.UserError, match="baseline='median' is unknown; did you mean 'mean'"):
        run([1.0], baseline="median")
    with pytest.raises(klamp.UserError, match="scale='stdev' is unknown; did you mean 'std'"):
        run([1.0], scale="stdev")
    with pytest.raises(klamp.UserError, match=r"must be \[B\]; got \[2\] and \[3\]"):
        klamp.group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(klamp.UserError, match=r"rewards are \[B, K\], \[2, 2\]"):
        klamp.group_advantages(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64))


def call(value: Estimator, *shape: int, **more: Any) -> Advantages:
    return value(torch.zeros(shape), torch.zeros(shape[:1], dtype=torch.int64), **more)


@pytest.mark.usefixtures("unchecked")
def test_refusals_of_estimators() -> None:
    with pytest.raises(UserError, match="unknown estimator 'grop'; did you mean 'grpo'"):
        estimator("grop")
    with pytest.raises(UserError, match="no constants of 'vrel' are known for grpo; did you mean 'verl'"):
        estimator("grpo", "vrel")
    with pytest.raises(UserError, match=r"an estimator has no 'epsilon'; .*known: .*eps"):
        estimator("grpo", epsilon=1e-4)
    with pytest.raises(UserError, match="baseline='median' is unknown; did you mean 'mean'"):
        estimator("grpo", baseline="median")
    with pytest.raises(UserError, match=r"eps=-1\.0 must be finite and at least 0"):
        estimator("grpo", eps=-1.0)
    with pytest.raises(UserError, match="added to a scale, and scale='none' has none"):
        estimator("dr_grpo", eps=1e-4)
    with pytest.raises(UserError, match="weights are of several rewards"):
        estimator("grpo", weights=(1.0, 2.0))
    with pytest.raises(UserError, match=r"discount=1.5 must lie in \[0, 1\]"):
        estimator("reinforce", discount=1.5)
    with pytest.raises(UserError, match="whiten over='tokens'"):
        estimator("reinforce", discount=0.5, whiten=Whiten("rows"))
    with pytest.raises(UserError, match="form='outside' is unknown"):
        Whiten(form="outside")
    with pytest.raises(UserError, match="ddof=2 must be 0"):
        Whiten(ddof=2)
    with pytest.raises(UserError, match=r"rewards are \[B, K\], \[2, 3\]: sum them into one, or .*gdpo"):
        call(estimator("grpo"), 2, 3)
    with pytest.raises(UserError, match=r"rewards must be \[B, K\] and group \[B\]; got \[2\] and \[2\]"):
        call(estimator("gdpo"), 2)
    with pytest.raises(UserError, match="there are 3 rewards and 2 weights"):
        call(estimator("gdpo", weights=(1, 2)), 2, 3)
    with pytest.raises(UserError, match=r"give lengths=\[B\] or mask=\[B, T\]"):
        call(estimator("opo"), 2)
    with pytest.raises(UserError, match=r"give mask=\[B, T\]"):
        call(estimator("reinforce", discount=0.5), 2, lengths=torch.ones(2))
    with pytest.raises(UserError, match="the mask gives the lengths"):
        call(estimator("opo"), 2, lengths=torch.ones(2), mask=torch.ones(2, 3).bool())
    with pytest.raises(UserError, match=r"lengths must be \[B\] with B = 2 and not negative; got \[3\]"):
        call(estimator("opo"), 2, lengths=torch.ones(3))
    with pytest.raises(UserError, match=r"mask must be \[B, T\] with B = 2; got \[3, 4\]"):
        call(estimator("opo"), 2, mask=torch.ones(3, 4).bool())
    with pytest.raises(UserError, match="not infinite; NaN means unscored"):
        estimator("grpo")(torch.tensor([math.inf, 0.0]), torch.zeros(2, dtype=torch.int64))


# --- the page ---------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parent.parent / "docs" / "advantages.md"


def estimator_lines() -> list[str]:
    lines = ["| estimator | A | source | remark |", "|---|---|---|---|"]
    for name, found in ESTIMATORS.items():
        kind, where = found.source.split()
        link = f"[{found.source}](https://{'arxiv.org/abs' if kind == 'arXiv' else 'doi.org'}/{where})"
        lines.append(f"| `{name}` | {found.formula} | {link} | {found.note} |")
    return lines


def framework_lines() -> list[str]:
    """One line for the frameworks that ship an estimator with the same constants."""
    lines = [
        "| estimator | framework | baseline | scale | eps | whitening | one response | tied group |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alike: dict[tuple[str, Estimator], list[str]] = {}
    for name, framework in NAMES:
        alike.setdefault((name, estimator(name, framework)), []).append(framework or "(none)")
    for (name, e), frameworks in alike.items():
        alone = "r" if e.alone == "reward" or not e.of_group else "0"
        if alone == "r" and e.scale == "nonzero_share":
            alone = "r / scale"
        elif alone == "r" and e.eps:
            alone = "r / (1 + eps)"
        tied = "0" if e.of_group else "r"
        if e.whiten and (e.ties == "whitened" or not e.of_group):
            alone, tied = f"{alone}, whitened", f"{tied}, whitened"
        shown = [name, ", ".join(frameworks), e.baseline, e.scale, f"{e.eps:g}", str(e.whiten or "-"), alone, tied]
        lines.append("| " + " | ".join([f"`{name}`", *shown[1:]]) + " |")
    return lines


def test_the_page_is_the_table() -> None:
    found = PAGE.read_text()
    for lines in (estimator_lines(), framework_lines()):
        assert "\n".join(lines) + "\n" in found
    for name in (*BASELINES, *SCALES):
        assert f"`{name}`" in found, name


def test_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})
