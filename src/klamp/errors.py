"""Errors that a user can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 2000  # characters of a message: what was asked may be a text of any size


class UserError(ValueError):
    """A request that cannot be met: says what was asked, what is possible, and the nearest valid choice."""

    def __init__(self, message: str) -> None:
        cut = len(message) > LONGEST
        super().__init__(f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}" if cut else message)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The choices as one clause, the nearest first: ``did you mean 'grpo'? known: ...``; of many only the nearest."""
    known = sorted(choices)
    longer = [choice for choice in known if len(name) > 2 and choice.startswith(name)]
    near = (longer + [near for near in difflib.get_close_matches(name, known, n=5, cutoff=0.4) if near not in longer])[
        :5
    ]
    guess = f"did you mean {near[0]!r}? " if near else ""
    if len(known) > 40:
        return f"{guess}near it: {', '.join(near)}" if near else f"there are {len(known)} choices, none of them near"
    return f"{guess}known: {', '.join(known)}"


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name}={value!r} is unknown; {did_you_mean(str(value), choices)}")
