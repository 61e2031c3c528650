"""Measures: how far apart two policies are at one token, as a function phi of the log-ratio x = log w.

Every measure that is a function f of the likelihood ratio w is written as phi(x) = f(e^x), once, for NumPy
and torch alike, without cancellation near x = 0 and without overflow where the value itself is finite.
``divergence`` is normalised to f''(1) = 1, so that one radius r means |w - 1| <= sqrt(2 r) to first order for
every measure; ``raw`` is the textbook form.

Sources: Csiszar (1967) for f-divergences; Cressie and Read (1984) for the power family; Schulman (2020),
"Approximating KL divergence", for k1, k2, k3; Wu et al. (arXiv 2602.05494) for k3 as a trust region.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from klamp.errors import UserError, did_you_mean

Array = Any  # a NumPy array or scalar, or a torch tensor: the formulas below serve both
Phi = Callable[[Array], Array]

_SERIES = [1.0 / math.factorial(k + 2) for k in range(14)]  # (e^y - 1 - y) / y^2, exact to 1 ulp for |y| < 1/2


def namespace(x: Array) -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else np


def _largest_exponent(x: Array) -> float:
    """The largest y for which exp(y) is finite in the precision of x."""
    return math.log(float(namespace(x).finfo(x.dtype).max))


# --- the formulas: raw phi(x) and slope d phi / d x = w f'(w) -------------------------------------------------


def _k3(x: Array) -> Array:
    xp = namespace(x)
    small = abs(x) < 0.5
    y = xp.where(small, x, 0.0)
    series = _SERIES[-1]
    for coefficient in reversed(_SERIES[:-1]):
        series = series * y + coefficient
    return xp.where(small, y * y * series, xp.expm1(x) - x)


def _power(x: Array, a: float) -> Array:
    """(w^a - 1 - a(w-1)) / (a(a-1)) for every real a, through k3 for |x| <= 1: no singularity at 0 and 1."""
    xp = namespace(x)
    top = _largest_exponent(x)
    if a > 0.5:  # f_a(w) = w f_{1-a}(1/w); below -top/1.01 the value equals its limit 1/a
        y = xp.where(x < -top / 1.01, -top / 1.01, x)
        return xp.exp(y) * _power(-y, 1.0 - a)
    if abs(a) < 1e-290:  # a x would lose its digits; the difference from k3 is far below 1 ulp
        return _k3(x)
    y = xp.where(abs(x) <= 1.0, x, 0.0)
    near = _k3(y) - _k3(a * y) / a
    far = xp.where(x > top, math.inf, xp.expm1(x) - xp.expm1(a * xp.where(x > top, 0.0, x)) / a)
    return xp.where(abs(x) <= 1.0, near, far) / (1.0 - a)


def _power_slope(x: Array, a: float) -> Array:
    """(w^a - w) / (a - 1), continuous through a = 1."""
    xp = namespace(x)
    b = a - 1.0
    if b == 0.0:
        return x * xp.exp(x)
    # The larger of w^a and w stands outside, so that they never meet as inf - inf.
    falls = b * x < 0.0
    inside = xp.expm1(xp.where(falls, b * x, -b * x))
    return xp.where(falls, xp.exp(x) * inside, -xp.exp(a * x) * inside) / b


def _renyi(x: Array, a: float) -> Array:
    """log(w^a - a(w-1)) / (a(a-1)): a monotone map of power(a), infinite from a finite w on if 0 < a < 1."""
    c = a * (a - 1.0)
    if c == 0.0:
        return _power(x, a)
    xp = namespace(x)
    plain = _power(x, a)
    inner = c * plain
    tiny = abs(inner) < 1e-17  # log1p(inner) / c = plain to 1 ulp, and inner may be too small to keep its digits
    if c < 0.0:
        valid = inner > -1.0
        found = xp.where(valid, xp.log1p(xp.where(valid, inner, 0.0)) / c, math.inf)
        return xp.where(tiny, plain, found)
    # Where w^a or w would overflow, take the dominant term out of the logarithm.
    large = 0.4 * _largest_exponent(x)
    by_power, by_ratio = a * x > large, (x > large) & (a < 0.0)
    y, z = xp.where(by_power, x, 0.0), xp.where(by_ratio, x, 0.0)
    power_form = a * y + xp.log1p(xp.where(by_power, a * (xp.exp(-a * y) - xp.exp((1.0 - a) * y)), 0.0))
    near = xp.log1p(xp.where(by_power | by_ratio, 0.0, inner))
    result = xp.where(by_power, power_form, near)
    if a < 0.0:
        ratio_form = z + math.log(-a) + xp.log1p(-xp.exp(-z) * (z > 0.0) - xp.exp((a - 1.0) * z) * (z > 0.0) / a)
        result = xp.where(by_ratio, ratio_form, result)
    return xp.where(tiny, plain, result / c)


def _renyi_slope(x: Array, a: float) -> Array:
    c = a * (a - 1.0)
    if c == 0.0:
        return _power_slope(x, a)
    xp = namespace(x)
    large = (a * x > 0.4 * _largest_exponent(x)) & (c > 0.0)
    y, z = xp.where(large, 0.0, x), xp.where(large, x, 0.0)
    decay = xp.exp((1.0 - a) * z)
    ratio = 1.0 + c * _power(y, a)
    finite = xp.where(ratio > 0.0, _power_slope(y, a) / xp.where(ratio > 0.0, ratio, 1.0), math.inf)
    found = xp.where(large, (1.0 - decay) / ((a - 1.0) * (1.0 - a * decay)), finite)
    by_ratio = (x > 0.4 * _largest_exponent(x)) & (a < 0.0)  # there the value is log(-a (w - 1)) / c
    return xp.where(by_ratio, 1.0 / c, found)


def _js(x: Array) -> Array:
    """(1/2)[w log(2w/(1+w)) + log(2/(1+w))]."""
    xp = namespace(x)
    w = xp.exp(x)
    y = xp.where(abs(x) <= 1.0, x, 0.0)
    half = 0.5 * y
    middle = xp.exp(half) * (y * xp.sinh(half) - 2.0 * xp.cosh(half) * xp.log1p(2.0 * xp.sinh(0.5 * half) ** 2))
    down = xp.where(x < -1.0, x, -1.0)
    v = xp.exp(down)
    below = v * xp.where(v > 0.0, down, 0.0) - (1.0 + v) * (xp.log1p(v) - math.log(2.0))
    up = xp.where(x > 1.0, x, 1.0)
    tail = xp.log1p(xp.exp(-up))
    above = xp.where(x > 1.0, w, math.e) * (math.log(2.0) - tail) + math.log(2.0) - up - tail
    return 0.5 * xp.where(x < -1.0, below, xp.where(x > 1.0, above, middle))


def _js_slope(x: Array) -> Array:
    xp = namespace(x)
    down, up = xp.where(x < -1.0, x, -1.0), xp.where(x < -1.0, 0.0, x)
    inner = xp.where(x < -1.0, down + math.log(2.0) - xp.log1p(xp.exp(down)), -xp.log1p(0.5 * xp.expm1(-up)))
    return 0.5 * xp.exp(x) * xp.where(xp.exp(x) > 0.0, inner, 0.0)


def _ratio_dev(x: Array) -> Array:
    return abs(namespace(x).expm1(x))


def _sign(x: Array) -> Array:
    return namespace(x).sign(x)


def _exp(x: Array) -> Array:
    return namespace(x).exp(x)


def _expm1(x: Array) -> Array:
    return namespace(x).expm1(x)


def _sinh(x: Array) -> Array:
    return namespace(x).sinh(x)


def _tanh(x: Array) -> Array:
    return namespace(x).tanh(x)


# --- the value ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A divergence measure of one token: phi(x) with x = log w, phi(0) = 0, increasing away from 0.

    ``phi``: raw form, a function of an array x (NumPy or torch).  ``curvature``: c = f''(1) of the raw form
    (1 where f has a kink or is signed, and nothing is normalised).  ``slope``: d phi / d x; without it torch
    differentiates phi.  ``third``, ``fourth``: derivatives of the normalised f at w = 1, if known.
    """

    phi: Phi
    curvature: float = 1.0
    name: str = ""
    slope: Phi | None = field(default=None, compare=False, repr=False)
    third: float | None = field(default=None, compare=False, repr=False)
    fourth: float | None = field(default=None, compare=False, repr=False)
    equation: str = field(default="", compare=False, repr=False)
    power: float | None = field(default=None, compare=False, repr=False)  # a, where the measure is power(a)

    def __post_init__(self) -> None:
        if not (self.curvature > 0.0 and math.isfinite(self.curvature)):
            raise UserError(f"curvature={self.curvature!r} is not f''(1) of a divergence: give a finite number above 0")
        object.__setattr__(self, "curvature", float(self.curvature))
        if not self.name:
            module, qualname = getattr(self.phi, "__module__", None), getattr(self.phi, "__qualname__", "phi")
            path = f"{module}:{qualname}"
            unit = self.curvature == 1.0
            object.__setattr__(self, "name", path if unit else f"measure({path!r}, curvature={self.curvature!r})")

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return (measure, (self.name,))

    def __deepcopy__(self, memo: Any) -> Measure:
        return self  # a value

    def raw(self, log_ratio: Array) -> Array:
        """phi(x) as written in textbooks; shape and precision of ``log_ratio``, half precisions in float32."""
        return _evaluate(self.phi, log_ratio)

    def divergence(self, log_ratio: Array) -> Array:
        """phi(x) / c, normalised to f''(1) = 1."""
        value = self.raw(log_ratio)
        with np.errstate(over="ignore"):
            return value if self.curvature == 1.0 else value / self.curvature

    def divergence_slope(self, log_ratio: Array) -> Array:
        """d/dx of ``divergence``: w f'(w) of the normalised f."""
        if self.slope is not None:
            return _evaluate(self.slope, log_ratio) / self.curvature
        torch = importlib.import_module("torch")
        x = torch.as_tensor(log_ratio).detach().clone().requires_grad_(True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.divergence(x).sum(), x)
        return slope if isinstance(log_ratio, torch.Tensor) else np.asarray(slope)[()]

    @property
    def limit_low(self) -> float:
        """The normalised value as w -> 0: no lower bound exists for radii from here on."""
        value = float(self.divergence(-sys.float_info.max))
        return value if value < 1e300 else math.inf

    @property
    def effective_power(self) -> float | None:
        """a = 2 + f'''(1) of the power measure with the same region to second order."""
        return None if self.third is None else 2.0 + self.third


