"""What others call the columns of a token log: shapes that are known by their names, and a mapping of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from klamp.errors import UserError, did_you_mean
from klamp.records import RECORD_SCHEMA

# Ours, with what a log may add: the length of each response as it counted it, and a turn's text is never read.
COLUMNS: tuple[str, ...] = (*(c.name for c in RECORD_SCHEMA if c.name not in ("kept", "g", "micro_step")), "length")
PER_TOKEN = frozenset(c.name for c in RECORD_SCHEMA if c.per_token)
NUMBERS = tuple(name for name in COLUMNS if name != "prompt_id")
_SHOWN = 12  # names in a message


@dataclass(frozen=True)
class Shape:
    """A kind of log: ``names`` ours -> theirs, the first that is there; ``notes`` on what differs from our records."""

    name: str
    tells: tuple[str, ...]  # columns of which one must be there
    names: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()


_COMMON: dict[str, tuple[str, ...]] = {
    "step": ("step", "global_step", "global_steps", "training_step"),
    "row": ("row",),
    "group": ("group", "group_id", "uid"),
    "prompt_id": ("prompt_id", "prompt", "input", "uid"),
    "reward": ("reward", "rewards", "score", "scores"),
    "advantage": ("advantage", "advantages"),
    "mask": ("mask", "loss_mask", "completion_mask", "response_mask", "action_mask"),
    "token_ids": ("token_ids", "completion_ids", "response_ids", "responses", "output_ids"),
    "entropy": ("entropy", "entropies", "entropys"),
    "logp_new": ("logp_new", "per_token_logps", "new_logprobs", "log_probs", "logprobs_new", "trainer_logprobs"),
    "logp_old": ("logp_old", "old_per_token_logps", "old_log_probs", "old_logprobs", "old_log_prob"),
    "logp_rollout": (
        "logp_rollout",
        "sampling_per_token_logps",
        "rollout_log_probs",
        "rollout_logprobs",
        "inference_logprobs",
        "sampling_logprobs",
        "logprobs",
    ),
    "logp_ref": ("logp_ref", "ref_per_token_logps", "ref_log_prob", "ref_log_probs", "ref_logprobs"),
    "length": ("completion_length", "response_length", "length"),
}

SHAPES: tuple[Shape, ...] = (
    Shape("klamp", ("logp_new",), {name: (name,) for name in COLUMNS}),
    Shape(
        "prime-rl",
        ("inference_logprobs", "trainer_logprobs"),
        {
            "step": ("export_step", "step"),
            "token_ids": ("token_ids",),
            "mask": ("loss_mask",),
            "advantage": ("advantages",),
            "reward": ("rewards",),
            "logp_new": ("trainer_logprobs",),
            "logp_rollout": ("inference_logprobs",),
            "entropy": ("entropy",),
        },
        ("prime-rl compares the trainer with the sampler: new/old is trainer/inference here",),
    ),
    Shape("TRL", ("per_token_logps", "old_per_token_logps", "sampling_per_token_logps"), _COMMON),
    Shape("verl", ("old_log_probs", "rollout_log_probs", "old_log_prob"), _COMMON),
    Shape("log", (), _COMMON),
)


def mapping(text: str) -> tuple[str, str]:
    """(ours, theirs) of one ``--map ours=theirs``. Raises UserError for a name that is not ours."""
    ours, equals, theirs = text.partition("=")
    if not equals or not theirs:
        raise UserError(f"--map {text}: write ours=theirs, for example --map logp_old=behavior_logprobs")
    if ours not in COLUMNS:
        raise UserError(f"--map {text}: klamp has no column {ours!r}; {did_you_mean(ours, COLUMNS)}")
    return ours, theirs


@dataclass(frozen=True)
class Naming:
    """Which of a file's columns are read: ours -> theirs, the kind of log, and what to know about it."""

    kind: str
    columns: Mapping[str, str]
    notes: tuple[str, ...] = ()


def naming(origin: str, found: Iterable[str], given: Mapping[str, str]) -> Naming:
    """Where our columns are among those found; the given mapping goes before the known names.

    Raises UserError, with the columns found and those needed, where log-probs of two policies or the advantage lack.
    """
    names = list(found)
    absent = [f"{ours}={theirs}" for ours, theirs in given.items() if theirs not in names]
    if absent:
        raise UserError(f"{origin}: --map {absent[0]}, but it has no such column; {_found(names)}")
    shape = next(one for one in SHAPES if not one.tells or _tells(one, names))
    columns = {ours: next((name for name in theirs if name in names), None) for ours, theirs in shape.names.items()}
    known = {ours: theirs for ours, theirs in columns.items() if theirs is not None} | dict(given)
    policies = [name for name in ("logp_new", "logp_old", "logp_rollout") if name in known]
    lacking = (
        []
        if len(policies) > 1 or shape.name == "klamp"
        else ["log-probs of two policies (logp_new, logp_old, logp_rollout)"]
    )
    lacking += [] if "advantage" in known else ["advantage"]
    if lacking:
        raise UserError(
            f"{origin}: no log that is known by its columns; {_found(names)}; needed {' and '.join(lacking)}"
            f"{'' if not policies else ', of which it has ' + ', '.join(policies)}: name them with --map ours=theirs, for "
            "example --map logp_new=NAME --map logp_old=NAME --map advantage=NAME"
        )
    return Naming(shape.name, known, (*shape.notes, *_notes(known)))


def _tells(shape: Shape, names: list[str]) -> bool:
    if shape.name == "klamp":
        return all(name in names for name in ("logp_new", "logp_old", "advantage", "mask", "token_ids", "step", "row"))
    if shape.name == "prime-rl":
        return all(name in names for name in shape.tells)
    return any(name in names for name in shape.tells)


def _notes(known: Mapping[str, str]) -> list[str]:
    notes = []
    if "logp_old" not in known:
        notes.append("the log has no log-probs of the old policy: the sampler's stand for them")
    if "logp_new" not in known:
        notes.append(
            "the log has no log-probs of the policy being updated: the old policy's stand for them, so w = new/old is 1"
        )
    if "mask" not in known:
        notes.append("the log has no mask: every token counts")
    if "step" not in known:
        notes.append("the log has no step: that of a folder step_N, or 0")
    return notes


def _found(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"found {', '.join(map(repr, names[:_SHOWN])) or 'no column'}{more}"
