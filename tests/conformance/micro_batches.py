"""Losses that read a statistic of the step: how far 2, 4 and 8 micro-batches are from one, in the originals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CASE = "shuffled-0"  # 64 responses, 1,131 tokens
PIECES = (2, 4, 8)


@dataclass(frozen=True)
class Cut:
    """``apart``: the relative L2 distance of the original's gradient over 2, 4 and 8 micro-batches from that of one."""

    framework: str
    mode: str
    call: Mapping[str, Any]
    spec: str
    apart: tuple[float, float, float]
    reason: str


_WINDOW = {"clip_cov_lb": 0.2, "clip_cov_ub": 1.5}
CUTS: tuple[Cut, ...] = (
    Cut(
        "verl", "clip_cov, a share of 1: no draw", {"loss": "clip_cov", "policy_loss": {**_WINDOW, "clip_cov_ratio": 1.0}},
        "clip_cov(share=1.0, low=0.2, high=1.5)", (0.284, 0.291, 0.3), "the means of the covariance",
    ),
    Cut(
        "verl", "clip_cov, a share of 0.05", {"loss": "clip_cov", "policy_loss": {**_WINDOW, "clip_cov_ratio": 0.05}},
        "clip_cov(share=0.05, low=0.2, high=1.5)", (0.32, 0.32, 0.289), "the means, and the draw",
    ),
    Cut(
        "verl", "clip_cov, the default", {"loss": "clip_cov"}, "clip_cov()", (0.0738, 0.111, 0.144),
        "the draw: at least one token of each micro-batch",
    ),
    Cut(
        "verl", "kl_cov, a share of 0.2",
        {"loss": "kl_cov", "policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}}, "kl_cov(share=0.2, coefficient=0.5)",
        (0.109, 0.124, 0.145), "the means, and which tokens are the largest",
    ),
    Cut(
        "verl", "kl_cov, the default", {"loss": "kl_cov"}, "kl_cov(coefficient=0.1)", (0.00279, 0.00483, 0.00738),
        "the selection: at least one token of each micro-batch",
    ),
    Cut(
        "verl", "bypass_mode, normalised weights",
        {"loss": "bypass_mode", "bypass": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True}},
        "factor(transform=normalized(transform=cap(high=2.0))) + token_mean()", (0.0118, 0.0165, 0.0172), "the mean of the weights",
    ),
    Cut(
        "verl", "geo_mean", {"loss": "geo_mean", "config": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}}, "gmpo()",
        (1.0, 3.0, 7.0), "each micro-batch is a mean of its own, and they are added: 2, 4, 8 times the gradient",
    ),
    Cut(
        "trl", "top_entropy_quantile=0.3", {"loss_type": "grpo", "top_entropy_quantile": 0.3},
        "grpo() + guard(region='nowhere', gate=entropy_below(quantile=0.7))", (0.0694, 0.374, 0.385), "the quantile",
    ),
)  # fmt: skip
