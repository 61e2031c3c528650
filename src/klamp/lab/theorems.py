"""Statements: each a function that returns its two sides on given inputs, and where its hypotheses hold.

Notation: p the old policy, q the new one [S, V] (softmax of logits), w = q / p, A advantages [S, V] per action,
G(a) = sum_i g_i 1[a_i = a] / N the weight of each action in the update, H the entropy of q, Phi = q (log q + H),
Phi_bar = sum q Phi = Cov_q(q, log q) >= 0. All in float64; the derivations are in docs/theory.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from klamp.measures import MEASURES
from klamp.regions import Region, region
from klamp.solver import crossing


class Sides(NamedTuple):
    """Two sides of a statement per instance [S, ...], and where it applies: ``left = right``, or ``left <= right``."""

    left: Tensor
    right: Tensor
    applies: Bool[Tensor, "..."]


def _sides(left: Tensor, right: Tensor, applies: Tensor | None = None) -> Sides:
    right = right.expand(left.shape)
    return Sides(
        left, right, torch.ones_like(left, dtype=torch.bool) if applies is None else applies.expand(left.shape)
    )


# --- (a) constraint form = directional mask = ratio clip ------------------------------------------------------


def gradient_equivalence(
    x: Float[Tensor, "S"], advantages: Float[Tensor, "S"], inside: Bool[Tensor, "S"], constant: Float[Tensor, "S"]
) -> Sides:
    """d/dx min(w A, clip_C(w) A), clip_C(w) = w where C holds and a constant elsewhere = A w keep.

    keep = C | ~outward. Holds where the constant lies between 1 and w (an interval: anywhere in [low, high]); A w = 0
    ties are away. Theorem 2.
    """
    leaf = x.detach().clone().requires_grad_()
    w = leaf.exp()
    clipped = torch.where(inside, w, constant)
    (left,) = torch.autograd.grad(torch.minimum(w * advantages, clipped * advantages).sum(), leaf)
    outward = (advantages > 0) & (x > 0) | (advantages < 0) & (x < 0)
    right = torch.where(inside | ~outward, advantages * x.exp(), 0.0)
    between = (constant - 1.0) * (constant - x.exp()) <= 0.0
    return _sides(left, right, (inside | between) & (advantages != 0.0))


# --- intervals and the power family ---------------------------------------------------------------------------


def interval_bijection(log_low: Tensor, log_high: Tensor) -> Sides:
    """Every interval 0 < low < 1 < high is {power(a) <= radius} of one pair (a, radius); theorem 1. Bounds in log w."""
    found, applies = [], []
    for low, high in zip(log_low.tolist(), log_high.tolist(), strict=True):
        where = region(ratio_low=math.exp(low), ratio_high=math.exp(high)).coordinates
        applies.append(where is not None)
        again = None if where is None else region(f"power({where.a!r})", where.radius)
        found.append((math.nan, math.nan) if again is None else (again.log_low, again.log_high))
    mask = torch.tensor(applies).unsqueeze(1).expand(-1, 2)
    return _sides(torch.tensor(found, dtype=torch.float64), torch.stack([log_low, log_high], dim=1), mask)


# --- (b) logits, (c) entropy ----------------------------------------------------------------------------------


def entropy(logits: Float[Tensor, "S V"]) -> Float[Tensor, "S"]:
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def phi(logits: Float[Tensor, "S V"]) -> Float[Tensor, "S V"]:
    """q (log q + H): minus d H / d logit."""
    logp = logits.log_softmax(-1)
    return logp.exp() * (logp + entropy(logits).unsqueeze(-1))


def phi_bar(logits: Float[Tensor, "S V"]) -> Float[Tensor, "S"]:
    return (logits.softmax(-1) * phi(logits)).sum(-1)


def logit_step(
    logits: Float[Tensor, "S V"], weight: Float[Tensor, "S V"], rate: float, natural: bool = False
) -> Tensor:
    """The change of logits: rate (G - q sum G), or for the natural gradient rate G / q (up to a constant)."""
    q = logits.softmax(-1)
    return rate * (weight / q if natural else weight - q * weight.sum(-1, keepdim=True))


def logit_difference(logits: Tensor, one: Tensor, other: Tensor, rate: float) -> Sides:
    """Steps of two rules with weights G1, G2 differ by rate (d - q sum d), d = G1 - G2; by autograd on the left."""
    leaf = logits.detach().clone().requires_grad_()
    (left,) = torch.autograd.grad(rate * ((one - other) * leaf.log_softmax(-1)).sum(), leaf)
    return _sides(left, logit_step(logits, one - other, rate))


def entropy_slope(logits: Tensor, weight: Tensor, natural: bool = False) -> Sides:
    """d H / d rate at 0 = -sum_a G (Phi - Phi_bar), natural: -sum_a G (log q + H); by autograd on the left."""
    leaf = logits.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(entropy(leaf).sum(), leaf)
    left = (slope * logit_step(logits, weight, 1.0, natural)).sum(-1)
    logp = logits.log_softmax(-1)
    decisive = logp + entropy(logits).unsqueeze(-1) if natural else phi(logits) - phi_bar(logits).unsqueeze(-1)
    return _sides(left, -(weight * decisive).sum(-1))


def threshold(logits: Float[Tensor, "S V"]) -> Float[Tensor, "S"]:
    """p* >= e^-H, the one t with t (log t + H) = Phi_bar: pushing up a token raises H to first order iff q < p*."""
    found = []
    for h, mean in zip(entropy(logits).tolist(), phi_bar(logits).tolist(), strict=True):
        low = math.exp(-h)

        def excess(step: float, h: float = h, mean: float = mean, low: float = low) -> float:
            t = low + step
            return t * (math.log(t) + h) - mean

        found.append(low + crossing(excess, 0.1) if mean > 0.0 else low)
    return torch.tensor(found, dtype=torch.float64)


def sign_theorem(logits: Float[Tensor, "S V"], natural: bool = False) -> Sides:
    """sign of d H by a push on one token = sign(p* - q), natural: sign(e^-H - q). Theorem 3; ties are away."""
    q = logits.softmax(-1)
    limit = (-entropy(logits)).exp() if natural else threshold(logits)
    distance = limit.unsqueeze(-1) - q
    slope = -(q.log() + entropy(logits).unsqueeze(-1)) if natural else phi_bar(logits).unsqueeze(-1) - phi(logits)
    return _sides(torch.sign(slope), torch.sign(distance), (slope.abs() > 1e-12) & (distance.abs() > 1e-12))


def threshold_above(logits: Float[Tensor, "S V"]) -> Sides:
    """e^-H <= p*."""
    return _sides((-entropy(logits)).exp(), threshold(logits))


# --- KL3 against a symmetric clip -----------------------------------------------------------------------------


class Comparison(NamedTuple):
    """What two regions do to one policy: the weights G of each, and the entropies after the step [S]."""

    one: Tensor
    other: Tensor
    first_order: Tensor
    exact: Tensor


def weights_under(where: Region, logits: Tensor, old: Tensor, advantages: Tensor, share: Tensor) -> Tensor:
    """G = share w A keep, keep = inside | ~outward; share: the old probability of each action, or its sampled count / N."""
    x = logits.log_softmax(-1) - old.log_softmax(-1)
    above, below = (advantages > 0) & (x > where.log_high), (advantages < 0) & (x < where.log_low)
    return torch.where(above | below, 0.0, share * x.exp() * advantages)


def compare(
    one: Region, other: Region, logits: Tensor, old: Tensor, advantages: Tensor, share: Tensor, rate: float,
    natural: bool = False,
) -> Comparison:  # fmt: skip
    """Entropy after one step under ``one`` minus that under ``other``: to first order, and exactly."""
    a, b = (weights_under(where, logits, old, advantages, share) for where in (one, other))
    after = [entropy(logits + logit_step(logits, weight, rate, natural)) for weight in (a, b)]
    first = rate * (entropy_slope(logits, a, natural).right - entropy_slope(logits, b, natural).right)
    return Comparison(a, b, first, after[0] - after[1])


def kl3_against_symmetric(
    logits: Tensor,
    old: Tensor,
    advantages: Tensor,
    share: Tensor,
    rate: float,
    epsilon: float = 0.2,
    delta: float = 0.02,
) -> Sides:
    """First-order entropy, KL3 minus clip = rate sum_{K+ | D-} share w |A| (Phi_bar - Phi). Theorem 4.

    K+ = {A > 0, 1 + eps < w <= u}, D- = {A < 0, 1 - eps <= w < l}; for f(1+eps) <= delta <= f(1-eps), so that l >= 1 - eps
    and u >= 1 + eps.
    """
    kl3, clip = region("k3", delta), region(ratio_low=1.0 - epsilon, ratio_high=1.0 + epsilon)
    left = compare(kl3, clip, logits, old, advantages, share, rate).first_order
    right = rate * deciding_sum(kl3, clip, logits, old, advantages, share)
    return _sides(left, right, torch.tensor(kl3.low >= clip.low - 1e-12 and kl3.high >= clip.high - 1e-12))


def deciding_sum(one: Region, other: Region, logits: Tensor, old: Tensor, advantages: Tensor, share: Tensor) -> Tensor:
    """sum over K+ and D- of share w |A| (Phi_bar - Phi): its sign is that of the entropy difference, to first order."""
    x = logits.log_softmax(-1) - old.log_softmax(-1)
    up = (advantages > 0) & (x > other.log_high) & (x <= one.log_high)
    down = (advantages < 0) & (x >= other.log_low) & (x < one.log_low)
    size = torch.where(up | down, share * x.exp() * advantages.abs(), 0.0)
    return (size * (phi_bar(logits).unsqueeze(-1) - phi(logits))).sum(-1)


# --- (d) estimators -------------------------------------------------------------------------------------------


def kl(one: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(one) || softmax(other)), without cancellation: E_one k3(other / one)."""
    x = other.log_softmax(-1) - one.log_softmax(-1)
    found: Tensor = MEASURES["k3"].divergence(x)
    return (one.softmax(-1) * found).sum(-1)


