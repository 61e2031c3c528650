"""Curves from the logs of other trainers: TRL's trainer_state.json, verl's JSONL, CSV exports; and Klamp's own.

A name is translated only where it means the same as Klamp's metric (``klamp.metrics``); the tables below are all of it.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klamp.errors import UserError
from klamp.metrics import METRICS
from klamp.report.run import finite, plural

Curve = list[tuple[int, float | None]]  # in order of step; None is a gap
Lines = list[Mapping[str, Any]]
Row = tuple[int, Mapping[str, Any]]

# transformers' and TRL's names (1.16); in evaluation the prefix eval_.
TRL: dict[str, str] = {
    "reward": "train/reward_mean",
    "frac_reward_zero_std": "train/tied_groups_share",
    "completions/mean_length": "train/completion_length_mean",
    "completion_length": "train/completion_length_mean",  # older
    "completions/clipped_ratio": "train/truncated_share",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "entropy": "policy/entropy_mean",
    "clip_ratio/low_mean": "guard/removed_low_share",
    "clip_ratio/high_mean": "guard/removed_high_share",
    "eval_rewards/accuracy_reward/mean": "eval/accuracy_sampled",  # TRL's own: 1 or 0
    "eval_rewards/reasoning_accuracy_reward/mean": "eval/accuracy_sampled",
}
VERL: dict[str, str] = {
    "critic/score/mean": "train/reward_mean",
    "response_length/mean": "train/completion_length_mean",
    "response_length/clip_ratio": "train/truncated_share",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/learning_rate",
    "actor/entropy": "policy/entropy_mean",
    "actor/entropy_loss": "policy/entropy_mean",  # older: the mean entropy itself
    "actor/ppo_kl": "policy/kl_old_new_mean",
}
# What a reader must know of a translated name.
CAVEATS: dict[str, str] = {
    "clip_ratio/low_mean": "clip_ratio/* are shares of tokens, but of responses under importance_sampling_level='sequence'",
    "actor/ppo_kl": "actor/ppo_kl is the mean of log(old / new): the same expectation as Klamp's k3, with more noise, and it "
    "may be negative",
    "actor/entropy": "actor/entropy is of the policy before the update",
}
# Names that look like one of Klamp's and mean something else.
LEFT_OUT: dict[str, str] = {
    "kl": "to the reference policy, not from old to new",
    "reward_std": "over all completions, not within groups",
    "clip_ratio/region_mean": "both sides in one",
    "clip_ratio": "both sides in one",
    "cispo_clip_ratio": "weights that were capped; nothing is removed",
    "eval_reward": "a reward, which need not be an accuracy; eval_rewards/accuracy_reward/mean is one",
    "actor/pg_clipfrac": "both sides in one",
    "actor/kl_loss": "to the reference policy, not from old to new",
    "critic/rewards/mean": "with the KL penalty taken off",
}
_VALIDATION = re.compile(r"val-(?:core|aux)/(?P<data>.+)/acc/mean(?:@|_at_)(?P<n>\d+)")
_STEPS = ("train/global_step", "step", "training/global_step", "global_step", "_step")
_ASIDE = {*_STEPS, "event", "seconds", "epoch", "train/epoch", "training/epoch", "elapsed_seconds", "_runtime",
          "_timestamp", "timestamp"}  # fmt: skip
_PLAIN = {name for name in METRICS if not name.endswith("_histogram")}
_SHOWN = 6  # names in a note or an error


@dataclass(frozen=True)
class ForeignRun:
    """One run of a trainer: ``curves`` by Klamp's metric names, and ``notes`` on what was left out and what differs."""

    name: str
    framework: str
    path: Path
    curves: dict[str, Curve]
    notes: tuple[str, ...] = ()


def read_log(path: Path) -> ForeignRun:
    """The curves in one log: ``trainer_state.json``, a JSON line per step (verl's, flat, or Klamp's), or CSV.

    Of a directory its ``metrics.jsonl``, or its latest ``trainer_state.json``. A later value for a step replaces an
    earlier one. Raises UserError for what is no log, and where it has no step or no name that is understood.
    """
    file = _file(Path(path))
    try:
        text = file.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    notes: list[str] = []
    start = text.lstrip()[:1]
    table = file.suffix.lower() in (".csv", ".tsv") or start not in ("{", "[")
    if table:
        exact, (name, lines) = False, _of_csv(file, text, notes)
    else:
        name, (exact, lines) = None, _of_json(file, text, notes)
    rows = _with_steps(file, lines, notes)
    framework = _framework(rows)
    curves = _curves(file, rows, framework, exact, notes)
    return ForeignRun(name or _name(file), framework, file, curves, tuple(notes))