def _evaluate(function: Phi, x: Array) -> Array:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return function(x if x.dtype in (torch.float32, torch.float64) else x.float())
    array = np.asarray(x)
    array = array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)
    with np.errstate(all="ignore"):
        try:
            return np.asarray(function(array))[()]
        except (TypeError, AttributeError):  # a function written for torch tensors only
            torch = importlib.import_module("torch")
            return np.asarray(function(torch.from_numpy(np.array(array))))[()]


def _catalogue() -> dict[str, Measure]:
    def entry(name: str, equation: str, phi: Phi, slope: Phi, c: float = 1.0, third: float | None = None,
              fourth: float | None = None, power: float | None = None) -> Measure:  # fmt: skip
        return Measure(phi, c, name, slope, third, fourth, equation, power)

    rows = [
        entry("ratio_dev", "|w - 1|", _ratio_dev, lambda x: _sign(x) * _exp(x)),
        entry("tv", "|w - 1| / 2", lambda x: 0.5 * _ratio_dev(x), lambda x: 0.5 * _sign(x) * _exp(x)),
        entry("log_ratio", "|log w|", lambda x: abs(x), _sign),
        entry("k1", "-log w", lambda x: -x, lambda x: 0.0 * x - 1.0),
        entry("k2", "(log w)^2 / 2", lambda x: 0.5 * x * x, lambda x: x, 1.0, -3.0, 11.0),
        entry("k3", "w - 1 - log w", _k3, _expm1, 1.0, -2.0, 6.0, power=0.0),
        entry("k3_flipped", "1/w - 1 + log w", lambda x: _k3(-x), lambda x: -_expm1(-x), 1.0, -4.0, 18.0),
        entry("k3_reverse", "w log w - w + 1", lambda x: _power(x, 1.0), lambda x: x * _exp(x), 1.0, -1.0, 2.0, power=1.0),
        entry("jeffreys", "(w - 1) log w", lambda x: x * _expm1(x), lambda x: _expm1(x) + x * _exp(x), 2.0, -1.5, 4.0),
        entry("js", "[w log(2w/(1+w)) + log(2/(1+w))] / 2", _js, _js_slope, 0.25, -1.5, 3.5),
        entry("hellinger2", "(sqrt(w) - 1)^2", lambda x: _expm1(0.5 * x) ** 2,
              lambda x: _exp(0.5 * x) * _expm1(0.5 * x), 0.5, -1.5, 3.75, power=0.5),
        entry("pearson", "(w - 1)^2", lambda x: _expm1(x) ** 2, lambda x: 2.0 * _exp(x) * _expm1(x), 2.0, 0.0, 0.0,
              power=2.0),
        entry("neyman", "(w - 1)^2 / w", lambda x: 4.0 * _sinh(0.5 * x) ** 2, lambda x: 2.0 * _sinh(x), 2.0, -3.0, 12.0,
              power=-1.0),
        entry("lecam", "(w - 1)^2 / (w + 1)", lambda x: _expm1(x) * _tanh(0.5 * x),
              lambda x: _expm1(x) / (1.0 + _exp(-x)) * (1.0 + 2.0 / (1.0 + _exp(x))), 1.0, -1.5, 3.0),
        entry("sym_chi2", "(w - 1)^2 (w + 1) / w", lambda x: 4.0 * _sinh(0.5 * x) ** 2 * (1.0 + _exp(x)),
              lambda x: _expm1(x) * (2.0 * _exp(x) + 1.0 + _exp(-x)), 4.0, -1.5, 6.0),
    ]  # fmt: skip
    return {row.name: row for row in rows}


