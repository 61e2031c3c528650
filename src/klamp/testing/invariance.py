"""The laws of invariance: what must not change a loss, a gradient or a metric (2, 4, 5, 11, 12)."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from klamp.batch import Batch
from klamp.errors import UserError
from klamp.language import PRESETS, parse
from klamp.objective import Objective, State
from klamp.spec import Spec
from klamp.stats import Stats
from klamp.tally import Tally
from klamp.testing.court import Trial, law
from klamp.testing.draws import Draw, Outcome, packed, padded, poisoned, renamed
from klamp.testing.live import LiveBatch
from klamp.testing.written import shares, written

POISONS = [[math.nan], [math.inf, -math.inf], [1e10, -1e10]]
_PER_TOKEN = ("per_token", "grad_policy", "grad_penalty", "inside", "kept")
ROUNDING = 1e-12
T = TypeVar("T", Stats, Tally)
Restore = Callable[[Tensor], Tensor]  # from a layout back to [B, T] of the first


@law(2, "NaN, inf, +-1e10 in masked positions change no bit of loss, gradient or metric")
def _masked(trial: Trial) -> int | str:
    count = 0
    for draw, generator in trial.draws():
        if bool(draw.mask.all()):
            continue
        for dtype, poisons in ((torch.float64, POISONS), (torch.float32, [list(itertools.chain(*POISONS))])):
            clean = draw.cast(dtype)
            before = trial.outcome(clean)
            for values in poisons:
                dirty = poisoned(clean, values, generator)
                _same_outcome(trial, dirty, before, trial.outcome(dirty))
                count += 1
    return count


def _same_outcome(trial: Trial, where: Draw, before: Outcome, after: Outcome) -> None:
    for name in _PER_TOKEN:
        trial.same(name, where, getattr(before.out, name), getattr(after.out, name))
    trial.same("loss", where, before.out.loss.detach(), after.out.loss.detach())
    for one, other in zip(before.grads, after.grads, strict=True):
        trial.same("gradient of the loss", where, one, other)
    trial.same_metrics(where, before.out.metrics, after.out.metrics)


# --- law 4 ----------------------------------------------------------------------------------------------------


@law(
    4, "any cut into micro-batches, ranks and windows gives the same loss, gradient and metrics",
    local_mean="the loss and its gradient follow the cut: the mean of each micro-batch's own mean",
)  # fmt: skip
def _cuts(trial: Trial) -> int | str:
    count, objective = 0, trial.objective
    for number, (draw, generator) in enumerate(trial.draws()):
        rows = draw.shape[0]
        state = trial.start | ({"step": float(number)} if "step" in trial.start else {})
        _stats_read(trial, objective, draw, generator, state)
        if rows < 2:
            continue
        whole = trial.outcome(draw, objective, None, state)
        for ranks, parts in _cuttings(rows, generator):
            where = draw.having(f"rows cut into {[part.tolist() for part in parts]}, {ranks} ranks", {})
            micro = [draw.rows(part) for part in parts]
            stats = [objective.stats(one.build(Batch), state) for one in micro]
            shared = [_total(stats)]
            if ranks > 1:  # micro-batch i is on rank i modulo ranks
                shared = _reduce(
                    [_total(stats[i::ranks]) for i in range(min(ranks, len(stats)))],
                    Stats.all_reduce,
                    trial,
                    gathers=True,
                )
            pieces = [trial.outcome(one, objective, shared[i % len(shared)], state) for i, one in enumerate(micro)]
            if "local_mean" not in trial.spec.traits:
                _same_loss(trial, where, whole, pieces, parts)
            elif trial.spec.mean.kind == "local_token_mean":
                _local_means(trial, where, pieces, parts, micro, written(trial.spec, draw, state).dropped)
            _same_step(trial, where, whole, pieces, parts, ranks, state)
            count += 1
    return count


def _stats_read(trial: Trial, objective: Objective, draw: Draw, generator: torch.Generator, state: State) -> None:
    """``Objective.stats`` reads no field beyond ``spec.step_needs``, and the new policy only where it says so."""
    spare = trial.spec.needs - trial.spec.step_needs - {"row"}
    plain = {name: value for name, value in draw.fields.items() if name not in spare}
    if not trial.spec.reads_new:
        noise = torch.rand(draw.shape, generator=generator, dtype=torch.float64)
        plain["logp_new"] = draw["logp_new"] - noise
    less = Draw(f"{draw.label}, without what spec.step_needs and spec.reads_new leave out", plain)
    try:
        one, other = objective.stats(draw.build(Batch), state), objective.stats(less.build(Batch), state)
    except UserError as error:
        raise trial.violation(f"refused: {error}", less) from error
    trial.same("counts of the step", less, one.counts, other.counts)
    for name, sample in one.samples.items():
        trial.same(f"samples of {name}", less, sample, other.samples[name])


def _cuttings(rows: int, generator: torch.Generator) -> Iterator[tuple[int, list[Tensor]]]:
    """(ranks, rows of each micro-batch): random sizes on one or more ranks, and even cuts into 2, 4 and 8."""
    for ranks in (1, 2, 3) if rows > 4 else (1, 2):
        yield ranks, _cut(rows, generator)
    for many in (2, 4, 8) if rows >= 8 else ():
        yield 1, list(torch.randperm(rows, generator=generator).tensor_split(many))


def _cut(rows: int, generator: torch.Generator) -> list[Tensor]:
    """The rows in random order, in micro-batches of random sizes."""
    order = torch.randperm(rows, generator=generator)
    ends = torch.rand(rows - 1, generator=generator) < 0.3
    ends[torch.randint(0, rows - 1, (), generator=generator)] = True
    points = [0, *(ends.nonzero().reshape(-1) + 1).tolist(), rows]
    return [order[a:b] for a, b in itertools.pairwise(points)]


def _same_loss(trial: Trial, where: Draw, whole: Outcome, pieces: list[Outcome], parts: list[Tensor]) -> None:
    order = torch.cat(parts).argsort()
    scale = 1.0 + float(whole.out.per_token.abs().amax())
    loss = torch.stack([piece.out.loss.detach() for piece in pieces]).sum()
    trial.close("loss", where, whole.out.loss, loss, ROUNDING, ROUNDING * scale)
    for index, expected in enumerate(whole.grads):
        got = torch.cat([piece.grads[index] for piece in pieces])[order]
        distance, norm = float((got - expected).norm()), float(expected.norm())
        trial.holds(
            "relative L2 distance of the gradients", where, distance <= ROUNDING * norm,
            f"<= {ROUNDING}", distance / norm if norm else distance,
        )  # fmt: skip


def _local_means(trial: Trial, where: Draw, pieces: list[Outcome], parts: list[Tensor], micro: list[Draw],
                 dropped: Tensor) -> None:  # fmt: skip
    """Each micro-batch adds its own token mean over the number of micro-batches."""
    plain = "moves_unsampled" not in trial.spec.traits
    for piece, part, one in zip(pieces, parts, micro, strict=True):
        share = shares(trial.spec.mean, one.build(LiveBatch), one.mask & ~dropped[part]) / len(pieces)
        expected, scale = (piece.out.per_token * share).sum(), 1.0 + float(piece.out.per_token.abs().amax())
        trial.close("loss of a micro-batch", where, expected, piece.out.loss, ROUNDING, ROUNDING * scale)
        slope = (piece.out.grad_penalty - piece.out.grad_policy) * share
        if plain:
            trial.close("gradient of a micro-batch", where, slope, piece.grads[0], ROUNDING, 1e-15)


def _same_step(
    trial: Trial, where: Draw, whole: Outcome, pieces: list[Outcome], parts: list[Tensor], ranks: int, state: State
) -> None:
    order, scale = torch.cat(parts).argsort(), 1.0 + float(whole.out.per_token.abs().amax())
    for name in _PER_TOKEN:
        got = torch.cat([getattr(piece.out, name) for piece in pieces])[order]
        trial.close(name, where, getattr(whole.out, name), got, ROUNDING, ROUNDING * scale)
    tallies = [piece.out.metrics for piece in pieces]
    if ranks == 1:
        total = _total(tallies)
    else:
        own = [_total(tallies[i::ranks]) for i in range(min(ranks, len(tallies)))]
        total = _reduce(own, Tally.all_reduce, trial)[-1]
    trial.same_metrics(where, whole.out.metrics, total, rtol=ROUNDING * (1.0 + whole.out.per_token.numel()))
    objective = trial.objective
    stats = objective.stats(where.build(Batch), state)
    one, other = objective.update(state, stats, whole.out.metrics), objective.update(state, stats, total)
    close = one.keys() == other.keys() and all(math.isclose(one[key], other[key], rel_tol=ROUNDING) for key in one)
    trial.holds("state after the step", where, close, one, other)


def _total(items: list[T]) -> T:
    total = sum(items)
    assert not isinstance(total, int)
    return total


_JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(dim=0),
    "max": lambda stacked: stacked.amax(dim=0),
    "gather": lambda stacked: stacked.flatten(0, 1),
}


class _Waiting(Exception):
    """A rank waits for the others in a collective."""


def _reduce(own: list[T], all_reduce: Callable[..., T], trial: Trial, *, gathers: bool = False) -> list[T]:
    """``all_reduce`` on simulated ranks, replayed collective by collective; ranks that disagree would hang."""
    done: list[Tensor] = []
    while True:
        asked: list[tuple[str, Tensor]] = []
        results = [_replay(one, all_reduce, done, asked, gathers) for one in own]
        if not asked:
            return [result for result in results if result is not None]
        kinds = {(kind, tuple(value.shape), value.dtype) for kind, value in asked}
        trial.holds("collectives of the ranks", f"collective {len(done)}", len(asked) == len(own) and len(kinds) == 1,
                    "one kind, shape and dtype on every rank", sorted(map(str, kinds)))  # fmt: skip
        stacked = torch.stack([value for _, value in asked])
        done.append(_JOINED[asked[0][0]](stacked))


def _replay(one: T, all_reduce: Callable[..., T], done: list[Tensor], asked: list[tuple[str, Tensor]],
            gathers: bool) -> T | None:  # fmt: skip
    calls = 0

    def collective(kind: str) -> Callable[[Tensor], Tensor]:
        def reduce(value: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls <= len(done):
                return done[calls - 1]
            asked.append((kind, value))
            raise _Waiting

        return reduce

    try:
        kinds = ("sum", "max", "gather") if gathers else ("sum", "max")
        return all_reduce(one, *map(collective, kinds))
    except _Waiting:
        return None


# --- law 5 ----------------------------------------------------------------------------------------------------


@law(5, "padding side and width, packing, row order and group order do not matter")
def _layout(trial: Trial) -> int | str:
    count = 0
    for draw, generator in trial.draws():
        rows, columns = draw.shape
        before = trial.outcome(draw)
        order = torch.randperm(rows, generator=generator)
        layouts: list[tuple[Draw, Restore]] = [
            (padded(draw, 0, 3, generator), _columns(0, columns)),
            (padded(draw, 3, 0, generator), _columns(3, columns)),
            (padded(draw, 5, 40, generator), _columns(5, columns)),
            (draw.rows(order, "rows in another order"), partial(_rows, order=order)),
        ]
        fixed = trial.spec.needs & {"row"}  # a lottery is drawn by the ids of responses
        ids = [name for name in ("group", "row", "segment") if name in draw.fields and name not in fixed]
        if ids:
            layouts.append((renamed(draw, ids), _columns(0, columns)))
        packs = rows % 2 == 0 and not draw.packed and "counts_empty_rows" not in trial.spec.traits
        if packs and "reward" not in draw.fields:
            layouts.append((packed(draw), partial(torch.reshape, shape=draw.shape)))
        for other, restore in layouts:
            _same_layout(trial, other, before, trial.outcome(other), restore)
            count += 1
    return count


def _columns(start: int, count: int) -> Restore:
    return lambda value: value[:, start : start + count]


def _rows(value: Tensor, order: Tensor) -> Tensor:
    return value[order.argsort()]


def _same_layout(trial: Trial, where: Draw, before: Outcome, after: Outcome, restore: Restore) -> None:
    scale = ROUNDING * (1.0 + float(before.out.per_token.abs().amax()))
    for name in _PER_TOKEN:
        trial.close(name, where, getattr(before.out, name), restore(getattr(after.out, name)), ROUNDING, scale)
    trial.close("loss", where, before.out.loss, after.out.loss, ROUNDING, scale)
    for one, other in zip(before.grads, after.grads, strict=True):
        trial.close("gradient of the loss", where, one, restore(other), ROUNDING)
    trial.same_metrics(where, before.out.metrics, after.out.metrics, rtol=ROUNDING * (1.0 + before.out.kept.numel()))


# --- laws 11 and 12 -------------------------------------------------------------------------------------------


@law(11, "no silent repair: a row without rollout log-probs is excluded and counted")
def _missing(trial: Trial) -> int | str:
    if "logp_rollout" not in trial.spec.needs:
        return "the spec reads no rollout log-probs"
    count = 0
    for draw, _ in trial.draws():
        gone = torch.zeros_like(draw.mask)
        gone[0] = draw.mask[0] & (draw.mask[0].cumsum(0) == 1)  # the first token of the first row
        rollout = draw["logp_rollout"].masked_fill(gone, math.nan)
        missing = draw.having("one log-prob missing", {"logp_rollout": rollout})
        live = int(gone.sum())
        dropped = _response(draw) & bool(live)
        expected = trial.outcome(draw.having("without it", {"mask": draw.mask & ~dropped}))
        found = trial.outcome(missing)
        for name in _PER_TOKEN:
            trial.same(name, missing, getattr(expected.out, name), getattr(found.out, name))
        trial.same("loss", missing, expected.out.loss.detach(), found.out.loss.detach())
        got = int(found.out.metrics.sums.get("batch/missing_rows_count", torch.tensor(-1)))
        trial.holds("metric batch/missing_rows_count", missing, got == live, live, got)
        count += 1
    return count


def _response(draw: Draw) -> Tensor:
    """The positions of the response that the first unmasked token of row 0 belongs to."""
    found = torch.zeros_like(draw.mask)
    first = int(draw.mask[0].int().argmax())
    found[0] = draw["row"][0] == draw["row"][0, first] if draw.packed else True
    return found


@law(12, "spec -> text -> spec is the identity; presets have a citation and an equation")
def _text(trial: Trial) -> int | str:
    spec, name = trial.original, str(trial.original)
    plain = trial.spec if spec.aggregate is not None else spec
    readings: list[tuple[str, Callable[[], Spec], Spec]] = [
        ("parse(str(spec))", lambda: parse(name), spec),
        ("the spec from its parts' text", lambda: parse(str(_unnamed(plain))), plain),
        ("Spec.from_dict(spec.to_dict())", lambda: Spec.from_dict(_through_json(spec)), spec),
    ]
    for what, read, expected in readings:
        try:
            found = read()
        except (UserError, TypeError, ValueError, KeyError) as error:
            raise trial.violation(f"{what} fails: {error}", "text") from error
        trial.holds(what, "text", found == expected, str(expected), str(found))
        trial.holds(f"hash of {what}", "text", hash(found) == hash(expected), hash(expected), hash(found))
        trial.holds(
            f"needs of {what}", "text", found.needs == expected.needs, sorted(expected.needs), sorted(found.needs)
        )
        trial.holds(f"{what}, read again", "text", parse(str(found)) == expected, str(expected), str(found))
    for used in sorted({word for word in PRESETS if f"{word}(" in name}):
        entry = PRESETS[used]
        trial.holds(f"citation and equation of {used}", "text", bool(entry.citation and entry.equation))
    return len(readings)


def _unnamed(spec: Spec) -> Spec:
    return Spec(spec.guards, spec.factors, spec.penalties, spec.aggregate)


def _through_json(spec: Spec) -> dict[str, object]:
    found: dict[str, object] = json.loads(json.dumps(spec.to_dict(), allow_nan=False))
    return found