def _file(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"{path} does not exist; give a trainer_state.json, a .jsonl or a .csv")
        return path
    found = [path / "metrics.jsonl", path / "trainer_state.json"]
    later = [one for one in path.glob("checkpoint-*/trainer_state.json") if one.parent.name[11:].isdigit()]
    found += sorted(later, key=lambda one: int(one.parent.name[11:]), reverse=True)
    for file in found:
        if file.is_file():
            return file
    raise UserError(f"{path} holds no metrics.jsonl and no trainer_state.json; give the log's file")


def _name(file: Path) -> str:
    """What to call a run: the file, or the folder of one whose name says nothing."""
    file = file.resolve()
    if file.stem not in ("trainer_state", "metrics", "log", "logs", "history", "progress"):
        return file.stem
    folder = file.parent.parent if re.fullmatch(r"checkpoint-\d+", file.parent.name) else file.parent
    return folder.name or file.stem


# --- shapes ---------------------------------------------------------------------------------------------------


def _of_json(file: Path, text: str, notes: list[str]) -> tuple[bool, Lines]:
    """The objects of a trainer's state, of a list, or of lines, verl's ``data`` beside its ``step``; and whether it is a
    state, where no logger has put prefixes before the names."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        return True, [row for row in whole["log_history"] if isinstance(row, dict)]
    if isinstance(whole, list):
        return False, [row for row in whole if isinstance(row, dict)]
    if isinstance(whole, dict):
        return False, [_flat(whole)]
    found: Lines = []
    bad = 0
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
            if index == len(lines) - 1 and found:
                notes.append("the last line is cut off and left out")
                continue
        if isinstance(row, dict):
            found.append(_flat(row))
        else:
            bad += 1
    if not found:
        cut = '"log_history"' in text[:100_000]
        hint = "it is cut off; give that of an earlier checkpoint" if cut else "give one JSON object per line and step"
        raise UserError(f"{file} is not readable as JSON: {hint}")
    if bad:
        notes.append(f"{plural(bad, 'line')} unreadable and left out")
    return False, found


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    inner = row.get("data")
    return row | inner if isinstance(inner, dict) else row


def _of_csv(file: Path, text: str, notes: list[str]) -> tuple[str | None, Lines]:
    """(the run's name, where the columns say it as W&B's do; the rows without their empty cells)."""
    header = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=header.count)
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise UserError(f"{file} is not a table that can be read: {error}") from error
    lines = [line for line in lines if any(cell.strip() for cell in line)]
    if len(lines) < 2:
        raise UserError(f"{file} has no rows; found {_few(lines[0]) if lines else 'nothing'}")
    name, columns = _unprefixed(file, [cell.strip() for cell in lines[0]])
    twice = [column for column, many in Counter(columns).items() if many > 1 and column]
    if twice:
        raise UserError(f"{file} has the column {twice[0]!r} twice")
    if not text.endswith("\n"):
        lines[-1] = lines[-1][: len(columns)][:-1]
        notes.append("the last line has no end: its last cell may be cut off and is left out")
    rows = [dict(zip(columns, line, strict=False)) for line in lines[1:]]
    filled: Lines = [{key: cell.strip() for key, cell in row.items() if key and cell.strip()} for row in rows]
    return name, filled


def _unprefixed(file: Path, columns: list[str]) -> tuple[str | None, list[str]]:
    """Columns as W&B exports them, ``run - metric`` and its ``__MIN``, ``__MAX``, by the metric alone."""
    runs = dict.fromkeys(column.split(" - ")[0] for column in columns if " - " in column)
    if len(runs) > 1:
        raise UserError(f"{file} holds {len(runs)} runs: {_few(runs)}; export each into a file of its own")
    found = [column.partition(" - ")[2] or column for column in columns]
    return next(iter(runs), None), ["" if name.endswith(("__MIN", "__MAX")) else name for name in found]


# --- steps ----------------------------------------------------------------------------------------------------


def _with_steps(file: Path, rows: Iterable[Mapping[str, Any]], notes: list[str]) -> list[Row]:
    rows = list(rows)
    if not rows:
        raise UserError(f"{file} has no rows: nothing was logged yet")
    names = list(dict.fromkeys(name for row in rows for name in row))
    column = next((name for step in _STEPS for name in names if name.lower() == step), None)
    if column is None:
        raise UserError(f"{file} has no step column: found {_few(names)}; needed one of {', '.join(_STEPS)}")
    found: list[Row] = []
    for row in rows:
        step = _number(row.get(column))
        if step is not None and step == int(step) and 0.0 <= step <= 2.0**53:
            found.append((int(step), row))
    if not found:
        raise UserError(f"{file} has no row with a whole number as its {column}")
    if len(found) < len(rows):
        notes.append(f"{plural(len(rows) - len(found), 'row')} without a whole step and left out")
    return found


def _number(value: object) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return finite(value)


# --- names ----------------------------------------------------------------------------------------------------


def _framework(rows: list[Row]) -> str:
    """Whose names these are: those of whom most are understood."""
    names = {name for _, row in rows for name in row}
    counts = {
        "klamp": len(names & _PLAIN),
        "trl": sum(_bare(name) in TRL for name in names),
        "verl": sum(name in VERL or _VALIDATION.fullmatch(name) is not None for name in names),
    }
    return max(counts, key=lambda who: counts[who])


def _bare(name: str) -> str:
    """TRL's name as it was before W&B's or TensorBoard's prefix."""
    for prefix, before in (("train/", ""), ("eval/", "eval_")):
        if name.startswith(prefix):
            return before + name.removeprefix(prefix)
    return name


