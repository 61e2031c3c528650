"""``klamp train --dry-run``: everything that a run needs, tried without a GPU and without the hub, and what it will take.

The configuration is parsed and checked as on the machine that it is for. Then one optimizer step is made by a small
random model of the same class on the CPU, with the same spec, in a temporary directory. Nothing is left behind.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from dataclasses import dataclass
from typing import Any

from klamp.errors import UserError
from klamp.train import memory, rundir
from klamp.train.adapters import low_rank
from klamp.train.options import Options, configure, settings
from klamp.train.problem import HELDOUT, Problem, problem, prompted
from klamp.train.quiet import quiet
from klamp.train.run import require_rows
from klamp.train.twin import ONLY_THERE, PLAIN_CHAT, one_step

ASSUMED_PROMPT = 1024  # tokens, where nothing bounds the prompts
STAND_IN = "embedded:sort"  # its tokenizer serves where the model's own cannot be had

# The models of recipes/, for machines that the hub cannot be reached from: their config.json.
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16",
          "max_position_embeddings": 40960, "eos_token_id": 151645, "bos_token_id": 151643}  # fmt: skip
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": _QWEN3 | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip

_MADE_UP = [{"prompt": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)} for n in range(64)]


@dataclass(frozen=True)
class Launch:
    """How the run will be started: the number of processes, what shards the model, and what the file leaves open."""

    processes: int = 1
    strategy: str = "none"
    file: str | None = None
    checkpoints: bool = False  # FSDP's own activation checkpointing
    notes: tuple[str, ...] = ()


def launch(file: str | None, gpus: int | None) -> Launch:
    """The launch of an accelerate configuration file; ``gpus`` overrides its ``num_processes``, as --num_processes does."""
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus {gpus} must be at least 1")
    if file is None:
        return Launch(gpus or 1)
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        found = load_config_from_file(file)
    except Exception as error:
        raise UserError(f"{file} is not a configuration of accelerate: {' '.join(str(error).split())}") from error
    kind, processes = str(found.distributed_type.value), gpus or found.num_processes
    if processes < 1:
        raise UserError(f"{file} does not say num_processes; give --gpus N")
    strategy, deepspeed, fsdp = "none", found.deepspeed_config, found.fsdp_config
    if kind == "DEEPSPEED":
        if "zero_stage" not in deepspeed:
            raise UserError(f"{file} does not say zero_stage under deepspeed_config")
        strategy = {0: "none", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}[int(deepspeed["zero_stage"])]
    elif kind == "FSDP":
        strategy = "FSDP"
    elif kind not in ("NO", "MULTI_GPU"):
        raise UserError(f"{file}: distributed_type {kind} is not one of NO, MULTI_GPU, DEEPSPEED, FSDP")
    offload = [str(deepspeed.get(f"offload_{what}_device", "none")) != "none" for what in ("optimizer", "param")]
    notes = []
    if any(offload) or str(fsdp.get("fsdp_offload_params", False)).lower() == "true":
        notes.append(f"{file} offloads to the CPU's memory, which the estimate does not count: it is an upper bound")
    own = str(fsdp.get("fsdp_activation_checkpointing", False)).lower() == "true"
    return Launch(processes, strategy, file, own, tuple(notes))


def dry_run(options: Options, plan: Launch, gpu_gib: float) -> dict[str, Any]:
    """Try the run; returns the report. Raises UserError for what a real run would refuse."""
    if not gpu_gib > 0:
        raise UserError(f"--gpu-memory {gpu_gib} must be above 0 GiB")
    quiet()
    rundir.check_writable(options.out)
    limit = options.max_prompt_tokens
    report = _Report()
    asked = _problem(options, report)
    config = configure(options, asked.defaults, kind=_elsewhere(plan.processes))
    report.done(
        f"configuration: {len(settings(config))} of TRL's options differ from its defaults; spec {config.resolved_spec}"
    )
    if plan.strategy == "FSDP" and plan.checkpoints and config.activation_checkpointing:
        raise UserError(
            f"{plan.file} has fsdp_activation_checkpointing, and activation_checkpointing is on as well: transformers "
            "refuses both; switch one off"
        )
    model_config, size = _model(asked.model, config, options, report)
    tokenizer = _tokenizer(asked.model, config, report)
    if not report.real_tokens and limit is not None:
        options = dataclasses.replace(options, max_prompt_tokens=None)
        report.unchecked.append(f"which prompts have more than {limit} tokens: letters cannot tell")
    asked = prompted(asked, options, tokenizer, config.chat_template_kwargs)
    if report.real_rows:
        require_rows(asked, config)
    step = one_step(options.lora, asked, config, model_config, tokenizer)
    report.done(
        f"step: {step['twin']} made one optimizer step, gradient norm {step['grad_norm']:.3g}, {step['seconds']} s"
    )
    if step["grad_norm"] == 0.0:
        report.warnings.append("the gradient of that step was exactly 0: the spec kept no token of it")
    load = _load(config, asked, plan, limit, gpu_gib, model_config)
    _warn(config, plan, load, options.lora is not None, report)
    parts = {
        name: memory.estimate(size, load, one, plan.processes)
        for name, one in memory.strategies(load, options.lora is not None).items()
    }
    _could_not(config, plan, report)
    return {
        "spec": str(config.resolved_spec),
        "model": asked.model,
        "data": asked.name,
        "launch": dataclasses.asdict(plan),
        "rollout": _rollout(config),
        "step": step,
        "memory": {
            "gpu_gib": gpu_gib,
            "parameters": size.parameters,
            "adapters": size.adapters,
            "prompt_tokens": load.prompt,
            "bytes": parts,
            "logits_bytes": memory.logits_bytes(size, load),
            "full_sequences": memory.full_sequences(size, load),
            "fits": parts[plan.strategy]["peak"] <= load.gpu,
        },
        "checked": report.checked,
        "not_checked": report.unchecked,
        "warnings": [*plan.notes, *report.warnings],
    }


class _Report:
    """What was checked and what could not be, in words."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.unchecked: list[str] = []
        self.warnings: list[str] = []
        self.real_rows = self.real_tokens = True

    def done(self, text: str) -> None:
        self.checked.append(text)
        print(f"checked {text.partition(':')[0]}", file=sys.stderr, flush=True)


