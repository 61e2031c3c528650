"""Made batches, float64, by name: what both sides of a comparison are given. Numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
ROWS, WIDTH = 8, 7
CEILING = -0.02  # every log-prob stays below: probabilities of a binary divergence need room below 1


def make(name: str) -> Arrays:
    """The batch with this name: a kind, and a seed after a dash (``plain-0``)."""
    kind, _, seed = name.partition("-")
    return KINDS[kind](int(seed or 0))


def plain(seed: int, drift: float = 0.4, shortest: int = 1) -> Arrays:
    """Responses of 1 to 7 tokens; ratios between 0.3 and 3; two groups of four."""
    draw = np.random.default_rng(seed)
    shape = (ROWS, WIDTH)
    lengths = draw.integers(shortest, WIDTH + 1, (ROWS, 1))
    lengths[0], lengths[1] = WIDTH, shortest
    old = -3.0 * draw.random(shape) - 0.1
    move = {role: drift * draw.standard_normal(shape) for role in ("new", "rollout", "ref")}
    return {
        "mask": np.arange(WIDTH)[None] < lengths,
        "old": old,
        **{role: np.minimum(old + step, CEILING) for role, step in move.items()},
        "advantages": draw.standard_normal(ROWS),
        "entropy": 0.2 + 2.3 * draw.random(shape),
        "group": np.arange(ROWS) // 4,
        "row": np.arange(ROWS),
        "segment": np.tile(np.arange(WIDTH) // 3, (ROWS, 1)),
        "reward": np.round(draw.random(ROWS), 1),
    }


def wide(seed: int) -> Arrays:
    """Ratios between 0.05 and 20."""
    return plain(seed, drift=1.0)


def near(seed: int) -> Arrays:
    """Responses that drift by about 0.001 per token on average: where GSPO's bounds lie."""
    return plain(seed, drift=4e-3)


def empty(seed: int) -> Arrays:
    """One response without a token."""
    made = plain(seed)
    made["mask"][3] = False
    return made


def zero(seed: int) -> Arrays:
    """No advantage anywhere: what is left of a loss are its penalties."""
    return plain(seed) | {"advantages": np.zeros(ROWS)}


def some_zero(seed: int) -> Arrays:
    """Two tied responses: A = 0 exactly."""
    made = plain(seed)
    made["advantages"][[2, 5]] = 0.0
    return made


def far(seed: int) -> Arrays:
    """A few tokens more than 20 nats away, of either sign of the drift and of A, some of them unlikely under ``ref``."""
    made = plain(seed, shortest=3)
    made["advantages"] = np.where(np.arange(ROWS) % 2, -1.0, 1.0) * np.abs(made["advantages"])
    for row in (0, 3):
        made["old"][row, 1], made["new"][row, 1] = -25.0, -0.5
    for row in (2, 5):
        made["old"][row, 0], made["new"][row, 0] = -0.5, -25.0
    made["ref"][4, 1], made["new"][4, 1], made["old"][4, 1] = -0.3, -5.0, -4.8  # k3 of ref/new is above 100
    return made


def far_sequence(seed: int) -> Arrays:
    """A response whose mean log-ratio is 12, with A < 0, so that no clip hides it."""
    made = plain(seed)
    made["old"][0], made["new"][0], made["advantages"][0] = -13.0, -1.0, -0.7
    return made


def far_reference(seed: int) -> Arrays:
    """No advantage, and tokens that are unlikely next to the reference: k3 of ref/new is 70."""
    made = zero(seed)
    made["ref"][:3, 0], made["new"][:3, 0] = -0.4, -4.8
    return made


def likely(seed: int) -> Arrays:
    """Tokens of probability 0.997 that rose to 1 - 1e-14 with A > 0; the others hardly moved."""
    made = plain(seed, drift=0.02)
    made["advantages"][:3] = np.abs(made["advantages"][:3]) + 0.5
    made["old"][:3, 0], made["new"][:3, 0] = np.log(0.997), -1e-14
    return made


def untied(seed: int) -> Arrays:
    """Rewards that are all different."""
    return plain(seed) | {"reward": np.random.default_rng(seed).permutation(ROWS) / 7.0}


def alone(seed: int) -> Arrays:
    """Two prompts with one response each."""
    return plain(seed) | {"group": np.array([0, 0, 0, 1, 2, 2, 3, 3])}


def unscored(seed: int) -> Arrays:
    """Two tokens without a log-prob from the sampler."""
    made = plain(seed)
    made["rollout"][0, 2] = made["rollout"][4, 0] = np.nan
    return made


def bypass(seed: int) -> Arrays:
    """The sampler's log-probs stand in for the old policy's."""
    made = plain(seed)
    return made | {"old": made["rollout"]}


def large(seed: int) -> Arrays:
    """64 responses of up to 32 tokens in 16 groups: enough to be cut into 8 micro-batches."""
    draw = np.random.default_rng(seed)
    shape = (64, 32)
    old = -3.0 * draw.random(shape) - 0.1
    return {
        "mask": np.arange(32)[None] < draw.integers(4, 33, (64, 1)),
        "old": old,
        **{role: np.minimum(old + 0.2 * draw.standard_normal(shape), CEILING) for role in ("new", "rollout", "ref")},
        # sorted, so that the micro-batches differ in more than chance
        "advantages": np.sort(draw.standard_normal(64)),
        "entropy": 0.2 + 2.3 * draw.random(shape) * np.linspace(0.5, 1.5, 64)[:, None],
        "group": np.arange(64) // 4,
        "row": np.arange(64),
        "segment": np.tile(np.arange(32) // 8, (64, 1)),
        "reward": np.round(draw.random(64), 1),
    }


def shuffled(seed: int) -> Arrays:
    """``large`` with its responses in a random order, as a sampler deals them."""
    order = np.random.default_rng(seed).permutation(64)
    return {name: value[order] for name, value in large(seed).items()} | {"row": np.arange(64)}


KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        plain,
        wide,
        near,
        empty,
        zero,
        some_zero,
        far,
        far_sequence,
        far_reference,
        likely,
        untied,
        alone,
        unscored,
        bypass,
        large,
        shuffled,
    )
}
