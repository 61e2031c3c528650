"""Statistics over seeds against SciPy's tests, written-out definitions, exact hand computations and seeded simulations."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

import klamp
from klamp.statistics import (
    crossed,
    detectable,
    holm,
    interquartile_mean,
    mean_interval,
    paired_seeds,
    probability_of_improvement,
    seeds_needed,
)
from klamp.statistics.seeds import _power

# multiples of 1/64: shifts and scales by powers of 2 are exact, so ties stay ties
NUMBERS = st.integers(-640, 640).map(lambda k: k / 64)
LISTS = st.lists(NUMBERS, min_size=1, max_size=12)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=10)
FEW = 200  # resamples where they do not matter


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def draws(seed: int, *size: int) -> Any:
    return np.random.default_rng(seed).normal(size=size)


# --- the interval of a mean -----------------------------------------------------------------------------------


def test_the_student_interval_by_hand() -> None:
    """1, 2, 3, 6: mean 3, s^2 = 14/3; the table's t of 3 degrees of freedom is 3.18245."""
    found = mean_interval([1.0, 2.0, 3.0, 6.0])
    half = 3.182446305 * math.sqrt(14 / 3) / 2
    assert (found.value, found.n, found.level, found.method) == (3.0, 4, 0.95, "student")
    assert (found.low, found.high) == (pytest.approx(3 - half, rel=1e-8), pytest.approx(3 + half, rel=1e-8))
    wider = mean_interval([1.0, 2.0, 3.0, 6.0], level=0.99)
    assert wider.high == pytest.approx(3 + 5.840909310 * math.sqrt(14 / 3) / 2, rel=1e-8)


def test_bca_as_efron_wrote_it() -> None:
    """Skewed values, and the definition written out on resamples of its own."""
    values = np.exp(draws(3, 25))
    found = mean_interval(values.tolist(), method="bca")
    boot = values[np.random.default_rng(99).integers(0, 25, size=(200_000, 25))].mean(axis=1)
    z0 = stats.norm.ppf((boot < values.mean()).mean())
    away = values.mean() - values
    c = -(away**3).sum() / (6 * (away**2).sum() ** 1.5)
    shares = [stats.norm.cdf(z0 + (z0 + z) / (1 - c * (z0 + z))) for z in (-1.959964, 1.959964)]
    spread = boot.std()
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(boot, shares)), abs=0.05 * spread)
    assert found.high - found.value > 1.2 * (found.value - found.low)  # it leans with the values
    assert mean_interval(values.tolist(), method="bca") == found


def test_which_interval_is_taken() -> None:
    values = draws(0, 40).tolist()
    assert [mean_interval(values[:n], resamples=FEW).method for n in (2, 19, 20, 39, 40)] == ["student"] * 4 + ["bca"]
    assert mean_interval(values[:20], method="bca", resamples=FEW).method == "bca"
    assert mean_interval(values, method="student").method == "student"
    with pytest.raises(klamp.UserError, match="needs 20 values, got 19"):
        mean_interval(values[:19], method="bca")
    with pytest.raises(klamp.UserError, match=r"did you mean 'bca'"):
        mean_interval(values, method="bc")


def test_no_spread_is_a_point_and_one_value_has_no_bounds() -> None:
    for values in ([0.1] * 7, [0.1 + 0.2, 0.3, 0.3], [0.0] * 50):
        found = mean_interval(values)
        assert (found.low, found.high, found.method) == (found.value, found.value, "point")
        assert found.value == pytest.approx(values[0])
    assert mean_interval([1e-9, 2e-9]).method == "student"  # small is not equal
    one = mean_interval([0.5])
    assert math.isnan(one.low)
    assert one.to_dict() == {"value": 0.5, "low": None, "high": None, "n": 1, "level": 0.95, "method": "none"}


@given(LISTS, st.integers(-3, 3), st.integers(-8, 8), st.booleans())
def test_mean_and_interquartile_mean_move_with_shift_and_scale(
    values: list[float], power: int, shift: int, turned: bool
) -> None:
    scale = 2.0**power * (-1 if turned else 1)
    moved = [scale * value + shift for value in values]
    for of in (mean_interval, lambda x: interquartile_mean(x, resamples=FEW)):
        one, other = of(values), of(moved)
        low, high = (scale * one.low + shift, scale * one.high + shift)
        assert other.value == near(scale * one.value + shift)
        assert other.method == one.method
        if one.method != "none":
            assert (other.low, other.high) == (near(min(low, high)), near(max(low, high)))


