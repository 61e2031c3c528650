"""Worlds: enumerable policies, where every expectation is a finite sum.

A world is a table of logits (states x vocabulary) and the list of all its responses, each a path of (state, token).
Bandits, token trees and Markov chains differ only in that list. Many seeds at once: parameters are [S, ...].
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from klamp.errors import UserError

LARGEST = 100_000  # responses: beyond that a world is not enumerable in practice


@dataclass(frozen=True, eq=False)
class World:
    """Every response as a path: ``states`` and ``tokens`` [N, T]; a state is a row of the logits [S, K, V].

    ``basis`` [P, K * V]: logits = theta @ basis, parameters shared by states and tokens; None: theta are the logits.
    """

    states: Int[Tensor, "N T"]
    tokens: Int[Tensor, "N T"]
    vocabulary: int
    basis: Float[Tensor, "P KV"] | None = None

    @property
    def size(self) -> int:
        """The number of responses."""
        return self.states.shape[0]

    @property
    def horizon(self) -> int:
        return self.states.shape[1]

    @property
    def state_count(self) -> int:
        return int(self.states.max()) + 1

    def logits(self, theta: Float[Tensor, "S P"]) -> Float[Tensor, "S K V"]:
        flat = theta if self.basis is None else theta @ self.basis
        return flat.reshape(theta.shape[0], self.state_count, self.vocabulary)

    def logp(self, theta: Float[Tensor, "S P"]) -> Float[Tensor, "S K V"]:
        """Log-probs of every token in every state."""
        return self.logits(theta).log_softmax(-1)

    def token_logp(self, theta: Float[Tensor, "S P"]) -> Float[Tensor, "S N T"]:
        """Log-probs of the tokens of every response."""
        return self.logp(theta)[:, self.states, self.tokens]

    def response_logp(self, theta: Float[Tensor, "S P"]) -> Float[Tensor, "S N"]:
        return self.token_logp(theta).sum(-1)

    def visits(self, theta: Float[Tensor, "S P"]) -> Float[Tensor, "S K"]:
        """Expected number of visits to each state in one response."""
        weight = self.response_logp(theta).exp().unsqueeze(-1).expand(-1, -1, self.horizon)
        found = weight.new_zeros(theta.shape[0], self.state_count)
        return found.index_add(1, self.states.reshape(-1), weight.reshape(theta.shape[0], -1))

    def entropy(self, theta: Float[Tensor, "S P"]) -> Float[Tensor, "S"]:
        """Entropy of the response in nats."""
        logp = self.response_logp(theta)
        return -(logp.exp() * logp).sum(-1)

    def state_entropy(self, theta: Float[Tensor, "S P"]) -> Float[Tensor, "S K"]:
        logp = self.logp(theta)
        return -(logp.exp() * logp).sum(-1)

    def fisher(self, theta: Float[Tensor, "S P"]) -> Float[Tensor, "S P P"]:
        """E[grad log pi grad log pi^T] over responses of theta: per state, visits x (diag q - q q^T)."""
        q = self.logp(theta).exp()
        block = torch.diag_embed(q) - q.unsqueeze(-1) * q.unsqueeze(-2)
        block = block * self.visits(theta)[..., None, None]
        s, k, v = q.shape
        whole = torch.zeros(s, k, v, k, v, dtype=q.dtype)
        index = torch.arange(k)
        whole[:, index, :, index, :] = block.transpose(0, 1)
        flat = whole.reshape(s, k * v, k * v)
        return flat if self.basis is None else self.basis @ flat @ self.basis.T

    def ascent(
        self, theta: Float[Tensor, "S P"], weight: Float[Tensor, "S N T"], natural: bool
    ) -> Float[Tensor, "S P"]:
        """The gradient of sum(weight log pi) by theta, times the pseudo-inverse of Fisher's matrix if ``natural``.

        Vanilla, per state: G - q sum G, G the weight of each token there. Natural: G / (visits q), up to a constant.
        """
        s = theta.shape[0]
        q = self.logp(theta).exp()
        place = (self.states * self.vocabulary + self.tokens).reshape(-1)
        g = q.new_zeros(s, q.shape[1] * q.shape[2]).index_add(1, place, weight.reshape(s, -1)).reshape(q.shape)
        if natural and self.basis is None:
            step = g / (self.visits(theta).unsqueeze(-1) * q)
            return (step - (q * step).sum(-1, keepdim=True)).reshape(s, -1)
        flat = (g - q * g.sum(-1, keepdim=True)).reshape(s, -1)
        found = flat if self.basis is None else flat @ self.basis.T
        if not natural:
            return found
        inverse: Tensor = torch.linalg.pinv(self.fisher(theta), hermitian=True)
        return (inverse @ found.unsqueeze(-1)).squeeze(-1)


def bandit(vocabulary: int, basis: Tensor | None = None) -> World:
    """One state, one token."""
    return World(
        torch.zeros(vocabulary, 1, dtype=torch.int64), torch.arange(vocabulary).unsqueeze(1), vocabulary, basis
    )


def tree(vocabulary: int, horizon: int, basis: Tensor | None = None) -> World:
    """Every prefix is a state of its own."""
    tokens = _every(vocabulary, horizon)
    place, states = torch.zeros(len(tokens), dtype=torch.int64), []
    for depth in range(horizon):
        states.append(place)
        place = place * vocabulary + tokens[:, depth] + 1  # the children of node i are i V + 1 ... i V + V
    return World(torch.stack(states, dim=1), tokens, vocabulary, basis)


def chain(vocabulary: int, horizon: int, basis: Tensor | None = None) -> World:
    """The state is the token before, one more for the start: positions share their parameters."""
    tokens = _every(vocabulary, horizon)
    start = torch.full((len(tokens), 1), vocabulary, dtype=torch.int64)
    return World(torch.cat([start, tokens[:, :-1]], dim=1), tokens, vocabulary, basis)


def _every(vocabulary: int, horizon: int) -> Tensor:
    if vocabulary < 2 or horizon < 1:
        raise UserError(f"a world needs at least 2 tokens and a horizon of 1; got {vocabulary} and {horizon}")
    if vocabulary**horizon > LARGEST:
        raise UserError(f"{vocabulary}^{horizon} responses are too many to enumerate; at most {LARGEST}")
    return torch.tensor(list(itertools.product(range(vocabulary), repeat=horizon)))


def low_rank(world: World, rank: int, generator: torch.Generator) -> World:
    """The same world with logits = theta @ basis, a random basis [rank, K V] of unit-variance logits."""
    width = world.state_count * world.vocabulary
    basis = torch.randn(rank, width, generator=generator, dtype=torch.float64) / rank**0.5
    return World(world.states, world.tokens, world.vocabulary, basis)
