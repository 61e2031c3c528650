"""What the reward says of each completion: its value, whether it is correct, and the answer as a key of a vote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from klamp import answers


@dataclass(frozen=True)
class Judged:
    """``reward`` and ``correct`` are None if unscored; ``answer`` is None where there is none. Equal answers are one."""

    reward: float | None
    correct: bool | None
    answer: str | None


def judge(
    reward: Any, name: str, prompts: Sequence[Any], completions: Sequence[Any], texts: Sequence[str],
    columns: dict[str, Any],
) -> list[Judged]:  # fmt: skip
    """One judgement per row. A reward of at least 1 is correct, unless the reward itself says what is (a sum does).

    The answer is what the reward took for it; where it does not say, what ``reader`` finds.
    """
    read = reader(name)
    if not hasattr(reward, "verdicts"):
        values = reward(prompts=prompts, completions=completions, **columns)
        return [Judged(v, None if v is None else v >= 1.0, read(t)) for v, t in zip(values, texts, strict=True)]
    found = reward.verdicts(prompts, completions, **columns)
    return [
        Judged(
            verdict.value,
            None if verdict.value is None else verdict.result == "correct",
            _key(verdict.answer) if verdict.answer is not None or verdict.reason == "no_answer" else read(text),
        )
        for verdict, text in zip(found, texts, strict=True)
    ]


def reader(name: str) -> Callable[[str], str | None]:
    """How an answer is read for the reward of that name: ``exact`` takes the whole text, others the final answer."""
    return _key if name.partition("(")[0] == "exact" else lambda text: _key(answers.extract(text))


def _key(answer: str | None) -> str | None:
    """Numbers by their value, 1/2 and 0.5 alike; but digits with leading zeros are a text."""
    answer = None if answer is None else answer.strip()
    if not answer or (answer[0] == "0" and answer[1:2].isdigit()):
        return answer or None
    number = answers.plain_number(answer)
    return answer if number is None else str(number)
