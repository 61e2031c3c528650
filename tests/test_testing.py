"""``check_spec`` catches what it is for: each law is broken on purpose, and the right law says so."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import klamp
import klamp.language
import klamp.spec
from klamp import Batch, Factor, Gate, Guard, Measure, Objective, Spec, UserError
from klamp.aggregates import Aggregate
from klamp.conditions import Budget, Distance
from klamp.coupled import Normalized
from klamp.guards import GATES
from klamp.objective import LossOutput
from klamp.penalties import FPenalty, Terms
from klamp.radii import Cosine, Linear, number
from klamp.regions import Region
from klamp.stats import Stats
from klamp.testing import LAWS, LawViolation, check_spec
from klamp.testing.draws import KINDS, Draw, make
from klamp.testing.written import written
from klamp.transforms import Cap

Change = dict[str, Any]
Maker = Callable[[Spec], Objective]
pytestmark = pytest.mark.usefixtures("unchecked")  # as a user runs the suite; shapes are checked in other tests

DOCS = Path(__file__).parents[1] / "docs" / "laws.md"


def broken(spec: Spec | str, law: int, **arguments: Any) -> LawViolation:
    with pytest.raises(LawViolation) as caught:
        check_spec(spec, **arguments)
    assert caught.value.law == law, str(caught.value)
    return caught.value


def outward(x: Tensor, advantages: Tensor) -> Tensor:
    return (advantages > 0) & (x > 0) | (advantages < 0) & (x < 0)


# --- parts that break a law -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Power:
    """weight scale w^a, value w^b: right only for scale = a = b = 1."""

    scale: float = 1.0
    a: float = 1.0
    b: float = 1.0
    integrated: bool = True

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * (self.a * log_ratio).exp(), (self.b * log_ratio).exp()


def sees_masked(x: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    return outward(x, advantages) & torch.isfinite(batch.logp_old).all()


def above_the_batch_mean(x: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    mean = torch.where(batch.mask, x.abs(), 0.0).sum() / batch.mask.sum().clamp(min=1)
    return outward(x, advantages) & (x.abs() > mean)


def even_columns(x: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    return outward(x, advantages) & (torch.arange(batch.shape[1]) % 2 == 0)


def by_product(x: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    return x * advantages > 0


def bounded(x: Any) -> Any:
    """Grows up to |x| = 2 and falls after it: its regions are no intervals."""
    return x * x / (1.0 + x**4 / 16.0)


class Shrinking(Region):
    """A larger radius allows less."""

    @property
    def log_high(self) -> float:  # type: ignore[override]
        radius = self.radius_high or 0.0
        return radius if radius == math.inf else 0.3 / (1.0 + 50.0 * radius)


class Capped(Region):
    """An infinite radius is still a bound."""

    @property
    def log_high(self) -> float:  # type: ignore[override]
        return min(self.radius_high or 0.0, 0.5)


def through(gate: Callable[..., Tensor]) -> Spec:
    return klamp.preset("trust_region", "k3", 0.02, gate=Gate(gate))


def region(kind: type[Region]) -> Spec:
    return Spec(guards=(Guard(kind(klamp.measure("k3"), 0.02, 0.02)),), factors=(Factor(),))


# --- objectives that break a law ------------------------------------------------------------------------------


class Leaks(Objective):
    """Cut tokens keep a trace of gradient."""

    def __call__(self, batch: Batch, stats: Stats | None = None, state: dict[str, float] | None = None) -> LossOutput:
        out = super().__call__(batch, stats, state)
        return replace(out, grad_policy=out.grad_policy + 1e-30 * (batch.mask & ~out.kept))


class LocalMean(Objective):
    """Each micro-batch is averaged by its own counts."""

    def __call__(self, batch: Batch, stats: Stats | None = None, state: dict[str, float] | None = None) -> LossOutput:
        return super().__call__(batch, None, state)


class AveragesMetrics(Objective):
    def __call__(self, batch: Batch, stats: Stats | None = None, state: dict[str, float] | None = None) -> LossOutput:
        out = super().__call__(batch, stats, state)
        total, count = out.metrics.means["policy/loss_mean"]
        out.metrics.means["policy/loss_mean"] = (total / count.clamp(min=1), torch.ones_like(count))
        return out


class CountsSilent(Objective):
    """A = 0 counts as a negative advantage."""

    def __call__(self, batch: Batch, stats: Stats | None = None, state: dict[str, float] | None = None) -> LossOutput:
        out = super().__call__(batch, stats, state)
        silent = (batch.mask & ~out.inside & (batch.advantages == 0)).sum()
        total, count = out.metrics.means["guard/removed_low_share"]
        out.metrics.means["guard/removed_low_share"] = (total + silent, count)
        return out


class HidesMissing(Objective):
    def __call__(self, batch: Batch, stats: Stats | None = None, state: dict[str, float] | None = None) -> LossOutput:
        out = super().__call__(batch, stats, state)
        out.metrics.sums.pop("batch/missing_rows_count", None)
        return out


class Clamps(Objective):
    def __call__(self, batch: Batch, stats: Stats | None = None, state: dict[str, float] | None = None) -> LossOutput:
        out = super().__call__(batch, stats, state)
        return replace(out, grad_policy=out.grad_policy.clamp(-1e30, 1e30))


class NeverRaises(Objective):
    def _check_overflow(self, loss: Tensor, g: Tensor, per_token: Tensor) -> None:
        return


class FlipsValue(Objective):
    """The value of a cut token has the wrong sign; its gradient is right."""

    def __call__(self, batch: Batch, stats: Stats | None = None, state: dict[str, float] | None = None) -> LossOutput:
        out = super().__call__(batch, stats, state)
        return replace(out, per_token=torch.where(out.kept, out.per_token, -out.per_token))


class LocalSamples(Objective):
    """Statistics of the step (quantiles, budgets, groups) are taken of each micro-batch."""

    def __call__(self, batch: Batch, stats: Stats | None = None, state: dict[str, float] | None = None) -> LossOutput:
        own = self.stats(batch, state)
        stats = own if stats is None else Stats(stats.counts, stats.group_tokens, own.samples)
        return super().__call__(batch, stats, state)


class KeepsDenominator(Objective):
    """Dropped tokens are counted as dropped, and yet stay in the mean."""

    def _kept(self, batch: Batch, moment: Any) -> Tensor | None:
        return None

    def __call__(self, batch: Batch, stats: Stats | None = None, state: dict[str, float] | None = None) -> LossOutput:
        out = super().__call__(batch, stats, state)
        honest = Objective(self.spec)(batch, None, state)
        if "guard/dropped_count" in honest.metrics.sums:
            out.metrics.sums["guard/dropped_count"] = honest.metrics.sums["guard/dropped_count"]
        return out


class Attached(Objective):
    """The weight's own dependence on the new policy adds to the gradient of the loss, and to nothing else."""

    def __call__(self, batch: Batch, stats: Stats | None = None, state: dict[str, float] | None = None) -> LossOutput:
        out = super().__call__(batch, stats, state)
        w = torch.where(batch.mask, batch.logp_new - batch.logp_old, 0.0).clamp(max=1.0).exp()
        w = torch.where(out.kept & (out.grad_policy != 0.0), w, 0.0).sum()
        return replace(out, loss=out.loss + 1e-3 * (w - w.detach()))