# --- what the run is made of ------------------------------------------------------------------------------------


def _problem(options: Options, report: _Report) -> Problem:
    """The rows and the reward; made-up rows where the hub cannot be reached."""
    try:
        asked = problem(options)
        report.done(f"data: {asked.name}, {len(asked.train)} rows to train on, {len(asked.heldout)} held out")
    except UserError as error:
        if not _unreachable(error):
            raise
        from klamp import rewards
        from klamp.data import options as data_options

        name = options.reward or data_options.default_reward(str(options.dataset))
        assert name is not None
        asked = Problem(
            str(options.dataset), _MADE_UP, _MADE_UP[: options.eval_size or HELDOUT],
            rewards.guarded(rewards.reward(name)), options.model or STAND_IN, {},
            data_options.prompting(options, str(options.dataset), ()),
        )  # fmt: skip
        report.real_rows = False
        report.unchecked.append(f"data: {error}; the step used made-up sums instead")
    return asked


def _unreachable(error: BaseException | None) -> bool:
    """Whether the hub did not answer, so that nothing is known of what was asked for."""
    silent = {"TransportError", "ConnectionError", "TimeoutError", "LocalEntryNotFoundError"}
    while error is not None:
        if silent & {kind.__name__ for kind in type(error).__mro__}:
            return True
        error = error.__cause__
    return False


def _elsewhere(processes: int) -> type[Any]:
    """KlampConfig as it will be on a machine with GPUs and that many processes."""
    from klamp.train.config import KlampConfig

    class Elsewhere(KlampConfig):
        world_size = property(lambda self: processes)

        def __post_init__(self) -> None:
            asked: bool = self.use_cpu
            self.use_cpu: bool = True  # so that nobody looks for a GPU here
            super().__post_init__()
            self.use_cpu = asked

    return Elsewhere


