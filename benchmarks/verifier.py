"""The verifier under load: typical answers per second, 1,000 hostile answers in a row, processes before and after.

OMP_NUM_THREADS=1 python benchmarks/verifier.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

from klamp.rewards import WORKER, reward
from klamp.rewards.math import CACHE

GOLDS = Path(__file__).parents[1] / "tests" / "data" / "golds.json"
DEEP = r"\frac{1}{1+" * 150 + "x" + "}" * 150


def hostile(count: int) -> list[str]:
    """Different answers, so that none is in the cache."""
    kinds = (
        lambda n: rf"\boxed{{10^{{5^{{5^{{5^{{{n}}}}}}}}}}}",  # towers of powers
        lambda n: rf"\boxed{{{n}!!!!}}",
        lambda n: rf"\boxed{{(x+{n})^{{99999}}-y^{{99999}}}}",
        lambda n: rf"\boxed{{{n}" + "7" * 1_000_000 + "}",  # integers of a million digits
        lambda n: rf"\boxed{{2^{{{n}0000000}}}}",
        lambda n: rf"\boxed{{{n}+" + DEEP + "}",
        lambda n: r"\boxed{" * 5000 + str(n),
        lambda n: rf"\boxed{{\sqrt{{{'{' * 300}{n}{'}' * 300}}}}}",
        lambda n: f"\\boxed{{\x00{n}\x00+\\sqrt{{2}}}}",
        lambda n: f"{n} so " * 250_000,  # a megabyte of prose
        lambda n: rf"$\left(\int_0^{{{n}}} e^{{e^{{e^x}}}} dx\right)$",
    )
    return [kinds[i % len(kinds)](1000 + i) for i in range(count)]


def children() -> set[int]:
    """Processes below this one, workers' children included."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {os.getpid()}


def typical(count: int) -> tuple[list[str], list[str]]:
    """Texts and gold answers as a training step has them: 8 answers to each problem, half of them of another one."""
    rng = random.Random(0)
    golds = [gold for some in json.loads(GOLDS.read_text())["golds"].values() for gold in some]
    pairs = [(gold, gold if rng.random() < 0.5 else rng.choice(golds)) for gold in rng.choices(golds, k=count // 8)
             for _ in range(8)]  # fmt: skip
    return [rf"So the answer is $\boxed{{{answer}}}$." for _, answer in pairs], [gold for gold, _ in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=1.0, help="seconds for one hostile answer")
    options = parser.parse_args()
    reward("math")(
        [""] * 8, [rf"\boxed{{\sqrt{{{n}}}}}" for n in range(8)], answer=[r"2\sqrt{2}"] * 8
    )  # the workers start
    print(f"workers: {WORKER.size}")

    texts, golds = typical(2048)
    function = reward("math")
    start = time.perf_counter()
    function([""] * len(texts), texts, answer=golds)
    seconds = time.perf_counter() - start
    print(f"typical: {len(texts)} answers in {seconds:.1f} s: {len(texts) / seconds:.0f} per second, "
          f"nothing cached before; {dict(function.counts)}")  # fmt: skip
    start = time.perf_counter()
    function([""] * len(texts), texts, answer=golds)
    print(f"again, all cached: {len(texts) / (time.perf_counter() - start):.0f} per second")

    CACHE.clear()
    before = children()
    function = reward("math", time_limit=options.limit)
    seconds_each = []
    for text in hostile(options.count):
        start = time.perf_counter()
        function([""], [text], answer=[r"\sqrt{2}"])
        seconds_each.append(time.perf_counter() - start)
    print(f"hostile: {options.count} answers one by one, limit {options.limit} s: median "
          f"{statistics.median(seconds_each):.3f} s, longest {max(seconds_each):.2f} s; {dict(function.counts)}")  # fmt: skip
    print(f"processes: {len(before)} before, {len(children())} after, {WORKER.size} workers with a child each at most")

    CACHE.clear()
    function = reward(f"math(limit={options.limit}, budget=20)")
    texts = hostile(options.count)
    start = time.perf_counter()
    function([""] * len(texts), texts, answer=[r"\sqrt{2}"] * len(texts))
    print(f"hostile, one batch of {options.count} with a budget of 20 s: {time.perf_counter() - start:.1f} s; "
          f"{dict(function.counts)}")  # fmt: skip
    WORKER.stop()
    print(f"processes after stop: {len(children())}")


if __name__ == "__main__":
    main()
