"""Files of a token log: what was named, as pieces that can be read one by one, in any process."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from klamp.audit import lines, parquet
from klamp.audit.names import Naming
from klamp.audit.tokens import Array, Tokens
from klamp.errors import UserError

KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv"}
_ENDINGS = ", ".join(KINDS)


@dataclass(frozen=True)
class Piece:
    """A part of a log that is read at once: a file, or some row groups of a Parquet file."""

    path: str
    kind: str
    groups: tuple[int, ...] = ()
    size: int = 0  # bytes
    given: Mapping[str, str] = field(default_factory=dict)  # --map

    @property
    def naming(self) -> Naming:
        """Where our columns are; raises UserError for a shape that is not known."""
        return (
            parquet.naming_of(self.path, self.given)
            if self.kind == "parquet"
            else lines.naming_of(self.path, self.kind, self.given)
        )

    def read(self, columns: frozenset[str]) -> Iterator[Tokens]:
        """The responses, some at a time; ``columns``: the optional ones that are wanted."""
        naming = self.naming
        if self.kind == "parquet":
            yield from parquet.read(self.path, self.groups, naming, columns)
        else:
            yield from lines.read(self.path, self.kind, naming, columns, _step_of(self.path))

    def steps(self) -> Array:
        """The optimizer steps that it holds."""
        if self.kind == "parquet":
            return parquet.steps(self.path, self.groups, self.naming)
        import numpy as np

        found = [np.unique(part.step) for part in self.read(frozenset())]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)


def pieces(names: Sequence[str], given: Mapping[str, str], whole: bool = False) -> list[Piece]:
    """Every piece of the named files, directories and globs, in order; ``whole`` keeps files in one piece.

    Raises UserError where there is nothing, and for what cannot be a token log.
    """
    found: list[Piece] = []
    for path in dict.fromkeys(path for name in names for path in _files(name)):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise UserError(f"{path} is no regular file; copy it into one")
        size = os.path.getsize(path)
        if size == 0:
            raise UserError(f"{path} is empty")
        kind = KINDS.get(Path(path).suffix.lower()) or _guessed(path)
        if kind == "parquet":
            groups = parquet.groups(path)
            if not groups:
                raise UserError(f"{path} has no rows")
            parts = [groups] if whole else [(group,) for group in groups]
            found += [Piece(path, kind, part, size * len(part) // len(groups), given) for part in parts]
        else:
            found.append(Piece(path, kind, (), size, given))
    return found


def _files(name: str) -> list[str]:
    path = Path(name)
    if path.is_dir():
        return _inside(path)
    if path.exists():
        return [name]
    matches = _sorted(Path(one) for one in glob.glob(name, recursive=True))
    if not matches:
        raise UserError(f"{name} does not exist; give files, directories or globs of token logs ({_ENDINGS})")
    return [one for match in matches for one in (_files(match) if Path(match).is_dir() else [match])]


def _inside(path: Path) -> list[str]:
    """The token log in a folder: of a run of ours its records, else its files of one kind, Parquet first."""
    records = path / "tokens" if (path / "tokens").is_dir() else path
    found = _sorted(records.glob("part-*.parquet"))
    if not found and (path / "manifest.json").exists():
        raise UserError(f"{path} is a run without token records; klamp train writes them with --record-tokens")
    every = [one for one in _sorted(path.rglob("*")) if not _hidden(one, path)]
    for endings in ((".parquet",), (".jsonl", ".ndjson"), (".csv", ".tsv"), (".json",)):
        found = found or [one for one in every if Path(one).suffix.lower() in endings]
    if not found:
        raise UserError(f"{path} holds no token log ({_ENDINGS}); a run of klamp train writes one with --record-tokens")
    return found


def _sorted(paths: Iterable[Path]) -> list[str]:
    """By name, numbers by their size: step_2 before step_10."""

    def key(path: str) -> list[tuple[int, int | str]]:
        return [
            (0, int(word)) if word.isdecimal() and len(word) < 19 else (1, word) for word in re.split(r"(\d+)", path)
        ]

    return sorted(map(str, paths), key=key)


def _hidden(path: str, root: Path) -> bool:
    return any(part.startswith(".") for part in Path(path).relative_to(root).parts)


def _guessed(path: str) -> str:
    """The kind of a file whose name does not say it."""
    with Path(path).open("rb") as handle:
        start = handle.read(64).lstrip()
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith((b"{", b"[")):
        return "jsonl"
    raise UserError(f"{path} is no token log that can be read; give {_ENDINGS}")


def _step_of(path: str) -> int | None:
    """The step that the folder or the file is named after, as step_7/rank_0.jsonl."""
    found = re.findall(r"(?:^|[/\\])(?:global_)?steps?[_-](\d{1,15})(?=[/\\.]|$)", path)
    return int(found[-1]) if found else None
