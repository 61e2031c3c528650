"""The files of token records: their schema, a writer that leaves only whole parts, and a reader."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from klamp.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_KEY = "klamp.schema"
SCHEMA_VERSION = "1"


@dataclass(frozen=True)
class Column:
    """One column of a record: `null` says what a null means, and is "never" where none is allowed."""

    name: str
    type: str
    unit: str
    null: str
    meaning: str

    @property
    def nullable(self) -> bool:
        return self.null != "never"

    @property
    def per_token(self) -> bool:
        return self.type.startswith("list<")


RECORD_SCHEMA: tuple[Column, ...] = (
    Column("prompt_id", "string", "-", "never", "the prompt, by a name that is stable over the run"),
    Column("group", "int64", "-", "never", "completions that share a prompt and a baseline in one step"),
    Column("row", "int64", "-", "never", "the completion's index in its step, unique over all processes"),
    Column("step", "int64", "optimizer steps", "never", "optimizer steps done when this update was computed"),
    Column("micro_step", "int64", "micro-batches", "never", "the micro-batch of the step that held the row"),
    Column("token_ids", "list<int32>", "-", "never", "the completion's tokens, without padding"),
    Column("logp_new", "list<float32>", "nats", "not computed", "log-prob under the policy being updated"),
    Column(
        "logp_old",
        "list<float32>",
        "nats",
        "no separate old policy: it equals new",
        "log-prob under the policy before the update, recomputed by the trainer",
    ),
    Column(
        "logp_rollout",
        "list<float32>",
        "nats",
        "the sampler recorded none",
        "log-prob as the sampler recorded it; NaN where one token is missing",
    ),
    Column(
        "logp_ref",
        "list<float32>",
        "nats",
        "the run has no reference policy",
        "log-prob under the reference policy",
    ),
    Column("advantage", "list<float32>", "reward", "never", "the advantage A of each token"),
    Column("mask", "list<bool>", "-", "never", "true where the token counts"),
    Column("reward", "float32", "reward", "the completion was not scored", "the completion's total reward"),
    Column("entropy", "list<float32>", "nats", "not computed", "entropy of the new policy at each token"),
    Column("kept", "list<bool>", "-", "never", "true where every guard lets the policy gradient pass"),
    Column(
        "g",
        "list<float32>",
        "reward",
        "never",
        "dJ/dlogp_new of the policy term before aggregation; 0 where cut or where A = 0",
    ),
)

_BY_NAME = {column.name: column for column in RECORD_SCHEMA}
_PART = re.compile(r"\.?part-(\d+)(?:\.\d+)?\.(?:parquet|tmp)$")


def arrow_schema() -> pa.Schema:
    """`RECORD_SCHEMA` as a pyarrow schema, its version in the metadata under `klamp.schema`."""
    import pyarrow as pa

    scalars = {
        "string": pa.string(),
        "int64": pa.int64(),
        "int32": pa.int32(),
        "float32": pa.float32(),
        "bool": pa.bool_(),
    }

    def arrow_type(text: str) -> pa.DataType:
        if text.startswith("list<"):
            return pa.list_(pa.field("element", scalars[text[5:-1]], nullable=False))
        return scalars[text]

    fields = [pa.field(c.name, arrow_type(c.type), nullable=c.nullable) for c in RECORD_SCHEMA]
    return pa.schema(fields, metadata={SCHEMA_KEY: SCHEMA_VERSION})


class RecordWriter:
    """Writes records into numbered Parquet parts of one directory, each part atomically.

    `sample` keeps that share of the completions: those with the smallest hash(seed, step, row), so the choice
    is the same however the rows are cut into batches, and a smaller share is a subset of a larger one.
    Several processes may write into one directory. `written` and `sampled_out` count rows.
    Raises UserError for a share outside (0, 1], an unusable directory, or a row that the schema does not fit.
    """

    def __init__(self, directory: str | Path, sample: float = 1.0, seed: int = 0, rows_per_part: int = 4096):
        if not 0.0 < sample <= 1.0:
            raise UserError(
                f"sample={sample!r}: the share of completions to record must be in (0, 1]; 1.0 records all of them"
            )
        self.directory, self.sample, self.seed, self.rows_per_part = (
            Path(directory),
            sample,
            seed,
            rows_per_part,
        )
        self.written = self.sampled_out = 0
        self._buffer: list[pa.Table] = []
        _require_pyarrow()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write token records into {self.directory}: {error.strerror}; "
                "choose a directory that can be written"
            ) from error
        self._next = 1 + max((number for number, _ in _numbered(self.directory)), default=-1)

    def selects(self, step: int, row: int) -> bool:
        """Whether `write` would keep this completion: ask first, to spare copying what is not kept."""
        digest = hashlib.blake2b(f"{self.seed}:{int(step)}:{int(row)}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.sample * 2.0**64

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Buffer rows (one per completion and step); lists may be tensors. All rows of a call, or none."""
        import pyarrow as pa

        kept, dropped = [], 0
        for row in rows:
            step, number = row.get("step"), row.get("row")
            if step is None or number is None or self.selects(step, number):
                kept.append(_checked(row))
            else:
                dropped += 1
        try:
            table = pa.Table.from_pylist(kept, schema=arrow_schema())
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise UserError(f"token records do not fit the schema: {error}; see docs/records.md") from error
        self.sampled_out += dropped
        self.append(table)

    def append(self, table: pa.Table) -> None:
        """Buffer records that have the schema already; what `selects` leaves out is the caller's affair."""
        self._buffer.append(table)
        if sum(table.num_rows for table in self._buffer) >= self.rows_per_part:
            self.flush()

    def flush(self) -> Path | None:
        """Write the buffer as one new part and return its path; None if there was nothing to write."""
        rows = sum(table.num_rows for table in self._buffer)
        if not rows:
            return None
        import pyarrow as pa

        part = self._write_part(pa.concat_tables(self._buffer))
        self.written += rows
        self._buffer = []
        return part

    def rewind(self, step: int) -> int:
        """Remove the records of `step` and later, which a resumed run will do again; returns how many rows.

        Call it before writing, with no other writer alive: leftovers of a killed writer are removed too.
        """
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        removed = 0
        for _, part in _numbered(self.directory):
            if part.suffix == ".tmp":
                part.unlink()
                continue
            table = _read_part(part)
            earlier = table.filter(pc.less(table["step"], step))
            removed += table.num_rows - earlier.num_rows
            if earlier.num_rows == 0:
                part.unlink()
            elif earlier.num_rows < table.num_rows:
                temporary = part.with_name(f".{part.stem}.tmp")
                pq.write_table(earlier, temporary, compression="zstd")
                os.replace(temporary, part)
        return removed

    def _write_part(self, table: pa.Table) -> Path:
        """A whole file gets its name by a link, which claims the number: two processes never share a part."""
        import pyarrow.parquet as pq

        temporary = self.directory / f".part-{self._next:06d}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as handle:
                pq.write_table(table, handle, compression="zstd")
                handle.flush()
                os.fsync(handle.fileno())
            while True:
                part = self.directory / f"part-{self._next:06d}.parquet"
                self._next += 1
                try:
                    os.link(temporary, part)  # fails where another process took the number; never overwrites
                    return part
                except FileExistsError:
                    continue
        finally:
            temporary.unlink(missing_ok=True)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()  # also after an error: the rows in the buffer are complete


