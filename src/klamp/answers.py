"""Answers: the final answer in a text, and whether two mathematical answers are the same."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from klamp.worker import WORKER, WorkerFailed

Verdict = tuple["float | None", str]  # the score of one answer, None if unscored, and what was counted

# --- math: the final answer of a text -----------------------------------------------------------------------
_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
_FRACTION = re.compile(rf"([+-]?) ?\$?(?:([0-9]+) +)?({_UNSIGNED})(?: ?/ ?({_UNSIGNED}))?")
_LATEX_FRACTION = re.compile(r"([+-]?) ?([0-9]*) ?\\[dt]?frac(?:\{([0-9]+)\}\{([0-9]+)\}|([0-9])([0-9]))")
_WRAPPED = re.compile(
    r"\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\\(?:text|mathrm|mathbf|boxed)\{([^{}]*)\}", re.DOTALL
)
_TOKEN = re.compile(rf"[+-]?{_UNSIGNED}(?:/{_UNSIGNED})?")
_BEFORE_UNSAFE = re.compile(r"(?:[-+*/^_{}\\%<>(\[]|[0-9]\s*(?:or|and|[,.:/])?)\s*\$?$")
_AFTER_UNSAFE = re.compile(r"[A-Za-z0-9]|[.,:][0-9]|\s*(?:[-+*/^_(){}\[\]\\%=<>!²³]|(?:or|and)\s+[-+$]*[0-9.])")
_ANCHOR = re.compile(r"####|\banswer\W{0,4}\s(?:is|=)[\s:*]*|\banswer\W{0,3}[:=][\s:*]*", re.IGNORECASE)
_DELIMITED = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$])\$(?![\s$])([^$\n]*[^\s$\\])\$(?![0-9])", re.DOTALL
)
_BETWEEN = re.compile(r"[\s,;$]*(?:or|and)?[\s,;$]*", re.IGNORECASE)
_COMMANDS = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{[^{}]*\}|\\(?:begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_FUNCTIONS = re.compile(r"(?:sqrt|sin|cos|tan|cot|sec|csc|log|exp|inf|infinity|mod|gcd|lcm|min|max|lim)(?![A-Za-z])")


def plain_number(text: str) -> Fraction | None:
    """The exact value of a number (``1,234``, ``1e-7``, ``1/2``, ``1 1/2``, ``\\frac{1}{2}``), else None."""
    text = (
        text.strip()
        .replace("\N{MINUS SIGN}", "-")
        .replace("{,}", ",")
        .replace("\\!", "")
        .replace("\\$", "$")
        .rstrip(".")
    )
    for _ in range(3):
        if inner := _WRAPPED.fullmatch(text):
            text = next(group for group in inner.groups() if group is not None).strip()
    if len(text) > 1000:
        return None
    if match := _LATEX_FRACTION.fullmatch(text):
        sign, whole, *parts = match.groups()
        above, below = parts[:2] if parts[0] else parts[2:]
    elif match := _FRACTION.fullmatch(text):
        sign, whole, above, below = match.groups()
        if whole and not below:  # "5 7" is two numbers
            return None
    else:
        return None
    denominator = Fraction((below or "1").replace(",", ""))
    if denominator == 0:
        return None
    value = Fraction(whole or 0) + Fraction(above.replace(",", "")) / denominator
    return -value if sign == "-" else value


def extract(text: str, *, prose: bool = True) -> str | None:
    """The final answer that a text states, or None.

    In this order: after ``</think>``, inside the last ``<answer>``, the last ``\\boxed{}`` (boxes side by
    side are one list: a hedge is not an answer), after ``####`` or "answer is", the last delimited formula
    (likewise), the text itself if it is a formula, the last number in running text if nothing around it makes
    it a part of something larger (left out with ``prose=False``).
    """
    if "<think>" in text.rpartition("</think>")[2]:
        return None  # still thinking: cut off before an answer
    text = text.rpartition("</think>")[2]
    if "<answer>" in text:
        text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    if "\\boxed" in text:
        return _tidy(_boxes(text), prose=True)
    anchors = list(_ANCHOR.finditer(text))
    if anchors:
        lines = text[anchors[-1].end() :].strip().splitlines()
        text = re.split(r"\.(?=\s|$)", lines[0])[0] if lines else ""
    formulas = [] if plain_number(text) is not None else list(_DELIMITED.finditer(text))
    if formulas:
        spans = [(m.start(), m.end(), next(g for g in m.groups() if g is not None)) for m in formulas]
        return _tidy(_lists(text, spans)[0 if anchors else -1], prose=False)
    return _tidy(text, prose=prose or bool(anchors), lone=bool(anchors))


def _boxes(text: str) -> str:
    """The content of the last box, joined with those directly before it; "" if one is not closed."""
    found: list[tuple[int, int, str]] = []
    for match in re.finditer(r"\\boxed\s*\{", text):
        if found and match.start() < found[-1][1]:  # inside the last one
            continue
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0) * (text[end - 1] != "\\")
            end += 1
        if depth:
            return ""
        found.append((match.start(), end, text[match.end() : end - 1]))
    return _lists(text, found)[-1] if found else ""


def _lists(text: str, spans: Sequence[tuple[int, int, str]]) -> list[str]:
    """The contents of spans ``(start, end, content)``; only "or", "and" or a comma apart, as one list."""
    runs: list[dict[str, None]] = []
    before = 0
    for start, end, content in spans:
        if not runs or not _BETWEEN.fullmatch(text[before:start]):
            runs.append({})
        runs[-1][content.strip()] = None  # the same twice is once
        before = end
    return [", ".join(run) for run in runs]


def _tidy(text: str, *, prose: bool, lone: bool = False) -> str | None:
    """The text if it is a number or formula; in prose its last (``lone``: its only) number; else None."""
    text = text.strip().strip("*").strip()
    if plain_number(text) is not None:
        return text.rstrip(".")
    words = re.search(r"[A-Za-z]{3,}", _FUNCTIONS.sub(" ", _COMMANDS.sub(" ", text)))
    if not words and "\n" not in text and len(text) <= 1000:
        broken = re.search(r"[0-9]\s+[0-9]", text) or text.count("{") != text.count("}")
        return None if broken else text or None
    tokens = list(_TOKEN.finditer(text)) if prose else []
    if not tokens or (lone and len(tokens) > 1):
        return None
    last = tokens[-1]
    safe = not _BEFORE_UNSAFE.search(text[: last.start()]) and not _AFTER_UNSAFE.match(text[last.end() :])
    return last.group() if safe else None


_PLAIN_TO_LATEX = (
    (r"\*\*", "^"),
    (r"(?<![\\A-Za-z0-9])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)", r"\1\\cdot10^{\2}"),
    (r"(?<![\\A-Za-z])sqrt\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<![\\A-Za-z])(?:oo|inf|infinity)(?![A-Za-z])", r"\\infty "),
)


# --- math: comparison ---------------------------------------------------------------------------------------
class MathScore:
    """Compares exactly where both sides are plain numbers, else by math-verify, confirmed numerically.

    A gold answer that is empty, cannot be parsed or does not equal itself within the time limit is unscored.
    A completion without an answer, or whose comparison fails or runs into the time limit, gets 0.
    """

    def __init__(self, time_limit: float) -> None:
        self.time_limit = time_limit
        self._gold = functools.lru_cache(maxsize=65_536)(self._read_gold)
        self._compare = functools.lru_cache(maxsize=65_536)(self._verify)

    def __call__(self, text: str, gold: Any) -> Verdict:
        known = self._gold("" if gold is None else str(gold))
        if known is None:
            return None, "unscored"
        found = extract(text)
        if found is None:
            return 0.0, "no_answer"
        left, right = plain_number(known), plain_number(found)
        if left is not None and right is not None:
            return float(left == right), "scored"
        if left is not None and not re.search(r"[0-9\\]", found):
            return 0.0, "scored"
        return self._compare(known, found)

    def _read_gold(self, gold: str) -> str | None:
        found = gold if plain_number(gold) is not None else extract(gold, prose=False)
        if found is None or plain_number(found) is not None:
            return found
        return found if self._verify(found, found)[0] else None

    def _verify(self, gold: str, answer: str) -> Verdict:
        try:
            same = WORKER.ask(_verify_in_worker, gold, answer, library="math_verify", limit=self.time_limit)
            return float(same), "scored"
        except TimeoutError:
            return 0.0, "timeouts"
        except WorkerFailed:
            return 0.0, "errors"


def _verify_in_worker(gold: str, answer: str) -> bool:
    """True if math-verify finds the answer equal to the gold answer and no numbers in them say otherwise."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> list[Any]:
        for pattern, latex in _PLAIN_TO_LATEX:
            text = re.sub(pattern, latex, text)
        parsed = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)
        return [part for part in parsed if not isinstance(part, str)]

    golds, answers = read(gold), read(answer)
    return any(verify(g, a, timeout_seconds=None) and _numbers_agree(g, a) for g in golds for a in answers)


