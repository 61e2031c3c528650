"""Exported flags, evaluated with each framework's formula, are the spec's loss and gradient; what differs is announced."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from oracles import frameworks
from oracles.batches import Fields
from oracles.frameworks import Wanted
from oracles.special import SPECIAL, whole_fields
from running import batch as built

import klamp
from klamp.errors import UserError
from klamp.export import FRAMEWORKS, Export, export
from klamp.export.facts import DIFFERENCES, EDGES, LABELS
from klamp.export.page import page, rows

ROOT = Path(__file__).parent.parent
TO_ROLLOUT = "guard(ratio_low=0.8, ratio_high=1.2, ratio='new/rollout') + factor(ratio='new/rollout') + token_mean()"
INTERVALS = [
    "grpo(epsilon=0.1)", "dr_grpo(divisor=64)", "dual_clip(c=1.4, base='dapo()')", "two_sided(delta=2.0, base='dapo()')",
    "atr_grpo(delta=0.1)", "power_clip(a=-2.3, radius=0.03)", "power_clip(a=2.0, radius=0.02)", "trust_region('k2', 0.02)",
    "trust_region('k3', 0.05, base='dapo()')", "trust_region('jeffreys', 0.02, base='ppo()')", "trust_region('js', 0.05)",
    "trust_region('hellinger2', 0.02)", "trust_region('tv', 0.1)", "trust_region('pearson', 0.02, base='bnpo()')",
    "trust_region('neyman', 0.02)", "trust_region('renyi(2.0)', 0.02)", "trust_region('k3', radius_low=0.01, radius_high=0.04)",
    "trust_region('k3', 0.02, scope='sequence', base='gspo()')", "trust_region('k3', 0.02, gate='always')",
    "trust_region('k2', 0.02, base='dr_grpo(divisor=64)')", "guard(ratio_high=1.2) + factor() + token_mean()",
    "guard(ratio_low=0.8) + factor() + sequence_mean()", "guard(ratio_low=0.3, ratio_high=3.7) + factor() + token_mean()",
    "factor() + token_mean()", "guard(ratio_low=0.8, ratio_high=1.2, cut_value='zero') + factor() + token_mean()", "grpo(aggregate=sequence_mean(rows=all))", "grpo(aggregate=prompt_mean)",
    "ppo(aggregate=token_sum)", "gspo(aggregate=token_mean)", "dual_clip(c=2.0, base='gspo(epsilon_low=0.2, epsilon_high=0.2)')",
    TO_ROLLOUT,
]  # fmt: skip
WEIGHTS = [
    "cispo_absolute(high=1.1, low=0.9)", "cispo(epsilon_high=1.0)", "sapo(tau_pos=2.0, tau_neg=0.5, aggregate=token_mean)",
    "factor(transform=soft_gate(), scope='sequence') + token_mean()", "vespo(k_pos=0.5, k_neg=0.2)", "gmpo(epsilon=0.1)",
    "factor(transform=cap(low=0.0, high=2.0), ratio='new/rollout') + token_mean()", "rollout_is(epsilon_low=0.0)",
    "dppo_tv(cap=3.0)", "dppo_kl(cap=3.0)", "dppo_kl(delta=0.01, ratio='new/rollout')", "dppo_tv(ratio='new/rollout', cap=5.0)",
    "topr(scope='token')", "dro(beta=0.1)", "dro() + tis()", "dro(beta=0.1) + tis(high=1.1)", "rec(clip='none')", "rec(clip='two_side')",
    "kl_cov(share=0.2, coefficient=0.3)", "kl_cov(share=0.2, coefficient=0.3) + tis(high=1.1)", "ipo(threshold=0.05, kl_tau=0.01)",
    "factor() + f_penalty(measure='k2', beta=0.1, ratio='new/rollout') + token_mean()",
    "f_penalty(measure='k2', beta=0.1, ratio='new/rollout') + token_sum()",
]  # fmt: skip
CORRECTED = [
    "grpo() + sequence_mask(high=1.3, low=0.7)", "gspo() + tis(high=1.1, scope='sequence')", "dapo() + icepop(low=0.9, high=1.1)",
    "grpo() + tis(high=1.1, low=0.9)", "dapo() + tis(high=1.05, scope='geometric')", "dapo() + mis(low=0.0, high=1.1)",
    "reinforce() + mis(low=0.9, high=1.1, scope='geometric')", "dapo() + mis(low=0.9, high=1.1, scope='sequence')",
    "gspo() + icepop(low=0.9, high=1.1)", "gspo(aggregate=token_mean) + icepop(low=0.9, high=1.1)",
    "gspo(aggregate=token_mean) + mis(low=0.95, high=1.05, scope='geometric')", "segment() + tis(high=1.1)",
    "grpo() + geometric_mask(low=0.95, high=1.05) + tis(high=inf)", "grpo() + geometric_mask(low=0.9, high=1.1)",
    "dapo() + guard(ratio_low=0.9, ratio_high=1.1, ratio='old/rollout', gate='always', cut_value='zero')",
    "dapo() + guard(ratio_high=1.3, ratio='old/rollout', scope='sequence', reduce='sum', gate='always', cut_value='zero')",
    "grpo() + opsm(delta=0.05)", "bnpo() + opsm(delta=0.05)", "dapo() + opsm(delta=0.05, ratio='new/old')",
    "dapo() + opsm(delta=0.05) + kl_reference()", f"{TO_ROLLOUT} + opsm(delta=0.05)", "dapo() + tis(high=1.1) + opsm(delta=0.05)",
    "grpo() + rs_k1(low=0.8, high=1.1)", "dapo() + rs_k2(radius=0.01)", "grpo() + rs_k3(radius=0.02, scope='sequence_mean')",
    "dapo() + rs_k3(radius=0.06, scope='sequence_sum')", "grpo() + rs_k3(radius=0.06, scope='sequence_max')",
    "grpo() + rs_k1(low=0.7, high=1.2, scope='sequence_sum')", "dapo() + rs_k1(low=0.9, high=1.1, scope='sequence_mean')",
    "gspo() + rs_k3(radius=0.01)", "gspo() + rs_k3(radius=0.02, scope='sequence_mean')",
    "dapo() + rs_k3(radius=0.03) + icepop(low=0.8, high=1.5)",
]  # fmt: skip
PENALISED = [
    "ppo() + kl_reference(beta=0.1, estimator='k1')", "ppo() + kl_reference(beta=0.1, estimator='k2')",
    "ppo() + kl_reference(estimator='abs')", "ppo() + kl_reference(gradient='k2')", "grpo() + kl_reference(estimator='k1', gradient='k2')",
    "bnpo() + kl_reference(beta=0.3)", "gspo() + kl_reference()", "gmpo() + kl_reference()", "dual_clip() + kl_reference(weighted=True)",
    "ppo() + kl_reference(estimator='k1', weighted=True)", f"{TO_ROLLOUT} + kl_reference(estimator='k1', weighted=True)",
    "dapo() + tis(high=1.1) + kl_reference(beta=0.3)", "grpo() + entropy_bonus(coefficient=0.02)",
    "bnpo() + entropy_bonus(coefficient=0.02)", "dapo() + kl_reference(estimator='k2', weighted=True) + entropy_bonus()",
]  # fmt: skip
CASES = list(dict.fromkeys([*rows(), *INTERVALS, *WEIGHTS, *CORRECTED, *PENALISED]))
VALUES = {"cut_value", "weight_value", "ratio_value"}  # the loss differs by a value, no gradient does
HALVED = {"covariance_of_micro_batch", "entropy_of_micro_batch"}


# --- batches ------------------------------------------------------------------------------------------------------


def far(role: str, size: float) -> Fields:
    """All tokens of half the responses far from one of the policies."""
    fields = whole_fields(11, 6, 6)
    fields["mask"] = fields["mask"] | (torch.arange(6)[:, None] < 4)
    fields[role] = torch.where(torch.arange(6)[:, None] % 2 == 0, fields["logp_new"] - size, fields[role])
    return fields


def below(size: float) -> Fields:
    """Half the responses far less likely than the sampler said, under every other policy."""
    fields = far("logp_rollout", 0.0)
    for role in ("logp_new", "logp_old", "logp_ref"):
        fields[role] = torch.where(torch.arange(6)[:, None] % 2 == 0, fields[role] - size, fields[role])
    return fields


def certain() -> Fields:
    """Tokens that become almost certain: 1e-8 beside what is left of the probability matters."""
    fields = whole_fields(12, 8, 9)
    rest = torch.tensor([3e-3, 6e-4, 0.2]).double()[torch.arange(9) % 3].expand(8, 9)
    for role in ("logp_old", "logp_rollout"):
        fields[role] = torch.log1p(-rest)
    fields["logp_new"] = torch.where(rest < 0.1, -1e-12, fields["logp_new"])
    return fields


def drawn(seed: int) -> Fields:
    shape = ((5, 7), (3, 12), (9, 4))[seed % 3]
    return whole_fields(seed, *shape, per_token=seed % 2 == 1, spread=(0.4, 0.1, 1.0, 0.02)[seed % 4])


VARIED = ("extreme", "rubbish", "empty_row")  # these with an advantage per token as well
BATCHES: dict[str, Fields] = {
    **{f"drawn {seed}": drawn(seed) for seed in range(4)},
    **{f"{name} {per_token}": SPECIAL[name](7, per_token) for name in SPECIAL for per_token in (False, name in VARIED)},
    "far from old": far("logp_old", 12.0), "far from the sampler": far("logp_rollout", 25.0),
    "far below the sampler": below(25.0), "plain": drawn(0) | {"mask": torch.ones(5, 7, dtype=torch.bool)},
    "far from the reference": far("logp_ref", -45.0), "certain": certain(),
}  # fmt: skip
SOME = ["drawn 1", "drawn 2", "empty_row False"]


# --- both sides ---------------------------------------------------------------------------------------------------


def leaves_of(fields: Fields) -> tuple[Fields, list[torch.Tensor]]:
    leaves = [fields[name].clone().requires_grad_(True) for name in ("logp_new", "entropy")]
    return fields | {"logp_new": leaves[0], "entropy": leaves[1]}, leaves


def gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """(loss, gradient, gradient of the entropy)."""
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))


@cache
def ours(text: str, batch: str, parts: int = 1) -> tuple[torch.Tensor, ...]:
    """Klamp's side, of a whole step or of its micro-batches added up."""
    own, leaves = leaves_of(BATCHES[batch])
    objective, size = klamp.Objective(text, diagnostics=False), len(own["mask"])
    cuts = [slice(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
    batches = [built({name: value[part] for name, value in own.items()}) for part in cuts]
    stats = sum((objective.stats(part) for part in batches[1:]), objective.stats(batches[0]))
    return gradients(sum(objective(part, stats).loss for part in batches), leaves)


def theirs(
    found: Export, flags: dict[str, Any], fields: Fields, without: frozenset[str] = frozenset(), parts: int = 1
) -> Any:
    """The framework's side: its formula with these flags."""
    own, leaves = leaves_of(fields)
    flags = flags | ({"call": found.call} if found.call else {})
    return gradients(frameworks.loss(found.framework, flags, own, without, wanted(found.spec), parts), leaves)


@cache
def wanted(text: str) -> Wanted:
    spec = klamp.parse(text)
    anchors = {part.ratio.partition("/")[2] for part in (*spec.guards, *spec.factors) if part.ratio.startswith("new/")}
    return Wanted(spec.mean.kind, spec.mean.divisor, spec.mean.rows, anchors.pop() if len(anchors) == 1 else None)


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], value: bool = True) -> bool:
    pairs = list(zip(got, want, strict=True))[0 if value else 1 :]
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in pairs)


