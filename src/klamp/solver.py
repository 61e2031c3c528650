"""The solver: where an increasing function of one variable changes sign, over the whole range of doubles."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

MAX = sys.float_info.max
EPSILON = sys.float_info.epsilon


def crossing(excess: Callable[[float], float], start: float) -> float:
    """The x > 0 at which an increasing function changes sign, to about 2 ulp; inf if it never becomes positive.

    A bracket grown by repeated squaring, geometric bisection to a factor of 4, then Chandrupatla's method
    (1997): inverse quadratic interpolation where it is safe, bisection where it is not. At most about 60 calls.
    """
    low = high = min(max(start, sys.float_info.min), MAX / 4.0)  # an infinite start could not be divided
    f_low = f_high = excess(start)
    factor = 2.0
    while f_high < 0.0:
        if high == MAX:
            return math.inf
        low, f_low = high, f_high
        high = min(high * factor, MAX)
        factor = min(factor * factor, 1e154)
        f_high = excess(high)
    while f_low > 0.0 and low > 0.0:
        high, f_high = low, f_low
        low, factor = low / factor, min(factor * factor, 1e154)
        f_low = excess(low) if low > 0.0 else -math.inf
    while high > 4.0 * low and high > sys.float_info.min:
        middle = math.sqrt(max(low, sys.float_info.min)) * math.sqrt(high)
        value = excess(middle)
        if value > 0.0:
            high, f_high = middle, value
        else:
            low, f_low = middle, value
    return _chandrupatla(excess, low, f_low, high, f_high)


def _chandrupatla(excess: Callable[[float], float], a: float, fa: float, b: float, fb: float) -> float:
    x1, f1, x2, f2, t = b, fb, a, fa, 0.5
    if f1 == 0.0 or f2 == 0.0:
        return x1 if f1 == 0.0 else x2
    for _ in range(70):
        x = x1 + t * (x2 - x1)
        f = excess(x)
        if math.copysign(1.0, f) == math.copysign(1.0, f1):
            x3, f3 = x1, f1
        else:
            x3, f3, x2, f2 = x2, f2, x1, f1
        x1, f1 = x, f
        best, f_best = (x1, f1) if abs(f1) < abs(f2) else (x2, f2)
        t_least = 2.0 * EPSILON * abs(best) / abs(x2 - x1)
        if t_least > 0.5 or f_best == 0.0:
            break
        t = 0.5
        if math.isfinite(f1) and math.isfinite(f2) and math.isfinite(f3):
            xi, phi = (x1 - x2) / (x3 - x2), (f1 - f2) / (f3 - f2)
            if phi * phi < xi and (1.0 - phi) ** 2 < 1.0 - xi:
                t = f1 / (f2 - f1) * f3 / (f2 - f3) + (x3 - x1) / (x2 - x1) * f1 / (f3 - f1) * f2 / (f3 - f2)
        t = min(1.0 - t_least, max(t_least, t))
    return best


def log_of(value: float) -> float:
    return math.log(value) if 0.0 < value < math.inf else math.copysign(math.inf, value - 1.0)
