"""What a comparison shows while it runs, on stderr: which runs go on, how far they are, and the time left."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from klamp.compare.plan import Cell

EVERY = 10.0  # seconds between lines where there is no terminal


class Overview:
    """A bar for all runs and one for each that goes on; plain lines where stderr is no terminal."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.finished, self.first = total, done, done
        self.start = self.said = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.bars: list[Any] = []

    def __enter__(self) -> Overview:
        if self.terminal:
            self.bars = [tqdm(total=self.total, initial=self.finished, desc="runs", unit="run", dynamic_ncols=True)]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for bar in self.bars:
            bar.close()

    def say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr) if self.terminal else print(text, file=sys.stderr, flush=True)

    def done(self, cell: Cell, seconds: float | None, why: str | None = None) -> None:
        """A run has ended: well, after so many seconds, or for a reason."""
        self.finished += 1
        if self.terminal:
            self.bars[0].update(1)
        how = f"finished in {seconds:.0f} s" if seconds is not None else f"failed: {why}"
        self.say(f"{self.finished}/{self.total}  {cell.entry.label} seed {cell.seed} {how}")

    def show(self, going: list[Cell]) -> None:
        """The runs that go on."""
        if time.monotonic() - self.said < (1.0 if self.terminal else EVERY):
            return
        self.said = time.monotonic()
        progress = [Progress(cell) for cell in going]
        left = self._left(sum(one.share for one in progress))
        if not self.terminal:
            self.say(
                f"{self.finished}/{self.total} runs done; {'; '.join(map(str, progress)) or 'starting'}; left {left}"
            )
            return
        while len(self.bars) < 1 + len(going):
            self.bars.append(tqdm(bar_format="  {desc}", position=len(self.bars), leave=False, dynamic_ncols=True))
        self.bars[0].set_postfix_str(f"left {left}", refresh=True)
        for bar, text in zip(self.bars[1:], [*map(str, progress), *[""] * self.total], strict=False):
            bar.set_description_str(text, refresh=True)

    def _left(self, running: float) -> str:
        if self.finished == self.first:  # what a run takes beside its steps is not known yet
            return "?"
        done = self.finished - self.first + running
        pace = (time.monotonic() - self.start) / done
        minutes, seconds = divmod(round(max(0.0, pace * (self.total - self.first - done))), 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


class Progress:
    """How far a run is."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.step, self.total, self.accuracy = _progress(cell.directory)

    @property
    def share(self) -> float:
        return min(1.0, self.step / self.total) if self.total else 0.0

    def __str__(self) -> str:
        of = f"/{self.total}" if self.total else ""
        right = "" if self.accuracy is None else f" accuracy {100 * self.accuracy:.0f} %"
        return f"{self.cell.entry.label} seed {self.cell.seed} step {self.step}{of}{right}"


def _progress(directory: Path) -> tuple[int, int | None, float | None]:
    """(steps done, of how many, the latest held-out accuracy)."""
    step, accuracy, total = 0, None, None
    try:
        total = json.loads((directory / "manifest.json").read_text()).get("settings", {}).get("max_steps")
        for line in (directory / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            step, accuracy = row["step"], row.get("eval/accuracy_sampled", accuracy)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # being written, or no run of ours
    return step, total if isinstance(total, int) and total > 0 else None, accuracy
