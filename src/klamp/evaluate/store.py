"""A directory that holds an evaluation: every sample in Parquet, one part per batch of a fixed plan.

A part is complete from the moment it has its name, and its name is its batch: a run that was killed continues with the
batches that have no part, so no sample is lost and none is there twice.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klamp.errors import UserError
from klamp.evaluate.questions import Question
from klamp.train import rundir
from klamp.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST, SAMPLES, RESULTS, PAGE = "manifest.json", "samples", "results.json", "samples.html"
SCHEMA = 1
KIND = "klamp eval"
COLUMNS = {
    "question": "string", "row": "int64", "sample": "int32", "prompt": "string", "gold": "string",
    "completion": "string", "answer": "string", "reward": "float64", "correct": "bool", "tokens": "int32",
    "truncated": "bool", "seed": "int64",
}  # fmt: skip
NULLABLE = frozenset({"answer", "reward", "correct"})


@dataclass(frozen=True)
class Plan:
    """Samples in order: all of the first question, then of the next; batch b is the b-th run of ``size`` of them."""

    questions: Sequence[Question]
    n: int
    size: int

    @property
    def samples(self) -> int:
        return len(self.questions) * self.n

    @property
    def batches(self) -> int:
        return -(-self.samples // self.size)

    def batch(self, number: int) -> list[tuple[int, int]]:
        """(index of the question, index of the sample) of each sample of a batch."""
        places = range(number * self.size, min((number + 1) * self.size, self.samples))
        return [divmod(place, self.n) for place in places]


class Store:
    """The directory of one evaluation, open for writing by one process."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.directory, self.plan = directory, plan

    def part(self, batch: int) -> Path:
        return self.directory / SAMPLES / f"part-{batch:06d}.parquet"

    def missing(self) -> list[int]:
        """The batches without a part. Raises UserError for a part that cannot be read or holds other samples."""
        for left in (self.directory / SAMPLES).glob(".*.tmp"):  # of a writer that was killed
            left.unlink()
        found = [batch for batch in range(self.plan.batches) if self.part(batch).exists()]
        for batch in found:
            wanted = [(self.plan.questions[q].id, s) for q, s in self.plan.batch(batch)]
            table = _read(self.part(batch))
            held = list(zip(table["question"].to_pylist(), table["sample"].to_pylist(), strict=True))
            if held != wanted:
                raise UserError(
                    f"{self.part(batch)} holds other samples than the plan; remove it to draw that batch again"
                )
        return sorted(set(range(self.plan.batches)) - set(found))

    def write(self, batch: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """All rows of a batch, or nothing: the part gets its name when it is on the disk."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        part = self.part(batch)
        part.parent.mkdir(exist_ok=True)
        temporary = part.with_name(f".{part.stem}.tmp")
        with temporary.open("wb") as handle:
            pq.write_table(pa.Table.from_pylist(list(rows), schema=schema()), handle, compression="zstd")
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, part)


def schema() -> pa.Schema:
    """``COLUMNS`` as a pyarrow schema."""
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "bool": pa.bool_(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "float64": pa.float64(),
    }
    return pa.schema([pa.field(name, types[kind], nullable=name in NULLABLE) for name, kind in COLUMNS.items()])


# --- opening --------------------------------------------------------------------------------------------------


def check_target(out: str | None) -> None:
    """Fail before any work if an evaluation could not be written: ``out`` is new, empty, or an evaluation."""
    target = Path(out) if out is not None else Path("runs")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; give --out a directory")
    nearest = next(parent for parent in [target, *target.absolute().parents] if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {nearest}; give --out a directory that you can write to")
    if out is not None and target.is_dir() and any(target.iterdir()) and not (target / MANIFEST).is_file():
        raise UserError(f"{target} is not empty and no evaluation; give another --out")


def fresh_name(model: str, seed: int) -> Path:
    stem = "".join(c if c.isalnum() or c in ".-" else "-" for c in Path(model).name)[:40]
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        path = Path("runs") / f"eval-{stamp}-{stem}-seed{seed}{f'-{attempt}' if attempt else ''}"
        if not path.exists():
            return path
    raise UserError("no free name under runs/; give --out DIR")


@contextlib.contextmanager
def opened(directory: Path, plan: Plan, manifest: dict[str, Any]) -> Iterator[tuple[Store, dict[str, Any], list[str]]]:
    """A new evaluation, or one to continue: (store, its manifest, what changed around it since it started).

    Held by a lock. One that fails before its first part leaves nothing. Raises UserError for another evaluation, naming
    the options that differ, and where another process holds the lock.
    """
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    new = not (directory / MANIFEST).exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with rundir.locked(directory, "evaluating into"):
            try:
                held, notes = manifest, []
                if new:
                    write_json(directory / MANIFEST, manifest)
                else:
                    held = load_manifest(directory)
                    notes = _same(directory, held, manifest)
                yield Store(directory, plan), held, notes
            finally:
                if new and not any((directory / SAMPLES).glob("part-*")):
                    _remove(directory, made)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or directory}: {error.strerror}") from error


def _remove(directory: Path, made: Sequence[Path]) -> None:
    """Take back an evaluation that never began, and the folders that were made for it."""
    shutil.rmtree(directory / SAMPLES, ignore_errors=True)
    for name in (MANIFEST, RESULTS, PAGE, ".lock"):
        (directory / name).unlink(missing_ok=True)
    for folder in made:
        with contextlib.suppress(OSError):  # something else is in it
            folder.rmdir()


def _same(directory: Path, held: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Refuse other options or data; notes of other versions, which may change the last bits."""
    before, now = held["identity"], asked["identity"]
    told = {"model_fingerprint": "the model's files changed", "data_fingerprint": "the questions changed"}
    names = [name for name in now | before if before.get(name) != now.get(name)]
    if names:
        changes = [told.get(name, f"{name} was {before.get(name)!r}, is {now.get(name)!r}") for name in names]
        raise UserError(f"{directory} holds another evaluation: {'; '.join(changes)}; give another --out")
    old, new = held.get("versions", {}), asked["versions"]
    return [f"{name} was {old.get(name)}, is {new[name]}" for name in new if old.get(name) != new[name]]


# --- manifests ------------------------------------------------------------------------------------------------


def new_manifest(identity: dict[str, Any], about: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """``identity`` decides which samples are drawn; ``about`` is for the reader."""
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "klamp": __version__,
        "identity": identity,
        **about,
        "plan": {"questions": len(plan.questions), "samples": plan.samples, "batch_size": plan.size, "batches": plan.batches},
        "versions": versions(),
        "started": now(),
        "finished": None,
    }  # fmt: skip


def versions() -> dict[str, str | None]:
    """What the last bits of a logit depend on."""
    import torch

    found: dict[str, str | None] = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "transformers", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    return found | {"device": device}


def load_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of an evaluation. Raises UserError if there is none that this klamp reads."""
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(f"{directory} is not an evaluation: it has no {MANIFEST}; give the --out of a klamp eval")
    try:
        data = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != KIND or not isinstance(data.get("identity"), dict):
        raise UserError(f"{path} is not a manifest of klamp eval; give the --out of a klamp eval")
    if data.get("schema") != SCHEMA:
        raise UserError(f"{path} has schema {data.get('schema')!r}; this klamp {__version__} reads {SCHEMA}")
    return data


def write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    os.replace(temporary, path)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# --- reading --------------------------------------------------------------------------------------------------


def read_samples(directory: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Every sample of an evaluation in the order of the plan, or only some columns of each."""
    rows: list[dict[str, Any]] = []
    for part in sorted((directory / SAMPLES).glob("part-*.parquet")):
        table = _read(part)
        rows += (table if columns is None else table.select(list(columns))).to_pylist()
    return rows


def _read(part: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(part).read()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{part} is not a readable Parquet file; remove it to draw that batch again") from error
    if table.schema.names != list(COLUMNS):
        raise UserError(f"{part} has the columns {', '.join(table.schema.names)}; it is no part of an evaluation")
    return table


def model_fingerprint(path: str, commit: str | None = None) -> str:
    """A folder's checksum: names and sizes of its files, small ones whole, 64 pieces of large ones; of a hub id its commit."""
    folder = Path(path)
    if not folder.is_dir():
        return commit or path
    total = hashlib.blake2b(digest_size=16)
    for file in sorted(one for one in folder.iterdir() if one.is_file() and not one.name.startswith(".")):
        size = file.stat().st_size
        total.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as handle:
            pieces, length = (1, size) if size <= 2**22 else (64, 2**16)
            for piece in range(pieces):
                handle.seek(piece * (size - length) // max(1, pieces - 1))
                total.update(handle.read(length))
    return total.hexdigest()
