"""Regions: bounds of every measure at every radius, ratio bounds, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from conftest import load
from hypothesis import example, given
from hypothesis import strategies as st
from oracles import measures as oracle
from test_measures import named

import klamp
from klamp.measures import MEASURES

INTERVALS = load("intervals")
A = [-3000.0, -100.0, -3.0, -1.0, -0.5, -1e-9, 0.0, 1e-9, 0.25, 0.5, 0.999999, 1.0, 1.000001, 1.5, 2.0, 7.0, 300.0,
     3000.0]  # fmt: skip
RENYI = [-20.0, -1.0, 0.5, 0.9, 1.0, 1.1, 2.0, 20.0]
SOLVED = [*sorted(MEASURES), *(f"power({a!r})" for a in A), *(f"renyi({a!r})" for a in RENYI)]
RADII = sorted(
    {1e-300, 1e300, *(float(f"1e{k}") for k in range(-299, 300, 23)), *np.geomspace(1e-12, 1e4, 17).tolist()}
)
STEPS = 60


def counted(name: str) -> tuple[klamp.Measure, list[float]]:
    """The measure, and the points at which it is evaluated from now on."""
    measure, calls = klamp.measure(name), []

    def phi(x: Any) -> Any:
        calls.append(float(np.asarray(x)))
        return measure.phi(x)

    return klamp.Measure(phi, measure.curvature, measure.name, power=measure.power, equation=measure.equation), calls


def check_bound(name: str, radius: float, x: float) -> None:
    """f(x) = radius to 1e-12 relative, or no double near x does better; or there is no bound to find."""
    if math.isinf(x):
        limit = oracle.value(name, math.copysign(1.7e308, x))
        assert limit <= radius * (1.0 + 1e-15), "a bound exists"
        return
    if abs(oracle.value(name, x) / radius - 1) <= 1e-12:
        return
    outward = math.copysign(math.inf, x)
    near, far = x, x
    saturated = name.startswith("renyi(0.") and radius > 10.0 / (0.25 - (float(name[6:-1]) - 0.5) ** 2)
    for _ in range(64 if saturated else 3):  # doubles that straddle the radius, at most 3 apart on a side
        near, far = math.nextafter(near, 0.0), math.nextafter(far, outward)
    assert oracle.value(name, near) <= radius <= oracle.value(name, far)
    if saturated:  # where 1 + inner rounds to 0, which is also where the note points
        return
    step, best = near, mpmath.inf
    while step != far:
        value = oracle.value(name, step)
        best = min(best, abs(value / radius - 1)) if value < mpmath.inf else best
        step = math.nextafter(step, outward)
    assert best > 1e-12, "another double meets the radius"


@pytest.mark.parametrize("name", SOLVED)
def test_bounds_at_every_radius(name: str) -> None:
    for radius in RADII:
        measure, calls = counted(name)
        region = klamp.region(measure, radius)
        for side in ("log_low", "log_high"):
            calls.clear()
            x = getattr(region, side)
            assert len(calls) <= STEPS, (radius, side)
            assert x < 0.0 if side == "log_low" else x > 0.0
            if name == "k1" and side == "log_high":
                assert x == math.inf
                continue
            check_bound(name, radius, x)


@given(
    st.one_of(
        st.sampled_from(sorted(MEASURES)),
        st.floats(-3000.0, 3000.0).map(lambda a: f"power({a!r})"),
        st.floats(-2.0, 3.0).map(lambda a: f"power({a!r})"),
        st.integers(-640, 640).map(lambda k: f"renyi({k / 32!r})"),
        st.integers(1, 255).map(lambda k: f"renyi({k / 256!r})"),
    ),
    st.one_of(st.floats(-300.0, 300.0).map(lambda e: 10.0**e), st.floats(1e-6, 10.0)),
)
@example("power(3000.0)", 1e300)
@example("power(-3000.0)", 1e-300)
@example("renyi(0.5)", 2.0)
@example("renyi(1e-20)", 1e-300)
def test_bounds_at_random_radii(name: str, radius: float) -> None:
    measure, calls = counted(name)
    region = klamp.region(measure, radius)
    for side in ("log_low", "log_high"):
        calls.clear()
        x = getattr(region, side)
        assert len(calls) <= STEPS
        if not (name == "k1" and side == "log_high"):
            check_bound(name, radius, x)


@pytest.mark.parametrize("key", list(INTERVALS["raw"]))
def test_intervals_of_the_file(key: str) -> None:
    name = named(key)
    c = klamp.measure(name).curvature
    for form in ("raw", "norm"):
        for delta, case in zip(INTERVALS["delta"], INTERVALS[form].get(key, ()), strict=False):
            region = klamp.region(name, delta / c if form == "raw" else delta)
            for x, has, wanted in (
                (region.log_low, case["has_lower"], case["x_l"]),
                (region.log_high, case["has_upper"], case["x_u"]),
            ):
                assert math.isfinite(x) == has
                if has:
                    # the radius itself, delta / c, is rounded: an error of 1 ulp of the radius
                    assert x == pytest.approx(wanted, rel=1e-12, abs=0.0) or key.startswith("renyi_0")
            if case["l"] is not None:
                assert region.low == pytest.approx(case["l"], rel=1e-12, abs=1e-14)
            if case["u"] is not None:
                assert region.high == pytest.approx(case["u"], rel=1e-12, abs=1e-14)


def test_k3_series() -> None:
    """u, l = 1 + sum a_k (+-s)^k with the file's 15 exact coefficients."""
    a = [Fraction(text) for text in INTERVALS["k3_series"]]
    for radius in (1e-10, 1e-6, 1e-4, 1e-3, 0.005, 0.02):
        with mpmath.workdps(60):
            s = mpmath.sqrt(2 * mpmath.mpf(radius))
            for sign, bound in ((1, "log_high"), (-1, "log_low")):
                w = 1 + sum(mpmath.mpf(q.numerator) / q.denominator * (sign * s) ** (k + 1) for k, q in enumerate(a))
                truncation = float(s) ** 16  # the first term left out, times less than 1
                got = getattr(klamp.region("k3", radius), bound)
                assert got == pytest.approx(float(mpmath.log(w)), rel=1e-15 * 4, abs=truncation)


