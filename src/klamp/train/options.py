"""What ``klamp train`` was asked, and TRL's options from it: task defaults, then the file, then the command line."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from klamp.errors import UserError, did_you_mean
from klamp.presets import parse
from klamp.train import rundir


@dataclass
class Options:
    """What ``klamp train`` was asked; ``trl`` holds options of TRL's GRPOConfig as command-line words."""

    spec: str | None = None
    task: str | None = None
    dataset: str | None = None
    reward: str | None = None
    prompt_field: str | None = None
    answer_field: str | None = None
    split: str | None = None
    data_dir: str | None = None
    skip_bad_rows: bool = False
    system: str | None = None
    instruction: str | None = None
    few_shot: int = 0
    few_shot_data: str | None = None
    max_prompt_tokens: int | None = None
    model: str | None = None
    lora: int | None = None
    out: str | None = None
    seed: int = 0
    eval_size: int | None = None
    eval_every: int | None = None
    eval_samples: int = 1
    record_tokens: float = 0.0
    plain_prompts: bool = False
    correction: bool = True
    trl: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)


_OURS = {"output_dir": "--out DIR", "resume_from_checkpoint": "--resume RUN"}


def configure(options: Options, task_defaults: Mapping[str, Any], kind: Any = None) -> Any:
    """KlampConfig from the task's defaults, the configuration file and the command line, the later winning.

    ``kind``: a subclass of it for another machine than this one, whose lack of a GPU then sets no defaults.
    """
    import torch
    from transformers import HfArgumentParser

    from klamp.train.config import DEFAULT_SPEC, KlampConfig, refuse

    class Parser(HfArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise UserError(f"{message}; klamp train --help-trl lists TRL's options")

    parser = Parser(kind or KlampConfig, allow_abbrev=False)
    known = {item.name for item in dataclasses.fields(KlampConfig) if item.init}
    ours = {item.name for item in dataclasses.fields(Options)} - {"trl", "config"}
    defaults: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "seed": options.seed}
    if kind is None and not torch.cuda.is_available() and not torch.backends.mps.is_available():
        defaults |= {"use_cpu": True, "bf16": False, "activation_checkpointing": False}
    for source in (task_defaults, options.config):
        for name in source:
            if name not in known:
                raise UserError(f"there is no option {name!r}; {did_you_mean(name, known | ours)}")
        defaults |= source
    spec = DEFAULT_SPEC if options.spec is None else options.spec
    for name, value in {**options.config, **_named(options.trl)}.items():
        if name in _OURS:
            raise UserError(f"{name} belongs to klamp train: say {_OURS[name]}")
        refuse(name, value, spec)  # said explicitly, even where it is TRL's default
    defaults |= {"spec": spec, "correction": options.correction}
    parser.set_defaults(**defaults)
    try:
        config, rest = parser.parse_args_into_dataclasses(
            args=["--output_dir", "unset", *options.trl], look_for_args_file=False, return_remaining_strings=True
        )
    except UserError:
        raise
    except Exception as error:  # every library below has its own kinds
        raise UserError(str(error).strip() or type(error).__name__) from error
    if rest:
        name = rest[0].lstrip("-").partition("=")[0].replace("-", "_")
        raise UserError(f"there is no option {rest[0]!r}; {did_you_mean(name, known | ours)}")
    if config.save_only_model:
        raise UserError(
            "save_only_model leaves checkpoints that cannot be resumed; model/ holds the final model anyway"
        )
    if config.model_init_kwargs and dict(config.model_init_kwargs).get("use_safetensors") is False:
        raise UserError("use_safetensors=False would read pickled weights; convert them to safetensors")
    if config.max_steps == 0 or config.max_steps < -1:
        raise UserError(
            f"max_steps={config.max_steps} trains nothing; give at least 1, or leave it out for num_train_epochs"
        )
    config.model_init_kwargs = {"use_safetensors": True} | dict(config.model_init_kwargs or {})
    if rundir.is_main() and config.bf16 and config.use_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        print(
            "warning: this CPU has no bfloat16 arithmetic: --bf16 true is many times slower here than float32",
            file=sys.stderr,
        )
    if rundir.is_main() and str(config.resolved_spec) != str(parse(config.spec)):
        print(f"spec: {config.resolved_spec}", file=sys.stderr)
    return config


def settings(config: Any) -> dict[str, Any]:
    """TRL's options where the run differs from TRL's defaults, as they took effect."""
    plain = (bool, int, float, str)
    shown = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if isinstance(value, plain) and value != item.default and item.name not in ("spec", "output_dir"):
            shown[item.name] = value.value if hasattr(value, "value") else value
    return shown


def _named(words: list[str]) -> dict[str, str]:
    """The options among command-line words, with the word after each."""
    found = {}
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("-", "_")] = value if equals else after
    return found
