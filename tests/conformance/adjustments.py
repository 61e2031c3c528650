"""Named differences: the change of our batch that makes the two sides equal, which shows what the difference is.

An adjustment returns the changed batch and where its gradient counts, or None for everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conformance.cases import Arrays

Adjusted = tuple[Arrays, np.ndarray | None]


def lengths_plus_1e8(arrays: Arrays) -> Adjusted:
    """A response of n tokens weighs 1 / (n + 1e-8)."""
    n = arrays["mask"].sum(1)
    return arrays | {"advantages": arrays["advantages"] * n / (n + 1e-8)}, None


def old_within_20(arrays: Arrays) -> Adjusted:
    """The log-ratio is at most 20 away from 0; the new log-probs stay, for they carry the gradient."""
    return arrays | {"old": np.clip(arrays["old"], arrays["new"] - 20.0, arrays["new"] + 20.0)}, None


def mean_within_10(arrays: Arrays) -> Adjusted:
    """A response's mean log-ratio is at most 10, and has no gradient beyond."""
    mask = arrays["mask"]
    mean = ((arrays["new"] - arrays["old"]) * mask).sum(1) / mask.sum(1).clip(1)
    excess = np.maximum(mean - 10.0, 0.0)[:, None]
    return arrays | {"old": arrays["old"] + excess}, np.broadcast_to(excess == 0.0, mask.shape)


def k3_within_10(arrays: Arrays) -> Adjusted:
    """k3 of ref/new is at most 10, and has no gradient beyond."""
    log_ratio = arrays["ref"] - arrays["new"]
    beyond = np.expm1(log_ratio) - log_ratio > 10.0
    ten = 2.5
    for _ in range(20):  # e^y - 1 - y = 10
        ten -= (np.expm1(ten) - ten - 10.0) / np.expm1(ten)
    return arrays | {"ref": np.where(beyond, arrays["new"] + ten, arrays["ref"])}, ~beyond


def rollout_within_cap(arrays: Arrays) -> Adjusted:
    """No token's old/rollout is above 1.2."""
    return arrays | {"rollout": np.maximum(arrays["rollout"], arrays["old"] - np.log(1.2))}, None


def weights_within_1_3(arrays: Arrays) -> Adjusted:
    """No token's old/rollout is above 1.3, and 1e-10 is added to each."""
    weight = np.exp(arrays["old"] - arrays["rollout"]).clip(max=1.3) + 1e-10
    return arrays | {"rollout": arrays["old"] - np.log(weight)}, None


def rollout_is_old_where_missing(arrays: Arrays) -> Adjusted:
    return arrays | {"rollout": np.where(np.isnan(arrays["rollout"]), arrays["old"], arrays["rollout"])}, None


def padding_in_the_product(arrays: Arrays) -> Adjusted:
    """The sum over a response of log old/rollout includes its padding, here moved onto its first token."""
    padding = ((arrays["old"] - arrays["rollout"]) * ~arrays["mask"]).sum(1)
    rollout = arrays["rollout"].copy()
    rollout[:, 0] -= padding
    return arrays | {"rollout": rollout}, None


def half_the_weight(arrays: Arrays) -> Adjusted:
    """Twice as many tokens are divided by."""
    return arrays | {"advantages": 0.5 * arrays["advantages"]}, None


ADJUSTMENTS: dict[str, Callable[[Arrays], Adjusted]] = {
    found.__name__: found
    for found in (
        lengths_plus_1e8, old_within_20, mean_within_10, k3_within_10, rollout_within_cap, weights_within_1_3,
        rollout_is_old_where_missing,
        padding_in_the_product, half_the_weight,
    )
}  # fmt: skip
