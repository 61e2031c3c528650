"""The curve of a training run as an SVG: reward of the rollouts, and accuracy on the problems kept out of training.

python benchmarks/curve.py RUN docs/figures/smollm2.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


def main(run: Path, out: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plt.rcParams |= {"svg.hashsalt": "klamp", "svg.fonttype": "none"}
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    styles: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("train/reward_mean", "reward of a rollout (training problems)", {"color": "0.75"}),
        ("eval/accuracy_sampled", "held-out accuracy, sampled", {"color": "C0", "marker": "o"}),
        ("eval/accuracy_greedy", "held-out accuracy, greedy", {"color": "C1", "marker": "s"}),
    )
    for name, label, style in styles:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="optimizer step", ylabel="share of answers that are right", ylim=(0, 1))
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(out, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
