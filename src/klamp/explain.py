"""Explanations: what a spec is, in numbers and words, without torch."""

from __future__ import annotations

import ast
import math
from dataclasses import fields
from typing import Any

from klamp.binary import BINARY, binary_bounds
from klamp.conditions import Budget, Condition, Distance, Nowhere
from klamp.errors import UserError
from klamp.factors import Factor
from klamp.gates import AnyGate, Gate
from klamp.guards import Guard
from klamp.measures import MEASURES
from klamp.presets import PRESETS
from klamp.radii import Moving, Scaled, number
from klamp.regions import Region, calibrate
from klamp.spec import Spec, part_name, part_text, value_text
from klamp.whole import equation

_RULE = "g = A * keep * factors, keep = inside | ~gate; loss = -mean(g log pi_new) + penalties, g detached"
_MATCHED = ("ratio_dev", "k2", "k3", "k3_flipped", "k3_reverse", "jeffreys", "js", "hellinger2", "pearson", "neyman",
            "lecam", "sym_chi2")  # fmt: skip
MATCH_RULE = "log_width"
PROBABILITIES = (0.01, 0.1, 0.5, 0.9, 0.99)  # at which the bounds of a binary divergence are shown

_GATES = {
    "outward": "where the step would move w further from 1",
    "not_inward": "where the step would not move w towards 1",
    "always": "everywhere",
    "positive": "where A > 0",
    "negative": "where A < 0",
}
_ACTIONS = {
    "zero": "gradient 0",
    "drop": "gradient 0, and the token leaves the mean",
    "drop_row": "the whole response leaves the loss and the mean",
    "rollback": "gradient pulls back, times -{strength:g}",
}


def explain(spec: Spec, vocabulary: int | None = None, width: int | None = None) -> dict[str, Any]:
    """Equation, parts, regions with bounds and matched radii, needs, costs and sources of a spec; JSON-ready.

    With ``vocabulary`` and ``width``, those of a model's output matrix, also what its divergences cost there.
    """
    return {
        "spec": str(spec),
        "rule": _RULE,
        "sources": [_source(name) for name in _presets(spec)],
        "parts": [part_text(part) for part in spec.parts],
        "guards": [_guard(guard) for guard in spec.guards],
        "factors": [{"text": part_text(part), "meaning": _factor(part)} for part in spec.factors],
        "penalties": [_penalty(part) for part in spec.penalties],
        "aggregate": part_text(spec.mean),
        "needs": sorted({"logp_new", "logp_old", "advantages", "mask"} | spec.needs),
        "costs": [*_costs(spec), *_at_size(spec, vocabulary, width)],
        "traits": sorted(spec.traits),
    }


def _presets(spec: Spec) -> list[str]:
    try:
        tree = ast.parse(spec.name, mode="eval")
    except SyntaxError:
        return []
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return [name for name in dict.fromkeys(names) if name in PRESETS]


def _source(name: str) -> dict[str, str]:
    found = PRESETS[name]
    return {"preset": name, "summary": found.summary, "equation": found.equation, "citation": found.citation,
            "deviation": found.deviation}  # fmt: skip


def _costs(spec: Spec) -> list[str]:
    """What a spec asks of a training step beyond log-probs and one forward and backward pass."""
    found = []
    if spec.reads_new:
        found.append(
            "one more forward pass: a statistic of the new policy over the whole step comes before the first loss"
        )
    elif spec.asks_step:
        found.append("a statistic of the whole step, taken before its first loss; no forward pass")
    whole = sorted(need for need in spec.needs if need.startswith("divergences["))
    return found + [f"{need}: {_whole_cost(spec, need[len('divergences[') : -1])}" for need in whole]


def _whole_cost(spec: Spec, name: str) -> str:
    """What a divergence over the vocabulary asks of a trainer; H: the width of its hidden states, V: the vocabulary."""
    if name.startswith("topk_"):
        return "12 bytes per token and bucket kept of the old policy, no matrix product more (klamp train; klamp.kernels elsewhere)"
    moves = any(f"divergences[{name}]" in part.needs and "moves_unsampled" in part.traits for part in spec.penalties)
    return (
        f"the old hidden states and output matrix kept, {'6' if moves else '2'} products of H x V per token more than the 4 of the "
        "log-probs (klamp train; klamp.kernels elsewhere)"
    )


