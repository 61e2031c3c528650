"""Parquet: token records, ours or with other names, streamed in batches of whole responses."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from klamp.audit.names import PER_TOKEN, Naming, naming
from klamp.audit.shaping import shaped
from klamp.audit.tokens import Array, Tokens
from klamp.errors import UserError
from klamp.records import SCHEMA_KEY, SCHEMA_VERSION

if TYPE_CHECKING:
    import pyarrow as pa

TOKENS = 1 << 19  # of one batch, about: 2 MiB of each column; more of it is slower
ALWAYS = ("step", "row", "logp_new", "logp_old", "advantage", "mask")


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=False) as file:
            yield file
    except UserError:
        raise
    except Exception as error:  # a damaged file makes the library raise more than errors of its own
        said = " ".join(str(error).split())[:160]
        raise UserError(f"{path} is not a readable Parquet file: {said or type(error).__name__}") from error


def groups(path: str) -> tuple[int, ...]:
    """The row groups with rows."""
    with _opened(path) as file:
        return tuple(k for k in range(file.metadata.num_row_groups) if file.metadata.row_group(k).num_rows > 0)


def naming_of(path: str, given: Mapping[str, str]) -> Naming:
    """Where our columns are; of records of ours, whose version is checked, under our names."""
    with _opened(path) as file:
        schema = file.schema_arrow
    version = (schema.metadata or {}).get(SCHEMA_KEY.encode(), b"").decode(errors="replace")
    if version and version != SCHEMA_VERSION:
        raise UserError(
            f"{path} has token record schema {version[:20]}, this klamp reads {SCHEMA_VERSION}; read it with the klamp that wrote it"
        )
    return naming(path, schema.names, given)


def steps(path: str, which: tuple[int, ...], names: Naming) -> Array:
    """The optimizer steps of some row groups."""
    if "step" not in names.columns:
        return np.zeros(1, np.int64)
    with _opened(path) as file:
        column = file.read_row_groups(list(which), columns=[names.columns["step"]])[0]
        return np.unique(np.concatenate([_numbers(path, "step", chunk) for chunk in column.chunks]))


def read(path: str, which: tuple[int, ...], names: Naming, wanted: frozenset[str]) -> Iterator[Tokens]:
    """The responses of some row groups, some at a time."""
    ours = [name for name in (*ALWAYS, *sorted(wanted)) if name in names.columns]
    ours = [name for name in ours if name != "prompt_id" or "group" not in ours]
    theirs = [names.columns[name] for name in ours]
    first = 0
    with _opened(path) as file:
        rows = _rows(file, which, theirs)
        before = sum(file.metadata.row_group(k).num_rows for k in range(which[0]))
        batches = file.iter_batches(
            rows, row_groups=list(which), columns=list(dict.fromkeys(theirs)), use_threads=False
        )
        for batch in batches:
            columns = {
                name: _column(path, name, batch.column(batch.schema.get_field_index(their)))
                for name, their in zip(ours, theirs, strict=True)
            }
            yield shaped(columns, batch.num_rows, path, before + first, names)
            first += batch.num_rows
        claimed = sum(file.metadata.row_group(k).num_rows for k in which)
        if claimed != first:
            raise UserError(
                f"{path} says that it has {claimed} rows in {len(which)} row groups, and has {first}: it is damaged"
            )


def _rows(file: Any, which: tuple[int, ...], names: list[str]) -> int:
    """Responses to a batch, from the mean number of tokens of one that the metadata says."""
    longest = 1.0
    for k in which:
        group = file.metadata.row_group(k)
        for index in range(group.num_columns):
            column = group.column(index)
            if column.path_in_schema.split(".")[0] in names:
                longest = max(longest, column.num_values / max(group.num_rows, 1))
    return max(1, min(int(TOKENS / longest), 1 << 17))


def _column(path: str, name: str, column: pa.Array) -> tuple[Array | None, Array | None, Array | None]:
    """(values end to end, lengths [R], which rows are null [R]); lengths None of a scalar, values None where all are null."""
    import pyarrow as pa

    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    null = _flags(column.is_null()) if column.null_count else None
    if pa.types.is_null(kind) or column.null_count == len(column) > 0:
        return None, None, null
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        fixed = pa.types.is_fixed_size_list(kind)
        lengths = np.full(len(column), kind.list_size) if fixed else np.diff(np.from_dlpack(column.offsets))
        lengths = (lengths if null is None else np.where(null, 0, lengths)).astype(np.int64)
        return _numbers(path, name, column.flatten()), lengths, null
    if name in PER_TOKEN and name not in ("advantage",):
        raise UserError(f"{path}: {name} is of type {kind}; needed a list of numbers to each response")
    return _numbers(path, name, column), None, null


def _numbers(path: str, name: str, values: pa.Array) -> Array:
    """A NumPy array of numbers, where it can be the memory that Arrow read; null is NaN, of a flag an error."""
    import pyarrow as pa

    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        if name in ("prompt_id", "group"):
            coded = values.dictionary_encode("encode")  # the same text is the same number in every batch and file
            hashed = np.array([zlib.crc32(str(one).encode()) for one in coded.dictionary.to_pylist()] or [0], np.int64)
            found: Array = hashed[np.from_dlpack(coded.indices)]
            return found
    elif pa.types.is_boolean(kind) and not values.null_count:
        return _flags(values)
    elif pa.types.is_floating(kind) or pa.types.is_integer(kind):
        plain = values.cast(pa.float64()).fill_null(np.nan) if values.null_count else values
        return np.from_dlpack(plain)  # to_numpy would load pandas
    elif pa.types.is_null(kind):
        return np.full(len(values), np.nan, np.float32)
    raise UserError(f"{path}: {name} is of type {kind}; needed numbers, for lists of them a number to each token")


def _flags(values: pa.Array) -> Array:
    """Booleans, which Arrow packs into bits."""
    bits = np.frombuffer(values.buffers()[1], np.uint8)
    return np.unpackbits(bits, count=values.offset + len(values), bitorder="little")[values.offset :].view(bool)
