"""A comparison's radii: matched to a reference by closed forms, by bounds, and by the share of gradient removed."""

from __future__ import annotations

import dataclasses
import itertools
import math

import mpmath
import pytest
import torch
from conftest import load
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import measures as oracle
from test_measures import named

import klamp
from klamp.compare.calibrate import RULES, Calibrated, calibrate
from klamp.diff import standard_batch
from klamp.measures import MEASURES

FILE = load("calibration")["sym_0.2"]
IN_FILE = {"upper": "upper", "lower": "lower", "log_width": "log_width", "worst_tv": "worst_case_tv"}
SIZES = tuple(IN_FILE)
GRPO = klamp.parse("grpo()")
STEPS = [standard_batch(0), standard_batch(1)]


def region(spec: klamp.Spec) -> klamp.Region:
    (guard,) = spec.guards
    assert isinstance(guard.region, klamp.Region)
    return guard.region


def size(how: str, low: float, high: float) -> float:
    """The rules, from the theory (1.5), of bounds of w."""
    if how == "worst_tv":
        return (high - 1) * (1 - low) / (high - low)
    return {"upper": high, "lower": low, "log_width": math.log(high / low) if low else math.inf}[how]


def check(found: Calibrated, reference: klamp.Spec, given_: klamp.Spec, rel: float = 1e-12) -> None:
    assert klamp.parse(str(found.spec)) == found.spec
    assert (found.spec.factors, found.spec.penalties) == (given_.factors, given_.penalties)
    assert found.spec.aggregate == given_.aggregate
    wanted = size(found.how, region(reference).low, region(reference).high)
    assert found.reference == pytest.approx(wanted, rel=1e-14)
    assert found.before == pytest.approx(size(found.how, region(given_).low, region(given_).high), rel=1e-14)
    assert found.after == pytest.approx(size(found.how, region(found.spec).low, region(found.spec).high), rel=1e-14)
    assert found.after == pytest.approx(wanted, rel=rel)
    for guard, before in zip(found.spec.guards, given_.guards, strict=True):
        assert dataclasses.replace(guard, region=before.region) == before


# --- by bounds ------------------------------------------------------------------------------------------------


def test_k3_in_closed_form() -> None:
    """KL3 is w - 1 - log w, so the radius at which a bound is w is known."""
    for how, w, wanted in (("upper", 1.2, 0.017678443), ("lower", 0.8, 0.023143551)):
        found = calibrate(GRPO, klamp.parse("atr_grpo()"), how)
        assert found.radius_after == pytest.approx(float(mpmath.mpf(w) - 1 - mpmath.log(w)), rel=1e-14)
        assert found.radius_after == pytest.approx(wanted, abs=5e-10)
        assert str(found.spec) == f"atr_grpo(delta={found.radius_after!r})"
        assert found.radius_before == 0.02
        assert found.changed
        check(found, GRPO, klamp.parse("atr_grpo()"), 1e-14)


@pytest.mark.parametrize("how", SIZES)
@pytest.mark.parametrize("key", [key for key in FILE if not key.startswith("_")])
def test_radii_of_the_file(key: str, how: str) -> None:
    given_ = klamp.parse(f"trust_region(measure='{named(key)}', radius=0.05)")
    found = calibrate(GRPO, given_, how)
    case = FILE[key][IN_FILE[how]]
    assert found.radius_after == pytest.approx(case["delta_norm"], rel=1e-12)
    assert (region(found.spec).low, region(found.spec).high) == pytest.approx((case["l"], case["u"]), rel=1e-12)
    check(found, GRPO, given_)


@pytest.mark.parametrize("how", SIZES)
@pytest.mark.parametrize("a", [-3.0, -2.0, -1.0, 0.0, 0.5, 1.0, 2.0])
def test_the_power_family_by_its_bounds(a: float, how: str) -> None:
    given_ = klamp.parse(f"power_clip(a={a}, radius=0.1)")
    found = calibrate(GRPO, given_, how)
    check(found, GRPO, given_)
    assert str(found.spec).startswith("power_clip(a=")
    for x in (region(found.spec).log_low, region(found.spec).log_high):  # both bounds lie on the radius
        assert float(oracle.value(f"power({a!r})", x)) == pytest.approx(found.radius_after, rel=1e-12)