def real(found: Export, key: str, announced: frozenset[str]) -> bool:
    """Whether some batch shows this one difference, all others taken away."""
    parts = 2 if key in HALVED or wanted(found.spec).kind == "local_token_mean" else 1
    return any(
        not same(theirs(found, found.settings, fields, announced - {key}, parts), ours(found.spec, batch, parts))
        for batch, fields in BATCHES.items()
    )


def batches_of(text: str) -> list[tuple[str, Fields]]:
    """Half the batches, the other half for the next case: every kind of flag meets all of them."""
    return list(BATCHES.items())[CASES.index(text) % 2 :: 2]


@cache
def exported(text: str, name: str) -> Export:
    return export(text, name)


# --- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_flags_are_the_spec_but_for_what_is_announced(name: str) -> None:
    """With the announced differences taken away, loss and gradient are equal to 1e-12: nothing is missing from the list.

    And each announced difference is real: alone it changes the loss or the gradient of some batch.
    """
    shown: set[str] = set()
    announced_edges: set[str] = set()
    for text in CASES:
        found = exported(text, name)
        if found.reason:
            continue
        announced = frozenset(found.differences) | frozenset(found.edges)
        for batch, fields in batches_of(text):
            if "covariance_ties" in announced and batch.startswith(("no_advantage", "certain")):
                continue
            if "weighted" in text and batch == "far from the reference":
                continue  # w (k3 + its slope) = w x, but both sides add e^45 and take it away again
            got = theirs(found, found.settings, fields, announced)
            assert same(got, ours(text, batch), value=not VALUES & announced), (text, batch, sorted(announced))
        for key in found.differences:
            assert real(found, key, announced), f"{text}: {key} was announced, but nothing differs"
        announced_edges |= set(found.edges)
        shown |= {key for key in set(found.edges) - shown if real(found, key, announced)}
    assert announced_edges == shown