def _translated(name: str, framework: str, exact: bool) -> tuple[str, str | None]:
    """(the name in the tables, Klamp's name or None)."""
    if framework == "klamp" or (exact and name in _PLAIN):
        return name, name if name in _PLAIN else TRL.get(name) if exact else None
    if framework == "verl":
        return name, VERL.get(name)
    bare = name if exact else _bare(name)
    if bare in TRL or bare in LEFT_OUT:
        return bare, TRL.get(bare)
    return name, name if name in _PLAIN else None


def _curves(file: Path, rows: list[Row], framework: str, exact: bool, notes: list[str]) -> dict[str, Curve]:
    names = [name for name in dict.fromkeys(name for _, row in rows for name in row) if name.lower() not in _ASIDE]
    table: dict[str, str] = {}  # Klamp's name -> the log's, the first in the order of the tables
    own, unknown, known = [], [], []
    for name in names:
        bare, klamp = _translated(name, framework, exact)
        if klamp is not None:
            known.append((_rank(bare), name, bare, klamp))
        elif bare in LEFT_OUT and framework != "klamp":
            own.append(bare)
        elif name not in METRICS and name != "data":
            unknown.append(name)
    for _, name, bare, klamp in sorted(known):
        if klamp not in table:
            table[klamp] = name
            notes += [CAVEATS[bare]] if bare in CAVEATS else []
    if framework == "verl":
        judged = _validation(names, table, notes)
        unknown = [name for name in unknown if name not in judged]
    if not table:
        raise UserError(
            f"{file} has no metric that Klamp understands: found {_few(names)}; needed some of TRL's {_few(TRL)}; verl's "
            f"{_few(VERL)}; or Klamp's own names, such as train/reward_mean"
        )
    if own:
        notes.append("not taken: " + "; ".join(f"{name} ({LEFT_OUT[name]})" for name in dict.fromkeys(own)))
    if unknown:
        notes.append(f"{len(unknown)} other names are not understood: {_few(unknown)}")
    points = {klamp: _points(rows, name, notes) for klamp, name in table.items()}
    return {klamp: curve for klamp, curve in sorted(points.items()) if curve}


def _rank(name: str) -> int:
    """The place in the tables, first come first taken; Klamp's own names before all."""
    order = [*TRL, *VERL]
    return order.index(name) if name in order else -1


def _validation(names: list[str], table: dict[str, str], notes: list[str]) -> set[str]:
    """verl's accuracies: of several answers they are sampled, of one greedy, as verl validates unless told otherwise."""
    found = [(name, match) for name in names if (match := _VALIDATION.fullmatch(name))]
    data = dict.fromkeys(match["data"] for _, match in found)
    if len(data) > 1:
        notes.append(f"not taken: the accuracies on {len(data)} sets of questions ({_few(data)}); one is one curve")
    elif found:
        name, match = max(found, key=lambda one: int(one[1]["n"]))
        table["eval/accuracy_sampled" if int(match["n"]) > 1 else "eval/accuracy_greedy"] = name
        if int(match["n"]) == 1:
            notes.append(f"{name} is taken as greedy, verl's default for one answer; with do_sample=True it is not")
    return {name for name, _ in found}


def _points(rows: list[Row], name: str, notes: list[str]) -> Curve:
    found: dict[int, float | None] = {}
    odd = replaced = 0
    for step, row in rows:
        if name in row:
            value = _number(row[name])
            odd += value is None and row[name] is not None
            replaced += step in found
            found[step] = value
    if odd:
        notes.append(f"{name}: {plural(odd, 'value')} not a finite number and a gap here")
    if replaced:
        notes.append(f"{name}: {plural(replaced, 'value')} replaced by later ones of the same step")
    return sorted(found.items())


def _few(names: Iterable[str]) -> str:
    every = list(names)
    more = f", and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more if every else "nothing"


__all__ = ["CAVEATS", "LEFT_OUT", "TRL", "VERL", "ForeignRun", "read_log"]
