"""The engine: reads the pieces of a log, in one process or several, and adds up what the specs would have done."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context

import numpy as np

from klamp.audit import blocks, evidence, verdicts
from klamp.audit.blocks import Plan
from klamp.audit.files import Piece, pieces
from klamp.audit.general import Judged, judged
from klamp.audit.slices import DIMENSIONS
from klamp.audit.sums import Sums
from klamp.audit.tokens import Array, Tokens, checked, join
from klamp.errors import UserError
from klamp.presets import parse
from klamp.spec import Spec

MOST_STEPS = 200_000  # that are told apart
_BUNDLES = 8  # to each process, so that all end at about the same time
_SMALL = 1 << 22  # bytes: a log that one process reads sooner than others start


@dataclass(frozen=True)
class Request:
    """What is asked: the specs by their text, the slices, how to read, and what to do with broken responses."""

    specs: tuple[str, ...]
    by: tuple[str, ...] = ()
    mapping: Mapping[str, str] = field(default_factory=dict)
    skip_bad_rows: bool = False

    def plan(self) -> Plan:
        return Plan(tuple(parse(text) for text in self.specs), self.by)


def collect(files: Sequence[str], request: Request, jobs: int = 1, say: Callable[[str], None] | None = None) -> Sums:
    """The sums over all files. Raises UserError for the first thing that cannot be read, and never gives a part."""
    plan = request.plan()
    whole = any(Spec(spec.guards, spec.factors).asks_step for spec in plan.specs)
    found = pieces(files, request.mapping)
    bundles = _bundles(_whole_steps(found) if whole else [[piece] for piece in found], jobs)
    sums = Sums(len(plan.specs), plan.by)
    done, size = 0, sum(piece.size for piece in found)
    for part, read in _each(bundles, request, whole, jobs if size > _SMALL else 1):
        sums += part
        done += read
        if len(sums.totals) > MOST_STEPS:
            raise UserError(
                f"the log has more than {MOST_STEPS} steps: is its step column an optimizer step? name it with --map step=NAME"
            )
        if say is not None and len(bundles) > 1:
            say(f"read {done / 2**20:,.0f} of {size / 2**20:,.0f} MiB")
    if not sums.total("tokens"):
        raise UserError(
            f"{files[0]}{' and the others hold' if len(files) > 1 else ' holds'} no token that counts: every mask is false"
        )
    return sums


def _each(bundles: list[list[Piece]], request: Request, whole: bool, jobs: int) -> Iterator[tuple[Sums, int]]:
    """The sums of each bundle with its bytes, in any order."""
    if jobs == 1 or len(bundles) == 1:
        for bundle in bundles:
            yield _of_bundle(bundle, request, whole), sum(piece.size for piece in bundle)
        return
    with ProcessPoolExecutor(min(jobs, len(bundles)), get_context("spawn"), _quiet) as pool:
        futures = {pool.submit(_of_bundle, bundle, request, whole): bundle for bundle in bundles}
        try:
            for future in as_completed(futures):
                yield future.result(), sum(piece.size for piece in futures[future])
        except BrokenProcessPool as error:
            raise UserError("a process of the audit was killed, perhaps for want of memory; try --jobs 1") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _quiet() -> None:
    """In a process of the pool: one thread each, and an interruption is the parent's to report."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _bundles(found: list[list[Piece]], jobs: int) -> list[list[Piece]]:
    """Pieces put together to a few equal loads, in order."""
    size = sum(piece.size for group in found for piece in group)
    load = size / max(jobs * _BUNDLES, 1)
    bundles: list[list[Piece]] = [[]]
    full = 0
    for group in found:
        if full >= load and bundles[-1]:
            bundles.append([])
            full = 0
        bundles[-1] += group
        full += sum(piece.size for piece in group)
    return bundles


