"""The published estimators, and the constants with which each framework ships them: data.

``docs/advantages.md`` is this table. A framework's entry holds what differs from the estimator's own value; an empty
entry ships it as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from klamp.advantages.estimators import Estimator, Whiten
from klamp.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Named:
    """An estimator with its formula and source; ``frameworks``: what each framework sets otherwise."""

    value: Estimator
    formula: str
    source: str
    frameworks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    note: str = ""


_INSIDE, _FLOOR = Whiten("tokens", 1, 1e-8, "inside"), Whiten("tokens", 0, 1e-8, "floor")
_NONE: Mapping[str, Any] = {}  # as it stands
_ALONE: Mapping[str, Any] = {"alone": "reward"}


def _std(eps: float, **more: Any) -> Mapping[str, Any]:
    return {"eps": eps, **more}


def _whitened(whiten: Whiten, **more: Any) -> Mapping[str, Any]:
    return {"whiten": whiten, "ties": "whitened", **more}


ESTIMATORS: dict[str, Named] = {
    "grpo": Named(
        Estimator("mean", "std"),
        "(r - mean) / (std + eps)",
        "arXiv 2402.03300",
        {
            "trl": _std(1e-4), "ms_swift": _std(1e-4), "areal": _std(1e-5),
            "verl": _std(1e-6, alone="reward"), "skyrl": _std(1e-6, alone="reward"),
            "slime": _std(1e-6), "roll": _std(1e-6), "tunix": _std(1e-6), "openrlhf": _std(1e-9),
            "open_instruct": _std(1e-8, scale="population_std"),
            "nemo_rl": _std(1e-6, baseline="leave_one_out", scale="leave_one_out_std"),
        },
        "The paper names no eps. NeMo RL leaves the row out of mean and std, and does not divide a row whose others "
        "are equal.",
    ),
    "dr_grpo": Named(
        Estimator("mean", "none"),
        "r - mean",
        "arXiv 2503.20783",
        {
            "trl": _NONE, "openrlhf": _NONE, "open_instruct": _NONE, "prime_rl": _NONE, "tinker": _NONE,
            "slime": _NONE, "tunix": _NONE, "verl": _ALONE, "skyrl": _ALONE,
        },
        "prime-rl, Tinker's cookbook and open-instruct (by default) call this GRPO.",
    ),
    "rloo": Named(
        Estimator("leave_one_out", "none"),
        "r - mean of the others = (r - mean) G / (G - 1)",
        "arXiv 2402.14740",
        {
            "trl": _NONE, "skyrl": _NONE, "openrlhf": _NONE, "nemo_rl": _NONE, "areal": _NONE, "ms_swift": _NONE,
            "tunix": _NONE, "verl": _ALONE,
        },
        "TRL's normalize_advantages is whiten=Whiten('rows', 1, 1e-4, 'added').",
    ),
    "batch_std": Named(
        Estimator("mean", "batch_std"),
        "(r - mean) / (std of all rewards of the batch + eps)",
        "arXiv 2508.08221",
        {"trl": _std(1e-4), "ms_swift": _std(1e-4)},
    ),
    "reinforce": Named(
        Estimator("none", "none"),
        "r",
        "doi 10.1007/BF00992696",
        {"nemo_rl": {"whiten": _FLOOR}},
        "There is no group: equal rewards are a signal too. NeMo RL's raw_reward whitens over tokens.",
    ),
    "reinforce_plus_plus": Named(
        Estimator("none", "none", whiten=_INSIDE),
        "whiten(discounted r)",
        "arXiv 2501.03262",
        {
            "verl": _NONE, "slime": _NONE, "openrlhf": {"whiten": _FLOOR}, "nemo_rl": {"whiten": _FLOOR},
        },
        "There is no group: 0 only if the whole batch is equal. discount=1 by default; a KL penalty in the reward is "
        "the caller's.",
    ),
    "reinforce_plus_plus_baseline": Named(
        Estimator("mean", "none", whiten=_INSIDE),
        "whiten(r - mean)",
        "arXiv 2501.03262",
        {
            "verl": _whitened(_INSIDE, alone="reward"), "slime": _whitened(_INSIDE),
            "openrlhf": _whitened(_FLOOR), "nemo_rl": _whitened(_FLOOR),
        },
        "The mean over tokens of r - mean is not 0 if lengths and rewards go together, so the frameworks move a tied "
        "group by it.",
    ),
    "gdpo": Named(
        Estimator("mean", "std", components="each", whiten=Whiten("rows", 1, 0.0, "added")),
        "whiten(sum_k weight_k (r_k - mean_k) / (std_k + eps))",
        "arXiv 2601.05242",
        {
            "trl": _std(1e-4, whiten=Whiten("rows", 1, 1e-4, "added"), ties="whitened"),
            "verl": _std(1e-6, alone="reward", whiten=_INSIDE, ties="whitened"),
            "nemo_rl": _std(1e-6, baseline="leave_one_out", scale="leave_one_out_std", ties="whitened"),
        },
        "rewards are [B, K]; weights=(...) or all 1. A reward that is NaN adds nothing; a row is unscored if all are.",
    ),
    "passk": Named(
        Estimator("best_of_others", "std"),
        "max(0, r - best of the others) / (std + eps)",
        "arXiv 2503.19595",
        {"verl": _std(1e-6)},
        "What the row adds to the best of its group, so 0 for all but a single best one. verl refuses a group of one.",
    ),
    "opo": Named(
        Estimator("length_mean", "none"),
        "r - sum(length r) / sum(length)",
        "arXiv 2505.23585",
        {"verl": _ALONE},
    ),
    "gpg": Named(
        Estimator("mean", "nonzero_share"),
        "(r - mean) / (share of the batch's rewards that are not 0)",
        "arXiv 2504.02546",
        {"verl": _ALONE},
        "The share is verl's; the paper counts the rows of groups that are not tied.",
    ),
    "maxrl": Named(
        Estimator("mean", "mean"),
        "(r - mean) / (mean + eps), 0 if mean <= 0",
        "arXiv 2602.02710",
        {"prime_rl": _NONE, "skyrl": _std(1e-6, alone="reward"), "open_instruct": _std(1e-8)},
        "For rewards that are not negative; SkyRL and open-instruct divide by a negative mean too, and SkyRL gives a "
        "single response r, without eps.",
    ),
}  # fmt: skip


def estimator(name: str, framework: str | None = None, **changes: Any) -> Estimator:
    """The estimator with this name, with a framework's constants or one's own: ``estimator("grpo", eps=1e-4)``.

    ``changes``: fields of ``Estimator``. Raises UserError for what is unknown, with the nearest valid choice.
    """
    if name not in ESTIMATORS:
        raise UserError(f"unknown estimator {name!r}; {did_you_mean(str(name), ESTIMATORS)}")
    found = ESTIMATORS[name]
    if framework is not None and framework not in found.frameworks:
        known = did_you_mean(str(framework), found.frameworks)
        raise UserError(f"no constants of {framework!r} are known for {name}; {known}")
    for key in changes:
        if key not in Estimator.__dataclass_fields__:
            raise UserError(f"an estimator has no {key!r}; {did_you_mean(key, Estimator.__dataclass_fields__)}")
    return replace(found.value, **{**found.frameworks.get(framework or "", {}), **changes})
