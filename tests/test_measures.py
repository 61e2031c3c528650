"""Measures: against the stored oracles, against 60-digit forms at random points, and at the ends of the doubles."""

from __future__ import annotations

import copy
import math
import pickle

import mpmath
import numpy as np
import pytest
import torch
from conftest import load
from hypothesis import example, given
from hypothesis import strategies as st
from oracles import measures as oracle

import klamp
from klamp.measures import MEASURES

CASES = {name: case for name, case in load("measures").items() if name != "about"}
RTOL, ATOL = 1e-12, 1e-14


def named(key: str) -> str:
    """The file's spelling of a family member -> the package's: alpha_0.25 is power(0.25)."""
    family, _, a = key.partition("_")
    return {"alpha": f"power({a})", "renyi": f"renyi({a})"}.get(family, key)


def agree(got: float, wanted: float | None, rtol: float = RTOL, atol: float = ATOL) -> None:
    if wanted is None:
        assert got == math.inf
    else:
        assert got == pytest.approx(wanted, rel=rtol, abs=atol)


@pytest.mark.parametrize("key", CASES)
def test_values_of_the_file(key: str) -> None:
    case, measure = CASES[key], klamp.measure(named(key))
    for field, points in (("f", np.log(np.array(case["w"]))), ("phi", np.array(case["x"]))):
        for x, raw in zip(points, case[f"{field}_raw"], strict=True):
            rounded = field == "f"  # log w is not the exact log of the file's w
            agree(measure.raw(x), raw, 1e-11 if rounded else RTOL)
            tensor = torch.tensor(x, dtype=torch.float64)
            agree(float(measure.raw(tensor)), raw, 1e-11 if rounded else RTOL)
        if case[f"{field}_norm"] is not None:
            for x, norm in zip(points, case[f"{field}_norm"], strict=True):
                agree(measure.divergence(x), norm, 1e-11 if field == "f" else RTOL)
    if case["c"] is not None:
        assert measure.curvature == case["c"]


@pytest.mark.parametrize("key", CASES)
def test_relative_precision_near_one(key: str) -> None:
    """The values at x = +-1e-10 are about 5e-21: an absolute tolerance would accept anything."""
    case = CASES[key]
    for x, raw in zip(case["x"], case["phi_raw"], strict=True):
        if raw:
            assert klamp.measure(named(key)).raw(x) == pytest.approx(raw, rel=RTOL, abs=0.0)


@pytest.mark.parametrize("key", CASES)
def test_slopes_of_the_file(key: str) -> None:
    case, measure = CASES[key], klamp.measure(named(key))
    c = case["c"] or 1.0
    for x, wanted in zip(case["x"], case["dphi_dx_raw(=w f')"], strict=True):
        if wanted is None:
            continue
        assert measure.divergence_slope(x) * c == pytest.approx(wanted, rel=RTOL, abs=0.0)
        slope = measure.divergence_slope(torch.tensor(x, dtype=torch.float64))
        assert float(slope) * c == pytest.approx(wanted, rel=RTOL, abs=0.0)


@pytest.mark.parametrize("name", oracle.KINKED)
def test_slopes_at_a_kink(name: str) -> None:
    scale = 0.5 if name == "tv" else 1.0
    for x in (-1.5, -0.1, 0.2, 2.0):
        wanted = math.copysign(1.0, x) * (1.0 if name == "log_ratio" else scale * math.exp(x))
        assert klamp.measure(name).divergence_slope(x) == pytest.approx(wanted, rel=1e-15)
    assert klamp.measure(name).divergence_slope(0.0) == 0.0


@pytest.mark.parametrize("key", CASES)
def test_constants_of_the_file(key: str) -> None:
    case, measure = CASES[key], klamp.measure(named(key))
    for field, ours in (
        ("f3_at_1", measure.third),
        ("f4_at_1", measure.fourth),
        ("alpha_eff", measure.effective_power),
    ):
        if field in case:
            assert ours == pytest.approx(case[field], abs=5.1e-4)  # the file has 4 digits of these
    low = case["limit_w0_norm"] if case["c"] else case["limit_w0_raw"]
    agree(measure.limit_low, low)


