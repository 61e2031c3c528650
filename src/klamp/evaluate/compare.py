"""Two evaluations of the same questions: differences paired by question."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.errors import UserError
from klamp.evaluate.run import load_results
from klamp.statistics import paired

LISTED = (
    "model", "data", "reward_name", "prompting", "plain_prompts", "n", "temperature", "top_p", "top_k", "max_tokens", "seed",
    "engine", "dtype",
)  # fmt: skip


def compare(a: Path, b: Path) -> dict[str, Any]:
    """b minus a for every number that both have, ready for JSON.

    McNemar's exact p where a number is 0 or 1 for every question (``avg`` at n = 1, ``pass@n``), a sign-flip test and a
    paired bootstrap over questions always. Raises UserError for an evaluation that is not complete, and where the
    questions are not the same.
    """
    one, other = _complete(a), _complete(b)
    left, right = _by_question(one), _by_question(other)
    if left.keys() != right.keys():
        both = len(left.keys() & right.keys())
        raise UserError(
            f"the questions differ: {a} has {len(left)}, {b} has {len(right)}, and {both} are in both; evaluate both on "
            "the same data with the same --limit"
        )
    metrics: dict[str, Any] = {}
    for name in _names(one, other):
        pairs = [(_value(left[q], name), _value(right[q], name)) for q in left]
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        if not known:
            continue
        found = paired([x for x, _ in known], [y for _, y in known])
        metrics[name] = {
            "a": sum(x for x, _ in known) / len(known),
            "b": sum(y for _, y in known) / len(known),
            **dataclasses.asdict(found),
            "difference": found.difference.to_dict(),
            "questions_left_out": len(pairs) - len(known),
        }
    return {
        "a": str(a),
        "b": str(b),
        "questions": len(left),
        "differ_in": {
            name: [one.get(name), other.get(name)] for name in LISTED if one.get(name) != other.get(name)
        },
        "metrics": metrics,
    }  # fmt: skip


def _complete(directory: Path) -> dict[str, Any]:
    found = load_results(directory)
    if found.get("status") != "complete":
        questions = found.get("questions", {})
        raise UserError(
            f"{directory} is not complete: {questions.get('complete')} of {questions.get('asked')} questions; run its "
            "command again, which continues it"
        )
    return found


def _by_question(results: Mapping[str, Any]) -> dict[str, Any]:
    return {one["question"]: one for one in results["per_question"]}


def _names(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """``avg`` (whatever n), and the pass@k, majority@k that both have."""
    return ["avg", *(name for name in one["metrics"] if not name.startswith("avg@") and name in other["metrics"])]


def _value(question: Mapping[str, Any], name: str) -> float | None:
    kind, _, k = name.partition("@")
    value = question[kind] if not k else question[kind].get(k)
    return None if value is None else float(value)
