"""Sources: a file, a folder or a saved dataset as numbered rows, each with its value or the reason why it has none."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from klamp.errors import UserError, did_you_mean

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
SPLITS = ("train", "validation", "valid", "dev", "test", "eval")
BATCH = 1024  # rows that are Python values at a time, of a format in columns

Record = Mapping[str, Any]


class RowError(ValueError):
    """Why one row cannot be used; what surrounds it can."""


@dataclass(frozen=True)
class Raw:
    """One row of a source: its ``value``, or None and the ``reason``; ``row`` counts from 1, ``place`` is for messages."""

    row: int
    place: str
    value: Record | None
    reason: str = ""


@dataclass(frozen=True)
class Source:
    """Column names, and the rows in order; ``name`` is the path or the hub id that was read."""

    name: str
    columns: tuple[str, ...]
    rows: Iterable[Raw]


def open_path(path: Path, split: str) -> Source:
    """A file, a folder of files (those named after the split, if any is named after one), or a saved dataset.

    Raises UserError for what cannot be read as a whole: no file, a damaged Parquet file, an open quote in a CSV.
    """
    if not path.exists():
        raise UserError(f"there is no file or folder {str(path)!r}")
    if path.is_file():
        return open_file(path)
    if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
        import datasets

        try:
            saved = datasets.load_from_disk(str(path))
        except Exception as error:
            raise UserError(f"{path} is not a readable saved dataset: {error}") from error
        return from_dataset(saved, split, str(path))
    return _join([open_file(file) for file in _files(path, split)], str(path))


def open_file(path: Path) -> Source:
    """One file by its suffix."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} ends in {path.suffix!r}; it must be one of {', '.join(SUFFIXES)}")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty; it must have at least one row with a prompt and an answer")
        return _READERS[path.suffix](path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def from_dataset(dataset: Any, split: str, name: str) -> Source:
    """A split of a ``datasets.DatasetDict``, or a ``datasets.Dataset``."""
    if isinstance(dataset, Mapping):
        if split not in dataset:
            raise UserError(f"{name} has no split {split!r}; {did_you_mean(split, map(str, dataset))}")
        dataset = dataset[split]
    tables = dataset.with_format("arrow").iter(BATCH) if len(dataset) else iter(())
    return Source(name, tuple(dataset.column_names), _arrow_rows(tables, name))


def _files(folder: Path, split: str) -> list[Path]:
    files = sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES and p.is_file())
    if not files:
        raise UserError(f"the folder {folder} has no file that ends in {', '.join(SUFFIXES)} and is no saved dataset")
    named = {p: re.split(r"[-_.]", p.name)[0] for p in files}
    if any(name in SPLITS for name in named.values()):
        files = [p for p in files if named[p] == split]
        if not files:
            raise UserError(f"{folder} has no split {split!r}; {did_you_mean(split, set(named.values()))}")
    return files


def _join(parts: list[Source], name: str) -> Source:
    for part in parts:
        if set(part.columns) != set(parts[0].columns):
            raise UserError(
                f"{part.name} has the columns {sorted(part.columns)}, but {parts[0].name} has {sorted(parts[0].columns)}"
            )

    def rows() -> Iterator[Raw]:
        number = 0
        for part in parts:
            for raw in part.rows:
                number += 1
                yield replace(raw, row=number)

    return Source(parts[0].name if len(parts) == 1 else name, parts[0].columns, rows())


# --- text -----------------------------------------------------------------------------------------------------


def _json(path: Path) -> Source:
    """JSON lines, or one JSON list of objects."""
    lines = [(number, text) for number, text in _lines(path) if text.strip()]
    rows = _listed(path, lines) if _is_list(path, lines) else _json_lines(path, lines)
    names = dict.fromkeys(name for raw in rows if raw.value is not None for name in raw.value)
    return Source(str(path), tuple(names), rows)


def _is_list(path: Path, lines: list[tuple[int, str]]) -> bool:
    """Whether it is one list; a first line that is a list of its own, before others of a .jsonl, is a bad row."""
    if not lines or not lines[0][1].lstrip().startswith("["):
        return False
    if path.suffix == ".json" or len(lines) == 1:
        return True
    try:
        _parse(lines[0][1].strip())
    except RowError:
        return True
    return False


def _json_lines(path: Path, lines: list[tuple[int, str]]) -> list[Raw]:
    def read(row: int, line: int, text: str) -> Raw:
        place = f"{path}, line {line}"
        try:
            return Raw(row, place, _object(_parse(_decoded(text.rstrip("\r\n")))))
        except RowError as error:
            cut = row == len(lines) and not text.endswith("\n")
            hint = "; the file ends within this line, so it may be cut off" if cut else ""
            return Raw(row, place, None, f"{error}{hint}")

    return [
        replace(raw, place=f"{path}, row {raw.row}") if raw.value is not None else raw
        for raw in (read(row, line, text) for row, (line, text) in enumerate(lines, 1))
    ]