def test_closed_forms() -> None:
    for r in (1e-9, 1e-4, 0.02, 0.3):
        s = math.sqrt(2.0 * r)
        k2, pearson, lecam = (klamp.region(name, r) for name in ("k2", "pearson", "lecam"))
        assert (k2.log_low, k2.log_high) == pytest.approx((-s, s), rel=4e-16)
        assert (pearson.log_low, pearson.log_high) == pytest.approx((math.log1p(-s), math.log1p(s)), rel=1e-14)
        neyman = 2.0 * math.asinh(math.sqrt(0.5 * r))
        assert klamp.region("neyman", r).log_high == pytest.approx(neyman, rel=4e-16)
        up = 1.0 + 0.5 * r + 0.5 * math.sqrt(r * r + 8.0 * r)
        assert (lecam.high, lecam.low) == pytest.approx((up, (1.0 - r) / up), rel=1e-14)
    assert klamp.region("k3_reverse", 1.0).log_high == pytest.approx(1.0, rel=4e-16)
    assert klamp.region("k3", 1e300).log_low == pytest.approx(-1e300, rel=1e-15)
    assert klamp.region("k3_flipped", 1e4).log_high == pytest.approx(10001.0, rel=1e-15)
    assert klamp.region("k3_flipped", 1e4).high == math.inf


@pytest.mark.parametrize("radius", [1e-200, 1e-6, 0.02, 1.0, 50.0, 1e5])
def test_flipped_and_dual_regions(radius: float) -> None:
    """f(1/w): reciprocal bounds. w f(1/w) has the region of the swapped policies: f(l*) = l* f(1/l*)."""
    k3, flipped = klamp.region("k3", radius), klamp.region("k3_flipped", radius)
    assert (flipped.log_low, flipped.log_high) == pytest.approx((-k3.log_high, -k3.log_low), rel=1e-15)
    for a in (-2.0, 0.25, 1.5, 3.0):
        dual = klamp.region(f"power({1.0 - a!r})", radius)
        for x in (dual.log_low, dual.log_high):
            if math.isfinite(x) and abs(x) < 600.0:
                own = float(klamp.measure(f"power({a!r})").divergence(-x)) * math.exp(x)
                assert own == pytest.approx(radius, rel=1e-12)
    for name in ("jeffreys", "js", "hellinger2", "lecam", "sym_chi2"):  # self-dual
        region = klamp.region(name, radius)
        for x in (region.log_low, region.log_high):
            if math.isfinite(x) and abs(x) < 300.0:
                own = float(klamp.measure(name).divergence(-x)) * math.exp(x)
                assert own == pytest.approx(radius, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("k3_reverse", 1.0), ("js", 2.0 * math.log(2.0)), ("hellinger2", 2.0), ("pearson", 0.5), ("lecam", 1.0),
     ("ratio_dev", 1.0), ("tv", 0.5), ("power(0.25)", 4.0), ("power(2.0)", 0.5), ("renyi(2.0)", math.log(2.0) / 2.0)],
)  # fmt: skip
def test_no_lower_bound_from_the_limit_on(name: str, limit: float) -> None:
    below, above = klamp.region(name, limit * (1.0 - 1e-9)), klamp.region(name, limit * (1.0 + 1e-9))
    assert math.isfinite(below.log_low)
    assert above.log_low == -math.inf
    assert above.low == 0.0
    assert above.notes == ("no lower bound: every w below 1 is inside",)
    assert above.coordinates is None
    assert klamp.measure(name).limit_low == pytest.approx(limit, rel=1e-15)


