"""Klamp's side of a comparison, and how two sides are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import klamp
from conformance.cases import Arrays

Result = tuple[float, np.ndarray]


def batch(arrays: Arrays, **options: Any) -> tuple[klamp.Batch, torch.Tensor]:
    """A batch of these arrays, and its log-probs under the new policy as a leaf (its entropy is another)."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
    new = tensors["new"].clone().requires_grad_(True)
    tensors["entropy"] = tensors["entropy"].clone().requires_grad_(True)
    roles = {f"logp_{role}": tensors[role] for role in ("old", "rollout", "ref")}
    rest = {name: tensors[name] for name in ("entropy", "group", "row", "reward", "segment")}
    # Whole distributions are no case's: any number per token does that is the same however the step is cut.
    whole = dict.fromkeys(klamp.conditions.WHOLE, 0.5 * (tensors["new"] - tensors["old"]) ** 2)
    made = klamp.Batch(
        new, mask=tensors["mask"], advantages=tensors["advantages"], divergences=whole, **roles, **rest, **options
    )
    return made, new


def ours(spec: str, arrays: Arrays, **options: Any) -> Result:
    """Klamp's loss of one whole step, and its gradient in the new log-probs."""
    made, new = batch(arrays, **options)
    out = klamp.Objective(spec)(made)
    out.loss.backward()
    return float(out.loss.detach()), gradient(new, made.entropy)


def ours_cut(spec: str | klamp.Spec, arrays: Arrays, pieces: int) -> Result:
    """The same step cut into micro-batches: counts and statistics are added up first."""
    objective = klamp.Objective(spec)
    micro = [batch(piece) for piece in cut(arrays, pieces)]
    state = objective.init()
    stats = sum(objective.stats(made, state) for made, _ in micro)
    loss = 0.0
    for made, _ in micro:
        out = objective(made, stats, state)
        out.loss.backward()
        loss += float(out.loss.detach())
    return loss, np.concatenate([gradient(new) for _, new in micro])


def cut(arrays: Arrays, pieces: int) -> list[Arrays]:
    return [
        {name: value[rows] for name, value in arrays.items()}
        for rows in np.array_split(np.arange(len(arrays["mask"])), pieces)
    ]


def gradient(*leaves: torch.Tensor | None) -> np.ndarray:
    """The gradients of these leaves, one below the other, without those that the loss does not reach."""
    return np.concatenate([leaf.grad.numpy() for leaf in leaves if leaf is not None and leaf.grad is not None])


def apart(one: Result, other: Result) -> float:
    """The larger of the relative differences of loss and gradient (greatest element against greatest element)."""
    loss = abs(one[0] - other[0]) / max(abs(other[0]), 1e-2)
    scale = np.abs(other[1]).max()
    gradient = np.abs(one[1] - other[1]).max() / scale if scale > 0 else float(np.abs(one[1]).max() > 0)
    return float(max(loss, gradient))


def relative(one: np.ndarray, other: np.ndarray) -> float:
    """The relative L2 distance of two gradients."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))
