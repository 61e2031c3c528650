"""Divergences of two policies over the whole vocabulary, streamed over it for both at once, and over buckets of it.

With p = softmax(z_old), q = softmax(z_new), D = sum_v f(q_v / p_v) p_v and its gradient dD/dz_new = s - q sum s (see
``klamp.kernels.terms``) need both log-normalisers. Given, one pass of two matrix products finds D, and backward takes four
more. Without them the power family follows from running sums in that one pass; tv and js take one pass more.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from klamp.errors import UserError
from klamp.kernels.head import LOWEST, Blocks, Head, named_memory, narrow_products, strips
from klamp.kernels.logprobs import SMALLER, check, pull_back, spread
from klamp.kernels.loops import loops
from klamp.kernels.online import Online, Tilted
from klamp.kernels.terms import Pair, singular, value
from klamp.whole import Kind, kind

_INFINITE = 1e25  # what a probability of 0 leads to under LOWEST is meant to be infinite


def divergences(
    hidden_new: Float[Tensor, "N H"],
    weight_new: Float[Tensor, "V H"],
    hidden_old: Float[Tensor, "N G"],
    weight_old: Float[Tensor, "V G"],
    measures: Sequence[str] = ("kl_old_new",),
    token_ids: Integer[Tensor, "N"] | None = None,
    lse_new: Float[Tensor, "N"] | None = None,
    lse_old: Float[Tensor, "N"] | None = None,
    *,
    bias_new: Float[Tensor, "V"] | None = None,
    bias_old: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk: int | None = None,
) -> dict[str, Float[Tensor, "N"]]:
    """D(old, new) of each position by name: kl_old_new, kl_new_old, tv, js, hellinger2, chi2_*, power(a); natural units.

    The logits are those of ``token_logprobs`` with the same options. Gradients reach the new policy's ``hidden_new``,
    ``weight_new`` and ``bias_new``; the old one is detached. Positions whose ``token_ids`` are below 0 are left out: 0, whatever
    they hold. ``lse_new``, ``lse_old``: the log-normalisers where known (``TokenLogProbs.lse``); they spare tv, js and a power
    near 0 or 1 a pass, and make every D accurate to second order in their errors. Not below 0; inf where it is not finite.
    Raises UserError for an unknown measure and shapes that do not fit. Equations: ``klamp.whole``.
    """
    kinds = [kind(name) for name in measures]
    new, old = (
        Head(weight_new, bias_new, temperature, softcap, scale),
        Head(weight_old, bias_old, temperature, softcap, scale),
    )
    ids = torch.zeros_like(hidden_new[:, 0], dtype=torch.int64) if token_ids is None else token_ids
    check(hidden_new, new, ids, chunk)
    check(hidden_old, old, ids, chunk)
    if new.size != old.size:
        raise UserError(f"the policies have vocabularies of {new.size} and {old.size} words; they must be the same")
    for name, lse in (("lse_new", lse_new), ("lse_old", lse_old)):
        if lse is not None and lse.shape != ids.shape:
            raise UserError(f"{name} must be [N], N = {len(ids)}; got {list(lse.shape)}")
    kept = ids >= 0
    whole = bool(kept.all())
    rows = [one if whole or one is None else one[kept] for one in (hidden_new, hidden_old, lse_new, lse_old)]
    with named_memory(SMALLER):
        found: Tensor = _Divergences.apply(rows[0], weight_new, bias_new, *rows[1:], new, old, kinds, chunk)  # type: ignore[no-untyped-call]
    found = found if whole else spread(found, kept)
    return dict(zip(measures, found.unbind(1), strict=True))


def bucket_divergences(
    logq: Float[Tensor, "... B"], logp: Float[Tensor, "... B"], measures: Sequence[str] = ("kl_old_new",)
) -> Mapping[str, Float[Tensor, "..."]]:
    """D of the same distributions merged into buckets, from the log-probs of each under the new and the old policy.

    A lower bound of D over the vocabulary if the buckets are a partition of it: {sampled token}, the likeliest tokens and one
    bucket for the rest, whose log-prob is a log-sum-exp of its own (``TokenLogProbs.tail_logp``). Source: data processing.
    """
    pair = Pair(logq.clamp(min=LOWEST), logp.clamp(min=LOWEST))
    return {name: _finite(value(kind(name), pair).double().sum(-1)) for name in measures}


def partition(
    logp: Float[Tensor, "N"], token_ids: Integer[Tensor, "N"], others: Float[Tensor, "N K"], ids: Integer[Tensor, "N K"],
    tail: Float[Tensor, "N"],
) -> Float[Tensor, "N B"]:  # fmt: skip
    """Log-probs of the buckets {token}, the others, the rest: a token that is among the others is counted there alone."""
    own = torch.where((ids == token_ids[:, None]).any(1), -torch.inf, logp)
    return torch.cat([own[:, None], others, tail[:, None]], 1)


class _Divergences(torch.autograd.Function):
    """Forward reduces pairs of blocks, backward makes them again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, hidden_old: Tensor, lse_new: Tensor | None,
        lse_old: Tensor | None, new: Head, old: Head, kinds: list[Kind], chunk: int | None,
    ) -> Tensor:  # fmt: skip
        blocks = Blocks(new, hidden, chunk), Blocks(old, hidden_old, chunk)
        with narrow_products(hidden, weight, hidden_old, old.weight):
            if lse_new is None or lse_old is None:
                if all(which.a is not None and not singular(which) for which in kinds):
                    found, mean, lses = _running(*blocks, kinds)
                else:
                    lses = (_normaliser(blocks[0]) if lse_new is None else lse_new,
                            _normaliser(blocks[1]) if lse_old is None else lse_old)  # fmt: skip
                    found, mean = _given(*blocks, kinds, lses)
            else:
                lses = lse_new.detach(), lse_old.detach()
                found, mean = _given(*blocks, kinds, lses)
        ctx.save_for_backward(hidden, weight, bias, hidden_old, mean, *lses)
        ctx.parts = new, old, kinds, chunk
        whole: Tensor = _finite(found).to(new.dtype)
        return whole

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, _bias, hidden_old, mean, lse_new, lse_old = ctx.saved_tensors
        new, old, kinds, chunk = ctx.parts
        sums = upstream.to(new.dtype)
        shift = (sums * mean).sum(1)

        def slopes(here: slice, part: slice, out: Tensor, z: Tensor, y: Tensor) -> None:
            loops(z).pair_slopes(z, y, out, (lse_new[here], lse_old[here]), kinds, new, sums[here], shift[here])

        with named_memory(SMALLER), narrow_products(hidden, weight, hidden_old, old.weight):
            grads = pull_back(
                Blocks(new, hidden, chunk), slopes, ctx.needs_input_grad[:3], Blocks(old, hidden_old, chunk)
            )
        return (*grads, *[None] * 7)


