"""Log-probs of given tokens straight from hidden states and the output matrix, with entropy and the likeliest tokens.

The logits are made block by block and reduced by an online log-sum-exp; backward makes them again. So the memory is that of
one block beside the inputs and their gradients, for four matrix products instead of three.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from klamp.errors import UserError
from klamp.kernels.head import LOWEST, TOKENS, WORDS, Head


class TokenLogProbs(NamedTuple):
    """``logp``: log q(token). ``entropy``: of q, nats. ``top_logp``, ``top_ids``: the likeliest tokens, detached, in order.

    Where a token id is below 0 all are 0 (ids -1).
    """

    logp: Float[Tensor, "N"]
    entropy: Float[Tensor, "N"] | None = None
    top_logp: Float[Tensor, "N K"] | None = None
    top_ids: Int[Tensor, "N K"] | None = None


def token_logprobs(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    token_ids: Integer[Tensor, "N"],
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    top_k: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> TokenLogProbs:
    """log q(token) of each position, q = softmax(z), z = scale (h W^T + b) / temperature, without the logits of all of them.

    With ``softcap`` z = softcap tanh(scale (h W^T + b) / softcap) / temperature, as transformers' models have it. Gradients of
    log-probs and entropy reach ``hidden``, ``weight`` and ``bias``: d log q(a) = 1[a] - q, d H = -q (log q + H). Positions whose
    id is below 0 are left out: whatever their hidden state holds changes nothing, and their results and gradients are 0.
    ``chunk``: tokens of a block. Sums are in float32 for narrower inputs, and so are the results. Raises UserError for shapes
    that do not fit, an id beyond the vocabulary, and a ``top_k`` outside 1 to V.
    """
    head = Head(weight, bias, temperature, softcap, scale)
    _check(hidden, head, token_ids, top_k, chunk)
    kept = token_ids >= 0
    whole = bool(kept.all())
    chosen = hidden if whole else hidden[kept]
    ids = (token_ids if whole else token_ids[kept]).to(torch.int64)
    tokens = TOKENS if chunk is None else chunk
    logp, spread, top_logp, top_ids = _LogProbs.apply(chosen, weight, bias, ids, head, entropy, top_k or 0, tokens)  # type: ignore[no-untyped-call]
    found = (logp, spread if entropy else None, top_logp if top_k else None, top_ids if top_k else None)
    if whole:
        return TokenLogProbs(*found)
    return TokenLogProbs(*(None if one is None else _spread(one, kept, -1 if one is top_ids else 0) for one in found))  # type: ignore[arg-type]


def _spread(values: Tensor, kept: Tensor, fill: int) -> Tensor:
    """Values of the kept positions at their places, ``fill`` elsewhere."""
    return values.new_full((kept.shape[0], *values.shape[1:]), fill).index_put((kept,), values)


def _check(hidden: Tensor, head: Head, token_ids: Tensor, top_k: int | None, chunk: int | None) -> None:
    if hidden.dim() != 2 or hidden.shape[1] != head.weight.shape[1] or token_ids.shape != hidden.shape[:1]:
        raise UserError(
            f"token_logprobs takes hidden [N, H], weight [V, H] and token_ids [N]; got {list(hidden.shape)}, "
            f"{list(head.weight.shape)} and {list(token_ids.shape)}"
        )
    if token_ids.numel() and int(token_ids.max()) >= head.size:
        raise UserError(f"token id {int(token_ids.max())} is beyond the vocabulary of {head.size}")
    if top_k is not None and not 1 <= top_k <= head.size:
        raise UserError(f"top_k={top_k} must be from 1 to the vocabulary's {head.size}")
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk={chunk} must be at least 1")


class _LogProbs(torch.autograd.Function):
    """Forward reduces blocks of logits, backward makes them again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, head: Head, entropy: bool, top: int, tokens: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        states = hidden.detach().to(head.dtype)
        count = states.shape[0]
        most, total, moment = (states.new_full((count,), value) for value in (LOWEST, 0.0, 0.0))
        best = states.new_full((count, top), LOWEST)
        who = torch.full((count, top), -1, dtype=torch.int64, device=states.device)
        own = states.new_full((count,), LOWEST)
        block = states.new_empty((min(tokens, max(count, 1)), min(WORDS, head.size)))
        for part, rows, shift in head.blocks(WORDS):
            for start in range(0, count, tokens):
                here = slice(start, min(start + tokens, count))
                z = head.logits(states[here], rows, shift, block)
                mine = (ids[here] >= part.start) & (ids[here] < part.stop)
                place = (ids[here] - part.start).clamp(0, part.stop - part.start - 1)
                own[here] = torch.where(mine, z.gather(1, place[:, None])[:, 0], own[here])
                if top:
                    _merge(best, who, here, z, part.start)
                _reduce(most, total, moment, here, z, entropy)
        lse = most + total.log()
        spread = lse - moment / total if entropy else lse
        ctx.save_for_backward(hidden, weight, bias, ids, lse, spread)
        ctx.head, ctx.entropy, ctx.tokens = head, entropy, tokens
        top_logp = best - lse[:, None]
        ctx.mark_non_differentiable(top_logp, who, *(() if entropy else (spread,)))
        logp = torch.where(own <= LOWEST, -torch.inf, own - lse)
        return logp, spread, top_logp, who

    @staticmethod
    def backward(ctx: Any, of_logp: Tensor, of_entropy: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, lse, spread = ctx.saved_tensors
        head: Head = ctx.head
        states = hidden.detach().to(head.dtype)
        count, tokens = states.shape[0], ctx.tokens
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.zeros_like(states) if wants_hidden else None
        to_weight = torch.empty_like(weight) if wants_weight else None
        to_bias = torch.empty_like(bias) if wants_bias else None
        first = -of_logp.to(head.dtype)
        second = -of_entropy.to(head.dtype) if ctx.entropy else None
        block = states.new_empty((min(tokens, max(count, 1)), min(WORDS, head.size)))
        for part, rows, shift in head.blocks(WORDS):
            weights_here = rows.new_zeros(rows.shape) if wants_weight else None
            biases_here = rows.new_zeros(rows.shape[0]) if wants_bias else None
            for start in range(0, count, tokens):
                here = slice(start, min(start + tokens, count))
                z = head.logits(states[here], rows, shift, block)
                slope = _slope(z, lse[here], spread[here], first[here], None if second is None else second[here])
                _add_own(slope, ids[here], part, of_logp[here])
                slope = head.back(slope, z)
                if to_hidden is not None:
                    to_hidden[here].addmm_(slope, rows)
                if weights_here is not None:
                    weights_here.addmm_(slope.t(), states[here])
                if biases_here is not None:
                    biases_here += slope.sum(0)
            if to_weight is not None:
                to_weight[part] = weights_here.to(weight.dtype)  # type: ignore[union-attr]
            if to_bias is not None:
                to_bias[part] = biases_here.to(bias.dtype)  # type: ignore[union-attr]
        return (None if to_hidden is None else to_hidden.to(hidden.dtype), to_weight, to_bias, *[None] * 5)


def _reduce(most: Tensor, total: Tensor, moment: Tensor, here: slice, z: Tensor, entropy: bool) -> None:
    """Take a block into the running maximum m, sum of e^(z - m), and sum of e^(z - m) z. Overwrites z without entropy."""
    high = torch.maximum(most[here], z.amax(1))
    shrink = (most[here] - high).exp_()
    weights = (z - high[:, None]).exp_() if entropy else z.sub_(high[:, None]).exp_()
    total[here] = total[here] * shrink + weights.sum(1)
    if entropy:
        moment[here] = moment[here] * shrink + torch.linalg.vecdot(weights, z)
    most[here] = high


def _slope(z: Tensor, lse: Tensor, spread: Tensor, first: Tensor, second: Tensor | None) -> Tensor:
    """-g1 q - g2 q (log q + H), without the token's own 1; ``first`` is -g1, ``second`` -g2."""
    logq = z - lse[:, None]
    q = logq.exp()
    if second is None:
        return q.mul_(first[:, None])
    return q.mul_(logq.add_(spread[:, None]).mul_(second[:, None]).add_(first[:, None]))


def _add_own(slope: Tensor, ids: Tensor, part: slice, of_logp: Tensor) -> None:
    """Add g1 at each position's own token, where it is in the block."""
    rows = ((ids >= part.start) & (ids < part.stop)).nonzero()[:, 0]
    slope.index_put_((rows, ids[rows] - part.start), of_logp[rows].to(slope.dtype), accumulate=True)


def _merge(best: Tensor, who: Tensor, here: slice, z: Tensor, offset: int) -> None:
    """Take a block into the running top."""
    top = best.shape[1]
    high, place = z.topk(min(top, z.shape[1]), dim=1)
    both, names = torch.cat([best[here], high], 1), torch.cat([who[here], place + offset], 1)
    best[here], order = both.topk(top, dim=1)
    who[here] = names.gather(1, order)
