"""LoRA: adapters of low rank (Hu et al. 2021, arXiv 2106.09685) through PEFT, and a whole model from them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from klamp.errors import UserError


def low_rank(rank: int, model_config: Any) -> Any:
    """PEFT's configuration: W + (alpha / r) B A on every linear layer but the head, alpha = 2 r.

    Raises UserError for a rank below 1 or above the model's width, where an adapter has more numbers than a layer.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError("--lora needs the package peft; pip install peft")
    if rank < 1:
        raise UserError(f"--lora {rank} must be a rank of at least 1; 16 is usual")
    width = getattr(model_config.get_text_config(), "hidden_size", None)
    if width is not None and rank > width:
        raise UserError(f"--lora {rank} is more than the model's width of {width}; 16 is usual")
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def merge(base: str, adapter: Path, out: Path, tokenizer: Any, trust_remote_code: bool = False) -> None:
    """Write the base model with the adapter merged into its weights: loadable without PEFT, whatever sharded the training."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    code = {"trust_remote_code": trust_remote_code}
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", use_safetensors=True, **code)
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(out)
    tokenizer.save_pretrained(out)
