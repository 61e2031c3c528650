"""How often the 95 % intervals of a comparison over seeds hold the truth: measured, for clean seeds and for collapses.

    python benchmarks/coverage.py [--simulations 4000] [--seed 0] [--json]

Differences of n seeds are Gaussian with mean 0.5 and standard deviation 1; of a collapsed seed the difference is 10 lower.
The truth is the mean over all seeds, collapsed ones included. ``auto`` is ``klamp.statistics.mean_interval`` itself; the
sign test "covers" where it does not reject the truth as the centre; its second column asks for the median instead.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import numpy as np
from scipy import stats

from klamp.statistics import crossed, exact_mcnemar, mean_interval

SEEDS = (3, 5, 10, 20, 40)
COLLAPSES = (0.0, 0.1, 0.2)  # the chance that a seed of method b collapses
DROP = 10.0
EFFECT = 0.5
RESAMPLES = 1000
CHUNK = 500  # simulations that are resampled at once
# seeds, questions; deviations of the true difference over seeds, over questions, and of the rest
CROSSED = (
    (3, 50, 0.0, 0.0, 1.0), (3, 200, 0.3, 1.0, 1.0), (3, 200, 1.0, 1.0, 1.0), (3, 200, 0.3, 0.0, 1.0),
    (5, 50, 0.0, 0.0, 1.0), (5, 200, 0.3, 1.0, 1.0), (5, 200, 1.0, 1.0, 1.0), (5, 200, 0.0, 2.0, 0.5),
    (10, 50, 0.1, 0.5, 1.0), (10, 200, 0.3, 1.0, 1.0), (20, 20, 1.0, 1.0, 1.0),
)  # fmt: skip


def draw(random: np.random.Generator, collapse: float, size: tuple[int, int]) -> Any:
    return EFFECT + random.normal(size=size) - DROP * (random.random(size) < collapse)


def sign_p(n: int) -> Any:
    """p of the sign test by the number of values above the centre."""
    return np.array([exact_mcnemar(k, n - k) for k in range(n + 1)])


def coverage(collapse: float, n: int, simulations: int, seed: int) -> dict[str, Any]:
    """The share of simulations whose interval holds the truth, by method."""
    random = np.random.default_rng([seed, n, round(100 * collapse)])
    truth = EFFECT - DROP * collapse
    # the collapsed part lies below the median
    median = EFFECT + float(stats.norm.ppf((0.5 - collapse) / (1.0 - collapse)))
    hits = dict.fromkeys(("auto", "student", "bca", "percentile", "sign", "sign_of_median", "none_collapsed"), 0)
    for start in range(0, simulations, CHUNK):
        d = draw(random, collapse, (min(CHUNK, simulations - start), n))
        for row in d:
            found = mean_interval(row, resamples=RESAMPLES)
            hits["auto"] += found.low <= truth <= found.high
        half = stats.t.ppf(0.975, n - 1) * d.std(axis=1, ddof=1) / n**0.5
        hits["student"] += int((np.abs(d.mean(axis=1) - truth) <= half).sum())
        for name, method in (("bca", "BCa"), ("percentile", "percentile")):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # BCa of resamples without spread
                found = stats.bootstrap((d,), np.mean, axis=-1, method=method, n_resamples=RESAMPLES, batch=250,
                                        random_state=random).confidence_interval  # fmt: skip
            hits[name] += int(((found.low <= truth) & (truth <= found.high)).sum())
        p = sign_p(n)
        hits["sign"] += int((p[(d > truth).sum(axis=1)] >= 0.05).sum())
        hits["sign_of_median"] += int((p[(d > median).sum(axis=1)] >= 0.05).sum())
        hits["none_collapsed"] += int((d.min(axis=1) > EFFECT - DROP / 2).sum())
    return {"collapse": collapse, "n": n, **{name: round(count / simulations, 4) for name, count in hits.items()}}


def clustered(d: Any) -> float:
    """The variance of the mean as Cameron, Gelbach and Miller 2011 write it, without finite-sample factors."""
    rest, cells = d - d.mean(), d.size
    return float((rest.sum(axis=1) ** 2).sum() + (rest.sum(axis=0) ** 2).sum() - (rest**2).sum()) / cells**2


def crossed_coverage(setting: tuple[int, int, float, float, float], simulations: int, seed: int) -> dict[str, Any]:
    """The same for new seeds and new questions, next to other choices of variance and degrees of freedom.

    few_df: ``crossed`` with min(S, Q) - 1; clustered: two-way clustering with the same; seeds_alone: of the seeds' means.
    """
    s, q, over_seeds, over_questions, rest = setting
    random = np.random.default_rng([seed, s, q])
    few = float(stats.t.ppf(0.975, min(s, q) - 1))
    hits = dict.fromkeys(("crossed", "few_df", "clustered", "seeds_alone"), 0)
    for _ in range(simulations):
        d = over_seeds * random.normal(size=(s, 1)) + over_questions * random.normal(size=(1, q))
        d = EFFECT + d + rest * random.normal(size=(s, q))
        found, means = crossed(d), mean_interval(d.mean(axis=1))
        away = abs(found.mean - EFFECT)
        hits["crossed"] += found.low <= EFFECT <= found.high
        hits["few_df"] += away <= few * found.error
        hits["clustered"] += away <= few * max(clustered(d), 0.0) ** 0.5
        hits["seeds_alone"] += means.low <= EFFECT <= means.high
    names = ("seeds", "questions", "sd_seeds", "sd_questions", "sd_rest")
    return {**dict(zip(names, setting, strict=True)), **{name: round(n / simulations, 4) for name, n in hits.items()}}


def table(rows: list[dict[str, Any]]) -> str:
    heads = list(rows[0])
    cells = [heads, *([str(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    started = time.perf_counter()
    options = (arguments.simulations, arguments.seed)
    means = [coverage(collapse, n, *options) for collapse in COLLAPSES for n in SEEDS]
    both = [crossed_coverage(setting, *options) for setting in CROSSED]
    if arguments.json:
        found = {"simulations": arguments.simulations, "seed": arguments.seed, "mean": means, "crossed": both}
        print(json.dumps(found, indent=2))
        return
    print(table(means), "\n")
    print(table(both), "\n")
    print(f"{arguments.simulations} simulations each; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
