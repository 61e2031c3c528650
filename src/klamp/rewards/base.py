"""What every reward is: verdicts row by row, counts, and the call that TRL makes."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from klamp.errors import UserError

logger = logging.getLogger(__name__)

TIME_LIMIT = 5.0  # seconds for one answer
BUDGET = 60.0  # seconds for all answers of one call

REASONS = ("no_answer", "timeouts", "errors", "late", "lost")  # why a completion is wrong (three) or unscored (two)

Result = Literal["correct", "wrong", "unscored"]
Columns = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The judgement of one completion: ``value`` is its reward, None if it is unscored.

    ``answer``: what was taken for the answer. ``reason``: ``no_answer``, ``timeouts`` or ``errors`` where the value
    is 0 for it; ``bad_gold``, ``late`` or ``lost`` where it is unscored for it. ``solved``: whether the answer is right
    if the value does not say so (in a sum); by default a value of at least 1 does.
    """

    value: float | None
    reason: str = ""
    answer: str | None = None
    cached: bool = False
    solved: bool | None = None

    @property
    def result(self) -> Result:
        if self.value is None:
            return "unscored"
        return "correct" if (self.value >= 1.0 if self.solved is None else self.solved) else "wrong"


class RewardFunction(Protocol):
    """A TRL reward function with a name, counts and verdicts; ``solved_by`` is the part that says what is correct.

    ``counts``: correct, wrong, unscored, which add up to the rows; no_answer, timeouts and errors, which are among
    the wrong; late and lost, among the unscored; cached, among all.
    """

    __name__: str
    counts: Counter[str]

    @property
    def solved_by(self) -> RewardFunction: ...

    @property
    def parts(self) -> Sequence[RewardFunction]: ...

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]: ...

    def verdicts(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Verdict]: ...


class Reward:
    """A reward by ``judge(prompts, texts, columns) -> verdicts``; ``needs`` are the columns that it reads."""

    needs: tuple[str, ...] = ("answer",)

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def solved_by(self) -> RewardFunction:
        return self

    @property
    def parts(self) -> Sequence[RewardFunction]:
        """The rewards that judge on their own: this one, or all terms of a sum."""
        return (self,)

    def judge(self, prompts: Sequence[str], texts: Sequence[str], columns: Columns) -> list[Verdict]:
        raise NotImplementedError

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [verdict.value for verdict in self.verdicts(prompts, completions, **columns)]

    def verdicts(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Verdict]:
        """Judge a batch and count. Raises UserError for a missing column or one of another length."""
        for name in self.needs:
            if columns.get(name) is None:
                raise UserError(f"reward {self.__name__} needs a column {name!r}; there is {sorted(columns)}")
            if len(columns[name]) != len(completions):
                raise UserError(
                    f"reward {self.__name__}: {len(columns[name])} values in column {name!r}, {len(completions)} completions"
                )
        found = self.judge([_text(p) for p in prompts], [completion_text(c) for c in completions], columns)
        self.count(found)
        self._report(found, columns)
        return found

    def count(self, verdicts: Sequence[Verdict]) -> None:
        with self._lock:
            for verdict in verdicts:
                self.counts[verdict.result] += 1
                if verdict.reason and verdict.reason != "bad_gold":
                    self.counts[verdict.reason] += 1
                self.counts["cached"] += verdict.cached
            self.counts += Counter()  # drops the zeros

    def _report(self, verdicts: Sequence[Verdict], columns: Columns) -> None:
        """Say once what could not be scored, and once that time ran out."""
        for reason, what in (
            ("bad_gold", "cannot score the answer %.80r; such rows do not count"),
            ("late", "did not get to the row with the answer %.80r in time; such rows do not count"),
        ):
            rows = [row for row, verdict in enumerate(verdicts) if verdict.reason == reason]
            if rows and reason not in self.__dict__.setdefault("_reported", set()):
                self.__dict__["_reported"].add(reason)
                logger.warning(f"reward %s {what}", self.__name__, columns[self.needs[0]][rows[0]])


def verdict_counts(rewards: Iterable[Any]) -> Counter[str]:
    """The counts of every part of rewards, added up; functions without counts have none."""
    total: Counter[str] = Counter()
    for reward in rewards:
        for part in getattr(reward, "parts", ()):
            total.update(part.counts)
    return total


def completion_text(completion: Any) -> str:
    """A completion's text: itself, or the content of its last assistant message (else of its last)."""
    if isinstance(completion, str):
        return completion
    messages = [m for m in completion if m.get("role") == "assistant"] or list(completion)
    content = messages[-1].get("content") if messages else ""
    if isinstance(content, list):  # parts, as multimodal chats have them
        content = "".join(part.get("text") or "" for part in content)
    return content or ""


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(completion_text([m]) for m in prompt)


def gold_text(value: Any) -> str:
    """A gold answer as a text; None and NaN are empty."""
    return "" if value is None or value != value else str(value).strip()