def test_where_nothing_is_announced_nothing_is_taken_away() -> None:
    """The plain statement, for cells without any remark: the formula as it is, against Klamp, on every batch."""
    cells = [(text, name) for text in CASES for name in FRAMEWORKS]
    plain = [found for cell in cells if (found := exported(*cell)).exact and not found.edges]
    assert len(plain) > 100
    for found in plain:
        for batch in SOME:
            assert same(theirs(found, found.settings, BATCHES[batch]), ours(found.spec, batch)), (
                found.spec,
                found.framework,
            )


def test_edges_are_edges() -> None:
    """Of ordinary batches, advantages per response and no response empty, an edge moves nothing by more than 1e-6."""
    for text in CASES:
        for name in FRAMEWORKS:
            found = exported(text, name)
            if found.exact:
                got = theirs(found, found.settings, BATCHES["plain"])
                for a, b in zip(got, ours(text, "plain"), strict=True):
                    assert torch.allclose(a, b, rtol=1e-6, atol=1e-7), (text, name)


def test_a_mean_of_micro_batches() -> None:
    """BNPO over two micro-batches of unequal size: the mean of their means, in every framework that has it."""
    seen = []
    for name in FRAMEWORKS:
        found = exported("bnpo()", name)
        if not found.exact:
            continue
        for batch, fields in BATCHES.items():
            got = theirs(found, found.settings, fields, frozenset(found.edges), parts=2)
            assert same(got, ours("bnpo()", batch, 2)), (name, batch)
        seen.append(name)
    assert seen == ["trl", "skyrl", "ms-swift", "liger"]


