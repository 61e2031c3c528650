"""TRL's own losses on made batches: its ``_compute_loss`` and its IS ratio, called on a stub of the trainer."""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
import types
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from conformance.cases import Arrays
from conformance.sides import Result, gradient

TRAINERS: dict[str, tuple[Any, Any]] = {
    "GRPOTrainer": (GRPOTrainer, GRPOConfig),
    "GMPOTrainer": (GMPOTrainer, GMPOConfig),
    "RLOOTrainer": (RLOOTrainer, RLOOConfig),
    "SDPOTrainer": (SDPOTrainer, SDPOConfig),
}


NOT_SWITCHES = {
    # numbers of a switch that has rows
    "epsilon_low", "epsilon_high", "max_completion_length", "sapo_temperature_pos", "sapo_temperature_neg",
    "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg", "entropy_coef_delta", "entropy_coef_max",
    "entropy_coef_min", "entropy_target", "steps_per_generation", "use_vllm", "vllm_importance_sampling_correction",
    "loss_type", "importance_sampling_level",
    # the trainer around the loss; the router's auxiliary loss of a mixture of experts comes with the model
    "args", "accelerator", "model", "current_gradient_accumulation_steps", "aux_loss_enabled", "router_aux_loss_coef",
    "get_gamma_weights", "get_high_entropy_mask", "get_off_policy_mask",
    "_get_per_token_logps_and_entropies", "_metrics", "_entropy_bonus_enabled", "_entropy_window_stats",
    "_last_world_entropy",
}  # fmt: skip


class OneProcess:
    """What a trainer asks of its accelerator, in a world of one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def reduce(self, value: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return value

    def pad_across_processes(self, value: torch.Tensor, dim: int = 0, pad_index: float = 0) -> torch.Tensor:
        return value


def theirs(
    arrays: Arrays, trainer: str = "GRPOTrainer", accumulate: int = 1, window: float = 1.0,
    last_entropy: float | None = None, moved: dict[str, float] | None = None, **options: Any,
) -> Result:  # fmt: skip
    """Loss and gradient of one micro-batch.

    ``window``: tokens of the generation batch over tokens of this batch. ``last_entropy``: what the last step
    measured, and ``moved`` receives the entropy coefficient of the next.
    """
    if trainer == "AsyncGRPOTrainer":
        return _asynchronous(arrays, **options)
    kind, config = TRAINERS[trainer]
    args = config(output_dir="unused", report_to="none", bf16=False, use_cpu=True, **options)
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    new = tensors["new"].clone().requires_grad_(True)
    entropy = tensors["entropy"].clone().requires_grad_(True)
    stub = _stub(kind, args)
    stub.current_gradient_accumulation_steps = accumulate
    stub._get_per_token_logps_and_entropies = lambda *a, **k: (new, entropy, None)
    if last_entropy is not None:
        stub._last_world_entropy, stub._entropy_window_stats = last_entropy, None
    if trainer == "SDPOTrainer":
        logits = torch.stack([new, (-new.exp()).log1p()], dim=-1)  # of a vocabulary {this token, the rest}
        inputs = _inputs(tensors, stub, window)
        loss = kind._compute_policy_loss(
            stub, inputs | {"completion_ids": torch.zeros_like(inputs["completion_ids"])}, logits
        )
    else:
        loss = kind._compute_loss(stub, None, _inputs(tensors, stub, window))
    loss.backward()
    if moved is not None:
        moved["entropy_coef"] = stub.entropy_coef
    return float(loss.detach()), gradient(new, entropy)


def _inputs(tensors: dict[str, torch.Tensor], stub: Any, window: float) -> dict[str, torch.Tensor]:
    mask = tensors["mask"].long()
    prompt = torch.ones(mask.shape[0], 2, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old"],
        "old_logps": (tensors["old"] * mask).sum(1),
        "ref_per_token_logps": tensors["ref"],
        "num_items_in_batch": (mask.sum() * window).long(),
    }
    if getattr(stub, "use_vllm", False):
        inputs["sampling_per_token_logps"] = tensors["rollout"]
        if stub.vllm_importance_sampling_correction:
            inputs["importance_sampling_ratio"] = _importance_ratio(tensors, mask, stub)
    return inputs


def _stub(kind: Any, args: Any) -> Any:
    """A trainer without its model: the attributes that a loss reads, set as ``__init__`` sets them."""
    stub = types.SimpleNamespace(
        args=args, accelerator=OneProcess(), model=torch.nn.Identity(), _metrics=defaultdict(lambda: defaultdict(list)),
        aux_loss_enabled=False, beta=getattr(args, "beta", 0.0),
        epsilon_low=args.epsilon, epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
    )  # fmt: skip
    if kind is SDPOTrainer:
        for name in ("loss_type", "importance_sampling_level", "max_completion_length"):
            setattr(stub, name, getattr(args, name))
    if issubclass(kind, GRPOTrainer):
        stub._entropy_bonus_enabled = args.entropy_coef != 0.0 or args.use_adaptive_entropy
        for name in ("loss_type", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold",
                     "use_vllm", "max_completion_length", "entropy_coef", "use_adaptive_entropy",
                     *(name for name in vars(args) if name.startswith("vllm_importance_sampling"))):  # fmt: skip
            setattr(stub, name, getattr(args, name))
        stub.get_off_policy_mask, stub.get_gamma_weights = kind.get_off_policy_mask, kind.get_gamma_weights
        stub.get_high_entropy_mask = types.MethodType(kind.get_high_entropy_mask, stub)
    return stub


@cache
def _importance_block() -> Any:
    """The statement of ``_generate_and_score_completions`` that computes the IS ratio, compiled from TRL's source."""
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and "vllm_importance_sampling_correction" in ast.unparse(node.test)
        and "torch.exp(logps_diff)" in ast.unparse(node)
    ]
    smallest = min(found, key=lambda node: len(ast.unparse(node)))
    return compile(ast.Module([smallest], []), "trl", "exec")


