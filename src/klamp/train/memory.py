"""Memory of a run per GPU, estimated from the model's shape: formulae and assumptions in docs/gpu.md.

Parameter counts are exact (transformers builds the model on torch's meta device). The rest are estimates in bytes of
what PyTorch allocates; fragmentation and what a library keeps for itself are not in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GIB = 1024**3
CONTEXT = 2 * GIB  # assumed: CUDA context, NCCL's buffers, cuBLAS workspaces
LIVE = 10**9  # DeepSpeed's stage3_max_live_parameters: what ZeRO-3 may keep gathered
TILE_TOKENS, TILE_WORDS = 4096, 32768  # TRL's fused head: tokens and vocabulary of one tile of logits


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: ``parameters`` and ``adapters`` (LoRA's, else 0) are counts, the others as in its config."""

    parameters: int
    adapters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def edges(self) -> int:
        """Parameters outside the layers: embedding, head where it is another matrix, last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def layer(self) -> int:
        return (self.parameters - self.edges) // self.layers


def shape(config: Any, lora: int | None = None) -> Shape:
    """The shape of the model of a transformers config; LoRA of that rank is on every linear layer but the head."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    text = config.get_text_config()
    return Shape(
        parameters=sum(p.numel() for p in model.parameters()),
        adapters=0 if lora is None else sum(lora * (m.in_features + m.out_features) for m in linear),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocabulary=text.vocab_size,
        tied=bool(getattr(text, "tie_word_embeddings", config.tie_word_embeddings)),
    )


@dataclass(frozen=True)
class Load:
    """What one GPU works on. ``rollout_rows``: completions it samples at once; ``heldout_rows``: answers in an evaluation."""

    rows: int  # of one micro-batch
    prompt: int  # tokens, at most
    completion: int  # tokens, at most
    rollout_rows: int
    heldout_rows: int
    checkpointing: bool
    reference: bool
    stored: int  # bytes of a weight as it is loaded: 4 (TRL's default) or 2
    mixed: bool  # bf16 (or fp16) arithmetic
    vllm: float  # share of the GPU's memory that vLLM takes, 0 without it or on other GPUs
    elsewhere: bool  # completions are sampled by vLLM, here or on other GPUs
    sleeps: bool  # vLLM gives its memory back while the weights are trained
    gpu: int  # bytes of one GPU
    vllm_gpus: int = 1  # that one copy of the weights in vLLM is spread over

    @property
    def length(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True)
class Strategy:
    """Bytes per parameter, and what is divided by the number of processes. ``frozen``: a weight that is not trained."""

    name: str
    frozen: int
    weights: int
    gradients: int
    optimizer: int
    sharded: str = ""  # among "weights gradients optimizer"
    sixteen: bool = False  # the weights that compute are 16-bit tensors, not cast at each use

    def cost(self, part: str, count: int, bytes_: int, processes: int) -> float:
        return count * bytes_ / (processes if part in self.sharded.split() else 1)


def strategies(load: Load, lora: bool = False) -> dict[str, Strategy]:
    """Who keeps what: plain (DDP on several GPUs), DeepSpeed's ZeRO stages with 16-bit weights, and FSDP."""
    stored, half = load.stored, 2 if load.mixed else 4
    own = 4 if lora else stored  # PEFT's adapters are fp32
    master = 12 if load.mixed else 8  # Adam's two moments, and fp32 weights where the others are 16-bit
    wide = 4 if load.mixed else own  # accelerate keeps the weights that FSDP trains in fp32
    everything = "weights gradients optimizer"
    found = (
        Strategy("none", stored, own, own, 2 * own, "", stored == 2),
        Strategy("ZeRO-1", half, half, half, master, "optimizer", load.mixed),
        Strategy("ZeRO-2", half, half, half, master, "gradients optimizer", load.mixed),
        Strategy("ZeRO-3", half, half, half, master, everything, load.mixed),
        Strategy("FSDP", stored, wide, wide, 2 * wide, everything, load.mixed),
    )
    return {one.name: one for one in found}


# Bytes that one decoder layer saves for its backward pass, per token: times hidden, queries, keys, intermediate and the
# length of the sequence (the mask that attention takes), and of the stream between layers. Counted on transformers'
# Qwen3; a layer without norms of queries and keys saves less.
_SAVED = {"sixteen": (16, 14, 6, 8, 2), "cast": (26, 14, 6, 8, 2), "fp32": (24, 24, 8, 16, 4)}
_STREAM = {"sixteen": 2, "cast": 4, "fp32": 4}


