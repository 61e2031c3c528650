"""The loops over a block in Triton: each reads its blocks once. Equations: ``klamp.kernels.torch_loops``, ``terms``.

A program has a row of a block and goes over its words (for slopes: a piece of a row), in float32. A block on a GPU has 4096
rows, enough to fill it. Pieces and warps are reasoned, not measured: 8 or 16 words a thread, in loads of 16 bytes. Unlike
PyTorch's exp the GPU's fast one loses digits with its argument's size: 5e-6 of e^-80, which is nothing beside the sums it is
added to. Blocks are left as they are, but for the words lifted out and a block that becomes its own slopes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from klamp.kernels.head import LOWEST as _LOWEST
from klamp.kernels.head import Head
from klamp.kernels.terms import singular
from klamp.whole import Kind

WORDS = 4096  # of a piece of a row: 16 KiB, where one block is read
PAIR_WORDS = 1024  # where two are, and several numbers are alive for each pair
WARPS, PAIR_WARPS = 8, 4  # 16 and 8 words per thread
LOWEST = tl.constexpr(_LOWEST)
LOG2 = tl.constexpr(0.6931471805599453)


# --- running sums -------------------------------------------------------------------------------------------------


def take(most: Tensor, total: Tensor, moment: Tensor | None, z: Tensor) -> None:
    _launch(_take, z, _piece(z, WORDS), WARPS, z, most, total, moment, z.stride(0), z.shape[1])


@triton.jit
def _take(z, most, total, moment, stride, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m, s = tl.load(most + row), tl.load(total + row)
    t = s
    if moment is not None:
        t = tl.load(moment + row)
    for start in range(0, words, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < words
        x = tl.load(z + row * stride + columns, mask=inside, other=LOWEST)
        high = tl.maximum(m, tl.max(x, 0))
        shrink = tl.exp(m - high)
        weights = tl.where(inside, tl.exp(x - high), 0.0)
        s = s * shrink + tl.sum(weights, 0)
        if moment is not None:
            t = t * shrink + tl.sum(weights * x, 0)
        m = high
    tl.store(most + row, m)
    tl.store(total + row, s)
    if moment is not None:
        tl.store(moment + row, t)


def take_tilted(
    streams: Sequence[tuple[float, bool]], most: Tensor, total: Tensor, moment: Tensor, z: Tensor, y: Tensor
) -> None:
    powers = tuple(a for a, _ in streams)
    strides = (most.stride(0), z.stride(0), y.stride(0))
    _launch(
        _take_tilted, z, _piece(z, PAIR_WORDS), PAIR_WARPS, z, y, most, total, moment, *strides, z.shape[1],
        POWERS=powers, SIZE=triton.next_power_of_2(len(powers)),
    )  # fmt: skip


@triton.jit
def _take_tilted(
    z, y, most, total, moment, stride, z_stride, y_stride, words, BLOCK: tl.constexpr, POWERS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    which = tl.arange(0, SIZE)
    a = tl.zeros([SIZE], tl.float32)
    for k in tl.static_range(len(POWERS)):
        a = tl.where(which == k, POWERS[k], a)
    there = which < len(POWERS)
    at = which * stride + row
    m = tl.load(most + at, mask=there, other=LOWEST)
    s = tl.load(total + at, mask=there, other=0.0)
    t = tl.load(moment + at, mask=there, other=0.0)
    for start in range(0, words, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < words
        new = tl.load(z + row * z_stride + columns, mask=inside, other=LOWEST)[None, :]
        old = tl.load(y + row * y_stride + columns, mask=inside, other=LOWEST)[None, :]
        x = new - old
        # a = 1 is z itself: y + (z - y) would lose z where y is LOWEST
        u = tl.where(a[:, None] == 1.0, new, old + a[:, None] * x)
        high = tl.maximum(m, tl.max(u, 1))
        shrink = tl.exp(m - high)
        weights = tl.where(inside[None, :], tl.exp(u - high[:, None]), 0.0)
        s = s * shrink + tl.sum(weights, 1)
        t = t * shrink + tl.sum(weights * x, 1)
        m = high
    tl.store(most + at, m, mask=there)
    tl.store(total + at, s, mask=there)
    tl.store(moment + at, t, mask=there)


# --- log-probs ----------------------------------------------------------------------------------------------------


def lift(z: Tensor, ids: Tensor, start: int, into: Tensor, leave: bool) -> None:
    names, count = ids.contiguous(), ids.shape[1]
    strides = (z.stride(0), names.stride(0), into.stride(0))
    # One warp: none reads what another has left.
    block = triton.next_power_of_2(max(count, 1))
    _launch(_lift, z, block, 1, z, names, into, *strides, start, z.shape[1], count, LEAVE=leave)


@triton.jit
def _lift(
    z, ids, into, z_stride, ids_stride, into_stride, start, words, count, BLOCK: tl.constexpr, LEAVE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    places = tl.load(ids + row * ids_stride + k, mask=k < count, other=-1) - start
    here = (k < count) & (places >= 0) & (places < words)
    found = tl.load(z + row * z_stride + places, mask=here)
    tl.store(into + row * into_stride + k, found, mask=here)
    if LEAVE:
        tl.store(z + row * z_stride + places, LOWEST, mask=here)


def logprob_slopes(
    z: Tensor, out: Tensor, head: Head, start: int, lse: Tensor, entropy: Tensor, ids: Tensor, one: Tensor | None,
    two: Tensor | None,
) -> None:  # fmt: skip
    rows = [None if each is None else each.contiguous() for each in (lse, entropy, ids, one, two)]
    _launch(
        _logprob_slopes, z, _piece(z, WORDS), WARPS, z, out, *rows, z.stride(0), out.stride(0), start, z.shape[1],
        *_back(head), pieces=True,
    )  # fmt: skip


@triton.jit
def _logprob_slopes(
    z, out, lse, entropy, ids, one, two, z_stride, out_stride, start, words, factor, cap, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < words
    x = tl.load(z + row * z_stride + columns, mask=inside, other=LOWEST)
    logq = x - tl.load(lse + row)
    inner = tl.zeros([BLOCK], tl.float32)
    if two is not None:
        inner -= tl.load(two + row) * (logq + tl.load(entropy + row))
    if one is not None:
        inner -= tl.load(one + row)
    slope = tl.exp(logq) * inner
    if one is not None:
        slope += tl.where(columns == tl.load(ids + row) - start, tl.load(one + row), 0.0)
    tl.store(out + row * out_stride + columns, _through(slope, x, factor, cap), mask=inside)


# --- pairs --------------------------------------------------------------------------------------------------------


def pair_sums(
    z: Tensor, y: Tensor, lses: tuple[Tensor, Tensor], kinds: Sequence[Kind], found: Tensor, mean: Tensor
) -> None:
    rows = [each.contiguous() for each in lses]
    strides = (z.stride(0), y.stride(0), found.stride(0))
    _launch(
        _pair_sums, z, _piece(z, PAIR_WORDS), PAIR_WARPS, z, y, *rows, found, mean, *strides, z.shape[1],
        KINDS=_compiled(kinds), SIZE=triton.next_power_of_2(len(kinds)),
    )  # fmt: skip


@triton.jit
def _pair_sums(
    z, y, lse_new, lse_old, found, mean, z_stride, y_stride, stride, words,
    BLOCK: tl.constexpr, KINDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    which = tl.arange(0, SIZE)
    values = tl.zeros([SIZE], tl.float32)
    slopes = tl.zeros([SIZE], tl.float32)
    of_new, of_old = tl.load(lse_new + row).to(tl.float32), tl.load(lse_old + row).to(tl.float32)
    for start in range(0, words, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < words
        logq = tl.load(z + row * z_stride + columns, mask=inside, other=LOWEST) - of_new
        logp = tl.load(y + row * y_stride + columns, mask=inside, other=LOWEST) - of_old
        q, p = tl.exp(logq), tl.exp(logp)
        for k in tl.static_range(len(KINDS)):
            value, slope = _terms(logq, logp, q, p, KINDS[k][0], KINDS[k][1], KINDS[k][2])
            values += tl.where(which == k, tl.sum(tl.where(inside, value, 0.0), 0), 0.0)
            slopes += tl.where(which == k, tl.sum(tl.where(inside, slope, 0.0), 0), 0.0)
    at = row * stride + which
    there = which < len(KINDS)
    tl.store(found + at, tl.load(found + at, mask=there) + values, mask=there)
    tl.store(mean + at, tl.load(mean + at, mask=there) + slopes, mask=there)


def pair_slopes(
    z: Tensor, y: Tensor, out: Tensor, lses: tuple[Tensor, Tensor], kinds: Sequence[Kind], head: Head, upstream: Tensor,
    shift: Tensor,
) -> None:  # fmt: skip
    rows = [each.contiguous() for each in (*lses, upstream, shift)]
    strides = (z.stride(0), y.stride(0), out.stride(0), rows[2].stride(0))
    _launch(
        _pair_slopes, z, _piece(z, PAIR_WORDS), PAIR_WARPS, z, y, out, *rows, *strides, z.shape[1], *_back(head),
        pieces=True, KINDS=_compiled(kinds),
    )  # fmt: skip


@triton.jit
def _pair_slopes(
    z, y, out, lse_new, lse_old, upstream, shift, z_stride, y_stride, out_stride, stride, words, factor, cap,
    BLOCK: tl.constexpr, KINDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < words
    x = tl.load(z + row * z_stride + columns, mask=inside, other=LOWEST)
    logq = x - tl.load(lse_new + row).to(tl.float32)
    logp = tl.load(y + row * y_stride + columns, mask=inside, other=LOWEST) - tl.load(lse_old + row).to(tl.float32)
    q, p = tl.exp(logq), tl.exp(logp)
    total = -q * tl.load(shift + row)
    for k in tl.static_range(len(KINDS)):
        _, slope = _terms(logq, logp, q, p, KINDS[k][0], KINDS[k][1], KINDS[k][2])
        total += slope * tl.load(upstream + row * stride + k)
    tl.store(out + row * out_stride + columns, _through(total, x, factor, cap), mask=inside)


def _compiled(kinds: Sequence[Kind]) -> tuple[tuple[str, float, float], ...]:
    """(family, a, scale) of each kind: a kernel branches on them while it is compiled."""
    families = ("near" if singular(which) else which.name if which.a is None else "power" for which in kinds)
    return tuple((family, which.a or 0.0, which.scale) for family, which in zip(families, kinds, strict=True))


@triton.jit
def _terms(logq, logp, q, p, FAMILY: tl.constexpr, A: tl.constexpr, SCALE: tl.constexpr):
    """(t_v, s_v) of one kind."""
    x = logq - logp
    if FAMILY == "tv":
        value = 0.5 * tl.abs(q - p)
        slope = tl.where(x > 0.0, 0.5 * q, tl.where(x < 0.0, -0.5 * q, 0.0 * x))
    elif FAMILY == "js":
        softplus = tl.log(1.0 + tl.exp(-tl.abs(x)))
        up, down = LOG2 - softplus - tl.maximum(-x, 0.0), LOG2 - softplus - tl.maximum(x, 0.0)
        value, slope = 0.5 * (q * up + p * down), 0.5 * q * up
    elif A == 0.0:
        value, slope = q - p - p * x, q - p
    elif A == 1.0:
        value, slope = q * x - q + p, q * x
    elif A == 0.5:
        one, two = tl.exp(0.5 * logq), tl.exp(0.5 * logp)
        value, slope = 2.0 * (one - two) * (one - two), 2.0 * one * (one - two)
    else:
        tilted = tl.exp(logp + A * x)
        if FAMILY == "power":
            value, slope = (tilted - p - A * (q - p)) / (A * (A - 1.0)), (tilted - q) / (A - 1.0)
        elif A < 0.5:
            value, slope = _near(p, q, tilted, x, A), (tilted - q) / (A - 1.0)
        else:  # f_a(w) = w f_(1-a)(1/w)
            value, slope = _near(q, p, tilted, -x, 1.0 - A), _growth(q, tilted, x, A - 1.0)
    return SCALE * value, SCALE * slope


@triton.jit
def _near(p, q, tilted, x, A: tl.constexpr):
    """(tilted - p - A (q - p)) / (A (A - 1)) for a small A = [(q - p) - p (e^(A x) - 1) / A] / (1 - A)."""
    close = p * x * x * (_series(x) - A * _series(A * x))
    return tl.where(tl.abs(x) < 0.5, close, q - p - _growth(p, tilted, x, A)) / (1.0 - A)


@triton.jit
def _growth(base, tilted, x, B: tl.constexpr):
    """base (e^(B x) - 1) / B for a small B; ``tilted`` = base e^(B x)."""
    y = B * x
    return tl.where(tl.abs(y) < 0.5, base * x * (1.0 + y * _series(y)), (tilted - base) / B)


@triton.jit
def _series(y):
    """(e^y - 1 - y) / y^2 for |y| < 1/2, to float32."""
    total = 1.0 / 362880.0 + y * (1.0 / 3628800.0)
    total = 1.0 / 5040.0 + y * (1.0 / 40320.0 + y * total)
    total = 1.0 / 120.0 + y * (1.0 / 720.0 + y * total)
    return 0.5 + y * (1.0 / 6.0 + y * (1.0 / 24.0 + y * total))


# --- common parts -------------------------------------------------------------------------------------------------


def _launch(
    kernel: Any, z: Tensor, block: int, warps: int, *arguments: Any, pieces: bool = False, **constants: Any
) -> None:
    """Run a kernel for each row of a block, or for each of its ``pieces``."""
    rows, words = z.shape
    grid = (rows, triton.cdiv(words, block) if pieces else 1)
    if rows and words:
        with torch.cuda.device_of(z):
            kernel[grid](*arguments, BLOCK=block, num_warps=warps, **constants)


def _piece(z: Tensor, most: int) -> int:
    return min(most, int(triton.next_power_of_2(z.shape[1])))


def _back(head: Head) -> tuple[float, float | None]:
    """(factor, cap) of ``head.back``: slope (1 - (cap z)^2) factor."""
    return head.scale / head.temperature, None if head.softcap is None else head.temperature / head.softcap


@triton.jit
def _through(slope, z, factor, cap):
    if cap is not None:
        slope *= 1.0 - cap * z * (cap * z)
    return slope * factor
