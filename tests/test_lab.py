"""The lab: exact worlds against enumeration by hand, theorems against stored numbers, and simulations with intervals."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import load

import klamp
from klamp.cli import main
from klamp.lab import horizon, theorems
from klamp.lab.explore import SCENARIOS, Setting, explore
from klamp.lab.updates import Rollout, Updater, expected, sampled
from klamp.lab.verify import STATEMENTS, Statement, policies, verify
from klamp.lab.worlds import bandit, chain, low_rank, tree

CASES = load("entropy")["cases"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


# --- worlds ---------------------------------------------------------------------------------------------------


def test_a_tree_enumerates_every_path() -> None:
    world = tree(2, 3)
    theta = normal(1, 7 * 2)
    logits = theta.reshape(7, 2)
    for index, path in enumerate(itertools.product(range(2), repeat=3)):
        node, total = 0, 0.0
        for token in path:
            total += float(logits[node].log_softmax(0)[token])
            node = 2 * node + 1 + token
        assert float(world.response_logp(theta)[0, index]) == pytest.approx(total, rel=1e-13)
    assert float(world.response_logp(theta).exp().sum()) == pytest.approx(1.0)


def test_a_chain_shares_its_parameters_by_the_token_before() -> None:
    world = chain(3, 4)
    theta = normal(2, 4 * 3)
    table = theta[1].reshape(4, 3).log_softmax(-1)
    path = world.tokens[50].tolist()
    wanted = float(table[3, path[0]]) + sum(float(table[a, b]) for a, b in itertools.pairwise(path))
    assert float(world.response_logp(theta)[1, 50]) == pytest.approx(wanted, rel=1e-13)
    assert float(world.visits(theta)[1].sum()) == pytest.approx(4.0)  # one state per token


@pytest.mark.parametrize("world", [bandit(5), tree(3, 3), chain(3, 3), low_rank(tree(2, 3), 4, generator())])
def test_gradient_and_fisher_are_those_of_autograd(world: Any) -> None:
    width = world.state_count * world.vocabulary if world.basis is None else world.basis.shape[0]
    theta = normal(2, width, seed=1)
    weight = normal(2, world.size, world.horizon, seed=2)
    leaf = theta.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((weight * world.token_logp(leaf)).sum(), leaf)
    assert torch.allclose(world.ascent(theta, weight, natural=False), wanted, rtol=1e-11, atol=1e-13)
    fisher = torch.zeros(2, width, width, dtype=torch.float64)
    for seed in range(2):
        scores = torch.autograd.functional.jacobian(
            lambda t, s=seed: world.response_logp(t.unsqueeze(0))[0], theta[seed]
        )
        p = world.response_logp(theta)[seed].exp()
        fisher[seed] = torch.einsum("n,ni,nj->ij", p, scores, scores)
    assert torch.allclose(world.fisher(theta), fisher, atol=1e-12)
    natural = world.ascent(theta, weight, natural=True)
    assert torch.allclose((fisher @ natural.unsqueeze(-1)).squeeze(-1), wanted, atol=1e-10)


def test_worlds_too_large_to_enumerate_are_refused() -> None:
    with pytest.raises(klamp.UserError, match="too many to enumerate"):
        tree(32, 8)
    with pytest.raises(klamp.UserError, match="at least 2 tokens"):
        chain(1, 2)


# --- updates --------------------------------------------------------------------------------------------------


def test_a_step_is_that_of_the_written_objective() -> None:
    """GRPO's clip in a chain, sampled: the logits move along the gradient of min(w A, clip(w) A), mean over tokens."""
    world, old = chain(3, 3), normal(4, 4 * 3)
    theta = old + 0.4 * normal(4, 4 * 3, seed=1)
    rollout = sampled(world, old, (normal(4, world.size, seed=2) > 0).double(), 8, generator())
    found = Updater(world, klamp.parse("grpo")).step(theta, old, old, rollout, 0.3) - theta
    leaf = theta.clone().requires_grad_()
    index = rollout.index.unsqueeze(-1).expand(-1, -1, 3)
    w = (world.token_logp(leaf) - world.token_logp(old)).gather(1, index).exp()
    a = rollout.advantages.unsqueeze(-1)
    surrogate = torch.minimum(w * a, w.clamp(0.8, 1.2) * a).mean((-1, -2)).sum()
    (wanted,) = torch.autograd.grad(0.3 * surrogate, leaf)
    assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-14)


