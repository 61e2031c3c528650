"""Exploration: what specs do to entropy, rare tokens and pass@k when a small policy is trained under them.

The same seeds, rollouts and rewards for every spec; differences to the first spec are paired by seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.errors import UserError, check_choice
from klamp.lab.updates import Updater, expected, sampled
from klamp.lab.worlds import World, bandit, chain, tree
from klamp.spec import Spec

RARITY = (0.01, 0.1)  # classes of tokens by their probability at the start: below, between, above
PASS_AT = (1, 4, 16)
WORLDS = ("bandit", "tree", "chain")


@dataclass(frozen=True)
class Scenario:
    """Which responses are correct, by the rank of their probability at the start (0 is the likeliest)."""

    name: str
    text: str
    first: int  # ranks first ... last are correct; -1: all the way
    last: int
    noise: bool = False


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("rare", "correct are all responses but the two likeliest", 2, -1),
        Scenario("dominant", "correct is the likeliest response", 0, 0),
        Scenario("noise", "rewards are coin flips, drawn again in every rollout", 0, 0, noise=True),
        Scenario("several", "correct are the second to fourth likeliest", 1, 3),
        Scenario("needle", "correct is the tenth likeliest response alone", 9, 9),
    )
}


_LIMITS = {"vocabulary": (2, 4096), "horizon": (1, 16), "seeds": (2, 100_000), "rollouts": (1, 10_000),
           "inner": (1, 10_000), "group": (0, 4096), "seed": (0, 2**31 - 1)}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """How a policy is trained: ``rollouts`` times ``inner`` steps on the same responses, each of size ``rate``.

    ``group``: responses per rollout; 0 takes the expectation. ``peak``: standard deviation of the logits at the start.
    """

    world: str = "bandit"
    vocabulary: int = 32
    horizon: int = 3
    seeds: int = 1500
    rollouts: int = 1
    inner: int = 24
    group: int = 16
    rate: float = 0.2
    peak: float = 3.0
    natural: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("world", self.world, WORLDS)
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise UserError(f"{name}={value!r} must be a whole number from {least} to {most}")
        if self.group == 1:
            raise UserError("group=1 has no mean to compare with: give 2 or more, or 0 for the expectation")
        for name in ("rate", "peak"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
                raise UserError(f"{name}={value!r} must be a finite number above 0")

    def build(self) -> World:
        if self.world == "bandit":
            return bandit(self.vocabulary)
        return (tree if self.world == "tree" else chain)(self.vocabulary, self.horizon)


def explore(specs: Sequence[Spec], scenario: str = "rare", setting: Setting | None = None) -> dict[str, Any]:
    """Final values of each spec and their paired differences to the first, mean and 95 % interval; JSON-ready."""
    setting = setting or Setting()
    if not specs:
        raise UserError("explore needs at least one spec")
    check_choice("scenario", scenario, tuple(SCENARIOS))
    runs = [simulate(spec, SCENARIOS[scenario], setting) for spec in specs]
    names = list(runs[0])
    return {
        "scenario": scenario,
        "meaning": SCENARIOS[scenario].text,
        "setting": {name: getattr(setting, name) for name in setting.__dataclass_fields__},
        "specs": [str(spec) for spec in specs],
        "start": {name: _interval(values[:, 0]) for name, values in runs[0].items()},
        "final": [{name: _interval(run[name][:, -1]) for name in names} for run in runs],
        "difference": [
            {name: _interval(run[name][:, -1] - runs[0][name][:, -1]) for name in names} for run in runs[1:]
        ],
        "course": [{name: run[name].mean(0).tolist() for name in names} for run in runs],
    }


def simulate(spec: Spec, scenario: Scenario, setting: Setting) -> dict[str, Float[Tensor, "S R"]]:
    """The course of one spec, [seeds, 1 + rollouts] per quantity: at the start and after each rollout."""
    world = setting.build()
    generator = torch.Generator().manual_seed(setting.seed)
    width = world.state_count * world.vocabulary
    theta = setting.peak * torch.randn((setting.seeds, width), generator=generator, dtype=torch.float64)
    first, updater = theta, Updater(world, spec, natural=setting.natural)
    start = world.response_logp(theta)
    correct = _correct(scenario, start)
    course = [_observe(world, theta, start, correct)]
    for rollout in range(setting.rollouts):
        reward = correct if not scenario.noise else _coins(correct, generator)
        data = (
            expected(world, theta, reward)
            if not setting.group
            else sampled(world, theta, reward, setting.group, generator)
        )
        old = theta
        for inner in range(setting.inner):
            theta = updater.step(theta, old, first, data, setting.rate, rollout * setting.inner + inner)
        course.append(_observe(world, theta, start, correct))
    return {name: torch.stack([point[name] for point in course], dim=1) for name in course[0]}


def _correct(scenario: Scenario, start: Tensor) -> Float[Tensor, "S N"]:
    """1 for correct responses, by their rank at the start."""
    last = start.shape[1] - 1 if scenario.last < 0 else scenario.last
    if last >= start.shape[1]:
        raise UserError(
            f"scenario {scenario.name!r} needs more than {scenario.last} responses; this world has {start.shape[1]}"
        )
    rank = start.argsort(dim=1, descending=True).argsort(dim=1)
    return ((rank >= scenario.first) & (rank <= last)).double()


def _coins(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, like.shape, generator=generator).double()


def _observe(world: World, theta: Tensor, start: Tensor, correct: Tensor) -> dict[str, Tensor]:
    """Entropy in nats, mass on correct responses, mass by rarity at the start, and the exact pass@k; [S] each."""
    q, before = world.response_logp(theta).exp(), start.exp()
    right = (q * correct).sum(1).clamp(0.0, 1.0)
    low, high = RARITY
    found = {"entropy": world.entropy(theta), "correct": right, "rare": (q * (before < low)).sum(1)}
    found |= {"middle": (q * ((before >= low) & (before < high))).sum(1), "likely": (q * (before >= high)).sum(1)}
    return found | {f"pass@{k}": -torch.expm1(k * torch.log1p(-right.clamp(max=1.0 - 1e-16))) for k in PASS_AT}


def _interval(values: Float[Tensor, "S"]) -> dict[str, float]:
    """Mean over seeds with its 95 % interval: the normal one, for there are many seeds."""
    mean = float(values.mean())
    half = 1.959963984540054 * float(values.std()) / math.sqrt(values.numel())
    return {"mean": mean, "low": mean - half, "high": mean + half}


def text(found: dict[str, Any]) -> str:
    """The result for a reader at a terminal."""
    setting = found["setting"]
    names = list(found["start"])
    how = f"{setting['group']} samples" if setting["group"] else "the expectation"
    lines = [
        f"{found['scenario']}: {found['meaning']}",
        f"{setting['world']} of {setting['vocabulary']} tokens, {setting['seeds']} seeds, {setting['rollouts']} x {setting['inner']} "
        f"steps of {setting['rate']:g} on {how}, {'natural' if setting['natural'] else 'vanilla'} gradient",
        "",
        f"{'':28}" + "".join(f"{name:>11}" for name in names),
        f"{'start':28}" + "".join(f"{found['start'][name]['mean']:>11.4f}" for name in names),
    ]
    for spec, final in zip(found["specs"], found["final"], strict=True):
        lines.append(f"{_short(spec):28}" + "".join(f"{final[name]['mean']:>11.4f}" for name in names))
    for spec, difference in zip(found["specs"][1:], found["difference"], strict=True):
        lines += ["", f"{spec} minus {found['specs'][0]}, paired by seed, mean and 95 % interval:"]
        for name in names:
            d = difference[name]
            sure = "" if d["low"] <= 0.0 <= d["high"] else "  higher" if d["mean"] > 0.0 else "  lower"
            lines.append(f"  {name:10} {d['mean']:+.3e}  [{d['low']:+.3e}, {d['high']:+.3e}]{sure}")
    return "\n".join(lines)


def _short(text_: str) -> str:
    return text_ if len(text_) <= 27 else text_[:24] + "..."
