"""Curves from other trainers' logs: which names mean the same, which shapes are read, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.compare.foreign import CAVEATS, LEFT_OUT, TRL, VERL, ForeignRun, read_log
from klamp.errors import UserError
from klamp.metrics import METRICS

# As GRPOTrainer of TRL 1.16 wrote it (num_iterations=2, beta=0.01, two reward functions), some values changed.
_STEP = {
    "clip_ratio/high_max": 0.25, "clip_ratio/high_mean": 0.02, "clip_ratio/low_mean": 0.01, "clip_ratio/low_min": 0.0,
    "clip_ratio/region_mean": 0.03, "entropy": 0.229, "epoch": 0.0625, "grad_norm": 1.5, "kl": 0.004, "learning_rate": 1e-06,
    "loss": 0.0, "step": 2, "step_time": 0.043,
}  # fmt: skip
_ROLLOUT = {
    "completions/clipped_ratio": 0.5, "completions/max_length": 8.0, "completions/max_terminated_length": 6.0,
    "completions/mean_length": 7.5, "completions/mean_terminated_length": 5.0, "completions/min_length": 4.0,
    "completions/min_terminated_length": 4.0, "frac_reward_zero_std": 0.25, "num_tokens": 104.0, "reward": 0.8,
    "reward_std": 0.4, "rewards/accuracy_reward/mean": 0.3, "rewards/accuracy_reward/std": 0.2,
    "rewards/length/mean": 0.5, "rewards/length/std": 0.1, "step_time": 0.16,
}  # fmt: skip
_EVAL = {"epoch": 0.125, "eval_loss": 0.0, "eval_reward": 0.7, "eval_reward_std": 0.1, "eval_rewards/accuracy_reward/mean": 0.4,
         "eval_clip_ratio/low_mean": 0.0, "eval_entropy": 0.22, "eval_runtime": 0.138, "step": 2}  # fmt: skip
STATE = {
    "best_global_step": None, "epoch": 0.25, "eval_steps": 2, "global_step": 4,
    "log_history": [
        _STEP | _ROLLOUT | {"step": 1}, _STEP, _EVAL, _STEP | _ROLLOUT | {"step": 3, "reward": 0.9, "grad_norm": math.nan},
        _STEP | {"step": 4, "entropy": None}, _EVAL | {"step": 4, "eval_rewards/accuracy_reward/mean": 0.5},
        {"epoch": 0.25, "step": 4, "train_loss": 0.0, "train_runtime": 0.68, "total_flos": 0.0},
    ],
    "logging_steps": 1, "max_steps": 4, "stateful_callbacks": {}, "is_world_process_zero": True,
}  # fmt: skip
TRL_CURVES = {
    "train/reward_mean": [(1, 0.8), (3, 0.9)],
    "train/tied_groups_share": [(1, 0.25), (3, 0.25)],
    "train/completion_length_mean": [(1, 7.5), (3, 7.5)],
    "train/truncated_share": [(1, 0.5), (3, 0.5)],
    "train/grad_norm": [(1, 1.5), (2, 1.5), (3, None), (4, 1.5)],
    "train/learning_rate": [(step, 1e-06) for step in range(1, 5)],
    "policy/entropy_mean": [(1, 0.229), (2, 0.229), (3, 0.229), (4, None)],
    "guard/removed_low_share": [(step, 0.01) for step in range(1, 5)],
    "guard/removed_high_share": [(step, 0.02) for step in range(1, 5)],
    "eval/accuracy_sampled": [(2, 0.4), (4, 0.5)],
}

# As verl's trainer names them (actor, critic and response metrics; validation of gsm8k).
_VERL = {
    "actor/entropy": 0.31, "actor/pg_clipfrac": 0.011, "actor/pg_clipfrac_lower": 0.0, "actor/ppo_kl": -1e-4,
    "actor/pg_loss": 0.01, "actor/grad_norm": 0.4, "actor/lr": 1e-6, "actor/kl_loss": 0.002, "critic/score/mean": 0.62,
    "critic/score/max": 1.0, "critic/rewards/mean": 0.61, "critic/advantages/mean": 0.0, "response_length/mean": 301.5,
    "response_length/clip_ratio": 0.03, "prompt_length/mean": 88.0, "timing_s/step": 12.5, "training/global_step": 1,
    "training/epoch": 0,
}  # fmt: skip
VERL_ROWS = [
    {"step": 0, "data": {"val-core/openai/gsm8k/acc/mean@8": 0.41, "val-core/openai/gsm8k/acc/best@8/mean": 0.7}},
    {"step": 1, "data": _VERL},
    {"step": 2, "data": _VERL | {"actor/entropy": 0.29, "val-core/openai/gsm8k/acc/mean@8": 0.45}},
]
VERL_CURVES = {
    "train/reward_mean": [(1, 0.62), (2, 0.62)],
    "train/completion_length_mean": [(1, 301.5), (2, 301.5)],
    "train/truncated_share": [(1, 0.03), (2, 0.03)],
    "train/grad_norm": [(1, 0.4), (2, 0.4)],
    "train/learning_rate": [(1, 1e-6), (2, 1e-6)],
    "policy/entropy_mean": [(1, 0.31), (2, 0.29)],
    "policy/kl_old_new_mean": [(1, -1e-4), (2, -1e-4)],
    "eval/accuracy_sampled": [(0, 0.41), (2, 0.45)],
}


def write(path: Path, content: Any, lines: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, (str, bytes)):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in content) if lines else json.dumps(content, indent=2))
    return path


def table(rows: list[dict[str, Any]], delimiter: str = ",") -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def noted(run: ForeignRun, *words: str) -> str:
    (found,) = [note for note in run.notes if all(word in note for word in words)]
    return found


# --- the tables -----------------------------------------------------------------------------------------------


def test_the_tables_lead_to_documented_metrics() -> None:
    assert set(TRL.values()) | set(VERL.values()) <= set(METRICS)
    assert not set(LEFT_OUT) & (set(TRL) | set(VERL))
    assert set(CAVEATS) <= set(TRL) | set(VERL)


def test_the_kl_to_a_reference_is_no_kl_to_the_old_policy() -> None:
    assert "kl" in LEFT_OUT
    assert "actor/kl_loss" in LEFT_OUT
    assert [name for name, klamp in (TRL | VERL).items() if klamp == "policy/kl_old_new_mean"] == ["actor/ppo_kl"]


def test_the_names_are_trls() -> None:
    """Each name stands in the installed trainer."""
    trl = pytest.importorskip("trl.trainer.grpo_trainer")
    text = Path(trl.__file__).read_text()
    theirs = [name for name in TRL if not name.startswith("eval_") and name not in ("grad_norm", "learning_rate")]
    for name in [name for name in theirs if name != "completion_length"]:  # of older versions
        assert f'["{name}"]' in text, name
    assert '["kl"]' in text
    assert '"eval_' in text or 'f"eval_{key}"' in text


# --- TRL ------------------------------------------------------------------------------------------------------


def test_a_trainer_state(tmp_path: Path) -> None:
    file = write(tmp_path / "my-run" / "checkpoint-4" / "trainer_state.json", STATE)
    run = read_log(file)
    assert run.curves == TRL_CURVES
    assert (run.name, run.framework, run.path) == ("my-run", "trl", file)
    text = noted(run, "not taken")
    for name in ("kl (to the reference policy", "reward_std (over all", "region_mean (both", "eval_reward (a reward"):
        assert name in text
    noted(run, "other names are not understood")
    noted(run, "clip_ratio/*", "responses")


def test_a_folder_has_its_latest_state(tmp_path: Path) -> None:
    for step in (2, 10, 4):
        write(tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json", STATE)
    assert read_log(tmp_path / "run").path.parent.name == "checkpoint-10"
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl and no trainer_state\.json"):
        read_log(tmp_path)


def test_wandbs_table_of_trl(tmp_path: Path) -> None:
    """W&B puts the run before a name, TRL's callback train/ or eval/; Step counts W&B's own calls."""
    rows = []
    for index, row in enumerate(STATE["log_history"]):  # type: ignore[arg-type, var-annotated]
        named = {}
        for name, value in row.items():
            full = (
                "train/global_step"
                if name == "step"
                else f"eval/{name[5:]}"
                if name[:5] == "eval_"
                else f"train/{name}"
            )
            named |= {f"grpo-s0 - {full}": "NaN" if value is None else value, f"grpo-s0 - {full}__MIN": value,
                      f"grpo-s0 - {full}__MAX": value}  # fmt: skip
        rows.append({"Step": index * 7} | named)
    run = read_log(write(tmp_path / "export.csv", table(rows)))
    assert run.curves == TRL_CURVES
    assert run.name == "grpo-s0"
    assert "reward_std" in noted(run, "not taken")


def test_two_runs_in_one_table_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "two.csv", '"Step","a - reward","b - reward"\n1,0.1,0.2\n')
    with pytest.raises(UserError, match="holds 2 runs: a, b; export each"):
        read_log(file)


# --- verl -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["data", "flat", "elapsed", "csv", "mlflow"])
def test_verls_file_logger(tmp_path: Path, shape: str) -> None:
    flat = [{"step": row["step"], **row["data"]} for row in VERL_ROWS]  # type: ignore[dict-item]
    if shape == "csv":
        file = write(tmp_path / "gsm8k.csv", table(flat))
    elif shape == "mlflow":
        file = write(
            tmp_path / "gsm8k.csv", table([{k.replace("@", "_at_"): v for k, v in row.items()} for row in flat], ";")
        )
    else:
        rows = {"data": VERL_ROWS, "flat": flat, "elapsed": [row | {"elapsed_seconds": 5.5} for row in VERL_ROWS]}[
            shape
        ]
        file = write(tmp_path / "gsm8k.jsonl", rows, lines=True)
    run = read_log(file)
    assert run.curves == VERL_CURVES
    assert (run.name, run.framework) == ("gsm8k", "verl")
    assert "actor/pg_clipfrac (both sides in one)" in noted(run, "not taken")
    noted(run, "actor/ppo_kl is the mean of log(old / new)")
    noted(run, "actor/entropy is of the policy before the update")


def test_verls_accuracies(tmp_path: Path) -> None:
    one = [{"step": 1, "data": _VERL | {"val-core/math/acc/mean@1": 0.5}}]
    run = read_log(write(tmp_path / "a.jsonl", one, lines=True))
    assert run.curves["eval/accuracy_greedy"] == [(1, 0.5)]
    assert "eval/accuracy_sampled" not in run.curves
    noted(run, "taken as greedy")
    both = [{"step": 1, "data": _VERL | {"val-core/math/acc/mean@4": 0.5, "val-core/math/acc/mean@16": 0.6}}]
    assert read_log(write(tmp_path / "b.jsonl", both, lines=True)).curves["eval/accuracy_sampled"] == [(1, 0.6)]
    sets = [{"step": 1, "data": _VERL | {"val-core/math/acc/mean@4": 0.5, "val-core/aime/acc/mean@4": 0.1}}]
    run = read_log(write(tmp_path / "c.jsonl", sets, lines=True))
    assert not any(name.startswith("eval/") for name in run.curves)
    noted(run, "2 sets of questions (math, aime)")
    reward = [{"step": 1, "data": _VERL | {"val-core/math/reward/mean@4": 0.5}}]  # a reward is no accuracy
    assert not any(
        name.startswith("eval/") for name in read_log(write(tmp_path / "d.jsonl", reward, lines=True)).curves
    )


# --- Klamp ----------------------------------------------------------------------------------------------------

OWN = [
    {"step": 0, "event": "eval", "seconds": 0.1, "eval/accuracy_greedy": 0.6, "eval/accuracy_sampled": 0.4},
    {"step": 1, "event": "train", "seconds": 0.4, "train/reward_mean": 0.36, "policy/kl_old_new_mean": 0.01,
     "policy/ratio_max": None, "policy/ratio_histogram": [0, 3, 1], "guard/removed_low_share": 0.05},
    {"step": 2, "event": "train", "seconds": 0.6, "policy/kl_old_new_mean": 0.02, "guard/removed_low_share": 0.06},
    {"step": 2, "event": "eval", "seconds": 0.9, "eval/accuracy_greedy": 0.7, "eval/accuracy_sampled": 0.5},
]  # fmt: skip
OWN_CURVES = {
    "eval/accuracy_greedy": [(0, 0.6), (2, 0.7)],
    "eval/accuracy_sampled": [(0, 0.4), (2, 0.5)],
    "guard/removed_low_share": [(1, 0.05), (2, 0.06)],
    "policy/kl_old_new_mean": [(1, 0.01), (2, 0.02)],
    "policy/ratio_max": [(1, None)],
    "train/reward_mean": [(1, 0.36)],
}


def test_klamps_own_metrics(tmp_path: Path) -> None:
    file = write(tmp_path / "atr-seed0" / "metrics.jsonl", OWN, lines=True)
    for path in (file, file.parent):
        run = read_log(path)
        assert (run.curves, run.name, run.framework, run.notes) == (OWN_CURVES, "atr-seed0", "klamp", ())


def test_klamps_names_in_a_table(tmp_path: Path) -> None:
    rows = [{"Step": 1, "train/reward_std": 0.2, "train/reward_mean": 0.5}, {"Step": 2, "train/reward_mean": 0.6}]
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t"), (".csv", ";")):
        run = read_log(write(tmp_path / f"mine{suffix}", table(rows, delimiter)))
        assert run.curves == {"train/reward_mean": [(1, 0.5), (2, 0.6)], "train/reward_std": [(1, 0.2)]}
        assert run.framework == "klamp"


def test_a_checkpoint_of_klamp(tmp_path: Path) -> None:
    """Klamp's trainer is TRL's: its state has names of both, and Klamp's own come first."""
    row = _STEP | {
        "policy/entropy_mean": 0.5,
        "policy/kl_old_new_mean": 0.01,
        "train/reward_mean": 0.3,
        "train/reward_std": 0.1,
    }
    run = read_log(write(tmp_path / "checkpoint-2" / "trainer_state.json", {"log_history": [row]}))
    assert run.curves["policy/entropy_mean"] == [(2, 0.5)]
    assert run.curves["train/reward_std"] == [(2, 0.1)]
    assert run.curves["train/grad_norm"] == [(2, 1.5)]


