"""The command line: explanations, presets, and one clear message with exit code 2 for every user's mistake."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_parts import save_tiny_model

from klamp.cli import main
from klamp.presets import PRESETS, list_presets


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(list(words))
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- explain and presets --------------------------------------------------------------------------------------


def test_explain_atr_grpo(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "explain", "atr_grpo(delta=0.02)", "--json")
    region = json.loads(out)["guards"][0]["region"]
    assert (code, err) == (0, "")
    assert region["low"] == pytest.approx(0.8131051152131157, rel=1e-12)
    assert region["high"] == pytest.approx(1.2135497071517296, rel=1e-12)
    assert region["log_low"] == pytest.approx(-0.20689488478688434, rel=1e-12)
    assert region["coordinates"] == {"a": 0.0, "radius": 0.02}


def test_explain_dapo(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "explain", "dapo", "--json")
    found = json.loads(out)
    assert found["guards"][0]["region"]["coordinates"]["a"] == pytest.approx(-2.303179443, abs=1e-8)
    assert found["guards"][0]["region"]["coordinates"]["radius"] == pytest.approx(0.0277647255, abs=1e-8)
    assert found["guards"][0]["matched_radii"]["radii"]["k3"] == pytest.approx(0.027529, abs=1e-6)
    assert found["aggregate"] == "token_mean()"
    assert "2503.14476" in found["sources"][0]["citation"]


def test_explain_says_what_is_missing_and_needed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "explain", "trust_region('renyi(0.5)', 5.0) + sequence_mask(high=3.0)")
    assert "renyi(0.5) saturates on the high side: no radius reaches beyond w = 5.82843" in out
    assert "no lower bound" in out
    assert "logp_rollout" in out


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", PRESETS[name].usual)
    assert code == 0
    assert "source " in out
    assert "equation " in out


def test_presets_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "presets", "--json")
    rows = json.loads(out)
    assert [row["name"] for row in rows] == list_presets()
    assert all(row["citation"] and row["equation"] and row["summary"] for row in rows)
    _, text, _ = run(capsys, "presets")
    assert "atr_grpo(delta=0.02)" in text


@pytest.mark.parametrize("words", [
    ["--help"], ["explain", "dppo_kl"], ["train", "--help"], ["presets"], ["presets", "--table"], ["lab", "--help"],
    ["export", "gspo", "--to", "verl"],
])  # fmt: skip
def test_light_verbs_import_neither_torch_nor_trl(words: list[str]) -> None:
    code = (
        "import sys; from klamp.cli import main\n"
        f"try: main({words!r})\n"
        "except SystemExit: pass\n"
        "print('HEAVY', sorted({'torch', 'trl', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("HEAVY []")


def test_export_prints_flags_and_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "export", "atr_grpo(delta=0.02)", "--to", "verl")
    assert (code, err) == (0, "")
    assert "actor_rollout_ref.actor.clip_ratio_high=0.2135" in out
    assert "clip_ratio_c" in out  # the dual clip that is on by default
    code, out, _ = run(capsys, "export", "atr_grpo(delta=0.02)", "--to", "trl", "--json")
    found = json.loads(out)
    assert 1.0 + found["settings"]["epsilon_high"] == pytest.approx(1.2135497071517296, rel=1e-12)
    assert (code, found["exact"]) == (0, True)


def test_what_cannot_be_exported_is_exit_code_3_with_what_can(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "export", "m2po", "--to", "trl")
    assert (code, err) == (3, "")
    assert "cannot: TRL has no flag for guard(measure='k2', budget=0.02)" in out
    assert "instead: " in out


def test_map_and_plot_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = tmp_path / "map.html", tmp_path / "grpo.svg"
    assert run(capsys, "map", "--out", str(page))[:2] == (0, f"{page}\n")
    assert page.stat().st_size < 3_000_000
    code, out, err = run(capsys, "explain", "grpo", "--plot", str(picture))
    assert (code, err) == (0, f"wrote {picture}\n")
    assert "0.8 <= w <= 1.2" in out
    assert picture.read_text().startswith("<svg")


# --- mistakes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, a dataset, reward functions and configurations."""
    folder = tmp_path_factory.mktemp("place")
    save_tiny_model(folder / "tiny")
    rows = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(12)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "r.py").write_text(
        "def ok(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n"
        "def broken(prompts, completions, **columns):\n    raise KeyError('nope')\n"
        "def late(prompts, completions, **columns):\n"
        "    state = columns.get('trainer_state')\n"
        "    if state is not None and state.global_step >= 4: raise RuntimeError('after 4')\n"
        "    return [float(len(c)) for c in completions]\n"
        "def varied(prompts, completions, **columns):\n    return [float(sum(map(ord, c)) % 7) for c in completions]\n"
    )
    (folder / "typo.yaml").write_text("specc: dapo\n")
    chat = [{"messages": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    (folder / "dataset.yaml").write_text("datset: d.jsonl\n")
    (folder / "list.yaml").write_text("- dapo\n")
    (folder / "kind.yaml").write_text("eval_size: many\n")
    (folder / "file").write_text("")
    return folder


MISTAKES: list[tuple[list[str], str]] = [
    (["train", "--spec", "atr_gpro"], "did you mean 'atr_grpo'?"),
    (["explain", "atr_gpro"], "did you mean 'atr_grpo'?"),
    (["explain", "grpo("], "cannot read the spec"),
    (["explain", "grpo(epsilon='a')"], "epsilon='a' is not a number"),
    (["explain", "grpo + dapo"], "averages by"),
    (["train", "--spec", "atr_grpo(delta=-1)"], "radius=-1 is not a radius"),
    (["train", "--spec", "atr_grpo(delta=nan)"], "radius=nan is not a radius"),
    (["train", "--spec", "trust_region('k33', 0.1)"], "did you mean 'k3'?"),
    (["train", "--dataset", "{}/d.jsonl", "--reward", "math", "--prompt-field", "text"], "no column 'text'"),
    (["train", "--dataset", "{}/none.jsonl", "--reward", "math"], "none.jsonl"),
    (["train", "--dataset", "{}/d.jsonl"], "--dataset needs --reward"),
    (["train", "--dataset", "gsm9k"], "did you mean the benchmark 'gsm8k'?"),
    (["train", "--dataset", "{}/d.jsonl", "--reward", "exact", "--data-dir", "x"], "is a file, and --data-dir x"),
    (["train", "--dataset", "{}/chat.jsonl", "--reward", "exact"], "has no chat template"),
    (["train", "--config", "{}/dataset.yaml"], "did you mean 'dataset'?"),
    (["eval", "--data", "{}/chat.jsonl", "--reward", "exact"], "has no chat template"),
    (["eval", "--data", "gsm9k"], "did you mean the benchmark 'gsm8k'?"),
    (["train", "--dataset", "{}/d.jsonl", "--task", "sort", "--reward", "exact"], "not both"),
    (["train", "--dataset", "{}/d.jsonl", "--reward", "mth"], "did you mean 'math'?"),
    (["train", "--dataset", "{}/d.jsonl", "--reward", "{}/r.py:missing"], "no function 'missing'"),
    (["train", "--task", "srt"], "did you mean 'sort'?"),
    (["train", "--model", "{}/no-such-model"], "no-such-model"),
    (["train", "--model", "{}/file"], "cannot be loaded"),
    (["train", "--out", "{}/file"], "is a file"),
    (["train", "--out", "{}"], "is not empty"),
    (["train", "--out", "/proc/nowhere/run"], "/proc"),
    (["train", "--config", "{}/none.yaml"], "cannot read the configuration"),
    (["train", "--config", "{}/typo.yaml"], "did you mean 'spec'?"),
    (["train", "--config", "{}/list.yaml"], "must map option names"),
    (["train", "--config", "{}/kind.yaml"], "eval_size='many' must be of type int"),
    (["train", "--learning_rat", "1"], "did you mean 'learning_rate'?"),
    (["train", "--learning_rate", "fast"], "invalid float value"),
    (["train", "--loss_type", "dapo"], "dapo()"),
    (["train", "--spec", "grpo() + sequence_mask()"], "needs logp_rollout"),
    (["train", "--spec", "dapo + guard(measure='exact_tv', radius=0.1, ratio='new/rollout')"], "has new/old alone"),
    (["train", "--record-tokens", "2"], "between 0 and 1"),
    (["train", "--eval-size", "0"], "at least 1"),
    (["train", "--resume", "{}"], "is not a run"),
    (["train", "--output_dir", "x"], "say --out DIR"),
    (["train", "--save_only_model", "true"], "cannot be resumed"),
    (["train", "--dataset", "{}/d.jsonl", "--reward", "exact", "--num_generations", "2"], "one rollout takes"),
    (["train", "--resume", "{}/x", "--seed", "1"], "leave out --seed"),
    (["train", "--seed", "x"], "invalid int value"),
    (["fly"], "invalid choice"),
    (["explain", "grpo", "--jsn"], "unrecognized arguments"),
    (["presets", "--json", "--table"], "not allowed with"),
    (["diff", "grpo", "atr_gpro"], "did you mean 'atr_grpo'?"),
    (["diff", "grpo"], "the following arguments are required: B"),
    (["diff", "grpo", "dapo", "--batch", "{}/none"], "does not exist"),
    (["diff", "grpo", "dapo", "--batch", "{}/d.jsonl"], "is not a readable Parquet file"),
    (["diff", "grpo", "dr_grpo"], "needs a constant divisor"),
    (["diff", "grpo", "dapo", "--seed", "-1"], "seed=-1 must be a whole number"),
    (["train", "--spec", ""], "cannot read the spec ''"),
    (["export", "grpo"], "the following arguments are required: --to"),
    (["export", "grpo", "--to", "verll"], "did you mean 'verl'?"),
    (["export", "gropo", "--to", "verl"], "did you mean 'grpo'?"),
    (["map", "--out", "{}/none/map.html"], "none"),
    (["explain", "reinforce", "--plot", "{}/x.svg"], "interval"),
    (["explain", "grpo", "--plot", "{}/none/x.svg"], "none"),
    (["lab"], "the following arguments are required: VERB"),
    (["lab", "verify", "--seeds", "0"], "seeds=0 must be a whole number from 1"),
    (["lab", "verify", "--seeds", "many"], "invalid int value"),
    (["lab", "verify", "--seed", "-1"], "seed=-1 must be a whole number from 0"),
    (["lab", "explore"], "the following arguments are required: SPEC"),
    (["lab", "explore", "gppo"], "did you mean 'ppo'?"),
    (["lab", "explore", "grpo", "--scenario", "rar"], "did you mean 'rare'?"),
    (["lab", "explore", "grpo", "--group", "1"], "group=1 has no mean"),
    (["lab", "explore", "grpo", "--rate", "nan"], "rate=nan must be a finite number"),
    (["lab", "explore", "grpo", "--horizon", "3"], "--horizon belongs to --world tree or chain"),
    (["lab", "explore", "grpo", "--world", "tree", "--horizon", "12"], "too many to enumerate"),
    (["lab", "explore", "grpo + entropy_bonus()"], "tokens that were not sampled"),
]


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_one_message_and_nothing_written(
    words: list[str], says: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *(word.replace("{}", str(place)) for word in words))
    assert code == 2
    assert out == ""
    assert says in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


TINY = ["--max_steps", "4", "--per_device_train_batch_size", "8", "--num_generations", "4", "--logging_steps", "1",
        "--steps_per_generation", "2", "--max_completion_length", "6", "--eval-size", "4"]  # fmt: skip


def test_a_reward_that_raises_names_the_row_and_leaves_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ["--dataset", str(place / "d.jsonl"), "--model", str(place / "tiny"), *TINY]
    code, _, err = run(capsys, "train", *data, "--reward", f"{place}/r.py:broken", "--out", str(tmp_path / "run"))
    assert code == 2
    assert "raised KeyError: 'nope' on row" in err
    assert "(prompt: '" in err
    assert list(tmp_path.iterdir()) == []


def test_a_reward_that_raises_later_leaves_a_checkpoint(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--dataset", str(place / "d.jsonl"), "--model", str(place / "tiny"), *TINY, "--max_steps", "40"]
    code, _, err = run(capsys, "train", *data, "--reward", f"{place}/r.py:late", "--out", str(tmp_path / "run"))
    assert code == 2
    assert "RuntimeError: after 4" in err
    assert f"stopped at step 4; mend it, then --resume {tmp_path / 'run'}" in err
    assert (tmp_path / "run" / "checkpoint-4" / "klamp_state.json").exists()


# --- runs -----------------------------------------------------------------------------------------------------


def test_a_run_keeps_what_it_says(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Hugging Face directory with its own tokenizer and chat template, a dataset, a reward, records and a report."""
    chat = save_tiny_model(tmp_path / "chat", chat=True)
    code, out, _ = run(
        capsys, "train", "--dataset", str(place / "d.jsonl"), "--reward", f"{place}/r.py:ok", "--model", str(chat), *TINY,
        "--record-tokens", "--json", "--out", str(tmp_path / "run"), "--spec", "trust_region('custom_parts:cosh_gap', 0.02)",
        "--learning_rate", "0.01",
    )  # fmt: skip
    assert code == 0
    summary = json.loads(out)
    run_dir = tmp_path / "run"
    assert summary["status"] == "finished"
    assert summary["steps"] == 4
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["spec"] == "trust_region('custom_parts:cosh_gap', 0.02)".replace(
        "'custom", "measure='custom"
    ).replace(" 0.02", " radius=0.02")
    assert manifest["finished"] is not None
    assert manifest["results"]["after"]["removed_high"] is not None
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [0, 1, 2, 3, 4]
    sample = json.loads((run_dir / "samples.jsonl").read_text().splitlines()[0])
    assert set(sample) == {"step", "prompt", "completion", "answer", "reward", "result"}
    assert (run_dir / "report.html").read_text().count("<svg") >= 7

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert AutoTokenizer.from_pretrained(run_dir / "model").chat_template

    from klamp.records import read_records

    table = read_records(run_dir / "tokens")
    assert table.num_rows == 4 * 8
    row = table.to_pylist()[-1]
    assert len(row["token_ids"]) == len(row["logp_new"]) == len(row["g"]) == len(row["kept"])
    assert sorted(set(table["step"].to_pylist())) == [0, 1, 2, 3]


def test_what_shapes_a_reward_has_no_say_in_accuracy(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-out rows have no token ids and a sum's value is no accuracy: the first term alone decides."""
    reward = f"0.5*{place}/r.py:ok + overlong(limit=8, cache=4)"
    code, out, err = run(
        capsys, "train", "--dataset", str(place / "d.jsonl"), "--reward", reward, "--model", str(place / "tiny"), *TINY,
        "--json", "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    lines = [json.loads(line) for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]
    for how in ("greedy", "sampled"):
        first, last = lines[0][how], lines[-1][how]
        assert found["before"][f"accuracy_{how}"] == first.count("1") / 4
        assert found["after"][f"accuracy_{how}"] == last.count("1") / 4
        gained = sum(a + b == "01" for a, b in zip(first, last, strict=True))
        lost = sum(a + b == "10" for a, b in zip(first, last, strict=True))
        assert (found["paired"][how]["gained"], found["paired"][how]["lost"]) == (gained, lost)
        assert 0.0 < found["paired"][how]["p"] <= 1.0


def test_adapters_train_and_are_merged(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    code, _, err = run(
        capsys, "train", "--dataset", str(place / "d.jsonl"), "--reward", f"{place}/r.py:varied", "--model", str(place / "tiny"),
        *TINY, "--lora", "4", "--learning_rate", "0.05", "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert code == 0, err
    base = AutoModelForCausalLM.from_pretrained(place / "tiny").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        before, after = base(ids).logits, merged(ids).logits
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter")).eval()(ids).logits
    torch.testing.assert_close(after, adapted, rtol=1e-4, atol=1e-5)
    assert (after - before).abs().max() > 1e-3


def test_a_rank_below_one_is_refused(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(
        capsys,
        "train",
        "--model",
        str(place / "tiny"),
        "--lora",
        "0",
        "--max_steps",
        "1",
        "--out",
        str(tmp_path / "run"),
    )
    assert code == 2
    assert "--lora 0 must be a rank of at least 1" in err
    code, _, err = run(capsys, "train", "--model", str(place / "tiny"), "--lora", "999", "--out", str(tmp_path / "run"))
    assert code == 2
    assert "--lora 999 is more than the model's width of 32" in err
    code, _, err = run(capsys, "train", "--lorra", "4")
    assert "did you mean 'lora'" in err
    assert not (tmp_path / "run").exists()


def test_a_second_run_loses_nothing_of_the_first(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--dataset", str(place / "d.jsonl"), "--reward", f"{place}/r.py:ok", "--model", str(place / "tiny"),
             *TINY, "--json"]  # fmt: skip
    first = json.loads(run(capsys, *words)[1])["run"]
    before = {path: path.read_bytes() for path in Path(first).rglob("*") if path.is_file()}
    second = json.loads(run(capsys, *words)[1])["run"]
    assert first != second
    assert {path: path.read_bytes() for path in Path(first).rglob("*") if path.is_file()} == before


def test_configuration_files_and_precedence(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"dataset: {place}/d.jsonl\nreward: {place}/r.py:ok\nmodel: {place}/tiny\nspec: dapo\nmax_steps: 2\n"
        "per_device_train_batch_size: 8\nnum_generations: 4\nmax_completion_length: 4\neval_size: 4\nlearning_rate: 1.0e-3\n"
    )
    code, out, _ = run(
        capsys, "train", "--config", str(config), "--max_steps", "1", "--json", "--out", str(tmp_path / "r")
    )
    assert code == 0
    assert json.loads(out)["steps"] == 1
    assert json.loads(out)["spec"] == "dapo()"


def test_interrupt_and_resume_are_bitwise_one_run(place: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a rollout, in the second epoch, then --resume: the same weights as without."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [
        sys.executable, "-c", INTERRUPTED, "train", "--dataset", str(place / "d.jsonl"), "--reward", f"{place}/r.py:ok",
        "--model", str(place / "tiny"), *TINY, "--max_steps", "30", "--steps_per_generation", "3", "--num_iterations", "2",
        "--learning_rate", "0.01", "--spec", "ppo_kl_penalty(beta=0.1, target=0.01)", "--record-tokens", "0.5",
    ]  # fmt: skip

    def call(stop: int, *words: str) -> int:
        return subprocess.run(
            [*command[:3], *words], env=environment | {"STOP": str(stop)}, capture_output=True
        ).returncode

    assert call(0, *command[3:], "--out", str(tmp_path / "whole")) == 0
    assert call(22, *command[3:], "--out", str(tmp_path / "halves")) == 130
    assert (tmp_path / "halves" / "checkpoint-22").is_dir()
    assert call(0, "train", "--resume", str(tmp_path / "halves")) == 0
    one, other = (tmp_path / name for name in ("whole", "halves"))
    assert (one / "model" / "model.safetensors").read_bytes() == (other / "model" / "model.safetensors").read_bytes()

    def lines(folder: Path) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k != "seconds"} for row in rows if row["event"] == "train"]

    assert lines(one) == lines(other)

    from klamp.records import read_records

    sort = [("step", "ascending"), ("row", "ascending")]
    assert read_records(one / "tokens").sort_by(sort).equals(read_records(other / "tokens").sort_by(sort))


def test_a_killed_run_counts_what_came_before_its_checkpoint(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint between two log lines: the line after it still is about all the steps since the one before."""
    folder = tmp_path / "run"
    words = ["--dataset", str(place / "d.jsonl"), "--reward", f"{place}/r.py:varied", "--model", str(place / "tiny"), *TINY,
             "--max_steps", "8", "--logging_steps", "4", "--save_steps", "6", "--learning_rate", "0.01"]  # fmt: skip
    assert run(capsys, "train", *words, "--out", str(folder))[0] == 0

    def kept() -> tuple[list[Any], Any]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
        return lines, json.loads((folder / "manifest.json").read_text())["results"]

    unbroken = kept()
    shutil.rmtree(folder / "checkpoint-8")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"finished": None}))
    assert run(capsys, "train", "--resume", str(folder))[0] == 0
    assert kept() == unbroken


# ``klamp`` with a SIGINT sent to itself at the end of a given step, as a person's Ctrl-C at that moment.
INTERRUPTED = """
import os, signal, sys
from klamp.cli import main
stop = int(os.environ["STOP"])
if stop:
    from klamp.train.callbacks import Observer
    original = Observer.on_step_begin
    def begin(self, args, state, control, **kwargs):
        if state.global_step == stop - 1:
            os.kill(os.getpid(), signal.SIGINT)
    Observer.on_step_begin = begin
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "words",
    [["--seed", "-1"], ["--temperature", "0"], ["--learning_rate", "-1"], ["--per_device_train_batch_size", "0"],
     ["--max_steps", "-5"], ["--report_to", "nope"], ["--scale_rewards", "nope"], ["--num_iterations", "0"]],
    ids=" ".join,
)  # fmt: skip
def test_what_trl_cannot_start_with_is_one_message(
    words: list[str], place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    base = ["--dataset", str(place / "d.jsonl"), "--model", str(place / "tiny"), "--reward", f"{place}/r.py:ok", *TINY]
    code, _, err = run(capsys, "train", *base, *words, "--out", str(out))
    assert code == 2
    assert "Traceback" not in err
    assert not out.exists()


def test_neither_pickles_nor_code_of_a_model_are_run(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pickle
    import shutil

    from hostile import Trap

    mark = tmp_path / "mark"
    shutil.copytree(place / "tiny", tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Trap(str(mark))}))
    shutil.copytree(place / "tiny", tmp_path / "coded")
    config = json.loads((tmp_path / "coded" / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (tmp_path / "coded" / "config.json").write_text(json.dumps(config))
    (tmp_path / "coded" / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for name in ("pickled", "coded"):
        code, _, err = run(capsys, "train", "--model", str(tmp_path / name), *TINY, "--out", str(tmp_path / "run"))
        assert code == 2, err
        assert not mark.exists()
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("broken", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_broken_checkpoint_is_said(
    broken: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    base = [
        "--dataset",
        str(place / "d.jsonl"),
        "--model",
        str(place / "tiny"),
        "--reward",
        f"{place}/r.py:late",
        *TINY,
    ]
    run(capsys, "train", *base, "--max_steps", "40", "--save_steps", "1", "--out", str(out))
    manifest = (
        json.loads((out / "manifest.json").read_text()) if out.exists() else pytest.skip("the first rollout raised")
    )
    assert manifest["finished"] is None
    last = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    (last / broken).write_bytes((last / broken).read_bytes()[:20])
    code, _, err = run(capsys, "train", "--resume", str(out))
    assert code == 2
    assert f"{last} cannot be resumed" in err
    assert last.is_dir()


def test_what_a_resumed_run_must_have_kept(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing checkpoint file, other data, and a second process are refused, each by its name."""
    from klamp.train.rundir import locked

    out, data = tmp_path / "run", tmp_path / "d.jsonl"
    data.write_text((place / "d.jsonl").read_text())
    base = ["--dataset", str(data), "--model", str(place / "tiny"), "--reward", f"{place}/r.py:late", *TINY]
    run(capsys, "train", *base, "--max_steps", "40", "--save_steps", "1", "--out", str(out))

    with locked(out):
        code, _, err = run(capsys, "train", "--resume", str(out))
        assert (code, "another process is training" in err) == (2, True)

    scheduler = out / "checkpoint-4" / "scheduler.pt"
    kept = scheduler.read_bytes()
    scheduler.unlink()
    code, _, err = run(capsys, "train", "--resume", str(out))
    assert (code, "scheduler.pt is missing" in err) == (2, True)
    scheduler.write_bytes(kept)

    data.write_text(data.read_text().replace("+1?", "+2?"))
    code, _, err = run(capsys, "train", "--resume", str(out))
    assert (code, "changed since" in err) == (2, True)


def test_our_options_may_have_underscores_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--eval_every", "7", "--eval_size=9", "--check"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["train", "--eval-every", "7", "--eval-size=9", "--check"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["compare", "grpo", "--out", str(tmp_path / "c"), "--print_commands", "--eval_every=7"]) == 0
    assert "--eval-every=7" in capsys.readouterr().out