@pytest.mark.parametrize("name", [*MEASURES, "power(0.25)", "power(-2.3)", "renyi(0.5)", "renyi(2.0)", "renyi(-3.0)"])
def test_derivatives_at_one(name: str) -> None:
    measure = klamp.measure(name)
    if name in oracle.SIGNED + oracle.KINKED:
        assert measure.third is measure.fourth is None
        return
    with mpmath.workdps(120):
        h = mpmath.mpf(10) ** -20
        f = [oracle.at_ratio(name, 1 + k * h) for k in range(-3, 4)]
        second = (f[4] - 2 * f[3] + f[2]) / h**2
        third = (f[5] - 2 * f[4] + 2 * f[2] - f[1]) / (2 * h**3)
        fourth = (f[5] - 4 * f[4] + 6 * f[3] - 4 * f[2] + f[1]) / h**4
    assert float(second) == pytest.approx(1.0, abs=1e-14)
    assert measure.third == pytest.approx(float(third), abs=1e-13)
    assert measure.fourth == pytest.approx(float(fourth), abs=1e-13)


def test_the_catalogue_is_the_oracles() -> None:
    assert set(MEASURES) == set(oracle.TEXTBOOK) == {key for key in CASES if "_" not in key or key in MEASURES}


X = st.floats(-60.0, 60.0).filter(lambda x: x == 0.0 or abs(x) > 1e-140)
TOP = 700.0


@given(X, st.sampled_from(sorted(MEASURES)))
def test_named_measures_to_sixty_digits(x: float, name: str) -> None:
    wanted = oracle.value(name, x)
    # theory.md section 6 promises 2e-15 at worst in float64
    assert float(abs(mpmath.mpf(float(klamp.measure(name).divergence(x))) - wanted)) <= 4e-15 * float(abs(wanted))


A = st.one_of(
    st.floats(-3000.0, 3000.0),
    st.floats(-3.0, 3.0),
    st.floats(-1e-3, 1e-3),
    st.floats(0.999, 1.001),
    st.sampled_from([0.0, 1.0, 0.5, 2.0, -1.0, 1e-300, -1e-300, 1.0 + 2.0**-52, 1.0 - 2.0**-53, 1e-17, -1e-17]),
)


@given(A, X)
@example(0.5, 1.0)
@example(1e-17, 2.0)
@example(5e-324, 1.3)
@example(-1e-323, -0.7)
def test_power_to_sixty_digits(a: float, x: float) -> None:
    wanted = oracle.value(f"power({a!r})", x)
    got = float(klamp.measure(f"power({a!r})").divergence(x))
    if not 1e-290 < wanted < 1e305:
        assert got >= 0.0
        return
    # exp(a x) has a condition number of |a x| in its argument
    assert float(abs(mpmath.mpf(got) - wanted) / wanted) <= 4e-15 + 4e-16 * abs(a * x)


@given(A, X)
@example(5e-324, 1.3)
def test_power_slope_to_sixty_digits(a: float, x: float) -> None:
    if not abs(x) > 1e-30:
        return
    wanted = oracle.slope(f"power({a!r})", x) if a not in (0.0, 1.0) and abs(a) > 1e-90 else None
    if wanted is None or not 1e-290 < abs(wanted) < 1e305:
        return
    got = float(klamp.measure(f"power({a!r})").divergence_slope(x))
    assert float(abs((mpmath.mpf(got) - wanted) / wanted)) <= 1e-14 + 8e-16 * abs(a * x)


@given(st.one_of(st.floats(-50.0, 50.0), st.floats(0.0, 1.0), st.floats(-3.0, 3.0)), X)
@example(0.5, 1.7627)
@example(0.5, 1.7628)
@example(1e-20, 1e-139)
@example(-2.0, 50.0)
def test_renyi_to_sixty_digits(a: float, x: float) -> None:
    wanted = oracle.value(f"renyi({a!r})", x)
    got = float(klamp.measure(f"renyi({a!r})").divergence(x))
    if wanted == mpmath.inf:
        assert got == math.inf or got > 20.0 / abs(a * (a - 1.0) or 1e-9)  # within rounding of the asymptote
        return
    if not 1e-290 < wanted < 1e305:
        return
    c = abs(a * (a - 1.0))
    if 0.0 < a < 1.0 and c * wanted > 20.0:
        return  # log1p(-1 + tiny): the vertical asymptote, where x itself has no such precision
    conditioning = float(mpmath.exp(c * wanted)) if 0.0 < a < 1.0 else 1.0  # d log(inner) near inner = -1
    assert float(abs(mpmath.mpf(got) - wanted) / wanted) <= (2e-14 + 1e-15 * abs(a * x)) * conditioning