def test_every_rule_is_exact_for_the_reference_itself() -> None:
    for text in ("ppo()", "grpo()", "power_clip(a=2.0)", "trust_region(measure='pearson', radius=0.02)"):
        for how in SIZES:
            found = calibrate(GRPO, klamp.parse(text), how)
            assert str(found.spec) == str(klamp.parse(text))
            assert found.factor == 1.0
            assert not found.changed
            assert "already" in found.note


@pytest.mark.parametrize(("text", "how", "wanted"), [
    ("dapo()", "upper", "dapo(epsilon_low="),
    ("dapo(epsilon_low=0.1, epsilon_high=0.4)", "log_width", "dapo(epsilon_low="),
    ("dapo(epsilon_high=0.3, aggregate=sequence_mean())", "upper", "dapo(epsilon_low=0.14"),
    ("dapo() + tis(high=3.0) + kl_reference(beta=0.1)", "worst_tv", "dapo(epsilon_low="),
    ("gmpo()", "log_width", "gmpo(epsilon="),
    ("grpo(epsilon=0.3)", "log_width", "guard(ratio_low="),  # one epsilon cannot say it
    ("rollback(alpha=0.5, epsilon=0.3)", "upper", "guard(ratio_low="),
    ("rec(epsilon_low=0.3)", "lower", "rec(epsilon_low="),
    ("guard(ratio_high=1.3) + factor()", "upper", "guard(ratio_high=1.2) + factor()"),
    ("trust_region(measure='k3', radius_low=0.01, radius_high=0.03)", "upper", "trust_region(measure='k3', radius_low="),
    ("trust_region(measure='k2', radius=0.1, base=dapo())", "lower", "trust_region(measure='k2', radius="),
    ("dapo() + icepop()", "upper", "dapo(epsilon_low="),
])  # fmt: skip
def test_two_numbers_by_one_factor_and_in_their_own_words(text: str, how: str, wanted: str) -> None:
    given_ = klamp.parse(text)
    found = calibrate(GRPO, given_, how)
    assert str(found.spec).startswith(wanted)
    assert klamp.parse(str(found.spec)) == found.spec
    assert found.after == pytest.approx(found.reference, rel=1e-12)
    assert (found.spec.factors, found.spec.penalties, found.spec.mean) == (
        given_.factors,
        given_.penalties,
        given_.mean,
    )
    old, new = ([g.region for g in spec.guards if g.ratio == "new/old"][0] for spec in (given_, found.spec))  # noqa: RUF015
    if old.measure is None:
        for side in ("log_low", "log_high"):
            if math.isfinite(getattr(old, side)):
                assert getattr(new, side) == pytest.approx(found.factor * getattr(old, side), rel=1e-12)
    else:
        for side in ("radius_low", "radius_high"):
            assert getattr(new, side) == pytest.approx(found.factor * getattr(old, side), rel=1e-12)


def test_digits_are_kept() -> None:
    found = calibrate(GRPO, klamp.parse("dapo()"), "upper")
    assert region(found.spec).high == 1.2
    assert region(calibrate(GRPO, klamp.parse("dapo(epsilon_low=0.3)"), "lower").spec).low == 0.8
    found = calibrate(klamp.parse("atr_grpo()"), klamp.parse("grpo()"), "log_width")
    assert klamp.parse(str(found.spec)) == found.spec


@given(
    st.sampled_from([name for name in MEASURES if name not in ("k1",)]), st.floats(1e-6, 5.0), st.floats(1e-6, 0.9),
    st.floats(1e-6, 5.0), st.sampled_from(SIZES),
)  # fmt: skip
def test_any_measure_to_any_clip(name: str, radius: float, down: float, up: float, how: str) -> None:
    reference = klamp.parse(f"dapo(epsilon_low={down!r}, epsilon_high={up!r})")
    given_ = klamp.parse(f"trust_region(measure='{name}', radius={radius!r})")
    found = calibrate(reference, given_, how)
    # a bound near 1 keeps 1e-16 of w, not of w - 1
    check(found, reference, given_, 1e-9)
    assume(found.changed)
    assert found.radius_after == pytest.approx(found.factor * radius, rel=1e-12)


