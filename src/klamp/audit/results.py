"""Results: the sums of an audit as a dictionary that JSON can hold; what is over nothing is None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from klamp.audit import sketch
from klamp.audit.calibration import calibrated
from klamp.audit.findings import Case, findings
from klamp.audit.slices import DIMENSIONS
from klamp.audit.sums import OF_SLICE, OF_SLICE_AND_SPEC, OF_SPEC, Counted, S, Sums, T
from klamp.audit.thresholds import Thresholds
from klamp.audit.verdicts import is_plain
from klamp.compare.specs import labels
from klamp.guards import Guard
from klamp.measures import MEASURES
from klamp.metrics import HISTOGRAM_BINS, HISTOGRAM_LIMIT
from klamp.regions import Region
from klamp.spec import Spec
from klamp.version import __version__

SCHEMA = 1
SHARES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
TOP = 20  # tokens cut most often

Row = dict[str, Any]


def results(
    sums: Sums, specs: Sequence[Spec], limits: Thresholds, files: Sequence[str], decode: dict[int, str] | None = None
) -> Row:
    """Everything that an audit says."""
    names = labels(specs) if specs else []
    total = {name: sums.total(name) for name in T}
    case = Case(sums, specs, names, limits)
    return {
        "schema": SCHEMA,
        "klamp": __version__,
        "files": list(files),
        "kinds": list(sums.kinds),
        "notes": list(sums.notes),
        "log": _log(sums, total),
        "specs": [_spec(sums, total, index, spec, names[index], decode) for index, spec in enumerate(specs)],
        "agreement": _agreement(sums, names),
        "findings": [one.to_dict() for one in findings(case)],
        "limits": dict(vars(limits)),
    }


def _over(part: float, whole: float) -> float | None:
    found = part / whole if whole else math.nan
    return float(found) if math.isfinite(found) else None


def _whole(value: float) -> int:
    return round(float(value))


# --- the log --------------------------------------------------------------------------------------------------


def _log(sums: Sums, total: dict[str, float]) -> Row:
    tokens, finite = total["tokens"], total["tokens"] - total["overflow"]
    steps = sums.steps
    quantiles = sketch.quantiles(sums.ratios.settled().sum(axis=0), SHARES)
    return {
        "tokens": _whole(tokens),
        "responses": _whole(total["responses"]),
        "steps": {"count": len(steps), "first": steps[0], "last": steps[-1]},
        "active": _whole(total["active"]),
        "active_share": _over(total["active"], tokens),
        "positive_share": _over(total["positive"], tokens),
        "unmoved_share": _over(total["unmoved"], tokens),
        # Tokens are sampled from old (or its sampler), so these estimate KL(old||new).
        "kl_old_new": {"k1": _over(-total["x"], finite), "k2": _over(0.5 * total["x2"], finite), "k3": _over(total["k3"], finite)},
        # E over old of 1/w - 1 + log w: the usual code's k3, of KL(new||old) only where new sampled.
        "k3_flipped": _flipped(sums),
        "kl_old_new_sequence": _over(total["k3"], total["responses"]),
        "overflow": _whole(total["overflow"]),
        "entropy": _over(total["entropy"], total["entropy_tokens"]),
        "surprisal_old": _over(total["surprisal"], tokens - total["entropy_tokens"]),
        "log_ratio_quantiles": {str(share): value for share, value in zip(SHARES, quantiles, strict=True)},
        "ratio_quantiles": {
            str(share): None if value is None else math.exp(min(value, 700.0)) for share, value in zip(SHARES, quantiles, strict=True)
        },
        "quantile_error": sketch.ERROR,
        "log_ratio_histogram": _histogram(sums),
        # Of old/rollout; tokens are sampled from rollout.
        "kl_rollout_old": {"k1": _over(-total["y"], total["y_tokens"]), "k2": _over(0.5 * total["y2"], total["y_tokens"]),
                           "k3": _over(total["y_k3"], total["y_tokens"])} if total["y_tokens"] else None,
        "by_step": _by_step(sums),
    }  # fmt: skip


def _flipped(sums: Sums) -> float | None:
    """Mean of 1/w - 1 + log w, from the sketch: within 1 %."""
    counts, x = sums.ratios.settled().sum(axis=0), sketch.middles()
    with np.errstate(over="ignore"):
        return _over(float(counts @ MEASURES["k3_flipped"].divergence(x)), float(counts.sum()))


def _histogram(sums: Sums) -> Row:
    """Tokens by log w in equal bins, as in policy/ratio_histogram, the ends open."""
    edges = np.linspace(-HISTOGRAM_LIMIT, HISTOGRAM_LIMIT, HISTOGRAM_BINS + 1)
    inside = np.clip(sketch.middles(), edges[0], edges[-1])
    counts = np.histogram(inside, edges, weights=sums.ratios.settled().sum(axis=0))[0]
    return {"edges": edges.tolist(), "counts": counts.astype(int).tolist()}


def _by_step(sums: Sums) -> list[Row]:
    found = []
    for step in sums.steps:
        one = sums.totals[step]
        tokens = one[T["tokens"]]
        found.append({
            "step": step, "tokens": _whole(tokens), "kl_old_new": _over(one[T["k3"]], tokens - one[T["overflow"]]),
            "entropy": _over(one[T["entropy"]], one[T["entropy_tokens"]]), "surprisal_old": _over(one[T["surprisal"]], tokens - one[T["entropy_tokens"]]),
            "kl_rollout_old": _over(one[T["y_k3"]], one[T["y_tokens"]]), "unmoved_share": _over(one[T["unmoved"]], tokens),
        })  # fmt: skip
    return found


# --- a spec ---------------------------------------------------------------------------------------------------


def _spec(
    sums: Sums, total: dict[str, float], index: int, spec: Spec, label: str, decode: dict[int, str] | None
) -> Row:
    own = {name: sums.spec_total(index, name) for name in OF_SPEC}
    low, high = own["low_positive"] + own["low_negative"], own["high_positive"] + own["high_negative"]
    removed = low + high
    mass = own["mass_low"] + own["mass_high"]
    size = math.sqrt(own["g2"]) * math.sqrt(own["u2"])
    ess = _over(own["g"] ** 2, own["g2"])
    return {
        "spec": str(spec),
        "label": label,
        "judged_by": "numpy" if is_plain(spec) else "objective",
        "bounds": [_bounds(guard) for guard in spec.guards],
        "outside": {
            "low": _whole(own["outside_low"]), "high": _whole(own["outside_high"]),
            "low_share": _over(own["outside_low"], total["tokens"]), "high_share": _over(own["outside_high"], total["tokens"]),
        },
        "removed": {
            "tokens": _whole(removed), "share": _over(removed, total["tokens"]), "active_share": _over(removed, total["active"]),
            "low": _whole(low), "high": _whole(high), "low_share": _over(low, total["tokens"]), "high_share": _over(high, total["tokens"]),
            "positive": _whole(own["low_positive"] + own["high_positive"]), "negative": _whole(own["low_negative"] + own["high_negative"]),
            **{name: _whole(own[name]) for name in ("low_positive", "low_negative", "high_positive", "high_negative")},
            "mass_share": _over(mass, own["u"]), "mass_low_share": _over(own["mass_low"], own["u"]),
            "mass_high_share": _over(own["mass_high"], own["u"]),
        },
        "gradient": {
            "cosine": None if not size else max(-1.0, min(1.0, own["gu"] / size)), "norm_ratio": _over(math.sqrt(max(own["g2"], 0.0)), math.sqrt(own["u2"])),
            "effective_tokens": ess, "effective_share": None if ess is None else _over(ess, total["active"]), "overflow": _whole(own["overflow"]),
        },
        "by_step": [
            {"step": step, "removed_low": _whole(one[S["low_positive"]] + one[S["low_negative"]]),
             "removed_high": _whole(one[S["high_positive"]] + one[S["high_negative"]]),
             "outside": _whole(one[S["outside_low"]] + one[S["outside_high"]]), "mass_share": _over(one[S["mass_low"]] + one[S["mass_high"]], one[S["u"]])}
            for step, one in ((step, sums.spec_totals[step][index]) for step in sums.steps)
        ],
        "removed_by_old_prob": [
            {"slice": label, "low": _whole(low), "high": _whole(high)}
            for label, low, high in zip(DIMENSIONS["old_prob"].labels, *sums.cut_probability[index], strict=True)
        ],
        "slices": {name: _slices(sums, name, index) for name in sums.slices},
        "tokens_cut_most": _top(sums, index, decode),
        "same_share": calibrated(sums.ratios.settled(), removed),
    }  # fmt: skip


def _bounds(guard: Guard) -> Row:
    """The ratio that a guard compares, and its bounds where they are two numbers."""
    where = guard.region
    fixed = isinstance(where, Region) and not where.moves and not guard.after
    low, high = (where.low, where.high) if fixed and isinstance(where, Region) else (0.0, math.inf)
    return {
        "ratio": guard.ratio,
        "scope": guard.scope,
        "low": low or None,
        "high": high if math.isfinite(high) else None,
    }


def _slices(sums: Sums, name: str, index: int) -> list[Row]:
    found = []
    for code, label in enumerate(DIMENSIONS[name].labels):
        whole = dict(zip(OF_SLICE, sums.slices[name][code], strict=True))
        own = dict(zip(OF_SLICE_AND_SPEC, sums.spec_slices[name][index, code], strict=True))
        if whole["tokens"]:
            found.append({
                "slice": label, "tokens": _whole(whole["tokens"]), "active": _whole(whole["active"]), "outside": _whole(own["outside"]),
                "removed_low": _whole(own["low"]), "removed_high": _whole(own["high"]),
                "removed_share": _over(own["low"] + own["high"], whole["active"]), "mass_share": _over(own["removed_mass"], own["mass"]),
            })  # fmt: skip
    return found


def _top(sums: Sums, index: int, decode: dict[int, str] | None) -> list[Row]:
    """The tokens cut most often."""
    cut = sums.cut_ids[index]
    cut.settle()
    sums.seen_ids.settle()
    best = np.lexsort((cut.ids, -cut.sums[:, 0]))[:TOP]
    seen = _seen(sums.seen_ids)
    return [
        {"id": int(cut.ids[k]), "text": None if decode is None else decode.get(int(cut.ids[k])), "cut": _whole(cut.sums[k, 0]),
         "mass": float(cut.sums[k, 1]), "seen": seen.get(int(cut.ids[k]))}
        for k in best
    ]  # fmt: skip


def _seen(seen: Counted) -> dict[int, int]:
    return dict(zip(seen.ids.tolist(), seen.sums[:, 0].astype(int).tolist(), strict=True))


def _agreement(sums: Sums, names: Sequence[str]) -> Row:
    """cut_and_kept[i][j]: tokens that spec i cuts and spec j keeps; both[i][j]: those that both cut."""
    both = sums.both
    alone = np.diagonal(both)[:, None] - both
    return {"labels": list(names), "cut_and_kept": alone.astype(int).tolist(), "both": both.astype(int).tolist()}


def top_ids(sums: Sums) -> list[int]:
    """The ids that the results will name, so that a tokenizer is asked for no others."""
    found: dict[int, None] = {}
    for index in range(sums.specs):
        found |= {row["id"]: None for row in _top(sums, index, None)}
    return list(found)