def _at_size(spec: Spec, vocabulary: int | None, width: int | None) -> list[str]:
    """The same in bytes and operations, for a model's output matrix."""
    if vocabulary is None and width is None:
        return []
    if vocabulary is None or width is None or min(vocabulary, width) < 1:
        raise UserError(
            "give vocabulary and width, both above 0: those of the output matrix, for example 151936 and 1024"
        )
    product = 2.0 * vocabulary * width
    lines = [
        f"at {vocabulary:,} x {width:,}: log-probs with their gradient {4 * product / 1e9:.2f} GFLOP per token; their logits would be "
        f"{4 * vocabulary / 1e6:.2f} MB per token in float32, and are never held"
    ]
    names = {need[len("divergences[") : -1] for need in spec.needs if need.startswith("divergences[")}
    sizes = [
        guard.region.top_k for guard in _every_guard(spec) if isinstance(guard.region, Distance) and guard.region.top_k
    ]
    if any(name.startswith("topk_") for name in names):
        lines.append(
            f"at {vocabulary:,} x {width:,}: {12 * max([*sizes, 0]) + 8:,} bytes per token for the buckets of the old policy"
        )
    if any(name.startswith("exact_") for name in names):
        moves = any(
            "moves_unsampled" in part.traits and part.needs & {f"divergences[{name}]" for name in names}
            for part in spec.penalties
        )
        lines.append(
            f"at {vocabulary:,} x {width:,}: {(6 if moves else 2) * product / 1e9:.2f} GFLOP per token more; {2 * width + 4:,} bytes per token and "
            f"{2e-6 * vocabulary * width:,.0f} MB once in bfloat16, twice that in float32 (old_states_dtype, old_states_offload; the "
            "matrix not where it is not trained)"
        )
    return lines


def _every_guard(spec: Spec) -> list[Guard]:
    """The guards of the policy, and those that select where a penalty acts."""
    return [*spec.guards, *(guard for part in spec.penalties if (guard := getattr(part, "on", None)) is not None)]


# --- guards ---------------------------------------------------------------------------------------------------


def _guard(guard: Guard) -> dict[str, Any]:
    region = guard.region
    return {
        "text": part_text(guard),
        "ratio": guard.ratio,
        "scope": guard.scope,
        "reduce": guard.reduce,
        "discount": guard.discount,
        "gate": gate_text(guard.gate),
        "gate_meaning": gate_meaning(guard.gate),
        "action": guard.action,
        "action_meaning": action_meaning(guard),
        "cut_value": guard.cut_value,
        "inside": inside(guard),
        "region": _region(guard),
        "matched_radii": {"rule": MATCH_RULE, "radii": None if guard.after else matched(region)},
    }


def _region(guard: Guard) -> dict[str, Any]:
    """The region in numbers; bounds of w are None where the region is not one interval of it."""
    region = guard.region
    interval = region if isinstance(region, Region) and not guard.after else None
    where = None if interval is None else interval.coordinates
    name, equation = _measure(region)
    return {
        "kind": _KINDS[type(region)],
        "measure": name,
        "equation": equation,
        "arguments": {key: _json(value) for key, value in region.arguments().items()},
        "low": None if interval is None else interval.low,
        "high": None if interval is None else _finite(interval.high),
        "log_low": None if interval is None else _finite(interval.log_low),
        "log_high": None if interval is None else _finite(interval.log_high),
        "coordinates": None if where is None else {"a": where.a, "radius": where.radius},
        "by_probability": _by_probability(guard),
        "moves": [part_text(radius) for radius in region.moves],
        "notes": list(region.notes if interval is not None or not isinstance(region, Region) else ()),
    }


_KINDS: dict[type, str] = {Region: "interval", Distance: "distance", Budget: "budget", Nowhere: "nowhere"}


def _measure(region: Condition) -> tuple[str | None, str | None]:
    found = getattr(region, "measure", None)
    if found is None or isinstance(found, str):
        return found, None if found is None else BINARY.get(found) or equation(found)
    return str(found), found.equation or None


