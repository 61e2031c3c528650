"""The specs of a comparison: one base under all, equal ones recognised, names for tables and folders."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import klamp
from klamp.batch import Batch
from klamp.compare.specs import LONGEST, canonical, labels, slug, under, unify
from klamp.diff import standard_batch
from klamp.language import PRESETS

BASES = [
    "grpo()", "dapo()", "grpo() + kl_reference(beta=0.04)", "factor()", "dr_grpo(divisor=64)",
    "ppo_kl_adaptive(target=0.02)", "bnpo() + entropy_bonus(coefficient=0.001)",
]  # fmt: skip
GUARDS = [
    "guard(ratio_low=0.8, ratio_high=1.2)", "guard(measure='pearson', radius=0.02)", "guard(measure='k3', radius=0.02)",
    "guard(ratio_low=0.8, gate='negative')", "guard(ratio_high=1.2, gate='positive')", "guard(ratio_high=1.2)",
    "guard(ratio_high=3.0, gate='negative')", "guard(ratio_low=0.9, ratio_high=1.1, gate='always')",
    "guard(ratio_low=0.5, ratio_high=2.0, ratio='old/rollout', gate='always', action='drop')",
    "guard(ratio_low=0.8, ratio_high=1.2, cut_value='zero')", "guard(measure='power(2.0)', radius=0.02)",
    "guard(measure='k3', radius=0.02, scope='sequence', reduce='mean_after')", "guard(measure='binary_tv', radius=0.1)",
    "guard(measure='k3', radius=linear(start=0.1, end=0.01, steps=5))", "guard(region='nowhere', gate=entropy_below(quantile=0.5))",
    "guard(ratio_low=0.8, ratio_high=1.2, action='rollback', strength=0.3)", "guard(measure='k3', radius=inf)",
    "guard(ratio_low=0.9, ratio_high=1.1, ratio='old/rollout', gate='negative', action='drop_row')",
]  # fmt: skip
FACTORS = ["factor()", "factor(transform=cap())", "factor(transform=cap(high=2.0))", "factor(scope='sequence')",
           "factor(scope='sequence', clipped=True)", "factor(transform=cap(high=2.0), ratio='old/rollout')"]  # fmt: skip
MEANS = ["token_mean()", "sequence_mean()"]


def compose(*texts: str) -> klamp.Spec | None:
    try:
        return klamp.parse(" + ".join(texts))
    except klamp.UserError:
        return None


SPECS = st.builds(
    lambda guards, factor, mean: compose(*guards, factor, mean),
    st.lists(st.sampled_from(GUARDS), max_size=3, unique=True), st.sampled_from(FACTORS), st.sampled_from(MEANS),
).filter(lambda spec: spec is not None)  # fmt: skip
USUAL = [found.usual for found in PRESETS.values()]


# --- under one base -------------------------------------------------------------------------------------------


def check_under(base: klamp.Spec, spec: klamp.Spec) -> klamp.Spec:
    found = under(base, spec)
    assert klamp.parse(str(found)) == found
    assert (found.guards, found.factors) == (spec.guards, spec.factors)
    assert (found.penalties, found.mean) == (base.penalties, base.mean)
    assert under(base, found) == found
    assert str(under(base, found)) == str(found)
    return found


@pytest.mark.parametrize("base", BASES)
def test_every_preset_under_every_base(base: str) -> None:
    for text in USUAL:
        check_under(klamp.parse(base), klamp.parse(text))


@given(st.sampled_from(BASES), SPECS, st.sampled_from(USUAL))
def test_any_composition_under_any_base(base: str, spec: klamp.Spec, text: str) -> None:
    check_under(klamp.parse(base), spec)
    try:
        both = klamp.parse(text) + spec
    except klamp.UserError:
        return
    check_under(klamp.parse(base), both)


@pytest.mark.parametrize(("base", "spec", "text"), [
    ("grpo()", "atr_grpo(delta=0.03)", "atr_grpo(delta=0.03)"),  # its own text
    ("grpo()", "dapo()", "dapo(aggregate=sequence_mean())"),
    ("dapo()", "dapo(epsilon_high=0.3, aggregate=sequence_mean())", "dapo(epsilon_high=0.3)"),
    ("grpo() + kl_reference(beta=0.1)", "dapo()", "dapo(aggregate=sequence_mean()) + kl_reference(beta=0.1)"),
    ("grpo()", "dapo(penalty=kl_reference(beta=0.1))", "dapo(aggregate=sequence_mean())"),
    ("grpo()", "grpo() + kl_reference(beta=0.1)", "grpo()"),
    ("grpo()", "dapo() + tis(high=3.0) + entropy_bonus()", "dapo(aggregate=sequence_mean()) + tis(high=3.0)"),
    ("grpo()", "guard(measure='k3', radius=0.02) + factor()", "guard(measure='k3', radius=0.02) + factor() + sequence_mean()"),
    ("grpo()", "reinforce()", "reinforce(aggregate=sequence_mean())"),
    ("grpo()", "dro()", "sequence_mean()"),  # nothing of it is left
    ("grpo()", "dual_clip(base=dapo())", "dual_clip(base=dapo(), aggregate=sequence_mean())"),
    ("factor()", "ppo()", "ppo()"),
])  # fmt: skip
def test_the_text_under_a_base(base: str, spec: str, text: str) -> None:
    assert str(check_under(klamp.parse(base), klamp.parse(spec))) == text


def test_a_stale_name_is_not_believed() -> None:
    import dataclasses

    renamed = dataclasses.replace(klamp.parse("dapo()"), name="grpo()")
    assert check_under(klamp.parse("grpo()"), renamed).guards == klamp.parse("dapo()").guards


def test_a_part_without_a_text_is_refused() -> None:
    guard = klamp.Guard(klamp.region(klamp.Measure(lambda x: x * x, 2.0), 0.02))
    with pytest.raises(klamp.UserError, match="no text can say"):
        under(klamp.parse("grpo()"), klamp.parse("factor()") + guard)


# --- equal specs ----------------------------------------------------------------------------------------------


def gradient(spec: klamp.Spec, batch: Batch) -> torch.Tensor:
    """d loss / d log pi_new."""
    from copy import copy

    own = copy(batch)
    own.logp_new = batch.logp_new.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(klamp.Objective(spec, diagnostics=False)(own).loss, own.logp_new)
    return found


BATCH = standard_batch(0)


@pytest.mark.parametrize("text", [
    "grpo(epsilon=0.2)",
    "trust_region(measure='pearson', radius=0.02)",
    "power_clip(a=2.0)",
    "ppo(aggregate=sequence_mean())",
    "dapo(epsilon_high=0.2, aggregate=sequence_mean())",
    "rec(aggregate=sequence_mean())",  # a mask, and a detached weight
    "guard(ratio_low=0.8, ratio_high=1.2, cut_value='zero') + factor() + sequence_mean()",
    "guard(ratio_low=0.8, gate='negative') + guard(ratio_high=1.2, gate='positive') + factor() + sequence_mean()",
    "guard(ratio_low=0.8) + guard(ratio_high=1.2) + factor() + sequence_mean()",
    "grpo() + guard(ratio_low=0.5, ratio_high=2.0)",  # a wider one beside it
    "grpo() + guard(measure='k3', radius=inf)",
    "grpo() + grpo(epsilon=0.3)",
])  # fmt: skip
def test_grpo_by_other_words(text: str) -> None:
    other = klamp.parse(text)
    assert canonical(other) == canonical(klamp.parse("grpo()"))
    assert hash(canonical(other)) == hash(canonical(klamp.parse("grpo()")))
    assert torch.allclose(gradient(other, BATCH), gradient(klamp.parse("grpo()"), BATCH), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("text", [
    "grpo(epsilon=0.2000001)", "ppo()", "grpo(aggregate=sequence_mean(rows='all'))", "grpo() + kl_reference()",
    "guard(ratio_low=0.8, ratio_high=1.2, ratio='new/rollout') + factor() + sequence_mean()",
    "guard(ratio_low=0.8, ratio_high=1.2, gate='always') + factor() + sequence_mean()",
    "guard(ratio_low=0.8, ratio_high=1.2, action='drop') + factor() + sequence_mean()",
    "guard(ratio_low=0.8, ratio_high=1.2, scope='sequence') + factor() + sequence_mean()",
    "guard(ratio_low=0.8, ratio_high=1.2, action='rollback', strength=0.3) + factor() + sequence_mean()",
    "guard(measure='pearson', radius=linear(start=0.02, end=0.02, steps=9)) + factor() + sequence_mean()",
    "guard(ratio_low=0.8, ratio_high=1.2) + sequence_mean()", "grpo() + tis()", "sapo()",
])  # fmt: skip
def test_what_is_not_grpo(text: str) -> None:
    assert canonical(klamp.parse(text)) != canonical(klamp.parse("grpo()"))


def test_gates_that_cut_the_same() -> None:
    both = klamp.parse("guard(ratio_high=1.3, gate='positive') + guard(ratio_high=1.3, gate='negative') + factor()")
    assert canonical(both) == canonical(klamp.parse("guard(ratio_high=1.3, gate='always') + factor()"))
    assert canonical(klamp.parse("dual_clip(c=3.0)")) == canonical(klamp.parse("two_sided(delta=3.0)"))
    drop = "guard(ratio_high=1.3, gate='{}', action='drop') + factor()"  # a token with A = 0 leaves the mean
    assert canonical(klamp.parse(drop.format("always"))) != canonical(klamp.parse(drop.format("positive")))


def test_measures_of_one_family() -> None:
    text = "guard(measure='{}', radius=0.02, scope='sequence', reduce='mean_after') + factor()"
    assert canonical(klamp.parse(text.format("k3"))) == canonical(klamp.parse(text.format("power(0.0)")))
    assert canonical(klamp.parse(text.format("k3"))) != canonical(klamp.parse(text.format("k2")))


def test_cut_values_count_where_the_gradient_reads_them() -> None:
    text = "guard(ratio_low=0.8, ratio_high=1.2, cut_value='{}') + {} + sequence_mean()"
    for other in ("factor(scope='sequence', clipped=True)",
                  "factor() + guard(ratio_low=0.7, ratio_high=1.3, action='rollback', strength=0.3)"):  # fmt: skip
        one, two = (klamp.parse(text.format(value, other)) for value in ("bound", "zero"))
        assert not torch.equal(gradient(one, BATCH), gradient(two, BATCH))
        assert canonical(one) != canonical(two)


@given(SPECS, SPECS)
def test_equal_means_equal_gradients(one: klamp.Spec, other: klamp.Spec) -> None:
    assert canonical(one) == canonical(klamp.parse(str(one)))
    if canonical(one) == canonical(other):
        assert torch.allclose(gradient(one, BATCH), gradient(other, BATCH), rtol=1e-12, atol=1e-300)


def test_all_pairs_of_guards_and_presets() -> None:
    """Of all that are called equal the gradients are equal."""
    specs = [klamp.parse(text) for text in USUAL if not klamp.parse(text).needs - BATCH.offers]
    specs = [spec for spec in specs if spec.mean.kind != "sequence_sum" or spec.mean.divisor]
    specs += [
        spec for guards in combinations(GUARDS, 2) for factor in FACTORS[:2] if (spec := compose(*guards, factor))
    ]
    groups: dict[object, list[klamp.Spec]] = {}
    for spec in specs:
        groups.setdefault(canonical(spec), []).append(spec)
    found = [group for group in groups.values() if len(group) > 1]
    assert len(found) > 20
    for group in found:
        wanted = gradient(group[0], BATCH)
        for other in group[1:]:
            assert torch.allclose(gradient(other, BATCH), wanted, rtol=1e-12, atol=1e-300), (group[0], other)


def test_later_equal_specs_run_the_first_text() -> None:
    texts = ["dapo()", "grpo()", "trust_region(measure='pearson', radius=0.02)", "grpo(epsilon=0.2)", "dapo()"]
    found = unify([klamp.parse(text) for text in texts])
    assert found == [("dapo()", None), ("grpo()", None), ("grpo()", 1), ("grpo()", 1), ("dapo()", 0)]
    assert unify([]) == []


# --- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("texts", "names"), [
    (["grpo()", "dapo(epsilon_high=0.28)", "atr_grpo()"], ["grpo", "dapo", "atr_grpo"]),
    (["grpo()", "dapo(aggregate=sequence_mean())"], ["grpo", "dapo"]),  # all share the aggregate
    (["ppo()", "ppo(aggregate=sequence_mean())"], ["ppo", "ppo(aggregate=sequence_mean)"]),
    (["grpo() + kl_reference(beta=0.1)", "atr_grpo() + kl_reference(beta=0.1)"], ["grpo", "atr_grpo"]),
    (["atr_grpo(delta=0.023143551314209747)", "grpo()"], ["atr_grpo(delta=0.02314)", "grpo"]),
    (["atr_grpo(delta=0.0231435)", "atr_grpo(delta=0.0231439)"], ["atr_grpo(delta=0.0231435)", "atr_grpo(delta=0.0231439)"]),
    (["grpo()", "grpo()", "grpo()"], ["grpo", "grpo (2)", "grpo (3)"]),
    (["trust_region('js', 0.02)"], ["trust_region(measure='js', radius=0.02)"]),
    (["dual_clip(base=dapo())"], ["dual_clip(base=dapo)"]),
    (["grpo(epsilon=0.2)", "grpo()"], ["grpo(epsilon=0.2)", "grpo()"]),
    ([], []),
])  # fmt: skip
def test_labels(texts: list[str], names: list[str]) -> None:
    assert labels([klamp.parse(text) for text in texts]) == names


@given(st.lists(st.one_of(SPECS, st.sampled_from(USUAL).map(klamp.parse)), max_size=6))
def test_labels_and_folders_are_distinct(specs: list[klamp.Spec]) -> None:
    names = labels(specs)
    assert len(set(names)) == len(names) == len(specs)
    assert all(0 < len(name) <= LONGEST + 5 for name in names)
    folders = [slug(name) for name in names]
    assert len({folder.lower() for folder in folders}) == len(folders)
    assert all(re.fullmatch(r"[a-z0-9_][a-z0-9._-]*[a-z0-9_]|[a-z0-9]", folder) for folder in folders)


def test_folders() -> None:
    assert [slug(name) for name in ("grpo", "atr_grpo", "dppo_tv")] == ["grpo", "atr_grpo", "dppo_tv"]
    near = ["atr_grpo(delta=0.02)", "atr_grpo(delta=0.02 )", "ATR_GRPO(delta=0.02)", "atr_grpo-delta-0.02"]
    assert len({slug(name) for name in near}) == 4
    assert slug("atr_grpo(delta=0.02)").startswith("atr_grpo-delta-0.02-")
    for odd in ("", "..", "/", "../../etc", "a/b", "\u00e9", " ", ".hidden", "x" * 300, "con\x00"):
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", slug(odd)), odd
        assert len(slug(odd)) <= 50


def test_every_pair_of_presets_has_distinct_names() -> None:
    for one, other in product(USUAL, repeat=2):
        names = labels([klamp.parse(one), klamp.parse(other)])
        assert names[0] != names[1]
        assert one == other or len({slug(name) for name in names}) == 2


def test_no_torch_at_load() -> None:
    code = (
        "import sys, klamp.compare.specs, klamp.compare.calibrate, klamp.compare.foreign; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
