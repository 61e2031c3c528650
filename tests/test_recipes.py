"""Recipes for GPUs and ``klamp train --dry-run``: they parse, they are matched, and the counts and bytes are right."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from train_parts import save_tiny_model
from transformers import AutoConfig, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from klamp.cli import _options, _parser, main
from klamp.errors import UserError
from klamp.train import memory
from klamp.train.dryrun import KNOWN, _elsewhere, launch, memory_table
from klamp.train.options import Options, configure
from klamp.train.twin import _twin

FOLDER = Path(__file__).parents[1] / "recipes"
SPECS = ("atr_grpo", "grpo", "dapo")
STEMS = ("qwen3-1.7b-1gpu", "qwen3-1.7b-8gpu", "qwen3-8b-1gpu", "qwen3-8b-8gpu")
ACCELERATE = {"ddp": ("none", 8), "zero2": ("ZeRO-2", 8), "zero3": ("ZeRO-3", 8), "fsdp2": ("FSDP", 8)}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub does not answer, and nothing of it is in a cache."""
    import huggingface_hub

    def silent(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", silent)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", silent)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr("datasets.load_dataset", silent)


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working folder whose contents afterwards are all that a command left."""
    folder = tmp_path / "here"
    (folder / "tmp").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    return folder


def recipe(stem: str, spec: str) -> Path:
    return FOLDER / f"{stem}-{spec}.yaml"


def parsed(path: Path, *more: str) -> Any:
    arguments, rest = _parser().parse_known_args(["train", "--config", str(path), *more])
    options = _options(arguments, rest, Options)
    return options, configure(options, {}, kind=_elsewhere(8 if "8gpu" in path.name else 1))


# --- the files ------------------------------------------------------------------------------------------------


def test_there_are_four_triples() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {f"{stem}-{spec}" for stem in STEMS for spec in SPECS}


@pytest.mark.parametrize("stem", STEMS)
def test_a_triple_differs_in_its_spec_alone(stem: str) -> None:
    settings, lines = [], []
    for spec in SPECS:
        text = recipe(stem, spec).read_text()
        data = yaml.safe_load(text)
        assert data.pop("spec").startswith(f"{spec}(")
        settings.append(data)
        lines.append([line for line in text.splitlines() if not line.startswith(("spec:", "#   "))])
    assert settings[0] == settings[1] == settings[2]
    assert lines[0] == lines[1] == lines[2]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_is_what_it_says(path: Path) -> None:
    options, config = parsed(path)
    assert config.updates_per_rollout >= 4
    assert options.dataset == "dapo-math-17k"
    assert options.reward == "math"
    assert 64 <= config.generation_batch_size // config.num_generations <= 512
    assert 8 <= config.num_generations <= 16
    assert 4096 <= config.max_completion_length <= 8192
    assert config.vllm_max_model_length == config.max_completion_length + options.max_prompt_tokens
    assert (config.use_vllm, config.bf16, config.activation_checkpointing, config.use_cpu) == (True, True, True, False)
    assert (config.temperature, config.beta) == (1.0, 0.0)
    assert config.save_steps % config.updates_per_rollout == 0 == options.eval_every % config.updates_per_rollout
    title = re.search(
        r"(\d+) prompts x (\d+) answers = (\d+) completions, (\d+) optimizer steps of (\d+)", path.read_text()
    )
    assert title is not None
    said = tuple(map(int, title.groups()))
    per_update = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
    assert said == (config.generation_batch_size // config.num_generations, config.num_generations,
                    config.generation_batch_size, config.updates_per_rollout, per_update)  # fmt: skip
    assert str(config.resolved_spec).endswith("+ sequence_mask(high=3.0)")  # vLLM samples


@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerate_reads_its_files(name: str) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = FOLDER / "accelerate" / f"{name}.yaml"
    plan = launch(str(path), None)
    assert (plan.strategy, plan.processes) == ACCELERATE[name]
    assert launch(str(path), 2).processes == 2
    words = ["--config_file", str(path), "-m", "klamp", "train", "--config", "x.yaml"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert (arguments.module, arguments.training_script) == (True, "klamp")
    assert arguments.training_script_args == ["train", "--config", "x.yaml"]
    assert (arguments.use_deepspeed, arguments.use_fsdp) == (name.startswith("zero"), name == "fsdp2")
    assert int(arguments.fsdp_version) == (2 if name == "fsdp2" else 1)


# --- the dry run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stem", "spec", "file", "peak"),
    [
        ("qwen3-1.7b-1gpu", "grpo", None, "none"),
        ("qwen3-1.7b-8gpu", "atr_grpo", "ddp", "none"),
        ("qwen3-8b-1gpu", "dapo", None, "none"),
        ("qwen3-8b-8gpu", "atr_grpo", "zero2", "ZeRO-2"),
    ],
)
def test_a_recipe_runs_dry(
    stem: str, spec: str, file: str | None, peak: str, offline: None, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [] if file is None else ["--accelerate", str(FOLDER / "accelerate" / f"{file}.yaml")]
    assert main(["train", "--config", str(recipe(stem, spec)), "--dry-run", "--json", *more]) == 0
    report = json.loads(capsys.readouterr().out)
    _, config = parsed(recipe(stem, spec))
    counts = report["rollout"]
    assert counts["processes"] == config.world_size == (8 if "8gpu" in stem else 1)
    assert counts["completions"] == config.generation_batch_size
    assert counts["prompts"] * counts["generations_per_prompt"] == counts["completions"]
    assert counts["updates"] * counts["completions_per_update"] == counts["completions"]
    assert counts["tokens_at_most"] == counts["completions"] * config.max_completion_length
    shrunk = {name: after for name, (_, after) in report["step"]["shrunk"].items()}
    assert shrunk["steps_per_generation"] == counts["updates"] * shrunk["gradient_accumulation_steps"]
    assert report["step"]["grad_norm"] > 0.0
    assert report["spec"] == str(config.resolved_spec)
    assert (report["memory"]["fits"], report["launch"]["strategy"]) == (True, peak)
    page = (FOLDER.parent / "docs" / "gpu.md").read_text()
    assert "\n".join(memory_table(report)) in page
    told = " ".join(report["not_checked"])
    assert all(word in told for word in ("data", "weights", "tokenizer", "vllm", "bf16=True"))
    assert ("deepspeed" in told) == (file == "zero2")
    assert [path for path in empty.rglob("*") if path.name != "tmp"] == []


def test_any_model_runs_dry(tmp_path: Path, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_model(tmp_path / "model", chat=True)
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(40)))
    words = ["train", "--dry-run", "--model", str(model), "--dataset", str(data), "--reward", "math", "--lora", "4"]
    assert main([*words, "--spec", "atr_grpo() + kl_reference(beta=0.04)", "--steps_per_generation", "4"]) == 0
    shown = capsys.readouterr().out
    assert "36 rows to train on, 4 held out" in shown
    assert "tokenizer: 99 tokens" in shown
    assert "updates      4 optimizer steps per rollout, each on 8 completions" in shown
    assert main([*words, "--steps_per_generation", "64"]) == 2  # 64 prompts a rollout
    assert "36 rows to train on, and one rollout takes 64 prompts" in capsys.readouterr().err
    assert [path for path in empty.rglob("*") if path.name != "tmp"] == []


def test_what_does_not_fit_has_an_exit_code_of_its_own(
    offline: None, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", "--gpu-memory", "0.5"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "2"], "--gpus describes the machine of a --dry-run"),
        (["--dry-run", "--gpus", "0"], "--gpus 0 must be at least 1"),
        (["--dry-run", "--gpu-memory", "0"], "must be above 0"),
        (["--dry-run", "--accelerate", "gone.yaml"], "gone.yaml"),
        (["--dry-run", "--resume", "runs/x"], "leave out"),
        (["--dry-run", "--dataset", "gone.jsonl", "--reward", "math"], "gone.jsonl"),
        (["--dry-run", "--model", "nobody/nothing"], "a dry run needs at least its config.json"),
        (["--dry-run", "--epsilon", "0.3"], "would fight the spec"),
        (["--dry-run", "--num_generations", "7"], "divisible by num_generations"),
        (["--dry-run", "--lora", "4000"], "is more than the model's width"),
    ],
)
def test_mistakes_are_refused(
    words: list[str], message: str, offline: None, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_option_of_a_recipe_is_refused(tmp_path: Path, offline: None, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    path = tmp_path / "r.yaml"
    path.write_text(
        recipe("qwen3-8b-8gpu", "dapo").read_text().replace("steps_per_generation:", "steps_per_generaton:")
    )
    assert main(["train", "--config", str(path), "--dry-run"]) == 2
    assert "'steps_per_generaton'; did you mean 'steps_per_generation'?" in capsys.readouterr().err


def test_checkpointing_twice_is_refused(tmp_path: Path, offline: None, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fsdp.yaml"
    text = (FOLDER / "accelerate" / "fsdp2.yaml").read_text()
    path.write_text(text.replace("fsdp_activation_checkpointing: false", "fsdp_activation_checkpointing: true"))
    words = ["train", "--config", str(recipe("qwen3-8b-8gpu", "grpo")), "--dry-run", "--accelerate", str(path)]
    assert main(words) == 2
    assert "switch one off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("llama", {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}),
        ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
        ("gemma3_text", {"hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4}),
        ("qwen3_moe", {"hidden_size": 64, "num_hidden_layers": 3, "num_experts": 8}),
    ],
)
def test_a_twin_has_the_class_of_the_model(kind: str, facts: dict[str, Any], tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, vocab_size=500, **facts)
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path / "tokens"))
    _twin(config, tokenizer, tmp_path / "twin", False)
    made = AutoConfig.from_pretrained(tmp_path / "twin")
    assert (made.model_type, made.num_hidden_layers, made.hidden_size, made.vocab_size) == (kind, 2, 32, len(tokenizer))


# --- memory ---------------------------------------------------------------------------------------------------


def qwen3(name: str) -> Any:
    facts = dict(KNOWN[f"Qwen/{name}"])
    return AutoConfig.for_model(facts.pop("model_type"), **facts)


def test_parameter_counts() -> None:
    small, large = memory.shape(qwen3("Qwen3-1.7B")), memory.shape(qwen3("Qwen3-8B"))
    assert small.parameters == 1_720_574_976
    assert large.parameters == 8_190_735_360
    # by hand: q and o, k and v, gate, up and down, two norms and those of queries and keys; then embedding, head, norm
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert large.layer == layer
    assert large.parameters == 36 * layer + 2 * 151936 * 4096 + 4096
    assert small.parameters == 28 * small.layer + 151936 * 2048 + 2048


def test_adapters_are_counted_as_peft_makes_them() -> None:
    from peft import get_peft_model

    from klamp.train.adapters import low_rank

    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = get_peft_model(Qwen3ForCausalLM(config), low_rank(4, config))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert memory.shape(config, lora=4).adapters == trained


def load(**changes: Any) -> memory.Load:
    facts = {"rows": 2, "prompt": 1024, "completion": 8192, "rollout_rows": 512, "heldout_rows": 4, "checkpointing": True,
             "reference": False, "stored": 4, "mixed": True, "vllm": 0.45, "elsewhere": True, "sleeps": True,
             "gpu": 80 * 2**30}  # fmt: skip
    return memory.Load(**(facts | changes))


def test_the_states_of_a_model() -> None:
    n, size = 8_190_735_360, memory.shape(qwen3("Qwen3-8B"))
    ways = memory.strategies(load())
    states = ("weights", "gradients", "optimizer")
    found = {name: [memory.estimate(size, load(), way, 8)[part] for part in states] for name, way in ways.items()}
    assert found["none"] == [4 * n, 4 * n, 8 * n]  # 16 bytes a parameter: float32 weight, gradient, two moments
    assert found["ZeRO-1"] == [2 * n, 2 * n, 12 * n / 8]  # ZeRO (Rajbhandari et al. 2020): 2 + 2 + 12
    assert found["ZeRO-2"] == [2 * n, 2 * n / 8, 12 * n / 8]
    assert found["ZeRO-3"] == [2 * n / 8, 2 * n / 8, 12 * n / 8]
    assert found["FSDP"] == [4 * n / 8, 4 * n / 8, 8 * n / 8]
    with_reference = memory.estimate(size, load(reference=True), ways["ZeRO-2"], 8)
    assert with_reference["reference"] == 2 * n
    adapted = memory.estimate(memory.shape(qwen3("Qwen3-8B"), 64), load(stored=2, reference=True),
                              memory.strategies(load(stored=2), lora=True)["none"], 1)  # fmt: skip
    per_layer = 64 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    adapters = 36 * per_layer
    assert [adapted[part] for part in states] == [2 * n + 4 * adapters, 4 * adapters, 8 * adapters]
    assert adapted["reference"] == 0.0  # the model with its adapters switched off


def test_the_phases_of_a_rollout() -> None:
    size = memory.shape(qwen3("Qwen3-8B"))
    way = memory.strategies(load())["ZeRO-2"]
    found = memory.estimate(size, load(), way, 8)
    n, tokens, gib = 8_190_735_360, 2 * 9216, 2**30
    # per token and layer: 16 H + 14 Q + 6 K + 8 I + 2 T, and 8 + 8 heads + 4 kv heads of scales
    layer = tokens * (16 * 4096 + 14 * 4096 + 6 * 1024 + 8 * 12288 + 2 * 9216 + 8 + 8 * 32 + 4 * 8)
    scored = 2 * 8192
    head = 4096 * 32768 * 2 + 32768 * 4096 * 2 + scored * 4096 * 4 + 151936 * 4096 * 4
    assert found["activations"] == 36 * tokens * 4096 * 2 + max(layer, head)
    assert memory.estimate(size, load(checkpointing=False), way, 8)["activations"] == 36 * layer + head
    resting = 2 * n + 12 * n / 8 + 2 * gib
    assert found["vllm"] == 0.45 * 80 * gib
    assert found["generating"] == resting + found["vllm"]
    assert found["training"] == resting + 2 * n / 8 + found["activations"]
    assert found["peak"] == max(found["generating"], found["training"])
    awake = memory.estimate(size, load(sleeps=False), way, 8)
    assert awake["training"] == found["training"] + found["vllm"]
    # without vLLM: 512 sequences of 9216 tokens, 36 layers, keys and values of 1024, as the weights are stored
    plain = memory.estimate(size, load(vllm=0.0, elsewhere=False, sleeps=False), way, 8)
    assert plain["generating"] == resting + 512 * 9216 * 36 * 2 * 1024 * 4
    assert memory.logits_bytes(size, load()) == 2 * 8192 * 151936 * 4
    assert memory.full_sequences(size, load()) == int((36 * gib - 2 * n) // (9216 * 36 * 2 * 1024 * 2))


@pytest.mark.parametrize(
    ("arithmetic", "dtype", "autocast"),
    [("sixteen", torch.bfloat16, False), ("cast", torch.float32, True), ("fp32", torch.float32, False)],
)
def test_a_layer_saves_what_the_formula_says(arithmetic: str, dtype: torch.dtype, autocast: bool) -> None:
    """Against the tensors that autograd really keeps in transformers' Qwen3, one layer more or less."""

    def kept(layers: int) -> int:
        config = Qwen3Config(
            vocab_size=50, hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config).to(dtype)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.t().shape) for p in model.parameters() if p.ndim == 2}  # fmt: skip
        seen: dict[int, tuple[int, torch.Tensor]] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and tuple(tensor.shape) not in shapes:  # autocast's copies of weights
                seen[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        mask = torch.ones(2, 48, dtype=torch.long)
        mask[0, :3] = 0
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            model.model(input_ids=torch.ones(2, 48, dtype=torch.long), attention_mask=mask)
        return sum(size for size, _ in seen.values())

    size = memory.Shape(0, 0, 1, 64, 160, 4, 2, 32, 50, False)
    assert kept(3) - kept(2) == 2 * 48 * memory.layer_bytes(size, 48, arithmetic)


def test_offloading_is_not_counted_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "z.yaml"
    text = (FOLDER / "accelerate" / "zero3.yaml").read_text()
    path.write_text(text.replace("offload_optimizer_device: none", "offload_optimizer_device: cpu"))
    assert "upper bound" in launch(str(path), None).notes[0]
    path.write_text(text.replace("zero_stage: 3", "zero_stag: 3"))
    with pytest.raises(UserError, match="zero_stage"):
        launch(str(path), None)


def test_a_sharded_run_leaves_evaluation_out(empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Under DeepSpeed and FSDP no process holds the whole model; the run finishes without held-out answers and says so."""
    from klamp.train.run import Job

    monkeypatch.setattr(Job, "_whole", property(lambda self: False))
    assert main(["train", "--max_steps", "2", "--out", "run", "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert (summary["status"], summary["before"], summary["paired"]) == ("finished", None, None)
    assert "evaluation is left out under DeepSpeed and FSDP" in captured.err
    assert (empty / "run" / "report.html").exists()
    assert not (empty / "run" / "heldout.jsonl").exists()
