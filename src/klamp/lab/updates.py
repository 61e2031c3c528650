"""Updates: what a spec does to an enumerable policy, in expectation or from samples, for many seeds at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from klamp.batch import Batch
from klamp.errors import UserError
from klamp.lab.worlds import World
from klamp.measures import MEASURES
from klamp.objective import Objective
from klamp.spec import Spec

_EXACT = {"exact_kl_old_new": "kl", "exact_kl_new_old": "kl_reverse", "exact_tv": "tv"}


@dataclass(frozen=True, eq=False)
class Rollout:
    """Responses of the old policy: ``index`` [S, M] into the world's responses, their ``share`` [S, M] of the mean.

    ``advantages`` [S, M]: normalised over each seed's own rewards; 0 where they are all equal.
    """

    index: Int[Tensor, "S M"]
    share: Float[Tensor, "S M"]
    advantages: Float[Tensor, "S M"]


def sampled(
    world: World, theta: Tensor, reward: Float[Tensor, "S N"], group: int, generator: torch.Generator
) -> Rollout:
    """``group`` responses per seed, drawn from the policy; GRPO's advantages (standard deviation with n - 1)."""
    index = torch.multinomial(world.response_logp(theta).exp(), group, replacement=True, generator=generator)
    own = reward.gather(1, index)
    centred = own - own.mean(1, keepdim=True)
    deviation = own.std(1, keepdim=True)
    advantages = torch.where(deviation > 0.0, centred / deviation.clamp(min=1e-300), 0.0)
    return Rollout(index, torch.full_like(own, 1.0 / group), advantages)


def expected(world: World, theta: Tensor, reward: Float[Tensor, "S N"]) -> Rollout:
    """Every response with its probability, and the advantage that an infinite group would have."""
    share = world.response_logp(theta).exp()
    centred = reward - (share * reward).sum(1, keepdim=True)
    deviation = (share * centred**2).sum(1, keepdim=True).sqrt()
    advantages = torch.where(deviation > 1e-12, centred / deviation.clamp(min=1e-300), 0.0)
    return Rollout(torch.arange(world.size).expand(theta.shape[0], -1), share, advantages)


class Updater:
    """Steps of one spec in one world. Raises UserError for a spec whose gradient is not one number per token."""

    def __init__(self, world: World, spec: Spec, *, natural: bool = False) -> None:
        if "moves_unsampled" in spec.traits:
            raise UserError(
                f"{spec} moves tokens that were not sampled (an entropy bonus); the lab takes specs without"
            )
        if any(radius for guard in spec.guards for radius in guard.region.moves if hasattr(radius, "adapt")):
            raise UserError(f"{spec} adapts a radius to a whole run; give the lab a fixed radius or a schedule")
        self.world, self.spec, self.natural = world, spec, natural
        self.objective = Objective(spec, diagnostics=False)

    def step(self, theta: Tensor, old: Tensor, first: Tensor, rollout: Rollout, rate: float, number: int = 0) -> Tensor:
        """theta after one step of size ``rate`` along the gradient of the surrogate, mean over responses and tokens."""
        g = self.coefficients(theta, old, first, rollout, number)
        weight = g * rollout.share.unsqueeze(-1) / self.world.horizon
        spread = weight.new_zeros(theta.shape[0], self.world.size, self.world.horizon)
        index = rollout.index.unsqueeze(-1).expand_as(weight)
        return theta + rate * self.world.ascent(theta, spread.scatter_add(1, index, weight), self.natural)

    def coefficients(self, theta: Tensor, old: Tensor, first: Tensor, rollout: Rollout, number: int = 0) -> Tensor:
        """d J / d log pi of each token [S, M, T], penalties included; the sampler is the old policy, the reference the first."""
        fields = self._fields(theta, old, first, rollout)
        state = self.objective.init() | ({"step": float(number)} if self.spec.counts_steps else {})
        seeds = theta.shape[0]
        apart = range(seeds) if self.spec.asks_step else [slice(None)]  # a step's statistic is of one seed
        found = []
        for place in apart:
            mine = {name: value[place].reshape(-1, *value.shape[2:]) for name, value in fields.items()}
            whole = {name: mine.pop(name) for name in list(mine) if name.startswith("exact_")}
            out = self.objective(Batch(**mine, divergences=whole, validate=False), state=state)
            found.append(out.grad_policy - out.grad_penalty)
        return torch.cat(found).reshape(seeds, -1, self.world.horizon).double()

    def _fields(self, theta: Tensor, old: Tensor, first: Tensor, rollout: Rollout) -> dict[str, Any]:
        """The fields of a batch, [S, M, T] or [S, M]."""
        world, index = self.world, rollout.index
        shape = (*index.shape, world.horizon)

        def take(values: Tensor) -> Tensor:
            return values.gather(1, index.unsqueeze(-1).expand(shape))

        def at_states(values: Tensor) -> Tensor:
            return take(values[:, world.states])

        sampler = take(world.token_logp(old))
        fields: dict[str, Any] = {
            "logp_new": take(world.token_logp(theta)), "logp_old": sampler, "logp_rollout": sampler,
            "logp_ref": take(world.token_logp(first)), "advantages": rollout.advantages,
            "mask": torch.ones(shape, dtype=torch.bool), "entropy": at_states(world.state_entropy(theta)),
            "group": torch.arange(shape[0]).unsqueeze(1).expand(index.shape),
            "row": torch.arange(index.numel()).reshape(index.shape), "segment": torch.arange(shape[2]).expand(shape),
        }  # fmt: skip
        for need in sorted(self.spec.needs):
            name = need.removeprefix("divergences[").removesuffix("]")
            if name in _EXACT:
                fields[name] = at_states(divergence(world, theta, old, _EXACT[name]))
        return fields


def divergence(world: World, theta: Tensor, old: Tensor, kind: str) -> Float[Tensor, "S K"]:
    """KL(old||new), KL(new||old) (``kl_reverse``) or TV of the token in every state, exactly."""
    new, before = world.logp(theta), world.logp(old)
    p, x = before.exp(), new - before
    found: Tensor = {"kl": MEASURES["k3"], "kl_reverse": MEASURES["k3_reverse"], "tv": MEASURES["tv"]}[kind].divergence(
        x
    )
    return (p * found).sum(-1)
