"""Log-probs of given tokens straight from hidden states and the output matrix, with entropy and the likeliest tokens.

The logits are made block by block and reduced by an online log-sum-exp; backward makes them again. So the memory is that of
one block beside the inputs and their gradients, for four matrix products instead of three.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from klamp.errors import UserError
from klamp.kernels.head import LOWEST, Blocks, Head, add_product, named_memory, narrow_products, strips
from klamp.kernels.loops import loops
from klamp.kernels.online import Online, Top

Slope = Callable[..., None]
SMALLER = "give a smaller chunk= (tokens of a block), fewer tokens a call, or a narrower precision"


class TokenLogProbs(NamedTuple):
    """``logp``: log q(token). ``entropy``: of q, nats. The others are detached.

    ``lse``: the log-normaliser of z. ``top_logp``, ``top_ids``: the likeliest tokens in order. ``at_logp``: of the tokens
    ``at``. ``tail_logp``: the log of the mass of all tokens beside the given one and those of ``top_ids`` or ``at``, by
    its own log-sum-exp. ``phi_mean``: sum q^2 (log q + H), which decides whether a push raises the entropy. Where a token id is below 0 all are 0 (ids -1).
    """

    logp: Float[Tensor, "N"]
    entropy: Float[Tensor, "N"] | None = None
    lse: Float[Tensor, "N"] | None = None
    top_logp: Float[Tensor, "N K"] | None = None
    top_ids: Int[Tensor, "N K"] | None = None
    at_logp: Float[Tensor, "N K"] | None = None
    tail_logp: Float[Tensor, "N"] | None = None
    phi_mean: Float[Tensor, "N"] | None = None


def token_logprobs(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    token_ids: Integer[Tensor, "N"],
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    phi: bool = False,
    top_k: int | None = None,
    at: Integer[Tensor, "N K"] | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> TokenLogProbs:
    """log q(token) of each position, q = softmax(z), z = scale (h W^T + b) / temperature, without the logits of all of them.

    With ``softcap`` z = softcap tanh(scale (h W^T + b) / softcap) / temperature, as transformers' models have it. Gradients of
    log-probs and entropy reach ``hidden``, ``weight`` and ``bias``: d log q(a) = 1[a] - q, d H = -q (log q + H). Positions whose
    id is below 0 are left out: whatever their hidden state holds changes nothing, and their results and gradients are 0.
    ``top_k``: the likeliest tokens; ``at``: ids of other tokens, each at most once in a row, -1 for none; one of the two.
    ``phi``: also ``phi_mean``; it needs ``entropy``. ``chunk``: tokens of a block. Sums are in float32 for narrower inputs, and so are the results. Raises UserError for shapes
    that do not fit, an id beyond the vocabulary, and a ``top_k`` outside 1 to V.
    """
    head = Head(weight, bias, temperature, softcap, scale)
    check(hidden, head, token_ids, chunk)
    _check_others(head, token_ids, top_k, at)
    if phi and not entropy:
        raise UserError("phi=True needs entropy=True: sum q^2 (log q + H) is of both")
    kept = token_ids >= 0
    whole = bool(kept.all())
    chosen = hidden if whole else hidden[kept]
    ids, others = ((one if whole or one is None else one[kept]) for one in (token_ids, at))
    assert ids is not None
    others = None if others is None else others.to(torch.int64)
    with named_memory(SMALLER):
        found = _LogProbs.apply(
            chosen, weight, bias, ids.to(torch.int64), others, head, entropy, phi, top_k or 0, chunk
        )  # type: ignore[no-untyped-call]
    fields = TokenLogProbs._fields
    wanted = (True, entropy, True, top_k, top_k, at is not None, top_k or at is not None, phi)
    made = {name: value for name, value, given in zip(fields, found, wanted, strict=True) if given}
    if not whole:
        made = {name: spread(value, kept, -1 if name == "top_ids" else 0) for name, value in made.items()}
    return TokenLogProbs(**made)


def spread(values: Tensor, kept: Tensor, fill: int = 0) -> Tensor:
    """Values of the kept positions at their places, ``fill`` elsewhere."""
    return values.new_full((kept.shape[0], *values.shape[1:]), fill).index_put((kept,), values)


def check(hidden: Tensor, head: Head, token_ids: Tensor, chunk: int | None) -> None:
    """Refuse shapes that do not fit each other, ids beyond the vocabulary, and empty blocks."""
    if hidden.dim() != 2 or hidden.shape[1] != head.weight.shape[1] or token_ids.shape != hidden.shape[:1]:
        raise UserError(
            f"hidden [N, H], weight [V, H] and token_ids [N] must fit each other; got {list(hidden.shape)}, "
            f"{list(head.weight.shape)} and {list(token_ids.shape)}"
        )
    if hidden.dtype != head.weight.dtype:
        raise UserError(f"hidden is {hidden.dtype}, the weight {head.weight.dtype}: cast one, as autocast would")
    if token_ids.numel() and int(token_ids.max()) >= head.size:
        raise UserError(f"token id {int(token_ids.max())} is beyond the vocabulary of {head.size}")
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk={chunk} must be at least 1")


def _check_others(head: Head, token_ids: Tensor, top_k: int | None, at: Tensor | None) -> None:
    if top_k is not None and not 1 <= top_k <= head.size:
        raise UserError(f"top_k={top_k} must be from 1 to the vocabulary's {head.size}")
    if at is None:
        return
    if top_k is not None:
        raise UserError("give top_k for the likeliest tokens, or at for given ones, not both")
    if at.dim() != 2 or at.shape[0] != token_ids.shape[0]:
        raise UserError(f"at must be [N, K], N = {token_ids.shape[0]}; got {list(at.shape)}")
    if at.numel() and int(at.max()) >= head.size:
        raise UserError(f"token id {int(at.max())} in at is beyond the vocabulary of {head.size}")


class _LogProbs(torch.autograd.Function):
    """Forward reduces blocks of logits, backward makes them again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, at: Tensor | None, head: Head,
        entropy: bool, phi: bool, top_k: int, chunk: int | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        blocks = Blocks(head, hidden, chunk)
        sums = blocks.new_empty(blocks.count, 0)
        rest, top, twice = Online(sums, entropy), Top(sums, top_k), Online(sums, True) if phi else None
        own = sums.new_full((blocks.count, 1), LOWEST)
        others = sums.new_full((blocks.count, 0 if at is None else at.shape[1]), LOWEST)
        boxed = top_k > 0 or at is not None
        with narrow_products(hidden, weight):
            for part, here in itertools.product(blocks.parts, blocks.tokens):
                z = blocks.logits(here, part)
                if twice is not None:  # sum q^2 and sum q^2 log q are of softmax(2 z)
                    for some, strip in strips(here, z):
                        twice.take(some, 2.0 * strip)
                loops(z).lift(z, ids[here, None], part.start, own[here], leave=boxed)
                if at is not None:
                    loops(z).lift(z, at[here], part.start, others[here], leave=True)
                if top_k:
                    top.take(here, z, part.start, rest)
                for some, strip in strips(here, z):
                    rest.take(some, strip)
        best, who = top.with_own(own[:, 0], ids, rest) if top_k else (top.best, top.who)
        tail = rest.lse
        if boxed:
            own_too = best.new_full(own.shape, LOWEST).where((who == ids[:, None]).any(1, keepdim=True), own)
            rest.take(slice(None), torch.cat([own_too, others, best], 1))
        lse = rest.lse
        spread_ = lse - rest.mean if entropy else lse
        if at is not None:  # the token itself has its own place
            others = torch.where(at == ids[:, None], own, others)
        ctx.save_for_backward(hidden, weight, bias, ids, lse, spread_)
        ctx.head, ctx.entropy, ctx.chunk = head, entropy, chunk
        ctx.set_materialize_grads(False)
        logp, top_logp, at_logp, tail_logp = (_logp(z, lse) for z in (own[:, 0], best, others, tail))
        found = lse if twice is None else (twice.lse - 2.0 * lse).exp() * (0.5 * twice.mean - lse + spread_)
        given = (lse.clone(), top_logp, who, at_logp, tail_logp, found)
        ctx.mark_non_differentiable(*given, *(() if entropy else (spread_,)))
        return logp, spread_, *given

    @staticmethod
    def backward(
        ctx: Any, of_logp: Tensor | None, of_entropy: Tensor | None, *unused: Any
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, _bias, ids, lse, spread_ = ctx.saved_tensors
        head: Head = ctx.head
        one = None if of_logp is None else of_logp.to(head.dtype)
        two = None if of_entropy is None or not ctx.entropy else of_entropy.to(head.dtype)

        def slope(here: slice, part: slice, out: Tensor, z: Tensor) -> None:
            ups = (None if g is None else g[here] for g in (one, two))
            loops(z).logprob_slopes(z, out, head, part.start, lse[here], spread_[here], ids[here], *ups)

        with named_memory(SMALLER), narrow_products(hidden, weight):
            grads = pull_back(Blocks(head, hidden, ctx.chunk), slope, ctx.needs_input_grad[:3])
        return (*grads, *[None] * 7)


def _logp(z: Tensor, lse: Tensor) -> Tensor:
    """z - lse, -inf for what stands for -inf."""
    return torch.where(z <= 0.5 * LOWEST, -torch.inf, z - (lse if z.dim() == 1 else lse[:, None]))


def pull_back(blocks: Blocks, slope: Slope, wanted: Sequence[bool], *beside: Blocks) -> tuple[Tensor | None, ...]:
    """Gradients to hidden, weight and bias from ``slope(tokens, words, out, z)``: d/d(h W^T + b) of part of a block into out.

    ``out`` may be z itself. ``beside``: other policies whose logits the slope needs too, after z; those it may overwrite.
    """
    head = blocks.head
    to_hidden = blocks.new_empty(*blocks.states.shape).zero_() if wanted[0] else None
    to_weight = torch.empty_like(head.weight) if wanted[1] else None
    to_bias = None if head.bias is None or not wanted[2] else torch.empty_like(head.bias)
    # The products take slopes in the precision of the factors; the bias takes them as they are.
    buffer = blocks.buffer if to_bias is not None else blocks.buffer.to(head.factors)
    for part in blocks.parts:
        weights = blocks.new_empty(*blocks.rows(part).shape).zero_() if wanted[1] else None
        biases = blocks.new_empty(part.stop - part.start).zero_()
        for here in blocks.tokens:
            z, *others = (policy.logits(here, part) for policy in (blocks, *beside))
            found = buffer[: z.shape[0], : z.shape[1]]
            for each in strips(here, found, z, *others):
                slope(each[0], part, *each[1:])
            if to_hidden is not None:
                add_product(to_hidden[here], found, blocks.rows(part))
            if weights is not None:
                add_product(weights, found.t(), blocks.states[here])
            if to_bias is not None:
                biases += found.sum(0)
        if to_weight is not None:
            to_weight[part] = weights  # type: ignore[assignment]
        if to_bias is not None:
            to_bias[part] = biases
    return None if to_hidden is None else to_hidden.to(blocks.dtype), to_weight, to_bias
