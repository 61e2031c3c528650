"""``make conformance``: makes the environment of the originals, runs every comparison, and prints the counts.

The exit code is 0 only if the environment could be made, no comparison failed and none was skipped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from conformance import environment
from conformance.rows import NOT_EXPRESSIBLE
from conformance.table import FRAMEWORKS, ROWS, counts


class Outcomes:
    """What did not pass, by the names that pytest gives."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def table() -> str:
    """A line per framework."""
    columns = list(counts("trl"))
    lines = [f"{'':12}" + "".join(f"{column:>21}" for column in columns)]
    for key, title in FRAMEWORKS.items():
        lines.append(f"{title:12}" + "".join(f"{counts(key)[column]:>21}" for column in columns))
    total = {column: sum(counts(key)[column] for key in FRAMEWORKS) for column in columns}
    return "\n".join([*lines, f"{'all':12}" + "".join(f"{total[column]:>21}" for column in columns)])


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--torch", default=environment.TORCH)
    options.add_argument("--index", default=environment.INDEX)
    chosen = options.parse_args()
    problem = environment.make(chosen.torch, chosen.index)
    if problem:
        print(f"the environment of the originals cannot be made: {problem}", file=sys.stderr)
        return 1
    outcomes = Outcomes()
    code = pytest.main(["-q", "-p", "no:cacheprovider", str(Path(__file__).parent)], plugins=[outcomes])
    good = not (code or outcomes.failed or outcomes.skipped)
    print(f"\n{'' if good else 'NOT ALL SHOWN (see below): what the table claims'}\n{table()}\n")
    for key, title in FRAMEWORKS.items():
        for row in ROWS[key]:
            if row.status == NOT_EXPRESSIBLE:
                print(f"not expressible: {title}, {row.mode}. {row.sentence}")
    for what, names in (("failed", outcomes.failed), ("skipped", outcomes.skipped)):
        for name in names:
            print(f"{what}: {name}", file=sys.stderr)
    if not good:
        print(f"pytest ended with {int(code)}: the counts are not shown to be true", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
