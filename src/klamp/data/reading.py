"""Rows with a prompt and an answer, each good or bad with its reason: the one reader of training and evaluation."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klamp.data.benchmarks import BENCHMARKS, Benchmark, benchmark
from klamp.data.hub import is_hub_id, load_hub
from klamp.data.shapes import Shape, detect
from klamp.data.sources import SUFFIXES, Raw, RowError, Source, from_dataset, kind, open_path
from klamp.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

# what TRL passes to a reward itself, or reads from a row with a meaning of its own
RESERVED = frozenset({
    "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "environment", "environments", "image", "images", "tools", "chat_template", "chat_template_kwargs",
})  # fmt: skip
SHOWN = 3  # reasons in a report


@dataclass(frozen=True)
class BadRow:
    """A row that was left out, its number in the source (from 1) and why."""

    row: int
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"row": self.row, "reason": self.reason}


@dataclass(frozen=True)
class Request:
    """Which rows are asked for: of ``source`` its ``split`` (None: ``purpose``, train or test), read by which fields.

    ``data_dir`` is a folder inside a hub dataset or a folder (``main`` of GSM8K on the hub); of a benchmark's name it is
    the local folder where its file is. ``skip_bad_rows`` leaves bad rows out, else the first one is a UserError.
    """

    source: str
    purpose: str = "train"
    split: str | None = None
    data_dir: str | None = None
    prompt_field: str | None = None
    answer_field: str | None = None
    skip_bad_rows: bool = False


@dataclass(frozen=True)
class Rows:
    """What a request gives: the rows as a Dataset with ``prompt`` and ``answer``, and everything that was left out.

    ``numbers`` are the rows' numbers in the source, from 1; ``worked`` the texts in which the answers were found (worked
    solutions, where there are); ``read`` counts all rows of the source; ``repeated`` those left out as repetitions.
    """

    source: str
    dataset: Dataset
    numbers: tuple[int, ...]
    worked: tuple[str, ...]
    bad: tuple[BadRow, ...]
    read: int
    repeated: int = 0

    def left_out(self) -> list[str]:
        """A line for everything that was left out."""
        lines = []
        if self.bad:
            first = "; ".join(f"row {one.row}: {one.reason}" for one in self.bad[:SHOWN])
            more = f"; and {len(self.bad) - SHOWN} more" if len(self.bad) > SHOWN else ""
            lines.append(f"{self.source}: {len(self.bad)} of {self.read} rows are bad and left out: {first}{more}")
        if self.repeated:
            lines.append(
                f"{self.source}: {self.repeated} of {self.read} rows repeat the prompt and answer of another and are left out"
            )
        return lines


def load(request: Request) -> Rows:
    """The rows of a benchmark, a file, a folder, a saved dataset or a hub dataset. A path that exists wins over a name.

    Raises UserError with the file, row or line, and the reason, for what cannot be read.
    """
    known = benchmark(request.source)
    if known is None:
        split = request.split or request.purpose
        return _shaped(_source(request.source, split, request.data_dir), request)
    for field, option in ((request.prompt_field, "--prompt-field"), (request.answer_field, "--answer-field")):
        if field is not None:
            raise UserError(
                f"{option} is for data of your own; {known.name} has fields of its own (give a file by its path)"
            )
    return _benchmark_rows(known, request)


# --- sources --------------------------------------------------------------------------------------------------


def _source(name: str, split: str, data_dir: str | None) -> Source:
    path = Path(name).expanduser()
    if path.is_file() and data_dir:
        raise UserError(
            f"{name} is a file, and --data-dir {data_dir} would be a folder inside it; leave --data-dir out"
        )
    if path.exists():
        return open_path(path / data_dir if data_dir else path, split)
    if path.suffix in SUFFIXES or name.startswith(("/", ".", "~")) or not is_hub_id(name):
        near = [p.name for p in path.parent.iterdir() if p.suffix in SUFFIXES] if path.parent.is_dir() else []
        raise UserError(f"there is no file {name!r}" + (f"; {did_you_mean(path.name, near)}" if near else ""))
    try:
        return from_dataset(load_hub(name, split, data_dir), split, name)
    except UserError as error:
        if "/" in name:
            raise
        raise UserError(f"{error}; of the benchmarks, {did_you_mean(name, BENCHMARKS)}") from error


def _benchmark_rows(known: Benchmark, request: Request) -> Rows:
    split = known.split(request.split, request.purpose)
    if request.data_dir is not None:
        source = open_path(known.local(Path(request.data_dir).expanduser(), split), split.name)
    else:
        try:
            source = from_dataset(load_hub(known.hub, split.hub, None, known.config), split.hub, known.hub)
        except UserError as error:
            raise UserError(f"{error}; where {known.name} is a local file, --data-dir DIR names its folder") from error
    rows = _shaped(source, request, known.shape, known.distinct)
    whole = rows.read == split.rows or (known.distinct and not rows.repeated)  # a copy without repetitions is whole too
    if not whole:
        logger.warning(
            "%s: %d rows, where the split %s of %s has %d", rows.source, rows.read, split.name, known.hub, split.rows
        )
    return rows


# --- rows -----------------------------------------------------------------------------------------------------


def _shaped(source: Source, request: Request, first: Shape | None = None, distinct: bool = False) -> Rows:
    """Good rows and bad ones. Without ``skip_bad_rows`` the first bad one ends it."""
    reader = _Reader(source, request.skip_bad_rows, distinct)
    if source.columns:
        fields = {"prompt": request.prompt_field, "answer": request.answer_field}
        reader.shape = detect(source.columns, source.name, **fields, first=first)
    reader.take(source.rows)
    if not reader.read:
        raise UserError(
            f"{source.name} is empty and has no row that can be used: it must have at least one, with a prompt and an answer"
        )
    if not reader.numbers:
        one = reader.bad[0]
        raise UserError(f"{source.name} has no row that can be used; the first, row {one.row}: {one.reason}")
    dataset = _assemble(reader.prompts, reader.answers, reader.others, source.name)
    return Rows(source.name, dataset, tuple(reader.numbers), tuple(reader.worked), tuple(reader.bad), reader.read,
                reader.repeated)  # fmt: skip


class _Reader:
    """Gathers the good rows of a source column by column, and the bad ones."""

    def __init__(self, source: Source, skip: bool, distinct: bool) -> None:
        self.source, self.skip, self.distinct = source, skip, distinct
        self.shape: Shape | None = None
        self.read, self.repeated = 0, 0
        self.numbers: list[int] = []
        self.prompts: list[Any] = []
        self.answers: list[str] = []
        self.worked: list[str] = []
        self.bad: list[BadRow] = []
        self.others: dict[str, list[Any]] = {}
        self._seen: set[bytes] = set()

    def take(self, rows: Iterable[Raw]) -> None:
        """Read them all, or up to the first that is bad, which is a UserError unless they are skipped."""
        if self.shape is not None:
            self.others = {name: [] for name in self.source.columns if name not in self.shape.columns}
        for raw in rows:
            self.read += 1
            try:
                self._add(raw)
            except RowError as error:
                if not self.skip:
                    raise UserError(f"{raw.place}: {error}; --skip-bad-rows leaves such rows out") from error
                self.bad.append(BadRow(raw.row, str(error)))

    def _add(self, raw: Raw) -> None:
        if raw.value is None:
            raise RowError(raw.reason)
        if self.shape is None:
            raise RowError("the row has no fields")
        prompt, answer, worked = self.shape.read(raw.value)
        if self.prompts and isinstance(prompt, str) != isinstance(self.prompts[0], str):
            raise RowError(
                f"the prompt (column {'+'.join(self.shape.prompt)!r}) is {kind(prompt)}, but row {self.numbers[0]} is "
                f"{kind(self.prompts[0])}; all must be alike"
            )
        if self.distinct and self._repeats(prompt, answer):
            self.repeated += 1
            return
        self.numbers.append(raw.row)
        self.prompts.append(prompt)
        self.answers.append(answer)
        self.worked.append(worked)
        for name, values in self.others.items():
            values.append(raw.value.get(name))

    def _repeats(self, prompt: Any, answer: str) -> bool:
        text = json.dumps([prompt, answer], sort_keys=True)
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            return True
        self._seen.add(digest)
        return False


def _assemble(prompts: list[Any], answers: list[str], others: dict[str, list[Any]], source: str) -> Dataset:
    import datasets
    import pyarrow

    table: dict[str, Any] = {"prompt": pyarrow.array(prompts), "answer": pyarrow.array(answers, pyarrow.string())}
    for name, column in others.items():
        if name in RESERVED or name in table:
            logger.warning("%s: column %r is left out, its name has a meaning of its own here", source, name)
            continue
        try:
            table[name] = pyarrow.array(column)
        except (pyarrow.ArrowException, OverflowError):
            logger.warning("%s: column %r is left out, it mixes types", source, name)
    return datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table(table)))