def test_expected_updates_are_the_mean_of_sampled_ones() -> None:
    world, theta = bandit(4), normal(1, 4)
    reward = torch.tensor([[0.0, 1.0, 0.0, 2.0]], dtype=torch.float64)
    share = world.response_logp(theta).exp()
    rollout = expected(world, theta, reward)
    assert float((rollout.share * rollout.advantages).sum()) == pytest.approx(0.0, abs=1e-15)
    assert float((rollout.share * rollout.advantages**2).sum()) == pytest.approx(1.0)
    whole = Updater(world, klamp.parse("reinforce")).step(theta, theta, theta, rollout, 1.0) - theta
    each = [
        Updater(world, klamp.parse("reinforce")).step(
            theta,
            theta,
            theta,
            Rollout(torch.tensor([[i]]), torch.ones(1, 1).double(), rollout.advantages[:, i : i + 1]),
            1.0,
        )
        - theta
        for i in range(4)
    ]
    assert torch.allclose(whole, sum(share[0, i] * each[i] for i in range(4)), atol=1e-14)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["m2po", "kl_cov", "gspo", "segment", "dppo_kl", "trust_region('exact_kl_old_new', 0.02)",
                                  "trust_region('exact_tv', 0.05)", "grpo(penalty=kl_reference(0.1))", "dapo + tis",
                                  "atr_grpo(delta=linear(0.1, 0.01, steps=5))", "real"])  # fmt: skip
def test_any_spec_can_be_explored(spec: str) -> None:
    small = Setting(world="tree", vocabulary=2, horizon=2, seeds=3, inner=3, group=4, rollouts=2)
    found = explore([klamp.parse(spec), klamp.parse("grpo")], "dominant", small)
    assert all(math.isfinite(row["entropy"]["mean"]) for row in found["final"])


def test_the_seeds_of_a_spec_with_a_statistic_are_apart() -> None:
    """A budget is of one seed's step: the first of many seeds ends where it ends alone."""
    world, theta = bandit(6), normal(5, 6)
    rollout = sampled(world, theta, (normal(5, 6, seed=1) > 0).double(), 8, generator())
    new = theta + 0.5 * normal(5, 6, seed=2)
    updater = Updater(world, klamp.parse("m2po"))
    together = updater.coefficients(new, theta, theta, rollout)
    alone = updater.coefficients(new[2:3], theta[2:3], theta[2:3], Rollout(*(v[2:3] for v in vars(rollout).values())))
    assert torch.equal(together[2:3], alone)


def test_specs_that_the_lab_cannot_follow_are_refused() -> None:
    for spec, says in (("grpo + entropy_bonus()", "tokens that were not sampled"),
                       ("atr_grpo(delta=adaptive(0.02, removed=0.01))", "adapts a radius")):  # fmt: skip
        with pytest.raises(klamp.UserError, match=says):
            Updater(bandit(3), klamp.parse(spec))
    with pytest.raises(klamp.UserError, match="needs more than 9 responses"):
        explore([klamp.parse("grpo")], "needle", Setting(vocabulary=4, seeds=2, inner=1))
    with pytest.raises(klamp.UserError, match="did you mean 'rare'"):
        explore([klamp.parse("grpo")], "rar", Setting(seeds=2, inner=1))