# --- broken logs ----------------------------------------------------------------------------------------------


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in OWN)
    run = read_log(write(tmp_path / "metrics.jsonl", text + '{"step": 3, "event": "train", "train/rew'))
    assert run.curves == OWN_CURVES
    assert run.notes == ("the last line is cut off and left out",)


def test_a_cut_table(tmp_path: Path) -> None:
    text = "step,reward,entropy\n1,0.5,0.31\n2,0.6,0.3"
    run = read_log(write(tmp_path / "a.csv", text))  # 0.3 may be the beginning of 0.3125
    assert run.curves == {"train/reward_mean": [(1, 0.5), (2, 0.6)], "policy/entropy_mean": [(1, 0.31)]}
    noted(run, "its last cell may be cut off")
    assert read_log(write(tmp_path / "a.csv", text + "\n")).curves["policy/entropy_mean"] == [(1, 0.31), (2, 0.3)]
    assert read_log(write(tmp_path / "b.csv", "step,reward\n1,0.5\n12")).curves == {"train/reward_mean": [(1, 0.5)]}


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    rows = [
        json.dumps(OWN[1]),
        "garbage",
        "[1, 2]",
        json.dumps({"event": "train", "train/reward_mean": 1.0}),
        json.dumps(OWN[2]),
    ]
    run = read_log(write(tmp_path / "metrics.jsonl", "\n".join(rows) + "\n"))
    noted(run, "2 lines were unreadable")
    noted(run, "1 row was without a whole step")
    assert run.curves["train/reward_mean"] == [(1, 0.36)]


