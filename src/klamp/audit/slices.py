"""Slices: what the counts can be taken by. Each maps the tokens of a block to codes 0, 1, ..., with a label to each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from klamp.audit.tokens import Array
from klamp.metrics import PROBABILITY_EDGES

ADVANTAGE_EDGES = (-2.0, -1.0, -0.5, -0.1, 0.0, 0.1, 0.5, 1.0, 2.0)
ENTROPY_EDGES = (0.01, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # nats
POSITIONS = 25  # bins of doubling width
SLICES = ("step", "side", "old_prob", "position", "advantage", "token", "entropy")


@dataclass(frozen=True)
class Dimension:
    """``codes`` of tokens from the block's columns by name; ``needs``: the column that a log may lack."""

    labels: tuple[str, ...]
    codes: Callable[[Mapping[str, Array]], Array]
    needs: str | None = None


def _above(values: Array, edges: Sequence[float]) -> Array:
    """How many edges lie below each value, by comparisons: few edges make this faster than a search."""
    found = np.zeros(len(values), np.uint8)
    for edge in edges:
        found += values > np.float32(edge)
    return found.astype(np.int64)


def _advantage(block: Mapping[str, Array]) -> Array:
    """Below -2, (-2, -1], ..., (-0.1, 0), 0, (0, 0.1], ...: the sign is never mixed."""
    value = block["advantage"]
    return _above(value, ADVANTAGE_EDGES) + (value >= 0)


def _position(block: Mapping[str, Array]) -> Array:
    place = (block["position"] + 1).astype(np.float32)
    found: Array = (place.view(np.uint32) >> 23).astype(np.int64) - 127
    return found


def _between(edges: Sequence[float], first: str, unit: str = "") -> list[str]:
    pairs = itertools.pairwise(edges)
    return [
        f"{first} {edges[0]:g}{unit}",
        *(f"{low:g} to {high:g}{unit}" for low, high in pairs),
        f"above {edges[-1]:g}{unit}",
    ]


def _advantage_labels() -> tuple[str, ...]:
    middle = ADVANTAGE_EDGES.index(0.0)
    found = _between(ADVANTAGE_EDGES, "up to")
    return (*found[: middle + 1], "0", *found[middle + 1 :])


DIMENSIONS: dict[str, Dimension] = {
    "side": Dimension(("w < 1", "w = 1", "w > 1"), lambda block: 1 + np.sign(block["x"]).astype(np.int64)),
    "old_prob": Dimension(
        tuple(f"{low:g} to {high:g}" for low, high in itertools.pairwise(PROBABILITY_EDGES)),
        lambda block: _above(block["logp_old"], [math.log(edge) for edge in PROBABILITY_EDGES[1:-1]]),
    ),
    "position": Dimension(
        tuple(f"{2**k - 1}" if k == 0 else f"{2**k - 1} to {2 ** (k + 1) - 2}" for k in range(POSITIONS)),
        lambda block: np.minimum(_position(block), POSITIONS - 1),
    ),
    "advantage": Dimension(_advantage_labels(), _advantage),
    "entropy": Dimension(
        tuple(_between(ENTROPY_EDGES, "up to", " nats")), lambda block: _above(block["entropy"], ENTROPY_EDGES), "entropy"
    ),
}  # fmt: skip
