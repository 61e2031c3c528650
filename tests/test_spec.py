"""Specs: text, dictionary, hash, pickle, composition, presets, and every way to be refused."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from typing import Any

import pytest
from custom_parts import CONFIDENT, cosh_gap, quartic, surprised
from hypothesis import given, settings
from hypothesis import strategies as st

import klamp
from klamp.factors import Cap, SoftGate
from klamp.guards import GATES, RATIOS, Gate
from klamp.language import PARTS, PRESETS
from klamp.measures import MEASURES
from klamp.penalties import EntropyBonus, FPenalty, KLReference

NAMES = """
atr_grpo bnpo cispo cispo_absolute clip_cov dapo decoupled_ppo divergence_gate dppo_kl dppo_topk_kl dppo_topk_tv dppo_tv dr_grpo dro dual_clip
entropy_mask fipo geometric_mask gmpo gpg grpo gspo gspo_token icepop ipo kl_cov luspo m2po mis opsm power_clip ppo ppo_kl_adaptive
ppo_kl_penalty ppo_lowprob_relaxed real rec reinforce rollback rollout_is rs_k1 rs_k2 rs_k3 sapo segment sequence_mask
tis tis_loss topr truly_ppo trust_region two_sided vaco vespo
"""


def survive(spec: klamp.Spec) -> None:
    """text, dictionary through JSON, pickle and copies all give the same value back."""
    text, data = str(spec), json.loads(json.dumps(spec.to_dict(), allow_nan=False))
    for twin in (klamp.parse(text), klamp.Spec.from_dict(data), pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert twin == spec
        assert hash(twin) == hash(spec)
        assert str(twin) == text
    plain = klamp.Spec(spec.guards, spec.factors, spec.penalties, spec.aggregate)  # without the text it was made from
    assert klamp.parse(str(plain)) == spec


# --- presets --------------------------------------------------------------------------------------------------


def test_the_presets() -> None:
    assert klamp.list_presets() == NAMES.split()
    for name, found in PRESETS.items():
        assert found.name == name
        assert len(found.equation) > 10
        assert re.search(r"(19|20)\d\d|TRL|ROLL|verl|SkyRL|prime-rl|ms-swift|open-instruct|arXiv", found.citation), name
        assert found.summary.endswith(".")


@pytest.mark.parametrize("name", [name for name in NAMES.split() if name != "trust_region"])
def test_presets_survive(name: str) -> None:
    spec = klamp.preset(name)
    assert str(spec) == f"{name}()"
    assert spec == klamp.parse(name) == klamp.parse(f"{name}()")
    survive(spec)
    survive(klamp.preset(name, aggregate="prompt_mean()", penalty=["kl_reference(beta=0.1)", EntropyBonus()]))


def test_what_presets_are_made_of() -> None:
    grpo = klamp.preset("grpo", epsilon=0.3)
    (guard,), (factor,) = grpo.guards, grpo.factors
    assert (guard.region.low, guard.region.high) == (0.7, 1.3)
    assert (guard.ratio, guard.scope, str(guard.gate), guard.cut_value) == ("new/old", "token", "outward", "bound")
    assert factor.of == ("new/old", "token", "mean", 1.0)
    assert grpo.mean == klamp.Aggregate("sequence_mean")
    dapo = klamp.preset("dapo").guards[0].region
    assert (dapo.low, dapo.high) == (0.8, 1.28)
    assert klamp.preset("dapo").mean.kind == "token_mean"
    assert klamp.preset("dr_grpo", divisor=64).mean == klamp.Aggregate("sequence_sum", 64)
    gspo = klamp.preset("gspo")
    assert (gspo.guards[0].scope, gspo.guards[0].reduce, gspo.factors[0].scope) == ("sequence", "mean", "sequence")
    assert (gspo.guards[0].region.low, gspo.guards[0].region.high) == (1.0 - 3e-4, 1.0 + 4e-4)
    assert klamp.preset("gspo_token") == gspo
    assert klamp.preset("cispo").factors[0].transform == Cap(0.0, 5.0)
    assert klamp.preset("sapo").factors[0].transform == SoftGate(1.0, 1.05)
    assert klamp.preset("sapo").guards == klamp.preset("reinforce").guards == ()
    assert klamp.preset("reinforce").factors == ()
    dual = {str(g.gate): (g.region.low, g.region.high) for g in klamp.preset("dual_clip", c=4.0, epsilon=0.1).guards}
    assert dual == {"outward": (0.9, 1.1), "negative": (0.0, 4.0)}
    mask = klamp.preset("sequence_mask", high=2.0, low=0.5)
    assert (mask.guards[0].ratio, mask.guards[0].reduce, mask.guards[0].cut_value) == ("old/rollout", "sum", "zero")
    assert mask.needs == {"logp_rollout"}
    assert mask.aggregate is None
    assert klamp.preset("ppo_kl_penalty", beta=0.3, target=0.02).penalties == (
        FPenalty(MEASURES["k3"], 0.3, target=0.02),
    )


def test_atr_grpo_is_grpo_with_the_measure_replaced() -> None:
    atr = klamp.preset("atr_grpo", delta=0.02)
    assert (
        atr
        == klamp.preset("trust_region", "k3", 0.02)
        == klamp.parse("trust_region('k3', 0.02, base=grpo(epsilon=0.9))")
    )
    assert atr == klamp.preset("power_clip", a=0, radius=0.02) or atr.guards[0].region.log_low == pytest.approx(
        klamp.preset("power_clip", a=0, radius=0.02).guards[0].region.log_low, rel=1e-15
    )
    grpo = klamp.preset("grpo")
    assert (atr.factors, atr.penalties, atr.aggregate) == (grpo.factors, grpo.penalties, grpo.aggregate)
    region = atr.guards[0].region
    assert (region.low, region.high) == pytest.approx((0.8131051152131157, 1.2135497071517296), rel=1e-14)


def test_trust_region_takes_the_rest_from_its_base() -> None:
    spec = klamp.preset(
        "trust_region", "js", 0.03, base="dr_grpo(divisor=8) + sequence_mask(high=2.0) + kl_reference()"
    )
    ratios = sorted(guard.ratio for guard in spec.guards)
    assert ratios == ["new/old", "old/rollout"]  # the mask stays, the clip is replaced
    assert spec.mean == klamp.Aggregate("sequence_sum", 8)
    assert spec.penalties == (KLReference(),)
    survive(spec)
    sequence = klamp.preset("trust_region", "k3", 1e-7, scope="sequence", base="gspo")
    assert sequence.guards[0].cut_value == "bound"
    assert klamp.preset("trust_region", "k3", 0.1, base="reinforce").guards[0].cut_value == "zero"
    assert klamp.preset("trust_region", "k3", 0.1, ratio="new/rollout").guards[0].cut_value == "zero"
    sides = klamp.preset("trust_region", "k3", radius_low=0.01, radius_high=0.05)
    assert (sides.guards[0].region.radius_low, sides.guards[0].region.radius_high) == (0.01, 0.05)
    survive(sides)
    assert klamp.preset("trust_region", MEASURES["k3"], 0.02) == klamp.preset("atr_grpo")


def test_every_preset_takes_aggregate_and_penalty() -> None:
    for name in NAMES.split():
        arguments: dict[str, Any] = {"measure": "k3", "radius": 0.1} if name == "trust_region" else {}
        spec = klamp.preset(name, **arguments, aggregate=klamp.Aggregate("prompt_mean"), penalty=KLReference(0.5))
        assert spec.mean.kind == "prompt_mean"
        assert KLReference(0.5) in spec.penalties
        assert spec.needs >= {"group", "logp_ref"}
        survive(spec)


# --- values ---------------------------------------------------------------------------------------------------


def test_specs_are_frozen_hashable_sets_of_parts() -> None:
    spec = klamp.parse("grpo(epsilon=0.2)")
    with pytest.raises(AttributeError):
        spec.guards = ()  # type: ignore[misc]
    assert len({spec, klamp.parse("grpo"), klamp.parse("grpo(0.2)"), klamp.parse("grpo( epsilon = 2e-1 )")}) == 1
    assert spec != klamp.parse("grpo(epsilon=0.21)")
    both = klamp.parse("sequence_mask(high=3.0) + grpo()")
    assert both == klamp.parse("grpo() + sequence_mask(high=3.0)")
    assert hash(both) == hash(klamp.parse("grpo() + sequence_mask(high=3.0)"))
    assert klamp.parse(spec) is spec


def test_numbers_have_one_value_however_written() -> None:
    pairs = [("atr_grpo(delta=1)", "atr_grpo(delta=1.0)"), ("cispo_absolute(high=5)", "cispo_absolute(high=5.0)"),
             ("factor(cap(high=5)) + factor(cap(high=5.0), ratio='old/rollout')",
              "factor(cap(high=5.0)) + factor(cap(high=5), ratio='old/rollout')"),
             ("guard(measure='power(2)', radius=1)", "guard(measure='power(2.0)', radius=1.0)"),
             ("guard(ratio_high=inf)", "guard()")]  # fmt: skip
    for one, other in pairs:
        assert klamp.parse(one) == klamp.parse(other)
        assert hash(klamp.parse(one)) == hash(klamp.parse(other))


def test_composition() -> None:
    one, two = klamp.parse("atr_grpo(delta=0.02)"), klamp.parse("sequence_mask(high=3.0)")
    both = one + two
    assert str(both) == "atr_grpo(delta=0.02) + sequence_mask(high=3.0)"
    assert both == klamp.parse(str(both)) == two + one
    assert len(both.guards) == len(both.factors) == 2
    assert both.aggregate == one.aggregate
    assert one + klamp.Factor(ratio="old/rollout") == klamp.parse("atr_grpo + factor(ratio='old/rollout')")
    assert one + KLReference(0.1) == klamp.parse("atr_grpo + kl_reference(beta=0.1)")
    assert two + klamp.Aggregate("token_mean") == klamp.parse("sequence_mask + token_mean")
    assert one + klamp.parse("guard(ratio_high=3.0, gate='negative')").guards[0] == klamp.parse(
        "atr_grpo + guard(ratio_high=3.0, gate='negative')"
    )
    three = one + two + EntropyBonus(0.1)
    assert three == one + (two + EntropyBonus(0.1))
    survive(three)


def test_the_empty_spec_adds_nothing() -> None:
    grpo = klamp.parse("grpo()")
    for spec in (klamp.Spec() + grpo, grpo + klamp.Spec(), klamp.Spec() + klamp.Spec() + grpo):
        assert spec == grpo
        survive(spec)


def test_needs_and_traits() -> None:
    assert klamp.parse("grpo").needs == frozenset()
    full = klamp.parse("grpo(aggregate=prompt_mean()) + sequence_mask() + kl_reference() + entropy_bonus()")
    assert full.needs == {"group", "logp_rollout", "logp_ref", "entropy"}
    assert full.traits == {"moves_unsampled"}
    assert klamp.parse("ppo_kl_penalty(target=0.1)").traits == {"adaptive"}
    assert klamp.parse("grpo").traits == frozenset()
    with pytest.raises(
        klamp.UserError, match=r"needs entropy, logp_ref \(.*\), which a bridge does not offer; it offers group"
    ):
        klamp.parse("grpo + kl_reference() + entropy_bonus()").require(frozenset({"group"}), "a bridge")


# --- random specs ---------------------------------------------------------------------------------------------

POSITIVE = st.floats(1e-6, 1e6)
RADIUS = st.one_of(st.floats(0.0, 1e6), st.just(math.inf), st.integers(0, 3))
MEASURE = st.one_of(
    st.sampled_from([*MEASURES, "custom_parts:quartic", "measure('custom_parts:cosh_gap', curvature=2)"]).map(
        klamp.measure
    ),
    st.floats(-1e4, 1e4).map(lambda a: klamp.measure(f"power({a!r})")),
    st.floats(-1e4, 1e4).map(lambda a: klamp.measure(f"renyi({a!r})")),
    st.just(klamp.Measure(cosh_gap, curvature=2)),
    st.just(klamp.Measure(quartic)),
)
REGION = st.one_of(
    st.builds(klamp.region, MEASURE, RADIUS),
    st.builds(lambda m, lo, hi: klamp.region(m, radius_low=lo, radius_high=hi), MEASURE, RADIUS, RADIUS),
    st.builds(lambda lo, hi: klamp.region(ratio_low=lo, ratio_high=hi), st.floats(0.0, 1.0),
              st.one_of(st.floats(1.0, 1e9), st.just(math.inf))),
)  # fmt: skip
SCOPED = st.one_of(st.just(("token", "mean")), st.just(("sequence", "mean")), st.just(("sequence", "sum")))
GATE = st.one_of(st.sampled_from(sorted(GATES)).map(GATES.get), st.just(Gate(surprised)), st.just(CONFIDENT))
GUARD = st.builds(
    lambda region, ratio, scoped, gate, cut: klamp.Guard(region, ratio, *scoped, gate, cut_value=cut),
    REGION, st.sampled_from(RATIOS), SCOPED, GATE, st.sampled_from(["bound", "zero"]),
)  # fmt: skip
FACTOR = st.builds(
    lambda cap, ratio, scoped: klamp.Factor(cap, ratio, *scoped),
    st.builds(Cap, st.floats(0.0, 1.0), st.one_of(st.floats(1.0, 1e9), st.just(math.inf), st.integers(1, 9))),
    st.sampled_from(RATIOS), SCOPED,
)  # fmt: skip
CARRIER = st.one_of(
    st.just(klamp.Factor()),
    st.just(klamp.Factor(scope="sequence")),
    st.builds(SoftGate, POSITIVE, POSITIVE).map(klamp.Factor),
)
PENALTY = st.one_of(
    st.builds(FPenalty, MEASURE, POSITIVE, st.sampled_from(["new/old", "new/rollout", "new/ref"])),
    st.builds(KLReference, POSITIVE, st.sampled_from(["k1", "k2", "k3"]), st.booleans()),
    st.builds(EntropyBonus, POSITIVE),
)
AGGREGATE = st.one_of(
    st.just(None),
    st.builds(klamp.Aggregate, st.sampled_from(["token_mean", "prompt_mean", "sequence_mean", "sequence_sum"])),
    st.builds(klamp.Aggregate, st.just("sequence_sum"), st.one_of(POSITIVE, st.integers(1, 9999)), st.sampled_from(["all", "nonempty"])),
)  # fmt: skip


@settings(max_examples=120)
@given(
    st.lists(GUARD, max_size=3), st.lists(FACTOR, max_size=3, unique_by=lambda f: f.of), st.lists(PENALTY, max_size=3),
    st.one_of(st.none(), CARRIER), AGGREGATE, st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_spec_survives(
    guards: list[Any], factors: list[Any], penalties: list[Any], carrier: Any, aggregate: Any, random: Any
) -> None:
    if carrier is not None:
        factors = [f for f in factors if f.of != carrier.of] + [carrier]
    spec = klamp.Spec(tuple(guards), tuple(factors), tuple(penalties), aggregate)
    if not spec.parts:
        return  # no text means no part; the empty spec has no text of its own
    survive(spec)
    for parts in (guards, factors, penalties):
        random.shuffle(parts)
    assert klamp.Spec(tuple(guards), tuple(factors), tuple(penalties), aggregate) == spec
    built = klamp.Spec()
    for part in spec.parts:
        built = built + part
    assert built == spec
    survive(built)


# --- refusals -------------------------------------------------------------------------------------------------

REFUSED = {
    "": "cannot read the spec ''.*write for example",
    "grpo(": "cannot read the spec",
    "grpo() dapo()": "cannot read the spec",
    "1": "cannot read '1'",
    "'grpo'": "cannot read",
    "grpo - dapo": "cannot read 'grpo - dapo'",
    "grpo + 3": "cannot read '3'",
    "grpo.x()": r"cannot read 'grpo.x\(\)'",
    "grpo(*[1])": "cannot read the value",
    "grpo(**{'a': 1})": r"\*\* is not allowed",
    "grpo(lambda: 1)": "cannot read the value 'lambda: 1'",
    "grpo(epsilon=10**10)": "cannot read the value",
    "os.system('x')": "cannot read",
    "grpo(epsilon=__import__('os'))": "unknown preset or part '__import__'",
    "\x00": "null bytes",
    "(" * 5000: "cannot read the spec",
    "grpo(epsilon=" + "-" * 5000 + "1)": "cannot read the spec|cannot read the value",
    "grp()": "unknown preset or part 'grp'; did you mean 'grpo'",
    "atr_gpro(delta=0.02)": "did you mean 'atr_grpo'",
    "klreference()": "did you mean 'kl_reference'",
    "grpo(eps=0.2)": "grpo has no argument 'eps'; did you mean 'epsilon'",
    "atr_grpo(radius=0.02)": "atr_grpo has no argument 'radius'; .*nown: aggregate, delta, penalty",
    "grpo(agregate=token_mean())": "did you mean 'aggregate'",
    "grpo(epsilon=0.2, epsilon=0.3)": "epsilon",
    "grpo(0.2, 0.3)": "too many positional",
    "grpo(0.2, epsilon=0.3)": "multiple values",
    "grpo(epsilon='0.2')": "epsilon='0.2' is not a number",
    "grpo(epsilon=True)": "epsilon=True is not a number",
    "grpo(epsilon=1.5)": r"the interval \[-0.5, 2.5\] does not contain w = 1",
    "grpo(epsilon=-0.1)": "is empty",
    "grpo(epsilon=nan)": "not a ratio",
    "atr_grpo(delta=-1)": "radius=-1 is not a radius",
    "atr_grpo(delta=nan)": "radius=nan is not a radius",
    "atr_grpo(delta=None)": "delta=None is not a number",
    "trust_region('k3')": "needs a radius",
    "trust_region(radius=0.1)": "measure",
    "trust_region('kk3', 0.1)": "unknown measure 'kk3'; did you mean 'k3'",
    "trust_region('k3', 0.1, gate='outwards')": "unknown gate 'outwards'; did you mean 'outward'",
    "trust_region('k3', 0.1, ratio='new/odl')": "did you mean 'new/old'",
    "trust_region('k3', 0.1, scope='sequences')": "did you mean 'sequence'",
    "trust_region('k3', 0.1, reduce='sum')": "needs scope='sequence'",
    "trust_region('k3', 0.1, base='grop')": "did you mean 'grpo'",
    "trust_region('k3', 0.1, base=7)": "7",
    "trust_region('nowhere_at_all:phi', 0.1)": "cannot be imported",
    "trust_region('custom_parts:shifted', 0.1)": "a divergence is 0 there",
    "power_clip(a=inf)": "power",
    "dual_clip(c=1.0)": "c=1.0 must exceed 1",
    "dual_clip(base=3)": "3",
    "cispo_absolute(high=0.28)": "bounds are absolute: for 1 \\+ 0.28 write 1.28",
    "sapo(tau_pos=0)": "temperatures must be finite and above 0",
    "dr_grpo(divisor=0)": "divisor=0 must be a finite number above 0",
    "sequence_mask(high=0.5)": "does not contain w = 1",
    "ppo_kl_penalty(beta=0)": "beta=0 must be a finite number above 0",
    "ppo_kl_penalty(target=-1)": "target=-1 must be",
    "guard(measure='k3')": "needs a radius",
    "guard(radius=0.1)": "a radius needs a measure",
    "guard(ratio_high=1.2, action='dropp')": "action='dropp' is unknown",
    "guard(ratio_high=1.2, cut_value='bounds')": "did you mean 'bound'",
    "guard(ratio_high=1.2, gate='custom_parts:nothing')": "cannot be imported",
    "guard(ratio_high=1.2, gaet='always')": "guard has no argument 'gaet'; did you mean 'gate'",
    "guard(ratio_high=1.2, gate=3)": "unknown gate 3",
    "factor(3)": "3",
    "factor(cap(high=0.5))": "must satisfy 0 <= low <= 1 <= high",
    "factor(cap(low=nan))": "must satisfy",
    "factor(cap(hihg=3))": "did you mean 'high'",
    "factor(ratio='old/new')": "ratio='old/new' is unknown",
    "kl_reference(estimator='k4')": "did you mean 'k",
    "kl_reference(beta=-0.1)": "leave the part out",
    "kl_reference(weighted='no')": "weighted",
    "f_penalty(ratio='old/rollout')": "is unknown",
    "entropy_bonus(coefficient=inf)": "must be a finite number above 0",
    "token_mean(divisor=3)": r"token_mean takes no divisor; sequence_sum\(divisor=...\) does",
    "token_mean(rows='all')": "does not average over rows",
    "sequence_mean(rows='every')": "rows='every' is unknown",
    "sequence_sum(divisor='x')": "is not a number",
    "grpo(aggregate=5)": "choose from token_mean",
    "grpo(aggregate=kl_reference())": "choose from token_mean",
    "grpo(aggregate='tokenmean')": "did you mean 'token_mean'",
    "grpo(penalty=token_mean())": "choose from f_penalty",
    "grpo + dapo": r"averages by sequence_mean\(\) and .* by token_mean\(\); pass aggregate=sequence_mean\(\)",
    "grpo + sapo": "two factors weigh by the same ratio",
    "grpo + gspo": "both carry the dependence on the new policy",
    "ppo_kl_penalty(target=0.1) + f_penalty(target=0.2)": "two adaptive penalties",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40].replace("\x00", "nul") or "empty")
def test_refusals(text: str) -> None:
    with pytest.raises(klamp.UserError, match=REFUSED[text]) as caught:
        klamp.parse(text)
    assert "__init__" not in str(caught.value)


def test_refusals_of_calls() -> None:
    with pytest.raises(klamp.UserError, match="unknown preset 'grop'; did you mean 'grpo'"):
        klamp.preset("grop")
    with pytest.raises(klamp.UserError, match="did you mean 'epsilon'"):
        klamp.preset("grpo", epsilonn=0.3)
    with pytest.raises(klamp.UserError, match="unknown part 'gard'; did you mean 'guard'"):
        klamp.Spec.from_dict({"guards": [{"part": "gard"}]})
    with pytest.raises(klamp.UserError, match="two factors weigh by the same ratio"):
        klamp.parse("grpo") + klamp.Factor(Cap(high=3.0))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        klamp.nothing  # noqa: B018


def test_reading_evaluates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.eval", lambda *_: pytest.fail("eval"))
    for text in ("__import__('os').system('false')", "grpo(epsilon=open('/dev/null'))", "grpo(epsilon=().__class__)"):
        with pytest.raises(klamp.UserError):
            klamp.parse(text)


def test_parts_and_presets_have_separate_names() -> None:
    assert not set(PARTS) & set(PRESETS)


@pytest.mark.parametrize("text", ["grpo(epsilon=-abc)", "grpo(aggregate=-identity)", f"guard(ratio_high=1{'0' * 400})",
                                  f"kl_reference(beta=1{'0' * 400})"])  # fmt: skip
def test_values_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(klamp.UserError, match="cannot read the value"):
        klamp.parse(text)


@pytest.mark.parametrize(
    "text", ["dapo(epsilon_high=1e308)", "power_clip(a=-1e308)", "power_clip(a=1e5, radius=1e300)", "trust_region(js, 5e-324)",
             "trust_region(log_ratio, 1e300)", "guard(ratio_low=1e-300, ratio_high=1e300)"],
)  # fmt: skip
def test_extreme_specs_are_explained(text: str) -> None:
    """Matching radii and coordinates end, and are numbers or absent, at the edges of the range of doubles."""
    from klamp.explain import explain

    for guard in explain(klamp.parse(text))["guards"]:
        where = guard["region"]["coordinates"]
        assert where is None or 0.0 < where["radius"] < math.inf


def test_a_delta_inside_the_clip_is_refused_with_the_spec_that_says_it() -> None:
    with pytest.raises(klamp.UserError, match=r"write two_sided\(delta=1.3\) with a base whose upper bound is 1.1"):
        klamp.parse("two_sided(delta=1.1, base='dapo(epsilon_high=0.3)')")
    assert klamp.parse("two_sided(delta=1.3, base='dapo(epsilon_high=0.3)')").guards


@pytest.mark.parametrize(("text", "says"), [
    ("factor(scope='sequence', clipped=True) + guard(ratio_low=0.8, ratio_high=1.2, action='rollback', strength=0.3)",
     "has a slope beyond them"),
    ("factor(scope='group', reduce='sum', clipped=True)", "needs no statistic of the step"),
    ("factor(transform=contrast(), scope='sequence', clipped=True)", "needs no statistic of the step"),
    ("factor(transform=contrast())", "it needs scope='sequence'; got scope='token'"),
])  # fmt: skip
def test_parts_that_would_contradict_each_other_are_refused(text: str, says: str) -> None:
    with pytest.raises(klamp.UserError, match=says):
        klamp.parse(text)
