"""JSON lines and CSV: a response to a line, its lists as JSON; of a CSV also a token to a line, grouped by its row."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from klamp.audit.names import NUMBERS, PER_TOKEN, Naming, naming
from klamp.audit.shaping import Column, shaped
from klamp.audit.tokens import Array, Tokens
from klamp.errors import UserError

TOKENS = 1 << 18  # of one batch
LONGEST = 1 << 28  # bytes of a line
Row = Mapping[str, Any]


def naming_of(path: str, kind: str, given: Mapping[str, str]) -> Naming:
    """Where our columns are, from the first line."""
    first = next(_rows(path, kind), None)
    if first is None:
        raise UserError(f"{path} holds no response")
    return naming(path, first, given)


def read(path: str, kind: str, names: Naming, wanted: frozenset[str], step: int | None) -> Iterator[Tokens]:
    """The responses, some at a time; ``step``: the folder's, where the log has none."""
    ours = [name for name in NUMBERS if name in names.columns]
    ours += ["prompt_id"] if "prompt_id" in names.columns and "group" not in names.columns else []
    held: list[dict[str, Any]] = []
    count = size = 0
    for row in _responses(path, kind, names):
        held.append({name: row.get(names.columns[name]) for name in ours})
        size += max((len(value) for value in held[-1].values() if isinstance(value, list)), default=0)
        if size >= TOKENS:
            yield _batch(path, held, names, step, count)
            count, size, held = count + len(held), 0, []
    if held or not count:
        yield _batch(path, held, names, step, count)


def _batch(path: str, rows: list[dict[str, Any]], names: Naming, step: int | None, first: int) -> Tokens:
    if not rows:
        raise UserError(f"{path} holds no response")
    columns = {name: _column(path, name, [row[name] for row in rows], first) for name in rows[0]}
    if step is not None and "step" not in columns:
        columns["step"] = (np.full(len(rows), step, np.int64), None, None)
    return shaped(columns, len(rows), path, first, names)


def _column(path: str, name: str, values: list[Any], first: int) -> Column:
    null = np.array([value is None for value in values])
    if null.all():
        return None, None, null
    if name in ("prompt_id", "group") and not all(isinstance(value, int) for value in values):
        return (
            np.array([zlib.crc32(json.dumps(value, sort_keys=True).encode()) for value in values], np.int64),
            None,
            None,
        )
    if not any(isinstance(value, list) for value in values):
        return _array(path, name, values, first), None, null if null.any() else None
    whole = [value if isinstance(value, list) else [] for value in values]
    odd = next((k for k, value in enumerate(values) if value is not None and not isinstance(value, list)), None)
    if odd is not None:
        raise UserError(f"{path}: response {first + odd}: {name} is {values[odd]!r:.60}, a list in others")
    lengths = np.array([len(value) for value in whole], np.int64)
    return _array(path, name, [one for value in whole for one in value], first), lengths, null if null.any() else None


def _array(path: str, name: str, values: list[Any], first: int) -> Array:
    """Numbers; null is NaN, and so is the word that JSON of Python writes for it."""
    kind = (
        np.int64
        if name in ("step", "row", "group", "length") and all(type(one) is int for one in values)
        else np.float64
    )
    try:
        found = np.array(values, dtype=kind)
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None or found.ndim != 1:
        raise UserError(f"{path}: {name} from response {first} on holds what is no number; needed numbers, or null")
    return found


def _responses(path: str, kind: str, names: Naming) -> Iterator[Row]:
    rows = _rows(path, kind)
    tokens = [names.columns[name] for name in PER_TOKEN if name in names.columns]
    if kind != "csv":
        yield from rows
        return
    first = next(rows, None)
    if first is None:
        return
    if any(isinstance(first.get(name), list) for name in tokens):
        yield first
        yield from rows
        return
    if "row" not in names.columns:
        raise UserError(
            f"{path} has a token to a line: name the column that says which response it belongs to, --map row=NAME; or give a "
            "response to a line, its lists in brackets"
        )
    yield from _gathered(path, first, rows, tokens, names)


def _gathered(path: str, first: Row, rows: Iterator[Row], tokens: list[str], names: Naming) -> Iterator[Row]:
    """Responses from a token to a line; the tokens of one follow each other."""
    keys = [names.columns[name] for name in ("step", "row") if name in names.columns]
    seen: set[tuple[Any, ...]] = set()
    response: dict[str, Any] = {}
    at: tuple[Any, ...] | None = None
    for row in (line for part in ([first], rows) for line in part):
        key = tuple(row.get(name) for name in keys)
        if key != at:
            if at is not None:
                yield response
            if key in seen:
                raise UserError(
                    f"{path}: the tokens of response {key[-1]} do not follow each other; sort the file by step and row"
                )
            seen.add(key)
            at, response = key, {**row, **{name: [] for name in tokens}}
        for name in tokens:
            response[name].append(row.get(name))
    yield response


def _rows(path: str, kind: str) -> Iterator[Row]:
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as handle:
            yield from _csv(path, handle) if kind == "csv" else _json(path, handle)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text: byte {error.start} of a part of it is not UTF-8") from error
    except MemoryError as error:
        raise UserError(f"{path} has a line that does not fit into memory") from error


def _json(path: str, handle: Any) -> Iterator[Row]:
    number = 0
    while line := handle.readline(LONGEST):
        number += 1
        if not line.strip():
            continue
        if len(line) >= LONGEST:
            raise UserError(f"{path}: line {number} is longer than {LONGEST >> 20} MiB; write one response to a line")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            said = str(error).split(":")[0] if isinstance(error, ValueError) else "nested too deeply"
            raise UserError(
                f"{path}: line {number} is not JSON ({said[:80]}); a log that was cut off ends before it"
            ) from error
        if isinstance(row, list) and number == 1 and not handle.read(1).strip():
            for index, one in enumerate(row):
                yield _object(path, index, one)
            return
        yield _object(path, number, row)


def _object(path: str, number: int, row: Any) -> Row:
    if not isinstance(row, dict):
        raise UserError(
            f'{path}: line {number} is no JSON object; write one response to a line, {{"step": 0, "logp_new": [...], ...}}'
        )
    return row


def _csv(path: str, handle: Any) -> Iterator[Row]:
    start = handle.readline(1 << 20)
    delimiter = max(",;\t", key=start.count)
    columns = next(csv.reader([start], delimiter=delimiter), [])
    if len(set(columns)) < len(columns):
        raise UserError(f"{path} has a column twice")
    csv.field_size_limit(LONGEST)
    try:
        for number, cells in enumerate(csv.reader(handle, delimiter=delimiter), 2):
            if not cells:
                continue
            if len(cells) != len(columns):
                raise UserError(f"{path}: line {number} has {len(cells)} cells for {len(columns)} columns")
            yield {name: _cell(cell) for name, cell in zip(columns, cells, strict=True)}
    except csv.Error as error:
        raise UserError(f"{path} is not a table that can be read: {error}") from error


def _cell(text: str) -> Any:
    """A number, a list, true or false, nothing, or a text."""
    word = text.strip()
    if not word:
        return None
    if word[0] in "[-0123456789tfnNI" or word in ("True", "False"):
        try:
            return json.loads({"True": "true", "False": "false", "nan": "NaN", "inf": "Infinity"}.get(word, word))
        except (ValueError, RecursionError):
            return text
    return text