def test_bca_moves_with_shift_and_scale() -> None:
    values = draws(5, 45)
    one, other = mean_interval(values.tolist()), mean_interval((3e-5 * values - 7e-3).tolist())
    assert other.low == near(3e-5 * one.low - 7e-3)
    assert other.high == near(3e-5 * one.high - 7e-3)


# --- pairs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 5, 10, 20, 60])
def test_a_paired_comparison_is_scipys(n: int) -> None:
    a, b = draws(n, n), draws(n + 1, n) + 0.4
    found = paired_seeds(a.tolist(), b.tolist(), method="student", resamples=FEW)
    wanted = stats.ttest_rel(b, a)
    bounds = wanted.confidence_interval(0.95)
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-9)
    assert (found.difference.low, found.difference.high) == (near(bounds.low), near(bounds.high))
    assert found.difference.value == near((b - a).mean())
    assert found.deviation == near(np.std(b - a, ddof=1))
    assert (found.better, found.worse) == (int((b > a).sum()), int((b < a).sum()))
    assert found.p_sign == pytest.approx(stats.binomtest(found.better, n).pvalue, rel=1e-9)


def test_sign_flips_by_enumeration() -> None:
    a, b = [1.0, 2.0, 4.0, 3.0, 5.0], [2.0, 1.5, 7.0, 3.0, 6.25]
    delta = [Fraction(y) - Fraction(x) for x, y in zip(a, b, strict=True)]
    flips = [sum(s * d for s, d in zip(signs, delta, strict=True)) for signs in itertools.product((1, -1), repeat=5)]
    wanted = sum(abs(flip) >= abs(sum(delta)) for flip in flips) / 32
    assert paired_seeds(a, b).p_sign_flip == wanted
    assert wanted == 0.25


def test_what_five_seeds_can_say() -> None:
    """All five better: neither exact test falls below 2 / 2^5, the t-test does."""
    found = paired_seeds([0.0] * 5, [1.0, 1.1, 0.9, 1.05, 0.95])
    assert found.p_sign == found.p_sign_flip == 0.0625
    assert found.p is not None
    assert found.p < 1e-4


def test_ties_are_dropped_by_the_sign_test_and_rounding_is_a_tie() -> None:
    found = paired_seeds([0.1 + 0.2, 0.5, 0.5, 0.5, 0.5], [0.3, 0.5, 0.75, 0.625, 0.25])
    assert (found.better, found.worse, found.same) == (2, 1, 2)
    assert found.p_sign == 1.0
    found = paired_seeds([0.1] * 8, [0.1] + [0.2 + 0.01 * k for k in range(7)])
    assert found.p_sign == pytest.approx(stats.binomtest(7, 7).pvalue)


def test_missing_seeds_are_left_out_and_counted() -> None:
    whole = paired_seeds([1.0, 2.0, 3.0], [2.0, 2.5, 5.0])
    found = paired_seeds([1.0, None, 2.0, 9.0, 3.0, None], [2.0, 4.0, 2.5, None, 5.0, None])
    assert found.left_out == 3
    assert {**found.to_dict(), "left_out": 0} == whole.to_dict()


def test_below_three_pairs_there_is_no_test() -> None:
    found = paired_seeds([1.0, 2.0, None], [2.0, 4.0, 1.0]).to_dict()
    assert found["difference"] == {"value": 1.5, "low": None, "high": None, "n": 2, "level": 0.95, "method": "none"}
    assert (found["p"], found["p_sign_flip"], found["p_sign"]) == (None, None, None)
    assert (found["better"], found["pairs"], found["left_out"]) == (2, 2, 1)
    assert found["deviation"] == pytest.approx(math.sqrt(0.5))
    assert paired_seeds([1.0], [2.0]).to_dict()["deviation"] is None
    none = paired_seeds([None, 1.0], [1.0, None])
    json.dumps(none.to_dict(), allow_nan=False)
    assert (none.pairs, none.left_out, none.to_dict()["difference"]["value"]) == (0, 2, None)


