"""``klamp audit``: its options; the audit itself is loaded when it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from klamp.errors import UserError, check_choice

_BY = ("step", "side", "old_prob", "position", "advantage", "token", "entropy")
_FALLBACK = "atr_grpo(delta=0.02)"
_EPILOG = """\
  klamp audit runs/RUN                                        a run of klamp train --record-tokens, under its own spec
  klamp audit runs/RUN --spec grpo --spec 'atr_grpo(delta=0.02)' --spec 'dppo_tv(delta=0.15)' --html audit.html
  klamp audit runs/RUN --by old_prob,position                 where in the response, at which tokens
  klamp audit 'out/token_exports/step_*/rank_*.jsonl'         prime-rl; verl's and TRL's logs with log-probs are known too
  klamp audit log.csv --map logp_new=lp --map logp_old=lp_before --map row=sample

A file is Parquet, JSON lines (a response to a line) or CSV. Each response needs, token by token, log-probs of two
policies (logp_new, logp_old, logp_rollout) and an advantage (one number will do). docs/audit.md has the columns, the
formats and the diagnoses. --limit help lists the limits from which on a diagnosis speaks up.
"""


def add_parser(verbs: Any) -> None:
    """The verb ``audit``."""
    parser = verbs.add_parser(
        "audit", help="what any constraint would have done to a run whose tokens were logged, and what is wrong with it", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("files", nargs="*", metavar="FILES", help="files, directories or globs of a token log; a run directory")
    add(
        "--spec",
        action="append",
        metavar="S",
        help=f"a constraint to try, again for each (default: the run's own, else {_FALLBACK})",
    )
    add("--by", metavar="SLICES", help=f"also by any of {','.join(_BY)}")
    add("--map", action="append", metavar="OURS=THEIRS", help="the name of one of our columns in the log")
    add(
        "--tokenizer",
        metavar="DIR",
        help="a folder with a tokenizer.json, to write tokens as text (default: that of the run)",
    )
    add(
        "--limit",
        action="append",
        metavar="NAME=VALUE",
        help="change from where on a diagnosis speaks up; help lists them",
    )
    add(
        "--skip-bad-rows",
        action="store_true",
        help="leave out, and count, responses with log-probs that are not finite",
    )
    add("--jobs", type=int, metavar="N", help="processes (default: as many as cores)")
    add("--html", metavar="FILE", help="also write a page that opens offline")
    add("--json", action="store_true", help="everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; returns 0."""
    limits = arguments.limit or []
    if limits == ["help"]:
        print(limits_text())
        return 0
    if not arguments.files:
        raise UserError("give the files of a token log, for example klamp audit runs/RUN; klamp audit --help says more")
    by = _slices(arguments.by)
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UserError(f"--jobs {arguments.jobs} must be at least 1")
    target = None if arguments.html is None else _target(Path(arguments.html))
    shown = by or (
        ("old_prob", "position") if target is not None else ()
    )  # a page without a picture of where says little
    found = audit(
        arguments.files, arguments.spec or own_specs(arguments.files), by=shown, mapping=_mapping(arguments.map or []), limits=limits,
        tokenizer=arguments.tokenizer, jobs=arguments.jobs or _cores(), skip_bad_rows=arguments.skip_bad_rows, say=_progress(),
    )  # fmt: skip
    if target is not None:
        from klamp.audit.page import write

        print(f"wrote {write(found, target)}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        from klamp.audit.text import text

        print(text(found, by))
    return 0


def audit(
    files: Sequence[str], specs: Sequence[str], *, by: Sequence[str] = (), mapping: Mapping[str, str] | None = None,
    limits: Sequence[str] = (), tokenizer: str | None = None, jobs: int = 1, skip_bad_rows: bool = False, say: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """What the specs would have done to the logged tokens, as ``klamp audit --json`` prints it.

    Raises UserError for files, specs, slices, names or limits that are no use, before or while it reads; never gives a part.
    """
    from klamp.audit.engine import Request, collect
    from klamp.audit.results import results, top_ids
    from klamp.audit.thresholds import with_limits

    for name in by:
        check_choice("by", name, _BY)
    own = with_limits(limits)
    request = Request(tuple(dict.fromkeys(specs)), tuple(dict.fromkeys(by)), dict(mapping or {}), skip_bad_rows)
    plan = request.plan()
    folder = _tokenizer(tokenizer, files)
    try:
        sums = collect(files, request, jobs, say)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or files[0]}: {error.strerror or error}") from error
    except MemoryError as error:
        raise UserError("a response of this log does not fit into memory; is one list the whole file?") from error
    decode = None if folder is None else _decoded(folder, top_ids(sums))
    return results(sums, plan.specs, own, files, decode)


def own_specs(files: Sequence[str]) -> list[str]:
    """The spec of the run that the first file belongs to, or the usual one."""
    path = Path(files[0])
    for folder in (path, path.parent, path.parent.parent):
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(manifest, dict) and isinstance(manifest.get("spec"), str):
            return [manifest["spec"]]
    print(f"no --spec is given and the log names none: judged by {_FALLBACK}", file=sys.stderr)
    return [_FALLBACK]


def limits_text() -> str:
    """The limits of the diagnoses with their defaults."""
    from klamp.audit.thresholds import meanings

    return "\n".join(f"{name:12} {default:<8g} {meaning}" for name, (default, meaning) in meanings().items())


def _slices(words: str | None) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(word.strip() for word in (words or "").split(",") if word.strip()))
    for name in names:
        check_choice("--by", name, _BY)
    return names


def _mapping(words: Sequence[str]) -> dict[str, str]:
    from klamp.audit.names import mapping

    found: dict[str, str] = {}
    for word in words:
        ours, theirs = mapping(word)
        if ours in found:
            raise UserError(f"--map names {ours} twice: {found[ours]} and {theirs}")
        found[ours] = theirs
    return found


def _target(path: Path) -> Path:
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--html {path}: give a file in a directory that exists, such as audit.html")
    return path


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _progress() -> Callable[[str], None]:
    """Says where a long audit is, every few seconds."""
    last = time.monotonic()

    def say(message: str) -> None:
        nonlocal last
        if time.monotonic() - last > 5.0:
            print(message, file=sys.stderr, flush=True)
            last = time.monotonic()

    return say


# --- text of tokens -------------------------------------------------------------------------------------------


def _tokenizer(given: str | None, files: Sequence[str]) -> Path | None:
    """The tokenizer.json to decode with: the one asked for, or that of the run."""
    if given is not None:
        path = Path(given) / "tokenizer.json" if Path(given).is_dir() else Path(given)
        if not path.is_file():
            raise UserError(
                f"--tokenizer {given}: there is no tokenizer.json; give the folder of a fast tokenizer of Hugging Face"
            )
        return path
    own = Path(files[0]) / "model" / "tokenizer.json"
    return own if own.is_file() else None


def _decoded(path: Path, ids: Sequence[int]) -> dict[int, str]:
    from importlib.util import find_spec

    if find_spec("tokenizers") is None:
        raise UserError("--tokenizer needs the package tokenizers, which is not installed; pip install tokenizers")
    from tokenizers import Tokenizer

    try:
        known = Tokenizer.from_file(str(path))
        return {one: known.decode([one], skip_special_tokens=False) for one in ids}
    except Exception as error:  # the package raises plain Exception for a file that it cannot read
        raise UserError(f"--tokenizer {path} cannot be read: {' '.join(str(error).split())[:160]}") from error
