"""Calls the losses of verl and Liger. Run by the python of their environment, which has no Klamp.

A request names what to call, how, and a file of float64 arrays; the answer is a file of arrays.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


RAY = ("ray", "ray.util", "ray.actor", "ray.experimental", "ray.util.collective", "ray.util.placement_group",
       "ray.util.scheduling_strategies", "ray.experimental.state", "ray.experimental.state.api")  # fmt: skip
DATASET = ("verl.utils.dataset", "verl.utils.dataset.dataset_utils")


class Anything(types.ModuleType):
    """A module that has every name: verl imports ray for its workers and data loaders; a loss needs none of them."""

    __version__ = "2.41.0"
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[:1].isupper() else lambda *a, **k: a[0] if a else None


def stub(names: tuple[str, ...]) -> None:
    sys.modules.update({name: Anything(name) for name in names})


def verl_actor() -> Any:
    """The module of the actor's whole loss."""
    stub(DATASET)
    from verl.workers.utils import losses

    return losses


# --- verl -----------------------------------------------------------------------------------------------------


def verl_loss(data: Tensors, call: dict[str, Any]) -> dict[str, Any]:
    """A registered loss over a step of ``micro`` micro-batches, with the counts of the whole step as the engine sets them."""
    from verl.trainer.ppo import core_algos

    data, weights = corrected(data, call)
    pieces = call.get("micro", 1)
    config = actor_config(data, call)
    torch.manual_seed(call.get("seed", 0))
    loss, gradients = 0.0, []
    for rows in torch.arange(len(data["mask"])).tensor_split(pieces):
        piece = {name: value[rows] for name, value in data.items()}
        new = piece["new"].clone().requires_grad_(True)
        mask = piece["mask"].to(getattr(torch, call.get("mask", "bool")))  # the engine's mask is of booleans
        found, _ = core_algos.get_policy_loss_fn(call["loss"])(
            old_log_prob=piece["old"], log_prob=new, advantages=piece["advantages"], response_mask=mask,
            loss_agg_mode=call.get("agg", "token-mean"), config=config,
            rollout_is_weights=None if weights is None else weights[rows],
        )  # fmt: skip
        found.backward()
        loss += float(found.detach())
        gradients.append(new.grad)
    return {"loss": loss, "gradient": torch.cat(gradients), "kept": data["mask"]}


def verl_ppo_loss(data: Tensors, call: dict[str, Any]) -> dict[str, Any]:
    """The actor's whole loss: the policy loss, the entropy bonus and the reference KL."""
    from tensordict import TensorDict

    losses = verl_actor()
    losses.no_padding_2_padding = lambda values, _: values  # the arrays are padded already
    new, entropy = (data[name].clone().requires_grad_(True) for name in ("new", "entropy"))
    counts = {"dp_size": 1, "batch_num_tokens": int(data["mask"].sum()), "global_batch_size": len(data["mask"])}
    fields = {"response_mask": "mask", "old_log_probs": "old", "advantages": "advantages", "ref_log_prob": "ref"}

    class Step(TensorDict):
        def __getitem__(self, name: Any) -> Any:
            return counts[name] if isinstance(name, str) and name in counts else super().__getitem__(name)

    step = Step({field: data[name] for field, name in fields.items()}, batch_size=len(data["mask"]))
    loss, _ = losses.ppo_loss(actor_config(data, call), {"log_probs": new, "entropy": entropy}, step)
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": torch.cat([new.grad, entropy.grad])}


def actor_config(data: Tensors, call: dict[str, Any]) -> Any:
    """The actor's configuration, with the counts of the whole step as the engine sets them."""
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=4, **call.get("config", {}),
        policy_loss=policy_loss_config(call),
    )  # fmt: skip
    config.global_batch_info.update({
        "dp_size": 1, "batch_num_tokens": int(data["mask"].sum()), "global_batch_size": call.get("rows", len(data["mask"])),
        "loss_scale_factor": call.get("divisor"),
    })  # fmt: skip
    return config