class MovesSilent(Objective):
    """Off-policy, tokens without a signal keep a trace of gradient."""

    def __call__(self, batch: Batch, stats: Stats | None = None, state: dict[str, float] | None = None) -> LossOutput:
        out = super().__call__(batch, stats, state)
        return replace(
            out,
            grad_policy=out.grad_policy
            + 1e-30 * (batch.mask & (batch.advantages == 0.0) & (batch.logp_new != batch.logp_old)),
        )


@dataclass(frozen=True)
class MeanOfAll(Normalized):
    """Divides by the mean over all positions of the batch, masked ones too."""

    def collect(self, log_ratio: Tensor, advantages: Tensor, batch: Batch, where: Tensor) -> Tensor:
        return self.transform.evaluate(log_ratio, advantages)[0].double().expand(batch.shape).reshape(-1, 1)


# --- specs that are computed as another -----------------------------------------------------------------------


def computed(guards: Change = {}, factors: Change = {}, penalties: Change = {}, **spec: Any) -> Maker:  # noqa: B006
    """Objectives that take another value for some fields of their parts; a function is given the right one."""

    def other(part: Any, change: Change) -> Any:
        found = replace(part)
        for name, value in change.items():
            object.__setattr__(found, name, value(getattr(part, name)) if callable(value) else value)
        return found

    def make(right: Spec) -> Objective:
        wrong = Spec(
            tuple(other(part, guards) for part in right.guards), tuple(other(part, factors) for part in right.factors),
            tuple(other(part, penalties) for part in right.penalties), right.aggregate,
        )  # fmt: skip
        return Objective(replace(wrong, **spec))

    return make