@given(st.floats(-20.0, 20.0), st.floats(-700.0, 700.0))
@example(-1.0, 690.0)
@example(-3.0, 400.0)
@example(2.0, 699.0)
def test_renyi_slope_to_sixty_digits(a: float, x: float) -> None:
    if a in (0.0, 1.0) or 0.0 < a < 1.0 or abs(x) < 1e-30 or abs(a) < 1e-30:
        return
    wanted = oracle.slope(f"renyi({a!r})", x)
    if not 1e-290 < abs(wanted) < 1e305:
        return
    got = float(klamp.measure(f"renyi({a!r})").divergence_slope(x))
    assert float(abs((mpmath.mpf(got) - wanted) / wanted)) <= 1e-13 + 1e-14 * abs(a * x)


@pytest.mark.parametrize("a", [-3.0, -1.0, 2.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_renyi_slope_is_finite_where_the_value_is(a: float, dtype: torch.dtype) -> None:
    """Where w overflows the Renyi value is about x / (a - 1) or x / (a(a - 1)), with that constant slope."""
    x = torch.tensor([100.0, 800.0], dtype=dtype)
    measure = klamp.measure(f"renyi({a})")
    assert torch.isfinite(measure.divergence(x)).all()
    wanted = 1.0 / (a - 1.0) if a > 1.0 else 1.0 / (a * (a - 1.0))
    assert measure.divergence_slope(x).tolist() == pytest.approx([wanted] * 2, rel=1e-6)


@pytest.mark.parametrize(
    "name", [*MEASURES, "power(3)", "power(0.5)", "power(-3)", "renyi(2)", "renyi(-2)", "renyi(0.5)"]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_is_nan_on_the_whole_line(name: str, dtype: type) -> None:
    top = float(np.finfo(dtype).max)
    points = [0.0, 1e-300, 1e-30, 1e-8, 1e-3, 0.4999, 0.5, 1.0, 50.0, 88.0, 100.0, 710.0, 1e10, top / 2, top]
    x = np.array(sorted({s * p for p in points for s in (-1.0, 1.0)}), dtype=dtype)
    measure = klamp.measure(name)
    value, slope = measure.divergence(x), measure.divergence_slope(x)
    assert not np.isnan(value).any()
    assert not np.isnan(slope).any()
    assert value.dtype == dtype
    if name != "k1":
        assert (value >= 0.0).all()
        for side in (value[x >= 0.0], value[x <= 0.0][::-1]):  # never falls away from 0, but for rounding at a limit
            assert (side[1:] >= side[:-1] * dtype(1.0 - 4 * np.finfo(dtype).eps)).all()
        assert (slope[x > 0.0] >= 0.0).all()
        assert (slope[x < 0.0] <= 0.0).all()


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_float32_keeps_its_precision(name: str) -> None:
    x = np.concatenate([-np.geomspace(1e-6, 50.0, 60), np.geomspace(1e-6, 50.0, 60)]).astype(np.float32)
    got = klamp.measure(name).divergence(torch.from_numpy(x)).numpy()
    wanted = np.array([float(oracle.value(name, float(v))) for v in x])
    # expm1, exp and sinh in float32 carry a few ulp, times the condition number of exp: |x|
    finite = np.abs(wanted) < 3e38
    assert np.abs(got[finite] / wanted[finite] - 1.0).max() <= 1e-5
    assert (got[~finite] == np.inf).all()


@given(st.floats(-80.0, 80.0, width=32))
def test_k3_is_never_negative(x: float) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        value = klamp.measure("k3").divergence(torch.tensor([x], dtype=dtype))
        assert value.dtype == torch.float32
        assert float(value) >= 0.0
    assert klamp.measure("k3").divergence(np.float32(x)) >= 0.0


@pytest.mark.parametrize(
    "name", ["k3", "js", "renyi(0.5)", "power(-2.3)", "custom_parts:cosh_gap", "custom_parts:torch_only"]
)
def test_slope_is_the_derivative(name: str) -> None:
    measure = klamp.measure(name)
    x = torch.linspace(-3.0, 1.5, 31, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(measure.divergence(x).sum(), x)
    assert torch.allclose(measure.divergence_slope(x.detach()), wanted, rtol=1e-12, atol=1e-13)


def test_a_measure_of_a_third_party() -> None:
    custom_parts = pytest.importorskip("custom_parts")
    gap = klamp.Measure(custom_parts.cosh_gap, curvature=2)
    assert str(gap).startswith("measure('custom_parts:cosh_gap', curvature=2")
    x = np.linspace(-4.0, 4.0, 41)
    assert gap.divergence(x) == pytest.approx(klamp.measure("neyman").divergence(x), rel=1e-12, abs=1e-15)
    assert klamp.measure(str(gap)) == gap
    for twin in (pickle.loads(pickle.dumps(gap)), copy.deepcopy(gap), copy.copy(gap)):
        assert twin == gap
        assert hash(twin) == hash(gap)
    tensors = klamp.measure("custom_parts:torch_only")
    assert tensors.divergence(0.2) == pytest.approx(0.5 * 0.04 + 0.25 * 0.008)
    assert tensors.divergence_slope(0.2) == pytest.approx(0.2 + 0.75 * 0.04)
    assert klamp.measure("custom_parts:NAMED") is custom_parts.NAMED


@pytest.mark.parametrize("name", [*MEASURES, "power(0.3)", "renyi(2.0)"])
def test_measures_are_values(name: str) -> None:
    measure = klamp.measure(name)
    assert str(measure) == name
    for twin in (klamp.measure(str(measure)), pickle.loads(pickle.dumps(measure)), copy.deepcopy(measure)):
        assert twin == measure
        assert hash(twin) == hash(measure)
    assert len({klamp.measure(other) for other in (*MEASURES, name)}) == len(MEASURES) + ("(" in name)


def test_spellings_of_a_family() -> None:
    assert klamp.measure("power(a=0.5)") == klamp.measure("power( 0.5 )") == klamp.measure("power(5e-1)")
    assert klamp.measure("power(-0.0)") == klamp.measure("power(0)")
    assert hash(klamp.measure("power(-0.0)")) == hash(klamp.measure("power(0)"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("k4", "unknown measure 'k4'; did you mean 'k"),
        ("helinger2", "did you mean 'hellinger2'"),
        ("power(x)", "unknown measure"),
        ("power(1e999)", "not a finite number"),
        ("power(1-2)", "not a finite number"),
        ("nowhere_at_all:phi", "cannot be imported"),
        ("custom_parts:missing", "cannot be imported"),
        ("custom_parts:NUMBER", "is a float; a function of the log-ratio is needed"),
    ],
)
def test_unknown_measures(name: str, words: str) -> None:
    with pytest.raises(klamp.UserError, match=words.replace("(", r"\(")):
        klamp.measure(name)


@pytest.mark.parametrize("c", [0.0, -1.0, math.nan, math.inf])
def test_bad_curvature(c: float) -> None:
    with pytest.raises(klamp.UserError, match="curvature"):
        klamp.Measure(lambda x: x * x, curvature=c)


@pytest.mark.parametrize("case", load("estimators")["cases"], ids=lambda case: f"scale{case['scale']}")
def test_estimators_over_all_actions(case: dict) -> None:
    """Means and variances of the k's under old and new samples: which measure estimates which divergence."""
    old, new = (torch.log_softmax(torch.tensor(case[f"logits_{p}"], dtype=torch.float64), 0) for p in ("old", "new"))
    for key, wanted in case.items():
        name, _, law = key.partition("_under_")
        if not law:
            continue
        sign, name = (-1.0, "k1") if name == "neg_k1" else (1.0, name)
        value = sign * klamp.measure(name).raw(new - old)
        p = (old if law == "old" else new).exp()
        mean = float((p * value).sum())
        assert mean == pytest.approx(wanted["mean"], rel=RTOL, abs=1e-15)
        assert float((p * (value - mean) ** 2).sum()) == pytest.approx(wanted["var"], rel=1e-11, abs=1e-15)
    gradients = case["gradients_wrt_new_logits"]
    for key, wanted in gradients.items():
        if not key.startswith("pathwise_"):
            continue
        name, _, law = key.removeprefix("pathwise_").rpartition("_samples")[0].rpartition("_")
        p = (old if law == "old" else new).exp()
        sign, name = (-1.0, "k1") if name == "neg_k1" else (1.0, name)
        slope = sign * klamp.measure(name).divergence_slope(new - old) * klamp.measure(name).curvature
        got = p * slope - (p * slope).sum() * new.exp()  # d log pi_b / d z_a = [a = b] - pi_a
        assert got.tolist() == pytest.approx(wanted, rel=1e-11, abs=1e-15)
