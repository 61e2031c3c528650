"""Plain numbers, read exactly: ``1,234``, ``1e-7``, ``1/2``, ``1 1/2``, ``\\frac{1}{2}``, ``1.2 \\times 10^{5}``."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 1000  # characters of a number or formula; anything longer is compared as a text only

UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
_FRACTION = re.compile(rf"([+-]?) ?\$?(?:([0-9]+) +)?({UNSIGNED})(?: ?/ ?({UNSIGNED}))?")
_LATEX_FRACTION = re.compile(r"([+-]?) ?([0-9]*) ?\\frac ?(?:\{([0-9]+)\} ?\{([0-9]+)\}|([0-9]) ?([0-9]))")
_NEGATIVE_INSIDE = re.compile(r"\\frac ?\{-([0-9]+)\} ?\{([0-9]+)\}")
_SCIENTIFIC = re.compile(
    rf"([+-]?{UNSIGNED}) ?(?:\\times|\\cdot|×|·|\*|x) ?10 ?\^ ?(?:\{{ ?([+-]?[0-9]{{1,3}}) ?\}}|([0-9]))"
)
_WRAPPED = re.compile(
    r"\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\\(?:text|mathrm|mathbf|textbf|boldsymbol|boxed)\{([^{}]*)\}|\{([^{}]*)\}",
    re.DOTALL,
)
_THIN_SPACE = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!;:]|\\ )(?=[0-9]{3}(?![0-9]))")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent)\s*\}|\bpercent(?:age)?)\s*(\$*)\.?\s*", re.IGNORECASE)


def plain_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number and nothing else, or None. A percent sign is not part of one."""
    if len(text) > LONGEST:
        return None
    text = _THIN_SPACE.sub(",", _plain_signs(text).replace("\\!", "").replace("\\$", "$"))
    text = _without_stop(re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text))
    for _ in range(3):
        if inner := _WRAPPED.fullmatch(text):
            text = next(group for group in inner.groups() if group is not None).strip()
            text = _without_stop(text)
    text = _NEGATIVE_INSIDE.sub(r"-\\frac{\1}{\2}", text) if text.startswith("\\frac") else text
    if match := _LATEX_FRACTION.fullmatch(text):
        sign, whole, *parts = match.groups()
        above, below = parts[:2] if parts[0] else parts[2:]
    elif match := _SCIENTIFIC.fullmatch(text):
        return _decimal(match[1]) * Fraction(10) ** int(match[2] or match[3])
    elif match := _FRACTION.fullmatch(text):
        sign, whole, above, below = match.groups()
        if whole and not below:  # "5 7" is two numbers
            return None
    else:
        return None
    denominator = _decimal(below or "1")
    if denominator == 0:
        return None
    value = Fraction(whole or 0) + _decimal(above) / denominator
    return -value if sign == "-" else value


def _plain_signs(text: str) -> str:
    text = re.sub(r"(?:\\ |~|\s)+$", "", text.strip()).replace("\N{MINUS SIGN}", "-")
    return "-" + text[1:] if text[:1] == "\N{EN DASH}" else text


def _without_stop(text: str) -> str:
    """Without the full stop of a sentence or the dot after a decimal; "0.3..." is no number."""
    return text.removesuffix("。") if text.endswith("..") else text.removesuffix("。").removesuffix(".")


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def split_percent(text: str) -> tuple[str, bool]:
    """A text without the percent sign at its end, and whether there was one."""
    tail = text[-40:]
    for match in _PERCENT.finditer(tail):
        if match.end() == len(tail) and match.start() > 0:
            return text[: len(text) - len(tail) + match.start()] + match[1], True
    return text, False


_BASED = re.compile(r"(-?[0-9A-Za-z]{1,200})_ ?(?:\{ ?(?:\\text\s*\{\s*)?([0-9]{1,2})\s*\}?\}|([0-9]))")


def split_base(text: str) -> tuple[str, int] | None:
    """Digits and base of a number such as ``4130_5`` or ``2F_{16}``, or None."""
    match = _BASED.fullmatch(text.strip().strip("$").strip().rstrip("."))
    if match is None:
        return None
    base = int(match[2] or match[3])
    try:
        int(match[1], base)
    except ValueError:  # a digit that the base does not have, or a symbol x_1
        return None
    return match[1].lstrip("0").upper() or "0", base