def test_equal_differences_have_no_t() -> None:
    equal = paired_seeds([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])  # 0.3 each, in decimals
    assert (equal.p, equal.difference.method, equal.p_sign, equal.p_sign_flip) == (None, "point", 0.25, 0.25)
    same = paired_seeds([0.1, 0.2, 0.3], [0.1, 0.2, 0.3])
    assert (same.p, same.p_sign, same.p_sign_flip, same.same) == (1.0, 1.0, 1.0, 3)
    assert (same.difference.low, same.difference.high) == (0.0, 0.0)


@given(PAIRS)
def test_pairs_are_antisymmetric(pairs: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    one, other = paired_seeds(a, b), paired_seeds(b, a)
    assert other.difference.value == near(-one.difference.value)
    assert (other.difference.low, other.difference.high) == (near(-one.difference.high), near(-one.difference.low))
    assert (other.better, other.worse, other.same) == (one.worse, one.better, one.same)
    assert (other.p is None) == (one.p is None)
    assert (other.p or 0.0, other.p_sign, other.p_sign_flip) == (near(one.p or 0.0), one.p_sign, one.p_sign_flip)


@given(PAIRS, st.integers(-3, 3), st.integers(-8, 8))
def test_pairs_move_with_scale_and_not_with_a_common_shift(
    pairs: list[tuple[float, float]], power: int, shift: int
) -> None:
    scale = 2.0**power
    one = paired_seeds([x for x, _ in pairs], [y for _, y in pairs])
    other = paired_seeds([scale * x + shift for x, _ in pairs], [scale * y + shift for _, y in pairs])
    assert other.difference.value == near(scale * one.difference.value)
    assert other.difference.high == near(scale * one.difference.high)
    assert (other.p is None) == (one.p is None)
    assert (other.p or 0.0, other.p_sign, other.p_sign_flip) == (near(one.p or 0.0), one.p_sign, one.p_sign_flip)


# --- rank statistics ------------------------------------------------------------------------------------------


def test_the_interquartile_mean_by_hand() -> None:
    assert interquartile_mean([100.0, 1.0, 2.0, 3.0, -50.0]).value == 2.0  # one cut at either end
    assert interquartile_mean([8.0, 0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 90.0]).value == 17 / 4
    assert interquartile_mean([0.0, 0.0, 3.0]).value == 1.0  # nothing to cut
    assert interquartile_mean([1.0, 2.0]).to_dict()["low"] is None
    assert interquartile_mean([2.0] * 5).method == "point"


def test_its_bootstrap_by_enumeration() -> None:
    """Of 5 seeds there are 3125 resamples: the quantiles of all of them."""
    values = [0.0, 1.0, 3.0, 7.0, 20.0]
    every = [sum(sorted(pick)[1:4]) / 3 for pick in itertools.product(values, repeat=5)]
    found = interquartile_mean(values, resamples=100_000)
    assert found.method == "percentile"
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(every, [0.025, 0.975])), abs=0.35)


@given(LISTS)
def test_the_interquartile_mean_is_between_the_quartiles(values: list[float]) -> None:
    low, high = np.quantile(values, [0.25, 0.75])
    assert low - 1e-12 <= interquartile_mean(values, resamples=FEW).value <= high + 1e-12


@given(LISTS, LISTS)
def test_the_probability_of_improvement_is_mann_whitneys(a: list[float], b: list[float]) -> None:
    found = probability_of_improvement(a, b, resamples=FEW)
    assert found.value == pytest.approx(stats.mannwhitneyu(b, a).statistic / (len(a) * len(b)), abs=1e-12)
    assert probability_of_improvement(b, a, resamples=FEW).value == pytest.approx(1.0 - found.value, abs=1e-12)
    assert found.n == min(len(a), len(b))
    if found.method != "none":
        assert 0.0 <= found.low <= found.high <= 1.0


