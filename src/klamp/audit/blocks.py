"""One block of tokens: sums whatever the spec, and each spec's verdict on the tokens that some region leaves out.

Log-ratios are float32, as a trainer has them; their sums are float64, and counts are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from klamp.audit import evidence, sketch
from klamp.audit.general import Judged
from klamp.audit.slices import DIMENSIONS
from klamp.audit.sums import S, Sums, T
from klamp.audit.tokens import Array, Tokens, counted
from klamp.audit.verdicts import Reach, Verdict, Weight, is_plain, judge, ratios_of, weight_of
from klamp.spec import Spec

_PLAIN: Weight = (("new/old", -math.inf, math.inf),)
TOKENS = 1 << 16  # of a block: few enough to stay near the cache, so many that a call of NumPy costs little for each


@dataclass(frozen=True)
class Plan:
    """What is asked of every block: the specs, which of them NumPy judges, and the slices."""

    specs: tuple[Spec, ...]
    by: tuple[str, ...] = ()

    @cached_property
    def plain(self) -> tuple[bool, ...]:
        return tuple(is_plain(spec) for spec in self.specs)

    @cached_property
    def weights(self) -> tuple[Weight | None, ...]:
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
    evidence.positive(sums.facts, columns)
    totals, per_spec = sums.of_step(step)
    masses = _masses(plan, columns, _whatever(sums, totals, columns))
    codes = {name: DIMENSIONS[name].codes(columns) for name in sums.slices}
    for name, code in codes.items():
        _add_slice(sums.slices[name], code, columns["advantage"])
    if "token" in plan.by:
        sums.seen_ids.add(columns["token_ids"], masses[()])
    sides = plan.reach.sides(columns)
    flags = plan.reach.beyond(columns, sides)
    for judged in general.values():
        flags |= judged.verdict.outside | judged.verdict.removed
    where = np.flatnonzero(flags)
    near = {name: columns[name][where] for name in (*plan.ratios, "logp_old", "advantage")}
    near_sides = {key: (low[where], high[where]) for key, (low, high) in sides.items()}
    likely = DIMENSIONS["old_prob"].codes(near)
    removed = np.zeros((len(plan.specs), len(where)), np.float32)
    for index, spec in enumerate(plan.specs):
        other = general.get(index)
        verdict = judge(spec, near, near_sides) if other is None else other.verdict.at(where)
        whole = masses[plan.weights[index] or ()] if other is None else np.abs(other.u)
        mass, cut = whole[where], verdict.removed
        removed[index] = cut
        _add_spec(per_spec[index], verdict, near["advantage"], mass)
        _add_gradient(per_spec[index], whole, mass[cut], other)
        for side, some in enumerate((verdict.removed_low, verdict.removed_high)):
            sums.cut_probability[index, side] += np.bincount(likely[some], minlength=sums.cut_probability.shape[2])
        for name, code in codes.items():
            _add_spec_slice(sums.spec_slices[name][index], code, where, verdict, whole)
        if "token_ids" in columns:
            sums.cut_ids[index].add(columns["token_ids"][where[cut]], mass[cut])
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


def _masses(plan: Plan, columns: Mapping[str, Array], known: dict[Weight, Array]) -> dict[Weight, Array]:
    """|A| times the weight of each plain spec, float64 [n]; what overflows is 0, as where the general way counts it."""
    for weight in plan.weights:
        if weight is not None and weight not in known:
            total = np.zeros(len(columns["x"]))
            for ratio, low, high in weight:
                total += np.clip(columns[ratio], low, high)
            mass = np.exp(total) * known[()]
            if not np.isfinite(mass.sum()):
                mass[~np.isfinite(mass)] = 0.0
            known[weight] = mass
    return known


def _whatever(sums: Sums, totals: Array, columns: Mapping[str, Array]) -> dict[Weight, Array]:
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
        ("k3", total - sum_x),
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
    sums.ratios.add(code)
    return {_PLAIN: ratio, (): one}


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


def _add_slice(sums: Array, code: Array, advantage: Array) -> None:
    bins = len(sums)
    counts = np.bincount(2 * code + (advantage != 0), minlength=2 * bins).reshape(bins, 2)
    sums[:, 0] += counts.sum(axis=1)
    sums[:, 1] += counts[:, 1]


def _add_spec_slice(sums: Array, code: Array, where: Array, verdict: Verdict, whole: Array) -> None:
    bins, near = len(sums), code[where]
    weights: Sequence[Array] = (
        verdict.outside,
        verdict.removed_low,
        verdict.removed_high,
        whole[where] * verdict.removed,
    )
    for column, weight in enumerate(weights):
        sums[:, column] += np.bincount(near, weight, bins)
    sums[:, -1] += np.bincount(code, whole, bins)