def _normaliser(blocks: Blocks) -> Tensor:
    """The log-sum-exp of one policy's logits, [N]."""
    sums = Online(blocks.new_empty(blocks.count))
    for part, here in itertools.product(blocks.parts, blocks.tokens):
        for some, z in strips(here, blocks.logits(here, part)):
            sums.take(some, z)
    return sums.lse


def _given(new: Blocks, old: Blocks, kinds: list[Kind], lses: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(D, sum of slopes) [N, kinds], both log-normalisers known."""
    found = new.new_empty(new.count, len(kinds)).double().zero_()
    mean = torch.zeros_like(found)
    for part, here in itertools.product(new.parts, new.tokens):
        for some, z, y in strips(here, new.logits(here, part), old.logits(here, part)):
            loops(z).pair_sums(z, y, (lses[0][some], lses[1][some]), kinds, found[some], mean[some])
    return found, mean.to(new.head.dtype)


def _running(new: Blocks, old: Blocks, kinds: list[Kind]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """(D, sum of slopes) [N, kinds] of the power family and both log-normalisers, in one pass.

    KL(old||new) = lse_new - lse_old - E_old[y], y = z_new - z_old; KL(new||old) likewise; and with S_a = sum p^(1-a) q^a,
    log S_a = lse(z_old + a y) - a lse_new - (1-a) lse_old: D = (S_a - 1) / (a(a-1)), sum of slopes a D.
    """
    powers = [float(which.a) for which in kinds]  # type: ignore[arg-type]
    sums = Tilted(new.new_empty(new.count), (*powers, 0.0, 1.0), {0.0, 1.0}.intersection(powers))
    for part, here in itertools.product(new.parts, new.tokens):
        for some, z, y in strips(here, new.logits(here, part), old.logits(here, part)):
            sums.take(some, z, y)
    lse_new, lse_old = sums.lse(1.0), sums.lse(0.0)
    shift = (lse_new - lse_old).double()
    columns = []
    for which, a in zip(kinds, powers, strict=True):
        if a == 0.0:
            columns.append(shift - sums.mean(a).double())
        elif a == 1.0:
            columns.append(sums.mean(a).double() - shift)
        else:
            log = sums.lse(a).double() - a * shift - lse_old.double()
            columns.append(which.scale * log.expm1() / (a * (a - 1.0)))
    found = torch.stack(columns, 1)
    slopes = found * found.new_tensor(powers)
    return found, slopes.to(new.head.dtype), (lse_new, lse_old)


def _finite(found: Tensor) -> Tensor:
    return torch.where(found > _INFINITE, torch.inf, found.clamp(min=0.0))
