"""pass@k against exact combinatorics, majority against enumeration, intervals and paired tests against simulation."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

import klamp
from klamp.statistics import exact_mcnemar, majority_at_k, over_questions, paired, pass_at_k


def test_pass_at_k_is_the_exact_combinatorial_value() -> None:
    for n in range(1, 41):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            wanted = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
            assert pass_at_k(n, c, k) == pytest.approx(float(wanted), rel=1e-13, abs=1e-300), (n, c, k)


@pytest.mark.parametrize(
    ("n", "c", "k"), [(10_000, 1, 5_000), (10_000, 3_000, 9), (10_000, 9_999, 1), (10_000, 5, 9_990)]
)
def test_pass_at_k_of_many_answers(n: int, c: int, k: int) -> None:
    wanted = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_is_not_defined_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(klamp.UserError, match="not defined"):
        pass_at_k(n, c, k)


def test_none_correct_is_a_plain_zero() -> None:
    assert str(pass_at_k(8, 0, 4)) == "0.0"


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not() -> None:
    """E over c ~ Binomial(n, p) is 1 - (1 - p)^k, exactly; 1 - (1 - c/n)^k is too small."""
    n, p, k = 8, 0.15, 4
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
    plug_in = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights))
    assert mean == pytest.approx(1 - (1 - p) ** k, rel=1e-13)
    assert plug_in < mean - 0.01


def test_majority_by_enumeration() -> None:
    answers = ["a", "a", "b", "b", "b", "c", None]
    correct = [True, True, False, False, False, False, False]

    def vote(pick: tuple[int, ...]) -> float:
        counts: dict[str, int] = {}
        for index in pick:
            answer = answers[index]
            if answer is not None:
                counts[answer] = counts.get(answer, 0) + 1
        best = [a for a, n in counts.items() if n == max(counts.values())]
        return sum(a == "a" for a in best) / len(best) if best else 0.0

    for k in (1, 7):
        exact = np.mean([vote(pick) for pick in itertools.combinations(range(7), k)])
        assert majority_at_k(answers, correct, k) == pytest.approx(exact)
    exact = np.mean([vote(pick) for pick in itertools.combinations(range(7), 3)])
    assert majority_at_k(answers, correct, 3, draws=20_000) == pytest.approx(exact, abs=0.01)
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    assert majority_at_k(["x", "y"], [True, False], 2) == 0.5  # a tie shares
    assert majority_at_k(answers, correct, 3, seed=1) == majority_at_k(answers, correct, 3, seed=1)


def test_an_interval_covers() -> None:
    """60 questions of known mean, 400 times: the bootstrap interval holds it about 95 times in 100."""
    random = np.random.default_rng(0)
    hits = 0
    for trial in range(400):
        found = over_questions(random.beta(0.5, 1.5, 60).tolist(), seed=trial, resamples=500)
        hits += found.low <= 0.25 <= found.high
        assert found.low <= found.mean <= found.high
    assert 0.90 <= hits / 400 <= 0.985


def test_one_question_has_no_error_and_none_is_refused() -> None:
    assert over_questions([0.5]).to_dict() == {"mean": 0.5, "error": None, "low": None, "high": None, "questions": 1}
    with pytest.raises(klamp.UserError, match="no question"):
        over_questions([])


def test_mcnemar_by_hand() -> None:
    assert exact_mcnemar(0, 0) == 1.0
    assert exact_mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)
    assert exact_mcnemar(5, 5) == 1.0
    assert 0.0 < exact_mcnemar(800, 1200) < 1e-15


def test_a_paired_comparison() -> None:
    a, b = [0.0] * 12 + [1.0] * 8, [1.0] * 9 + [0.0] * 3 + [1.0] * 7 + [0.0]
    found = paired(a, b)
    assert (found.only_a, found.only_b, found.same) == (1, 9, 10)
    assert found.mcnemar == pytest.approx(22 / 1024)
    assert found.p == pytest.approx(22 / 1024)  # flips of ten unit differences are the same test
    assert found.difference.mean == pytest.approx(0.4)
    assert paired(a, a).p == 1.0
    assert paired([0.25, 0.5], [0.5, 0.5]).mcnemar is None
    with pytest.raises(klamp.UserError, match="same questions"):
        paired([1.0], [1.0, 0.0])


def test_the_sign_flip_test_has_its_size() -> None:
    random = np.random.default_rng(1)
    small = sum(
        paired(random.random(40).tolist(), random.random(40).tolist(), resamples=400).p < 0.05 for _ in range(300)
    )
    assert 0.02 <= small / 300 <= 0.09
