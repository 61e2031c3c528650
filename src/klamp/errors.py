"""Errors that a user can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A request that cannot be met: says what was asked, what is possible, and the nearest valid choice."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The choices as one sentence, the nearest first: ``did you mean 'grpo'? Known: ...``."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}Known: {', '.join(known)}"