def policy_loss_config(call: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf
    from verl.workers.config.actor import PolicyLossConfig

    config = PolicyLossConfig(loss_mode=call["loss"], **call.get("policy_loss", {}))
    if "bypass" in call:
        object.__setattr__(config, "rollout_correction", OmegaConf.create(call["bypass"]))
    return config


def corrected(data: Tensors, call: dict[str, Any]) -> tuple[Tensors, torch.Tensor | None]:
    """The batch as the trainer's rollout correction leaves it, and the weights: once per step, before any micro-batch."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    if "correction" not in call:
        return data, None
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=data["old"],
        rollout_log_prob=data["rollout"],
        response_mask=data["mask"].long(),
        **call["correction"],
    )
    return data | {"mask": mask.bool()}, None if weights is None else weights.batch["rollout_is_weights"]


def verl_kl(data: Tensors, call: dict[str, Any]) -> dict[str, Any]:
    """A reference-KL estimator, averaged as the actor does (token-mean) and times its coefficient."""
    from verl.trainer.ppo import core_algos

    new = data["new"].clone().requires_grad_(True)
    values = core_algos.kl_penalty(new, data["ref"], call["kl"])
    loss = call["coefficient"] * core_algos.agg_loss(values, data["mask"], "token-mean")
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": new.grad}


def verl_advantage(data: Tensors, call: dict[str, Any]) -> dict[str, Any]:
    """An advantage estimator on outcome rewards, which verl puts at the last token of a response."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos

    mask = data["mask"].long()  # as the trainer's
    last = mask.sum(1) - 1
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[torch.arange(len(mask)), last] = data["reward"]
    function = core_algos.get_adv_estimator_fn(call["advantage"])
    offered = {
        "token_level_rewards": rewards, "response_mask": mask, "index": data["group"].numpy(),
        "config": OmegaConf.create({"gamma": 1.0, **call.get("config", {})}), **call.get("arguments", {}),
    }  # fmt: skip
    takes = inspect.signature(function).parameters
    advantages, _ = function(**{name: value for name, value in offered.items() if name in takes})
    return {"advantages": advantages}


def verl_shipped() -> list[str]:
    """The registries, and the closed sets that the source compares with."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    source = inspect.getsource(core_algos.kl_penalty_forward)
    estimators = re.findall(r'"([a-z0-9_]+)"', "".join(re.findall(r"if kl_penalty.*", source)))
    modes = re.findall(
        r'"([a-z-]+)"', "".join(re.findall(r"if loss_agg_mode.*", inspect.getsource(core_algos.agg_loss)))
    )
    levels = re.findall(
        r"valid_is_levels = \{(.*)\}", inspect.getsource(rollout_corr_helper.compute_rollout_correction_weights)
    )
    bypass = re.findall(r'loss_type == "(\w+)"', inspect.getsource(core_algos.compute_policy_loss_bypass_mode))
    return [
        *(f"loss {name}" for name in core_algos.POLICY_LOSS_REGISTRY),
        *(f"bypass loss_type {name}" for name in bypass),
        *(f"advantage {name}" for name in core_algos.ADV_ESTIMATOR_REGISTRY),
        *(f"rollout_rs {name}" for name in rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS),
        *(f"rollout_is {name}" for name in re.findall(r"\w+", levels[0])),
        "option rollout_is_batch_normalize",
        *(f"aggregate {name}" for name in dict.fromkeys(modes)),
        *(f"kl {name}" for name in dict.fromkeys(estimators)),
        *(
            f"option {name}"
            for name in ("entropy_coeff", "use_kl_loss")
            if f"config.{name}" in inspect.getsource(verl_actor().ppo_loss)
        ),
    ]


# --- Liger ----------------------------------------------------------------------------------------------------


def liger_loss(data: Tensors, call: dict[str, Any]) -> dict[str, Any]:
    """Its per-token function on log-probs; with ``head`` the whole fused layer, on logits made to give these log-probs."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    options = dict(call["options"])
    mask = data["mask"].long()
    if options.pop("vllm", None) is not None:
        options["vllm_is_ratio"] = (data["old"] - data["rollout"]).exp()
    new = data["new"].clone().requires_grad_(True)
    arguments = {"ref_per_token_logps": data["ref"], "old_per_token_logps": data["old"], **options}
    loss, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(new, mask, data["row_advantages"], mask, **arguments)
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": new.grad}


def liger_head(data: Tensors, call: dict[str, Any]) -> dict[str, Any]:
    """The fused layer from hidden states and an output matrix: loss, and the gradients of both; ours needs the log-probs."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    hidden = data["hidden"].clone().requires_grad_(True)
    weight = data["weight"].clone().requires_grad_(True)
    layer = LigerFusedLinearGRPOLoss(
        compiled=False, use_ref_model=True, chunk_size=call.get("chunk", 1), **call["options"]
    )
    loss, _ = layer(
        hidden, weight, data["tokens"], data["mask"].long(), data["row_advantages"],
        ref_per_token_logps=data["ref"], old_per_token_logps=data["old"],
    )  # fmt: skip
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": hidden.grad, "weight": weight.grad}


LIGER_NOT_SWITCHES = {
    "per_token_logps", "attention_mask", "advantages", "full_attention_mask", "ref_per_token_logps", "old_per_token_logps",
    "epsilon_low", "epsilon_high", "max_completion_length", "loss_type", "importance_sampling_level",
    "num_items_in_batch", "kwargs",
}  # fmt: skip


def liger_shipped() -> list[str]:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    source = inspect.getsource(LigerFusedLinearGRPOFunction.ppo_loss_fn)
    lines = "".join(re.findall(r"if loss_type.*", source))
    kinds = re.findall(r'"(\w+)"', lines)
    levels = re.findall(r'if importance_sampling_level == "(\w+)":', source)
    takes = inspect.signature(LigerFusedLinearGRPOFunction.ppo_loss_fn).parameters
    options = [name for name in takes if name not in LIGER_NOT_SWITCHES and not name.startswith(("sapo_", "vespo_"))]
    return [
        *(f"loss_type {name}" for name in dict.fromkeys(kinds)),
        *(f"importance_sampling_level {name}" for name in dict.fromkeys(levels)),
        *(f"option {name}" for name in options),
    ]


# --- the loop -------------------------------------------------------------------------------------------------

CALLS = {
    "verl.loss": verl_loss,
    "verl.ppo_loss": verl_ppo_loss,
    "verl.kl": verl_kl,
    "verl.advantage": verl_advantage,
    "verl.shipped": lambda data, call: {"shipped": np.array(verl_shipped())},
    "liger.loss": liger_loss,
    "liger.head": liger_head,
    "liger.shipped": lambda data, call: {"shipped": np.array(liger_shipped())},
}


def answer(request: dict[str, Any]) -> None:
    """Read the batch, call, write the arrays of the answer, or its error."""
    arrays = np.load(request["data"])
    data = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    if "mask" in data:
        data["row_advantages"] = data["advantages"]
        data["advantages"] = data["advantages"][:, None].expand(data["mask"].shape).clone()
    try:
        found = CALLS[request["kind"]](data, request["call"])
    except Exception as error:
        found = {"error": np.array(f"{type(error).__name__}: {error}")}
    arrays = {
        name: value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value) for name, value in found.items()
    }
    np.savez(request["out"], **arrays)


def main() -> None:
    """One request a line on stdin, one line back when it is answered."""
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is not a reply
    torch.set_num_threads(1)
    stub(RAY)
    for line in sys.stdin:
        answer(json.loads(line))
        print("done", file=replies, flush=True)


if __name__ == "__main__":
    main()
