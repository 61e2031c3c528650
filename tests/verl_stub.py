"""The little of verl that the bridge touches, written from its documentation: where verl is not installed.

The tests run the same against verl itself where it is. ``means`` are the definitions of its five modes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor

REGISTRY: dict[str, Callable[..., Any]] = {}


def register_policy_loss(name: str) -> Callable[[Any], Any]:
    def put(function: Any) -> Any:
        REGISTRY[name] = function
        return function

    return put


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    rows, lengths = (loss_mat * loss_mask).sum(1), loss_mask.sum(1)
    means: dict[str, Callable[[], Tensor]] = {
        "token-mean": lambda: rows.sum() / batch_num_tokens,
        "token-sum": lambda: rows.sum(),
        "seq-mean-token-sum": lambda: rows.sum() / global_batch_size,
        "seq-mean-token-sum-norm": lambda: rows.sum() / global_batch_size / loss_scale_factor,
        "seq-mean-token-mean": lambda: (rows / lengths.clamp(min=1)).sum() / global_batch_size,
    }
    return means[loss_agg_mode]() * dp_size


@dataclass
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    rollout_correction: Any = field(default_factory=lambda: {"rollout_is": "sequence", "rollout_is_threshold": 2.0})


@dataclass
class ActorConfig:
    policy_loss: Any
    clip_ratio_high: float = 0.2
    global_batch_info: dict[str, Any] = field(default_factory=dict)


def modules() -> dict[str, ModuleType]:
    """The stub as modules, to be put into ``sys.modules``."""
    names = (
        "verl",
        "verl.trainer",
        "verl.trainer.ppo",
        "verl.trainer.ppo.core_algos",
        "verl.workers",
        "verl.workers.config",
    )
    found = {name: ModuleType(name) for name in names}
    found["verl.trainer.ppo.core_algos"].__dict__.update(
        register_policy_loss=register_policy_loss, agg_loss=agg_loss, get_policy_loss_fn=REGISTRY.__getitem__
    )
    found["verl.workers.config"].__dict__.update(PolicyLossConfig=PolicyLossConfig, ActorConfig=ActorConfig)
    return found