def inner(transform: Any) -> Any:
    return getattr(transform, "transform", transform)


def measured_by(measure: str) -> Callable[[Any], Any]:
    return lambda region: replace(region, measure=measure) if isinstance(region, Distance) else region


def at_start(region: Any) -> Any:
    """The radii before the first step, whatever the step or token."""
    return replace(region, radius_low=number(region.radius_low), radius_high=number(region.radius_high))


def straight(region: Any) -> Any:
    """A cosine's ends, and a straight line between them."""
    lines = {side: Linear(radius.start, radius.end, radius.steps) for side in ("radius_low", "radius_high")
             if isinstance(radius := getattr(region, side), Cosine)}  # fmt: skip
    return replace(region, **lines)


def over_kept(region: Any) -> Any:
    return replace(region, over="kept") if isinstance(region, Budget) else region


def with_seed(gate: Any) -> Any:
    return replace(gate, seed=gate.seed + 1) if hasattr(gate, "seed") else gate


PLACES = "guard(measure='k3', radius=0.02)"
MISCOMPUTED = {
    "drop leaves the token in the mean": ("grpo + rs_k2(radius=0.02)", computed({"action": "zero"}), 3),
    "drop_row takes the token alone": (
        "dapo + guard(measure='k2', radius=0.02, scope='sequence', reduce='mean_after', action='drop_row')",
        computed({"action": lambda action: action.removesuffix("_row")}), 3,
    ),
    "rollback pushes on": ("rollback", computed({"strength": lambda s: -s}), 9),
    "rollback is a clip": ("rollback", computed({"strength": 1e-9}), 9),
    "suffix without discount": (
        "dapo + guard(measure='k2', radius=0.05, scope='suffix', reduce='sum', discount=0.5)", computed({"discount": 1.0}), 3,
    ),
    "factor without discount": ("fipo(half_life=2.0, high=9.0, low=0.1)", computed(factors={"discount": 1.0}), 9),
    "suffix as prefix": (
        "dapo + guard(measure='k2', radius=0.05, scope='suffix', reduce='sum', discount=0.5)",
        computed({"scope": lambda s: s.replace("suffix", "prefix")}), 3,
    ),
    "turns as responses": ("segment(epsilon=0.05)", computed({"scope": "sequence"}), 3),
    "weights of turns as of responses": ("segment(epsilon=0.05)", computed(factors={"scope": "sequence"}), 9),
    "D of the mean for the mean of D": (
        "dapo + guard(measure='k3', radius=0.03, scope='sequence', reduce='mean_after')",
        computed({"reduce": lambda how: how.removesuffix("_after")}), 3,
    ),
    "mean for maximum": (
        "dapo + guard(measure='k3', radius=0.05, scope='sequence', reduce='max_after')",
        computed({"reduce": lambda how: how.replace("max", "mean")}), 3,
    ),
    "binary KL the other way": (
        "dppo_kl(delta=0.1)", computed({"region": measured_by("binary_kl_new_old")}), 3,
    ),
    "binary TV for KL": ("dppo_kl(delta=0.02)", computed({"region": measured_by("binary_tv")}), 3),
    "budget over what is kept": ("m2po(threshold=0.01)", computed({"region": over_kept}), 3),
    "any probability is likely": (
        "dapo + guard(measure='k3', radius=0.02, gate=likely(low=0.2, high=0.2))", computed({"gate": GATES["outward"]}), 3,
    ),
    "ring as two-sided": ("rec(clip='ring', ring_low=0.3, ring_high=0.3)", computed({"gate": GATES["always"]}), 3),
    "another draw": ("clip_cov(share=0.2, low=-1.0, high=3.0)", computed({"gate": with_seed}), 1),
    "clip after the mean": ("gmpo(epsilon=0.1)", computed(factors={"clipped": False}), 9),
    "no division by the mean": ("dapo + tis(normalize=True)", computed(factors={"transform": inner}), 9),
    "signs as one": ("topr", computed(factors={"transform": Cap(0.0, 1.0)}), 9),
    "penalty on every token, by a radius": (f"dapo + f_penalty(measure='k2', beta=1.0, on={PLACES})", computed(penalties={"on": None}), 7),
    "penalty on every token, by a gate": ("kl_cov(share=0.2)", computed(penalties={"on": None}), 9),
    "gradient of the value": (
        "dapo + kl_reference(0.1, estimator='k1', gradient='k2')", computed(penalties={"gradient": None}), 9,
    ),
    "weight of the penalty left out": (
        "dapo + kl_reference(0.1, estimator='k1', weighted=True)", computed(penalties={"weighted": False}), 9,
    ),
    "straight for half a cosine": (
        "atr_grpo(delta=cosine(start=0.2, end=0.005, steps=4))", computed({"region": straight}), 9,
    ),
    "radius does not adapt": ("atr_grpo(delta=adaptive(start=0.02, kl=0.01))", computed({"region": at_start}), 9),
    "schedule stands still": ("atr_grpo(delta=linear(start=0.05, end=0.005, steps=4))", computed({"region": at_start}), 9),
    "one radius for all tokens": ("atr_grpo(delta=scaled(start=0.005))", computed({"region": at_start}), 3),
    "mean over responses of a prompt": ("grpo(aggregate=prompt_sum())", computed(aggregate=Aggregate("prompt_mean")), 1),
    "mean for a sum": ("grpo(aggregate=token_sum())", computed(aggregate=Aggregate("token_mean")), 1),
    "mean of the step for the mean of means": ("bnpo", computed(aggregate=Aggregate("token_mean")), 4),
}  # fmt: skip