def _model(model: str, config: Any, options: Options, report: _Report) -> tuple[Any, memory.Shape]:
    """The model's configuration, from where the run would read it or from what is known, and its shape."""
    from transformers import AutoConfig

    from klamp.train.models import model_path

    where = ""
    try:
        found = AutoConfig.from_pretrained(
            model_path(model, config.trust_remote_code), trust_remote_code=config.trust_remote_code
        )
    except UserError as error:
        if not _unreachable(error):
            raise
        if model not in KNOWN:
            raise UserError(f"{error}; a dry run needs at least its config.json: give --model a directory") from error
        facts = dict(KNOWN[model])
        found = AutoConfig.for_model(facts.pop("model_type"), **facts)
        report.unchecked.append(f"weights of the model: {error}")
        where = " (from the facts that ship with klamp)"
    if options.lora is not None:
        low_rank(options.lora, found)
    try:
        size = memory.shape(found, options.lora)
    except (ValueError, AttributeError) as error:
        raise UserError(f"{model} is a {found.model_type}, which is no causal language model: {error}") from error
    more = f", and {size.adapters:,} in adapters of rank {options.lora}" if size.adapters else ""
    report.done(f"model: {type(found).__name__} of {size.parameters:,} parameters{more}{where}")
    return found, size


def _tokenizer(model: str, config: Any, report: _Report) -> Any:
    from klamp.train.models import load_tokenizer, model_path

    try:
        tokenizer = load_tokenizer(model_path(model, config.trust_remote_code), config.trust_remote_code)
        report.done(f"tokenizer: {len(tokenizer)} tokens")
    except UserError as error:
        if not _unreachable(error):
            raise
        tokenizer = load_tokenizer(model_path(STAND_IN))
        tokenizer.chat_template = PLAIN_CHAT
        report.real_tokens = False
        report.unchecked.append("tokenizer and chat template of the model: the step used one of letters instead")
    return tokenizer


# --- what it will take --------------------------------------------------------------------------------------------


def _rollout(config: Any) -> dict[str, Any]:
    """The counts of one rollout and of the run."""
    updates, completions = config.updates_per_rollout, config.generation_batch_size
    return {
        "processes": config.world_size,
        "prompts": completions // config.num_generations,
        "generations_per_prompt": config.num_generations,
        "completions": completions,
        "completions_per_gpu": completions // config.world_size,
        "tokens_at_most": completions * config.max_completion_length,
        "updates": updates,
        "completions_per_update": config.per_device_train_batch_size
        * config.gradient_accumulation_steps
        * config.world_size,
        "optimizer_steps": config.max_steps if config.max_steps > 0 else None,
        "rollouts": math.ceil(config.max_steps / updates) if config.max_steps > 0 else None,
    }


def _load(
    config: Any, asked: Problem, plan: Launch, prompt: int | None, gpu_gib: float, model_config: Any
) -> memory.Load:
    dtype = str(config.model_init_kwargs.get("dtype", "float32"))
    dtype = str(model_config.dtype) if dtype == "auto" else dtype
    here = config.use_vllm and config.vllm_mode == "colocate"
    room = config.vllm_max_model_length if here else None
    left = ASSUMED_PROMPT if room is None else max(room - config.max_completion_length, 0)
    return memory.Load(
        rows=config.per_device_train_batch_size,
        prompt=left if prompt is None else prompt,
        completion=config.max_completion_length,
        rollout_rows=config.generation_batch_size // plan.processes,
        heldout_rows=min(256, math.ceil(len(asked.heldout) / plan.processes)),
        checkpointing=bool(config.activation_checkpointing or plan.checkpoints),
        reference=config.beta != 0.0,
        stored=2 if dtype.endswith("16") else 4,
        mixed=bool(config.bf16 or config.fp16),
        vllm=config.vllm_gpu_memory_utilization if here else 0.0,
        elsewhere=config.use_vllm,
        sleeps=here and config.vllm_enable_sleep_mode,
        gpu=int(gpu_gib * memory.GIB),
        vllm_gpus=config.vllm_tensor_parallel_size,
    )