def _whole_steps(found: list[Piece]) -> list[list[Piece]]:
    """Pieces that share a step together: statistics of a step are of all its responses."""
    owner: dict[int, int] = {}
    parent = list(range(len(found)))

    def root(k: int) -> int:
        while parent[k] != k:
            parent[k] = parent[parent[k]]
            k = parent[k]
        return k

    for k, piece in enumerate(found):
        for step in piece.steps().tolist():
            parent[root(k)] = root(owner.setdefault(step, k))
    groups: dict[int, list[Piece]] = {}
    for k, piece in enumerate(found):
        groups.setdefault(root(k), []).append(piece)
    return list(groups.values())


def _of_bundle(bundle: list[Piece], request: Request, whole: bool) -> Sums:
    plan = request.plan()
    sums = Sums(len(plan.specs), plan.by)
    with np.errstate(all="ignore"):  # what overflows is counted
        for step, tokens in (_whole if whole else _as_they_come)(bundle, plan, request, sums):
            _add_step(sums, plan, step, tokens)
    sums.settle()
    return sums


def _as_they_come(bundle: list[Piece], plan: Plan, request: Request, sums: Sums) -> Iterator[tuple[int, Tokens]]:
    for piece in bundle:
        for part in _read(piece, plan, request, sums):
            yield from part.runs()


def _whole(bundle: list[Piece], plan: Plan, request: Request, sums: Sums) -> Iterator[tuple[int, Tokens]]:
    """Each step once, with all its responses, as soon as the last piece that holds some of them is read."""
    held: dict[int, list[Tokens]] = {}
    left = Counter(step for piece in bundle for step in piece.steps().tolist())
    for piece in bundle:
        for part in _read(piece, plan, request, sums):
            for step, tokens in part.runs():
                held.setdefault(step, []).append(tokens)
        for step in piece.steps().tolist():
            left[step] -= 1
            if not left[step] and step in held:
                yield step, join(held.pop(step))


def _read(piece: Piece, plan: Plan, request: Request, sums: Sums) -> Iterator[Tokens]:
    """The responses of a piece, checked, as the specs need them, with their evidence taken."""
    needs = frozenset().union(*(Spec(spec.guards, spec.factors).needs for spec in plan.specs), *map(_needs, plan.by))
    wanted = frozenset({"group", "prompt_id", "reward", "length", "logp_rollout", "entropy", "token_ids"}) | needs
    sums.kinds[piece.naming.kind] = None
    sums.notes |= dict.fromkeys(piece.naming.notes)
    for part in piece.read(wanted):
        tokens, skipped = checked(part, request.skip_bad_rows)
        sums.facts["skipped"] += skipped
        evidence.gather(sums.facts, tokens)
        for spec in plan.specs:
            verdicts.check(spec, tokens.offers, tokens.origin)
        for name in plan.by:
            lacking = _needs(name) - tokens.offers - ({"token_ids"} if tokens.token_ids is not None else set())
            if lacking:
                raise UserError(f"--by {name} needs {', '.join(lacking)}, which {tokens.origin} does not have")
        if "logp_rollout" in needs and tokens.missing is not None and tokens.missing.any():
            sums.facts["excluded"] += int(tokens.missing.sum())
            tokens = tokens.take(np.flatnonzero(~tokens.missing))
        yield tokens


def _needs(by: str) -> frozenset[str]:
    if by == "token":
        return frozenset({"token_ids"})
    needs = DIMENSIONS[by].needs if by in DIMENSIONS else None
    return frozenset() if needs is None else frozenset({needs})


def _add_step(sums: Sums, plan: Plan, step: int, tokens: Tokens) -> None:
    """Add responses of one step: the verdicts that need torch on all of them, then block by block."""
    general = {k: judged(spec, tokens, step) for k, spec in enumerate(plan.specs) if not plan.plain[k]}
    start = 0
    for block in tokens.blocks(blocks.TOKENS):
        stop = start + int(np.count_nonzero(block.mask))
        blocks.add(sums, plan, block, step, {k: _cut(one, slice(start, stop)) for k, one in general.items()})
        start = stop


def _cut(one: Judged, part: slice) -> Judged:
    whole = part.start == 0
    where: Array = part  # type: ignore[assignment]
    return Judged(one.verdict.at(where), one.g[part], one.u[part], one.overflows if whole else 0)
