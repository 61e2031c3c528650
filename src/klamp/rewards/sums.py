"""A weighted sum of rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from klamp.rewards.base import Reward, RewardFunction, Verdict


class Sum(Reward):
    """``weight * reward + ...``; a row is unscored if any of its terms is.

    What is correct is what the first term says: the others shape. ``terms`` count on their own.
    """

    def __init__(self, name: str, terms: Sequence[tuple[float, RewardFunction]]) -> None:
        super().__init__(name)
        self.terms = tuple(terms)

    @property
    def solved_by(self) -> RewardFunction:
        return self.terms[0][1].solved_by

    @property
    def parts(self) -> Sequence[RewardFunction]:
        return tuple(part for _, function in self.terms for part in function.parts)

    def verdicts(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Verdict]:
        parts = [function.verdicts(prompts, completions, **columns) for _, function in self.terms]
        weights = [weight for weight, _ in self.terms]
        found = []
        for first, *others in zip(*parts, strict=True):
            row = (first, *others)
            missing = next((verdict for verdict in row if verdict.value is None), None)
            value = (
                None if missing else sum(w * v.value for w, v in zip(weights, row, strict=True) if v.value is not None)
            )
            reason, solved = (missing or first).reason, first.result == "correct"
            found.append(Verdict(value, reason, first.answer, first.cached, solved))
        self.count(found)
        return found
