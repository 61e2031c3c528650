"""Calibration on real tokens: the radius of each measure that would have removed the share that a spec removed."""

from __future__ import annotations

from typing import Any

import numpy as np

from klamp.audit import sketch
from klamp.audit.tokens import Array
from klamp.measures import MEASURES
from klamp.regions import region

POSITIVE, NEGATIVE = 1, 2  # rows of the counts


def calibrated(ratios: Array, removed: float) -> list[dict[str, Any]]:
    """For each measure the radius whose region on a token's new/old, outward, leaves out nearest to ``removed`` tokens.

    ``ratios`` [3, bins]: counts by the sign of A (0, +, -) of ``klamp.audit.sketch``. Log-ratios are known to 0.4 %, so a
    radius near 0.8 %. ``radius`` is None where no radius of a measure removes so many.
    """
    middle = sketch.middles()
    high, low = (ratios[POSITIVE] > 0) & (middle > 0), (ratios[NEGATIVE] > 0) & (middle < 0)
    x = np.concatenate([middle[high], middle[low]])
    counts = np.concatenate([ratios[POSITIVE][high], ratios[NEGATIVE][low]])
    return [{"measure": name} | _radius(name, x, counts, removed) for name in MEASURES]


def _radius(name: str, x: Array, counts: Array, wanted: float) -> dict[str, Any]:
    nothing = {"radius": None, "removed": None, "low": None, "high": None}
    if not len(x) or not wanted:
        return nothing
    distance = np.asarray(MEASURES[name].divergence(x), np.float64)
    order = np.argsort(-distance, kind="stable")
    beyond = np.cumsum(counts[order]) - counts[order]  # removed by the radius that is this distance
    last = int(np.argmin(np.abs(beyond - wanted)))
    radius = float(distance[order[last]])
    reach = float(counts[distance > 0].sum())
    if not radius > 0.0 or not np.isfinite(radius) or reach < wanted * (1 - 1e-9):
        return nothing
    where = region(name, radius)
    return {
        "radius": radius,
        "removed": int(counts[distance > radius].sum()),
        "low": where.low,
        "high": _finite(where.high),
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
