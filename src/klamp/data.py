"""Data: rows with a prompt and an answer from a file, a folder, a saved dataset or the Hugging Face hub.

The result is a ``datasets.Dataset`` with the columns ``prompt`` (a string, or a list of chat messages) and
``answer`` (a string), in the order of the source. Nothing is repaired in silence: what cannot be read is an
error that names the line or the row (counted from 1), what is left out is logged. Remote code is never run.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klamp.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
FIELDS = (
    ("prompt", "answer"),
    ("question", "answer"),
    ("problem", "answer"),
    ("problem", "solution"),
    ("input", "target"),
)
SPLITS = ("train", "validation", "valid", "dev", "test", "eval")
# what TRL passes to a reward itself, or reads from a row with a meaning of its own
RESERVED = frozenset({
    "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "environment", "environments", "image", "images", "tools", "chat_template", "chat_template_kwargs",
})  # fmt: skip
FINAL_ANSWER = "####"  # GSM8K: the answer is what follows the last one
HUB_TIMEOUT = 5.0  # seconds for the hub to answer at all

Columns = dict[str, Any]  # name -> list of Python values (from text) or Arrow array (from the others)


def load_rows(
    source: str | Path,
    *,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    split: str = "train",
    data_dir: str | None = None,
) -> Dataset:
    """The rows of a JSONL, JSON, Parquet or CSV file, a folder of such, a saved dataset, or a hub dataset id.

    A path that exists wins over a hub id. ``split`` picks a folder's files by their names, or the split of
    a dataset; ``data_dir`` is a folder inside the source (``main`` for GSM8K on the hub). Fields that
    are not given are the first of ``FIELDS`` that exist. Answers become strings; of one with ``####``
    (GSM8K) only what follows it is kept. Other columns stay, unless TRL gives their name a meaning (logged).
    Raises UserError with the file, line, row or column for everything that cannot be read.
    """
    path = Path(source).expanduser()
    if path.exists():
        columns = _read_path(path / data_dir if data_dir else path, split)
    elif path.suffix in SUFFIXES or str(source).startswith(("/", ".", "~")) or not _is_hub_id(str(source)):
        near = [p.name for p in path.parent.iterdir() if p.suffix in SUFFIXES] if path.parent.is_dir() else []
        raise UserError(f"there is no file {str(source)!r}" + (f"; {did_you_mean(path.name, near)}" if near else ""))
    else:
        columns = _from_dataset(_load_hub(str(source), split, data_dir), split, str(source))
    if not columns or not len(next(iter(columns.values()))):
        raise UserError(f"{source} is empty; it must have at least one row with a prompt and an answer")
    prompt, answer = _fields(list(columns), prompt_field, answer_field, str(source))
    prompts = _prompts(_values(columns[prompt]), prompt, str(source))
    answers = [_answer(value, row, answer, str(source)) for row, value in enumerate(_values(columns[answer]), 1)]
    return _assemble(prompts, answers, {k: v for k, v in columns.items() if k not in (prompt, answer)}, str(source))


def split_heldout(dataset: Dataset, n: int, seed: int) -> tuple[Dataset, Dataset]:
    """``(train, heldout)``: at most ``n`` rows held out, and no prompt (up to white space) on both sides.

    Prompts are ranked by a hash of the seed and the text, so a row's side depends on neither row order nor
    machine. All rows of a prompt move together: fewer than ``n`` are held out only if no prompt left fits.
    """
    if n < 0 or n >= len(dataset):
        raise UserError(f"cannot hold {n} of {len(dataset)} rows out; between 0 and {len(dataset) - 1} is possible")
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(dataset["prompt"]):
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
        rows.setdefault(" ".join(text.split()), []).append(row)
    held: set[int] = set()
    for text in sorted(rows, key=lambda text: hashlib.sha256(f"{seed}\0{text}".encode()).digest()):
        if len(held) + len(rows[text]) <= n:
            held.update(rows[text])
        if len(held) == n:
            break
    if n and not held:
        raise UserError(f"cannot hold {n} rows out: every prompt is repeated more than {n} times")
    train = [row for row in range(len(dataset)) if row not in held]
    return dataset.select(train), dataset.select(sorted(held))


# --- reading ----------------------------------------------------------------------------------------------
def _read_path(path: Path, split: str) -> Columns:
    if not path.exists():
        raise UserError(f"there is no file or folder {str(path)!r}")
    if path.is_file():
        return _read_file(path)
    if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
        import datasets

        try:
            return _from_dataset(datasets.load_from_disk(str(path)), split, str(path))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{path} is not a readable saved dataset: {error}") from error
    files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES and p.is_file())
    if not files:
        raise UserError(f"the folder {path} has no file that ends in {', '.join(SUFFIXES)} and is no saved dataset")
    named = {p: re.split(r"[-_.]", p.name)[0] for p in files}
    if any(name in SPLITS for name in named.values()):
        files = [p for p in files if named[p] == split]
        if not files:
            raise UserError(f"{path} has no split {split!r}; {did_you_mean(split, set(named.values()))}")
    parts = [_read_file(p) for p in files]
    for file, part in zip(files, parts, strict=True):
        if set(part) != set(parts[0]):
            raise UserError(f"{file} has the columns {sorted(part)}, but {files[0]} has {sorted(parts[0])}")
    if len(parts) == 1:
        return parts[0]
    return {name: [value for part in parts for value in _values(part[name])] for name in parts[0]}


def _read_file(path: Path) -> Columns:
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} ends in {path.suffix!r}; it must be one of {', '.join(SUFFIXES)}")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty; it must have at least one row with a prompt and an answer")
        if path.suffix == ".parquet":
            return _read_parquet(path)
        return _read_csv(path) if path.suffix == ".csv" else _read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_parquet(path: Path) -> Columns:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from error
    return {name: table.column(name) for name in _unique(table.column_names, path)}


def _read_json(path: Path) -> Columns:
    """JSON lines, or one JSON list of objects; a key that a row lacks is null there."""
    lines = list(_lines(path))
    whole = bool(lines) and lines[0][1].lstrip().startswith("[")
    if whole:
        listed = _parse("".join(text for _, text in lines), f"{path}")
        numbered = [(f"{path}, row {row}", value) for row, value in enumerate(listed, 1)]
    else:
        numbered = [(f"{path}, line {line}", text) for line, text in lines if text.strip()]
    columns: Columns = {}
    for row, (where, text) in enumerate(numbered):
        value = text if whole else _parse(text, where)
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected an object with a prompt and an answer, found {_kind(value)}")
        for name in {**columns, **value}:
            columns.setdefault(name, [None] * row).append(value.get(name))
    return columns


def _parse(text: str, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise UserError(f"{where}: a key appears twice in one object: {[name for name, _ in pairs]}")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except json.JSONDecodeError as error:
        place = f"{where}, column {error.colno}" if error.lineno == 1 else f"{where}, line {error.lineno}"
        raise UserError(f"{place}: malformed JSON: {error.msg}: {_short(text)}") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: malformed JSON: {error}: {_short(text)}") from error
    return value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """``(number, text)`` of each line, decoded as UTF-8 with or without a byte order mark."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            try:
                yield number, raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: not UTF-8 (byte {error.object[error.start]:#04x} at position "
                    f"{error.start}); save the file as UTF-8"
                ) from error


def _read_csv(path: Path) -> Columns:
    """A header and rows of the same width; an empty cell is null."""
    previous = csv.field_size_limit(2**31 - 1)
    try:
        reader = csv.reader((text for _, text in _lines(path)), strict=True)
        header = _unique([name.strip() for name in next(reader, [])], path)
        columns: Columns = {name: [] for name in header}
        for cells in reader:
            if not cells:  # a blank line
                continue
            if len(cells) != len(header):
                raise UserError(f"{path}, line {reader.line_num}: {len(cells)} cells, but the header has {len(header)}")
            for name, cell in zip(header, cells, strict=True):
                columns[name].append(cell or None)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: malformed CSV: {error}") from error
    finally:
        csv.field_size_limit(previous)
    return columns


def _unique(names: list[str], path: Path) -> list[str]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path} has more than one column {twice[0]!r}: {names}; column names must differ")
    return names