# --- theorems -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
@pytest.mark.parametrize("natural", [False, True])
def test_entropy_of_the_stored_cases(case: dict[str, Any], natural: bool) -> None:
    """KL3 minus the clip, first order and exact, and p*; both signs occur among the cases."""
    new, old = (torch.tensor([case[name]], dtype=torch.float64).log() for name in ("pi_now", "pi_old"))
    advantages, share = torch.zeros_like(new), torch.zeros_like(new)
    for action, count in case["counts"].items():
        advantages[0, int(action)] = case["advantage"][action]
        share[0, int(action)] = count / sum(case["counts"].values())
    kl3 = klamp.region("k3", case["delta"])
    clip = klamp.region(ratio_low=1.0 - case["eps"], ratio_high=1.0 + case["eps"])
    found = theorems.compare(kl3, clip, new, old, advantages, share, case["eta"], natural)
    way = "natural" if natural else "vanilla"
    assert float(found.first_order) == pytest.approx(case[f"dH_first_order_k3_minus_sym_{way}"], rel=1e-10)
    assert float(found.exact) == pytest.approx(case[f"dH_exact_k3_minus_sym_{way}"], rel=1e-9)
    assert theorems.phi(new)[0].tolist() == pytest.approx(case["Phi"], rel=1e-12)
    assert float(theorems.phi_bar(new)) == pytest.approx(case["Phi_bar"], rel=1e-12)
    assert float(theorems.threshold(new)) == pytest.approx(case["p_star"], rel=1e-12)


def test_every_statement_holds_and_the_claim_is_conditional() -> None:
    found = verify(40)
    assert {row["name"] for row in found["statements"]} == {statement.name for statement in STATEMENTS}
    for row in found["statements"]:
        assert row["instances"] >= 10, row
        assert row["violation"] <= 1e-9, row
    shares = {(row["delta"], row["case"]): row["holds"] for row in found["conditional"]}
    assert all(share > 0.95 for (_, case), share in shares.items() if "rarer" in case)
    assert all(share < 0.05 for (_, case), share in shares.items() if "likelier" in case)
    assert len(shares) == 4
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement.name)
def test_a_wrong_side_is_a_violation(statement: Statement) -> None:
    """Each check sees a right side that is off by 1 %, or for a bound the reverse inequality."""

    def wrong(draw: torch.Generator, seeds: int) -> Any:
        for left, right, applies in statement.instances(draw, seeds):
            yield theorems.Sides(
                left if statement.relation == "=" else 2.0 * right + 1e-6, 1.01 * right + 1e-6, applies
            )

    assert Statement("wrong", "", statement.relation, wrong).check(generator(1), 5)["violation"] > 1e-4


def test_equivalence_fails_for_a_constant_beyond_the_ratio() -> None:
    """The hypothesis matters: with a constant of 1.5 times the bound the two gradients differ."""
    x, a = torch.tensor([0.3, 0.3]).double(), torch.tensor([1.0, -1.0]).double()
    inside = torch.tensor([False, False])
    left, right, applies = theorems.gradient_equivalence(x, a, inside, torch.tensor([1.8, 1.8]).double())
    assert applies.tolist() == [False, False]
    assert not torch.equal(left, right)


