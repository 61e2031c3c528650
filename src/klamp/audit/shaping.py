"""From columns to tokens: one type to each column, one length to each response, and what stands for what is missing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from klamp.audit.names import Naming
from klamp.audit.tokens import Array, Tokens, some
from klamp.errors import UserError
from klamp.records.recorder import UNKNOWN_TOKEN

Column = tuple[Array | None, Array | None, Array | None]  # values, lengths of lists, which rows are null
_FLOATS = ("logp_new", "logp_old", "logp_rollout", "logp_ref", "advantage", "entropy")


def shaped(columns: Mapping[str, Column], rows: int, origin: str, first: int, names: Naming) -> Tokens:
    """Tokens from the columns of a part of a file, by our names.

    Raises UserError where lists differ in length, where a policy is missing for some responses only, and for values of no use.
    """
    lengths = _lengths(columns, origin, first)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = {
        name: _per_token(name, columns[name], lengths, origin, first)
        for name in (*_FLOATS, "token_ids", "mask")
        if name in columns
    }
    numbers = {
        name: _per_row(name, columns[name], origin, first)
        for name in ("step", "group", "row", "reward", "length")
        if name in columns
    }
    new, old, rollout = (values.get(f"logp_{role}") for role in ("new", "old", "rollout"))
    missing = np.isnan(rollout) if rollout is not None else None
    if new is None and names.kind == "klamp":
        raise UserError(f"{origin} holds no logp_new (it was not computed): nothing says where the new policy stood")
    # Of records of ours a null old policy is the new one; of another log the sampler stands for it.
    stand_in = new if names.kind == "klamp" or rollout is None else rollout
    old = stand_in if old is None else _filled(old, columns["logp_old"], new, offsets)
    new = old if new is None else new
    if new is None or old is None:
        raise UserError(f"{origin} holds log-probs of one policy only from response {first} on; an audit needs two")
    mask = values.get("mask")
    mask = np.ones(offsets[-1], bool) if mask is None else mask
    advantage = values.get("advantage")
    if advantage is None:
        raise UserError(
            f"{origin} holds no advantage from response {first} on: nothing says which way a token was pushed"
        )
    group = numbers.get("group")
    if group is None and "prompt_id" in columns and names.kind != "klamp":
        group = _per_row("prompt_id", columns["prompt_id"], origin, first)
    step, row = numbers.get("step"), numbers.get("row")
    step = np.zeros(rows, np.int64) if step is None else step
    row = np.arange(first, first + rows) if row is None else row
    return Tokens(
        offsets, step, row, new, old, advantage, mask,
        group=group, reward=numbers.get("reward"), length=numbers.get("length"), logp_rollout=rollout,
        logp_ref=values.get("logp_ref"), entropy=values.get("entropy"), token_ids=values.get("token_ids"),
        missing=None if missing is None else some(missing & mask, offsets), origin=origin, first=first,
    )  # fmt: skip


def _lengths(columns: Mapping[str, Column], origin: str, first: int) -> Array:
    """Tokens of each response; every list of a response has the same length."""
    found: Array | None = None
    name = ""
    for other, (_, lengths, null) in columns.items():
        if lengths is None:
            continue
        if found is None:
            if null is None:
                found, name = lengths, other
            continue
        differs = (lengths != found) if null is None else (lengths != found) & ~null
        if differs.any():
            at = int(np.flatnonzero(differs)[0])
            raise UserError(
                f"{origin}: response {first + at} has {found[at]} {name} and {lengths[at]} {other}; every list has one entry to each token"
            )
    if found is None:
        raise UserError(f"{origin}: no list with a number to each token is complete; needed logp_new and logp_old")
    return found


def _per_token(name: str, column: Column, lengths: Array, origin: str, first: int) -> Array | None:
    values, own, null = column
    if values is None:
        return None
    if own is None:  # one number for the whole response
        if name != "advantage" and name != "mask":
            raise UserError(f"{origin}: {name} is one number to a response; needed one to each token")
        values = np.repeat(values, lengths)
    elif null is not None and null.any():
        if name in ("mask", "advantage", "token_ids"):
            raise UserError(f"{origin}: response {first + int(np.flatnonzero(null)[0])} has no {name}")
        full = np.full(int(lengths.sum()), np.nan, np.float32)
        full[np.repeat(~null, lengths)] = values
        values = full
    if name == "mask":
        if values.dtype == bool:
            return values
        if not np.isin(values, (0, 1)).all():
            raise UserError(f"{origin}: mask holds other values than true and false, 1 and 0")
        return values.astype(bool)
    if name == "token_ids":
        if values.size and (values == UNKNOWN_TOKEN).all():
            return None
        if values.size and not (np.isfinite(values).all() and values.min() >= 0 and values.max() < 2**31):
            raise UserError(f"{origin}: token_ids are whole numbers from 0 to 2^31 - 1; found others")
        return values.astype(np.int32, copy=False)
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)


def _filled(old: Array, column: Column, new: Array | None, offsets: Array) -> Array:
    """The old policy's log-probs; where a response has none it is the new policy."""
    null = column[2]
    if null is None or new is None:
        return old
    return np.where(np.repeat(null, np.diff(offsets)), new, old)


def _per_row(name: str, column: Column, origin: str, first: int) -> Array | None:
    values, lengths, null = column
    if values is None:
        return None
    if lengths is not None and name != "reward":
        raise UserError(f"{origin}: {name} is a list; needed one number to a response")
    if lengths is not None:  # prime-rl repeats the reward on every token
        starts = np.cumsum(lengths) - lengths
        values = np.where(lengths > 0, np.append(values, np.nan)[np.minimum(starts, len(values))], np.nan)
    if name == "reward":
        return values.astype(np.float32)
    whole = (
        values.dtype.kind != "f" or (np.isfinite(values) & (values == np.round(values)) & (abs(values) <= 2**53)).all()
    )
    if not whole or (null is not None and name in ("step", "row")):
        raise UserError(f"{origin}: {name} is not a whole number in every response from {first} on")
    if name == "step" and values.size and values.min() < 0:
        raise UserError(f"{origin}: step is below 0")
    return values.astype(np.int64)
