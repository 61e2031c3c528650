"""The embedded default over seeds, from the one shipped warm start: accuracy before and after, gradient removed.

    python benchmarks/seeds.py [--seeds 5] [--spec SPEC ...] [--out DIR] [--json]

Every run is an ordinary ``klamp train`` run directory under ``--out``; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from klamp.train.config import DEFAULT_SPEC


def run(spec: str, seed: int, folder: Path) -> dict[str, Any]:
    manifest = folder / "manifest.json"
    if not manifest.exists():
        command = [
            sys.executable,
            "-m",
            "klamp",
            "train",
            "--spec",
            spec,
            "--seed",
            str(seed),
            "--out",
            str(folder),
            "--json",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    data: dict[str, Any] = json.loads(manifest.read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"spec": spec, "seed": seed, **data["results"], "seconds": max(line["seconds"] for line in lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--spec", nargs="+", default=[DEFAULT_SPEC])
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for number, spec in enumerate(arguments.spec):
        for seed in range(arguments.seeds):
            rows.append(run(spec, seed, arguments.out / f"{number}-seed{seed}"))
            if not arguments.json:
                before, after = rows[-1]["before"], rows[-1]["after"]
                print(
                    f"{spec}  seed {seed}  greedy {before['accuracy_greedy']:.3f} -> {after['accuracy_greedy']:.3f}  "
                    f"sampled {before['accuracy_sampled']:.3f} -> {after['accuracy_sampled']:.3f}  removed low "
                    f"{100 * after['removed_low']:.2f} % high {100 * after['removed_high']:.2f} %  {rows[-1]['seconds']:.0f} s",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
