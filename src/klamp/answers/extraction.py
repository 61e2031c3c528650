"""The final answer of a text, by stated rules. Everything here is linear in the text, whatever the text is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from klamp.answers.numbers import LONGEST, UNSIGNED, plain_number, split_percent

READ = 100_000  # characters at the end of a text that are read
DEEPEST = 8  # boxes inside boxes


class Found(NamedTuple):
    """What stands where the answer should be; ``marked`` if the text says that it is the answer."""

    text: str
    marked: bool = False


_ANCHOR = re.compile(
    r"####|\b(?:answer|result)\W{0,4}\s(?:is|=)(?![A-Za-z])[\s:*]*|\banswer\W{0,3}[:=][\s:*]*|答案\s?[是为：:][\s:：]*",
    re.IGNORECASE,
)
_TOKEN = re.compile(rf"[+-]?(?:[0-9]+ (?=[0-9]+/[0-9]))?{UNSIGNED}(?:/{UNSIGNED})?")
_LEAD = re.compile(
    r"[\s*_:~≈]*(?:(?:about|approximately|roughly|exactly|simply|just|only)\s+)?(?:\\?[$€£¥]\s?)?", re.IGNORECASE
)
_BEFORE_UNSAFE = re.compile(
    r"(?:[-+*/^_{}\\%<>(\[≠≤≥√–±]|[0-9]\s*(?:and|to|in|of|over|out of|[,.:/])?|\bor(?:\s(?:maybe|perhaps|possibly|even))?"
    r"|(?:\bnot|\bcannot|n't|n’t)(?:\s[A-Za-z]+){0,2}|\bnegative|\bminus|\b(?:less|more|greater|fewer|other) than|\bat (?:least|most)"
    r"|\b(?:root|square|cube|half|third|quarters?|thirds|fifths|percent|multiple|factor|power) of)[^\S\n]*[$€£]?\Z",
    re.IGNORECASE,
)
_MORE = re.compile(r"\s*,\s*[-+$]*[0-9]")
_DIGIT = re.compile(r"[0-9]")
_OR = re.compile(r"\bor\b", re.IGNORECASE)
_UNIT = r"(?:[cmk]m|[mk]g|m[lL]|%|°[CF]?|hours?|minutes?|seconds?|days?|years?|inches|feet|miles?|dollars?|cents?)(?:[²³]|\^[23])?"
_SCALE = r"(?:million|billion|trillion|thousand|hundred|dozen|quarters|thirds|halves|squared|cubed)\b"  # of a number
_AFTER_UNSAFE = re.compile(
    rf"\s*{_UNIT}(?:\s*,\s*|\s+and\s+|\s+)[0-9]|(?!{_UNIT}(?![A-Za-z0-9^]))(?:[A-Za-z0-9°]|[.,:][0-9]|\.\.|…"
    rf"|\s*(?:[-+*/^_(){{}}\[\]\\=<>!²³√±]|(?:or|and|to|in|over|times|out\s+of|divided\s+by)\s+[-+$]*[0-9.]|{_SCALE}"
    r"|and\s+a\s+(?:half|third|quarter)|or\s+(?:more|less|maybe|perhaps)))",
    re.IGNORECASE,
)
_BETWEEN = re.compile(
    r"(?:[\s,;$]|\\q?quad|\\[()\[\],;]|\\text\s*\{\s*(?:or|and|,)\s*\}|\b(?:or|and|maybe|perhaps|possibly)\b)*",
    re.IGNORECASE,
)
_COMMANDS = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{[^{}]*\}|\\(?:begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_ARGUMENT = re.compile(r"[_^]\s*[0-9]|\\[A-Za-z]+\s*[0-9]")
_ENDLESS = re.compile(r"[0-9]\s*(?:\.\.+|…|\\[lc]?dots)\s*$")  # 0.3... is not 0.3
_FUNCTIONS = re.compile(r"(?:sqrt|sin|cos|tan|cot|sec|csc|log|exp|inf|infinity|mod|gcd|lcm|min|max|lim)(?![A-Za-z])")
_WORD = re.compile(r"[\u3400-\u9fff]|[A-Za-z]{3,}|\b(?:[Ss]o|[Ii]s|[Oo]f|[Ww]e|[Hh]e|[Ii]t|[Ii]n)\b")
_DASH = re.compile(r"(?<![0-9A-Za-z)}\]])–(?=\.?[0-9])")  # an en dash for a minus, not in 3–5
_BOX = re.compile(r"\\f?boxed\s*\{")
_OPENING = re.compile(r"\\boxed|\\\[|\\\(|(?<!\\)\$\$?")
_CLOSING = {"\\[": "\\]", "\\(": "\\)", "$$": "$$", "$": "$"}


def find(text: str, rule: str = "auto") -> Found | None:
    """The place of the final answer by one of ``RULES``, or None. Unfinished thinking (``<think>``) has no answer."""
    if "<think>" in text.rpartition("</think>")[2]:
        return None  # cut off before an answer
    text = text.rpartition("</think>")[2]
    return RULES[rule](_DASH.sub("-", text if len(text) <= READ else text[-READ:]))


def extract(text: str, rule: str = "auto") -> str | None:
    """The number or formula that a text gives as its final answer, or None."""
    found = find(text, rule)
    return None if found is None else formula(found)


# --- rules ----------------------------------------------------------------------------------------------------
def _auto(text: str) -> Found | None:
    """The last answer tag, the last box, the text after "answer is", the last formula or number: the first that is."""
    tagged = "<answer>" in text
    if tagged:
        text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    if _BOX.search(text):
        return _boxed(text)
    anchors = list(_ANCHOR.finditer(text))
    if anchors:
        return _statement(text[anchors[-1].end() :].lstrip())
    spans = [] if plain_number(text) is not None else list(_formulas(text))
    if spans:
        tail = text[spans[-1][1] :]
        if not _TOKEN.search(tail):
            return Found(_runs(text, spans)[-1], marked=tagged)
        text = tail
    return Found(text, marked=tagged and not spans)


def _statement(text: str) -> Found:
    """What follows "the answer is": the formulas at its start, else the first line up to the end of the sentence."""
    spans = list(_formulas(text))
    if spans and spans[0][0] == 0:
        return Found(_runs(text, spans)[0], marked=True)
    line = re.split(r"\.(?=\s|$)|。", text.splitlines()[0])[0] if text else ""
    spans = [span for span in spans if span[1] <= len(line)]
    if spans and plain_number(line) is None and not _lead(line):
        return Found(_runs(line, spans)[0], marked=True)
    return Found(line, marked=True)


def _boxed(text: str) -> Found | None:
    """The content of the last ``\\boxed{}``; boxes side by side are one list: a hedge is not an answer."""
    for _ in range(DEEPEST):
        found = _boxes(text)
        if not found:
            return None
        text = _runs(text, found)[-1]
        if not _BOX.search(text):
            return Found(text, marked=True)
    return None


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """``(start, end, content)`` of the boxes that are in no other; none if the last is cut off."""
    found: list[tuple[int, int, str]] = []
    for match in _BOX.finditer(text):
        if found and match.start() < found[-1][1]:  # inside the last one
            continue
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0) * (text[end - 1] != "\\")
            end += 1
        if depth:
            return []
        found.append((match.start(), end, text[match.end() : end - 1]))
    return found


def _number(text: str) -> Found | None:
    """The last number, whatever stands around it."""
    tokens = list(_TOKEN.finditer(text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")))
    return Found(tokens[-1].group(), marked=True) if tokens else None


def _tag(text: str) -> Found | None:
    """What is inside the last ``<answer>`` and ``</answer>``."""
    if "<answer>" not in text:
        return None
    return Found(text.rpartition("<answer>")[2].partition("</answer>")[0].strip(), marked=True)


def _whole(text: str) -> Found | None:
    """All of it."""
    return Found(text.strip(), marked=True)


RULES: Mapping[str, Callable[[str], Found | None]] = {
    "auto": _auto,
    "boxed": _boxed,
    "number": _number,
    "answer": _tag,
    "whole": _whole,
}


# --- formulas and numbers in a text ----------------------------------------------------------------------------
def _formulas(text: str) -> Iterator[tuple[int, int, str]]:
    """``(start, end, content)`` of ``$...$``, ``$$...$$``, ``\\(...\\)`` and ``\\[...\\]``; "$5 and $7" is money."""
    start, missing = 0, set[str]()
    while opening := _OPENING.search(text, start):
        mark, start = opening.group(), opening.end()
        closing = _CLOSING.get(mark)
        if closing is None or closing in missing:
            continue
        end = text.find(closing, start)
        if end < 0:
            missing.add(closing)
            continue
        content = text[start:end]
        if mark != "$" or _is_inline(content, text[end + 1 : end + 2]):
            yield opening.start(), end + len(closing), content
            start = end + len(closing)


def _is_inline(content: str, following: str) -> bool:
    if not content.strip() or "\n" in content or content.endswith("\\") or following.isdigit():
        return False
    open_left, open_right = content[0].isspace(), content[-1].isspace()
    return open_left == open_right and (not open_left or not has_words(content))


def _runs(text: str, spans: Sequence[tuple[int, int, str]]) -> list[str]:
    """The contents of spans; those with only "or", "and" or a comma between them as one list."""
    runs: list[dict[str, None]] = []
    before = 0
    for start, end, content in spans:
        if not runs or not _BETWEEN.fullmatch(text[before:start]):
            runs.append({})
        runs[-1][content.strip()] = None  # the same twice is once
        before = end
    return [", ".join(run) for run in runs]


def has_words(text: str) -> bool:
    """Whether there are words in it that are no functions and no LaTeX."""
    return _WORD.search(_FUNCTIONS.sub(" ", _COMMANDS.sub(" ", text))) is not None


def _lead(text: str) -> str | None:
    """The number that a statement begins with, unless it goes on as "5 or 7", "5, 7" or "5x"."""
    start = _LEAD.match(text)
    token = _TOKEN.match(text, start.end() if start else 0)
    if token is None or _AFTER_UNSAFE.match(text, token.end()) or _goes_on(text, token.end()):
        return None
    return token.group() + _percent_after(text, token.end())


def _goes_on(text: str, end: int) -> bool:
    """Whether another number follows after a comma or an "or"."""
    following = _DIGIT.search(text, end)
    return following is not None and bool(_MORE.match(text, end) or _OR.search(text, end, following.start()))


def _percent_after(text: str, end: int) -> str:
    return "%" if re.match(r"\s*(?:\\?%|percent)", text[end : end + 20]) else ""


def formula(found: Found) -> str | None:
    """The number or formula at the place of an answer; of running text its first (after "answer is") or last number.

    A number that is a part of something larger ("5 or 7", "3x", "2024-05-07", "not 43") is none.
    """
    text = found.text.strip().strip("*").removesuffix("\\").strip()
    body, _ = split_percent(text)
    if plain_number(body) is not None:
        return text.rstrip(".")
    if not has_words(body) and (found.marked or "\n" not in text) and len(text) <= LONGEST:
        bare = _ARGUMENT.sub("_", text)  # without the 2 of \\log_2 3
        broken = re.search(r"[0-9]\s+[0-9]", bare) or text.count("{") != text.count("}") or _ENDLESS.search(text)
        return None if broken else " ".join(text.split()) or None
    if found.marked and (lead := _lead(text)):
        return lead
    tokens = list(_TOKEN.finditer(text.replace("\N{MINUS SIGN}", "-")))
    if not tokens:
        return None
    last = tokens[-1]
    if len(last.group()) > LONGEST or _BEFORE_UNSAFE.search(text[max(0, last.start() - 40) : last.start()]):
        return None
    return None if _AFTER_UNSAFE.match(text, last.end()) else last.group() + _percent_after(text, last.end())
