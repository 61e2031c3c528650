"""Bounds over a horizon: how far the surrogate of a whole response may be from the truth, on token trees.

J(pi) the expected terminal reward, L = sum_t E_{d_old} E_{new}[A] the surrogate at the old state distribution,
delta = max over states of KL(old||new), eps of TV, R the range of rewards, T the horizon.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.lab.theorems import Sides, _sides
from klamp.lab.updates import divergence
from klamp.lab.worlds import World


def gap(world: World, new: Tensor, old: Tensor, reward: Float[Tensor, "S N"]) -> Float[Tensor, "S"]:
    """|J(new) - J(old) - L|, exactly. The world must be a tree: a state is its whole prefix."""
    before, after = world.token_logp(old), world.token_logp(new)
    p, q = before.sum(-1).exp(), after.sum(-1).exp()
    truth = ((q - p) * reward).sum(-1)
    # L by sums over responses: E_old w_t A_t with A_t = Q_t - V_t reduces to sum_t E_old (w_t - 1) R
    surrogate = (p.unsqueeze(-1) * torch.expm1(after - before) * reward.unsqueeze(-1)).sum((-1, -2))
    return (truth - surrogate).abs()


def _range(reward: Tensor) -> Tensor:
    return reward.amax(-1) - reward.amin(-1)


def quadratic(world: World, new: Tensor, old: Tensor, reward: Tensor) -> Sides:
    """gap <= R T (T - 1) eps^2."""
    eps = divergence(world, new, old, "tv").amax(-1)
    return _sides(gap(world, new, old, reward), _range(reward) * world.horizon * (world.horizon - 1) * eps**2)


def three_halves(world: World, new: Tensor, old: Tensor, reward: Tensor) -> Sides:
    """gap <= 2/3 R delta T^(3/2), by Pinsker and the chain rule of KL."""
    delta = divergence(world, new, old, "kl").amax(-1)
    return _sides(gap(world, new, old, reward), 2.0 / 3.0 * _range(reward) * delta * world.horizon**1.5)


def chain_rule(world: World, new: Tensor, old: Tensor) -> Sides:
    """KL of the response = sum over its tokens of the expected KL of each."""
    before, after = world.token_logp(old), world.token_logp(new)
    p = before.sum(-1).exp()
    whole = (p * (before - after).sum(-1)).sum(-1)
    each = divergence(world, new, old, "kl")
    return _sides(whole, (world.visits(old) * each).sum(-1))


def return_difference(world: World, new: Tensor, old: Tensor, reward: Tensor) -> Sides:
    """|J(new) - J(old)| <= R sqrt(T delta / 2)."""
    p, q = world.response_logp(old).exp(), world.response_logp(new).exp()
    delta = divergence(world, new, old, "kl").amax(-1)
    left = ((q - p) * reward).sum(-1).abs()
    return _sides(left, _range(reward) * (0.5 * world.horizon * delta).sqrt())