def _importance_ratio(tensors: dict[str, torch.Tensor], mask: torch.Tensor, stub: Any) -> torch.Tensor:
    names: dict[str, Any] = {
        "self": stub, "torch": torch, "math": math, "tool_mask": None, "completion_mask": mask,
        "old_per_token_logps": tensors["old"], "sampling_per_token_logps": tensors["rollout"],
    }  # fmt: skip
    exec(_importance_block(), names)
    return names["vllm_importance_sampling_ratio"]


def _asynchronous(arrays: Arrays, epsilon: float = 0.2, epsilon_high: float | None = None) -> Result:
    """AsyncGRPOTrainer's loss: tokens of all responses in one packed row."""
    mask = torch.from_numpy(arrays["mask"])
    new = torch.from_numpy(arrays["new"]).clone().requires_grad_(True)
    count = int(mask.sum())
    packed = {name: torch.from_numpy(arrays[name])[mask][None] for name in ("old", "entropy")}
    rows = torch.arange(len(mask))[:, None].expand_as(mask)[mask][None]
    whole = torch.ones(1, count, dtype=torch.long)
    inputs = {
        "attention_mask": whole, "input_ids": whole, "position_ids": whole, "shift_labels": whole,
        "token_index": torch.arange(count)[None], "old_log_probs": packed["old"], "segment_id": rows,
        "advantages": torch.from_numpy(arrays["advantages"])[rows], "tree_max_seqlens": torch.ones(1, 2),
        "tree_kv_index": whole, "tree_cu_seqlens_q": whole, "tree_cu_seqlens_k": whole,
        "global_n_tokens": torch.tensor([count]), "global_n_forward_tokens": torch.tensor([count]),
        "mean_seq_len": torch.tensor([1.0]),
    }  # fmt: skip
    stub = types.SimpleNamespace(
        accelerator=OneProcess(), aux_loss_enabled=False, current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)), epsilon_low=epsilon,
        epsilon_high=epsilon if epsilon_high is None else epsilon_high, _step_forward_tokens=0.0,
        _step_trained_tokens=0.0, _step_seq_len_weighted=0.0, _step_samples=0.0, _step_forward_s=0.0,
    )  # fmt: skip
    outputs = types.SimpleNamespace(log_probs=new[mask][None], entropy=packed["entropy"])
    loss = AsyncGRPOTrainer.compute_loss(stub, lambda **k: outputs, inputs)
    loss.backward()
    return float(loss.detach()), gradient(new)


def shipped() -> set[str]:
    """Every switch that ``GRPOTrainer._compute_loss`` reads, its values where it compares, and the trainers with own losses."""
    found = {f"trainer {name}" for name in (*TRAINERS, "AsyncGRPOTrainer") if name != "GRPOTrainer"}
    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
            kind = node.left.attr
            if kind in ("loss_type", "importance_sampling_level"):
                values = [item.value for item in ast.walk(node.comparators[0]) if isinstance(item, ast.Constant)]
                found |= {f"{kind} {value}" for value in values}
    block = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.vllm_importance_sampling_mode":
            values = [item.value for item in ast.walk(node.comparators[0]) if isinstance(item, ast.Constant)]
            found |= {f"vllm_importance_sampling_mode {value}" for value in values}
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_own(node.value)}
    return found | {f"option {name}" for name in read - NOT_SWITCHES}


def _is_own(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "self.args")


def trainers() -> set[str]:
    """The trainers that TRL defines, experimental ones included."""
    root = Path(inspect.getfile(GRPOTrainer)).parent.parent
    files = [*(root / "trainer").glob("*.py"), *(root / "experimental").rglob("*.py")]
    texts = "".join(path.read_text() for path in files)
    return set(re.findall(r"^class ([A-Z]\w*Trainer)\(", texts, re.MULTILINE))
