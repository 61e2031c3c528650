"""Answers: where a text states its final answer, and what number that is. No library and no worker is needed."""

from klamp.answers.extraction import RULES, Found, extract, find, formula, has_words
from klamp.answers.numbers import plain_number, split_base, split_percent
from klamp.answers.words import plain, spelled, words

__all__ = [
    "RULES",
    "Found",
    "extract",
    "find",
    "formula",
    "has_words",
    "plain",
    "plain_number",
    "spelled",
    "split_base",
    "split_percent",
    "words",
]
