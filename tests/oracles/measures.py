"""Measures in 60 and more digits, as functions of x = log w, straight from the textbook forms in w."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mpmath
from mpmath import mpf

Form = Callable[[mpf, mpf], mpf]  # (w, x) -> raw f(w)

# name -> (raw f, c = f''(1)); c = 1 where f has a kink or is signed.
TEXTBOOK: dict[str, tuple[Form, float]] = {
    "ratio_dev": (lambda w, x: abs(w - 1), 1),
    "tv": (lambda w, x: abs(w - 1) / 2, 1),
    "log_ratio": (lambda w, x: abs(x), 1),
    "k1": (lambda w, x: -x, 1),
    "k2": (lambda w, x: x**2 / 2, 1),
    "k3": (lambda w, x: w - 1 - x, 1),
    "k3_flipped": (lambda w, x: 1 / w - 1 + x, 1),
    "k3_reverse": (lambda w, x: w * x - w + 1, 1),
    "jeffreys": (lambda w, x: (w - 1) * x, 2),
    "js": (lambda w, x: (w * mpmath.log(2 * w / (1 + w)) + mpmath.log(2 / (1 + w))) / 2, 0.25),
    "hellinger2": (lambda w, x: (mpmath.sqrt(w) - 1) ** 2, 0.5),
    "pearson": (lambda w, x: (w - 1) ** 2, 2),
    "neyman": (lambda w, x: (w - 1) ** 2 / w, 2),
    "lecam": (lambda w, x: (w - 1) ** 2 / (w + 1), 1),
    "sym_chi2": (lambda w, x: (w - 1) ** 2 * (w + 1) / w, 4),
}
SIGNED, KINKED = ("k1",), ("ratio_dev", "tv", "log_ratio")


def _digits(*sizes: float) -> int:
    """Enough digits that no cancellation near x = 0, a = 0 or a = 1 reaches the 40th."""
    lost = sum(max(0, -int(mpmath.floor(mpmath.log10(abs(mpf(s)))))) for s in sizes if s)
    return 60 + 3 * lost


def power_form(w: mpf, x: mpf, a: mpf) -> mpf:
    if a == 0:
        return w - 1 - x
    if a == 1:
        return w * x - w + 1
    return (w**a - 1 - a * (w - 1)) / (a * (a - 1))


def raw(name: str, x: float) -> mpf:
    """f(e^x); ``power(a)`` and ``renyi(a)`` by name; inf where the Renyi form has no value."""
    family, _, rest = name.partition("(")
    a = mpf(float(rest[:-1])) if rest else mpf(0)
    near_one = a - 1 if rest else mpf(0)
    with mpmath.workdps(_digits(x, a, near_one)):
        x = mpf(x)
        w = mpmath.exp(x)
        if family == "power":
            return +power_form(w, x, a)
        if family == "renyi":
            if a in (0, 1):
                return +power_form(w, x, a)
            inside = w**a - a * (w - 1)
            return +(mpmath.log(inside) / (a * (a - 1))) if inside > 0 else mpmath.inf
        return +TEXTBOOK[name][0](w, x)


def curvature(name: str) -> float:
    return TEXTBOOK[name][1] if name in TEXTBOOK else 1.0


def value(name: str, x: float) -> mpf:
    """The normalised measure at x."""
    return raw(name, x) / mpf(curvature(name))


def slope(name: str, x: float) -> mpf:
    """d/dx of the normalised measure = w f'(w): f' by hand for the families, else a central difference."""
    family, _, rest = name.partition("(")
    a = mpf(float(rest[:-1])) if rest else mpf(0)
    with mpmath.workdps(_digits(x, a, a - 1) if rest else 300):
        x = mpf(x)
        w = mpmath.exp(x)
        if rest:
            power = w * x if a == 1 else (w**a - w) / (a - 1)
            return +power if family == "power" else power / (w**a - a * (w - 1))
        h = mpf(10) ** -40
        form, c = TEXTBOOK[name]
        return (form(mpmath.exp(x + h), x + h) - form(mpmath.exp(x - h), x - h)) / (2 * h) / mpf(c)


@cache
def bounds(name: str, radius: float) -> tuple[float, float]:
    """(log_low, log_high) of {f <= radius} by bisection in 60 digits; for radii that have both bounds below e^50."""
    found = []
    for sign in (-1, 1):
        near, far = mpf(0), mpf(50)
        if value(name, float(sign * far)) <= radius:
            found.append(sign * float("inf"))
            continue
        with mpmath.workdps(60):
            for _ in range(80):
                middle = (near + far) / 2
                near, far = (middle, far) if _mp_value(name, sign * middle) <= radius else (near, middle)
        found.append(float(sign * near))
    return found[0], found[1]


def at_ratio(name: str, w: mpf) -> mpf:
    """The normalised f(w), in the precision at hand."""
    return _mp_value(name, mpmath.log(w))


def _mp_value(name: str, x: mpf) -> mpf:
    family, _, rest = name.partition("(")
    w = mpmath.exp(x)
    if family == "power":
        return power_form(w, x, mpf(float(rest[:-1])))
    if family == "renyi":
        a = mpf(float(rest[:-1]))
        inside = w**a - a * (w - 1)
        return mpmath.log(inside) / (a * (a - 1)) if inside > 0 else mpmath.inf
    return TEXTBOOK[name][0](w, x) / mpf(curvature(name))
