"""One block of tokens: sums whatever the spec, and each spec's verdict on the tokens that some region leaves out.

Log-ratios are float32, as a trainer has them; their sums are float64, and counts are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from klamp.audit import sketch
from klamp.audit.general import Judged
from klamp.audit.slices import DIMENSIONS
from klamp.audit.sums import OF_SLICE, S, Sums, T
from klamp.audit.tokens import Array, Tokens, counted
from klamp.audit.verdicts import Reach, Verdict, is_plain, judge, ratios_of, weight_of
from klamp.spec import Spec

TOKENS = 1 << 14  # of a block: its columns stay in the cache, and none is so large that each takes new pages of memory


@dataclass(frozen=True)
class Plan:
    """What is asked of every block: the specs, which of them NumPy judges, and the slices."""

    specs: tuple[Spec, ...]
    by: tuple[str, ...] = ()

    @cached_property
    def plain(self) -> tuple[bool, ...]:
        return tuple(is_plain(spec) for spec in self.specs)

    @cached_property
    def weights(self) -> tuple[str | None, ...]:
        return tuple(weight_of(spec) if plain else None for spec, plain in zip(self.specs, self.plain, strict=True))

    @cached_property
    def _plain_specs(self) -> list[Spec]:
        return [spec for spec, plain in zip(self.specs, self.plain, strict=True) if plain]

    @cached_property
    def reach(self) -> Reach:
        return Reach.of(self._plain_specs)

    @cached_property
    def ratios(self) -> list[str]:
        return list(dict.fromkeys(["new/old", *ratios_of(self._plain_specs)]))


def add(sums: Sums, plan: Plan, tokens: Tokens, step: int, general: Mapping[int, Judged]) -> None:
    """Add one block of a step; ``general``: verdicts on its unmasked tokens of the specs that NumPy does not judge."""
    columns = _columns(tokens, plan)
    if not len(columns["x"]):
        return
    totals, per_spec = sums.of_step(step)
    masses = _whatever(sums, totals, columns)
    weights = {name: mass for name, mass in masses.items() if name in plan.weights}
    codes = {name: DIMENSIONS[name].codes(columns) for name in sums.slices}
    for name, code in codes.items():
        _add_slice(sums.slices[name], code, columns, weights)
    if "token" in plan.by:
        sums.seen_ids.add(columns["token_ids"].astype(np.int64), masses["ratio"])
    ratios = {name: columns[name] for name in plan.ratios}
    flags = plan.reach.beyond(ratios)
    for judged in general.values():
        flags |= judged.verdict.outside | judged.verdict.removed
    where = np.flatnonzero(flags)
    advantage = columns["advantage"][where]
    near = {name: x[where] for name, x in ratios.items()}
    likely = DIMENSIONS["old_prob"].codes({"logp_old": columns["logp_old"][where]})
    removed = np.zeros((len(plan.specs), len(where)), np.float32)
    for index, spec in enumerate(plan.specs):
        judged_ = general.get(index)
        if judged_ is None:
            verdict = judge(spec, near, advantage)
            whole = masses[plan.weights[index] or "ratio"]
        else:
            verdict = judged_.verdict.at(where)
            whole = np.abs(judged_.u)
        mass = whole[where]
        removed[index] = verdict.removed
        _add_spec(per_spec[index], verdict, advantage, mass)
        for side, cut in enumerate((verdict.removed_low, verdict.removed_high)):
            sums.cut_probability[index, side] += np.bincount(likely[cut], minlength=sums.cut_probability.shape[2])
        _add_gradient(per_spec[index], whole, mass[verdict.removed], judged_)
        for name, code in codes.items():
            _add_spec_slice(sums.spec_slices[name][index], code[where], verdict, mass)
            if judged_ is not None:
                sums.spec_slices[name][index, :, -1] += np.bincount(code, whole, len(sums.slices[name]))
        if "token_ids" in columns:
            sums.cut_ids[index].add(
                columns["token_ids"][where][verdict.removed].astype(np.int64), mass[verdict.removed]
            )
    sums.both += removed @ removed.T


def _columns(tokens: Tokens, plan: Plan) -> dict[str, Array]:
    """The unmasked tokens: log-ratios by their names (x is new/old, y old/rollout) and what else is asked of them."""
    whole = bool(tokens.mask.all())
    names = ("logp_new", "logp_old", "logp_rollout", "logp_ref", "advantage", "entropy", "token_ids")
    found: dict[str, Array] = {}
    for name in names:
        value = getattr(tokens, name)
        if value is not None:
            found[name] = value if whole else value[tokens.mask]
    found["x"] = found["new/old"] = found["logp_new"] - found["logp_old"]
    for ratio in plan.ratios:
        numerator, _, denominator = ratio.partition("/")
        if ratio not in found:
            found[ratio] = found[f"logp_{numerator}"] - found[f"logp_{denominator}"]
    if "logp_rollout" in found:
        found["y"] = found["old/rollout"] if "old/rollout" in found else found["logp_old"] - found["logp_rollout"]
    lengths = tokens.lengths
    if not whole:
        lengths = counted(tokens.mask, tokens.offsets)
    found["lengths"] = lengths
    if "position" in plan.by:
        found["position"] = np.arange(len(found["x"])) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return found


def _whatever(sums: Sums, totals: Array, columns: Mapping[str, Array]) -> dict[str, Array]:
    """Add what no spec has a say in; returns |A| w and |A| of each token, float64."""
    x, advantage = columns["x"], columns["advantage"]
    positive, active = advantage > 0, advantage != 0
    wide = x.astype(np.float64)
    change = np.expm1(wide)  # w - 1
    total = float(change.sum())
    if not np.isfinite(total):
        far = np.isinf(change)
        totals[T["overflow"]] += int(far.sum())
        change[far] = wide[far] = 0.0
        total = float(change.sum())
    sum_x = float(wide.sum())
    one = np.abs(advantage, dtype=np.float64)
    change += 1.0
    ratio = np.multiply(change, one, out=change)
    for name, value in (
        ("tokens", len(x)), ("responses", np.count_nonzero(columns["lengths"])), ("active", np.count_nonzero(active)),
        ("positive", np.count_nonzero(positive)), ("unmoved", np.count_nonzero(x == 0)), ("x", sum_x), ("x2", wide @ wide),
        ("k3", total - sum_x), ("mass_ratio", ratio.sum()), ("mass2_ratio", ratio @ ratio), ("mass_one", one.sum()), ("mass2_one", one @ one),
    ):  # fmt: skip
        totals[T[name]] += value
    if "entropy" in columns:
        totals[T["entropy"]] += columns["entropy"].sum(dtype=np.float64)
        totals[T["entropy_tokens"]] += len(x)
    else:
        totals[T["surprisal"]] -= columns["logp_old"].sum(dtype=np.float64)
    if "y" in columns:
        _mismatch(totals, columns["y"])
    code = sketch.codes(x)
    code += np.multiply(positive.view(np.int8) + 2 * (advantage < 0).view(np.int8), sketch.BINS, dtype=np.int32)
    sums.ratios += np.bincount(code, minlength=sums.ratios.size).reshape(sums.ratios.shape)
    return {"ratio": ratio, "one": one}


def _mismatch(totals: Array, y: Array) -> None:
    """The log-ratio old/rollout where the sampler recorded a log-prob."""
    wide = y.astype(np.float64)
    total = float(wide.sum())
    if not np.isfinite(total):
        wide = wide[np.isfinite(wide)]
        total = float(wide.sum())
    far = float(np.expm1(wide).sum()) - total
    for name, value in (("y_tokens", len(wide)), ("y", total), ("y2", wide @ wide), ("y_k3", far)):
        totals[T[name]] += value


def _add_spec(sums: Array, verdict: Verdict, advantage: Array, mass: Array) -> None:
    positive = advantage > 0
    low, high = verdict.removed_low, verdict.removed_high
    for name, value in (
        ("outside_low", verdict.outside_low.sum()), ("outside_high", verdict.outside_high.sum()),
        ("low_positive", (low & positive).sum()), ("low_negative", (low & ~positive).sum()),
        ("high_positive", (high & positive).sum()), ("high_negative", (high & ~positive).sum()),
        ("mass_low", mass[low].sum()), ("mass_high", mass[high].sum()),
    ):  # fmt: skip
        sums[S[name]] += value


def _add_gradient(sums: Array, whole: Array, removed: Array, judged: Judged | None) -> None:
    """Sums of |g|, g^2, g u, |u|, u^2: g is the gradient's coefficient, u the one without guards. Of plain specs g is u or 0."""
    u, u2 = whole.sum(), whole @ whole
    if judged is None:
        left, left2 = u - removed.sum(), u2 - removed @ removed
        values = (left, left2, left2)
    else:
        values = (np.abs(judged.g).sum(), judged.g @ judged.g, judged.g @ judged.u)
        sums[S["overflow"]] += judged.overflows
    for name, value in zip(("g", "g2", "gu", "u", "u2"), (*values, u, u2), strict=True):
        sums[S[name]] += value


def _add_slice(sums: Array, code: Array, columns: Mapping[str, Array], masses: Mapping[str, Array]) -> None:
    bins = len(sums)
    counts = np.bincount(2 * code + (columns["advantage"] != 0), minlength=2 * bins).reshape(bins, 2)
    sums[:, 0] += counts.sum(axis=1)
    sums[:, 1] += counts[:, 1]
    for name, mass in masses.items():
        sums[:, OF_SLICE.index(f"mass_{name}")] += np.bincount(code, mass, bins)


def _add_spec_slice(sums: Array, code: Array, verdict: Verdict, mass: Array) -> None:
    bins = len(sums)
    weights: Sequence[Array] = (verdict.outside, verdict.removed_low, verdict.removed_high, mass * verdict.removed)
    for column, weight in enumerate(weights):
        sums[:, column] += np.bincount(code, weight, bins)
