"""Binary divergences: of the two-way split {this token, any other}, from the token's log-probs under both policies.

With p = pi_denominator(a), q = p e^x: TV = |q - p|; KL_bin(old||new) = p k3(w) + (1-p) k3(w_rest), w_rest = (1-q)/(1-p),
which never cancels (both terms are >= 0); KL_bin(new||old) = q k3(1/w) + (1-q) k3(1/w_rest). In natural units. Unlike a
measure of w the region depends on p: a rare token may move far, a likely one may not. It is a lower bound of the
divergence over the vocabulary (data processing). Source: Qi et al. 2026, DPPO, arXiv 2602.04879.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from klamp.errors import UserError, did_you_mean
from klamp.measures import MEASURES, namespace
from klamp.solver import crossing, log_of

Array = Any

BINARY = {
    "binary_tv": "|q - p|",
    "binary_kl_old_new": "p log(p/q) + (1-p) log((1-p)/(1-q))",
    "binary_kl_new_old": "q log(q/p) + (1-q) log((1-q)/(1-p))",
}
_k3 = MEASURES["k3"].divergence


def binary_divergence(measure: str, x: Array, logp: Array) -> Array:
    """D of the split {token, rest}, NumPy or torch, from x = log(q/p) and log p, without cancellation.

    Raises UserError for an unknown measure.
    """
    if measure not in BINARY:
        raise UserError(f"unknown binary measure {measure!r}; {did_you_mean(measure, BINARY)}")
    xp = namespace(x)
    p, rest, far = xp.exp(logp), -xp.expm1(logp), x > 1.0
    # where(far): p may be 0 and e^x infinite while q = p e^x is an honest number
    change = xp.where(far, xp.exp(xp.where(far, logp + x, 0.0)) - p, p * xp.expm1(xp.where(far, 0.0, x)))
    if measure == "binary_tv":
        return abs(change)
    some = rest > 0.0
    share = xp.where(some, change / xp.where(some, rest, 1.0), 0.0)
    near = abs(share) < 0.5
    left = -xp.expm1(xp.where(logp + x < 0.0, logp + x, 0.0))  # 1 - q
    ratio = xp.where(some, left / xp.where(some, rest, 1.0), 1.0)
    x_rest = xp.where(near, xp.log1p(xp.where(near, -share, 0.0)), _log(xp, xp.where(near, 1.0, ratio)))
    if measure == "binary_kl_old_new":
        own = xp.where(far, change - p * x, p * _k3(xp.where(far, 0.0, x)))
        finite = some & (x_rest > -math.inf)
        other = rest * _k3(xp.where(finite, x_rest, 0.0))
        return own + xp.where(some & ~finite, math.inf, xp.where(some, other, left))
    q, down = p + change, x < -1.0
    own = xp.where(down, q * x - change, q * _k3(-xp.where(down, 0.0, x)))
    finite = some & (x_rest > -math.inf)
    mass = rest - change
    near_other = xp.where(near, mass, left) * _k3(-xp.where(finite, x_rest, 0.0))
    gone = xp.where(some, rest, 0.0)  # q = 1: what is left of (1-q) k3(1/w_rest) is 1 - p
    return own + xp.where(finite, near_other, xp.where(some, gone, xp.where(left > 0.0, math.inf, 0.0)))


def _log(xp: Any, value: Array) -> Array:
    some = value > 0.0
    return xp.where(some, xp.log(xp.where(some, value, 1.0)), -math.inf)


def binary_bounds(measure: str, p: float, radius: float) -> tuple[float, float]:
    """(log_low, log_high) of {x : D <= radius} at probability p of the token; -inf and inf where there is no bound.

    No w above 1/p exists, so a bound there is none. Raises UserError unless 0 < p < 1 and radius >= 0.
    """
    if not 0.0 < p < 1.0:
        raise UserError(f"p={p!r} must be a probability strictly between 0 and 1")
    if not radius >= 0.0:
        raise UserError(f"radius={radius!r} must be a number >= 0, in natural units")
    if radius == 0.0:
        return 0.0, 0.0
    if measure == "binary_tv":
        low = math.log1p(-radius / p) if radius < p else -math.inf
        return low, math.log1p(radius / p) if radius < 1.0 - p else math.inf
    logp = np.float64(math.log(p))

    def distance(x: float) -> float:
        with np.errstate(all="ignore"):
            return float(binary_divergence(measure, np.float64(x), logp))

    def excess(sign: float, t: float) -> float:
        value = distance(sign * t)
        return -math.inf if not value > 0.0 else log_of(value / radius)

    start = math.sqrt(2.0 * radius * (1.0 - p) / p)
    limits = {"binary_kl_old_new": (math.inf, math.inf), "binary_kl_new_old": (-math.log1p(-p), -math.log(p))}
    most_low, most_high = limits[measure]
    low = -math.inf if radius >= most_low else -crossing(lambda t: excess(-1.0, t), min(start, 1.0))
    edge = -math.log(p)
    high = math.inf if radius >= most_high else min(crossing(lambda t: excess(1.0, t), min(start, 0.5 * edge)), edge)
    return low, high