LIVE = ["dapo()", "two_sided(delta=2.0, base='dapo()')", "cispo_absolute(high=1.1, low=0.9)", "cispo_absolute(high=1.1)",
        "gspo(epsilon_low=0.05, epsilon_high=0.1)", "ppo() + kl_reference(beta=0.1)", "dapo() + tis(high=1.1)",
        "sapo(tau_pos=2.0, tau_neg=0.5)"]  # fmt: skip


@pytest.mark.parametrize("text", LIVE)
def test_every_exported_number_counts(text: str) -> None:
    """A number that is a little off is seen, in every framework: no flag is written that its formula does not read."""
    for name, table in FRAMEWORKS.items():
        found = exported(text, name)
        for flag, value in found.settings.items():
            idle = value in (1e9, 1.0, 0.0) or (flag in table.base and table.base[flag] == value)
            numbers = [value] if isinstance(value, float) else value if isinstance(value, list) else []
            for place, number in enumerate(numbers):
                off = [*numbers[:place], 1.02 * number, *numbers[place + 1 :]]
                if idle or number == 0.0:
                    continue
                flags = found.settings | {flag: off if isinstance(value, list) else off[0]}
                moved = [not same(theirs(found, flags, f), theirs(found, found.settings, f)) for f in BATCHES.values()]
                assert any(moved), (name, flag)


@pytest.mark.parametrize("name", ["trl", "verl", "openrlhf", "nemo-rl", "skyrl", "prime-rl", "areal", "roll", "ms-swift", "tunix",
                                  "liger", "open-instruct"])  # fmt: skip
def test_defaults_that_add_something_are_turned_off(name: str) -> None:
    """Without the flags that every export carries, the framework's own defaults make it another loss."""
    text = "dppo_tv(ratio='new/rollout')" if name == "prime-rl" else "ppo()"
    found, table = exported(text, name), FRAMEWORKS[name]
    assert found.exact
    hidden = set(table.base) | {flag for flags in table.anchors.values() for flag in flags}
    hidden |= {flag for flag, value in found.settings.items() if value == 1e9}
    bare = {flag: value for flag, value in found.settings.items() if flag not in hidden}
    assert bare != found.settings
    refusals: list[str] = []
    try:
        changed = [
            not same(theirs(found, bare, BATCHES[b]), theirs(found, found.settings, BATCHES[b])) for b in BATCHES
        ]
    except AssertionError as refused:
        refusals.append(str(refused))
    if refusals:
        assert "changes the advantages" in refusals[0]
    else:
        assert any(changed)


