"""A plausible run directory, and a reader for the page that a report makes of it."""

from __future__ import annotations

import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from klamp.report import write_report
from klamp.report.sections import EDGES

HOSTILE = '<script>document.title="owned"</script><img src=x onerror="document.title=\'owned\'">'
LOG_LOW, LOG_HIGH = math.log(0.813105115213), math.log(1.213549707151)


def fake_run(directory: Path, steps: int = 100, seed: int = 0) -> Path:
    """A run directory as `klamp train` leaves it, with plausible numbers."""
    rng = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for step in range(0, steps + 1, 10):
        done = 1 - math.exp(-step / 35)
        lines.append(
            {
                "step": step,
                "event": "eval",
                "seconds": 0.9 * step,
                "eval/accuracy_greedy": 0.55 + 0.27 * done + rng.gauss(0, 0.01),
                "eval/accuracy_sampled": 0.39 + 0.37 * done + rng.gauss(0, 0.012),
            }
        )
    for step in range(1, steps + 1):
        done, phase = 1 - math.exp(-step / 35), (step - 1) % 4  # four updates on each rollout
        spread = 0.02 + 0.055 * phase
        counts = [0] * 64
        for k in range(64):
            x = (EDGES[k] + EDGES[k + 1]) / 2
            counts[k] = int(
                2816
                * 0.05
                * (
                    math.exp(-0.5 * ((x + 0.01) / spread) ** 2) / (spread * 2.5066)
                    + 0.12 * phase * math.exp(-abs(x) * 6)
                )
            )
        outside = [0.018 * phase * (1 + rng.random()), 0.012 * phase * (1 + rng.random())]
        lines.append(
            {
                "step": step,
                "event": "train",
                "seconds": 0.9 * step,
                "train/reward_mean": 0.40 + 0.36 * done + rng.gauss(0, 0.03),
                "train/reward_std": 0.45,
                "policy/loss_mean": rng.gauss(0, 0.01),
                "policy/entropy_mean": 0.62 - 0.4 * done + rng.gauss(0, 0.01),
                "policy/kl_old_new_mean": 0.0018 * phase**1.5 * (1 + 0.4 * rng.random()),
                "policy/ratio_max": 2.1,
                "policy/ratio_histogram": counts,
                "guard/outside_low_share": outside[0],
                "guard/outside_high_share": outside[1],
                "guard/removed_low_share": outside[0] * 0.44,
                "guard/removed_high_share": outside[1] * 0.52,
            }
        )
    samples = []
    for step in range(0, steps + 1, 5):
        digits = [rng.randrange(10) for _ in range(10)]
        right = "".join(map(str, sorted(digits)))
        wrong = right[:6] + right[7] + right[6] + right[8:]
        good = rng.random() < 0.4 + 0.004 * step
        samples.append(
            {
                "step": step,
                "prompt": "sort " + "".join(map(str, digits)) + "=",
                "completion": right if good else wrong,
                "answer": right,
                "reward": float(good),
            }
        )
    samples[-1]["completion"] = HOSTILE
    samples[-2]["reward"] = None
    manifest = {
        "klamp": "0.1.0",
        "schema": 1,
        "spec": "atr_grpo(delta=0.02)",
        "spec_parts": {},
        "region": {"log_low": LOG_LOW, "log_high": LOG_HIGH, "ratio": "new/old"},
        "versions": {"python": "3.11.2", "torch": "2.13.0", "transformers": "5.24.0", "trl": "1.16.0"},
        "seed": 0,
        "command": ["klamp", "train", "--spec", "atr_grpo(delta=0.02)", "--seed", "0"],
        "git_commit": "4f0c2b9e77a1",
        "task": "sort_digits",
        "started": "2026-03-01T10:00:00+00:00",
        "finished": "2026-03-01T10:01:47+00:00",
        "results": {
            "before": {"accuracy_greedy": 0.555, "accuracy_sampled": 0.391},
            "after": {"accuracy_greedy": 0.812, "accuracy_sampled": 0.752},
        },
    }
    lines.sort(key=lambda line: (line["step"], line["event"] == "train"))
    (directory / "manifest.json").write_text(json.dumps(manifest))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    return directory


class Page(HTMLParser):
    """A page as a list of elements, each with its attributes and the text inside it."""

    VOID = frozenset({"meta", "br", "img", "link", "rect", "line", "circle", "polyline", "input"})

    def __init__(self, source: str):
        super().__init__()
        self.all: list[dict[str, Any]] = []
        self.open: list[dict[str, Any]] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = {"tag": tag, "attrs": dict(attrs), "text": "", "inside": [e["id"] for e in self.open]}
        element["id"] = len(self.all)
        self.all.append(element)
        if tag not in self.VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        assert [element["tag"] for element in self.open[-1:]] == [tag]
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element["text"] += data

    def find(self, tag: str, css: str = "", inside: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        wanted = set(css.split())
        return [
            e
            for e in self.all
            if e["tag"] == tag
            and wanted <= set((e["attrs"].get("class") or "").split())
            and (inside is None or inside["id"] in e["inside"])
        ]

    def figure(self, title: str) -> dict[str, Any]:
        (heading,) = [e for e in self.find("h3") if e["text"] == title]
        return next(self.all[k] for k in reversed(heading["inside"]) if self.all[k]["tag"] == "figure")

    def axis(self, figure: dict[str, Any], which: str) -> list[tuple[float, float]]:
        """(picture coordinate, value) of the tick labels; k and M are thousands and millions."""
        out = []
        for tick in self.find("text", f"tick {which}", figure):
            label = tick["text"].replace("\N{MINUS SIGN}", "-")
            unit = {"%": 0.01, "k": 1e3, "M": 1e6}.get(label[-1], 1.0)
            value = float(label.rstrip("%kM")) * unit
            out.append((float(tick["attrs"][which]) - (4 if which == "y" else 0), value))
        return out

    def polyline(self, figure: dict[str, Any], css: str) -> list[tuple[float, float]]:
        """The points of one line in the units of the axes, read off against the first and last tick."""
        (line,) = self.find("polyline", css, figure)
        maps = []
        for which in "xy":
            (a, low), *_, (b, high) = self.axis(figure, which)
            maps.append(lambda at, a=a, b=b, low=low, high=high: low + (at - a) / (b - a) * (high - low))
        pairs = [pair.split(",") for pair in line["attrs"]["points"].split()]
        return [(maps[0](float(x)), maps[1](float(y))) for x, y in pairs]


def page_of(run: Path) -> Page:
    return Page(write_report(run).read_text())


def lines_of(run: Path, event: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == event]