def chi2(one: Tensor, other: Tensor) -> Tensor:
    """chi2(one || other) = E_other (one / other - 1)^2."""
    x = one.log_softmax(-1) - other.log_softmax(-1)
    return (other.softmax(-1) * torch.expm1(x) ** 2).sum(-1)


# estimator, sampled from, what it estimates without bias (new, old) -> [S]
MEANS = {
    ("k1", "old"): lambda new, old: kl(old, new),
    ("k3", "old"): lambda new, old: kl(old, new),
    ("k3_reverse", "old"): lambda new, old: kl(new, old),
    ("k3_flipped", "old"): lambda new, old: chi2(old, new) - kl(old, new),
    ("k1", "new"): lambda new, old: -kl(new, old),
    ("k3_flipped", "new"): lambda new, old: kl(new, old),
    ("k3", "new"): lambda new, old: chi2(new, old) - kl(new, old),
}
# estimator, sampled from, whose gradient by the new logits its own sample gradient has in expectation
GRADIENTS = {
    ("k1", "old"): lambda new, old: kl(old, new),
    ("k3", "old"): lambda new, old: kl(old, new),
    ("k3_reverse", "old"): lambda new, old: kl(new, old),
    ("k3_flipped", "old"): lambda new, old: chi2(old, new) - kl(old, new),
    ("k1", "new"): lambda new, old: 0.0 * kl(new, old),
    ("k2", "new"): lambda new, old: kl(new, old),
    ("k3", "new"): lambda new, old: 0.5 * chi2(new, old),
    ("k3_flipped", "new"): lambda new, old: kl(old, new),
}


