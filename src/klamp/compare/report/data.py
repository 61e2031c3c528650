"""A comparison as it was handed over, read once into plain records.

Whatever is missing is None or empty; what has another shape than it should is left out and counted in `notes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from klamp.report.run import finite

ENOUGH = 3  # seeds; with fewer nothing is ranked and no verdict is given
VERDICTS = ("better", "worse", "no difference found", "no test possible")
SHARES = ("share", "share of tokens", "share of problems")


@dataclass(frozen=True)
class Metric:
    name: str
    title: str
    unit: str
    better: str | None  # "higher", "lower"
    definition: str

    @property
    def share(self) -> bool:
        return self.unit in SHARES


@dataclass(frozen=True)
class Region:
    low: float | None
    high: float | None
    ratio: str
    a: float | None
    radius: float | None


@dataclass(frozen=True)
class Anatomy:
    """What was cut, by old probability (a number for each bin) and by the sign of the advantage (removed, tokens)."""

    edges: tuple[float, ...]
    tokens: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    positive: tuple[float, float] | None
    negative: tuple[float, float] | None
    of_sign: bool  # whether those tokens are the ones of that sign; else all tokens


@dataclass(frozen=True, eq=False)
class Run:
    seed: str
    directory: str
    status: str
    why: str  # of a failed one
    collapsed: bool | None
    metrics: dict[str, float]
    curves: dict[str, dict[int, float | None]]  # by step
    anatomy: Anatomy | None


@dataclass(frozen=True, eq=False)
class Spec:
    place: int  # which colour and mark it has on the page
    label: str
    text: str
    asked: str
    same_as: str | None
    region: Region | None
    note: str | None
    runs: tuple[Run, ...]

    def values(self, metric: str) -> list[tuple[Run, float]]:
        return [(run, run.metrics[metric]) for run in self.runs if metric in run.metrics]


@dataclass(frozen=True)
class Summary:
    n: int
    mean: float | None
    low: float | None
    high: float | None
    iqm: float | None
    least: float | None
    most: float | None


@dataclass(frozen=True)
class Difference:
    n: int
    mean: float | None
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    sign_p: float | None
    better: int | None
    worse: int | None
    same: int | None
    improvement: float | None
    verdict: str | None
    values: tuple[tuple[str, float], ...]
    needed: int | None
    crossed: tuple[float, float] | None  # the interval over seeds and questions at once


@dataclass(frozen=True)
class Comparison:
    facts: Mapping[str, Any]  # task, model, base, ... as they were given
    manifest: Mapping[str, Any]
    reference: str
    seeds: tuple[str, ...]
    metrics: tuple[Metric, ...]
    specs: tuple[Spec, ...]
    summaries: Mapping[tuple[str, str], Summary]
    differences: Mapping[tuple[str, str], Difference]
    notes: tuple[str, ...]

    @property
    def judged(self) -> bool:
        """Whether there are enough seeds to say that anything differs."""
        return len(self.seeds) >= ENOUGH

    @property
    def drawn(self) -> list[Spec]:
        """The specs that charts show: one that is the same as another one is drawn with it."""
        known = {spec.label for spec in self.specs}
        return [spec for spec in self.specs if spec.same_as not in known - {spec.label}]

    def verdict(self, label: str, metric: str) -> str | None:
        found = self.differences.get((label, metric))
        told = found is not None and self.judged and found.n >= ENOUGH and found.verdict in VERDICTS
        return found.verdict if found is not None and told else None

    def find(self, *names: str) -> Metric | None:
        """The metric of one of these names, else the first whose name contains one of them."""
        for name in names:
            exact = [metric for metric in self.metrics if metric.name == name]
            if exact:
                return exact[0]
        for name in names:
            near = [metric for metric in self.metrics if name in metric.name]
            if near:
                return near[0]
        return None


def read(comparison: Mapping[str, Any]) -> Comparison:
    """The records of a comparison in the JSON form that `klamp compare` keeps."""
    lost: dict[str, int] = {}
    metrics = [
        Metric(name, capital(words(known.get("title")) or name), words(known.get("unit")),
               known.get("better") if known.get("better") in ("higher", "lower") else None, capital(words(known.get("definition"))))
        for name, known in _pairs(comparison.get("metrics"))
        if isinstance(known, Mapping)
    ]  # fmt: skip
    specs = tuple(_spec(place, one, lost) for place, one in enumerate(_rows(comparison.get("specs"))))
    listed = comparison.get("seeds")
    seeds = [words(seed) for seed in listed] if isinstance(listed, (list, tuple)) else []
    seeds = seeds or sorted({run.seed for spec in specs for run in spec.runs})
    notes = comparison.get("notes")
    notes = [words(note) for note in notes] if isinstance(notes, (list, tuple)) else []
    notes += [f"{what}: {count} of another form than expected, and left out." for what, count in lost.items()]
    return Comparison(
        facts=comparison,
        manifest=dict(_pairs(comparison.get("manifest"))),
        reference=words(comparison.get("reference")),
        seeds=tuple(seeds),
        metrics=tuple(metrics),
        specs=specs,
        summaries={_key(one): _summary(one) for one in _rows(comparison.get("summary"))},
        differences={_key(one): _difference(one) for one in _rows(comparison.get("differences"))},
        notes=tuple(notes),
    )


def words(value: object) -> str:
    """A value as text; None is none."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def capital(value: str) -> str:
    return value[:1].upper() + value[1:]


