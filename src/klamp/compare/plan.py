"""The plan of a comparison: which specs, seeds and options, and the one run directory of each pair of them."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from klamp.compare.options import SAMPLES, Options
from klamp.errors import UserError, did_you_mean
from klamp.train import rundir
from klamp.version import __version__

if TYPE_CHECKING:
    from klamp.batch import Batch
    from klamp.compare.calibrate import Calibrated

PLAN, TRAIN = "compare.json", "train.yaml"
SCHEMA = 1


@dataclass(frozen=True)
class Entry:
    """One spec of the comparison: what was ``asked``, the ``text`` that runs, and why they differ (``note``).

    ``same_as``: the label of an earlier entry that is the same constraint; both run that one's text.
    """

    label: str
    folder: str
    asked: str
    text: str
    same_as: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Cell:
    """One run: an entry and a seed, and its directory."""

    entry: Entry
    seed: int
    directory: Path


@dataclass
class Plan:
    """Everything that decides the runs. ``train``: words for klamp train, ``config``: its configuration file."""

    directory: Path
    entries: list[Entry]
    seeds: list[int]
    reference: str
    base: str | None
    calibrated: str | None
    train: list[str]
    config: dict[str, Any]
    threads: int
    threshold: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def embedded(self) -> bool:
        """Whether the model is one that ships with Klamp, for which one thread is enough."""
        return _embedded(self.train, self.config)

    @property
    def environment(self) -> dict[str, str]:
        """Of each run: threads that wait by spinning make two jobs on one machine several times slower."""
        threads = str(self.threads)
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}

    @property
    def cells(self) -> list[Cell]:
        """All specs of a seed, then the next seed: a comparison cut short is still paired."""
        return [self.cell(entry, seed) for seed in self.seeds for entry in self.entries]

    def cell(self, entry: Entry, seed: int) -> Cell:
        return Cell(entry, seed, self.directory / entry.folder / f"seed-{seed}")

    def words(self, text: str, seed: int, out: Path) -> list[str]:
        """The options of klamp train for one run."""
        words = ["--spec", text, "--seed", str(seed), "--out", str(out)]
        words += ["--config", str(self.directory / TRAIN)] if self.config else []
        if not _says(self.train, self.config, "eval_samples"):
            words += ["--eval-samples", str(SAMPLES)]
        if not _says(self.train, self.config, "logging_steps", "logging_strategy"):
            words += ["--logging_steps", "1"]  # metrics of a run are then means over its steps
        if not _says(self.train, self.config, "save_strategy", "save_steps", "save_total_limit"):
            # A killed run loses the step that it was in; of a larger model, where saving takes time, a tenth of the run.
            steps = "1" if self.embedded else "0.1"
            words += ["--save_strategy", "steps", "--save_steps", steps, "--save_total_limit", "2"]
        return [*words, *self.train]

    def command(self, cell: Cell) -> str:
        """A line for a scheduler, from any folder: repeated, it continues the run, and leaves one that has finished."""
        around = [f"{name}={value}" for name, value in self.environment.items()]
        whole = dataclasses.replace(self, directory=self.directory.resolve())
        words = whole.words(cell.entry.text, cell.seed, whole.cell(cell.entry, cell.seed).directory)
        return shlex.join(["env", *around, "klamp", "train", "--continue", *words])

    def write_options(self) -> None:
        """The file that runs are given with ``--config``."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.config:
            replace_file(self.directory / TRAIN, yaml.safe_dump(self.config, sort_keys=False))

    def write(self) -> None:
        data = {"schema": SCHEMA, "klamp": __version__} | {
            item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "directory"
        }
        data["entries"] = [dataclasses.asdict(entry) for entry in self.entries]
        self.write_options()
        replace_file(self.directory / PLAN, json.dumps(data, indent=2) + "\n")