@pytest.mark.parametrize(
    "name", ["k2", "k3", "k3_flipped", "jeffreys", "neyman", "sym_chi2", "log_ratio", "power(-0.5)"]
)
def test_always_two_sided(name: str) -> None:
    for radius in (0.1, 1e3, 1e100):
        region = klamp.region(name, radius)
        assert -math.inf < region.log_low < 0.0 < region.log_high < math.inf
        assert region.notes == ()


def test_k1_is_one_sided() -> None:
    region = klamp.region("k1", 0.3)
    assert region.log_low == pytest.approx(-0.3, rel=1e-15)
    assert region.log_high == math.inf
    assert region.high == math.inf
    assert region.notes == ("no upper bound: every w above 1 is inside",)


@pytest.mark.parametrize("a", [0.1, 0.5, 0.9])
def test_renyi_saturates(a: float) -> None:
    """For 0 < a < 1 the measure is infinite from w_max on, w_max^a = a (w_max - 1); the note says where."""
    with mpmath.workdps(30):
        w_max = float(mpmath.findroot(lambda w: w**a - a * (w - 1), (1.5 / a, 40.0 / a), solver="anderson"))
    region = klamp.region(f"renyi({a})", 1e6)
    assert region.high == pytest.approx(w_max, rel=1e-12)
    assert any("saturates on the high side" in note and f"w = {w_max:.6g}" in note for note in region.notes)
    assert not any("saturates on the low side" in note for note in region.notes)


@pytest.mark.parametrize(
    "name",
    [
        *MEASURES,
        "power(3.0)",
        "power(-3.0)",
        "power(300.0)",
        "power(-300.0)",
        "renyi(2.0)",
        "renyi(-2.0)",
        "renyi(20.0)",
    ],
)
def test_other_measures_do_not_saturate(name: str) -> None:
    """A value beyond the doubles is not a saturation: every larger radius reaches further."""
    for radius in (0.02, 1e10, 1e250):
        region = klamp.region(name, radius)
        assert not any("saturates" in note for note in region.notes)
    wide, wider = klamp.region(name, 1e250), klamp.region(name, 1e300)
    assert wider.log_high > wide.log_high or wide.log_high == math.inf


def test_radius_zero_is_the_point_one() -> None:
    region = klamp.region("k3", 0.0)
    assert (region.log_low, region.log_high, region.low, region.high) == (0.0, 0.0, 1.0, 1.0)
    assert region.coordinates is None
    assert region == klamp.region("k3", -0.0) == klamp.region("k3", 0)


def test_infinite_radius_is_no_guard() -> None:
    region = klamp.region("k3", math.inf)
    assert (region.log_low, region.log_high, region.low, region.high) == (-math.inf, math.inf, 0.0, math.inf)
    assert region.coordinates is None
    assert len(region.notes) == 2
    one = klamp.region("k3", radius_high=0.02)
    assert (one.log_low, one.high) == (-math.inf, pytest.approx(1.2135497071517296, rel=1e-14))


