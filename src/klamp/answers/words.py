"""Answers in words: ``Evelyn``, ``\\text{Evelyn}``, ``east``, ``\\text{(C)}``."""

from __future__ import annotations

import re

from klamp.answers.numbers import LONGEST

_WORDS = re.compile(r"[^\W\d_]+(?:[\s,;:'’-]+[^\W\d_]+)*")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\\left(?![A-Za-z])|\\right(?![A-Za-z])")
_MATHEMATICS = re.compile(
    r"(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|inf|infinity|mod|gcd|lcm|min|max|lim|pi|arc(?:sin|cos|tan)|or|and)"
)


def plain(text: str) -> str:
    """A text without what does not change its meaning: LaTeX of appearance, further spaces, a full stop at the end."""
    text = _SPACING.sub(" ", text.replace("$", ""))
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    for _ in range(3):
        text = _WRAPPER.sub(r"\1", text)
    return " ".join(text.split()).strip("* ").removesuffix(".").strip()


def spelled(text: str) -> str:
    """A text as words are compared: as ``plain``, in small letters, and a letter in brackets is the letter."""
    return re.sub(r"^\(([a-z])\)$", r"\1", plain(text).casefold())


def words(text: str) -> str | None:
    """The words that an answer consists of, normalised, or None if it is a number or formula.

    One bare letter, and bare letters that may be a product, a function or a constant, are formulas; inside
    ``\\text{}`` they are words. ``(C)`` is ``c``.
    """
    found = spelled(text)
    if len(found) > LONGEST or not _WORDS.fullmatch(found):
        return None
    wrapped = _WRAPPER.fullmatch(text.strip().strip("$").strip())
    longest = max(len(word) for word in re.findall(r"[^\W\d_]+", _MATHEMATICS.sub(" ", found)) or [""])
    return (
        found if wrapped or longest >= 3 or found in ("no", "up") or re.fullmatch(r"\([A-Z]\)", text.strip()) else None
    )