def read(directory: Path) -> Plan:
    """The plan of a comparison on disk. Raises UserError where there is none."""
    path = directory / PLAN
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise UserError(f"{path} has schema {data['schema']!r}; this klamp {__version__} reads {SCHEMA}")
        entries = [Entry(**entry) for entry in data["entries"]]
        rest = {
            item.name: data[item.name] for item in dataclasses.fields(Plan) if item.name not in ("directory", "entries")
        }
        plan = Plan(directory, entries, **rest)
        _check_types(plan)
        return plan
    except FileNotFoundError:
        raise UserError(f"{directory} is not a comparison: it has no {PLAN}; give the --out of klamp compare") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not a plan of klamp compare: {type(error).__name__} {error}") from error


def _check_types(plan: Plan) -> None:
    """Raise TypeError unless the values of a file are what a plan holds."""
    texts = [value for entry in plan.entries for value in (entry.label, entry.folder, entry.asked, entry.text)]
    numbers = [*plan.seeds, plan.threads]
    if (
        not all(isinstance(text, str) for text in [*texts, *plan.train])
        or not all(isinstance(number, int) for number in numbers)
        or not (isinstance(plan.config, dict) and isinstance(plan.facts, dict))
        or not (plan.threshold is None or isinstance(plan.threshold, float))
        or plan.reference not in [entry.label for entry in plan.entries]
    ):
        raise TypeError("its values are not those of a plan")


def make(options: Options) -> Plan:
    """The plan that was asked for: that on disk, if there is one, with new specs and seeds added.

    Raises UserError where the plan on disk was made with other options of training.
    """
    directory = Path(options.out) if options.out else _fresh()
    train, config = _whole_paths(options.train, options.config)
    embedded = _embedded(train, config)
    old = read(directory) if (directory / PLAN).exists() else None
    entries = _entries(options, [] if old is None else old.entries)
    reference = _reference(options, entries)
    plan = Plan(
        directory, entries, options.seed_list, reference or entries[0].label, None if options.whole else options.base,
        options.calibrate, train, config, _threads(embedded, options.jobs),
        None if options.threshold is None else float(options.threshold),
        {"command": rundir.command_line(), "git_commit": rundir.git_commit(), "started": rundir.now()},
    )  # fmt: skip
    if old is None:
        _check_free(directory, options.out)
        return plan
    return _extended(old, plan, reference)


def _reference(options: Options, entries: list[Entry]) -> str | None:
    """The label of the reference that was asked for."""
    wanted = options.reference
    if wanted is None:
        return None
    found = [entry.label for entry in entries if wanted in (entry.label, entry.asked)]
    if not found:
        raise UserError(
            f"the reference {wanted!r} is none of the specs; {did_you_mean(wanted, [e.label for e in entries])}"
        )
    return found[0]


def calibrated(plan: Plan, batches: Sequence[Batch] | None = None) -> Plan:
    """The plan with the regions of all new specs as large as the reference's; ``batches``: for the rule ``removed``."""
    if plan.calibrated is None:
        return plan
    from klamp.compare.calibrate import calibrate
    from klamp.compare.specs import unify
    from klamp.presets import parse

    reference = parse(next(entry.text for entry in plan.entries if entry.label == plan.reference))
    found = [calibrate(reference, parse(entry.text), plan.calibrated, batches) for entry in plan.entries]
    texts = unify([one.spec for one in found])
    names = [entry.label for entry in plan.entries]
    entries = [
        dataclasses.replace(
            entry,
            text=text,
            same_as=None if first is None else names[first],
            note=None if entry.label == plan.reference else _note(one),
        )
        for entry, one, (text, first) in zip(plan.entries, found, texts, strict=True)
    ]
    return dataclasses.replace(plan, entries=entries)


def _note(one: Calibrated) -> str | None:
    if one.note:
        return one.note
    return f"{one.how} {one.before:.6g} -> {one.after:.6g}" if one.changed else None


def _check_free(directory: Path, out: str | None) -> None:
    ours = {".lock", TRAIN, "calibration"}  # what is left where a comparison was stopped before its plan was written
    if directory.is_dir() and not {path.name for path in directory.iterdir()} <= ours:
        raise UserError(f"{directory} is not empty, and no comparison; give another --out")
    rundir.check_writable(None if directory.is_dir() else out)