def test_one_radius_per_side() -> None:
    region = klamp.region("k3", radius_low=0.01, radius_high=0.05)
    assert region.low == pytest.approx(klamp.region("k3", 0.01).low, rel=1e-15)
    assert region.high == pytest.approx(klamp.region("k3", 0.05).high, rel=1e-15)
    assert region.radius is None
    found = region.coordinates
    assert found is not None
    twin = klamp.region(f"power({found.a!r})", found.radius)
    assert (twin.log_low, twin.log_high) == pytest.approx((region.log_low, region.log_high), rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"measure": "k3", "radius": -0.02}, "radius=-0.02 is not a radius"),
        ({"measure": "k3", "radius": math.nan}, "radius=nan is not a radius"),
        ({"measure": "k3", "radius": "0.02"}, "radius='0.02' is not a radius"),
        ({"measure": "k3", "radius": True}, "radius=True is not a radius"),
        ({"measure": "k3", "radius_low": -1.0, "radius_high": 0.1}, "radius_low=-1.0"),
        ({"measure": "k3"}, "needs a radius"),
        ({"radius": 0.02}, "a radius needs a measure"),
        ({"measure": "k3", "radius": 0.1, "radius_low": 0.1}, "not both"),
        ({"measure": "k3", "radius": 0.1, "ratio_low": 0.8}, "one of the two"),
        ({"ratio_low": 1.3, "ratio_high": 1.2}, "is empty"),
        ({"ratio_low": 1.1, "ratio_high": 1.2}, "does not contain w = 1; the nearest that does is \\[1.0, 1.2\\]"),
        ({"ratio_low": 0.1, "ratio_high": 0.2}, "for 1 \\+ 0.2 write 1.2"),
        ({"ratio_low": -0.1, "ratio_high": 1.2}, "does not contain|must"),
        ({"ratio_low": math.nan}, "ratio_low=nan is not a ratio"),
        ({"ratio_high": "2"}, "ratio_high='2' is not a ratio"),
        ({"measure": "custom_parts:shifted", "radius": 0.1}, "a divergence is 0 there"),
        ({"measure": "custom_parts:falling", "radius": 0.1}, "does not grow away from w = 1"),
        ({"measure": "custom_parts:text", "radius": 0.1}, "cannot be evaluated"),
        ({"measure": "kl3", "radius": 0.1}, "did you mean 'k3'"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(klamp.UserError, match=words):
        klamp.region(**arguments)


@given(st.sampled_from(["k3", "js", "power(-2.5)", "renyi(2.0)"]), st.floats(1e-8, 3.0), st.floats(1.0, 3.0))
def test_regions_nest(name: str, radius: float, factor: float) -> None:
    small, large = klamp.region(name, radius), klamp.region(name, radius * factor)
    assert large.log_low <= small.log_low < 0.0 < small.log_high <= large.log_high


# --- ratio bounds, values -------------------------------------------------------------------------------------


def test_ratio_bounds_are_kept_as_given() -> None:
    region = klamp.region(ratio_low=0.8, ratio_high=1.28)
    assert (region.low, region.high) == (0.8, 1.28)
    assert (region.log_low, region.log_high) == (math.log(0.8), math.log(1.28))
    assert klamp.region(ratio_low=0.0, ratio_high=math.inf) == klamp.region()


@pytest.mark.parametrize(
    "region",
    [klamp.region("k3", 0.02), klamp.region("power(0.3)", radius_low=0.1, radius_high=math.inf),
     klamp.region(ratio_low=0.8, ratio_high=1.28), klamp.region(ratio_high=3.0), klamp.region("custom_parts:quartic", 0.1)],
    ids=["k3", "one radius", "ratios", "one ratio", "own measure"],
)  # fmt: skip
def test_regions_are_values(region: klamp.Region) -> None:
    arguments: dict[str, Any] = region.arguments()
    assert region.log_low <= 0.0  # fills the cache: it must not matter for equality or copies
    for twin in (klamp.region(**arguments), pickle.loads(pickle.dumps(region)), copy.deepcopy(region)):
        assert twin == region
        assert hash(twin) == hash(region)
        assert (twin.log_low, twin.log_high) == (region.log_low, region.log_high)


def test_a_region_of_a_users_measure() -> None:
    from custom_parts import cosh_gap

    ours, theirs = klamp.region("neyman", 0.02), klamp.region(klamp.Measure(cosh_gap, curvature=2), 0.02)
    assert (theirs.log_low, theirs.log_high) == pytest.approx((ours.log_low, ours.log_high), rel=1e-12)
    found = theirs.coordinates
    assert found is not None
    assert found.a == pytest.approx(-1.0, abs=1e-9)
    quartic = klamp.region("custom_parts:quartic", 0.02)
    x = math.sqrt((-0.5 + math.sqrt(0.25 + 0.08)) / 2.0)
    assert (quartic.log_low, quartic.log_high) == pytest.approx((-x, x), rel=1e-13)
    measure, calls = counted("custom_parts:quartic")
    assert klamp.region(klamp.Measure(measure.phi, name="own"), 1e250).log_high == pytest.approx(
        1e62 * 10**0.5, rel=1e-12
    )
    assert len(calls) <= STEPS
