"""Models and tokenizers by path, hub id, or the name of one that ships with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from klamp.errors import UserError
from klamp.tasks import EMBEDDED_PREFIX, embedded_model
from klamp.train.smollm import INSTALL, SMOLLM2, smollm2

HUB_TIMEOUT = 10.0  # seconds for the hub to answer at all


def model_path(model: str, trust_remote_code: bool = False) -> str:
    """The path or hub id to load, checked: its configuration can be read. Raises UserError if not."""
    if model.startswith(EMBEDDED_PREFIX):
        return str(embedded_model(model))
    if model == SMOLLM2:
        return str(smollm2())
    from transformers import AutoConfig

    try:
        if not Path(model).is_dir():
            _ask_hub(model)
        AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception as error:  # every library below raises its own kind
        raise UserError(_cannot("model", model, error)) from error
    return model


def _ask_hub(model: str) -> None:
    """Ask the hub once, briefly, unless the model is in the local cache: transformers itself retries for long."""
    import huggingface_hub
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(model, "config.json"), str):
        huggingface_hub.HfApi().model_info(model, timeout=HUB_TIMEOUT)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer, padding on the left, with a pad token."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, padding_side="left")
    except Exception as error:
        raise UserError(_cannot("tokenizer of", path, error)) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _cannot(what: str, model: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "smollm" in model.lower() and not Path(model).is_dir():
        reason += f" (without the hub there is {SMOLLM2!r}: {INSTALL})"
    where = "in that directory" if Path(model).is_dir() else "as a directory here or on the Hugging Face hub"
    return f"the {what} {model!r} cannot be loaded {where}: {reason}"