@dataclass(frozen=True)
class Marked:
    """k3(new/old) as a penalty of one's own, with any trait and a slope that may be wrong."""

    marks: tuple[str, ...] = ()
    slope: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def traits(self) -> frozenset[str]:
        return frozenset(self.marks)

    def evaluate(self, batch: Batch, state: dict[str, float]) -> Terms:
        x = batch.log_ratio("new/old")
        k3 = klamp.measure("k3")
        return Terms(k3.divergence(x), self.slope * k3.divergence_slope(x))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(klamp.spec.NAMES, Marked, "marked")
    monkeypatch.setitem(klamp.language.PARTS, "marked", lambda marks=(), slope=1.0: Marked(tuple(marks), slope))


# --- the tests ------------------------------------------------------------------------------------------------


def test_law_1_catches_a_weight_that_is_not_1_on_policy() -> None:
    found = broken(Spec(factors=(Factor(Power(scale=2.0)),)), 1)
    assert found.got == 2.0 * found.expected  # type: ignore[operator]


@pytest.mark.parametrize(
    ("gate", "law"), [(sees_masked, 2), (above_the_batch_mean, 4), (even_columns, 5), (by_product, 10)]
)
def test_gates_that_break_a_law_are_caught(gate: Callable[..., Tensor], law: int) -> None:
    broken(through(gate), law)


@pytest.mark.parametrize(
    ("objective", "spec", "law"),
    [
        (Leaks, "grpo", 3),
        (LocalMean, "grpo", 4),
        (AveragesMetrics, "reinforce", 4),
        (CountsSilent, "grpo", 6),
        (FlipsValue, "dapo", 9),
        (HidesMissing, "dapo + factor(ratio='old/rollout', transform=cap(high=2))", 11),
        (Clamps, "grpo", 13),
        (NeverRaises, "grpo", 13),
        (KeepsDenominator, "grpo + rs_k2(radius=0.02)", 9),
        (KeepsDenominator, "dapo + rs_k3(radius=0.02, scope='sequence_sum')", 9),
        (Attached, "cispo", 1),
        (Attached, "sequence_mask", 1),
        (Leaks, "dppo_tv(delta=0.02)", 3),
        (FlipsValue, "rollback", 9),
    ],
)
def test_objectives_that_break_a_law_are_caught(objective: type[Objective], spec: str, law: int) -> None:
    broken(spec, law, objective=objective, batches=4)


def test_law_7_catches_regions_that_shrink_or_do_not_open() -> None:
    assert "wider region" in broken(region(Shrinking), 7).what
    assert "without the guard" in broken(region(Capped), 7).what


def test_law_8_catches_a_measure_whose_region_is_no_interval() -> None:
    with pytest.raises(klamp.UserError, match="does not grow away"):  # refused where a region is asked for
        klamp.region(Measure(bounded), 0.5)
    found = broken(Spec((Guard(Region(Measure(bounded), 0.5, 0.5)),), (Factor(),)), 8)
    assert "disagree at log w" in found.what


def test_law_9_catches_a_weight_that_is_not_the_slope_of_its_value() -> None:
    found = broken(Spec(factors=(Factor(Power(a=2.0, b=2.0)),)), 9)
    assert found.expected == pytest.approx(2.0 * found.got, rel=1e-9)  # type: ignore[operator]


