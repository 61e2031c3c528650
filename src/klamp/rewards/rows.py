"""Rewards that need no library: ``exact``, ``numeric`` and ``multiple_choice``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from klamp.answers import Found, formula, plain_number, spelled, split_percent
from klamp.errors import UserError
from klamp.rewards.base import TIME_LIMIT, Columns, Reward, Verdict, gold_text
from klamp.rewards.extracting import Extractor

_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?")


class _Extracted(Reward):
    """A reward that compares what a rule extracts with the gold answer."""

    def __init__(self, name: str, extract: str) -> None:
        super().__init__(name)
        self.extractor = Extractor(extract, TIME_LIMIT)

    def judge(self, prompts: Sequence[str], texts: Sequence[str], columns: Columns) -> list[Verdict]:
        rows = zip(map(gold_text, columns["answer"]), self.extractor(texts), texts, strict=True)
        return [self.row(gold, found, text) for gold, found, text in rows]

    def row(self, gold: str, found: Found | None, text: str) -> Verdict:
        raise NotImplementedError


class Exact(_Extracted):
    """1 if the stripped texts are equal or are equal decimal numbers: 43.0 and 43, not 007 and 7."""

    def __init__(self, name: str = "exact", *, extract: str = "whole") -> None:
        super().__init__(name, extract)

    def row(self, gold: str, found: Found | None, text: str) -> Verdict:
        if not gold:
            return Verdict(None, "bad_gold")
        if found is None:
            return Verdict(0.0, "no_answer")
        answer = found.text.strip()
        same = answer == gold
        if not same and len(answer) + len(gold) < 2000 and _DECIMAL.fullmatch(answer) and _DECIMAL.fullmatch(gold):
            same = Fraction(answer) == Fraction(gold)
        return Verdict(float(same), "" if answer else "no_answer", answer)


class Numeric(_Extracted):
    """1 if |answer - gold| <= max(tolerance |gold|, absolute), in exact arithmetic; a percent sign divides by 100."""

    def __init__(
        self, name: str = "numeric", *, tolerance: float = 1e-3, absolute: float = 0.0, extract: str = "auto"
    ) -> None:
        super().__init__(name, extract)
        for key, value in (("tolerance", tolerance), ("absolute", absolute)):
            if not (isinstance(value, int | float) and 0.0 <= value < float("inf")):
                raise UserError(f"numeric({key}={value!r}): it must be a number, 0 or larger")
        self.tolerance, self.absolute = Fraction(str(tolerance)), Fraction(str(absolute))

    def row(self, gold: str, found: Found | None, text: str) -> Verdict:
        wanted = _number(gold)
        if wanted is None:
            return Verdict(None, "bad_gold")
        answer = None if found is None else formula(found)
        given = None if answer is None else _number(answer.rpartition("=")[2])
        if given is None:
            return Verdict(0.0, "no_answer", answer)
        near = abs(given - wanted) <= max(self.tolerance * abs(wanted), self.absolute)
        return Verdict(float(near), "", answer)


def _number(text: str) -> Fraction | None:
    body, percent = split_percent(text)
    value = plain_number(body)
    return value / 100 if value is not None and percent else value


class MultipleChoice(_Extracted):
    """1 for the gold letter, 0 for another or more than one; gold answers are ``C``, ``(C)`` or ``\\text{(C)}``."""

    def __init__(self, name: str = "multiple_choice", *, choices: str = "ABCDEFGHIJ", extract: str = "auto") -> None:
        super().__init__(name, extract)
        if not isinstance(choices, str) or not choices.isalpha() or len(set(choices.upper())) < max(2, len(choices)):
            raise UserError(f"multiple_choice(choices={choices!r}): it must be different letters, such as 'ABCD'")
        letters = f"[{choices.upper()}{choices.lower()}]"
        self._alone = re.compile(rf"\(?({letters})\)?(?:[.:)](?:\s.*)?)?", re.DOTALL)
        self._said = re.compile(
            rf"(?:(?:option|choice|letter)\s+\(?({letters})\b|\(([{choices.upper()}])\)|(?<![\w'’])([{choices.upper()}])(?![\w'’]))"
        )

    def row(self, gold: str, found: Found | None, text: str) -> Verdict:
        wanted = self._alone.fullmatch(spelled(gold))
        if wanted is None:
            return Verdict(None, "bad_gold")
        letters = self._letters(found)
        if not letters:
            return Verdict(0.0, "no_answer")
        return Verdict(float(letters == [wanted[1].upper()]), "", ", ".join(letters))

    def _letters(self, found: Found | None) -> list[str]:
        """The letter of a marked answer, or all that it names; of running text only one alone on its last line."""
        if found is None:
            return []
        text = found.text.strip().strip("*$").strip()
        lines = [line.strip().strip("*$").strip() for line in text.splitlines() if line.strip()] or [""]
        for candidate in (text, spelled(text), *([] if found.marked else lines[-1:])):
            if match := self._alone.fullmatch(candidate):
                return [match[1].upper()]
        if not found.marked:
            return []
        named = (next(filter(None, match.groups())) for match in self._said.finditer(text))
        return list(dict.fromkeys(letter.upper() for letter in named))
