"""A measure and gates as a third party writes them: outside the package, found by their import paths."""

from __future__ import annotations

from typing import Any

import numpy as np

from klamp import Gate, Measure


def cosh_gap(x: Any) -> Any:
    """f(w) = w + 1/w - 2 with f''(1) = 2: Neyman's measure in a user's own words, for NumPy and torch."""
    return (_exp(0.5 * x) - _exp(-0.5 * x)) ** 2


def quartic(x: Any) -> Any:
    """x^2/2 + x^4: unit curvature at w = 1, log-symmetric."""
    return 0.5 * x * x + x**4


def torch_only(x: Any) -> Any:
    """Written for tensors alone."""
    return 0.5 * x.square() + 0.25 * x.abs() ** 3


def shifted(x: Any) -> Any:
    return x * x + 0.1


def falling(x: Any) -> Any:
    return x * 1.0


def text(x: Any) -> str:
    return "not a number"


NAMED = Measure(quartic, name="custom_parts:NAMED")
NUMBER = 3.0


def surprised(log_ratio: Any, advantages: Any, batch: Any) -> Any:
    """Cuts only tokens that the old policy thought likely (p_old >= 1/2), whatever the sign of A."""
    return batch.logp_old.detach() >= -0.6931471805599453


def confident_up(log_ratio: Any, advantages: Any, batch: Any) -> Any:
    return (advantages > 0) & (log_ratio > 0) & (batch.entropy < 1.0)


CONFIDENT = Gate(confident_up, "custom_parts:CONFIDENT", frozenset({"entropy"}))


def _exp(x: Any) -> Any:
    return x.exp() if hasattr(x, "exp") else np.exp(x)