# --- the traps, by name -------------------------------------------------------------------------------------------


def test_absolute_caps_and_offsets() -> None:
    """The cap 5 is one number absolute in TRL, Liger, ms-swift and Tinker, and an offset of 4 elsewhere."""
    wanted = {"trl": ("epsilon_high", 5.0), "liger": ("epsilon_high", 5.0), "ms-swift": ("--epsilon_high", 5.0),
              "tinker": ("loss_fn_config.clip_high_threshold", 5.0), "verl": ("actor_rollout_ref.actor.clip_ratio_high", 4.0),
              "nemo-rl": ("loss_fn.ratio_clip_max", 4.0), "slime": ("--eps-clip-high", 4.0), "open-instruct": ("--clip_higher", 4.0),
              "skyrl": ("trainer.algorithm.cispo.cispo_eps_clip_high", 4.0)}  # fmt: skip
    for name, (flag, value) in wanted.items():
        assert exported("cispo()", name).settings[flag] == value
    assert exported("dapo()", "tinker").settings["loss_fn_config.clip_low_threshold"] == 0.8


def test_the_hidden_dual_clip() -> None:
    c = "actor_rollout_ref.actor.clip_ratio_c"
    assert exported("grpo()", "verl").settings[c] == 1e9
    assert exported("dual_clip()", "verl").settings[c] == 3.0
    assert exported("dual_clip(c=1.4)", "roll").settings["pg_clip"] == 0.2
    assert exported("grpo()", "roll").settings["dual_clip_loss"] is False


def test_offsets_are_short_and_exact() -> None:
    """An offset is the shortest decimal from which the framework computes the very bound."""
    assert exported("dapo()", "trl").settings["epsilon"] == 0.2
    assert exported("dapo()", "trl").settings["epsilon_high"] == 0.28
    for delta in (1e-6, 1e-3, 0.02, 0.1, 1.0, 3.0):
        spec = klamp.parse(f"atr_grpo(delta={delta})")
        found, region = export(spec, "verl").settings, spec.guards[0].region
        assert 1.0 + found["actor_rollout_ref.actor.clip_ratio_high"] == region.high
        assert 1.0 - found["actor_rollout_ref.actor.clip_ratio_low"] == pytest.approx(region.low, rel=1e-15)


# --- the value ----------------------------------------------------------------------------------------------------


def test_an_export_is_json() -> None:
    for text in CASES:
        for name in FRAMEWORKS:
            found = exported(text, name)
            value = json.loads(json.dumps(found.to_dict(), allow_nan=False))
            assert value["framework"] == name
            assert value["exact"] == (not found.reason and not found.differences)
            assert bool(value["settings"]) == bool(value["text"]) == (not value["reason"])
            assert value["differs"] == list(found.differences.values())


def test_a_report_says_what_differs() -> None:
    report = exported("grpo()", "openrlhf").report()
    assert "--actor.eps_clip_low_high 0.2 0.2" in report
    assert "differs: the mean: it averages by token_mean, the spec by sequence_mean" in report
    assert "differs: nothing" in exported("dapo()", "areal").report()


def test_where_it_cannot_it_says_what_can() -> None:
    for text in CASES:
        for name, table in FRAMEWORKS.items():
            found = exported(text, name)
            if found.reason:
                assert found.settings == {}
                assert table.title in found.reason or "need different values" in found.reason
                assert any(table.hook in line for line in found.alternatives)
    found = exported("m2po()", "trl")
    assert "budget" in found.reason
    assert "exact in prime-rl" in " ".join(exported("ipo()", "verl").alternatives)
    assert any(
        "nearest it has: dapo" in line or "guard" in line
        for line in exported("dapo() + icepop()", "tunix").alternatives
    )


def test_the_nearest_is_exact() -> None:
    """What an export offers in place of a spec can itself be exported."""
    for text, name in (
        ("dapo() + icepop()", "liger"),
        ("dapo() + opsm()", "verl"),
        ("grpo() + kl_reference()", "areal"),
    ):
        line = next(line for line in exported(text, name).alternatives if line.startswith("the nearest it has: "))
        nearest = line.removeprefix("the nearest it has: ").partition(": ")[0]
        assert not export(nearest, name).reason