@pytest.mark.usefixtures("registered")
def test_law_9_catches_a_flipped_slope_of_a_penalty() -> None:
    check_spec(Spec(factors=(Factor(),), penalties=(Marked(),)), batches=3)
    found = broken(Spec(factors=(Factor(),), penalties=(Marked(slope=-1.0),)), 9)
    assert "gradient of the penalty" in found.what
    assert found.got == pytest.approx(-found.expected)  # type: ignore[operator]


def test_law_12_catches_what_text_cannot_name() -> None:
    broken(through(lambda x, advantages, batch: outward(x, advantages)), 12, batches=2)
    broken(Spec(factors=(Factor(Power()),)), 12, batches=2)  # a transform that the language does not know


@pytest.mark.parametrize("case", MISCOMPUTED)
def test_parts_that_are_computed_as_others_are_caught(case: str) -> None:
    spec, maker, law = MISCOMPUTED[case]
    broken(spec, law, objective=maker)


@pytest.mark.parametrize(
    "spec",
    [
        "m2po(threshold=0.01)",
        "dapo + guard(measure='k3', radius=0.01, gate=entropy_below(quantile=0.5))",
        "kl_cov(share=0.2)",
        "clip_cov(share=0.2, low=-1.0, high=3.0)",
        "dapo + tis(normalize=True)",
        "real",
        "dapo + guard(measure='k3', radius=0.02, scope='group', gate='always')",
        "factor(scope='group')",
    ],
)
def test_law_4_catches_statistics_of_a_micro_batch(spec: str) -> None:
    broken(spec, 4, objective=LocalSamples)


def test_law_4_catches_a_draw_by_the_place_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(batch: Batch, seed: int, step: int) -> Tensor:
        return torch.arange(batch.mask.numel(), dtype=torch.float64).reshape(batch.shape) / 1000.0

    monkeypatch.setattr(Batch, "lottery", by_place)
    broken("clip_cov(share=0.2, low=-1.0, high=3.0)", 4)


def test_law_5_catches_a_mean_over_padding() -> None:
    broken(Spec(factors=(Factor(MeanOfAll(Cap(0.0, 2.0))),)), 5)


def test_law_8_looks_at_the_regions_of_penalties() -> None:
    outside = Guard(Region(Measure(bounded), 0.5, 0.5))
    found = broken(Spec(factors=(Factor(),), penalties=(FPenalty(on=outside),)), 8)
    assert "disagree at log w" in found.what


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("trait", "laws"),
    [("own_scale", {1}), ("selects", {1}), ("group_coupled", {1}), ("pushes_back", {3}), ("local_mean", {4})],
)
def test_traits_take_a_part_of_a_law(trait: str, laws: set[int]) -> None:
    spec = Spec(klamp.parse("grpo").guards, (Factor(),), (Marked((trait,)),))
    results = check_spec(spec, batches=4)
    assert {result.law for result in results if result.status == "exempt"} == {11}
    said = {result.law: result.reason for result in results if result.status == "held" and result.reason}
    assert said == {law: f"the spec has the trait {trait}: {LAWS[law].exempt[trait]}" for law in laws}


@pytest.mark.parametrize(
    ("objective", "spec", "law"),
    [
        (computed({"gate": with_seed}), "clip_cov(share=0.2, low=-1.0, high=3.0)", 1),  # selects
        (computed(aggregate=Aggregate("sequence_mean")), "rec(weight='exp_advantage')", 1),  # own_scale
        (computed(aggregate=Aggregate("token_mean")), "real", 1),  # group_coupled
        (MovesSilent, "real", 6),
        (computed({"gate": GATES["always"]}), "rollback", 3),  # pushes_back: what is cut is known all the same
        (AveragesMetrics, "bnpo", 4),  # local_mean: metrics are of the step all the same
    ],
)
def test_what_a_trait_leaves_of_a_law_is_asked(objective: Maker, spec: str, law: int) -> None:
    broken(spec, law, objective=objective)


@pytest.mark.usefixtures("registered")
def test_a_trait_excuses_what_it_names_only() -> None:
    doubled = Spec(factors=(Factor(Power(scale=2.0, b=1.0)),), penalties=(Marked(("own_scale",)),))
    broken(doubled, 9)  # law 1 is excused; that g is not the slope of J is not
    check_spec(
        Spec(klamp.parse("grpo").guards, (Factor(),), (Marked(("local_mean",)),)), objective=LocalMean, batches=4
    )