def estimator_mean(name: str, law: str, new: Float[Tensor, "S V"], old: Float[Tensor, "S V"]) -> Sides:
    """E of the estimator under samples of ``law`` = the divergence that ``MEANS`` names."""
    x = new.log_softmax(-1) - old.log_softmax(-1)
    weight = (new if law == "new" else old).softmax(-1)
    return _sides((weight * MEASURES[name].divergence(x)).sum(-1), MEANS[name, law](new, old))


def estimator_gradient(name: str, law: str, new: Float[Tensor, "S V"], old: Float[Tensor, "S V"]) -> Sides:
    """E of the sample's gradient by the new logits, samples fixed = the gradient that ``GRADIENTS`` names, [S, V]."""
    leaf = new.detach().clone().requires_grad_()
    x = leaf.log_softmax(-1) - old.log_softmax(-1)
    weight = (new if law == "new" else old).softmax(-1).detach()
    slope = (weight * MEASURES[name].divergence_slope(x)).detach()
    (left,) = torch.autograd.grad((slope * x).sum(), leaf)
    again = new.detach().clone().requires_grad_()
    (right,) = torch.autograd.grad(GRADIENTS[name, law](again, old).sum(), again)
    return _sides(left, right)


def estimator_variance(name: str, shift: Float[Tensor, "S"], nodes: int = 120) -> Sides:
    """Variance under old of k1: mu^2, k2: mu^4 / 2 + mu^6 / 4, k3: e^(mu^2) - 1 - mu^2, for unit normals mu apart.

    The left side by Gauss-Hermite quadrature. k3 varies less than k1 iff mu^2 < 1.2564.
    """
    import numpy as np

    node, mass = (torch.from_numpy(values) for values in np.polynomial.hermite_e.hermegauss(nodes))
    mass = mass / mass.sum()
    mu = shift.unsqueeze(-1)
    value = MEASURES[name].divergence(mu * node - 0.5 * mu**2)
    mean = (mass * value).sum(-1, keepdim=True)
    left = (mass * (value - mean) ** 2).sum(-1)
    square = shift**2
    right = {"k1": square, "k2": square**2 / 2 + square**3 / 4, "k3": torch.expm1(square) - square}[name]
    return _sides(left, right)