def _extended(old: Plan, new: Plan, reference: str | None) -> Plan:
    """The plan on disk with the specs and seeds of the new one."""
    for name, shown in _DECIDES.items():
        if getattr(old, name) != getattr(new, name):
            raise UserError(
                f"{old.directory} was started with {shown(getattr(old, name))}, this asks for {shown(getattr(new, name))}: "
                "its runs would not be comparable; give another --out"
            )
    more = len(new.entries) > len(old.entries)
    if old.calibrated and (more or reference not in (None, old.reference)):
        raise UserError(
            f"{old.directory} is calibrated to {old.reference}: other specs or another reference need another --out"
        )
    return dataclasses.replace(
        old, entries=new.entries, seeds=list(dict.fromkeys([*old.seeds, *new.seeds])),
        reference=reference or old.reference, threshold=old.threshold if new.threshold is None else new.threshold,
    )  # fmt: skip


def _entries(options: Options, known: list[Entry]) -> list[Entry]:
    """The specs as they will run: those that are there already, as they are, then the new ones, under labels of their own."""
    from klamp.compare.specs import labels, slug, under, unify
    from klamp.presets import parse

    there = [parse(entry.asked) for entry in known]
    texts = [text for text in options.specs if not known or parse(text) not in there]
    asked = [parse(text) for text in texts]
    base = parse(options.base)
    composed = asked if options.whole else [under(base, spec) for spec in asked]
    names = labels([*there, *asked])[len(there) :] if asked else []
    taken = {entry.label for entry in known}
    names = [name if name not in taken else f"{name} ({number})" for number, name in enumerate(names, 2)]
    every = [entry.label for entry in known] + names
    found = unify([*(parse(entry.text) for entry in known), *composed])[len(known) :]
    same = [None if first is None else every[first] for _, first in found]
    return known + [
        Entry(*each) for each in zip(names, map(slug, names), texts, (t for t, _ in found), same, strict=True)
    ]


_PATHS = ("model", "dataset", "few_shot_data")


def _whole_paths(train: list[str], config: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Options that name a file or folder here, as absolute paths: the same from any folder."""

    def whole(value: Any) -> Any:
        return str(Path(value).resolve()) if isinstance(value, str) and value and Path(value).exists() else value

    words = list(train)
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.lstrip("-").replace("-", "_") in _PATHS and name.startswith("--"):
            if equals:
                words[place] = f"{name}={whole(value)}"
            elif place + 1 < len(words):
                words[place + 1] = whole(words[place + 1])
    return words, {name: whole(value) if name in _PATHS else value for name, value in config.items()}


_DECIDES: dict[str, Callable[[Any], str]] = {
    "base": lambda base: "--whole" if base is None else f"--base {base}",
    "calibrated": lambda how: "no --calibrate" if how is None else f"--calibrate {how}",
    "train": lambda words: f"the options {shlex.join(words)}" if words else "no options of klamp train",
    "config": lambda config: f"a file that says {json.dumps(config)}" if config else "no file",
}


def _threads(embedded: bool, jobs: int | None) -> int:
    """Of each run: as the environment says; one for an embedded model; else the machine's, divided among the jobs."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if embedded or not said.isdigit():
        return 1 if embedded else max(1, (os.cpu_count() or 1) // (jobs or 1))
    return max(1, int(said))


def _embedded(train: list[str], config: dict[str, Any]) -> bool:
    models = [after for word, after in pairwise(train) if word == "--model"]
    models += [word.partition("=")[2] for word in train if word.startswith("--model=")]
    model = models[0] if models else config.get("model")
    return model is None or str(model).startswith("embedded:")


def _says(words: list[str], config: dict[str, Any], *names: str) -> bool:
    said = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words} | config.keys()
    return bool(said & set(names))


def _fresh() -> Path:
    return Path("runs") / datetime.datetime.now().strftime("compare-%Y%m%d-%H%M%S")


def replace_file(path: Path, text: str) -> None:
    """Write a file at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
