"""klamp compare: what is asked, the plan, the grid of runs, what comes of them."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import compare_parts
import pytest
from compare_parts import write_run

from klamp import cli
from klamp.cli import main
from klamp.compare import grid, plan, table
from klamp.compare.calibrate import RULES
from klamp.compare.options import CALIBRATIONS, Options
from klamp.compare.outcomes import area, largest_drop, outcome, pass_shares, steps_to
from klamp.compare.results import JUDGED, results
from klamp.errors import UserError
from klamp.presets import parse

PEARSON = "trust_region(measure='pearson', radius=0.02)"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs are made by ``compare_parts``; returns the folder of the comparison."""
    monkeypatch.setattr(grid, "TRAIN", [sys.executable, compare_parts.__file__])
    monkeypatch.setattr(grid, "POLL", 0.02)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "c"


def starts(folder: Path, seed: int) -> list[str]:
    return (folder / f"seed-{seed}.starts").read_text().splitlines()


# --- what is asked --------------------------------------------------------------------------------------------


def test_words_of_train_are_told_from_specs_in_any_order() -> None:
    words = "compare --learning_rate 1e-3 grpo --use_vllm=false --seeds 3 --plain-prompts dapo --jobs 2 --task split"
    mine, theirs = cli._split(cli._parser(), words.split())
    assert mine == ["compare", "grpo", "dapo", "--seeds", "3", "--jobs", "2"]
    assert theirs == ["--learning_rate", "1e-3", "--use_vllm=false", "--plain-prompts", "--task", "split"]
    assert cli._split(cli._parser(), ["train", "--task", "sort"]) == (["train", "--task", "sort"], [])