def _warn(config: Any, plan: Launch, load: memory.Load, lora: bool, report: _Report) -> None:
    if load.vllm and config.vllm_max_model_length is None:
        report.warnings.append("vllm_max_model_length is not set: vLLM reserves for the model's whole context")
    if (
        load.vllm
        and config.vllm_max_model_length is not None
        and not 0 < load.prompt <= (config.vllm_max_model_length - config.max_completion_length)
    ):
        report.warnings.append(
            f"vllm_max_model_length={config.vllm_max_model_length} has no room for max_completion_length="
            f"{config.max_completion_length} and prompts of {load.prompt} tokens"
        )
    if load.vllm and plan.processes % config.vllm_tensor_parallel_size:
        raise UserError(
            f"vllm_tensor_parallel_size={config.vllm_tensor_parallel_size} must divide the {plan.processes} processes"
        )
    if plan.strategy == "none" and load.stored == 2 and not lora:
        report.warnings.append(
            "the weights are trained in 16 bits, whose rounding swallows steps of a small learning rate: leave dtype out"
        )
    if config.updates_per_rollout == 1:
        report.warnings.append("there is one optimizer step per rollout, so new = old: no region on new/old can act")
    if plan.strategy not in ("none",):
        report.warnings.append(
            f"held-out evaluation is left out of a run under {plan.strategy}: use klamp eval on a checkpoint or model/"
        )


def _could_not(config: Any, plan: Launch, report: _Report) -> None:
    """What no machine without the GPUs can tell."""
    wanted = {"vllm": config.use_vllm, "deepspeed": plan.strategy.startswith("ZeRO")}
    for package in [name for name, used in wanted.items() if used]:
        known = "is installed here" if importlib.util.find_spec(package) else "is not installed here"
        report.unchecked.append(f"{package}: {known}; the step ran without it")
    there = [name for name, value in ONLY_THERE.items() if getattr(config, name) not in (value, None, [], "", [value])]
    if there:
        shown = ", ".join(f"{name}={_plain(getattr(config, name))}" for name in there)
        report.unchecked.append(f"options that only the real machine can try: {shown}")
    report.unchecked.append("speed, and memory itself: the figures are estimates (docs/gpu.md)")


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


# --- the report ---------------------------------------------------------------------------------------------------

PARTS = ("weights", "gradients", "optimizer", "reference", "buffers", "activations", "vllm", "context")
PHASES = ("generating", "training", "evaluating")


def memory_table(report: dict[str, Any]) -> list[str]:
    """The estimate as a Markdown table in GiB: one row per way to shard, the launch's own marked."""
    found, own = report["memory"], report["launch"]["strategy"]
    head = ["GiB per GPU", *PARTS, *(f"**{phase}**" for phase in PHASES)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, parts in found["bytes"].items():
        values = [f"{parts[part] / memory.GIB:.1f}" if parts[part] else "-" for part in (*PARTS, *PHASES)]
        lines.append("| " + " | ".join([f"{name} <-" if name == own else name, *values]) + " |")
    return lines


def text(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    counts, found, plan = report["rollout"], report["memory"], report["launch"]
    peak = found["bytes"][plan["strategy"]]["peak"] / memory.GIB
    lines = [f"dry run of {report['model']} on {report['data']}, spec {report['spec']}", ""]
    lines += [f"checked      {line}" for line in report["checked"]]
    lines += [f"not checked  {line}" for line in report["not_checked"]]
    lines += [f"warning      {line}" for line in report["warnings"]]
    lines += ["the step was made small: " + ", ".join(f"{k} {_plain(a)} -> {_plain(b)}" for k, (a, b) in report["step"]["shrunk"].items())]  # fmt: skip
    lines += [
        "",
        f"processes    {counts['processes']} ({plan['file'] or 'no accelerate file'}, sharding: {plan['strategy']})",
        f"rollout      {counts['prompts']} prompts x {counts['generations_per_prompt']} = {counts['completions']} "
        f"completions ({counts['completions_per_gpu']} per GPU), at most {counts['tokens_at_most']:,} tokens",
        f"updates      {counts['updates']} optimizer steps per rollout, each on {counts['completions_per_update']} completions",
        f"run          {counts['optimizer_steps'] or 'num_train_epochs decides the'} optimizer steps"
        + (f", {counts['rollouts']} rollouts" if counts["rollouts"] else ""),
        "",
        f"memory       estimated peak {peak:.1f} of {found['gpu_gib']:g} GiB per GPU: "
        + ("fits" if found["fits"] else "DOES NOT FIT"),
        *memory_table(report),
        f"logits       {found['logits_bytes'] / memory.GIB:.1f} GiB in fp32 if they were made whole; TRL's fused head makes tiles",
    ]
    if found["full_sequences"] is not None:
        lines.append(
            f"vLLM         room for {found['full_sequences']} sequences of full length at once beside its weights"
        )
    return "\n".join(lines)
