"""Coordinates of any two-sided interval (theorem 1), and calibration of a radius to a ratio clip."""

from __future__ import annotations

import math

import pytest
from conftest import load
from hypothesis import assume, example, given
from hypothesis import strategies as st
from oracles import measures as oracle
from test_measures import named

import klamp
from klamp.regions import CALIBRATION_RULES, coordinates

CALIBRATION = load("calibration")["sym_0.2"]


@given(st.floats(-6.0, 2.5).map(lambda e: 10.0**e), st.floats(-6.0, 2.5).map(lambda e: 10.0**e))
@example(1e-6, 100.0)
@example(300.0, 1e-6)
@example(0.2, 0.2)
def test_every_interval_has_coordinates(down: float, up: float) -> None:
    """Every 0 < l < 1 < u is the region of exactly one power measure, and the solver finds it."""
    found = coordinates(-down, up)
    assert found is not None
    # the radius is where both ends agree, to the rounding of a |x|
    tolerance = 1e-12 + 1e-15 * abs(found.a) * max(down, up)
    ends = [oracle.value(f"power({found.a!r})", x) for x in (-down, up)]
    assert abs(ends[0] / ends[1] - 1) <= tolerance * 8
    assert found.radius == pytest.approx(float(ends[1]), rel=tolerance)
    if found.radius < 1e-300 or not math.isfinite(found.radius):
        return
    measure = klamp.measure(f"power({found.a!r})")
    region = klamp.region(measure, found.radius)
    for got, x in ((region.log_low, -down), (region.log_high, up)):
        slope = abs(float(measure.divergence_slope(x)))
        if slope * abs(x) < 1e-13 * found.radius:  # f is flat there: its double value equals that of w = 0
            assert got == -math.inf or abs(got) >= 20.0 / abs(found.a)
            continue
        rounding = 1e-15 * (2.0 + abs(found.a * x)) * found.radius / slope  # of the radius, carried to x
        assert got == pytest.approx(x, rel=1e-12, abs=4.0 * rounding)


@given(st.floats(-50.0, 50.0), st.floats(-8.0, 0.0).map(lambda e: 10.0**e))
def test_coordinates_of_a_power_region(a: float, radius: float) -> None:
    region = klamp.region(f"power({a!r})", radius)
    assume(math.isfinite(region.log_low) and abs(a * region.log_low) < 20.0)
    assert region.coordinates == (a, radius)
    found = coordinates(region.log_low, region.log_high)
    assert found is not None
    # x carries a few ulp, s = sqrt(2r) lies in x, and a is a second-order quantity: error eps / s
    assert found.a == pytest.approx(a, rel=1e-11, abs=2e-14 / math.sqrt(radius))
    assert found.radius == pytest.approx(radius, rel=1e-11)


@pytest.mark.parametrize(
    ("low", "high", "a", "radius"),
    [(0.8, 1.28, -2.303179443, 0.0277647255), (0.8, 1.2, 2.0, 0.02), (0.8, 1.25, -1.0, 0.025)],
)
def test_coordinates_in_the_theory(low: float, high: float, a: float, radius: float) -> None:
    found = klamp.region(ratio_low=low, ratio_high=high).coordinates
    assert found is not None
    assert found.a == pytest.approx(a, abs=1e-8)
    assert found.radius == pytest.approx(radius, abs=1e-8 if a < -2 else 1e-12)


def test_coordinates_far_out_and_none() -> None:
    gspo = klamp.region(ratio_low=1.0 - 3e-4, ratio_high=1.0 + 4e-4).coordinates
    assert gspo is not None
    assert gspo.a == pytest.approx(-2508.0, abs=1.0)
    assert klamp.region("k3", 0.02).coordinates == (0.0, 0.02)
    assert klamp.region("pearson", 0.02).coordinates == (2.0, 0.02)
    assert klamp.region(ratio_high=1.2).coordinates is None
    assert klamp.region(ratio_low=0.8).coordinates is None
    assert klamp.region(ratio_low=1.0, ratio_high=1.2).coordinates is None


def test_k3_log_bounds_agree_with_its_coordinates() -> None:
    region = klamp.region("k3", 0.02)
    assert coordinates(region.log_low, region.log_high) == pytest.approx((0.0, 0.02), abs=1e-13)


@pytest.mark.parametrize("key", [key for key in CALIBRATION if not key.startswith("_")])
def test_calibration_of_the_file(key: str) -> None:
    for rule, case in CALIBRATION[key].items():
        name, _, sigma = rule.partition("_sigma_")
        extra = {"sigma": float(sigma)} if sigma else {}
        radius = klamp.calibrate(named(key), 0.8, 1.2, name, **extra)
        # lognormal mass is a difference of erfc's: a few ulp of it are 1e-13 of the radius
        assert radius == pytest.approx(case["delta_norm"], rel=4e-12 if sigma else 1e-12)
        assert radius * klamp.measure(named(key)).curvature == pytest.approx(case["delta_raw"], rel=4e-12)
        region = klamp.region(named(key), radius)
        assert (region.low, region.high) == pytest.approx((case["l"], case["u"]), rel=1e-12)


def test_calibration_is_exact_for_the_member() -> None:
    star = CALIBRATION["_alpha_star"]
    for rule in CALIBRATION_RULES:
        assert klamp.calibrate(f"power({star['alpha']})", 0.8, 1.2, rule) == pytest.approx(
            star["delta_norm"], rel=1e-12
        )


def test_calibration_is_refused() -> None:
    with pytest.raises(klamp.UserError, match="unknown calibration rule 'log_with'; did you mean 'log_width'"):
        klamp.calibrate("k3", 0.8, 1.2, "log_with")
    with pytest.raises(klamp.UserError, match="two-sided"):
        klamp.calibrate("k3", 0.0, 1.2)
    with pytest.raises(klamp.UserError, match="sigma"):
        klamp.calibrate("k3", 0.8, 1.2, "lognormal_mass", sigma=0.0)
