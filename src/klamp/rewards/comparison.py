"""Are two formulas the same? math-verify parses and compares; what it takes for equal is checked again, exactly.

This module runs in a worker only: every function here may hang or eat all memory on a model's text.
"""

from __future__ import annotations

import re
from cmath import isfinite
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any
from zlib import crc32

from klamp.answers import plain_number

_PLAIN_TO_LATEX = tuple(
    (re.compile(pattern), latex)
    for pattern, latex in (
        (r"\*\*", "^"),
        (r"(?<![\\A-Za-z0-9])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)", r"\1\\cdot10^{\2}"),
        (r"(?<![\\A-Za-z])sqrt\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])(?:oo|inf|infinity)(?![A-Za-z])", r"\\infty "),
        (r"\N{INFINITY}", r"\\infty "),
        (r"\N{GREEK SMALL LETTER PI}", r"\\pi "),
        (r"\N{MINUS SIGN}", "-"),
        (r"\N{DEGREE SIGN}", r"^{\\circ}"),
        (r"\N{SQUARE ROOT}\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\N{SQUARE ROOT}\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"~", " "),
        (r"^\s*[A-Za-z]\s*=\s*(?=\\pm)", ""),
        (r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])", ""),  # x in [1, 2] is the interval
        (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])E(?=_)", r"\\varepsilon "),  # E_1 is no power of e
    )
)

_SUBSCRIPT = re.compile(r"(?<!log)(?<!sum)(?<!prod)(?<!int)(?<!lim)_ ?(?:\{([^{}]*)\}|(\\?[A-Za-z]+|[0-9]))")
_MINUS_LIST = re.compile(r"-\s*(?:\\left)?\(.*,.*\)", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox|rm)\s*\{([^{}]*)\}")
_JOINING = {"and", "or", "for", "if", "where", "with", "the", "a", "an", "is", "are"}
_UNITS = {
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "millimeter": "mm", "millimetre": "mm", "foot": "ft", "feet": "ft", "inch": "in", "inche": "in", "hour": "h", "hr": "h",
    "minute": "min", "second": "s", "sec": "s", "kilogram": "kg", "gram": "g", "pound": "lb", "degree": "°", "sq": "square",
}  # fmt: skip
_COUNTING = {  # of a number: never a unit that may be left out
    "hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "quarter", "third", "more", "less", "fewer",
    "least", "most", "not", "than",
}  # fmt: skip
_UNIT_BETWEEN = re.compile(r"[0-9][^0-9]*\0[^0-9]*[0-9]")
_VARIABLE_AT_END = re.compile(r"[0-9}\s]\s*[A-Za-z]\s*$")


def same(gold: str, answer: str, gold_scale: int, answer_scale: int) -> bool:
    """True if math-verify finds the answer equal to the gold answer and no numbers in them say otherwise.

    Both are divided by their scales first (100 where there was a percent sign).
    """
    from math_verify import verify

    names = _subscripts(gold), _subscripts(answer)
    if (all(names) and names[0] != names[1]) or _texts_differ(gold, answer) or _lists_differ(gold, answer):
        return False
    pairs = product(_read(gold, gold_scale), _read(answer, answer_scale))
    return any(
        _comparable(gold, g, answer, a) and not _differ(g, a) and verify(g, a, timeout_seconds=None) and _agree(g, a)
        for g, a in pairs
    )


def _texts_differ(gold: str, answer: str) -> bool:
    """Whether words in formulas say that they differ, which math-verify drops: 5 million and 5, km and m, AM and PM.

    A unit may be left out, unless numbers stand on both sides of it (2 hours 30 minutes).
    """
    said = _words_in(gold), _words_in(answer)
    if not any(said):
        return False
    counted = [sorted(word for word in words if word in _COUNTING) for words in said]
    if counted[0] != counted[1] or (all(said) and sorted(said[0]) != sorted(said[1])):
        return True
    compound = any(_UNIT_BETWEEN.search(_TEXT.sub(_unit_mark, text)) for text in (gold, answer))
    return compound and re.findall(r"[0-9.]+", gold) != re.findall(r"[0-9.]+", answer)


def _words_in(text: str) -> list[str]:
    found = (word.removesuffix("s") if len(word) > 2 else word for part in _TEXT.findall(text)
             for word in re.findall(r"[^\W\d_]+", part.casefold()))  # fmt: skip
    named = [_UNITS.get(word, word) for word in found]
    return [word for word in named if word not in _JOINING and word not in ("unit", "square", "°")]


def _unit_mark(match: re.Match[str]) -> str:
    return "\0" if _words_in(match.group()) else " "


def _lists_differ(gold: str, answer: str) -> bool:
    """Whether both are lists of numbers that differ in how often one occurs: math-verify compares them as sets."""
    lists = [[plain_number(part) for part in re.sub(r"[{}\[\]()\\$]", " ", text).split(",")] for text in (gold, answer)]
    counts = [sorted(number for number in one if number is not None) for one in lists]
    whole = all(len(one) == len(numbers) > 1 for one, numbers in zip(lists, counts, strict=True))
    return whole and len(counts[0]) == len(counts[1]) and counts[0] != counts[1]


