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
        whole = dataclasses.replace(self, directory=self.directory.resolve()).cell(cell.entry, cell.seed)
        words = dataclasses.replace(self, directory=self.directory.resolve()).words(
            cell.entry.text, cell.seed, whole.directory
        )
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
        return Plan(directory, entries, **rest)
    except FileNotFoundError:
        raise UserError(f"{directory} is not a comparison: it has no {PLAN}; give the --out of klamp compare") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not a plan of klamp compare: {type(error).__name__} {error}") from error


def make(options: Options) -> Plan:
    """The plan that was asked for: that on disk, if there is one, with new specs and seeds added.

    Raises UserError where the plan on disk was made with other options of training.
    """
    directory = Path(options.out) if options.out else _fresh()
    entries = _entries(options)
    labels = [entry.label for entry in entries]
    wanted = options.reference
    near = [entry.label for entry in entries if wanted in (entry.label, entry.asked)]
    if wanted is not None and not near:
        raise UserError(f"the reference {wanted!r} is none of the specs; {did_you_mean(wanted, labels)}")
    embedded = _embedded(options.train, options.config)
    plan = Plan(
        directory, entries, options.seed_list, near[0] if near else labels[0], None if options.whole else options.base,
        options.calibrate, options.train, options.config, _threads(embedded, options.jobs),
        options.threshold, {"command": rundir.command_line(), "git_commit": rundir.git_commit(), "started": rundir.now()},
    )  # fmt: skip
    if not (directory / PLAN).exists():
        _check_free(directory, options.out)
        return plan
    return _extended(read(directory), plan)


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
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty, and no comparison; give another --out")
    rundir.check_writable(out)


def _extended(old: Plan, new: Plan) -> Plan:
    """The plan on disk with the specs and seeds of the new one."""
    for name, shown in _DECIDES.items():
        if getattr(old, name) != getattr(new, name):
            raise UserError(
                f"{old.directory} was started with {shown(getattr(old, name))}, this asks for {shown(getattr(new, name))}: "
                "its runs would not be comparable; give another --out"
            )
    known = {entry.label: entry for entry in old.entries}
    for entry in new.entries:
        before = known.get(entry.label)
        if before is not None and before.asked != entry.asked:
            raise UserError(
                f"{old.directory} has {entry.label!r} as {before.asked}, this asks for {entry.asked}; give another --out"
            )
    if old.calibrated and (new.reference != old.reference or set(known) != set(known) | {e.label for e in new.entries}):
        raise UserError(
            f"{old.directory} is calibrated to {old.reference}: other specs or another reference need another --out"
        )
    for entry in new.entries:
        known.setdefault(entry.label, entry)
    seeds = list(dict.fromkeys([*old.seeds, *new.seeds]))
    return dataclasses.replace(
        old, entries=list(known.values()), seeds=seeds, reference=new.reference, threshold=new.threshold
    )


def _entries(options: Options) -> list[Entry]:
    """The specs as they will run, by label."""
    from klamp.compare.specs import labels, slug, under, unify
    from klamp.presets import parse

    asked = [parse(text) for text in options.specs]
    base = parse(options.base)
    composed = asked if options.whole else [under(base, spec) for spec in asked]
    names = labels(asked)
    found = unify(composed)
    texts = [text for text, _ in found]
    same = [None if first is None else names[first] for _, first in found]
    return [Entry(*each) for each in zip(names, map(slug, names), options.specs, texts, same, strict=True)]


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
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