def _listed(path: Path, lines: list[tuple[int, str]]) -> list[Raw]:
    for line, text in lines:
        try:
            _decoded(text)
        except RowError as error:
            raise UserError(f"{path}, line {line}: {error}") from error
    try:
        values = _parse("".join(text for _, text in lines), lines[0][0])
    except RowError as error:
        raise UserError(f"{path}: {error}") from error
    found = []
    for row, value in enumerate(values, 1):
        try:
            found.append(Raw(row, f"{path}, row {row}", _object(value)))
        except RowError as error:
            found.append(Raw(row, f"{path}, row {row}", None, str(error)))
    return found


def _object(value: Any) -> Record:
    if not isinstance(value, dict):
        raise RowError(f"expected an object with a prompt and an answer, found {kind(value)}")
    return value


def _parse(text: str, first: int | None = None) -> Any:
    """A JSON value; ``first``: the number of its first line, where it has several."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise RowError(f"a key appears twice in one object: {[name for name, _ in pairs]}")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except json.JSONDecodeError as error:
        line = "" if first is None else f"line {first + error.lineno - 1}, "
        raise RowError(f"malformed JSON at {line}column {error.colno}: {error.msg}: {short(text)}") from error
    except RowError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(f"malformed JSON: {error}: {short(text)}") from error
    return value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """``(number, text)`` of each line, UTF-8 with or without a byte order mark; other bytes become lone surrogates."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if number == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise UserError(f"{path} is UTF-16; save the file as UTF-8")
            raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            yield number, raw.decode("utf-8", "surrogateescape")


def _decoded(text: str) -> str:
    if found := re.search("[\udc80-\udcff]", text):
        byte = ord(found.group()) - 0xDC00
        raise RowError(
            f"not UTF-8 (byte {byte:#04x} after {short(text[max(0, found.start() - 20) : found.start()])!r}); save the "
            "file as UTF-8"
        )
    return text


def _csv(path: Path) -> Source:
    """A header and rows of the same width; an empty cell is null."""
    previous = csv.field_size_limit(2**31 - 1)
    reader = csv.reader((text for _, text in _lines(path)), strict=True)
    rows: list[Raw] = []
    try:
        header = _unique([name.strip() for name in next(reader, [])], path)
        for cells in reader:
            if not cells:  # a blank line
                continue
            row = len(rows) + 1
            try:
                for cell in cells:
                    _decoded(cell)
                if len(cells) != len(header):
                    raise RowError(f"{len(cells)} cells, but the header has {len(header)}")
                value = {name: cell or None for name, cell in zip(header, cells, strict=True)}
                rows.append(Raw(row, f"{path}, row {row}", value))
            except RowError as error:
                rows.append(Raw(row, f"{path}, line {reader.line_num}", None, str(error)))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: malformed CSV: {error}") from error
    finally:
        csv.field_size_limit(previous)
    return Source(str(path), tuple(header), rows)


def _unique(names: list[str], path: Path) -> list[str]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path} has more than one column {twice[0]!r}: {names}; column names must differ")
    return names


# --- columns --------------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Source:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from error
    names = _unique(list(file.schema_arrow.names), path)
    return Source(str(path), tuple(names), _arrow_rows(file.iter_batches(BATCH), str(path)))


def _arrow_rows(tables: Iterator[Any], name: str) -> Iterator[Raw]:
    """Rows of Arrow tables; a damaged table ends it, a text that is not UTF-8 is a bad row."""
    import pyarrow

    row = 0
    while True:
        try:
            table = next(tables, None)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{name} is damaged after row {row} and not used at all: {error}") from error
        if table is None:
            return
        for value in _values(table):
            row += 1
            reason = value if isinstance(value, str) else ""
            yield Raw(row, f"{name}, row {row}", None if reason else value, reason)


def _values(table: Any) -> Iterator[Any]:
    """The rows as dictionaries; a text instead of one is the reason why there is none."""
    try:
        yield from table.to_pylist()
    except ValueError:
        for index in range(table.num_rows):
            try:
                yield from table.slice(index, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield f"not UTF-8 (byte {error.object[error.start]:#04x})"
            except ValueError as error:
                yield f"cannot be read: {error}"


_READERS: Mapping[str, Callable[[Path], Source]] = {
    ".jsonl": _json,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
}


# --- words ----------------------------------------------------------------------------------------------------


def kind(value: Any) -> str:
    """What a value is, in plain words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a boolean",
        type(None): "null",
        bytes: "binary",
    }
    return names.get(type(value), "a number")


def short(value: Any) -> str:
    """At most 80 characters of it."""
    text = value if isinstance(value, str) else repr(value)
    return text.strip() if len(text) <= 80 else text[:77].strip() + "..."