def test_gaps_and_later_values(tmp_path: Path) -> None:
    rows = [
        {"step": s, "reward": r}
        for s, r in ((2, 0.1), (1, 0.2), (2, 0.3), (3, math.nan), (4, "much"), (5, 1e300), (6, True))
    ]
    run = read_log(write(tmp_path / "a.jsonl", rows, lines=True))
    assert run.curves["train/reward_mean"] == [(1, 0.2), (2, 0.3), (3, None), (4, None), (5, None), (6, None)]
    noted(run, "reward: 4 values were not a finite number")
    noted(run, "reward: 1 value was replaced")


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.jsonl", '{"step": 1, "loss": 2.0}\n', "no metric that Klamp understands: found loss; needed some of TRL's reward"),
    ("a.csv", "epoch,reward\n1,2\n", "no step column: found epoch, reward; needed one of train/global_step, step"),
    ("a.csv", "", "no rows; found nothing"),
    ("a.txt", "nothing here\n", "no rows; found nothing here"),
    ("a.csv", "step,reward\n", "no rows; found step, reward"),
    ("a.csv", "step,reward,reward\n1,2,3\n", "has the column 'reward' twice"),
    ("a.csv", "step,reward\nx,2\n1.5,2\n-1,2\ninf,3\n", "no row with a whole number as its step"),
    ("trainer_state.json", json.dumps(STATE, indent=2)[:700], "cut off; give that of an earlier checkpoint"),
    ("a.json", "{", "not readable as JSON"),
    ("a.json", "[]", "no rows"),
    ("a.json", '{"log_history": []}', "no rows"),
    ("a.json", '{"log_history": 3}', "no step column"),
    ("a.json", "[" * 100_000, "not readable as JSON"),
    ("a.csv", "step,reward\n1," + "9" * 200_000 + "\n", "not a table"),
])  # fmt: skip
def test_what_is_no_log_is_refused(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(UserError, match=said) as refused:
        read_log(file)
    assert str(file) in str(refused.value)


def test_a_cell_that_is_no_number(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", b"step,reward\n1,\x00\xff\xfe\n2,0.5\n")
    assert read_log(file).curves == {"train/reward_mean": [(1, None), (2, 0.5)]}


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_log(tmp_path / "none.csv")


_TEXT = st.text(st.sampled_from('{}[]",:\n;\tstepreward 0123456789.eE-+naNIfu'), max_size=200)
_VALUES = st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=2),
                    st.just(10**400))  # fmt: skip
_NAMES = st.sampled_from(
    ["step", "Step", "reward", "entropy", "data", "actor/entropy", "train/reward_mean", "log_history", "", "x"]
)


@given(st.one_of(_TEXT, st.lists(st.dictionaries(_NAMES, _VALUES), max_size=4).map(lambda rows: "\n".join(map(json.dumps, rows))),
                 st.dictionaries(_NAMES, _VALUES).map(json.dumps)), st.sampled_from(["a.csv", "a.jsonl", "trainer_state.json"]))  # fmt: skip
def test_never_a_traceback(tmp_path_factory: pytest.TempPathFactory, text: str, name: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any" / name
    try:
        run = read_log(write(file, text.encode(errors="replace")))
    except UserError:
        return
    for klamp, curve in run.curves.items():
        assert klamp in METRICS
        assert [step for step, _ in curve] == sorted({step for step, _ in curve})
        assert all(value is None or math.isfinite(value) for _, value in curve)