def _by_probability(guard: Guard) -> list[dict[str, float | None]]:
    """Bounds of w at some probabilities of the token, where they depend on it."""
    region = guard.region
    if not isinstance(region, Distance) or region.measure not in BINARY or guard.after:
        return []
    found: list[dict[str, float | None]] = []
    for p in PROBABILITIES:
        low, high = (_radius_at(radius, p) for radius in (region.radius_low, region.radius_high))
        if low is None or high is None:
            return []
        below, above = binary_bounds(region.measure, p, low)[0], binary_bounds(region.measure, p, high)[1]
        found.append({"p": p, "low": math.exp(below), "high": math.exp(above) if above < math.inf else None})
    return found


def _radius_at(radius: Any, p: float) -> float | None:
    """The radius at a probability of the token; None where something else decides it."""
    if isinstance(radius, Scaled):
        return radius.start * p**-radius.exponent if radius.by == "probability" else None
    return float(number(radius))


def inside(guard: Guard) -> str:
    """What lies inside a guard's region, in one phrase."""
    region, name = guard.region, _measure(guard.region)[0]
    if isinstance(region, Nowhere):
        return "nothing"
    if isinstance(region, Budget):
        return f"the mean of {name} over {region.over} tokens <= {region.budget:g}"
    if isinstance(region, Region) and not guard.after:
        moving = " before the first step" if region.moves else ""
        bounds = _interval(region.low, region.high) + moving
        return bounds if name is None else f"{name} <= {_radii(region)}: {bounds}"
    how = f"{guard.reduce.removesuffix('_after')} of {name}" if guard.after else str(name)
    return f"{how} <= {_radii(region)}"


def _interval(low: float, high: float) -> str:
    if low <= 0.0 and high == math.inf:
        return "every w"
    if low <= 0.0:
        return f"w <= {high:.5g}"
    return f"{low:.5g} <= w" if high == math.inf else f"{low:.5g} <= w <= {high:.5g}"


def _radii(region: Region | Distance) -> str:
    if region.radius is not None:
        return _radius(region.radius)
    return f"{_radius(region.radius_low)} (w < 1), {_radius(region.radius_high)} (w > 1)"


def _radius(radius: Any) -> str:
    return part_text(radius) if isinstance(radius, Moving) else f"{radius:g}"


def gate_text(gate: AnyGate) -> str:
    """A gate as a spec writes it."""
    return str(gate) if isinstance(gate, Gate) else part_text(gate)


def gate_meaning(gate: AnyGate) -> str:
    """Where a guard applies, in one phrase."""
    if isinstance(gate, Gate):
        return _GATES.get(str(gate), f"where {gate} is true")
    return _first_line(gate)


def action_meaning(guard: Guard) -> str:
    """What happens to a token that a guard cuts, in one phrase."""
    return _ACTIONS[guard.action].format(strength=guard.strength)


def of_scope(part: Guard | Factor) -> str:
    """What the log-ratio or its divergence is taken over: token, or "mean over the sequence"."""
    if part.scope == "token":
        return "token"
    weighed = f", discount {part.discount:g}" if part.discount != 1.0 else ""
    return f"{part.reduce.removesuffix('_after')} over the {part.scope}{weighed}"


def matched(region: Condition) -> dict[str, float] | None:
    """The radius of each measure with the same log(high / low); None unless the region is a two-sided interval."""
    if not isinstance(region, Region) or not (0.0 < region.low < 1.0 < region.high < math.inf):
        return None
    return {name: calibrate(MEASURES[name], region.low, region.high, MATCH_RULE) for name in _MATCHED}


# --- factors and penalties ------------------------------------------------------------------------------------


def _factor(factor: Factor) -> str:
    scope = "" if factor.scope == "token" else f" ({factor.reduce} of log w over the {factor.scope})"
    clipped = "; log w is clamped at the guards' bounds first" if factor.clipped else ""
    return f"multiplies g, detached: {_first_line(factor.transform)}. w = {factor.ratio}{scope}{clipped}"


