"""Results of the studies as small files and as Markdown tables.

    python studies/collect.py [NAME ...]          from runs/studies/NAME into studies/results/NAME.json
    python studies/collect.py --docs               the tables of docs/results.md and README.md, from studies/results

A result keeps every run's metrics and held-out curve, and leaves out the curves of training steps.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from klamp.compare import table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KEPT = ("eval/accuracy_sampled", "eval/accuracy_greedy")
ROOT = HERE.parent
MEANS = ("accuracy_sampled", "accuracy_greedy", "auc", "largest_drop", "pass_at_n", "distinct_correct", "kl", "entropy_final", "removed_low", "removed_high")  # fmt: skip
JUDGED = ("accuracy_sampled", "accuracy_greedy", "auc", "largest_drop", "pass_at_n", "distinct_correct")


def slim(found: dict[str, Any]) -> dict[str, Any]:
    """Without the curves of training steps; numbers to six digits."""
    specs = [
        spec | {"runs": [run | {"curves": {name: run["curves"].get(name) for name in KEPT}} for run in spec["runs"]]}
        for spec in found["specs"]
    ]
    rounded: dict[str, Any] = json.loads(
        json.dumps(found | {"specs": specs}), parse_float=lambda text: float(f"{float(text):.6g}")
    )
    return rounded


def filled(page: str) -> str:
    """A page with its tables: what stands between ``<!-- means NAME -->`` or ``<!-- differences NAME METRIC ... -->`` and
    ``<!-- end -->`` is made again."""

    def made(match: re.Match[str]) -> str:
        kind, name, *metrics = match[1].split()
        found = json.loads((RESULTS / f"{name}.json").read_text())
        parts = (
            [table.means(found, metrics or MEANS)]
            if kind == "means"
            else [table.differences(found, m) for m in metrics or JUDGED]
        )
        text = "\n\n".join(table.markdown(rows) for rows in parts if len(rows) > 1)
        return f"<!-- {match[1]} -->\n{text}\n<!-- end -->"

    return re.sub(r"<!-- ((?:means|differences) [^>]*?) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--runs", type=Path, default=Path("runs/studies"))
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    if options.docs:
        for page in (ROOT / "docs" / "results.md", ROOT / "README.md"):
            page.write_text(filled(page.read_text()))
        return 0
    known = [path.stem for path in sorted(HERE.glob("*.yaml"))]
    for name in options.names or known:
        if (options.runs / name / "results.json").exists():
            RESULTS.mkdir(exist_ok=True)
            found = slim(json.loads((options.runs / name / "results.json").read_text()))
            (RESULTS / f"{name}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
            print(RESULTS / f"{name}.json", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