MEASURES: dict[str, Measure] = _catalogue()


def power(a: float) -> Measure:
    """The power divergence (w^a - 1 - a(w-1)) / (a(a-1)), f''(w) = w^(a-2), for every real a."""
    return _power_measure(_finite("a", a))


@cache
def _power_measure(a: float) -> Measure:
    return Measure(partial(_power, a=a), 1.0, f"power({a!r})", partial(_power_slope, a=a), a - 2.0,
                   (a - 2.0) * (a - 3.0), "(w^a - 1 - a(w - 1)) / (a(a - 1))", a)  # fmt: skip


def renyi(a: float) -> Measure:
    """The sample-level Renyi form log(w^a - a(w-1)) / (a(a-1)); for 0 < a < 1 it is infinite from a finite w on."""
    return _renyi_measure(_finite("a", a))


@cache
def _renyi_measure(a: float) -> Measure:
    return Measure(partial(_renyi, a=a), 1.0, f"renyi({a!r})", partial(_renyi_slope, a=a), a - 2.0,
                   (a - 2.0) * (a - 3.0) - 3.0 * a * (a - 1.0), "log(w^a - a(w - 1)) / (a(a - 1))")  # fmt: skip


FAMILIES: dict[str, Callable[[float], Measure]] = {"power": power, "renyi": renyi}
_FAMILY = re.compile(r"(\w+)\(\s*(?:a\s*=\s*)?([-+0-9.eE]+)\s*\)")
_CUSTOM = re.compile(r"measure\(\s*(['\"])(?P<path>[^'\"]+)\1\s*,\s*curvature\s*=\s*(?P<c>[-+0-9.eE]+)\s*\)")


