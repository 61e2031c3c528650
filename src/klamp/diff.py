"""Two specs side by side: in which parts they differ, and which tokens of a batch they treat differently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klamp.advantages import group_advantages
from klamp.batch import Batch, segments
from klamp.binary import binary_divergence
from klamp.conditions import WHOLE
from klamp.errors import UserError
from klamp.explain import inside
from klamp.guards import Guard
from klamp.objective import LossOutput, Objective
from klamp.records import read_records
from klamp.spec import Spec, part_text, value_text

_TOLERANCE = 1e-6  # relative to the larger |g|: float32 log-probs carry about 1e-7
_SLOTS = {"guards": "guard", "factors": "factor", "penalties": "penalty"}


def diff(one: Spec, other: Spec, steps: Sequence[Batch] | None = None, seed: int = 0) -> dict[str, Any]:
    """How two specs differ: ``parts`` by slot, ``tokens`` by count and share on batches; JSON-ready.

    ``steps``: one batch per optimizer step, log-probs [B, T] in nats; the standard synthetic batch of ``seed`` unless
    given. Raises UserError where a batch lacks what one of the specs needs.
    """
    found = [standard_batch(seed)] if steps is None else list(steps)
    return {
        "a": str(one),
        "b": str(other),
        "equal": one == other,
        "parts": parts(one, other),
        "batch": {
            "kind": "standard" if steps is None else "given",
            "seed": seed if steps is None else None,
            "steps": len(found),
            "responses": sum(int(batch.sequence_count()[0]) for batch in found),
            "tokens": sum(int(batch.mask.sum()) for batch in found),
        },
        "tokens": tokens(one, other, found),
    }


# --- parts ----------------------------------------------------------------------------------------------------


def parts(one: Spec, other: Spec) -> list[dict[str, Any]]:
    """Differing parts: {slot, a, b, differs}; ``differs`` names the arguments where two parts are a pair."""
    found = []
    for slot in _SLOTS:
        mine, theirs = list(getattr(one, slot)), list(getattr(other, slot))
        both = [part for part in mine if part in theirs]
        for a, b in _pairs([p for p in mine if p not in both], [p for p in theirs if p not in both]):
            found.append(_difference(_SLOTS[slot], a, b))
    if one.mean != other.mean:
        found.append(_difference("aggregate", one.mean, other.mean))
    return found


def _pairs(mine: list[Any], theirs: list[Any]) -> list[tuple[Any, Any]]:
    """Parts of one type paired, those that share most arguments first; None beside a part that stands alone."""
    alike = [
        (len(_arguments(a, b)), i, j) for i, a in enumerate(mine) for j, b in enumerate(theirs) if type(a) is type(b)
    ]
    pairs: dict[int, int] = {}
    for _, i, j in sorted(alike):
        if i not in pairs and j not in pairs.values():
            pairs[i] = j
    alone = [(None, b) for j, b in enumerate(theirs) if j not in pairs.values()]
    return [(a, theirs[pairs[i]] if i in pairs else None) for i, a in enumerate(mine)] + alone


def _difference(slot: str, a: Any, b: Any) -> dict[str, Any]:
    paired = a is not None and b is not None
    return {"slot": slot, "a": None if a is None else part_text(a), "b": None if b is None else part_text(b),
            "differs": _arguments(a, b) if paired else {}}  # fmt: skip


def _arguments(a: Any, b: Any) -> dict[str, list[str]]:
    """argument -> [value in a, value in b], of two parts of one type."""
    found = {item.name: [_shown(a, item.name), _shown(b, item.name)] for item in fields(a) if item.name != "cut_value"}
    if isinstance(a, Guard):
        found["inside"] = [inside(a), inside(b)]
        found.pop("region")
        found["cut_value"] = [str(a.cut_value), str(b.cut_value)]
    return {name: values for name, values in found.items() if values[0] != values[1]}


def _shown(part: Any, name: str) -> str:
    return value_text(getattr(part, name)).strip("'") if name != "region" else ""


# --- tokens ---------------------------------------------------------------------------------------------------


def tokens(one: Spec, other: Spec, steps: Sequence[Batch]) -> dict[str, Any]:
    """Counts of tokens that the two treat differently, and how their gradients compare.

    ``cut_*``: tokens with A != 0 whose policy gradient a guard removes. ``g_differs``: the policy gradients of a token
    before averaging differ by more than 1e-6 of the larger; ``penalty_differs``: so do the penalties' slopes.
    ``norm_ratio`` = |grad b| / |grad a| and ``cosine`` are of d loss / d log pi_new, with penalties and means.
    """
    counts = dict.fromkeys(("cut_by_a_only", "cut_by_b_only", "cut_by_both", "g_differs", "penalty_differs"), 0)
    total, aa, bb, ab = 0, 0.0, 0.0, 0.0
    for batch in steps:
        a, grad_a = _evaluated(one, batch)
        b, grad_b = _evaluated(other, batch)
        live = batch.mask & (batch.advantages != 0)
        cut_a, cut_b = live & ~a.kept, live & ~b.kept
        masks = (cut_a & ~cut_b, cut_b & ~cut_a, cut_a & cut_b, _far(a.grad_policy, b.grad_policy) & batch.mask,
                 _far(a.grad_penalty, b.grad_penalty) & batch.mask)  # fmt: skip
        for name, mask in zip(counts, masks, strict=True):
            counts[name] += int(mask.sum())
        total += int(batch.mask.sum())
        aa, bb, ab = (
            sum_ + float((x * y).sum())
            for sum_, x, y in ((aa, grad_a, grad_a), (bb, grad_b, grad_b), (ab, grad_a, grad_b))
        )
    size = math.sqrt(aa) * math.sqrt(bb)
    return {
        "counts": counts,
        "shares": {name: count / max(total, 1) for name, count in counts.items()},
        "norm_ratio": math.sqrt(bb / aa) if aa > 0.0 else None,
        "cosine": max(min(ab / size, 1.0), -1.0) if size > 0.0 else None,
    }


def _far(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() > _TOLERANCE * torch.maximum(a.abs(), b.abs())


def _evaluated(spec: Spec, batch: Batch) -> tuple[LossOutput, Tensor]:
    """The loss of a spec on a whole step, and d loss / d log pi_new, float64."""
    leaf = batch.logp_new.detach().clone().requires_grad_()
    mine = copy(batch)
    mine.logp_new = leaf
    out = Objective(spec, diagnostics=False)(mine)
    (gradient,) = torch.autograd.grad(out.loss, leaf, materialize_grads=True)
    return out, gradient.double()


# --- batches --------------------------------------------------------------------------------------------------


def standard_batch(seed: int = 0) -> Batch:
    """A synthetic step of 64 responses of up to 128 tokens, 8 to a prompt, with every field that a spec may need.

    Surprisals are 0.4 E^2 nats, E exponential (median probability 0.83); the new policy moves the token's log-odds by
    0.3 times a Student t with 4 degrees of freedom, the rollout policy by 0.05, the reference by 1. Rewards are 0
    or 1, advantages normalised by prompt. Divergences over the vocabulary are the binary ones, times 1 to 2.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"seed={seed!r} must be a whole number, 0 or above")
    rows, columns = 64, 128
    random = np.random.default_rng(seed)
    surprise = 0.4 * random.exponential(size=(rows, columns)) ** 2
    old = torch.from_numpy(np.minimum(-surprise, -1e-6))

    def moved(scale: float) -> Tensor:
        odds = old - torch.log(-torch.expm1(old)) + scale * torch.from_numpy(random.standard_t(4, (rows, columns)))
        return torch.nn.functional.logsigmoid(odds)

    new, rollout, ref = moved(0.3), moved(0.05), moved(1.0)
    group = torch.arange(rows) // 8
    reward = torch.from_numpy(random.integers(0, 2, rows).astype(np.float64))
    length = torch.from_numpy(random.integers(16, columns + 1, (rows, 1)))
    wide = 1.0 + torch.from_numpy(random.random((rows, columns)))
    near = {
        kind: binary_divergence(f"binary_{kind}", new - old, old) * wide for kind in ("tv", "kl_old_new", "kl_new_old")
    }
    scales = {"js": 0.25, "hellinger2": 0.5, "chi2_new_old": 2.0, "chi2_old_new": 2.0}  # to second order
    near |= {kind: scale * near["kl_old_new"] for kind, scale in scales.items()}
    return Batch(
        new, old, group_advantages(reward, group).values, torch.arange(columns) < length,
        logp_rollout=rollout, logp_ref=ref, entropy=torch.from_numpy(surprise) * wide,
        divergences={name: near[name.partition("_")[2]] for name in WHOLE}, group=group, row=torch.arange(rows),
        segment=(torch.arange(columns) // 32).expand(rows, columns), reward=reward,
    )  # fmt: skip


def recorded_steps(path: str | Path) -> list[Batch]:
    """The steps of a run's token records, in order; see docs/records.md. Raises UserError for what is no record."""
    table = read_records(path)
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        rows.setdefault(row["step"], []).append(row)
    return [_recorded(step, found) for step, found in sorted(rows.items())]


def _recorded(step: int, rows: list[dict[str, Any]]) -> Batch:
    if any(row["logp_new"] is None for row in rows):
        raise UserError(f"the records of step {step} hold no logp_new: nothing says where the new policy stood")
    for row in rows:
        row["logp_old"] = row["logp_new"] if row["logp_old"] is None else row["logp_old"]
    have = {name: [row[name] is not None for row in rows] for name in ("logp_rollout", "logp_ref", "entropy")}
    mask = _padded(rows, "mask") == 1.0
    group = torch.unique(torch.tensor([row["group"] for row in rows]), return_inverse=True)[1]  # type: ignore[no-untyped-call]
    return Batch(
        _padded(rows, "logp_new"), _padded(rows, "logp_old"), _padded(rows, "advantage"), mask,
        logp_rollout=_padded(rows, "logp_rollout") if any(have["logp_rollout"]) else None,  # a missing row is excluded
        logp_ref=_padded(rows, "logp_ref") if all(have["logp_ref"]) else None,
        entropy=_padded(rows, "entropy") if all(have["entropy"]) else None,
        group=group, row=torch.tensor([row["row"] for row in rows]), segment=segments(mask),
    )  # fmt: skip


def _padded(rows: list[dict[str, Any]], name: str) -> Tensor:
    """One column, [B, T] float64; NaN where there is nothing."""
    found = torch.full((len(rows), max(len(row["token_ids"]) for row in rows)), math.nan, dtype=torch.float64)
    for line, row in zip(found, rows, strict=True):
        if row[name] is not None:
            line[: len(row[name])] = torch.tensor(row[name], dtype=torch.float64)
    return found


# --- text -----------------------------------------------------------------------------------------------------


def text(found: dict[str, Any]) -> str:
    """The difference for a reader at a terminal."""
    lines = [f"A  {found['a']}", f"B  {found['b']}", ""]
    if not found["parts"]:
        lines.append("  the same parts" if found["equal"] else "  the same parts, written differently")
    for part in found["parts"]:
        lines.append(f"  {part['slot']:10} A {part['a'] or '-'}")
        lines.append(f"  {'':10} B {part['b'] or '-'}")
        lines += [f"  {'':12} {name}: {a}  |  {b}" for name, (a, b) in part["differs"].items()]
    batch, tokens_ = found["batch"], found["tokens"]
    kind = (
        f"the standard batch (seed {batch['seed']})"
        if batch["kind"] == "standard"
        else f"{batch['steps']} recorded steps"
    )
    lines += ["", f"  on {kind}: {batch['tokens']} tokens of {batch['responses']} responses"]
    for name, count in tokens_["counts"].items():
        lines.append(f"  {_WORDS[name]:44} {count:>9}  {100.0 * tokens_['shares'][name]:8.4f} %")
    for name, value in (
        ("|gradient of B| / |gradient of A|", tokens_["norm_ratio"]),
        ("cosine of the gradients", tokens_["cosine"]),
    ):
        lines.append(f"  {name:44} {'-' if value is None else f'{value:9.6f}'}")
    return "\n".join(lines)


_WORDS = {
    "cut_by_a_only": "cut by A alone",
    "cut_by_b_only": "cut by B alone",
    "cut_by_both": "cut by both",
    "g_differs": "policy gradient differs (before averaging)",
    "penalty_differs": "penalty differs",
}