def test_the_probability_of_improvement_resamples_both() -> None:
    """Against the definition with plain resamples; the lists differ in length, so rows and columns are not mixed up."""
    a, b = draws(1, 6), draws(2, 15) + 0.7
    random = np.random.default_rng(4)
    every = [(random.choice(b, 15)[:, None] > random.choice(a, 6)).mean() for _ in range(5000)]
    found = probability_of_improvement(a.tolist(), b.tolist())
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(every, [0.025, 0.975])), abs=0.02)
    assert probability_of_improvement([0.0, 1.0, 2.0], [3.0, 4.0, 5.0]).method == "point"


# --- Holm -----------------------------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.02, None, 0.5]) == [0.04, None, 0.5]  # two tests, not three
    assert holm([None]) == [None]
    assert holm([]) == []
    for wrong in (-0.1, 1.5, math.nan):
        with pytest.raises(klamp.UserError, match="not a probability"):
            holm([0.5, wrong])


@given(st.lists(st.one_of(st.none(), st.floats(0.0, 1.0)), max_size=8), st.floats(0.001, 0.999))
def test_holm_is_its_step_down_procedure(p_values: list[float | None], alpha: float) -> None:
    """Rejected one by one, from the least p, until p > alpha / (tests left): the same finds as adjusted <= alpha."""
    adjusted = holm(p_values)
    known = [(p, q) for p, q in zip(p_values, adjusted, strict=True) if p is not None and q is not None]
    assert [q is None for q in adjusted] == [p is None for p in p_values]
    assert all(p <= q <= 1.0 for p, q in known)
    known.sort()
    assert [q for _, q in known] == sorted(q for _, q in known)
    left, going = len(known), True
    for p, q in known:
        going = going and p * left <= alpha
        assert going == (q <= alpha)
        left -= 1


# --- how many seeds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "power", "n"), [(0.2, 0.8, 199), (0.5, 0.8, 34), (0.5, 0.95, 54), (0.8, 0.8, 15), (1.0, 0.8, 10), (1.0, 0.9, 13)])  # fmt: skip
def test_seeds_needed_is_the_known_table(ratio: float, power: float, n: int) -> None:
    """Pairs for a two-sided paired t-test at 5 %, as G*Power gives them."""
    assert seeds_needed(ratio, 1.0, power) == n
    assert seeds_needed(-3.0 * ratio, 3.0, power) == n


def chance(n: int, ratio: float, level: float) -> float:
    """The power of a paired t-test by an integral over the deviation."""
    bound, df = stats.t.ppf((1 + level) / 2, n - 1), n - 1

    def given_deviation(s: float) -> float:
        both = stats.norm.sf(bound * s - ratio * n**0.5) + stats.norm.cdf(-bound * s - ratio * n**0.5)
        return float(both * stats.chi.pdf(s * df**0.5, df) * df**0.5)

    return float(integrate.quad(given_deviation, 0.0, 1 + 12 / df**0.5, limit=200)[0])


@settings(max_examples=40)
@given(st.floats(0.15, 50.0), st.floats(0.11, 0.99), st.sampled_from([0.9, 0.95, 0.99]))
def test_seeds_needed_is_the_least(ratio: float, power: float, level: float) -> None:
    """Enough at n, not at n - 1."""
    n = seeds_needed(ratio, 1.0, power, level)
    assert chance(n, ratio, level) >= power - 1e-6
    assert n == 3 or chance(n - 1, ratio, level) < power + 1e-6


@pytest.mark.parametrize(("n", "power", "level"), [(3, 0.06, 0.95), (20, 0.08, 0.95), (5, 0.6, 0.5), (8, 0.9, 0.99)])
def test_detectable_has_that_power(n: int, power: float, level: float) -> None:
    """At little power the far side counts: to find a difference with the wrong sign is a rejection too."""
    assert chance(n, detectable(n, 2.0, power, level) / 2.0, level) == pytest.approx(power, abs=1e-7)


@given(st.integers(3, 400), st.floats(0.1, 0.99), st.floats(0.01, 100.0))
def test_detectable_is_seeds_needed_inverted(n: int, power: float, deviation: float) -> None:
    effect = detectable(n, deviation, power)
    assert effect > 0.0
    assert seeds_needed(effect * (1 + 1e-6), deviation, power) <= n
    assert n == 3 or seeds_needed(effect * (1 - 1e-6), deviation, power) >= n


