"""What ``klamp compare`` was asked: its own options, and words that are those of ``klamp train``."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any

from klamp.errors import UserError, check_choice

CALIBRATIONS = ("upper", "lower", "log_width", "worst_tv", "removed")
SEEDS, SAMPLES, MOST_SEEDS = 5, 8, 1000

EPILOG = f"""\
Every option of klamp train is an option too, and goes to each run: --task split --max_steps 160 --model M --dataset D.
Runs with one seed start from the same model and see the same prompts in the same order, so that differences are paired
by seed. The same command with the same --out continues a comparison that was stopped; more specs or seeds extend it.
Only guards and factors of the specs vary, unless --whole: aggregate and penalties are those of --base.

  klamp compare atr_grpo grpo dapo --out runs/c         {SEEDS} seeds each on the embedded task
  klamp compare grpo 'trust_region(measure="k3", radius=0.02)' --calibrate log_width
  klamp compare atr_grpo grpo --seeds 10 --task split --learning_rate 6e-4
  klamp compare --config studies/methods_sort.yaml
  klamp compare --report runs/c --add trainer_state.json
"""


@dataclass
class Options:
    """``train``: words for klamp train, ``config``: its options from the configuration file."""

    specs: list[str] = field(default_factory=list)
    seeds: Any = str(SEEDS)
    base: str = "grpo"
    whole: bool = False
    calibrate: str | None = None
    reference: str | None = None
    threshold: float | None = None
    jobs: int | None = None
    out: str | None = None
    drop_models: bool = False
    train: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.specs, str):
            self.specs = [self.specs]
        if not self.specs or not isinstance(self.specs, list) or not all(isinstance(spec, str) for spec in self.specs):
            raise UserError("give the specs to compare, for example: klamp compare atr_grpo grpo dapo")
        for name, (kind, means) in _KINDS.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
                raise UserError(f"{name}={value!r} must be {means}")
        try:
            json.dumps(self.config)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"the configuration has a value that is no text, number, list or mapping: {error}"
            ) from error
        if self.calibrate is not None:
            check_choice("calibrate", self.calibrate, CALIBRATIONS)
        if self.jobs is not None and self.jobs < 1:
            raise UserError(f"jobs={self.jobs} must be at least 1")
        if self.threshold is not None and not 0.0 < self.threshold <= 1.0:
            raise UserError(f"threshold={self.threshold} must be an accuracy above 0 and at most 1")
        for word in self.train:
            name = word.partition("=")[0]
            if name in _OWN:
                raise UserError(f"{name} is decided by the comparison: {_OWN[name]}")
        for name in self.config:
            near = difflib.get_close_matches(name, [item.name for item in fields(self)], n=1, cutoff=0.8)
            if near and f"--{name}" not in _OWN:
                raise UserError(f"there is no option {name!r}; did you mean {near[0]!r}?")
            if f"--{name}" in _OWN:
                raise UserError(f"{name} is decided by the comparison: {_OWN[f'--{name}']}")

    @property
    def seed_list(self) -> list[int]:
        """``5`` means 0 to 4; ``3,7,9`` these, and ``7,`` one."""
        text = ",".join([*map(str, self.seeds), ""]) if isinstance(self.seeds, list) else str(self.seeds)
        try:
            numbers = [int(part) for part in text.split(",") if part.strip()]
            if len(numbers) == 1 and "," not in text and numbers[0] > MOST_SEEDS:
                raise UserError(
                    f"seeds={self.seeds!r} is a number of seeds, at most {MOST_SEEDS}; '{numbers[0]},' means that one"
                )
        except UserError:
            raise
        except ValueError:
            raise UserError(f"seeds={self.seeds!r} must be a number of seeds, or seeds by commas") from None
        found = list(range(*numbers)) if len(numbers) == 1 and "," not in text else list(dict.fromkeys(numbers))
        if not found or min(found) < 0 or max(found) >= 2**32:
            raise UserError(f"seeds={self.seeds!r} must be at least one seed, each from 0 to 2^32 - 1")
        return found


_KINDS: dict[str, tuple[Any, str]] = {
    "base": (str, "a spec"), "whole": (bool, "true or false"), "calibrate": (str, f"one of {', '.join(CALIBRATIONS)}"),
    "reference": (str, "one of the specs"), "threshold": ((int, float), "a number"), "jobs": (int, "a whole number"),
    "out": (str, "a directory"), "drop_models": (bool, "true or false"), "seeds": ((str, int, list), "a number, or seeds"),
}  # fmt: skip
_OWN = {
    "--spec": "give the specs as words, klamp compare A B", "--seed": "give --seeds", "--resume": "the same command continues",
    "--output_dir": "give --out", "--continue": "the same command continues", "--check": "it is checked anyway", "--dry-run": "klamp train --dry-run tries one run", "--help-trl": "klamp train --help-trl",
}  # fmt: skip


def add_parser(verbs: Any) -> None:
    """The verb ``compare``."""
    parser = verbs.add_parser(
        "compare", help="train with several specs over several seeds: paired differences, intervals, a report",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="klamp compare SPEC SPEC ... [options] [options of klamp train]",
    )  # fmt: skip
    add = parser.add_argument
    add("specs", nargs="*", metavar="SPEC", help="for example atr_grpo 'trust_region(measure=\"tv\", radius=0.1)'")
    add("--config", metavar="FILE", help="YAML file with specs and any of these options and klamp train's")
    add("--seeds", metavar="N", help=f"number of seeds, or seeds by commas, as 3,7,9 (default: {SEEDS})")
    add("--base", metavar="SPEC", help="where aggregate and penalties of all runs come from (default: grpo)")
    add("--whole", action="store_true", default=None, help="compare complete methods, each with its own aggregate and penalties")  # fmt: skip
    add("--calibrate", metavar="HOW",
        help="change the radii so that all regions have the reference's upper or lower bound, log_width, worst_tv, or removed: the share of tokens cut in the first steps")  # fmt: skip
    add("--reference", metavar="SPEC", help="the one that differences are taken from (default: the first)")
    add("--threshold", type=float, metavar="ACC", help="held-out accuracy of steps_to_threshold (default: midway between the start and the best final mean)")  # fmt: skip
    add("--jobs", type=int, metavar="J", help="runs at a time (default: one per core for an embedded model, else 1)")
    add("--out", metavar="DIR", help="new, or a comparison to continue or extend (default: a fresh one under runs/)")
    add(
        "--drop-models", action="store_true", default=None, help="remove the trained model of a run once it is measured"
    )
    add("--print-commands", action="store_true", help="one command per run, for a scheduler; --report DIR then collects them")  # fmt: skip
    add("--report", metavar="DIR", help="only rebuild the report of a comparison")
    add("--add", action="append", metavar="[NAME=]LOG", help="with --report, may be repeated: also a row from trainer_state.json, metrics.jsonl or CSV of another trainer")  # fmt: skip
    add("--json", action="store_true", help="the results as JSON")


def split(words: list[str], ours: argparse.ArgumentParser, flags: Collection[str]) -> tuple[list[str], list[str]]:
    """(words of compare, the specs first; words of klamp train): of an option of the latter's, the word after it too.

    ``flags``: those of klamp train's options that take no value.
    """
    own = {name: action.nargs != 0 for action in ours._actions for name in action.option_strings}
    specs: list[str] = []
    mine: list[str] = []
    theirs: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not word.startswith("--"):
            specs.append(word)
            continue
        takes = own.get(name, name not in flags)
        into = mine if name in own else theirs
        into.append(word)
        if takes and not equals and rest and not rest[0].startswith("--"):
            into.append(rest.pop(0))
    return [*specs, *mine], theirs
