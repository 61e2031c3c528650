"""Run directories: where a run keeps everything, and what a manifest says about it."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from klamp.errors import UserError
from klamp.regions import Region
from klamp.spec import Spec
from klamp.version import __version__

MANIFEST = "manifest.json"
SCHEMA = 1


def is_main() -> bool:
    """Whether this is the process that writes and speaks: the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def create(out: str | None, spec: Spec, seed: int) -> tuple[Path, Path]:
    """A new, empty, writable run directory, the same on every process, and the topmost folder made for it.

    ``out``, or a fresh name under ``runs/``; never an existing run.
    """
    from accelerate.utils import broadcast_object_list

    found: list[Any] = [None, None]
    if is_main():
        directory = _name(out, spec, seed)
        found = [directory, _topmost_missing(directory)]
        _make(directory)
    broadcast_object_list(found)
    return found[0], found[1]


def _name(out: str | None, spec: Spec, seed: int) -> Path:
    if out is not None:
        return Path(out)
    stem = re.sub(r"[^a-z0-9.]+", "-", str(spec).lower()).strip("-")[:40]
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        suffix = f"-{attempt}" if attempt else ""
        path = Path("runs") / f"{stamp}-{stem}-seed{seed}{suffix}"
        if not path.exists():
            return path
    raise UserError("no free name under runs/; give --out DIR")


def check_writable(out: str | None) -> None:
    """Fail before any work if a run could not be written."""
    target = Path(out) if out is not None else Path("runs")
    try:
        _check_target(target, out)
    except OSError as error:
        raise UserError(f"cannot write to {target}: {error.strerror}; give another --out") from error


def _check_target(target: Path, out: str | None) -> None:
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; give --out a directory that does not exist yet")
    if out is not None and target.is_dir() and not empty(target):
        raise UserError(f"{target} is not empty; give another --out, or continue that run with --resume {target}")
    nearest = next(parent for parent in [target, *target.absolute().parents] if parent.exists())
    if not os.access(nearest, os.W_OK | os.X_OK) or not nearest.is_dir():
        raise UserError(f"cannot write to {nearest}; give --out a directory that you can write to")


def _topmost_missing(path: Path) -> Path:
    """The folder to remove so that nothing of ``path`` is left, asked before it is made."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    return missing[-1] if missing else path


def discard(directory: Path, made: Path) -> None:
    """Remove a run that never began: the folders from ``made`` down that exist for it alone."""
    shutil.rmtree(directory, ignore_errors=True)
    folder = directory.parent
    while made != directory and folder.is_relative_to(made) and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def _make(path: Path) -> None:
    """Make the empty, writable run directory."""
    check_writable(str(path))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {path}: {error.strerror}; give another --out") from error


@contextlib.contextmanager
def locked(directory: Path, doing: str = "training in") -> Iterator[None]:
    """Hold the directory: a second process that would do the same there is refused."""
    if not is_main():
        yield
        return
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with (directory / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another process is {doing} {directory}; wait for it, or give another --out") from error
        yield


def started(directory: Path) -> bool:
    """Whether a run was begun there."""
    return (directory / MANIFEST).exists()


def empty(directory: Path) -> bool:
    """Whether there is nothing but perhaps the lock of a process that has just begun."""
    return all(path.name == ".lock" for path in directory.iterdir())


def clear(directory: Path) -> None:
    """Remove a run that was stopped before its first checkpoint. Raises UserError while a process trains there."""
    with locked(directory):
        shutil.rmtree(directory)


def in_use(directory: Path) -> bool:
    """Whether some process holds the directory."""
    try:
        with locked(directory):
            return False
    except UserError:
        return True


def manifest(spec: Spec, task: str, seed: int, command: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """What a reader needs to know, and ``--resume`` to repeat: spec, versions, seed, command, options."""
    packages = ("torch", "transformers", "trl", "accelerate", "datasets", "numpy")
    return {
        "klamp": __version__,
        "schema": SCHEMA,
        "spec": str(spec),
        "spec_parts": spec.to_dict(),
        "region": _region(spec),
        "versions": {name: _version(name) for name in packages} | {"python": platform.python_version()},
        "seed": seed,
        "command": command,
        "git_commit": git_commit(),
        "task": task,
        "options": options,
        "started": now(),
        "finished": None,
        "results": {"before": None, "after": None},
    }


def _region(spec: Spec) -> dict[str, Any] | None:
    """The bounds that the report draws: those of the first interval on the policy's own ratio."""
    found = [(guard.region, guard.ratio, str(guard.gate)) for guard in spec.guards if isinstance(guard.region, Region)]
    if not found:
        return None
    region, ratio, _ = min(found, key=lambda item: (item[1] != "new/old", item[2] != "outward"))
    finite = [bound if math.isfinite(bound) else None for bound in (region.log_low, region.log_high)]
    return {"log_low": finite[0], "log_high": finite[1], "ratio": ratio}


def write(directory: Path, data: dict[str, Any]) -> None:
    temporary = directory / f".{MANIFEST}.tmp"
    temporary.write_text(json.dumps(data, indent=2) + "\n")
    os.replace(temporary, directory / MANIFEST)


def finish(directory: Path, data: dict[str, Any], after: dict[str, Any]) -> None:
    data["results"]["after"], data["finished"] = after, now()
    write(directory, data)


def load(directory: Path) -> dict[str, Any]:
    """The manifest of a run to resume."""
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{directory} is not a run: it has no {MANIFEST}; give --resume the directory of a klamp train run"
        )
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    needed = ("schema", "options", "finished", "results")
    if not isinstance(data, dict) or any(name not in data for name in needed):
        raise UserError(f"{path} is not a manifest of klamp train: it lacks some of {', '.join(needed)}")
    if data["schema"] != SCHEMA:
        raise UserError(f"{path} has schema {data.get('schema')!r}; this klamp {__version__} reads {SCHEMA}")
    return data


def latest_checkpoint(directory: Path) -> Path:
    """The last complete checkpoint: the file that klamp writes last is there. Raises UserError if files are gone."""
    folders = [path for path in directory.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    found = [path for path in folders if _complete(path / "klamp_state.json")]
    if not found:
        raise UserError(f"{directory} has no complete checkpoint to resume from; start again without --resume")
    last = max(found, key=lambda path: int(path.name.rpartition("-")[2]))
    listed = json.loads((last / "klamp_state.json").read_text()).get("files", [])
    gone = (
        [str(name) for name in listed if not (last / str(name)).exists()]
        if isinstance(listed, list)
        else ["its list of files"]
    )
    if gone:
        raise UserError(f"{last} cannot be resumed: {', '.join(gone)} is missing; remove the folder for the one before")
    return last


def _complete(state: Path) -> bool:
    try:
        return isinstance(json.loads(state.read_text()), dict)
    except (OSError, ValueError):
        return False


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def command_line() -> list[str]:
    return ["klamp", *sys.argv[1:]]
