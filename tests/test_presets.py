"""Every preset against its method written out by hand: loss, per-token loss, g, penalty slope and gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles import methods
from oracles.batches import Fields
from oracles.methods import CASES, Case, Method, Terms, each
from oracles.special import SPECIAL, whole_fields
from running import batch, close, run

import klamp

SEEDS = range(20)
NAMES = [case.text for case in CASES]


def drawn(case: Case, out: Any, fields: Fields) -> torch.Tensor | None:
    """The tokens that a random selection took: cut ones (the oracle takes away the clipped), or penalised ones."""
    if not case.draws:
        return None
    return (fields["mask"] & ~out.kept) | (out.grad_penalty != 0)


def compare(case: Case, spec: klamp.Spec, fields: Fields) -> None:
    out, grad, _ = run(spec, fields)
    wanted = methods.evaluate(fields, case.method, case.kind, case.divisor, drawn(case, out, fields))
    for got, want in (
        (out.per_token, wanted.per_token), (out.grad_policy, wanted.grad_policy),
        (out.grad_penalty, wanted.grad_penalty), (out.loss, wanted.loss), (grad, wanted.grad),
    ):  # fmt: skip
        close(got, want, rtol=1e-12, atol=1e-13)


def shapes(case: Case) -> tuple[bool, ...]:
    return (False, True) if case.per_token else (False,)


def batch_of(case: Case, seed: int) -> Fields:
    """Small and larger batches in turn, near and far from the old policy, advantages per response or per token."""
    rows, tokens = ((5, 7), (3, 12), (9, 4))[seed % 3]
    return whole_fields(
        seed, rows, tokens, per_token=case.per_token and seed % 2 == 1, spread=(0.4, 0.1, 1.0, 0.02)[seed % 4]
    )


def test_every_preset_has_an_oracle() -> None:
    assert {case.preset for case in CASES} == set(klamp.list_presets())


def test_every_preset_is_tested_by_default_and_with_arguments() -> None:
    alone = {"gpg", "reinforce"}  # take no argument
    for preset in {case.preset for case in CASES}:
        texts = [case.text for case in CASES if case.preset == preset]
        assert len(texts) > 1 or preset in alone
        assert all(preset + "(" in text for text in texts)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_random_batches(case: Case) -> None:
    spec = klamp.parse(case.text)
    for seed in SEEDS:
        compare(case, spec, batch_of(case, seed))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("name", SPECIAL)
def test_corners(case: Case, name: str) -> None:
    spec = klamp.parse(case.text)
    for per_token in shapes(case):
        compare(case, spec, SPECIAL[name](7, per_token))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_micro_batches(case: Case) -> None:
    """A step cut into three, once with an empty part, has the whole step's loss and gradient; bnpo the mean of means."""
    objective = klamp.Objective(case.text)
    for seed, empty in ((1, False), (4, True)):
        fields = whole_fields(seed, 9, 5, per_token=case.per_token)
        fields["mask"][3:6] &= not empty
        leaf = fields["logp_new"].clone().requires_grad_(True)
        parts = [
            batch({name: value[3 * i : 3 * i + 3] for name, value in (fields | {"logp_new": leaf}).items()})
            for i in range(3)
        ]
        stats = sum((objective.stats(part) for part in parts[1:]), objective.stats(parts[0]))
        outs = [objective(part, stats) for part in parts]
        loss = sum(out.loss for out in outs)
        (grad,) = torch.autograd.grad(loss, leaf)
        chosen = None
        if case.draws:
            rows = [drawn(case, out, {"mask": part.mask}) for out, part in zip(outs, parts, strict=True)]
            chosen = torch.cat(rows)
        wanted = methods.evaluate(fields, case.method, case.kind, case.divisor, chosen, 3)
        close(loss, wanted.loss, rtol=1e-12, atol=1e-13)
        close(grad, wanted.grad, rtol=1e-12, atol=1e-13)


CUTTING = sorted({case.preset for case in CASES if case.cuts})


@pytest.mark.parametrize("preset", CUTTING)
def test_the_batches_show_cut_and_kept_tokens(preset: str) -> None:
    """With some arguments, of the tokens with an advantage, some are cut and some are kept, in the oracle itself."""
    best = 0.0
    for case in (case for case in CASES if case.preset == preset and case.cuts):
        spec, cut, live = klamp.parse(case.text), 0, 0
        for seed in SEEDS[:8]:
            fields = batch_of(case, seed)
            out = run(spec, fields)[0] if case.draws else None
            chosen = None if out is None else drawn(case, out, fields)
            wanted = methods.evaluate(fields, case.method, case.kind, case.divisor, chosen)
            advantages = fields["advantages"]
            advantages = advantages[:, None] if advantages.ndim == 1 else advantages
            active = fields["mask"] & (advantages != 0)
            cut, live = cut + int((active & (wanted.grad_policy == 0)).sum()), live + int(active.sum())
        best = max(best, min(cut, live - cut) / live)
    assert best > 0.05


# --- the comparison can fail ----------------------------------------------------------------------------------


def flipped(method: Method) -> Method:
    """The same with the sign of J turned for the tokens that have a negative advantage."""

    def other(step: list[methods.Sample]) -> list[Terms]:
        found = method(step)
        return [replace(t, j=torch.where(s.advantage < 0, -t.j, t.j)) for s, t in zip(step, found, strict=True)]

    return other


def pulled(method: Method) -> Method:
    """The same with the sign of the penalty turned."""
    return lambda step: [replace(t, penalty=-t.penalty) for t in method(step)]


def uncounted(method: Method) -> Method:
    """The same with rejected tokens left in the denominator."""
    return lambda step: [replace(t, counts=torch.ones_like(t.counts)) for t in method(step)]


BROKEN = [
    *(
        (name, flipped)
        for name in ("grpo()", "gspo()", "gmpo()", "cispo()", "vespo()", "dppo_tv()", "m2po()", "fipo()")
    ),
    *((name, pulled) for name in ("ppo_kl_penalty()", "kl_cov(share=0.2, coefficient=0.3)", "dro()", "ipo()")),
    ("grpo() + rs_k3(radius=0.01, scope='token')", uncounted),
]


@pytest.mark.parametrize(("name", "change"), BROKEN, ids=[name for name, _ in BROKEN])
def test_a_changed_sign_is_seen(name: str, change: Any) -> None:
    case = next(case for case in CASES if case.text == name)
    fields = whole_fields(6, 9, 7)
    compare(case, klamp.parse(case.text), fields)
    with pytest.raises(AssertionError):
        compare(replace(case, method=change(case.method)), klamp.parse(case.text), fields)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("rollback()", each(methods.rollback(-0.3, 0.2))),
        ("segment()", each(methods.turn_clip(0.21))),
        ("dppo_kl()", each(methods.dppo("tv", 0.05))),
        ("grpo() + opsm()", methods.opsm(each(methods.GRPO), -0.5)),
        ("dapo() + icepop()", methods.icepop(each(methods.DAPO), 0.9, 5.0)),
        ("m2po()", methods.m2po(0.08)),
        ("real()", methods.real(-0.5)),
    ],
)
def test_a_changed_number_is_seen(text: str, wrong: Method) -> None:
    case = replace(next(case for case in CASES if case.text == text), method=wrong)
    spec, seen = klamp.parse(text), 0
    for seed in SEEDS:
        try:
            compare(case, spec, batch_of(case, seed))
        except AssertionError:
            seen += 1
    assert seen > 0
