"""Statistics of training methods over seeds: intervals, paired tests, and how many seeds a difference needs.

The unit is the seed, one training run with its data order, and results of two methods are paired by seed. Larger is better.

Collapses. Every interval here is about a mean, and none covers where some seeds collapse: the few seeds of an experiment
often hold no collapse at all, and then nothing in the data tells that the mean lies lower. Where 1 seed in 10 collapses,
``mean_interval`` of 10 seeds holds the mean about 71 times in 100, not 95 (docs/compare-statistics.md,
benchmarks/coverage.py). Count collapses beside the interval; do not leave collapsed seeds out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from klamp.errors import UserError, check_choice
from klamp.statistics.questions import LEVEL, RESAMPLES, _sign_flip, exact_mcnemar

LEAST = 3  # seeds that a test or a bootstrap needs here
BCA_FROM = 20  # seeds that BCa needs here: of Gaussian values it covers 0.84 at 5, 0.90 at 10, 0.93 at 20
AUTO_BCA_FROM = 40  # from here "auto" takes BCa: it covers 0.93 or more of Gaussian values and of those with collapses
METHODS = ("auto", "student", "bca")
EQUAL = 1e-12  # relative to the values: less is rounding
POWER = 0.8
MOST = 2**40  # pairs; who needs more has no effect to find
FAR = 1e4  # noncentrality: the power is 1, and above it SciPy's series need not converge
SUREST = 0.9999  # level of a plan, for the same reason


def _plain(record: Any) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in values.items()}


@dataclass(frozen=True)
class Interval:
    """An estimate from ``n`` values (of two methods: of the one with fewer) and its interval at ``level``.

    ``method``: student, bca or percentile; ``point``: what is resampled has no spread, so the interval is the estimate
    itself and says nothing about its error; ``none``: too few values, and the bounds are NaN.
    """

    value: float
    low: float
    high: float
    n: int
    level: float
    method: str

    def to_dict(self) -> dict[str, Any]:
        return _plain(self)


def mean_interval(
    values: Sequence[float], level: float = LEVEL, method: str = "auto", seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The mean over seeds with an interval: mean +- t_{n-1} s / sqrt(n), or the BCa bootstrap.

    student: exact for Gaussian values (Student 1908, The Probable Error of a Mean). bca: [G^-1(a_low), G^-1(a_high)] with
    G the bootstrap distribution of the mean, a = Phi(z0 + (z0 + z) / (1 - c (z0 + z))), z0 its bias and c its acceleration
    (Efron 1987, Better Bootstrap Confidence Intervals, JASA 82:171); it follows skewed values. auto: student below
    AUTO_BCA_FROM values and bca from there: at 20 Gaussian values BCa covers less than 0.93. With collapsed seeds both
    under-cover (see the module). Raises UserError for no value, a value that is None or not finite, an unknown method, a
    level outside (0, 1), and bca of fewer than BCA_FROM values.
    """
    given = _numbers(values)
    return _of_mean(given, float(np.abs(given).max()), level, method, seed, resamples)


def _of_mean(given: Any, scale: float, level: float, method: str, seed: int, resamples: int) -> Interval:
    from scipy import stats

    _check_share("level", level)
    check_choice("method", method, METHODS)
    n = int(given.size)
    if method == "bca" and n < BCA_FROM:
        raise UserError(
            f"method='bca' needs {BCA_FROM} values, got {n}: of fewer it is far too narrow; method='student' takes 2 or more"
        )
    if method == "auto":
        method = "bca" if n >= AUTO_BCA_FROM else "student"
    mean = float(given.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, n, level, "none")
    if float(np.ptp(given)) <= EQUAL * scale:
        return Interval(mean, mean, mean, n, level, "point")
    deviation = float(given.std(ddof=1))
    if method == "student":
        half = float(stats.t.ppf((1.0 + level) / 2.0, n - 1)) * deviation / math.sqrt(n)
        return Interval(mean, mean - half, mean + half, n, level, method)
    units = (given - mean) / deviation  # BCa moves with shift and scale; so its arithmetic does as well
    found = stats.bootstrap((units,), np.mean, confidence_level=level, n_resamples=resamples, method="BCa",
                            random_state=np.random.default_rng(seed)).confidence_interval  # fmt: skip
    return Interval(mean, mean + deviation * float(found.low), mean + deviation * float(found.high), n, level, method)