def layer_bytes(shape: Shape, length: int, arithmetic: str) -> int:
    """What one decoder layer saves for its backward pass, per token of a sequence of ``length``."""
    sizes = (shape.hidden, shape.queries, shape.keys, shape.intermediate, length)
    small = 8 + 8 * shape.heads + 4 * shape.kv_heads  # the scales of the norms and attention's log-sum-exp
    return sum(bytes_ * size for bytes_, size in zip(_SAVED[arithmetic], sizes, strict=True)) + small


def head_bytes(shape: Shape, load: Load) -> int:
    """TRL's fused head: a tile of logits, and gradients of hidden states and head in fp32."""
    tokens, bytes_ = load.rows * load.completion, 2 if load.mixed else 4
    tile = min(tokens, TILE_TOKENS) * TILE_WORDS * bytes_
    gradient_of_head = 0 if shape.adapters else shape.vocabulary * shape.hidden * 4
    return tile + TILE_WORDS * shape.hidden * bytes_ + tokens * shape.hidden * 4 + gradient_of_head


def logits_bytes(shape: Shape, load: Load) -> int:
    """The logits of a micro-batch in fp32, which a head that is not fused makes, and their gradient once more."""
    return load.rows * load.completion * shape.vocabulary * 4


def cache_bytes(shape: Shape, rows: int, length: int, bytes_: int) -> int:
    """Keys and values of ``rows`` sequences."""
    return rows * length * shape.layers * 2 * shape.keys * bytes_


def activation_bytes(shape: Shape, load: Load, arithmetic: str) -> int:
    """What the forward pass of a micro-batch leaves for the backward pass, at the peak."""
    tokens = load.rows * load.length
    layer, head = tokens * layer_bytes(shape, load.length, arithmetic), head_bytes(shape, load)
    if not load.checkpointing:
        return shape.layers * layer + head
    # The layer that is recomputed and the head are never there at the same time.
    return shape.layers * tokens * shape.hidden * _STREAM[arithmetic] + max(layer, head)


def estimate(shape: Shape, load: Load, strategy: Strategy, processes: int) -> dict[str, float]:
    """Bytes per GPU by part, and in the phases of a rollout: ``generating``, ``training``, ``evaluating``, ``peak``."""
    trained, frozen = (shape.adapters, shape.parameters) if shape.adapters else (shape.parameters, 0)
    arithmetic = "sixteen" if strategy.sixteen else "cast" if load.mixed else "fp32"
    kept_frozen = strategy.cost("weights", frozen, strategy.frozen, processes)
    reference = shape.parameters if load.reference and not shape.adapters else 0  # adapters are switched off for it
    part: dict[str, float] = {
        "weights": strategy.cost("weights", trained, strategy.weights, processes) + kept_frozen,
        "gradients": strategy.cost("gradients", trained, strategy.gradients, processes),
        "optimizer": strategy.cost("optimizer", trained, strategy.optimizer, processes),
        "reference": strategy.cost("weights", reference, strategy.frozen, processes),
        "buffers": buffer_bytes(shape, strategy, processes, arithmetic),
        "activations": activation_bytes(shape, load, arithmetic),
        "vllm": load.vllm * load.gpu,
        "context": CONTEXT,
    }
    resting = part["weights"] + part["optimizer"] + part["reference"] + CONTEXT
    awake = 0.0 if load.sleeps else part["vllm"]
    sampled = 0 if load.elsewhere else cache_bytes(shape, load.rollout_rows, load.length, load.stored)
    heldout = cache_bytes(shape, load.heldout_rows, load.length, load.stored)
    part["generating"] = resting + (part["vllm"] or sampled)
    part["training"] = resting + part["gradients"] + part["buffers"] + part["activations"] + awake
    part["evaluating"] = (
        resting + awake + heldout if strategy.name == "none" else 0.0
    )  # left out where weights are sharded
    part["peak"] = max(part["generating"], part["training"], part["evaluating"])
    return part


def buffer_bytes(shape: Shape, strategy: Strategy, processes: int, arithmetic: str) -> int:
    """DDP's second copy of the gradients, gathered weights, and autocast's 16-bit copies of fp32 weights."""
    if strategy.name == "ZeRO-3":
        return min(shape.parameters, LIVE) * strategy.frozen
    if strategy.name == "FSDP":
        return (shape.edges + 2 * shape.layer) * (2 if arithmetic == "sixteen" else 4)
    buckets = (shape.adapters or shape.parameters) * strategy.gradients
    copies = (shape.parameters - shape.edges) * 2 if arithmetic == "cast" else 0
    return (buckets if strategy.name == "none" and processes > 1 else 0) + copies


def full_sequences(shape: Shape, load: Load) -> int | None:
    """Sequences of full length whose keys and values fit in vLLM's share beside its weights; None without vLLM."""
    if not load.vllm:
        return None
    left = load.vllm * load.gpu - shape.parameters * 2 / load.vllm_gpus
    return max(0, int(left // cache_bytes(shape, 1, load.length, 2)))
