"""Numbers from samples: per question and over questions, with what was left out counted."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from klamp.statistics import majority_at_k, over_questions, pass_at_k

DRAWS = 50_000  # subsets drawn for one majority@k over all questions: an error of at most 0.0023
NEEDED = ("question", "row", "sample", "answer", "reward", "correct", "tokens", "truncated")

Sample = Mapping[str, Any]


def per_question(samples: Sequence[Sample], n: int, ks: Sequence[int]) -> list[dict[str, Any]]:
    """One entry per question whose ``n`` samples are all there, in their order.

    Unscored samples (``correct`` is None) are counted and left out; a question's own number of scored ones takes the
    place of n, and ``pass`` and ``majority`` hold only k up to it.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample["question"], []).append(sample)
    whole = {name: group for name, group in groups.items() if len(group) == n}
    draws = max(50, math.ceil(DRAWS / max(1, len(whole))))
    return [_question(name, group, ks, draws) for name, group in whole.items()]


def _question(name: str, group: Sequence[Sample], ks: Sequence[int], draws: int) -> dict[str, Any]:
    scored = [sample for sample in group if sample["correct"] is not None]
    right = sum(sample["correct"] for sample in scored)
    possible = [k for k in ks if k <= len(scored)]
    answers, flags = [sample["answer"] for sample in scored], [sample["correct"] for sample in scored]
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    return {
        "question": name,
        "row": group[0]["row"],
        "samples": len(group),
        "scored": len(scored),
        "correct": right,
        "avg": right / len(scored) if scored else None,
        "reward": math.fsum(sample["reward"] for sample in scored) / len(scored) if scored else None,
        "pass": {str(k): pass_at_k(len(scored), right, k) for k in possible},
        "majority": {str(k): majority(answers, flags, k, draws, seed) for k in possible if k > 1},
        "truncated": sum(sample["truncated"] for sample in group) / len(group),
        "tokens": sum(sample["tokens"] for sample in group) / len(group),
    }


def majority(answers: Sequence[str | None], correct: Sequence[bool], k: int, draws: int, seed: int) -> float:
    """``majority_at_k``, exact also where the answers given are all wrong or all right."""
    given = [flag for answer, flag in zip(answers, correct, strict=True) if answer is not None]
    if not any(given):
        return 0.0
    if all(given):  # right as soon as one of the k is an answer
        return pass_at_k(len(answers), len(given), k)
    return majority_at_k(answers, correct, k, draws, seed)


def totals(questions: Sequence[Mapping[str, Any]], asked: int, n: int, ks: Sequence[int]) -> dict[str, Any]:
    """The numbers of an evaluation, ready for JSON; ``metrics`` maps a name to mean, error, interval and questions."""
    scored = [one for one in questions if one["scored"]]
    metrics: dict[str, Any] = {}
    short: dict[str, int] = {}
    usable = [k for k in ks if k <= n]
    series = [(f"avg@{n}", [one["avg"] for one in scored])]
    for kind in ("pass", "majority"):
        series += [(f"{kind}@{k}", [one[kind][str(k)] for one in scored if str(k) in one[kind]]) for k in usable]
    for name, values in series:
        if values:
            metrics[name] = over_questions(values).to_dict()
    for k in usable:
        if less := sum(one["scored"] < k for one in scored):
            short[str(k)] = less
    return {
        "metrics": metrics,
        "reward": _mean(scored, "reward"),
        "truncated": _mean(questions, "truncated"),
        "tokens": _mean(questions, "tokens"),
        "k_excluded": [
            {"k": k, "reason": f"n = {n}: {k} of {n} samples cannot be drawn"} for k in ks if k > n
        ],
        "questions": {
            "asked": asked,
            "complete": len(questions),
            "scored": len(scored),
            "unscored": len(questions) - len(scored),
            "fewer_scored_than_k": short,
        },
        "samples": {
            "drawn": sum(one["samples"] for one in questions),
            "scored": sum(one["scored"] for one in questions),
            "unscored": sum(one["samples"] - one["scored"] for one in questions),
        },
    }  # fmt: skip


def _mean(questions: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    return over_questions([one[name] for one in questions]).to_dict() if questions else None
