"""Spec texts beside the same objectives written out: (spec, J, penalties, average)."""

from __future__ import annotations

import math

from oracles import measures, objective

G = objective.GENERATORS
Case = tuple[str, objective.Term, tuple[objective.Term, ...], str]


def _regions() -> list[Case]:
    found = []
    for name in G:
        radius = {"k1": 0.3, "ratio_dev": 0.2, "tv": 0.1, "log_ratio": 0.2}.get(name, 0.03)
        low, high = (math.exp(x) for x in measures.bounds(name, radius))
        text = f"trust_region('{name}', {radius}, base=dapo())"
        found.append((text, objective.clip(low, high), (), "token_mean"))
        penalty = f"factor() + f_penalty(measure='{name}', beta=0.3) + sequence_mean()"
        found.append((penalty, objective.unclipped, (objective.f_penalty(G[name], 0.3),), "sequence_mean"))
    return found


def _references() -> list[Case]:
    found = []
    for estimator in ("k1", "k2", "k3"):
        for weighted in (False, True):
            text = f"dapo(penalty=kl_reference(beta=0.2, estimator='{estimator}', weighted={weighted}))"
            penalty = objective.kl_reference(0.2, estimator, weighted)
            found.append((text, objective.clip(0.8, 1.28), (penalty,), "token_mean"))
    return found


def _masks() -> list[Case]:
    found = []
    for gate in ("always", "outward", "positive", "negative"):
        for ratio in ("new/old", "old/rollout", "new/rollout"):
            guard = f"guard(measure='k3', radius=0.02, ratio='{ratio}', gate='{gate}', cut_value='zero')"
            found.append(
                (f"{guard} + factor() + token_mean()", objective.masked(G["k3"], 0.02, gate, ratio), (), "token_mean")
            )
            found.append((f"{guard} + reinforce()", objective.masked(G["k3"], 0.02, gate, ratio, objective.reinforce), (),
                          "token_mean"))  # fmt: skip
    return found


CLIP = objective.clip(0.8, 1.2)
NAMED: list[Case] = [  # every method and kind of part once
    ("grpo()", CLIP, (), "sequence_mean"),
    ("grpo(epsilon=0.3)", objective.clip(0.7, 1.3), (), "sequence_mean"),
    ("dapo()", objective.clip(0.8, 1.28), (), "token_mean"),
    ("dr_grpo(divisor=9)", CLIP, (), "sequence_sum"),
    ("grpo(aggregate=prompt_mean())", CLIP, (), "prompt_mean"),
    ("dual_clip(c=1.5)", objective.dual_clip(0.8, 1.2, 1.5), (), "sequence_mean"),
    ("dual_clip(c=1.1, base=dapo())", objective.dual_clip(0.8, 1.28, 1.1), (), "token_mean"),
    ("cispo_absolute(high=1.3, low=0.9)", objective.cispo(0.9, 1.3), (), "token_mean"),
    ("cispo()", objective.cispo(0.0, 5.0), (), "token_mean"),
    ("sapo()", objective.sapo(1.0, 1.05), (), "sequence_mean"),
    ("sapo(tau_pos=3.0, tau_neg=0.5)", objective.sapo(3.0, 0.5), (), "sequence_mean"),
    ("gspo_token(epsilon_low=0.05, epsilon_high=0.1)", objective.gspo_token(0.95, 1.1), (), "sequence_mean"),
    ("reinforce()", objective.reinforce, (), "token_mean"),
    (
        "guard(ratio_low=0.8, ratio_high=1.3) + guard(ratio_low=0.9, ratio_high=1.2) + factor()",
        objective.clip(0.9, 1.2),
        (),
        "token_mean",
    ),
    ("factor()", objective.unclipped, (), "token_mean"),
    ("ppo_kl_penalty(beta=0.5)", objective.unclipped, (objective.f_penalty(G["k3"], 0.5),), "sequence_mean"),
    (
        "f_penalty(beta=0.5, ratio='new/rollout') + factor()",
        objective.unclipped,
        (objective.f_penalty(G["k3"], 0.5, "rollout"),),
        "token_mean",
    ),
    ("grpo() + sequence_mask(high=1.4, low=0.7)", objective.sequence_mask(CLIP, 0.7, 1.4), (), "sequence_mean"),
    (
        "sapo() + sequence_mask(high=1.4)",
        objective.sequence_mask(objective.sapo(1.0, 1.05), 0.0, 1.4),
        (),
        "sequence_mean",
    ),
    (
        "dapo() + factor(cap(high=1.1), ratio='old/rollout')",
        objective.capped_correction(objective.clip(0.8, 1.28), 1.1),
        (),
        "token_mean",
    ),
    (
        "reinforce() + factor(cap(high=1.1), ratio='old/rollout')",
        objective.capped_correction(objective.reinforce, 1.1),
        (),
        "token_mean",
    ),
    ("grpo(penalty=entropy_bonus(coefficient=0.05))", CLIP, (objective.entropy_bonus(0.05),), "sequence_mean"),
    (
        "grpo(penalty=[entropy_bonus(coefficient=0.05), kl_reference(beta=0.1)])",
        CLIP,
        (objective.entropy_bonus(0.05), objective.kl_reference(0.1, "k3", False)),
        "sequence_mean",
    ),
    (
        "trust_region('custom_parts:cosh_gap', 0.06, base=dapo())",
        objective.clip(*(math.exp(x) for x in measures.bounds("neyman", 0.03))),
        (),
        "token_mean",
    ),
]
WRITTEN = [*NAMED, *_regions(), *_references(), *_masks()]  # fmt: skip
CONSTANT = {"sequence_sum": 9.0}
SPECS = [case[0] for case in NAMED]