def _spec(place: int, one: Mapping[str, Any], lost: dict[str, int]) -> Spec:
    region = one.get("region")
    text = words(one.get("text"))
    return Spec(
        place=place,
        label=words(one.get("label")) or text or f"spec {place + 1}",
        text=text,
        asked=words(one.get("asked")),
        same_as=words(one.get("same_as")) or None,
        region=_region(region) if isinstance(region, Mapping) else None,
        note=words(one.get("note")) or None,
        runs=tuple(_run(run, lost) for run in _rows(one.get("runs"))),
    )  # fmt: skip


def _region(one: Mapping[str, Any]) -> Region:
    low, high, a, radius = (finite(one.get(name)) for name in ("low", "high", "a", "radius"))
    return Region(low, high, words(one.get("ratio")) or "ratio", a, radius)


def _run(one: Mapping[str, Any], lost: dict[str, int]) -> Run:
    numbers = {name: finite(value) for name, value in _pairs(one.get("metrics"))}
    for name, value in _pairs(one.get("metrics")):
        if value is not None and numbers[name] is None:
            lost[name] = lost.get(name, 0) + 1
    collapsed = one.get("collapsed")
    return Run(
        seed=words(one.get("seed")),
        directory=words(one.get("directory")),
        status=words(one.get("status")) or "unknown",
        why=words(one.get("why")),
        collapsed=collapsed if isinstance(collapsed, bool) else None,
        metrics={name: value for name, value in numbers.items() if value is not None},
        curves={name: _curve(name, line, lost) for name, line in _pairs(one.get("curves"))},
        anatomy=_anatomy(one.get("anatomy"), lost),
    )


def _curve(name: str, line: object, lost: dict[str, int]) -> dict[int, float | None]:
    found: dict[int, float | None] = {}
    for point in line if isinstance(line, (list, tuple)) else ():
        step, value = point if isinstance(point, (list, tuple)) and len(point) == 2 else (None, None)
        if isinstance(step, bool) or not isinstance(step, (int, float)) or not abs(step) <= 2**53:
            lost[name] = lost.get(name, 0) + 1
            continue
        found[int(step)] = finite(value)
    return dict(sorted(found.items()))


def _anatomy(one: object, lost: dict[str, int]) -> Anatomy | None:
    if not isinstance(one, Mapping):
        return None
    columns = [_numbers(one.get(name)) for name in ("edges", "tokens", "removed_low", "removed_high")]
    edges, tokens, low, high = columns
    bins = len(edges) - 1
    fits = bins > 0 and all(len(column) == bins for column in columns[1:]) and list(edges) == sorted(edges)
    if not fits or any(value < 0 for column in columns for value in column):
        lost["clip anatomy"] = lost.get("clip anatomy", 0) + 1
        return None

    of_sign = all(finite(one.get(f"tokens_{name}")) is not None for name in ("positive", "negative"))

    def sign(name: str) -> tuple[float, float] | None:
        removed, whole = (
            finite(one.get(f"removed_{name}")),
            finite(one.get(f"tokens_{name}")) if of_sign else sum(tokens),
        )
        return (removed, whole) if removed is not None and whole is not None and whole >= removed >= 0 else None

    return Anatomy(edges, tokens, low, high, sign("positive"), sign("negative"), of_sign)


def _numbers(values: object) -> tuple[float, ...]:
    found = [finite(value) for value in values] if isinstance(values, (list, tuple)) else []
    return tuple(value for value in found if value is not None) if None not in found else ()


def _summary(one: Mapping[str, Any]) -> Summary:
    names = ("mean", "low", "high", "iqm", "min", "max")
    return Summary(_count(one.get("n")) or 0, *(finite(one.get(name)) for name in names))


def _difference(one: Mapping[str, Any]) -> Difference:
    mean, low, high, p, p_holm, sign_p, improvement = (
        finite(one.get(name)) for name in ("mean", "low", "high", "p", "p_holm", "sign_p", "improvement")
    )
    n, better, worse, same, needed = (_count(one.get(name)) for name in ("n", "better", "worse", "same", "needed"))
    return Difference(
        n=n or 0, mean=mean, low=low, high=high, p=p, p_holm=p_holm, sign_p=sign_p, better=better, worse=worse, same=same,
        improvement=improvement, verdict=words(one.get("verdict")) or None, values=_by_seed(one.get("values")), needed=needed,
        crossed=_crossed(one.get("crossed")),
    )  # fmt: skip


def _by_seed(pairs: object) -> tuple[tuple[str, float], ...]:
    listed = pairs if isinstance(pairs, (list, tuple)) else ()
    found = [(words(pair[0]), finite(pair[1])) for pair in listed if isinstance(pair, (list, tuple)) and len(pair) == 2]
    return tuple((seed, value) for seed, value in found if value is not None)


def _crossed(one: object) -> tuple[float, float] | None:
    low, high = (finite(one.get(side)) if isinstance(one, Mapping) else None for side in ("low", "high"))
    return (low, high) if low is not None and high is not None else None


def _count(value: object) -> int | None:
    known = finite(value)
    return int(known) if known is not None and 0 <= known <= 2**53 else None


def _key(one: Mapping[str, Any]) -> tuple[str, str]:
    return words(one.get("label")), words(one.get("metric"))


def _rows(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, (list, tuple)) else []


def _pairs(value: object) -> Iterator[tuple[str, Any]]:
    return iter([(words(name), one) for name, one in value.items()] if isinstance(value, Mapping) else [])