# --- the suite itself -----------------------------------------------------------------------------------------


def test_violation_says_law_spec_seed_and_numbers() -> None:
    found = broken(Spec(factors=(Factor(Power(a=2.0, b=2.0)),)), 9, seed=5)
    text = str(found)
    assert text.startswith("law 9 is broken: g equals autograd of the written-out objective in float64")
    assert "seed 5; batch 'one token" in text  # the smallest batch
    assert re.search(r"policy gradient g \(1 of 1 differ\) at \[0, 0\]: expected [-\d.]+, got [-\d.]+", text)
    assert isinstance(found, AssertionError)
    assert (found.seed, found.position) == (5, (0, 0))


def test_seed_fixes_the_batches_and_batches_their_number() -> None:
    one, other = (list(map(dataclasses.astuple, check_spec("dapo", seed=3, batches=4))) for _ in range(2))
    assert one == other
    few, many = check_spec("reinforce", batches=2), check_spec("reinforce", batches=10)
    assert [result.instances for result in few if result.law == 1] == [2]
    assert [result.instances for result in many if result.law == 1] == [10]


def test_a_divisor_is_filled_in_as_a_trainer_would() -> None:
    assert {result.status for result in check_spec("dr_grpo", batches=3) if result.law == 4} == {"held"}


def test_a_need_that_no_batch_carries_is_refused() -> None:
    gate = Gate(sees_masked, name="test_testing:needy", needs=frozenset({"temperature"}))
    with pytest.raises(UserError, match=r"needs temperature, which is no field of Batch; possible: .*entropy"):
        check_spec(Spec(guards=(Guard(klamp.region("k3", 0.02), gate=gate),)))


def test_draws_cover_the_layouts_and_both_sides_of_a_region() -> None:
    spec = klamp.parse("gspo + sequence_mask(high=3.0) + kl_reference(0.1)")
    drawn = {kind: make(spec, kind, torch.Generator().manual_seed(0)) for kind in KINDS}
    assert drawn["one token"].shape == (1, 1)
    assert not drawn["all masked"].mask.any()
    assert drawn["packed rows"]["row"].unique().numel() == 6
    assert not drawn["ragged rows"].mask[2].any()
    assert drawn["per-token advantages"]["advantages"].shape == (4, 6)
    tied = drawn["tied rewards"]["advantages"]
    assert tied[:2].tolist() == [0.0, 0.0]
    wide = written(spec, drawn["wide"])
    assert 0 < int(wide.cut.sum()) < int(drawn["wide"].mask.sum())
    for draw in drawn.values():
        for role in ("new", "old", "rollout", "ref"):
            assert float(draw[f"logp_{role}"].amax()) < 0.0


def test_written_objective_by_hand() -> None:
    """grpo on two rows: w = 1.5, 0.5 | 1.5 with A = 1, -2: J = 1.2, 0.5 | -3; g = 0, 0.5 | -3."""
    old = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    new = old + torch.tensor([[math.log(1.5), math.log(0.5)], [math.log(1.5), 0.0]], dtype=torch.float64)
    fields = {"logp_new": new, "logp_old": old, "advantages": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    draw = Draw("by hand", {**fields, "mask": torch.tensor([[True, True], [True, False]])})
    for clip in (False, True):
        found = written(klamp.parse("grpo"), draw, clip=clip)
        assert found.policy.reshape(-1).tolist() == pytest.approx([1.2, 0.5, -3.0, 0.0], rel=1e-14)
        assert found.g.reshape(-1).tolist() == pytest.approx([0.0, 0.5, -3.0, 0.0], rel=1e-14)
        assert found.share.tolist() == [[0.25, 0.25], [0.5, 0.0]]
        assert float(found.loss) == pytest.approx(-(1.2 + 0.5) / 4 + 3.0 / 2, rel=1e-14)
        assert found.grads[0].reshape(-1).tolist() == pytest.approx([0.0, -0.125, 1.5, 0.0], rel=1e-14)
    honest = written(klamp.parse("gspo(epsilon_low=0.5, epsilon_high=0.5)"), draw)
    s = math.sqrt(0.75)
    assert honest.g.reshape(-1).tolist() == pytest.approx([s, s, -3.0, 0.0], rel=1e-14)


def test_the_page_of_the_laws_runs() -> None:
    text = DOCS.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), scope)
    for which, law in LAWS.items():
        assert f"**{which}. {law.name}.**" in text
        assert all(f"`{trait}`" in text for trait in law.exempt)