def test_seeds_needed_at_the_ends() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seeds_needed(1e11, 1.0) == seeds_needed(1e200, 1e-200) == 3  # with fewer there is no test
        assert _power(3, 1e11, 0.95) == 1.0  # not SciPy's NaN
    assert seeds_needed(3.75, 1.0, 0.5, 0.99) == 4  # where SciPy's cdf of the far side is NaN
    assert seeds_needed(1e-4, 1.0) == pytest.approx((1.959964 + 0.841621) ** 2 * 1e8, rel=1e-4)
    with pytest.raises(klamp.UserError, match="more than"):
        seeds_needed(1e-9, 1.0)
    for effect, deviation, power, level, said in [
        (0.0, 1.0, 0.8, 0.95, "other than 0"), (math.nan, 1.0, 0.8, 0.95, "other than 0"), (1.0, 0.0, 0.8, 0.95, "deviation"),
        (1.0, math.inf, 0.8, 0.95, "deviation"), (1.0, 1.0, 0.05, 0.95, "above 0.05"), (1.0, 1.0, 1.0, 0.95, "below 1"),
        (1.0, 1.0, 0.8, 95, "level=95"),
    ]:  # fmt: skip
        with pytest.raises(klamp.UserError, match=said):
            seeds_needed(effect, deviation, power, level)
    with pytest.raises(klamp.UserError, match="needs 3 pairs"):
        detectable(2, 1.0)
    with pytest.raises(klamp.UserError, match=r"above 0\.9999"):
        detectable(3, 1.0, level=0.99999)
    assert detectable(3, 1.0, power=0.999999, level=0.9999) > detectable(3, 1.0, level=0.9999) > 50.0