@pytest.mark.parametrize(("words", "says"), [
    ([], "give the specs to compare"),
    (["grop"], "did you mean 'grpo'"),
    (["grpo", "--spec", "dapo"], "--spec is decided by the comparison: give the specs as words"),
    (["grpo", "--resume", "x"], "the same command continues"),
    (["grpo", "--seeds", "0"], "at least one seed"),
    (["grpo", "--seeds", "3,x"], "seeds by commas"),
    (["grpo", "--calibrate", "uper"], "did you mean 'upper'"),
    (["grpo", "--jobs", "0"], "at least 1"),
    (["grpo", "--threshold", "40"], "at most 1"),
    (["grpo", "--reference", "dapo"], "'dapo' is none of the specs"),
    (["grpo", "--base", "nothing"], "nothing"),
    (["grpo", "--add", "x.csv"], "--add belongs to --report"),
    (["grpo", "--report", "x"], "leave out grpo"),
    (["--report", "x", "--add", "a", "b"], "leave out b; say --add before each log"),
    (["grpo", "--continue"], "the same command continues"),
    (["--report", "nowhere"], "nowhere is not a comparison"),
    (["grpo", "--config", "nowhere.yaml"], "cannot read the configuration"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_file_says_the_same_as_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("specs: [atr_grpo, grpo]\nseeds: 2\ntask: split\nlearning_rate: 6.0e-4\nout: there\n")
    arguments, rest = cli._parser().parse_known_args(["compare", "--config", str(file), "--seeds", "4,7"])
    from klamp.compare.command import _options

    options = _options(arguments, rest, cli._read_config(str(file)))
    assert options.specs == ["atr_grpo", "grpo"]
    assert options.seed_list == [4, 7]
    assert options.config == {"task": "split", "learning_rate": 6e-4}
    assert options.out == "there"


# --- the plan -------------------------------------------------------------------------------------------------


def test_only_guards_and_factors_vary_unless_whole(tmp_path: Path) -> None:
    asked = ["atr_grpo", "dapo", "dr_grpo"]
    made = plan.make(Options(specs=asked, out=str(tmp_path / "a")))
    base = parse("grpo")
    for entry, text in zip(made.entries, asked, strict=True):
        found = parse(entry.text)
        assert (found.mean, found.penalties) == (base.mean, base.penalties)
        assert found.guards == parse(text).guards
    whole = plan.make(Options(specs=asked, whole=True, out=str(tmp_path / "b")))
    assert [parse(entry.text) for entry in whole.entries] == [parse(text) for text in asked]


def test_the_same_constraint_runs_the_same_text(tmp_path: Path) -> None:
    made = plan.make(Options(specs=["grpo", PEARSON, "dapo"], out=str(tmp_path / "c")))
    assert [entry.same_as for entry in made.entries] == [None, "grpo", None]
    assert made.entries[1].text == made.entries[0].text
    assert len({entry.folder for entry in made.entries}) == 3


def test_seeds_are_outermost_and_each_run_is_a_command(
    stand_in: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stand_in.parent)
    words = ["compare", "grpo", PEARSON, "--seeds", "2", "--out", "a b", "--max_steps", "8", "--print-commands"]
    assert main(words) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[line.index("--seed") + 1] for line in lines] == ["0", "0", "1", "1"]
    folder = stand_in.parent / "a b"
    assert [line[line.index("--out") + 1] for line in lines] == [str(c.directory) for c in plan.read(folder).cells]
    for line in lines:
        assert line[:2] == ["env", "OMP_NUM_THREADS=1"]
        assert line[4:7] == ["klamp", "train", "--continue"]
        assert line[-2:] == ["--max_steps", "8"]
        assert line[line.index("--save_steps") + 1] == line[line.index("--logging_steps") + 1] == "1"


def test_options_are_checked_before_anything_is_written(
    stand_in: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["--nonsense", "1"], ["--nonsense", "1", "--print-commands"]):
        assert compare(stand_in, *words) == 2
        said = capsys.readouterr()
        assert said.err == "klamp: the runs cannot start: there is no option '--nonsense'\n"
        assert said.out == ""
        assert not stand_in.exists()
    file = stand_in.parent / "study.yaml"
    file.write_text("specs: [grpo]\nseedz: 3\n")
    assert main(["compare", "--config", str(file)]) == 2
    assert "no option 'seedz'; did you mean 'seeds'?" in capsys.readouterr().err


def test_specs_that_cannot_differ_are_warned_of(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(stand_in, "--seeds", "1", "--on-policy", "yes") == 0
    assert "warning: each rollout has one optimizer step" in capsys.readouterr().err
    assert any("these specs cannot differ" in note for note in results(plan.read(stand_in))["notes"])
    for name in ("grpo", "dapo"):
        (stand_in / name / "seed-0.log").write_text("loading\nwarning: nothing to learn from\n")
    assert "2 of 2 runs warned: nothing to learn from" in results(plan.read(stand_in))["notes"]


def test_a_repeated_command_continues_starts_or_leaves_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from klamp.train import run, rundir
    from klamp.train.options import Options as TrainOptions

    calls: list[str] = []
    monkeypatch.setattr(run, "train", lambda options: calls.append("train") or {})
    monkeypatch.setattr(run, "resume", lambda directory: calls.append("resume") or {})
    with pytest.raises(UserError, match="--continue needs --out"):
        run.continue_or_train(TrainOptions())
    folder = tmp_path / "r"
    options = TrainOptions(out=str(folder))
    run.continue_or_train(options)
    folder.mkdir()
    (folder / ".lock").touch()
    run.continue_or_train(options)
    write_run(folder, [0.3, 0.4], finished=False)
    with rundir.locked(folder), pytest.raises(UserError, match="another process is training"):
        run.continue_or_train(options)
    run.continue_or_train(options)
    assert not folder.exists()
    write_run(folder, [0.3, 0.4], finished=False)
    compare_parts.checkpoint(folder, 10)
    run.continue_or_train(options)
    write_run(folder, [0.3, 0.4])
    assert run.continue_or_train(options) is None
    assert calls == ["train", "train", "train", "resume"]


def test_a_plan_grows_but_never_changes(tmp_path: Path) -> None:
    out = str(tmp_path / "c")
    plan.make(Options(specs=["grpo"], seeds="2", out=out, train=["--max_steps", "8"])).write()
    grown = plan.make(Options(specs=["dapo", "grpo"], seeds="1,5", out=out, train=["--max_steps", "8"]))
    assert [entry.label for entry in grown.entries] == ["grpo", "dapo"]
    assert grown.seeds == [0, 1, 5]
    for other in (
        Options(specs=["grpo"], out=out),
        Options(specs=["grpo"], out=out, train=["--max_steps", "8"], whole=True),
        Options(specs=["grpo"], out=out, train=["--max_steps", "8"], config={"task": "split"}),
    ):
        with pytest.raises(UserError, match="would not be comparable"):
            plan.make(other)


def test_a_plan_keeps_labels_reference_and_threshold_when_it_grows(tmp_path: Path) -> None:
    out = str(tmp_path / "c")
    near = ["atr_grpo(delta=0.02314001)", "grpo", "atr_grpo(delta=0.02314002)"]
    plan.make(Options(specs=near[:2], reference="grpo", threshold=0.4, out=out)).write()
    first = plan.read(Path(out))
    for asked in (near, ["grpo()"], [PEARSON], ["grpo", "dapo"]):
        grown = plan.make(Options(specs=asked, out=out))
        assert grown.entries[:2] == first.entries
        assert (grown.reference, grown.threshold) == ("grpo", 0.4)
        assert (
            len({entry.label for entry in grown.entries})
            == len({e.folder for e in grown.entries})
            == len(grown.entries)
        )
    assert len(plan.make(Options(specs=["grpo()"], out=out)).entries) == 2
    assert plan.make(Options(specs=[PEARSON], out=out)).entries[2].same_as == "grpo"
    assert plan.make(Options(specs=["dapo"], reference="dapo", threshold=0.5, out=out)).reference == "dapo"


def test_a_model_beside_is_the_same_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    made = plan.make(
        Options(specs=["grpo"], out="c", train=["--model", "m", "--dataset=gsm8k"], config={"few_shot_data": "m"})
    )
    assert made.train == ["--model", str(tmp_path / "m"), "--dataset=gsm8k"]
    assert made.config == {"few_shot_data": str(tmp_path / "m")}


@pytest.mark.parametrize("wrong", [
    {"specs": 5}, {"specs": [1]}, {"specs": {"grpo": 1}}, {"jobs": "two"}, {"jobs": 1.5}, {"threshold": "0.5"}, {"whole": "no"},
    {"reference": 5}, {"out": 5}, {"base": 5}, {"config": {"x": {1, 2}}}, {"seeds": 3.5}, {"seeds": 10**9}, {"seeds": [2**33]},
    {"seeds": []}, {"seeds": True},
])  # fmt: skip
def test_wrong_types_of_a_file_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        assert Options(**{"specs": ["grpo"]} | wrong).seed_list


def test_seeds_of_a_file() -> None:
    assert Options(specs="grpo", seeds=[3]).seed_list == [3]  # type: ignore[arg-type]
    assert Options(specs=["grpo"], seeds=3).seed_list == [0, 1, 2]
    assert Options(specs=["grpo"], seeds=[4, 2]).seed_list == [4, 2]


def test_a_plan_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    plan.make(Options(specs=["grpo"], out=str(tmp_path / "c"))).write()
    whole = json.loads((tmp_path / "c" / plan.PLAN).read_text())
    odd = [
        whole | change
        for change in ({"seeds": 5}, {"seeds": ["x"]}, {"reference": "x"}, {"threshold": "x"}, {"facts": 5})
    ]
    for text in (
        "{",
        "[]",
        "{}",
        '{"schema": 2}',
        '{"schema": 1, "entries": [{"label": 1}]}',
        "\x00",
        "[" * 9999,
        *map(json.dumps, odd),
    ):
        (tmp_path / plan.PLAN).write_text(text)
        with pytest.raises(UserError, match=r"compare\.json"):
            plan.read(tmp_path)


def test_regions_are_calibrated_to_the_reference(tmp_path: Path) -> None:
    assert set(CALIBRATIONS) == set(RULES)
    asked = ["grpo", "power_clip(a=0, radius=0.1)", "cispo"]
    made = plan.make(Options(specs=asked, calibrate="log_width", out=str(tmp_path / "c")))
    found = plan.calibrated(made)
    width = [parse(entry.text).guards[0].region for entry in found.entries[:2]]
    assert width[0].log_high - width[0].log_low == pytest.approx(width[1].log_high - width[1].log_low, rel=1e-9)
    assert found.entries[0].note is None
    assert found.entries[1].note is not None
    assert found.entries[2].note is not None
    found.write()
    with pytest.raises(UserError, match="another reference need another --out"):
        plan.make(Options(specs=["dapo"], calibrate="log_width", out=str(tmp_path / "c")))


# --- the grid -------------------------------------------------------------------------------------------------


def compare(folder: Path, *words: str) -> int:
    return main(["compare", "grpo", "dapo", "--out", str(folder), *words])


def test_runs_are_made_once_with_their_own_threads(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(stand_in, "--seeds", "3", "--jobs", "2") == 0
    captured = capsys.readouterr()
    assert "6 runs, 2 at a time, 1 threads each" in captured.err
    assert "6/6  dapo seed 2 finished" in captured.err
    assert "report" in captured.out
    assert (stand_in / "report.html").stat().st_size > 0
    assert compare(stand_in, "--seeds", "4") == 0
    for name in ("grpo", "dapo"):
        assert [starts(stand_in / name, seed) for seed in range(4)] == [["start 1 passive "]] * 4


def test_each_run_has_a_gpu_of_its_own(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert compare(stand_in, "--seeds", "1", "--jobs", "2", "--model", "some/model") == 0
    used = {starts(stand_in / name, 0)[0].split(" ", 3)[3] for name in ("grpo", "dapo")}
    assert used == {"3", "5"}
    assert grid.Grid(plan.read(stand_in), [], 1).devices == []


def test_a_killed_run_continues_and_one_that_never_lives_is_given_up(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(stand_in, "--seeds", "12,", "--jobs", "2") == 0
    assert [line.split()[0] for line in starts(stand_in / "grpo", 12)] == ["start", "resume"]
    assert main(["compare", "grpo", "--out", str(stand_in / "x"), "--seeds", "13,"]) == 2
    assert "ended 3 times before its time (exit code -9)" in capsys.readouterr().err


def test_an_error_of_a_run_is_a_result_but_what_cannot_start_stops_all(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(stand_in, "--seeds", "0,10") == 0
    assert compare(stand_in, "--seeds", "0,10") == 0
    assert len(starts(stand_in / "grpo", 10)) == 1
    capsys.readouterr()
    assert main(["compare", "--report", str(stand_in), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    runs = {run["seed"]: run for run in found["specs"][0]["runs"]}
    assert (runs[0]["status"], runs[0]["collapsed"]) == ("finished", False)
    assert (runs[10]["status"], runs[10]["collapsed"]) == ("failed", True)
    assert any("overflows" in note for note in found["notes"])
    assert main(["compare", "grpo", "--out", str(stand_in / "x"), "--seeds", "11,"]) == 2
    said = capsys.readouterr().err
    assert "does not start: there is no option '--nonsense'" in said


def test_an_interrupt_reaches_every_run_and_the_same_command_continues(stand_in: Path) -> None:
    program = (
        "import sys; from klamp.compare import grid; import compare_parts; import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "grid.TRAIN = [sys.executable, compare_parts.__file__]\n"
        "from klamp.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [
        sys.executable,
        "-c",
        program,
        "compare",
        "grpo",
        "dapo",
        "--out",
        str(stand_in),
        "--seeds",
        "14,",
        "--jobs",
        "2",
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    waits = [stand_in / name / "seed-14" / "waits" for name in ("grpo", "dapo")]
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in waits) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping all runs after their current step" in said
    assert "the same command" in said
    assert compare(stand_in, "--seeds", "14,") == 0
    assert [line.split()[0] for line in starts(stand_in / "grpo", 14)] == ["start", "resume"]


def test_models_are_dropped_on_demand_and_checkpoints_always(stand_in: Path) -> None:
    made = plan.make(Options(specs=["grpo"], seeds="1", out=str(stand_in)))
    cell = made.cells[0]
    for drop in (False, True):
        for name in ("model", "checkpoint-3"):
            (cell.directory / name).mkdir(parents=True, exist_ok=True)
        grid.Grid(made, [], 1, drop)._tidy(cell)
        assert (cell.directory / "model").exists() is not drop
        assert not (cell.directory / "checkpoint-3").exists()


def test_a_checkpoint_that_cannot_be_resumed_is_set_aside_for_the_one_before(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "grpo", "--out", str(stand_in), "--seeds", "15,"]) == 0
    assert [line.split()[0] for line in starts(stand_in / "grpo", 15)] == ["start", "resume", "resume"]
    assert "checkpoint-10 cannot be resumed and is set aside: this checkpoint is broken" in capsys.readouterr().err
    assert not (stand_in / "grpo" / "seed-15" / grid.FAILED).exists()


def test_a_run_whose_checkpoints_are_all_refused_is_kept(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["compare", "grpo", "--out", str(stand_in), "--seeds", "16,"]) == 2
        assert "this checkpoint is broken" in capsys.readouterr().err
    folder = stand_in / "grpo" / "seed-16"
    kept = {path.name for path in folder.glob("*checkpoint-*")}
    assert kept == {"checkpoint-1", "unreadable-checkpoint-5", "unreadable-checkpoint-10"}
    for path in folder.glob("checkpoint-*"):
        path.rename(folder / f"unreadable-{path.name}")
    assert main(["compare", "grpo", "--out", str(stand_in), "--seeds", "16,"]) == 2
    assert "move it away to start it anew" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").exists()


def test_what_is_no_run_of_the_comparison_is_refused_and_never_removed(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(stand_in, "--seeds", "1") == 0
    folder = stand_in / "grpo" / "seed-0"
    whole = (folder / "manifest.json").read_text()
    broken = [whole.replace('"schema": 1', '"schema": 7'), whole[:40], whole.replace('"seed": 0', '"seed": 4'), whole.replace("grpo()", "dapo()")]  # fmt: skip
    for text in broken:
        (folder / "manifest.json").write_text(text)
        assert compare(stand_in, "--seeds", "1") == 2
        assert (folder / "manifest.json").read_text() == text
    (folder / "manifest.json").unlink()
    assert compare(stand_in, "--seeds", "1") == 2
    assert "holds something, and no run; move it away" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").exists()
    assert len(starts(stand_in / "grpo", 0)) == 1


def test_a_second_comparison_in_one_place_changes_nothing(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from klamp.train import rundir

    assert compare(stand_in, "--seeds", "1") == 0
    before = (stand_in / plan.PLAN).read_bytes()
    with rundir.locked(stand_in, "comparing in"):
        assert compare(stand_in, "--seeds", "3") == 2
    assert "another process is comparing in" in capsys.readouterr().err
    assert (stand_in / plan.PLAN).read_bytes() == before


# --- what a run came to ---------------------------------------------------------------------------------------


def test_metrics_of_a_run_by_hand(tmp_path: Path) -> None:
    one = outcome(write_run(tmp_path / "r", [0.3, 0.5, 0.35, 0.45]))
    found = one.metrics
    assert found["accuracy_sampled"] == 0.45
    assert found["accuracy_greedy"] == 0.45
    assert found["auc"] == pytest.approx((0.4 + 0.425 + 0.4) / 3)
    assert found["best"] == 0.5
    assert found["largest_drop"] == pytest.approx(0.15)
    assert found["reward"] == pytest.approx((0.5 + 0.35 + 0.45) / 3)
    assert found["kl"] == pytest.approx(0.01)
    assert found["kl_sequence"] == pytest.approx(0.05)
    assert found["grad_norm_variance"] == pytest.approx(1 / 3)
    assert found["entropy_floor"] == found["entropy_final"] == pytest.approx(0.7)
    assert (found["removed_low"], found["removed_high"]) == (0.01, 0.02)
    assert (found["removed_negative"], found["removed_positive"]) == (0.01, 0.02)
    assert (found["pass_at_n"], found["distinct_correct"]) == (pytest.approx(0.54), 0.9)
    assert one.anatomy is not None
    assert one.anatomy["removed_low"][:2] == [30, 0]
    assert one.anatomy["removed_high"][:2] == [0, 60]
    assert one.anatomy["tokens"] == [300] * 10
    assert one.collapsed is False
    assert one.start == 0.3
    assert pass_shares(one) == {1: pytest.approx(0.45), 2: pytest.approx(0.45), 4: pytest.approx(0.45)}


def test_a_run_collapses_below_half_of_its_start(tmp_path: Path) -> None:
    assert outcome(write_run(tmp_path / "a", [0.4, 0.6, 0.19])).collapsed is True
    assert outcome(write_run(tmp_path / "b", [0.4, 0.6, 0.2])).collapsed is False
    assert outcome(write_run(tmp_path / "c", [0.4, 0.6]), failed=True).collapsed is True


def test_several_samples_of_a_question_are_counted_together() -> None:
    from klamp.rewards import Verdict
    from klamp.train.evaluate import Answers

    texts = ["1+2", "2+1 ", "2+1", "9", "8", "7"]
    verdicts = [Verdict(float("+" in text)) for text in texts]
    found = Answers([{}] * 6, texts, verdicts, samples=3)
    assert found.counts == [3, 0]
    assert found.distinct == [2, 0]
    assert found.accuracy == 0.5


def test_parts_of_a_curve() -> None:
    assert area([(0, 0.0), (10, 1.0), (40, 1.0)]) == pytest.approx((5 + 30) / 40)
    assert area([(0, 1.0)]) is None
    assert largest_drop([0.1, 0.5, 0.4, 0.6, 0.2, 0.3]) == pytest.approx(0.4)
    assert largest_drop([0.1, 0.2]) == 0.0
    assert largest_drop([]) is None
    assert steps_to([(0, 0.1), (5, None), (9, 0.5), (12, 0.4)], 0.4) == 9.0
    assert steps_to([(0, 0.1)], 0.4) is None


# --- results --------------------------------------------------------------------------------------------------


def planted(tmp_path: Path, effect: float, seeds: int, collapse: int = 0, questions: int = 400) -> dict[str, Any]:
    """grpo against dapo, which is better by ``effect``; ``collapse``: so many of dapo's seeds end at 0."""
    import numpy as np

    random = np.random.default_rng(0)
    made = plan.make(Options(specs=["grpo", "dapo"], seeds=str(seeds), out=str(tmp_path / "c")))
    made.write()
    for seed in range(seeds):
        common, noise = 0.5 + 0.05 * random.standard_normal(), 0.02 * random.standard_normal(2)
        for number, entry in enumerate(made.entries):
            end = common + number * effect + noise[number]
            end = 0.0 if number and seed < collapse else round(end * questions) / questions
            write_run(
                made.cell(entry, seed).directory, [0.3, 0.4, end], spec=entry.text, seed=seed, questions=questions
            )
    return results(made)


def verdict(found: dict[str, Any], metric: str) -> dict[str, Any]:
    return next(row for row in found["differences"] if row["metric"] == metric)


def test_a_planted_effect_is_found_and_a_planted_null_is_not(tmp_path: Path) -> None:
    found = verdict(planted(tmp_path / "a", 0.1, 6), "accuracy_sampled")
    assert found["verdict"] == "better"
    assert found["low"] < 0.1 < found["high"]
    assert found["n"] == 6
    assert found["p_holm"] < 0.01
    assert (found["better"], found["worse"]) == (6, 0)
    assert found["crossed"]["questions"] == 400
    assert found["crossed"]["mean"] == pytest.approx(found["mean"])
    assert math.fsum(value for _, value in found["values"]) / 6 == pytest.approx(found["mean"])
    assert [seed for seed, _ in found["values"]] == list(range(6))
    assert found["crossed"]["low"] <= found["low"]
    worse = verdict(planted(tmp_path / "b", -0.1, 6), "accuracy_sampled")
    assert worse["verdict"] == "worse"
    none = planted(tmp_path / "c", 0.0, 6)
    assert verdict(none, "accuracy_sampled")["verdict"] == "no difference found"
    assert verdict(none, "kl")["verdict"] is None
    assert "no difference found" in table.text(none)


def test_p_is_adjusted_for_all_specs_of_a_metric(tmp_path: Path) -> None:
    made = plan.make(Options(specs=["grpo", "dapo", "cispo", "sapo"], seeds="4", out=str(tmp_path / "c")))
    made.write()
    ends = {"grpo": (0, 0, 0, 0), "dapo": (9, 10, 11, 12), "cispo": (8, 1, 5, 9), "sapo": (1, -1, 1, 0)}
    for entry in made.entries:
        for seed, end in enumerate(ends[entry.label]):
            write_run(
                made.cell(entry, seed).directory, [0.3, 0.5 + 0.01 * end], spec=entry.text, seed=seed, questions=100
            )
    judged = [row for row in results(made)["differences"] if row["metric"] in JUDGED]
    assert len(judged) == 12
    p = sorted(row["p"] for row in judged)
    by_hand = [min(1.0, max((12 - k) * p[k] for k in range(rank + 1))) for rank in range(12)]
    assert sorted(row["p_holm"] for row in judged) == pytest.approx(by_hand)
    assert all(row["verdict"] is None for row in results(made)["differences"] if row["metric"] not in JUDGED)


def test_lower_is_better_where_it_is(tmp_path: Path) -> None:
    made = plan.make(Options(specs=["grpo", "dapo"], seeds="4", out=str(tmp_path / "c")))
    made.write()
    for seed in range(4):
        for entry, dip in zip(made.entries, (0.30, 0.01 * seed), strict=True):
            write_run(made.cell(entry, seed).directory, [0.3, 0.6, 0.6 - dip, 0.6], spec=entry.text, seed=seed)
    found = verdict(results(made), "largest_drop")
    assert found["mean"] < 0
    assert found["verdict"] == "better"
    assert (found["better"], found["worse"], found["improvement"]) == (4, 0, 1.0)


def test_fewer_than_three_seeds_rank_nothing(tmp_path: Path) -> None:
    found = planted(tmp_path, 0.2, 2)
    rows = [row for row in found["differences"] if row["verdict"] not in ("too few seeds", None)]
    assert rows == []
    assert all(row["p"] is None and row["low"] is None for row in found["differences"])
    text = table.text(found)
    assert "nothing is ranked with fewer than 3" in text
    assert "better" not in text
    assert "difference" not in text


def test_intervals_of_means_end_where_the_metric_does(tmp_path: Path) -> None:
    made = plan.make(Options(specs=["grpo"], seeds="3", out=str(tmp_path / "c")))
    made.write()
    for seed, end in enumerate((0.0, 0.5, 1.0)):
        write_run(made.cells[seed].directory, [0.3, end], seed=seed)
    row = next(row for row in results(made)["summary"] if row["metric"] == "accuracy_sampled")
    assert (row["low"], row["mean"], row["high"]) == (0.0, 0.5, 1.0)


def test_collapsed_seeds_are_counted_and_said(tmp_path: Path) -> None:
    found = planted(tmp_path, 0.0, 5, collapse=2)
    counts = {row["label"]: row["collapsed"] for row in found["summary"] if row["metric"] == "accuracy_sampled"}
    assert counts == {"grpo": 0, "dapo": 2}
    assert any("some runs collapsed" in note for note in found["notes"])
    assert "2 of 5" in table.text(found)


def test_the_threshold_is_one_for_all(tmp_path: Path) -> None:
    found = planted(tmp_path, 0.1, 3)
    best = max(row["mean"] for row in found["summary"] if row["metric"] == "accuracy_sampled")
    assert found["threshold"] == pytest.approx((0.3 + best) / 2)
    steps = [run["metrics"]["steps_to_threshold"] for spec in found["specs"] for run in spec["runs"]]
    assert set(steps) == {20.0}


def test_a_run_that_ended_in_an_error_answers_nothing_from_there_on(tmp_path: Path) -> None:
    made = plan.make(Options(specs=["grpo", "dapo"], seeds="4", out=str(tmp_path / "c")))
    made.write()
    for seed in range(4):
        write_run(made.cells[2 * seed].directory, [0.3, 0.40 + 0.01 * seed, 0.4], seed=seed)
        died = write_run(
            made.cells[2 * seed + 1].directory, [0.3, 0.6], spec=made.entries[1].text, seed=seed, finished=False
        )
        (died / "manifest.json").write_text(
            (died / "manifest.json").read_text().replace('"max_steps": 10', '"max_steps": 20')
        )
        (died / grid.FAILED).write_text('{"step": 10, "why": "overflow"}\n')
    found = results(made)
    one = found["specs"][1]["runs"][0]["metrics"]
    assert (one["accuracy_sampled"], one["accuracy_greedy"], one["pass_at_n"]) == (0.0, 0.0, 0.0)
    assert one["auc"] == pytest.approx(0.3 / 2 / 2)
    assert one["largest_drop"] == pytest.approx(0.3)
    row = verdict(found, "accuracy_sampled")
    assert (row["better"], row["worse"], row["verdict"]) == (0, 4, "no test possible")
    assert verdict(found, "auc")["verdict"] == "worse"


def test_odd_files_of_a_run_are_said_and_never_a_traceback(tmp_path: Path) -> None:
    made = plan.make(Options(specs=["grpo"], seeds="3", out=str(tmp_path / "c")))
    made.write()
    folders = [cell.directory for cell in made.cells]
    for seed, folder in enumerate(folders):
        write_run(folder, [0.3, 0.4], seed=seed)
    line = json.loads((folders[0] / "metrics.jsonl").read_text().splitlines()[1])
    for name in ("guard/removed_low_histogram", "batch/probability_histogram"):
        for value in (["x"] * 10, [None] * 10, [float("nan")] * 10):
            (folders[0] / "metrics.jsonl").write_text(json.dumps(line | {name: value}) + "\n")
            results(made)
    (folders[1] / "metrics.jsonl").write_text((folders[1] / "metrics.jsonl").read_text()[:200])
    (folders[2] / "heldout.jsonl").write_text(
        '{"step": 0, "greedy": "1", "sampled": "1", "samples": Infinity, "correct": [NaN]}\n'
    )
    for name, text in (("failed.json", ""), ("failed.json", "5"), ("manifest.json", "{}")):
        (folders[2] / name).write_text(text)
        try:
            found = results(made)
        except UserError:
            continue
        json.dumps(found, allow_nan=False)


def test_a_finished_run_without_its_end_is_said(tmp_path: Path) -> None:
    made = plan.make(Options(specs=["grpo"], seeds="1", out=str(tmp_path / "c")))
    made.write()
    folder = write_run(made.cells[0].directory, [0.3, 0.4])
    kept = (folder / "metrics.jsonl").read_text().splitlines()[:2]
    (folder / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    assert any("its last evaluation is missing" in note for note in results(made)["notes"])


def test_logs_have_labels_of_their_own(tmp_path: Path) -> None:
    made = plan.make(Options(specs=["grpo"], seeds="1", out=str(tmp_path / "c")))
    made.write()
    write_run(made.cells[0].directory, [0.3, 0.4])
    log = tmp_path / "grpo.csv"
    log.write_text("step,eval/accuracy_sampled,policy/entropy_mean\n1,0.1,0.5\n2,0.06,0.4\n")
    found = results(made, [f"grpo={log}", str(log), f"mine={log}"])
    assert [spec["label"] for spec in found["specs"]] == ["grpo", "grpo (log)", "grpo (log) (log)", "mine"]
    ends = {row["label"]: row["mean"] for row in found["summary"] if row["metric"] == "accuracy_sampled"}
    assert ends == {"grpo": 0.4, "grpo (log)": 0.06, "grpo (log) (log)": 0.06, "mine": 0.06}


def test_runs_that_have_not_ended_are_left_out_and_said(tmp_path: Path) -> None:
    made = plan.make(Options(specs=["grpo", "dapo"], seeds="3", out=str(tmp_path / "c")))
    made.write()
    write_run(made.cells[0].directory, [0.3, 0.4])
    write_run(made.cells[1].directory, [0.3, 0.4], spec=made.cells[1].entry.text, finished=False)
    found = results(made)
    assert [run["status"] for run in found["specs"][0]["runs"]] == ["finished", "missing", "missing"]
    assert any("5 of 6 runs have not ended" in note for note in found["notes"])


def test_a_table_is_markdown_too() -> None:
    assert table.markdown([["a", "b|c"], ["1", "2"]]) == "| a | b\\|c |\n| --- | --- |\n| 1 | 2 |"


# --- real runs ------------------------------------------------------------------------------------------------

SHORT = ["--max_steps", "16", "--per_device_train_batch_size", "16", "--steps_per_generation", "4", "--logging_steps", "1",
         "--eval-size", "32", "--eval-samples", "2", "--eval-every", "8"]  # fmt: skip


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in found]


def test_real_runs_killed_and_continued_are_those_that_were_not(tmp_path: Path) -> None:
    """The comparison's zero: one constraint twice has the same curves, to the last digit; and kill -9 changes nothing."""
    command = [sys.executable, "-m", "klamp", "compare", "grpo", PEARSON, "--seeds", "1", "--jobs", "2", *SHORT]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, "--out", str(whole)], check=True, capture_output=True)
    folders = [whole / entry.folder / "seed-0" for entry in plan.read(whole).entries]
    assert lines(folders[0]) == lines(folders[1])
    assert {row["step"] for row in lines(folders[0])} == set(range(17))
    assert not list(whole.glob("*/*/checkpoint-*"))

    process = subprocess.Popen([*command, "--out", str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = killed / folders[0].relative_to(whole)
    deadline = time.monotonic() + 120
    while grid.last_line(first / "metrics.jsonl").get("step", 0) < 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    reached = grid.last_line(first / "metrics.jsonl")["step"]
    for pid in subprocess.run(["pgrep", "-f", str(killed)], capture_output=True, text=True).stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    process.wait()
    saved = max(int(path.name.rpartition("-")[2]) for path in first.glob("checkpoint-*/klamp_state.json") or [] for path in [path.parent])  # fmt: skip
    assert saved >= reached - 1  # at most the step that it was in
    done = subprocess.run([*command, "--out", str(killed)], check=True, capture_output=True, text=True)
    assert "2/2" in done.stderr
    for folder in folders:
        assert lines(killed / folder.relative_to(whole)) == lines(folder)