def measure(name: str | Measure | Phi, curvature: float | None = None) -> Measure:
    """The measure with this name: one of ``MEASURES``, ``power(a)``, ``renyi(a)``, or ``package.module:phi``."""
    custom = not isinstance(name, Measure) and (callable(name) or ":" in str(name))
    if curvature is not None and not custom:
        raise UserError(f"curvature={curvature!r} belongs to a function of one's own; {name} has its curvature")
    if isinstance(name, Measure):
        return name
    if callable(name):
        return Measure(name, 1.0 if curvature is None else curvature)
    text = str(name).strip()
    if text in MEASURES:
        return MEASURES[text]
    if own := _CUSTOM.fullmatch(text):
        return measure(own["path"], float(own["c"]))
    if (family := _FAMILY.fullmatch(text)) and family[1] in FAMILIES:
        try:
            return FAMILIES[family[1]](float(family[2]))
        except ValueError as error:
            raise UserError(f"measure {text!r}: {family[2]!r} is not a finite number") from error
    if ":" in text:
        found = import_path(text, "measure")
        if isinstance(found, Measure):
            return found
        if not callable(found):
            raise UserError(f"measure {text!r} is a {type(found).__name__}; a function of the log-ratio is needed")
        return Measure(found, 1.0 if curvature is None else curvature)
    known = [*MEASURES, *(f"{family}(a)" for family in FAMILIES), "package.module:function"]
    raise UserError(f"unknown measure {text!r}; {did_you_mean(text, known)}")


def import_path(path: str, what: str) -> Any:
    """The object at ``package.module:name``."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # whatever a user's module does when it is imported
        raise UserError(f"{what} {path!r} cannot be imported: {error}; give it as 'package.module:name'") from error
    return found


def _finite(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{name}={value!r} is not a finite number")
    return float(value) + 0.0  # one spelling of zero
