"""The questions of an evaluation: rows with names that are stable, and bad rows refused or counted."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from klamp import data, rewards, tasks
from klamp.errors import UserError
from klamp.evaluate.options import Options

Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One row: ``id`` depends on its prompt and answer alone, ``row`` is its number in the source, from 1."""

    id: str
    row: int
    fields: Row


@dataclass(frozen=True)
class BadRow:
    """A row that was left out, its number in the source (from 1) and why."""

    row: int
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Asked:
    """What is evaluated on what: questions and left out rows, the reward and its name, the model, default lengths."""

    source: str
    questions: list[Question]
    bad: list[BadRow]
    reward: Callable[..., list[float | None]]
    reward_name: str
    model: str
    max_tokens: int


def asked(options: Options) -> Asked:
    """The task or data that the options name. Raises UserError for what cannot be read, with the row's number."""
    own = rewards.reward(options.reward) if options.reward else None
    sort = tasks.task("sort")
    if options.data is None:
        task = tasks.task(options.task or "sort")
        reward = own or task.reward
        name = options.reward or ("exact" if task is sort else task.name)
        questions = named(list(enumerate(task.heldout(), 1)))
        return Asked(task.name, questions, [], rewards.guarded(reward), name, options.model or task.model,
                     options.max_tokens or task.max_completion_length)  # fmt: skip
    assert own is not None
    assert options.reward is not None
    rows, bad = _usable(options) if options.skip_bad_rows else _all(options)
    if not rows:
        raise UserError(f"{options.data} has no row that can be used{_first(bad)}")
    model = options.model or sort.model
    length = options.max_tokens or (32 if model.startswith(tasks.EMBEDDED_PREFIX) else 512)
    return Asked(options.data, named(rows), bad, rewards.guarded(own), options.reward, model, length)


def named(rows: Sequence[tuple[int, Row]]) -> list[Question]:
    """Questions from numbered rows; the second of two equal rows is ``ID-2``."""
    seen: Counter[str] = Counter()
    questions = []
    for number, row in rows:
        text = json.dumps([row["prompt"], row["answer"]], sort_keys=True)
        name = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        seen[name] += 1
        questions.append(Question(name if seen[name] == 1 else f"{name}-{seen[name]}", number, dict(row)))
    return questions


def fingerprint(questions: Sequence[Question]) -> str:
    """A checksum of every field of every question, in order."""
    text = json.dumps([question.fields for question in questions], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


# --- rows -----------------------------------------------------------------------------------------------------


def _all(options: Options) -> tuple[list[tuple[int, Row]], list[BadRow]]:
    assert options.data is not None
    found = data.load_rows(
        options.data, prompt_field=options.prompt_field, answer_field=options.answer_field, split=options.split,
        data_dir=options.data_dir,
    )  # fmt: skip
    return list(enumerate(found.to_list(), 1)), []


def _usable(options: Options) -> tuple[list[tuple[int, Row]], list[BadRow]]:
    """The rows that ``load_rows`` would accept one by one, and the others with the reason."""
    source = str(options.data)
    columns, numbers, bad = _columns(options)
    if not columns:
        raise UserError(f"{source} has no row that can be used{_first(bad)}")
    prompt, answer = data._fields(list(columns), options.prompt_field, options.answer_field, source)
    plain = {name: data._values(column) for name, column in columns.items()}
    kept: list[int] = []
    prompts: list[Any] = []
    answers: list[str] = []
    for index, number in enumerate(numbers):
        try:
            (text,) = data._prompts([plain[prompt][index]], prompt, source)
            if prompts and isinstance(text, str) != isinstance(prompts[0], str):
                raise UserError("the prompt is a text where others are messages, or the reverse; all must be alike")
            gold = data._answer(plain[answer][index], 1, answer, source)
        except UserError as error:
            bad.append(BadRow(number, str(error).rpartition(f"{source}, row 1: ")[2]))
            continue
        kept.append(index)
        prompts.append(text)
        answers.append(gold)
    others = {name: [values[i] for i in kept] for name, values in plain.items() if name not in (prompt, answer)}
    rows = data._assemble(prompts, answers, others, source).to_list() if kept else []
    return [(numbers[i], row) for i, row in zip(kept, rows, strict=True)], sorted(bad, key=lambda one: one.row)


def _first(bad: Sequence[BadRow]) -> str:
    return f"; the first, row {bad[0].row}: {bad[0].reason}" if bad else ": it is empty"


def _columns(options: Options) -> tuple[data.Columns, list[int], list[BadRow]]:
    """Columns by name, the number of each row, and the rows that have no columns at all."""
    path = Path(str(options.data)).expanduser()
    path = path / options.data_dir if options.data_dir else path
    if path.is_file() and path.suffix == ".csv":
        return _csv(path)
    if path.is_file() and path.suffix in (".jsonl", ".json"):
        lines = [text for _, text in data._lines(path) if text.strip()]
        if lines and not lines[0].lstrip().startswith("["):
            return _json_lines(lines)
    if path.exists():
        columns = data._read_path(path, options.split)
    else:
        columns = data._from_dataset(
            data._load_hub(str(options.data), options.split, options.data_dir), options.split, str(options.data)
        )
    count = len(next(iter(columns.values()))) if columns else 0
    return columns, list(range(1, count + 1)), []


def _json_lines(lines: list[str]) -> tuple[data.Columns, list[int], list[BadRow]]:
    objects, numbers, bad = [], [], []
    for number, text in enumerate(lines, 1):
        try:
            value = data._parse(text, "")
            if not isinstance(value, dict):
                raise UserError(f"expected an object with a prompt and an answer, found {data._kind(value)}")
        except UserError as error:
            bad.append(BadRow(number, str(error).removeprefix(", ").removeprefix(": ")))
            continue
        objects.append(value)
        numbers.append(number)
    names = dict.fromkeys(name for value in objects for name in value)
    return {name: [value.get(name) for value in objects] for name in names}, numbers, bad


def _csv(path: Path) -> tuple[data.Columns, list[int], list[BadRow]]:
    good, numbers, bad = [], [], []
    try:
        reader = csv.reader((text for _, text in data._lines(path)), strict=True)
        header = data._unique([name.strip() for name in next(reader, [])], path)
        for number, cells in enumerate(filter(None, reader), 1):
            if len(cells) == len(header):
                good.append(cells)
                numbers.append(number)
            else:
                bad.append(BadRow(number, f"{len(cells)} cells, but the header has {len(header)}"))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: malformed CSV: {error}") from error
    return {name: [cells[i] or None for cells in good] for i, name in enumerate(header)}, numbers, bad