def test_the_page_says_what_is_computed() -> None:
    page = (Path(__file__).parents[1] / "docs" / "compare-statistics.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert [int(n) for n, _ in rows] == [3, 5, 6, 8, 10, 20, 40]
    for n, ratio in rows:
        assert f"{detectable(int(n), 1.0):.2f}" == ratio


# --- seeds and questions --------------------------------------------------------------------------------------


def mean_squares(d: Any) -> tuple[Fraction, Fraction, Fraction]:
    """Of seeds, questions and the rest, exactly, by differences of all pairs rather than from means."""
    s, q = len(d), len(d[0])
    d = [[Fraction(x) for x in row] for row in d]
    by_seed = [sum(row) for row in d]
    by_question = [sum(row[j] for row in d) for j in range(q)]

    def variance(sums: list[Fraction]) -> Fraction:
        pairs = itertools.combinations(sums, 2)
        return sum(((x - y) ** 2 for x, y in pairs), Fraction(0)) / (len(sums) * (len(sums) - 1))

    quads = ((d[i][j] - d[i][m] - d[k][j] + d[k][m]) ** 2
             for i, k in itertools.combinations(range(s), 2) for j, m in itertools.combinations(range(q), 2))  # fmt: skip
    rest = sum(quads, Fraction(0)) / (s * q * (s - 1) * (q - 1))
    return variance(by_seed) / q, variance(by_question) / s, rest


@pytest.mark.parametrize("seed", range(30))
def test_the_crossed_error_is_the_analysis_of_variance(seed: int) -> None:
    random = np.random.default_rng(seed)
    s, q = random.integers(3, 6, 2)
    over_seeds, over_questions = ((0, 0), (3, 0), (0, 3), (3, 3))[seed % 4]
    d = over_seeds * random.integers(-2, 3, (s, 1)) + over_questions * random.integers(-2, 3, (1, q))
    d = (d + random.integers(-2, 3, (s, q))).tolist()
    a, b, e = mean_squares(d)
    found = crossed(d)
    total = max(a, e) + max(b, e) - e
    assert found.mean == near(float(Fraction(sum(map(sum, d)), int(s * q))))
    assert found.error**2 == near(float(total / int(s * q)))
    assert (found.error_seeds**2, found.error_questions**2) == (
        near(float(a / int(s * q))),
        near(float(b / int(s * q))),
    )
    assert found.error >= max(found.error_seeds, found.error_questions) - 1e-12
    if min(a, b) >= e:
        satterthwaite = total**2 / (a**2 / int(s - 1) + b**2 / int(q - 1) + e**2 / int((s - 1) * (q - 1)))
        assert found.df == near(max(float(satterthwaite), min(s, q) - 1))
    elif max(a, b) >= e:
        assert found.df == (s if a > b else q) - 1
    else:
        assert found.df == min(s, q) - 1
    half = stats.t.ppf(0.975, found.df) * found.error
    assert (found.low, found.high) == (near(found.mean - half), near(found.mean + half))
    assert found.p == near(2 * stats.t.sf(abs(found.mean) / found.error, found.df))


def test_crossed_is_the_seeds_interval_where_questions_do_not_differ() -> None:
    """Every question the same in a seed: only seeds vary, and the t interval of their means is right."""
    means = [0.1, 0.3, 0.2, 0.6]
    found, wanted = crossed([[mean] * 7 for mean in means]), mean_interval(means)
    assert (found.low, found.high, found.df) == (near(wanted.low), near(wanted.high), near(3.0))
    turned = crossed(np.array([[mean] * 7 for mean in means]).T.tolist())
    assert (turned.low, turned.high, turned.error_questions) == (
        near(found.low),
        near(found.high),
        near(found.error_seeds),
    )


def test_crossed_where_rows_and_columns_agree_by_chance() -> None:
    """A Latin square has equal means in all rows and columns; the rest still says how uncertain they are."""
    found = crossed([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert found.error == pytest.approx(math.sqrt(0.5 / 9))  # rest: sum of squares 2, 4 degrees of freedom
    assert found.df == 2.0


@given(
    st.lists(st.lists(NUMBERS, min_size=4, max_size=4), min_size=3, max_size=6), st.integers(-3, 3), st.integers(-8, 8)
)
def test_crossed_moves_with_shift_and_scale(d: list[list[float]], power: int, shift: int) -> None:
    one, other = crossed(d), crossed([[2.0**power * x + shift for x in row] for row in d])
    assert other.mean == near(2.0**power * one.mean + shift)
    assert other.error == near(2.0**power * one.error)
    turned = crossed([[-x for x in row] for row in d])
    assert (turned.mean, turned.error, turned.p) == (near(-one.mean), near(one.error), one.p and near(one.p))


def test_crossed_of_few_and_of_no_spread() -> None:
    one = crossed([[0.0, 1.0, 1.0]]).to_dict()
    assert (one["mean"], one["error"], one["low"], one["p"]) == (pytest.approx(2 / 3), None, None, None)
    two = crossed([[0.0, 1.0, 1.0], [1.0, 1.0, 0.5]]).to_dict()
    assert two["error"] > 0.0
    assert (two["low"], two["p"], two["df"]) == (None, None, None)
    same = crossed([[0.25] * 4] * 3)
    assert (same.low, same.high, same.error, same.p) == (0.25, 0.25, 0.0, None)
    assert crossed([[0.0] * 4] * 3).p == 1.0
    for record in (one, two, same.to_dict()):
        json.dumps(record, allow_nan=False)


# --- what is refused ------------------------------------------------------------------------------------------


def test_what_has_no_statistic_is_refused() -> None:
    none: Any = None
    for call in (mean_interval, interquartile_mean):
        with pytest.raises(klamp.UserError, match="no value"):
            call([])
        with pytest.raises(klamp.UserError, match="value 2 of 2 is None"):
            call([1.0, none])
        with pytest.raises(klamp.UserError, match="value 1 of 1 is inf"):
            call([math.inf])
        with pytest.raises(klamp.UserError, match="level"):
            call([1.0, 2.0], level=95)
    with pytest.raises(klamp.UserError, match="no value"):
        probability_of_improvement([], [1.0])
    with pytest.raises(klamp.UserError, match="same seeds; got 1 and 2"):
        paired_seeds([1.0], [1.0, 2.0])
    with pytest.raises(klamp.UserError, match="no seed"):
        paired_seeds([], [])
    with pytest.raises(klamp.UserError, match="is nan"):
        paired_seeds([1.0, math.nan], [1.0, 2.0])
    with pytest.raises(klamp.UserError, match="level"):
        paired_seeds([1.0], [2.0], level=1.0)
    with pytest.raises(klamp.UserError, match="method"):
        paired_seeds([1.0], [2.0], method="percentile")
    with pytest.raises(klamp.UserError, match="2 to 3 questions"):
        crossed([[1.0, 2.0], [1.0, 2.0, 3.0]])
    with pytest.raises(klamp.UserError, match="level"):
        crossed([[1.0, 2.0], [1.0, 3.0]], level=0.0)
    with pytest.raises(klamp.UserError, match="is None"):
        crossed([[1.0, none], [1.0, 2.0]])
    with pytest.raises(klamp.UserError, match="no value"):
        crossed([])


def test_the_package_loads_no_scipy() -> None:
    code = "import klamp.statistics, sys; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not set(done.stdout.split()) & {"scipy", "torch"}


# --- simulations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 10, 20])
def test_what_auto_gives_covers_and_false_finds_are_rare(n: int) -> None:
    """1,000 experiments of n seeds with a planted effect, and 1,000 without."""
    random = np.random.default_rng(n)
    covered = found = flips = 0
    for _ in range(1000):
        a = random.normal(size=n)
        interval = paired_seeds(a.tolist(), (a + 0.5 + random.normal(size=n)).tolist(), resamples=FEW).difference
        covered += interval.low <= 0.5 <= interval.high
        null = paired_seeds(a.tolist(), (a + random.normal(size=n)).tolist(), resamples=FEW)
        assert null.p is not None
        assert null.p_sign_flip is not None
        found += null.p < 0.05
        flips += null.p_sign_flip < 0.05
    assert 0.93 <= covered / 1000 <= 0.97
    assert 0.03 <= found / 1000 <= 0.07
    assert flips == 0 if n == 5 else 0.03 <= flips / 1000 <= 0.07  # 2 / 2^5 is above 0.05


def test_a_planted_effect_is_found() -> None:
    """1.5 standard deviations at 10 seeds."""
    random = np.random.default_rng(15)
    found = 0
    for _ in range(1000):
        p = paired_seeds([0.0] * 10, (1.5 + random.normal(size=10)).tolist(), resamples=FEW).p
        found += p is not None and p < 0.05
    assert found / 1000 > 0.95


@pytest.mark.parametrize(("ratio", "power"), [(0.5, 0.8), (0.7, 0.9), (1.0, 0.8), (1.5, 0.8), (3.0, 0.6)])
def test_seeds_needed_is_the_simulated_power(ratio: float, power: float) -> None:
    random = np.random.default_rng(round(10 * ratio))

    def simulated(n: int, effect: float) -> float:
        d = effect + random.normal(size=(20_000, n))
        return float((stats.ttest_1samp(d, 0.0, axis=1).pvalue < 0.05).mean())

    n = seeds_needed(ratio, 1.0, power)
    assert simulated(n, detectable(n, 1.0, power)) == pytest.approx(power, abs=0.03)
    assert simulated(n, ratio) > power - 0.03
    assert n == 3 or simulated(n - 1, ratio) < power + 0.03


@pytest.mark.parametrize(("s", "q", "over_seeds", "over_questions", "low", "high"), [
    (5, 100, 0.3, 1.0, 0.93, 0.97), (10, 60, 0.2, 0.5, 0.93, 0.97), (20, 20, 1.0, 1.0, 0.93, 0.97),
    (3, 100, 0.3, 1.0, 0.90, 0.97), (5, 60, 0.0, 2.0, 0.93, 0.97), (5, 60, 0.0, 0.0, 0.95, 1.0),
])  # fmt: skip
def test_crossed_covers_new_seeds_and_questions(
    s: int, q: int, over_seeds: float, over_questions: float, low: float, high: float
) -> None:
    random = np.random.default_rng([s, q])
    covered = 0
    for _ in range(1000):
        d = over_seeds * random.normal(size=(s, 1)) + over_questions * random.normal(size=(1, q))
        found = crossed(0.25 + d + random.normal(size=(s, q)))
        covered += found.low <= 0.25 <= found.high
    assert low <= covered / 1000 <= high
