"""Surrogates and detached weights of the factors, written as formulas of the ratio; coupled ones with loops.

A transform of a user's own is asked for its weight and value; whether one is the slope of the other is law 9's question.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from klamp.coupled import Contrast, Normalized
from klamp.factors import Factor
from klamp.guards import GATES, Guard
from klamp.testing.live import CELLS, LiveBatch
from klamp.testing.rulings import Ruling
from klamp.transforms import BySign, Cap, DivergenceGate, ExpAdvantage, Gamma, Identity, SoftGate

Pair = tuple[Guard, Ruling]


def surrogate(transform: Any, x: Tensor, a: Tensor) -> Tensor:
    """The value per unit of A, as a function of the log-ratio that autograd can follow."""
    if isinstance(transform, Identity):
        return x.exp()
    if isinstance(transform, SoftGate):
        tau = torch.where(a > 0, transform.tau_positive, torch.full_like(x, transform.tau_negative))
        return 4.0 / tau * (tau * (x.clamp(max=80.0).exp() - 1.0)).sigmoid()  # constant long before e^80
    value: Tensor = transform.evaluate(x, a)[1]
    return value


def weight(factor: Factor, x: Tensor, batch: LiveBatch) -> Tensor:
    """The detached multiplier of A, x being the factor's log-ratio."""
    transform: Any = factor.transform
    if isinstance(transform, Normalized):
        own = pointwise(transform.transform, x, batch.signal)
        cells = batch.cells("sequence" if factor.scope == "sequence" else "token")
        every = [float(own.reshape(-1)[cell[0]]) for cell in cells]
        return own / (sum(every) / len(every) if every else 1.0)
    if isinstance(transform, Contrast):
        return contrast(transform, x, batch)
    return pointwise(transform, x, batch.signal)


def pointwise(transform: Any, x: Tensor, a: Tensor) -> Tensor:
    """A weight that depends on one ratio and one advantage."""
    w = x.exp()
    if isinstance(transform, Cap):
        return w.clamp(transform.low, transform.high)
    if isinstance(transform, BySign):
        up, down = (
            torch.ones_like(x) if one is None else pointwise(one, x, a)
            for one in (transform.positive, transform.negative)
        )
        return torch.where(a > 0, up, down)
    if isinstance(transform, Gamma):
        up = _gamma(transform.k_positive, transform.lambda_positive, x)
        return torch.where(a > 0, up, _gamma(transform.k_negative, transform.lambda_negative, x))
    if isinstance(transform, DivergenceGate):
        y = (transform.measure.divergence(x) / transform.radius).clamp(min=0.0) ** transform.power
        faded = (x - y).exp() if transform.shape == "exp" else (x - (1.0 + y).log()).exp()
        outward = (a > 0) & (x > 0) | (a < 0) & (x < 0)
        return torch.where(outward | (not transform.outward), faded, w)
    if isinstance(transform, ExpAdvantage):
        return (a / transform.temperature).exp()
    found: Tensor = transform.evaluate(x, a)[0]
    return found


def _gamma(k: float, rate: float, x: Tensor) -> Tensor:
    """W^k e^(rate (1 - W)), W = e^x, as one exponential: W may overflow where the decay wins."""
    return (k * x - (rate * (x.exp() - 1.0) if rate else 0.0)).exp()


def contrast(transform: Contrast, x: Tensor, batch: LiveBatch) -> Tensor:
    """The slope of each group's log(1 + sum e^S of the wrong) + log(1 + sum e^-S of the right), by autograd.

    g is what makes the sum over a response of g / tokens that slope in S, so that A times the weight is -slope / tau.
    """
    total = torch.zeros(batch.mask.numel(), dtype=torch.float64)
    responses = batch.cells("sequence")
    for group in batch.cells("group"):
        own = [cell for cell in responses if cell[0] in group]
        sides = [math.fsum(batch.signal.reshape(-1)[cell].tolist()) for cell in own]
        if not (min(sides) < 0.0 < max(sides)):
            continue
        score = torch.stack([x.reshape(-1)[cell[0]] for cell in own]).detach() / transform.temperature
        score.requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for wrong in (True, False):
            chosen = [
                score[i] if wrong else -score[i] for i, side in enumerate(sides) if (side < 0.0) == wrong and side
            ]
            loss = loss + torch.logsumexp(torch.stack([torch.zeros((), dtype=torch.float64), *chosen]), dim=0)
        (slope,) = torch.autograd.grad(loss, score)
        for cell, pull in zip(own, slope.tolist(), strict=True):
            total[cell] = -pull / transform.temperature
    return torch.where(batch.live, total.reshape(batch.shape) / batch.signal, 0.0)


# --- log-ratios of factors ------------------------------------------------------------------------------------


def ratio_of(factor: Factor, batch: LiveBatch, absorbed: list[Pair], clip: bool) -> Tensor:
    """The factor's log-ratio over its scope; a clipped factor's, of token ratios that are held at the bounds first.

    ``clip``: held by min(w A, clip(w) A), as a pessimistic clip, rather than where the guards cut.
    """
    return batch.reduce(token_ratio(factor, batch, absorbed, clip), factor.scope, factor.reduce, factor.discount)


def token_ratio(factor: Factor, batch: LiveBatch, absorbed: list[Pair], clip: bool) -> Tensor:
    x, up = batch.log_ratio(factor.ratio), batch.signal > 0
    for guard, one in absorbed:
        low, high = (math.log(end) if end > 0.0 else -math.inf for end in (one.low, one.high))
        held = x.clamp(low, high)
        if clip and guard.gate == GATES["outward"]:
            x = torch.where(up, torch.minimum(x, held), torch.where(batch.live, torch.maximum(x, held), x))
        else:
            x = torch.where(one.cut, held, x)
    return x


def in_token_form(factor: Factor, x: Tensor, token: Tensor) -> Tensor:
    """The value of the scope's ratio, the gradient of the token's own."""
    return x.detach() + token - token.detach()


def honest(factor: Factor, batch: LiveBatch, *constant: Tensor) -> bool:
    """Whether the scope's ratio may be differentiated as it is: its tokens share A, cuts and weight in the mean."""
    if factor.scope not in CELLS or factor.reduce != "mean":
        return False
    cells = batch.cells(factor.scope)
    return all(len(set(value.reshape(-1)[cell].tolist())) <= 1 for value in constant for cell in cells)