def test_bad_requests() -> None:
    with pytest.raises(UserError, match="unknown framework 'verll'; did you mean 'verl'"):
        export("grpo()", "verll")
    with pytest.raises(UserError, match="needs a constant divisor"):
        export("dr_grpo()", "trl")
    with pytest.raises(UserError):
        export("gropo()", "trl")


def test_a_weight_beside_a_ratio_to_the_sampler_is_refused() -> None:
    assert "count the mismatch twice" in export(f"{TO_ROLLOUT} + tis()", "slime").reason


def test_exporting_needs_no_torch() -> None:
    code = "import sys; from klamp.export import export; export('dapo() + icepop()', 'verl').report(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_keys_have_sentences() -> None:
    assert set(LABELS) == set(DIFFERENCES)
    announced = [exported(text, name) for text in CASES for name in FRAMEWORKS]
    assert {key for found in announced for key in found.differences} == set(DIFFERENCES)
    assert {key for found in announced for key in found.edges} == set(EDGES)


def test_every_way_is_tested() -> None:
    """Each form, correction, penalty and mean of each table is written by some case."""
    for name, table in FRAMEWORKS.items():
        written = {flag for text in CASES for flag in exported(text, name).settings}
        several = [
            way
            for many in (table.forms, table.means, table.corrections, table.penalties)
            for ways in many.values()
            for way in ways
        ]
        assert {flag for way in several for flag in way.flags} <= written, name


# --- snippets -----------------------------------------------------------------------------------------------------


def nested(flags: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flags.items():
        *path, leaf = name.split(".")
        node = tree
        for step in path:
            node = node.setdefault(step, {})
        node[leaf] = value
    return tree


def python_call(text: str) -> dict[str, Any]:
    call, *rest = ast.parse(text).body
    found: dict[str, Any] = {}
    for keyword in call.value.keywords:
        value = eval(compile(ast.Expression(keyword.value), "", "eval"))
        found |= (
            {f"{keyword.arg}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {keyword.arg: value}
        )
    for line in rest:
        found[f".{line.targets[0].attr}"] = ast.literal_eval(line.value)
    return found


def overrides(text: str) -> dict[str, Any]:
    pairs = (line.partition("=") for line in text.split(" \\\n"))
    return {name: float("inf") if value == "inf" else yaml.safe_load(value) for name, _, value in pairs}


def words(text: str) -> dict[str, list[str]]:
    return {name: rest.split() for name, _, rest in (line.partition(" ") for line in text.split(" \\\n"))}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_is_printed_reads_back(name: str) -> None:
    for text in CASES:
        found = exported(text, name)
        if found.reason:
            continue
        flags, syntax = found.settings, FRAMEWORKS[name].syntax
        if syntax == "yaml":
            assert yaml.safe_load(found.text) == nested(flags)
        elif syntax == "toml":
            assert tomllib.loads(found.text) == nested(flags)
        elif syntax == "python":
            assert python_call(found.text) == flags
        elif syntax == "overrides":
            assert overrides(found.text) == flags
        else:
            expected = {
                k: v if isinstance(v, list) else [v] for k, v in flags.items() if v is not None and v is not False
            }
            assert words(found.text) == {k: [str(x) for x in v if x is not True] for k, v in expected.items()}


# --- TRL itself, and the page -------------------------------------------------------------------------------------


def test_trl_takes_the_arguments(tmp_path: Path) -> None:
    """A real GRPOConfig accepts them, and they hold after it is built."""
    from trl import GRPOConfig
    from trl.experimental.gmpo import GMPOConfig

    kinds, built = {"GRPOConfig": GRPOConfig, "GMPOConfig": GMPOConfig}, 0
    for text in CASES:
        found = exported(text, "trl")
        if not found.reason:
            config = kinds[found.call](output_dir=str(tmp_path), report_to="none", bf16=False, **found.settings)
            assert {name: getattr(config, name) for name in found.settings} == found.settings, text
            built += 1
    assert built > 60


def test_the_page_is_up_to_date() -> None:
    """docs/export.md is what ``python -m klamp.export`` prints."""
    assert (ROOT / "docs" / "export.md").read_text() == page()
