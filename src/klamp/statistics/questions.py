"""Statistics of sampled answers: pass@k, avg@k and majority@k without bias, their intervals, and paired comparisons.

The unit is the question: answers to one question are not independent, so every error is over questions. NumPy only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from klamp.errors import UserError

RESAMPLES = 10_000
LEVEL = 0.95


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that k of n answers, drawn without replacement, hold one of the c correct: 1 - C(n-c, k) / C(n, k).

    Unbiased for 1 - (1 - p)^k. Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv 2107.03374, eq. 1.
    Raises UserError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise UserError(f"pass@{k} of {c} correct among {n} is not defined: it needs 0 <= c <= n and 1 <= k <= n")
    if c == 0:
        return 0.0
    if n - c < k:
        return 1.0
    # log of the product over the k draws of (n - c - i) / (n - i); the shorter of its two forms
    terms = (math.log1p(-c / (n - i)) for i in range(k)) if k <= c else (math.log1p(-k / (n - i)) for i in range(c))
    return -math.expm1(math.fsum(terms))


def majority_at_k(
    answers: Sequence[Hashable], correct: Sequence[bool], k: int, draws: int = 1000, seed: int = 0
) -> float:
    """The probability that the most frequent of k answers, drawn without replacement, is correct; ties share it.

    ``answers``: extracted answers, None where there is none (never the majority, unless there is nothing else: then
    wrong). An answer that is correct in some samples only counts as correct with the share of those. Exact where k = n or k = 1, else the mean over ``draws`` subsets. Raises UserError unless 1 <= k <= n.
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise UserError(f"majority@{k} of {n} answers is not defined: it needs 1 <= k <= n")
    flags: dict[Hashable, list[bool]] = {}
    for answer, flag in zip(answers, correct, strict=True):
        if answer is not None:
            flags.setdefault(answer, []).append(flag)
    right = {answer: sum(found) / len(found) for answer, found in flags.items()}
    if k == 1:
        return sum(right.get(answer, 0.0) for answer in answers) / n
    if k == n:
        return _vote(answers, right)
    random = np.random.default_rng(seed)
    picks = (random.choice(n, size=k, replace=False) for _ in range(draws))
    return math.fsum(_vote([answers[i] for i in pick], right) for pick in picks) / draws


def _vote(answers: Sequence[Hashable], right: dict[Hashable, float]) -> float:
    counts = Counter(answer for answer in answers if answer is not None)
    most = max(counts.values(), default=0)
    first = [answer for answer, count in counts.items() if count == most]
    return sum(right[answer] for answer in first) / len(first) if first else 0.0


# --- errors and intervals over questions ----------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean over questions with its standard error and the bootstrap interval of ``LEVEL``."""

    mean: float
    error: float
    low: float
    high: float
    questions: int

    def to_dict(self) -> dict[str, float | int | None]:
        plain = {name: getattr(self, name) for name in ("mean", "error", "low", "high", "questions")}
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in plain.items()
        }


def over_questions(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Mean of one value per question; standard error s / sqrt(n); percentile bootstrap over questions.

    NaN for what a single question cannot give. Raises UserError for no question.
    """
    given = np.asarray(values, dtype=np.float64)
    n = given.size
    if n == 0:
        raise UserError("there is no question to average over")
    if n == 1:
        return Estimate(float(given[0]), math.nan, math.nan, math.nan, 1)
    error = float(given.std(ddof=1)) / math.sqrt(n)
    low, high = _percentiles(lambda index: given[index].mean(axis=1), n, seed, resamples)
    return Estimate(float(given.mean()), error, low, high, n)


def _percentiles(statistic: Callable[[Any], Any], n: int, seed: int, resamples: int) -> tuple[float, float]:
    random = np.random.default_rng(seed)
    chunk = max(1, min(resamples, 20_000_000 // n))
    found = [
        statistic(random.integers(0, n, size=(min(chunk, resamples - start), n)))
        for start in range(0, resamples, chunk)
    ]
    tail = 100.0 * (1.0 - LEVEL) / 2.0
    low, high = np.percentile(np.concatenate(found), [tail, 100.0 - tail])
    return float(low), float(high)


# --- two results on the same questions ------------------------------------------------------------------------


@dataclass(frozen=True)
class Paired:
    """b minus a, question by question: mean difference and its bootstrap interval, and the two-sided p of a sign-flip test.

    ``mcnemar``: the exact p where every value is 0 or 1, else None. ``only_a``, ``only_b``: questions that one is better on.
    """

    difference: Estimate
    p: float
    mcnemar: float | None
    only_a: int
    only_b: int
    same: int


def paired(a: Sequence[float], b: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Paired:
    """Compare two results paired by question. Raises UserError for different numbers of questions."""
    if len(a) != len(b):
        raise UserError(f"a paired comparison needs the same questions; got {len(a)} and {len(b)}")
    delta = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    worse, better = int((delta < 0).sum()), int((delta > 0).sum())
    binary = all(value in (0.0, 1.0) for value in (*a, *b))
    difference = over_questions(delta.tolist(), seed, resamples)
    return Paired(difference, _sign_flip(delta, seed, resamples), exact_mcnemar(worse, better) if binary else None,
                  worse, better, delta.size - worse - better)  # fmt: skip


def exact_mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p of McNemar's test: how likely such a split of the discordant pairs is if each side has 1/2."""
    n, least = only_a + only_b, min(only_a, only_b)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(least + 1))
    share: float = 2 * tail / 2**n  # integers divide exactly, however large
    return min(1.0, share)


def _sign_flip(delta: Any, seed: int, resamples: int) -> float:
    """p of the mean difference if signs are exchangeable; exact for up to 16 differences that are not 0."""
    moved = delta[delta != 0.0]
    n = moved.size
    if n == 0:
        return 1.0
    observed = abs(moved.sum()) * (1.0 - 1e-12)
    if n <= 16:
        signs = 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float((np.abs(signs @ moved) >= observed).mean())
    random = np.random.default_rng(seed)
    hits = 0
    for start in range(0, resamples, 1000):
        signs = 1.0 - 2.0 * random.integers(0, 2, size=(min(1000, resamples - start), n))
        hits += int((np.abs(signs @ moved) >= observed).sum())
    return (hits + 1) / (resamples + 1)