# --- (e) from a radius per token to guarantees ----------------------------------------------------------------


def worst_case(where: Region, measure: str) -> float:
    """The largest E_old D(w) of a policy whose ratio stays inside for every action: ((u-1) D(l) + (1-l) D(u)) / (u-l)."""
    up, down = math.expm1(where.log_high), -math.expm1(where.log_low)
    low, high = (float(MEASURES[measure].divergence(bound)) for bound in (where.log_low, where.log_high))
    return (up * low + down * high) / (up + down)


def bounded_everywhere(where: Region, measure: str, new: Float[Tensor, "S V"], old: Float[Tensor, "S V"]) -> Sides:
    """E_old D(w) <= worst_case, if w is inside for every action."""
    x = new.log_softmax(-1) - old.log_softmax(-1)
    left = (old.softmax(-1) * MEASURES[measure].divergence(x)).sum(-1)
    inside = ((x >= where.log_low) & (x <= where.log_high)).all(-1)
    return _sides(left, torch.tensor(worst_case(where, measure), dtype=left.dtype), inside)


def two_points(where: Region) -> tuple[Tensor, Tensor]:
    """The policies (new, old) as logits [1, 2] that attain the worst case: mass (u-1)/(u-l) at l, the rest at u."""
    up, down = math.expm1(where.log_high), -math.expm1(where.log_low)
    old = torch.tensor([[up, down]], dtype=torch.float64) / (up + down)
    return old.log() + torch.tensor([[where.log_low, where.log_high]], dtype=torch.float64), old.log()


def mostly_inside(where: Region, new: Float[Tensor, "S V"], old: Float[Tensor, "S V"]) -> Sides:
    """TV <= (1 - eta)(1 - l) + eta, eta the old mass of the actions outside: all that a sampled constraint gives."""
    x = new.log_softmax(-1) - old.log_softmax(-1)
    p = old.softmax(-1)
    outside = (p * ((x < where.log_low) | (x > where.log_high))).sum(-1)
    left = 0.5 * (p * torch.expm1(x).abs()).sum(-1)
    return _sides(left, (1.0 - outside) * -math.expm1(where.log_low) + outside)
