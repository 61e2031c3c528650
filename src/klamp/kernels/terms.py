"""What one word adds to a divergence, and to its gradient: value t_v with D = sum t_v, slope s_v = q_v dD/dq_v.

dD/dz_v = s_v - q_v sum_c s_c. Every t_v is >= 0 up to rounding and small where q_v is near p_v, so that an error of either
log-normaliser enters in second order only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from klamp.measures import power
from klamp.whole import Kind

_NEAR = 0.05  # of a = 0 and a = 1, where the closed form divides by a small a(a - 1)
_FAR = 80.0  # |log w| beyond which it has nothing to cancel


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
        apart = self.x.abs().neg_().exp_()
        near = math.log(2.0) - apart.add_(1.0).log_()  # a third of the time of softplus or log1p, exact to 1 ulp of log 2
        return near + self.x.clamp(max=0.0), near - self.x.clamp(min=0.0)

    def tilted(self, a: float) -> Tensor:
        """p^(1-a) q^a."""
        return (self.logp + a * self.x).exp()


def value(kind: Kind, pair: Pair) -> Tensor:
    """t_v of a divergence; shape of the pair."""
    if kind.name == "tv":
        return 0.5 * (pair.q - pair.p).abs()
    if kind.name == "js":
        up, down = pair.to_middle
        return 0.5 * (pair.q * up + pair.p * down)
    a = _power_of(kind)
    if a == 0.0:
        return kind.scale * (pair.q - pair.p - pair.p * pair.x)
    if a == 1.0:
        return kind.scale * (pair.q * pair.x - pair.q + pair.p)
    if a == 0.5:
        up, down = pair.roots
        return 2.0 * kind.scale * (up - down) ** 2
    plain = (pair.tilted(a) - pair.p - a * (pair.q - pair.p)) / (a * (a - 1.0))
    if not singular(kind):
        return kind.scale * plain
    x = pair.x.clamp(-_FAR, _FAR)
    return kind.scale * torch.where(pair.x.abs() < _FAR, pair.p * power(a).raw(x), plain)


def slope(kind: Kind, pair: Pair) -> Tensor:
    """s_v of a divergence; shape of the pair."""
    if kind.name == "tv":
        return 0.5 * pair.q * pair.x.sign()
    if kind.name == "js":
        return 0.5 * pair.q * pair.to_middle[0]
    a = _power_of(kind)
    if a == 0.0:
        return kind.scale * (pair.q - pair.p)
    if a == 1.0:
        return kind.scale * pair.q * pair.x
    if a == 0.5:
        up, down = pair.roots
        return 2.0 * kind.scale * up * (up - down)
    plain = (pair.tilted(a) - pair.q) / (a - 1.0)
    if not singular(kind):
        return kind.scale * plain
    x = pair.x.clamp(-_FAR, _FAR)
    return kind.scale * torch.where(pair.x.abs() < _FAR, pair.p * power(a).divergence_slope(x), plain)


def singular(kind: Kind) -> bool:
    """Whether the closed form of the power family would lose digits at this a."""
    return kind.a is not None and kind.a not in (0.0, 1.0) and min(abs(kind.a), abs(kind.a - 1.0)) < _NEAR


def _power_of(kind: Kind) -> float:
    assert kind.a is not None
    return kind.a
