"""Divergences of whole distributions, in natural units: D = sum_v p_v f(q_v / p_v), p the old policy and q the new.

``exact_*`` sum over the vocabulary, ``topk_*`` over the buckets {sampled token}, the likeliest tokens, and one for all the
rest. Merging tokens cannot raise an f-divergence (data processing), so binary <= topk <= exact: a radius that the coarse
one exceeds the fine one exceeds too. Both need what no log-prob of a sampled token tells; ``klamp.kernels`` computes them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from klamp.errors import UserError, did_you_mean

EQUATIONS = {
    "kl_old_new": "sum p log(p/q)",
    "kl_new_old": "sum q log(q/p)",
    "tv": "sum |q - p| / 2",
    "js": "sum [q log(2q/(p+q)) + p log(2p/(p+q))] / 2",
    "hellinger2": "sum (sqrt(q) - sqrt(p))^2",
    "chi2_new_old": "sum (q - p)^2 / p",
    "chi2_old_new": "sum (q - p)^2 / q",
}
POWER = "(sum p^(1-a) q^a - 1) / (a(a - 1))"
TOP_K = 20  # tokens with a bucket of their own, besides the sampled one
_POWERS = {"kl_old_new": (0.0, 1.0), "kl_new_old": (1.0, 1.0), "hellinger2": (0.5, 0.5), "chi2_new_old": (2.0, 2.0),
           "chi2_old_new": (-1.0, 2.0)}  # fmt: skip
_FAMILY = re.compile(r"power\(\s*(?:a\s*=\s*)?([-+0-9.eE]+)\s*\)")
_WHERE = ("topk", "exact")


@dataclass(frozen=True)
class Kind:
    """One divergence: ``scale`` times the power family at ``a``; ``a`` is None for tv and js, which are outside it."""

    name: str
    a: float | None = None
    scale: float = 1.0


def kind(name: str) -> Kind:
    """The divergence with this name: one of ``EQUATIONS``, or ``power(a)`` for a finite a. Raises UserError."""
    text = name.strip()
    if text in EQUATIONS:
        return Kind(text, *_POWERS.get(text, (None, 1.0)))
    if found := _FAMILY.fullmatch(text):
        try:
            a = float(found[1]) + 0.0
        except ValueError:
            a = math.nan
        if math.isfinite(a):
            return Kind(f"power({a!r})", a)
    raise UserError(f"unknown divergence {name!r}; {did_you_mean(name, [*EQUATIONS, 'power(a)'])}")


def split(measure: str) -> tuple[str, Kind] | None:
    """('topk' or 'exact', the divergence) of a measure's name; None where it is not one of a whole distribution."""
    where, _, name = measure.partition("_")
    return (where, kind(name)) if where in _WHERE and name else None


NAMES = tuple(f"{where}_{name}" for where in _WHERE for name in [*EQUATIONS, "power(a)"])


def equation(measure: str) -> str | None:
    """What is summed, in words, or None."""
    found = split(measure)
    if found is None:
        return None
    where, which = found
    over = "the vocabulary" if where == "exact" else "{token}, the likeliest tokens, the rest"
    return f"{EQUATIONS.get(which.name, POWER)} over {over}"