def read_records(path: str | Path) -> pa.Table:
    """The records of one part, or of every part of a directory in order, as a pyarrow Table.

    Raises UserError for a path without records, a file that is not ours, or another schema version.
    """
    _require_pyarrow()
    import pyarrow as pa

    path = Path(path)
    if path.is_file():
        return _read_part(path)
    if not path.is_dir():
        raise UserError(f"{path} does not exist; give a part-*.parquet file or the directory that holds them")
    parts = [part for _, part in _numbered(path) if part.suffix == ".parquet"]
    if not parts:
        inner = path / "tokens"
        hint = f"did you mean {inner}?" if inner.is_dir() else "a run writes them with --record-tokens"
        raise UserError(f"{path} holds no token records (part-*.parquet); {hint}")
    return pa.concat_tables([_read_part(part) for part in parts])


def _read_part(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow
            version = (found.metadata or {}).get(SCHEMA_KEY.encode(), b"").decode(errors="replace")
            if not version:
                raise UserError(
                    f"{path} is a Parquet file but not a klamp token record (no {SCHEMA_KEY} in its "
                    "metadata); give a part-*.parquet that klamp wrote"
                )
            if version != SCHEMA_VERSION:
                raise UserError(
                    f"{path} has token record schema {version}, this klamp reads {SCHEMA_VERSION}; "
                    "read it with the klamp that wrote it (klamp version in its manifest.json)"
                )
            if not found.equals(arrow_schema()):
                raise UserError(
                    f"{path} says it is token record schema {version}, but its columns are "
                    f"{', '.join(found.names)}; docs/records.md lists the right ones"
                )
            return file.read()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(f"{path} is not a readable Parquet file; give a part-*.parquet that klamp wrote") from error


def _require_pyarrow() -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError("token records need pyarrow, which is not installed; pip install pyarrow")


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    """Parts and temporary files with their numbers, in order."""
    matches = ((_PART.match(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _checked(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as plain Python values: every column there, nulls only where allowed, lists of one length."""
    for name in row:
        if name not in _BY_NAME:
            raise UserError(f"token records have no column {name!r}; {did_you_mean(name, _BY_NAME)}")
    where = f"step {row.get('step')}, row {row.get('row')}"
    plain: dict[str, Any] = {}
    for column in RECORD_SCHEMA:
        value = row.get(column.name)
        if value is not None and hasattr(value, "tolist"):
            value = value.tolist()
        if value is None and not column.nullable:
            raise UserError(
                f"token record at {where}: column {column.name!r} ({column.type}) is missing; it may not be null"
            )
        if value is not None and column.per_token:
            value, tokens = list(value), len(plain.get("token_ids", value))
            if len(value) != tokens:
                raise UserError(
                    f"token record at {where}: {column.name!r} has {len(value)} entries for {tokens} "
                    "tokens; every list has one entry per token of the completion, without padding"
                )
            if None in value:
                raise UserError(
                    f"token record at {where}: {column.name!r} is null at token {value.index(None)}; "
                    "write NaN for a missing number, or null for the whole list"
                )
        plain[column.name] = value
    return plain