def _from_dataset(dataset: Any, split: str, source: str) -> Columns:
    if isinstance(dataset, Mapping):  # a DatasetDict
        if split not in dataset:
            raise UserError(f"{source} has no split {split!r}; {did_you_mean(split, map(str, dataset))}")
        dataset = dataset[split]
    dataset = dataset.flatten_indices()
    return {name: dataset.data.column(name) for name in dataset.column_names}


# --- the hub ----------------------------------------------------------------------------------------------
def _is_hub_id(source: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?", source) is not None


def _load_hub(source: str, split: str, data_dir: str | None) -> Any:
    """A dataset of the hub. The hub is asked once, briefly, first: datasets itself retries for long."""
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    neither = f"{source!r} is neither an existing file nor"
    try:
        huggingface_hub.HfApi().dataset_info(source, timeout=HUB_TIMEOUT)
    except RepositoryNotFoundError as error:
        hint = "if it is private, log in with `hf auth login`"
        raise UserError(f"{neither} a dataset on the hub ({hint})") from error
    except Exception as error:  # whichever way the network fails
        cached = _load_cached(source, split, data_dir)
        if cached is None:
            reason = str(error).strip().split("\n")[0]
            raise UserError(f"{neither} reachable on the hub ({type(error).__name__}: {reason})") from error
        logger.warning("the hub cannot be reached: %s is read from the local cache", source)
        return cached
    try:
        return datasets.load_dataset(source, split=split, data_dir=data_dir)
    except Exception as error:
        hint = "" if data_dir else "; a configuration is chosen by its folder, as in data_dir='main'"
        raise UserError(f"the dataset {source!r} of the hub cannot be loaded: {error}{hint}") from error


def _load_cached(source: str, split: str, data_dir: str | None) -> Any:
    """The dataset from the local cache, or None; both libraries read the setting at import, hence by hand."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(source, split=split, data_dir=data_dir)
    except Exception:  # not there; the caller says so with the reason why the hub did not answer
        return None
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


# --- shaping ----------------------------------------------------------------------------------------------
def _fields(columns: list[str], prompt: str | None, answer: str | None, source: str) -> tuple[str, str]:
    for field, option in ((prompt, "prompt_field"), (answer, "answer_field")):
        if field is not None and field not in columns:
            raise UserError(f"{source} has no column {field!r} ({option}); {did_you_mean(field, columns)}")
    for known_prompt, known_answer in FIELDS:
        pair = prompt or known_prompt, answer or known_answer
        if set(pair) <= set(columns) and pair[0] != pair[1]:
            return pair
    if prompt and answer:
        raise UserError(f"{source}: {prompt!r} cannot be both the prompt and the answer; it has {columns}")
    raise UserError(
        f"{source} has the columns {columns}, and none of the pairs {', '.join(map('/'.join, FIELDS))}; "
        "name them with prompt_field and answer_field"
    )


def _values(column: Any) -> list[Any]:
    return column if isinstance(column, list) else list(column.to_pylist())


def _prompts(values: list[Any], field: str, source: str) -> list[Any]:
    """Every prompt is a text, or every prompt is a list of chat messages with a role and a content."""
    for row, value in enumerate(values, 1):
        where = f"{source}, row {row}: the prompt (column {field!r})"
        if value is None or value in ("", []) or (isinstance(value, str) and not value.strip()):
            raise UserError(f"{where} is {'null' if value is None else 'empty'}; every row needs one")
        if isinstance(value, list):
            for message in value:
                if not isinstance(message, dict) or not all(
                    isinstance(message.get(key), str) for key in ("role", "content")
                ):
                    raise UserError(f"{where} has a message without a text role and content: {_short(message)}")
        elif not isinstance(value, str):
            raise UserError(f"{where} is {_kind(value)}; it must be a text or a list of chat messages")
        if isinstance(value, str) != isinstance(values[0], str):
            raise UserError(f"{where} is {_kind(value)}, but row 1 is {_kind(values[0])}; all must be alike")
    return values


def _answer(value: Any, row: int, field: str, source: str) -> str:
    where = f"{source}, row {row}: the answer (column {field!r})"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise UserError(f"{where} is null; every row needs one")
    if isinstance(value, (dict, list, bytes)):
        raise UserError(f"{where} is {_kind(value)}; it must be a text or a number")
    text = str(value)
    if FINAL_ANSWER not in text:
        return text
    final = text.rpartition(FINAL_ANSWER)[2].strip()
    if not final:
        raise UserError(f"{where} has nothing after its last {FINAL_ANSWER}")
    return final


def _assemble(prompts: list[Any], answers: list[str], others: Columns, source: str) -> Dataset:
    import datasets
    import pyarrow

    table: Columns = {"prompt": pyarrow.array(prompts), "answer": pyarrow.array(answers, pyarrow.string())}
    for name, column in others.items():
        if name in RESERVED or name in table:
            logger.warning("%s: column %r is left out, its name has a meaning of its own here", source, name)
            continue
        try:
            table[name] = pyarrow.array(column) if isinstance(column, list) else column
        except (pyarrow.ArrowException, OverflowError):
            logger.warning("%s: column %r is left out, it mixes types", source, name)
    return datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table(table)))


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a boolean",
        type(None): "null",
        bytes: "binary",
    }
    return names.get(type(value), "a number")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text.strip() if len(text) <= 80 else text[:77].strip() + "..."