@pytest.mark.parametrize(("reference", "text", "how", "note"), [
    ("grpo()", "cispo()", "log_width", "cispo has no guard: nothing to match"),
    ("grpo()", "reinforce()", "removed", "reinforce has no guard"),
    ("grpo()", "gspo()", "upper", "gspo bounds the mean over a sequence, in other units"),
    ("grpo()", "dppo_tv()", "upper", "dppo_tv has no interval of the ratio; the rule removed may match it"),
    ("grpo()", "m2po()", "upper", "no interval"),
    ("grpo()", "entropy_mask()", "removed", "no radius to change"),
    ("grpo()", "dual_clip()", "upper", "2 guards"),
    ("grpo()", "icepop()", "upper", "only old/rollout, which no update moves"),
    ("grpo()", "atr_grpo(delta=linear(start=0.1, end=0.01, steps=5))", "upper", "moves"),
    ("grpo()", "atr_grpo(delta=adaptive(start=0.1, kl=0.001))", "removed", "moves"),
    ("gspo()", "grpo()", "upper", "the reference has no interval"),
    ("cispo()", "grpo()", "upper", "the reference has no interval to match: cispo has no guard"),
    ("guard(ratio_high=1.2) + factor()", "grpo()", "lower", "the reference has no bound there"),
    ("grpo()", "guard(ratio_high=1.2) + factor()", "lower", "no factor moves"),
    ("grpo()", "trust_region(measure='k1', radius=0.1)", "upper", "no factor"),
    ("grpo()", "trust_region(measure='k1', radius=0.1)", "log_width", "side without a bound"),
    ("grpo()", "trust_region(measure='k3', radius=0.0)", "upper", "no factor"),
    ("grpo()", "trust_region(measure='k3', radius=inf)", "log_width", "no factor"),
    ("guard(ratio_high=8.0) + factor()", "trust_region(measure='renyi(0.5)', radius=0.02)", "upper",
     "renyi(0.5) saturates: the upper bound comes no nearer than 5.82843"),
])  # fmt: skip
def test_what_cannot_be_matched_stays_as_it_is(reference: str, text: str, how: str, note: str) -> None:
    given_ = klamp.parse(text)
    found = calibrate(klamp.parse(reference), given_, how, STEPS)
    assert found.spec is given_
    assert not found.changed
    assert note in found.note
    assert found.after == found.before
    assert found.radius_after == found.radius_before


def test_other_ratios_are_said() -> None:
    found = calibrate(GRPO, klamp.parse("rollout_is(epsilon_high=0.5)"), "upper")
    assert found.changed
    assert found.note == "its ratio is new/rollout, the reference's new/old"


def test_a_point_as_the_reference() -> None:
    point = klamp.parse("grpo(epsilon=0.0)")
    for how in SIZES:
        found = calibrate(point, klamp.parse("atr_grpo()"), how)
        assert found.radius_after == 0.0
        assert region(found.spec).low == region(found.spec).high == 1.0
        assert region(calibrate(point, klamp.parse("dapo()"), how).spec).high == 1.0


def test_what_is_refused() -> None:
    with pytest.raises(klamp.UserError, match="did you mean 'log_width'"):
        calibrate(GRPO, GRPO, "log_with")
    for batches in (None, []):
        with pytest.raises(klamp.UserError, match="give batches"):
            calibrate(GRPO, GRPO, "removed", batches)


# --- by the share removed -------------------------------------------------------------------------------------


def share(spec: klamp.Spec, batches: list[klamp.Batch]) -> float:
    """guard/removed_active_share, as the objective reports it."""
    shown = sum((klamp.Objective(spec)(batch).metrics for batch in batches), start=0).show()  # type: ignore[attr-defined]
    return float(shown["guard/removed_active_share"])


REMOVING = [
    "atr_grpo()", "power_clip(a=-3.0)", "dapo()", "grpo(epsilon=0.4)", "gmpo()", "gspo()", "luspo()", "segment()", "dppo_tv()",
    "dppo_kl()", "dppo_kl(ratio='new/rollout')", "m2po()", "rollout_is()", "ipo()", "rollback()", "atr_grpo() + sequence_mask()",
    "trust_region(measure='k3', radius=0.02, scope='sequence', reduce='mean_after')", "trust_region(measure='pearson', radius=0.9)",
    "trust_region(measure='exact_tv', radius=0.02)", "guard(ratio_low=0.1, ratio_high=5.0, action='drop') + factor()",
    "guard(measure='k3', radius=0.5, action='drop_row') + factor()",
]  # fmt: skip