def _penalty(part: Any) -> dict[str, Any]:
    on = getattr(part, "on", None)
    return {"text": _in_full(part), "meaning": _first_line(part), "on": None if on is None else selected(on)}


def selected(guard: Guard) -> str:
    """The tokens that a guard cuts, in one phrase."""
    where = f"{gate_text(guard.gate)}: {gate_meaning(guard.gate)}"
    return (
        where if isinstance(guard.region, Nowhere) else f"tokens outside {inside(guard)} (w = {guard.ratio}), {where}"
    )


def _first_line(part: object) -> str:
    return (type(part).__doc__ or type(part).__name__).strip().splitlines()[0].replace("``", "").rstrip(".")


def _in_full(part: Any) -> str:
    """The part with every argument, defaults included."""
    inner = ", ".join(f"{item.name}={value_text(getattr(part, item.name))}" for item in fields(part))
    return f"{part_name(part)}({inner})"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _json(value: Any) -> Any:
    if isinstance(value, float):
        return _finite(value)
    return value if isinstance(value, (int, str)) or value is None else value_text(value).strip("'")


# --- text -----------------------------------------------------------------------------------------------------


def text(spec: Spec, vocabulary: int | None = None, width: int | None = None) -> str:
    """The explanation for a reader at a terminal."""
    facts = explain(spec, vocabulary, width)
    lines = [facts["spec"], "", f"  rule        {facts['rule']}"]
    for source in facts["sources"]:
        lines += ["", f"  {source['preset']}: {source['summary']}", f"  equation    {source['equation']}"]
        lines += [f"  source      {source['citation']}"]
        lines += [f"  deviation   {source['deviation']}"] if source["deviation"] else []
    lines += ["", *(f"  part        {part}" for part in facts["parts"])]
    for guard in facts["guards"]:
        lines += ["", *_guard_lines(guard)]
    for kind, label in (("factors", "factor"), ("penalties", "penalty")):
        for part in facts[kind]:
            lines += ["", f"  {label:11} {part['text']}", f"    meaning   {part['meaning']}"]
            lines += [f"    only on   {part['on']}"] if part.get("on") else []
    lines += ["", f"  needs       {', '.join(facts['needs'])}"]
    lines += [f"  costs       {cost}" for cost in facts["costs"]]
    lines += [f"  traits      {', '.join(facts['traits'])}"] if facts["traits"] else []
    return "\n".join(lines)


def _guard_lines(guard: dict[str, Any]) -> list[str]:
    region = guard["region"]
    scope = guard["scope"] if guard["scope"] == "token" else f"{guard['reduce']} over the {guard['scope']}"
    scope += f", discount {guard['discount']:g}" if guard["discount"] != 1.0 else ""
    lines = [f"  guard       w = {guard['ratio']} ({scope}), gate {guard['gate']}: {guard['gate_meaning']}"]
    if region["low"] is not None:
        high = "inf" if region["high"] is None else f"{region['high']:.12g}"
        log_low = "-inf" if region["log_low"] is None else f"{region['log_low']:.12g}"
        log_high = "inf" if region["log_high"] is None else f"{region['log_high']:.12g}"
        lines += [
            f"    region    {region['low']:.12g} <= w <= {high}",
            f"    log       {log_low} <= log w <= {log_high}",
        ]
    else:
        lines += [f"    inside    {guard['inside']}"]
    lines += [f"    measure   {region['measure']}: {region['equation']}"] if region["equation"] else []
    lines += [f"    moves     {radius}" for radius in region["moves"]]
    for at in region["by_probability"]:
        lines.append(f"    p = {at['p']:<6g}{_interval(at['low'], math.inf if at['high'] is None else at['high'])}")
    if region["coordinates"]:
        where = region["coordinates"]
        lines.append(f"    power     a = {where['a']:.9g}, radius = {where['radius']:.9g}")
    lines.append(f"    outside   {guard['action_meaning']}")
    lines += [f"    note      {note}" for note in region["notes"]]
    radii = guard["matched_radii"]["radii"]
    if radii:
        lines.append(
            f"    matched   radius with the same log(high/low): {', '.join(f'{k} {v:.5g}' for k, v in radii.items())}"
        )
    return lines
