"""What one word adds to a divergence, and to its gradient: value t_v with D = sum t_v, slope s_v = q_v dD/dq_v.

dD/dz_v = s_v - q_v sum_c s_c. Every t_v is >= 0 up to rounding and small where q_v is near p_v, so that an error of either
log-normaliser enters in second order only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from klamp.whole import Kind

_NEAR = 0.05  # of a = 0 and a = 1, where the closed form divides by a small a(a - 1)


@dataclass(frozen=True)
class Pair:
    """Log-probs of the same words under both policies, finite (a probability of 0 as a very negative number)."""

    logq: Tensor
    logp: Tensor

    @cached_property
    def q(self) -> Tensor:
        return self.logq.exp()

    @cached_property
    def p(self) -> Tensor:
        return self.logp.exp()

    @cached_property
    def x(self) -> Tensor:
        return self.logq - self.logp

    @cached_property
    def roots(self) -> tuple[Tensor, Tensor]:
        return (0.5 * self.logq).exp(), (0.5 * self.logp).exp()

    @cached_property
    def to_middle(self) -> tuple[Tensor, Tensor]:
        """log(2q/(p+q)) and log(2p/(p+q)), each with its own digits, however large x is."""
        middle = _middle(self.q, self.p)
        return _log_ratio(self.q, middle), _log_ratio(self.p, middle)

    @cached_property
    def up_to_middle(self) -> Tensor:
        """log(2q/(p+q)) alone."""
        if "to_middle" in vars(self):
            return self.to_middle[0]
        return _log_ratio(self.q, _middle(self.q, self.p))

    def tilted(self, a: float) -> Tensor:
        """p^(1-a) q^a."""
        return (self.logp + a * self.x).exp()


def _middle(q: Tensor, p: Tensor) -> Tensor:
    return torch.add(q, p).mul_(0.5).clamp_(min=torch.finfo(q.dtype).tiny)


def _log_ratio(one: Tensor, middle: Tensor) -> Tensor:
    """log(one / middle), finite: where one is 0 so is its product with it."""
    return torch.div(one, middle).clamp_(min=torch.finfo(one.dtype).tiny).log_()


def value(kind: Kind, pair: Pair) -> Tensor:
    """t_v of a divergence; shape of the pair."""
    if kind.name == "tv":
        return torch.sub(pair.q, pair.p).abs_().mul_(0.5)
    if kind.name == "js":
        up, down = pair.to_middle
        return torch.mul(pair.q, up).addcmul_(pair.p, down).mul_(0.5)
    a = _power_of(kind)
    if a == 0.0:
        return _scaled(torch.sub(pair.q, pair.p).addcmul_(pair.p, pair.x, value=-1.0), kind)
    if a == 1.0:
        return _scaled(torch.sub(pair.p, pair.q).addcmul_(pair.q, pair.x), kind)
    if a == 0.5:
        up, down = pair.roots
        return 2.0 * kind.scale * (up - down) ** 2
    tilted = pair.tilted(a)
    if not singular(kind):
        return kind.scale * (tilted - pair.p - a * (pair.q - pair.p)) / (a * (a - 1.0))
    if abs(a) < _NEAR:
        return kind.scale * (pair.q - pair.p - _growth(pair.p, tilted, pair.x, a)) / (1.0 - a)
    return kind.scale * (pair.p - pair.q - _growth(pair.q, tilted, -pair.x, 1.0 - a)) / a  # f_a(w) = w f_(1-a)(1/w)


def slope(kind: Kind, pair: Pair) -> Tensor:
    """s_v of a divergence; shape of the pair."""
    if kind.name == "tv":
        return pair.x.sign().mul_(pair.q).mul_(0.5)
    if kind.name == "js":
        return torch.mul(pair.q, pair.up_to_middle).mul_(0.5)
    a = _power_of(kind)
    if a == 0.0:
        return _scaled(torch.sub(pair.q, pair.p), kind)
    if a == 1.0:
        return _scaled(torch.mul(pair.q, pair.x), kind)
    if a == 0.5:
        up, down = pair.roots
        return 2.0 * kind.scale * up * (up - down)
    tilted = pair.tilted(a)
    if abs(a - 1.0) < _NEAR:
        return kind.scale * _growth(pair.q, tilted, pair.x, a - 1.0)
    return kind.scale * (tilted - pair.q) / (a - 1.0)


def _growth(base: Tensor, tilted: Tensor, x: Tensor, b: float) -> Tensor:
    """base (e^(b x) - 1) / b for a small b; ``tilted`` = base e^(b x)."""
    y = b * x
    return torch.where(y.abs() < 0.5, base * y.clamp(-0.5, 0.5).expm1() / b, (tilted - base) / b)


def _scaled(terms: Tensor, kind: Kind) -> Tensor:
    return terms if kind.scale == 1.0 else terms.mul_(kind.scale)


def singular(kind: Kind) -> bool:
    """Whether the closed form of the power family would lose digits at this a."""
    return kind.a is not None and kind.a not in (0.0, 1.0) and min(abs(kind.a), abs(kind.a - 1.0)) < _NEAR


def _power_of(kind: Kind) -> float:
    assert kind.a is not None
    return kind.a
