"""Extraction rules as a reward's option, and a user's pattern: run where it can be killed, on a model's text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from klamp.answers import RULES, Found, find
from klamp.errors import UserError, did_you_mean
from klamp.worker import WORKER


class Extractor:
    """``texts -> places of their answers`` by a rule of ``klamp.answers`` or by a pattern with one group."""

    def __init__(self, rule: str, limit: float) -> None:
        self.rule, self.limit = rule, limit
        if rule not in RULES and compiled(rule, "extract", or_one_of=tuple(RULES)).groups != 1:
            raise UserError(
                f"extract={rule!r} is neither a rule nor a pattern with exactly one (group); {did_you_mean(rule, RULES)}"
            )

    def __call__(self, texts: Sequence[str]) -> list[Found | None]:
        if self.rule in RULES:
            return [find(text, self.rule) for text in texts]
        return [None if found is None else Found(found, marked=True) for found in matches(self.rule, texts, self.limit)]


def compiled(pattern: str, name: str, or_one_of: Sequence[str] = ()) -> re.Pattern[str]:
    """A regular expression in which a dot also matches a line's end. Raises UserError if it is none."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        rules = f", nor one of {', '.join(or_one_of)}" if or_one_of else ""
        raise UserError(f"{name}={pattern!r} is not a regular expression: {error}{rules}") from error


def matches(pattern: str, texts: Sequence[str], limit: float) -> list[str | None]:
    """What the last match of a pattern captured in each text (all of it without a group); None if none, or too slow."""
    distinct = list(dict.fromkeys(texts))
    outcomes = WORKER.map(
        last_match, [(pattern, text) for text in distinct], library="re", limit=limit, budget=10 * limit
    )
    found = dict(zip(distinct, outcomes, strict=True))
    return [found[text].value if found[text].kind == "done" else None for text in texts]


def last_match(pattern: str, text: str) -> str | None:
    """In a worker: some patterns take longer than the universe has on some texts."""
    found = None
    for match in re.compile(pattern, re.DOTALL).finditer(text):
        found = match
    if found is None:
        return None
    return str(found.group(1) or "") if found.re.groups else found.group()