def _numbers_agree(gold: Any, answer: Any) -> bool:
    """False where numbers differ that math-verify, which rounds to 6 decimals, may have taken for equal."""
    import sympy

    def parts(value: Any) -> list[Any]:
        if isinstance(value, sympy.MatrixBase):
            return list(value)
        if isinstance(value, sympy.Interval):
            return [value.start, value.end]
        if isinstance(value, sympy.FiniteSet | sympy.Tuple):
            return list(value.args)
        return [value.rhs] if isinstance(value, sympy.Eq) and value.lhs.is_Symbol else [value]

    def agree(x: Any, y: Any) -> bool:
        if not (getattr(x, "is_number", False) and getattr(y, "is_number", False)) or x == y:
            return True
        x, y = (v.xreplace({f: sympy.Rational(str(f)) for f in v.atoms(sympy.Float)}) for v in (x, y))
        tolerance = sympy.Float("1e-25" if x.is_rational and y.is_rational else "1e-6")
        percent = x.has(sympy.UnevaluatedExpr) or y.has(sympy.UnevaluatedExpr)
        scales = (1, 100, sympy.Rational(1, 100)) if percent else (1,)  # math-verify accepts 9 % for 9
        x, y = x.doit().evalf(40), y.doit().evalf(40)
        return any(abs(x - y * scale) <= tolerance * abs(x) for scale in scales)

    golds, answers = parts(gold), parts(answer)
    return len(golds) == len(answers) and all(any(agree(g, a) for a in answers) for g in golds)