# --- two methods ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairedSeeds:
    """b minus a, seed by seed: the mean difference, its interval, three two-sided p, and what the seeds say one by one.

    ``p``: paired t-test. ``p_sign_flip``: the mean, if signs are exchangeable; exact for up to 16 differences. ``p_sign``:
    exact sign test of ``better`` against ``worse``. ``deviation`` is that of the differences. ``left_out``: seeds that
    have no result of a, of b, or of both.
    """

    difference: Interval
    deviation: float
    p: float | None
    p_sign_flip: float | None
    p_sign: float | None
    better: int
    worse: int
    same: int
    pairs: int
    left_out: int

    def to_dict(self) -> dict[str, Any]:
        return {**_plain(self), "difference": self.difference.to_dict()}


def paired_seeds(
    a: Sequence[float | None],
    b: Sequence[float | None],
    level: float = LEVEL,
    method: str = "auto",
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> PairedSeeds:
    """Compare two methods on the same seeds: t = mean(d) sqrt(n) / s(d) with d = b - a and n - 1 degrees of freedom.

    Student 1908 (the t-test); Fisher 1935, The Design of Experiments, 21 (sign flips); Dixon and Mood 1946, The
    Statistical Sign Test (ties dropped). Below LEAST pairs there is no p and no interval. Neither exact test can fall below
    2 / 2^n: with 5 seeds its least p is 0.0625. Equal differences have no t: ``p`` is None, or 1 where all are 0. Differences
    within rounding count as 0. With collapsed seeds the interval under-covers (see the module). Raises UserError for
    different numbers of seeds, for none, for a value that is not finite, and as ``mean_interval`` does.
    """
    from scipy import stats

    if len(a) != len(b):
        raise UserError(f"a comparison paired by seed needs the same seeds; got {len(a)} and {len(b)}")
    if not len(a):
        raise UserError("there is no seed to compare")
    _check_share("level", level)
    check_choice("method", method, METHODS)
    known = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    n, left_out = len(known), len(a) - len(known)
    if n == 0:
        return PairedSeeds(Interval(math.nan, math.nan, math.nan, 0, level, "none"), math.nan, None, None, None,
                           0, 0, 0, 0, left_out)  # fmt: skip
    one, other = _numbers([x for x, _ in known]), _numbers([y for _, y in known])
    size = np.maximum(np.abs(one), np.abs(other))
    delta = np.where(np.abs(other - one) <= EQUAL * size, 0.0, other - one)
    better, worse = int((delta > 0).sum()), int((delta < 0).sum())
    counts = (better, worse, n - better - worse, n, left_out)
    deviation = float(delta.std(ddof=1)) if n > 1 else math.nan
    if n < LEAST:
        few = Interval(float(delta.mean()), math.nan, math.nan, n, level, "none")
        return PairedSeeds(few, deviation, None, None, None, *counts)
    difference = _of_mean(delta, float(size.max()), level, method, seed, resamples)
    p: float | None
    if difference.method == "point":
        p = None if better or worse else 1.0
    else:
        p = 2.0 * float(stats.t.sf(abs(difference.value) * math.sqrt(n) / deviation, n - 1))
    return PairedSeeds(
        difference, deviation, p, _sign_flip(delta, seed, resamples), exact_mcnemar(worse, better), *counts
    )


def probability_of_improvement(
    a: Sequence[float], b: Sequence[float], level: float = LEVEL, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """How often a seed of b is better than a seed of a: P(b > a) + P(b = a) / 2 over all pairs, the Mann-Whitney U / (n m).

    Agarwal et al. 2021, Deep Reinforcement Learning at the Edge of the Statistical Precipice, arXiv 2108.13264; Mann and
    Whitney 1947. The seeds need not be paired. Percentile bootstrap over the seeds of each: too narrow for few, and a point
    (``method``) where no seed of one is below any of the other. Raises UserError as ``interquartile_mean`` does.
    """
    _check_share("level", level)
    one, other = _numbers(a), _numbers(b)
    wins = (other[:, None] > one[None, :]) + 0.5 * (other[:, None] == one[None, :])
    value, n = float(wins.mean()), int(min(one.size, other.size))
    if n < LEAST:
        return Interval(value, math.nan, math.nan, n, level, "none")
    random = np.random.default_rng(seed)
    rows, columns = (random.multinomial(k, np.full(k, 1.0 / k), size=resamples) for k in wins.shape)
    return _percentiles(value, ((rows @ wins) * columns).sum(axis=1) / wins.size, n, level)


def interquartile_mean(
    values: Sequence[float], level: float = LEVEL, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The mean of the middle half: floor(n / 4) values are cut off at either end. Below 4 values it is the mean.

    Agarwal et al. 2021, arXiv 2108.13264 (rliable). Percentile bootstrap over seeds, too narrow for few; no interval below
    LEAST. It bears a collapse in fewer than a quarter of the seeds by not seeing it: report it beside the mean. Raises
    UserError for no value, a value that is None or not finite, and a level outside (0, 1).
    """
    from scipy import stats

    _check_share("level", level)
    given = _numbers(values)
    n = int(given.size)
    value = float(stats.trim_mean(given, 0.25))
    if n < LEAST:
        return Interval(value, math.nan, math.nan, n, level, "none")
    index = np.random.default_rng(seed).integers(0, n, size=(resamples, n))
    return _percentiles(value, stats.trim_mean(given[index], 0.25, axis=1), n, level)


def _percentiles(value: float, found: Any, n: int, level: float) -> Interval:
    low, high = np.quantile(found, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    if float(np.ptp(found)) <= EQUAL * float(np.abs(found).max()):
        return Interval(value, value, value, n, level, "point")
    return Interval(value, float(low), float(high), n, level, "percentile")


# --- many comparisons, and how many seeds ---------------------------------------------------------------------


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted p of many tests: of the m sorted ones, p~_i = max over j <= i of min(1, (m - j + 1) p_j).

    Holm 1979, A Simple Sequentially Rejective Multiple Test Procedure. Where p~ < alpha is called a find, the chance of
    any false one is at most alpha, however the tests depend on each other. None stays None and is not counted in m.
    Raises UserError for a p outside [0, 1].
    """
    for p in p_values:
        if p is not None and not 0.0 <= p <= 1.0:
            raise UserError(f"p={p!r} is not a probability; None stands for a test that was not possible")
    adjusted: list[float | None] = [None] * len(p_values)
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[place] = largest
    return adjusted


def seeds_needed(effect: float, deviation: float, power: float = POWER, level: float = LEVEL) -> int:
    """The smallest number of pairs with which a paired t-test finds a mean difference of ``effect`` with chance ``power``.

    The smallest n >= LEAST with P(|T| > t_{n-1}) >= power, T noncentral t with n - 1 degrees of freedom and noncentrality
    effect sqrt(n) / deviation; deviation is that of the differences. Cohen 1988, Statistical Power Analysis for the
    Behavioral Sciences, 2. For Gaussian differences; a deviation taken from few seeds makes n uncertain. Raises UserError
    for an effect of 0, a deviation that is not above 0, power outside (1 - level, 1), a level outside (0, SUREST], and
    where no number of pairs within reason is enough.
    """
    _check_planning(deviation, power, level)
    if not (math.isfinite(effect) and effect != 0.0):
        raise UserError(f"effect={effect!r} must be a finite number other than 0: no number of seeds finds no effect")
    ratio = abs(effect) / deviation
    high = LEAST
    while _power(high, ratio, level) < power:
        high *= 2
        if high > MOST:
            raise UserError(f"an effect of {effect!r} at a deviation of {deviation!r} needs more than {MOST} pairs")
    low = max(LEAST - 1, high // 2)  # not enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(middle, ratio, level) >= power else (middle, high)
    return high


def detectable(n: int, deviation: float, power: float = POWER, level: float = LEVEL) -> float:
    """The smallest mean difference that a paired t-test on n pairs finds with chance ``power``: ``seeds_needed`` inverted.

    Solves P(|T| > t_{n-1}) = power for the effect; Cohen 1988, 2. Raises UserError for n below LEAST and as
    ``seeds_needed`` does.
    """
    from scipy import optimize

    _check_planning(deviation, power, level)
    if n < LEAST:
        raise UserError(f"n={n!r}: a comparison needs {LEAST} pairs")
    high = 1.0
    while _power(n, high, level) < power:
        high *= 2.0
    return deviation * float(optimize.brentq(lambda ratio: _power(n, ratio, level) - power, 0.0, high, xtol=1e-12))


def _power(n: int, ratio: float, level: float) -> float:
    """P(|T| > t) of a paired t-test on n pairs whose mean difference is ``ratio`` >= 0 deviations."""
    from scipy import stats

    bound = float(stats.t.ppf((1.0 + level) / 2.0, n - 1))
    away = min(ratio * math.sqrt(n), FAR)
    # the survival function on both sides: SciPy's cdf of the far side is NaN from away = 4.9 on
    return float(stats.nct.sf(bound, n - 1, away)) + float(stats.nct.sf(bound, n - 1, -away))


# --- seeds and questions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crossed:
    """The mean of differences over seeds and questions, with the standard error for new seeds and new questions.

    ``error_seeds``, ``error_questions``: the standard errors if only the seeds, or only the questions, were new. ``df``:
    degrees of freedom of the interval and of the two-sided ``p``.
    """

    mean: float
    error: float
    low: float
    high: float
    p: float | None
    df: float
    error_seeds: float
    error_questions: float
    seeds: int
    questions: int
    level: float

    def to_dict(self) -> dict[str, Any]:
        return _plain(self)


def crossed(differences: Sequence[Sequence[float]], level: float = LEVEL) -> Crossed:
    """The mean of a seeds x questions matrix of differences, as evidence about new seeds and new questions.

    With the mean squares of seeds A, of questions B and of the rest E (two-way analysis of variance, one value per cell),

        V = (max(A, E) + max(B, E) - E) / (S Q)

    estimates var_seeds / S + var_questions / Q + var_rest / (S Q): without bias where A, B >= E, and variances that come out
    negative count as 0, so that V is never below A / (S Q), the variance over seeds alone, nor B / (S Q). A + B - E is
    V_seeds + V_questions - V_cells of Cameron, Gelbach and Miller 2011, Robust Inference with Multiway Clustering, with
    V_cells from E: theirs keeps both effects in it, and is too small by a factor of up to (S - 1) / S. Model: Owen 2007, The
    Pigeonhole Bootstrap. df: Satterthwaite 1946 for A + B - E; where A or B is below E, that of the larger of the two; where both
    are, the smaller one. The
    interval covers 0.92 to 0.99 from 3 seeds on (docs/compare-statistics.md), and less with collapsed seeds (see the
    module). Below LEAST seeds or questions there is no interval and no p; no spread at all: a point. Raises UserError for
    rows of different lengths, no value, a value that is None or not finite, and a level outside (0, 1).
    """
    from scipy import stats

    _check_share("level", level)
    given = _matrix(differences)
    seeds, questions = (int(size) for size in given.shape)
    mean, cells = float(given.mean()), given.size
    if min(seeds, questions) < 2:
        none = math.nan
        return Crossed(mean, none, none, none, None, none, none, none, seeds, questions, level)
    if float(np.ptp(given)) <= EQUAL * float(np.abs(given).max()):
        few = min(seeds, questions) < LEAST
        low, high = (math.nan, math.nan) if few else (mean, mean)
        return Crossed(mean, 0.0, low, high, None if few or mean else 1.0, math.nan, 0.0, 0.0, seeds, questions, level)
    rows, columns = given.mean(axis=1), given.mean(axis=0)
    a, b = questions * float(rows.var(ddof=1)), seeds * float(columns.var(ddof=1))
    rest = given - rows[:, None] - columns[None, :] + mean
    df_a, df_b, df_e = seeds - 1, questions - 1, (seeds - 1) * (questions - 1)
    e = float((rest * rest).sum()) / df_e
    total = max(a, e) + max(b, e) - e
    error = math.sqrt(total / cells)
    alone = (math.sqrt(a / cells), math.sqrt(b / cells))
    if min(seeds, questions) < LEAST:
        return Crossed(mean, error, math.nan, math.nan, None, math.nan, *alone, seeds, questions, level)
    if min(a, b) >= e:
        df = max(total**2 / (a**2 / df_a + b**2 / df_b + e**2 / df_e), float(min(df_a, df_b)))
    elif max(a, b) >= e:
        df = float(df_a if a >= b else df_b)
    else:
        df = float(min(df_a, df_b))
    half = float(stats.t.ppf((1.0 + level) / 2.0, df)) * error
    p = 2.0 * float(stats.t.sf(abs(mean) / error, df))
    return Crossed(mean, error, mean - half, mean + half, p, df, *alone, seeds, questions, level)


# --- what is refused ------------------------------------------------------------------------------------------


def _numbers(values: Sequence[float]) -> Any:
    if not len(values):
        raise UserError("there is no value to take statistics of")
    for place, value in enumerate(values):
        if value is None or not math.isfinite(value):
            raise UserError(
                f"value {place + 1} of {len(values)} is {value!r}; leave out what has no result, and count it"
            )
    return np.asarray(values, dtype=np.float64)


def _matrix(rows: Sequence[Sequence[float]]) -> Any:
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise UserError(f"the seeds have {min(lengths)} to {max(lengths)} questions; every seed needs the same ones")
    return np.stack([_numbers(row) for row in rows]) if len(rows) else _numbers([])


def _check_share(name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise UserError(f"{name}={value!r} must be between 0 and 1, both excluded")


def _check_planning(deviation: float, power: float, level: float) -> None:
    _check_share("level", level)
    if level > SUREST:
        raise UserError(f"level={level!r} is above {SUREST}, the highest that is planned for")
    if not 0.0 < deviation < math.inf:
        raise UserError(f"deviation={deviation!r} must be a finite number above 0")
    if not 1.0 - level < power < 1.0:
        raise UserError(
            f"power={power!r} must be above {1.0 - level:.3g}, the chance of a false find at this level, and below 1"
        )
