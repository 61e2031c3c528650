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
from klamp.objective import LossOutput
from klamp.penalties import Terms
from klamp.regions import Region
from klamp.stats import Stats
from klamp.testing import LawViolation, check_spec
from klamp.testing.draws import KINDS, Draw, make
from klamp.testing.written import written

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


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("trait", "laws"),
    [("own_scale", {1}), ("selects", {1}), ("group_coupled", {1, 6}), ("pushes_back", {3}), ("local_mean", {4})],
)
def test_traits_switch_laws_off(trait: str, laws: set[int]) -> None:
    spec = Spec(klamp.parse("grpo").guards, (Factor(),), (Marked((trait,)),))
    exempt = {result.law: result.reason for result in check_spec(spec, batches=4) if result.status == "exempt"}
    assert exempt.keys() - {11} == laws
    assert all(exempt[law] == f"the spec has the trait {trait}" for law in laws)


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
    for number, law in klamp.testing.LAWS.items():
        assert f"**{number}. {law.name}.**" in text
