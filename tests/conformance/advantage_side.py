"""Klamp's advantages for a row, and the same with a rounding of verl's, which shows what a difference is."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from conformance.cases import Arrays
from klamp.advantages import Estimator, estimator


def advantages(spec: str, arrays: Arrays) -> np.ndarray:
    """[B, T], 0 where masked."""
    return _values(_estimator(spec), arrays)


def alone_in_float32(spec: str, arrays: Arrays) -> np.ndarray:
    """The divisor of a lone response is 1 + 1e-6 in float32."""
    lone = np.bincount(arrays["group"])[arrays["group"]] == 1
    scale = np.where(lone, (1.0 + 1e-6) / float(np.float32(1.0) + np.float32(1e-6)), 1.0)
    return advantages(spec, arrays) * scale[:, None]


def group_in_float32(spec: str, arrays: Arrays) -> np.ndarray:
    """Mean and standard deviation of each group in float32."""
    reward, group = arrays["reward"].astype(np.float32), arrays["group"]
    mean = np.array([reward[group == g].sum(dtype=np.float32) / np.float32((group == g).sum()) for g in range(2)])
    square = (reward - mean[group]) ** 2
    var = np.array([square[group == g].sum(dtype=np.float32) / np.float32((group == g).sum() - 1) for g in range(2)])
    divisor = torch.from_numpy(np.sqrt(var)) + 1e-6
    values = (arrays["reward"] - mean[group]) / divisor.numpy()[group]
    return np.where(arrays["mask"], values[:, None], 0.0)


def share_in_float32(spec: str, arrays: Arrays) -> np.ndarray:
    """Rows over rewards that are not 0, in float32."""
    rows, some = len(arrays["reward"]), np.count_nonzero(arrays["reward"])
    return advantages(spec, arrays) * float(np.float32(rows) / np.float32(some)) / (rows / some)


def bessel_in_float32(spec: str, arrays: Arrays) -> np.ndarray:
    """The whitening over tokens, with n / (n - 1) in float32."""
    values, mask = _values(replace(_estimator(spec), whiten=None), arrays), arrays["mask"]
    n = mask.sum()
    mean = values[mask].mean()
    var = ((values[mask] - mean) ** 2).mean() * float(np.float32(n) / np.float32(n - 1))
    return np.where(mask, (values - mean) / np.sqrt(var + 1e-8), 0.0)


def _estimator(spec: str) -> Estimator:
    call = ast.parse(spec, mode="eval").body
    assert isinstance(call, ast.Call)
    return estimator(
        ast.literal_eval(call.args[0]), **{str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    )


def _values(made: Estimator, arrays: Arrays) -> np.ndarray:
    mask, rewards = torch.from_numpy(arrays["mask"]), torch.from_numpy(arrays["reward"])
    rewards = rewards.unsqueeze(1) if made.components == "each" else rewards
    values = made(rewards, torch.from_numpy(arrays["group"]), mask=mask).values
    values = values.unsqueeze(1) if values.ndim == 1 else values
    return torch.where(mask, values, 0.0).numpy()


ROUNDED: dict[str, Callable[[str, Arrays], np.ndarray]] = {
    found.__name__: found for found in (alone_in_float32, group_in_float32, share_in_float32, bessel_in_float32)
}