def test_one_sampled_token_bounds_nothing_at_its_state() -> None:
    """p = (.5, .25, .25), q = (.5, .49, .01), the first token sampled: k3 = 0, KL = 0.636."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).double().log(), torch.tensor([[0.5, 0.49, 0.01]]).double().log()
    assert float(theorems.kl(p, q)) == pytest.approx(0.636, abs=1e-3)
    where = klamp.region("k3", 0.02)
    assert not bool(theorems.bounded_everywhere(where, "k3", q, p).applies)
    assert bool((theorems.mostly_inside(where, q, p).left <= theorems.mostly_inside(where, q, p).right).all())


def test_worst_cases_of_kl3() -> None:
    """At delta = 0.02: KL <= 0.02 and TV <= 0.09967."""
    where = klamp.region("k3", 0.02)
    assert theorems.worst_case(where, "k3") == pytest.approx(0.02, rel=1e-12)
    assert theorems.worst_case(where, "tv") == pytest.approx(0.09967, abs=5e-6)


def test_the_surrogate_is_exact_on_one_token_and_off_by_less_than_its_bound_on_a_tree() -> None:
    old, reward = normal(3, 5), normal(3, 5, seed=1)
    assert float(horizon.gap(bandit(5), old + normal(3, 5, seed=2), old, reward).max()) < 1e-15
    world = tree(3, 4)
    old = normal(50, world.state_count * 3)
    sides = horizon.three_halves(world, old + 0.1 * normal(*old.shape, seed=3), old, normal(50, world.size, seed=4))
    assert bool((sides.left > 1e-6).all())
    assert bool((sides.left < 0.2 * sides.right).all())  # valid, and loose


def test_random_policies_are_of_every_peakedness() -> None:
    new, old = policies(generator(), 200)
    entropy = theorems.entropy(old)
    assert float(entropy.min()) < 0.5
    assert float(entropy.max()) > 2.0
    assert float(theorems.kl(old, new).max()) < 0.5


# --- exploration ----------------------------------------------------------------------------------------------

BELOW = "atr_grpo(delta=0.02314355131420976)"  # [0.8, 1.2308]: as the clip below, wider above
ABOVE = "atr_grpo(delta=0.017678443206045377)"  # [0.8236, 1.2]


@pytest.mark.parametrize(("scenario", "below", "above"), [("rare", 1, -1), ("dominant", -1, 1)])
@pytest.mark.parametrize("group", [16, 0])
def test_the_sign_depends_on_the_scenario_and_on_the_radius(scenario: str, below: int, above: int, group: int) -> None:
    specs = [klamp.parse(text) for text in ("grpo", BELOW, ABOVE)]
    found = explore(specs, scenario, Setting(group=group))
    for difference, sign in zip(found["difference"], (below, above), strict=True):
        entropy = difference["entropy"]
        assert sign * entropy["mean"] > 0.0
        assert sign * (entropy["low"] if sign > 0 else entropy["high"]) > 0.0  # the interval excludes zero
    json.dumps(found, allow_nan=False)


def test_what_is_observed_adds_up() -> None:
    found = explore([klamp.parse("grpo")], "several", Setting(seeds=50, inner=4, rollouts=3))
    final = {name: value["mean"] for name, value in found["final"][0].items()}
    assert final["rare"] + final["middle"] + final["likely"] == pytest.approx(1.0)
    assert final["correct"] == pytest.approx(final["pass@1"])
    assert final["pass@1"] < final["pass@4"] < final["pass@16"] <= 1.0
    assert final["correct"] > found["start"]["correct"]["mean"]
    assert len(found["course"][0]["entropy"]) == 4
    assert set(SCENARIOS) == {"rare", "dominant", "noise", "several", "needle"}


# --- the page and the verbs -----------------------------------------------------------------------------------

THEORY = (Path(__file__).parents[1] / "docs" / "theory.md").read_text()


def test_the_numbers_of_the_page_are_those_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "verify", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["conditional"]:
        case = row["case"].removeprefix("the affected token is ")
        numbers = f"{100 * row['holds']:.1f} % of {row['instances']:,} | {100 * row['statistic_decides']:.1f} %"
        assert f"| radius {row['delta']:.5f}, {case} | {numbers} |" in THEORY
    specs = ["grpo", "atr_grpo(delta=0.023143551)", "atr_grpo(delta=0.017678443)"]
    assert "klamp lab explore " + " ".join(f"'{spec}'" for spec in specs) in THEORY
    assert main(["lab", "explore", *specs, "--json"]) == 0
    for found in json.loads(capsys.readouterr().out):
        cells = [[1e3 * d["entropy"][name] for name in ("mean", "low", "high")] for d in found["difference"]]
        text = " | ".join("{:+.1f} [{:+.1f}, {:+.1f}] e-3".format(*cell) for cell in cells)
        assert f"| {found['meaning']} | {text} |" in THEORY


def test_every_statement_is_on_the_page() -> None:
    for statement in STATEMENTS:
        assert f"`{statement.name}`" in THEORY


def test_a_violated_statement_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("klamp.lab.verify.TOLERANCE", -1.0)
    assert main(["lab", "verify", "--seeds", "2"]) == 1
    assert "gradient_equivalence" in capsys.readouterr().out


def test_explore_prints_differences_to_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "lab",
        "explore",
        "grpo",
        "dapo",
        "--world",
        "chain",
        "--seeds",
        "20",
        "--inner",
        "4",
        "--scenario",
        "rare",
    ]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "chain of 4 tokens, 20 seeds" in out
    assert "dapo() minus grpo(), paired by seed" in out