@pytest.mark.parametrize("text", REMOVING)
def test_the_share_removed_is_the_references(text: str) -> None:
    given_ = klamp.parse(text)
    found = calibrate(GRPO, given_, "removed", STEPS)
    assert klamp.parse(str(found.spec)) == found.spec
    assert found.reference == pytest.approx(share(GRPO, STEPS), rel=1e-12)
    assert found.before == pytest.approx(share(given_, STEPS), rel=1e-12)
    assert found.after == pytest.approx(share(found.spec, STEPS), rel=1e-12)
    if not found.changed:
        assert found.note == "matches the reference already"
    elif found.note:  # responses are cut as wholes: no radius removes the same number
        assert found.note.startswith("nearest: ")
        assert found.after == pytest.approx(found.reference, abs=0.02)
    else:
        assert found.after == found.reference


def test_nearest_is_nearest() -> None:
    """Of all radii between the divergences of two responses none removes a nearer number of tokens."""
    spec = "trust_region(measure='k3', radius={!r}, scope='sequence', reduce='mean_after')"
    found = calibrate(GRPO, klamp.parse(spec.format(0.02)), "removed", STEPS)
    (guard,) = found.spec.guards
    levels = sorted({float(x) for batch in STEPS for x in guard.measured(batch).flatten()})
    between = [math.sqrt(a * b) for a, b in itertools.pairwise(levels) if a > 0.0]
    best = min(abs(share(klamp.parse(spec.format(radius)), STEPS) - found.reference) for radius in between)
    assert abs(found.after - found.reference) == pytest.approx(best, abs=1e-12)


def test_where_nothing_is_removed() -> None:
    """The first update of a rollout is on-policy: there is nothing to match."""
    batch = standard_batch(0)
    batch.logp_old = batch.logp_new.clone()
    found = calibrate(GRPO, klamp.parse("atr_grpo()"), "removed", [batch])
    assert "already" in found.note  # neither removes anything
    wide = calibrate(
        klamp.parse("grpo(epsilon=0.99999)"),
        klamp.parse("dppo_kl(ratio='new/rollout', delta=1e-9)"),
        "removed",
        [batch],
    )
    assert "removes nothing" in wide.note
    assert not wide.changed


def test_a_share_that_is_out_of_reach() -> None:
    """A region around 1 removes no token that moves inward: half of them stay whatever the radius."""
    everything = klamp.parse("guard(ratio_low=1.0, ratio_high=1.0, gate='always') + factor()")
    found = calibrate(everything, klamp.parse("atr_grpo()"), "removed", STEPS)
    assert not found.changed
    assert "no radius of atr_grpo removes" in found.note
    assert "none more than 0.4" in found.note or "none more than 0.5" in found.note
    mixed = calibrate(
        klamp.parse("grpo(epsilon=0.9)"), klamp.parse("atr_grpo() + entropy_mask(quantile=0.5)"), "removed", STEPS
    )
    assert "none less than" in mixed.note


def test_batches_that_lack_what_a_spec_needs() -> None:
    batch = standard_batch(0)
    batch.logp_rollout = None
    found = calibrate(GRPO, klamp.parse("rollout_is()"), "removed", [batch])
    assert "cannot be measured on these batches" in found.note
    assert "logp_rollout" in found.note
    batch.advantages = torch.zeros_like(batch.advantages)
    assert "nothing to measure" in calibrate(GRPO, klamp.parse("atr_grpo()"), "removed", [batch]).note


def test_a_mean_that_is_not_said_yet_does_not_matter() -> None:
    found = calibrate(klamp.parse("dr_grpo()"), klamp.parse("dr_grpo(epsilon=0.3)"), "removed", STEPS)
    assert found.after == found.reference == pytest.approx(share(GRPO, STEPS), rel=1e-12)


def test_ratios_that_overflow_are_counted() -> None:
    batch = standard_batch(0)
    batch.logp_old = batch.logp_old - 800.0 * (torch.arange(batch.shape[1]) % 7 == 0)
    found = calibrate(GRPO, klamp.parse("dppo_tv()"), "removed", [batch])
    assert found.note == "" or found.note.startswith("nearest")


def test_the_rules_are_said() -> None:
    assert set(RULES) == {*SIZES, "removed"}