def _comparable(gold: str, g: Any, answer: str, a: Any) -> bool:
    """An equation is the value on its right only if a name stands on its left: x = 5, f(x) = 5, not 3x = 6."""
    import sympy

    if isinstance(g, sympy.Eq) == isinstance(a, sympy.Eq):
        return True
    text, equation = (gold, g) if isinstance(g, sympy.Eq) else (answer, a)
    named = re.match(r"\s*\$?\s*(?:\\?[A-Za-z]{3,}|\\(?:text|mathrm)\s*\{[^{}]*\})[^=0-9+*/^-]*=", text)
    left = equation.lhs
    return bool(named) or left.is_Symbol or isinstance(left, sympy.Tuple | sympy.core.function.AppliedUndef)


def _subscripts(text: str) -> set[str]:
    """The indices in a formula: math-verify loses some, so that E_1 would be E_2. Limits of sums are none."""
    found = (braced or bare for braced, bare in _SUBSCRIPT.findall(text))
    return {re.sub(r"\\(?:text|mathrm|rm)|[\\{}\s]", "", index) for index in found}


def warm_up() -> None:
    """What a first comparison builds: the parser's tables and simplification rules."""
    for gold, answer in ((r"\frac{x}{\sqrt{2}}", r"\frac{x\sqrt{2}}{2}"), (r"(1,\pi)", r"\{1,2\}"), ("x=1", r"x\le 2")):
        same(gold, answer, 1, 1)


@lru_cache(maxsize=1024)
def _read(text: str, scale: int) -> list[Any]:
    import sympy
    from math_verify import LatexExtractionConfig, parse

    for pattern, latex in _PLAIN_TO_LATEX:
        text = pattern.sub(latex, text)
    if _MINUS_LIST.fullmatch(text.strip()):  # math-verify loses the sign
        return []
    config = LatexExtractionConfig()
    if _VARIABLE_AT_END.search(text):  # math-verify takes the t of 2t for tons
        config = replace(config, normalization_config=replace(config.normalization_config, units=False))
    parsed = parse(f"\\boxed{{{text}}}", [config], parsing_timeout=None)
    found = [part for part in parsed if not isinstance(part, str)]
    if not found and text.count("\\pm") == 1:  # math-verify reads it at the top of a formula only
        both = [_read(text.replace("\\pm", sign), 1) for sign in "+-"]
        found = [sympy.FiniteSet(*(one[0] for one in both))] if all(both) else []
    return found if scale == 1 else [part * sympy.Rational(1, scale) for part in found]


def _differ(gold: Any, answer: Any) -> bool:
    """True if two expressions have clearly different values, which saves the search for a proof that they are equal.

    Symbols get values by their names, small letters for capitals: math-verify takes c and C for the same.
    """
    import sympy

    if not all(isinstance(v, sympy.Expr) and not isinstance(v, sympy.MatrixExpr) for v in (gold, answer)):
        return False
    if any(v.is_Symbol or (v.is_Mul and all(arg.is_Symbol for arg in v.args)) for v in (gold, answer)):
        return False  # names, compared by their letters
    try:
        x, y = (complex(v.subs({s: _value_of(s.name) for s in v.free_symbols}).evalf(15)) for v in (gold, answer))
    except Exception:  # no numbers: unknown functions, infinity, what SymPy cannot evaluate
        return False
    return isfinite(abs(x)) and isfinite(abs(y)) and abs(x - y) > 1e-4 * max(abs(x), abs(y))


def _value_of(symbol: str) -> Any:
    import sympy

    return sympy.Rational(500 + crc32(symbol.lower().encode()) % 2000, 1009)


def _agree(gold: Any, answer: Any) -> bool:
    """False where numbers differ that math-verify, which rounds to 6 decimals, may have taken for equal."""
    import sympy

    if isinstance(answer, sympy.Set) and not isinstance(gold, sympy.Set) and hasattr(gold, "as_set"):
        gold = gold.as_set()  # 0 < x < 1 as the interval that math-verify compared
    golds, answers = _parts(gold), _parts(answer)
    return len(golds) == len(answers) and all(any(_agree_on_numbers(g, a) for a in answers) for g in golds)


def _parts(value: Any) -> list[Any]:
    import sympy

    if isinstance(value, sympy.MatrixBase):
        return list(value)
    if isinstance(value, sympy.Interval):
        return [value.start, value.end]
    if isinstance(value, sympy.FiniteSet | sympy.Tuple | sympy.Union):
        return [part for arg in value.args for part in _parts(arg)]
    return [value.rhs] if isinstance(value, sympy.Eq) and value.lhs.is_Symbol else [value]


def _agree_on_numbers(x: Any, y: Any) -> bool:
    import sympy

    if not (getattr(x, "is_number", False) and getattr(y, "is_number", False)) or x == y:
        return True
    x, y = (v.xreplace({f: sympy.Rational(str(f)) for f in v.atoms(sympy.Float)}) for v in (x, y))
    tolerance = sympy.Float("1e-25" if x.is_rational and y.is_rational else "1e-6")
    x, y = x.doit().evalf(40), y.doit().evalf(40)
    return bool(abs(x - y) <= tolerance * abs(x))
