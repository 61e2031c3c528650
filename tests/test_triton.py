"""The loops in Triton against those in PyTorch: in Triton's interpreter on a CPU, compiled on a GPU.

Triton reads TRITON_INTERPRET while it is loaded, so one test runs this file again in a process of its own that has it set.
Without a GPU the kernels are still compiled here for one, but not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from klamp.kernels import divergences, loops, token_logprobs, torch_loops
from klamp.kernels import head as room
from klamp.kernels.head import LOWEST, Head
from klamp.kernels.terms import singular
from klamp.whole import kind

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
installed = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
runs = pytest.mark.skipif(
    find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()),
    reason="needs triton, and a GPU or Triton's interpreter (test_in_the_interpreter starts it)",
)
NAMES = ("kl_old_new", "kl_new_old", "tv", "js", "hellinger2", "chi2_new_old", "chi2_old_new", "power(0.3)", "power(-0.7)",
         "power(0.001)", "power(1.02)", "power(-1e-9)")  # fmt: skip
KINDS = [kind(name) for name in NAMES]
HEADS = [{}, {"temperature": 0.7, "scale": 0.5}, {"temperature": 0.7, "softcap": 30.0}]


@installed
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", __file__], capture_output=True, text=True,
        timeout=900, env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 100


# --- which loops --------------------------------------------------------------------------------------------------


def test_a_cpu_and_float64_have_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loops.loops(torch.empty(1, 1)) is torch_loops
    monkeypatch.setattr(loops, "choice", "triton")
    assert loops.loops(torch.empty(1, 1, dtype=torch.float64)) is torch_loops


@pytest.mark.parametrize(("there", "capability", "choice", "wanted"), [
    (True, (9, 0), None, True), (True, (7, 0), None, True), (True, (6, 1), None, False), (False, (9, 0), None, False),
    (True, (9, 0), "torch", False),
])  # fmt: skip
def test_a_gpu_has_tritons_where_it_can(
    monkeypatch: pytest.MonkeyPatch, there: bool, capability: tuple[int, int], choice: Any, wanted: bool
) -> None:
    named = object()
    monkeypatch.setitem(sys.modules, "klamp.kernels.triton_loops", named)  # type: ignore[arg-type]
    monkeypatch.setattr("klamp.kernels.triton_loops", named, raising=False)
    monkeypatch.setattr(loops, "_installed", lambda: there)
    monkeypatch.setattr(loops, "choice", choice)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    block: Any = SimpleNamespace(dtype=torch.float32, is_cuda=True, device="cuda:0")
    assert loops.loops(block) is (named if wanted else torch_loops)


# --- one loop -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton's loops, with pieces so small that a row has several."""
    from klamp.kernels import triton_loops

    monkeypatch.setattr(triton_loops, "WORDS", 64)
    monkeypatch.setattr(triton_loops, "PAIR_WORDS", 32)
    return triton_loops


def block(seed: int, rows: int, words: int, size: float = 3.0) -> Tensor:
    """Random logits as rows of a wider buffer, in float64."""
    return (
        size
        * torch.randn(rows, words + 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)[:, :words]
    )


def hard(words: int = 77) -> tuple[Tensor, Tensor]:
    """Two policies' logits: +-1e4, one-hot, uniform, and words that one, the other or both filter out; or all words."""
    z, y = block(1, 10, words).clone(), block(2, 10, words).clone()
    z[0, 3], z[1, 70], y[1, 70], y[2, 0] = 1e4, -1e4, 1e4, 1e4
    z[3], y[3] = 0.0, 1e4
    z[4, 5], y[5, 6] = LOWEST, LOWEST
    z[6, 40:], y[6, 40:] = LOWEST, LOWEST
    z[7, 1:], y[7, :-1] = LOWEST, LOWEST
    z[8], y[8] = LOWEST, LOWEST
    y[9] = LOWEST
    return z, y


def narrow(*tensors: Tensor | None) -> Any:
    """float32 on the device, in a wider buffer as a block is."""
    made = []
    for one in tensors:
        if one is not None and one.dim() == 2 and one.is_floating_point():
            wide = torch.full((one.shape[0], one.shape[1] + 3), float("nan"), device=DEVICE)[:, : one.shape[1]]
            one = wide.copy_(one)
        elif one is not None:
            one = one.to(DEVICE, torch.float32 if one.is_floating_point() else one.dtype)
        made.append(one)
    return made


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    """Equal to so much of the larger of 1 and the wanted value, the same where that is infinite or NaN."""
    got, wanted = got.detach().cpu().double(), wanted.detach().cpu().double()
    assert got.shape == wanted.shape
    assert torch.equal(torch.isfinite(got), torch.isfinite(wanted))
    plain = torch.isfinite(wanted)
    assert torch.equal(got[~plain].nan_to_num(7.0), wanted[~plain].nan_to_num(7.0))
    assert ((got - wanted).abs() <= tolerance * wanted.abs().clamp(min=1.0))[plain].all()


def sums(
    rows: int, streams: int | None = None, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    """Empty running sums m, s, t."""
    shape = (rows,) if streams is None else (streams, rows)
    return [torch.full(shape, fill, dtype=dtype, device=device) for fill in (LOWEST, 0.0, 0.0)]


def check_take(ours: Any, blocks: list[Tensor], moment: bool) -> None:
    plain, fast = sums(len(blocks[0])), sums(len(blocks[0]), dtype=torch.float32, device=DEVICE)
    for one in blocks:
        torch_loops.take(*plain[:2], plain[2] if moment else None, one.clone())
        ours.take(*fast[:2], fast[2] if moment else None, *narrow(one))
    close(fast[0], plain[0])
    close(fast[0] + fast[1].log(), plain[0] + plain[1].log())
    close(fast[1] / plain[1].to(fast[1]), torch.ones_like(plain[1]))
    if moment:
        close(fast[2] / fast[1], plain[2] / plain[1])
    else:
        assert (fast[2] == 0).all()


@runs
@pytest.mark.parametrize("moment", [False, True])
@pytest.mark.parametrize(("rows", "words"), [(1, 1), (1, 77), (4, 1), (3, 64), (5, 200)])
def test_running_sums(ours: Any, rows: int, words: int, moment: bool) -> None:
    check_take(ours, [block(0, rows, words), block(1, rows, words, 8.0), block(2, rows, 3)], moment)
    ours.take(*sums(0, dtype=torch.float32, device=DEVICE), torch.empty(0, 4, device=DEVICE))


@runs
@pytest.mark.parametrize("moment", [False, True])
def test_running_sums_of_hard_logits(ours: Any, moment: bool) -> None:
    z, y = hard()
    check_take(ours, [z], moment)
    check_take(ours, [y, z, y], moment)


STREAMS = [((0.0, True), (1.0, True)), ((0.0, False), (1.0, False)), ((2.0, False), (0.0, True), (1.0, False)),
           ((-0.7, False), (0.5, False), (3.0, False), (0.0, True), (1.0, True))]  # fmt: skip


def check_tilted(ours: Any, streams: Any, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Ours and PyTorch's; returns s of both."""
    rows = len(pairs[0][0])
    plain, fast = sums(rows, len(streams)), sums(rows, len(streams), torch.float32, DEVICE)
    for z, y in pairs:
        torch_loops.take_tilted(streams, *plain, z.clone(), y.clone())
        ours.take_tilted(streams, *fast, *narrow(z, y))
    close(fast[0] + fast[1].log(), plain[0] + plain[1].log())
    means = [index for index, (_, wanted) in enumerate(streams) if wanted]
    close((fast[2] / fast[1])[means], (plain[2] / plain[1])[means])
    return fast[1], plain[1]


@runs
@pytest.mark.parametrize("streams", STREAMS)
def test_tilted_sums(ours: Any, streams: Any) -> None:
    for rows, words in ((1, 1), (4, 1), (1, 33), (3, 100)):
        check_tilted(ours, streams, [(block(s, rows, words), block(s + 9, rows, words)) for s in range(2)])
    fast, plain = check_tilted(ours, streams, [hard(), hard()[::-1]])
    close(fast[:, 8], plain[:, 8])  # all words are LOWEST, what lies beyond the last one is nothing


@runs
@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_lifting_words_out(ours: Any, leave: bool, count: int) -> None:
    random = torch.Generator().manual_seed(count)
    ids = torch.stack([torch.randperm(200, generator=random)[:count] - 1 for _ in range(6)]).t().contiguous().t()
    got, wanted = (torch.full((6, count), LOWEST, device=where) for where in (DEVICE, "cpu"))
    for start, words in ((0, 90), (90, 109), (199, 1)):
        (z,) = narrow(block(start, 6, words))
        plain = z.cpu().clone()
        torch_loops.lift(plain, ids, start, wanted, leave)
        ours.lift(z, ids.to(DEVICE), start, got, leave)
        assert torch.equal(z.cpu(), plain)
    assert torch.equal(got.cpu(), wanted)
    assert (wanted > LOWEST).any()


def place(z: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the slopes of a block go: into it, or rounded into another."""
    return z if dtype == z.dtype else torch.empty(z.shape[0], z.shape[1] + 2, dtype=dtype, device=z.device)[:, 1:-1]


def check_logprob_slopes(ours: Any, z: Tensor, options: Any, upstream: tuple[bool, bool], start: int = 10) -> None:
    rows, words = z.shape
    logq = torch.log_softmax(z, 1)
    lse, entropy = z.logsumexp(1), -(logq.exp() * logq).sum(1)
    ids = torch.randint(0, words + 2 * start, (rows,), generator=torch.Generator().manual_seed(rows))
    ids[0] = start
    ups = [torch.linspace(-2.0, 3.0, rows, dtype=torch.float64) if there else None for there in upstream]
    head = Head(torch.zeros(2, 1), **options)
    wanted = z.clone()
    torch_loops.logprob_slopes(wanted, wanted, head, start, lse, entropy, ids, *ups)
    for dtype in (torch.float32, torch.bfloat16):
        (block_,), rest = narrow(z), narrow(lse, entropy, ids, *ups)
        got = place(block_, dtype)
        ours.logprob_slopes(block_, got, head, start, *rest)
        close(got, wanted, 1e-5 if dtype == torch.float32 else 1e-2)


@runs
@pytest.mark.parametrize("upstream", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("options", HEADS)
def test_slopes_of_log_probs(ours: Any, options: Any, upstream: tuple[bool, bool]) -> None:
    for rows, words in ((1, 1), (3, 1), (1, 50), (4, 200)):
        check_logprob_slopes(ours, block(words, rows, words), options, upstream)
    if not options:
        check_logprob_slopes(ours, hard()[0][:7], options, upstream)


def check_pairs(ours: Any, z: Tensor, y: Tensor, kinds: list[Any], options: Any, like: torch.dtype) -> None:
    """Values and slopes, and the slope of a mixture. ``like``: what PyTorch computes in."""
    rows, size = len(z), len(kinds)
    lses = (z.logsumexp(1), y.logsumexp(1))
    up, shift = (
        torch.linspace(-1.0, 2.0, rows * size, dtype=torch.float64).view(size, rows).t(),
        torch.linspace(-0.5, 0.5, rows).double(),
    )
    plain, fast = (
        [torch.full((rows, size), 0.25, dtype=torch.float64, device=where) for _ in range(2)]
        for where in ("cpu", DEVICE)
    )

    def again() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        return z.to(like, copy=True), y.to(like, copy=True), (lses[0].to(like), lses[1].to(like))

    torch_loops.pair_sums(*again(), kinds, *plain)
    ours.pair_sums(*narrow(z, y), tuple(narrow(*lses)), kinds, *fast)
    for got, wanted in zip(fast, plain, strict=True):
        close(got, wanted)
    head = Head(torch.zeros(2, 1), **options)
    wanted, theirs, near = again()
    torch_loops.pair_slopes(wanted, theirs, wanted, near, kinds, head, up.to(like), shift.to(like))
    for dtype in (torch.float32, torch.bfloat16):
        new, old, fast_up, fast_shift = (*narrow(z, y), up.to(DEVICE, torch.float32), *narrow(shift))
        wide = tuple(lse.to(DEVICE) for lse in lses)  # as a caller may give them
        got = place(new, dtype)
        ours.pair_slopes(new, old, got, wide, kinds, head, fast_up, fast_shift)
        close(got, wanted, 1e-5 if dtype == torch.float32 else 1e-2)


@runs
@pytest.mark.parametrize("kinds", [KINDS, *([which] for which in KINDS)], ids=["all", *NAMES])
@pytest.mark.parametrize("options", HEADS[::2])
def test_pairs(ours: Any, kinds: list[Any], options: Any) -> None:
    for rows, words in ((1, 1), (4, 1), (1, 33), (3, 100)):
        z = block(words, rows, words)
        check_pairs(ours, z, z + block(5, rows, words, 0.4), kinds, options, torch.float64)


@runs
@pytest.mark.parametrize("which", KINDS, ids=NAMES)
def test_pairs_of_hard_logits(ours: Any, which: Any) -> None:
    """As PyTorch has them in float32, or in float64 where its forms need it (js, powers near 0) or more can be seen."""
    z, y = hard()
    a = which.a
    if a is not None and (a in (0.0, 0.5, 1.0) or abs(a) > 0.01):
        check_pairs(ours, z, y, [which], {}, torch.float32)
    if a is None or -0.01 < a <= 1.0:  # the others leave float32's range
        rows = [0, 1, 2, *range(4, 10)]  # float32 does not hold the sum of e^1e4 well enough
        check_pairs(ours, z[rows], y[rows], [which], {}, torch.float64)


@runs
@pytest.mark.parametrize("name", [which.name for which in KINDS if singular(which)])
def test_powers_near_0_and_1_keep_their_digits(ours: Any, name: str) -> None:
    """Relative to D itself, on both sides of where a series takes over."""
    z = torch.zeros(3, 60, dtype=torch.float64)
    y = (
        torch.tensor([[2.0], [0.6], [-0.6]], dtype=torch.float64)
        * torch.linspace(0.0, 1.0, 60, dtype=torch.float64) ** 4
    )
    lses = (z.logsumexp(1), y.logsumexp(1))
    plain, fast = (torch.zeros(2, 3, 1, dtype=torch.float64, device=where) for where in ("cpu", DEVICE))
    ours.pair_sums(*narrow(z, y), tuple(narrow(*lses)), [kind(name)], *fast)
    torch_loops.pair_sums(z, y, lses, [kind(name)], *plain)
    assert ((fast[0].cpu() - plain[0]).abs() <= 1e-5 * plain[0]).all()


@runs
@pytest.mark.parametrize("which", KINDS, ids=NAMES)
def test_a_policy_is_exactly_at_itself(ours: Any, which: Any) -> None:
    (z,) = narrow(block(3, 4, 120, 5.0))
    lse = z.logsumexp(1)
    found, mean = (torch.zeros(4, 1, dtype=torch.float64, device=DEVICE) for _ in range(2))
    ours.pair_sums(z, z.clone(), (lse, lse), [which], found, mean)
    assert (found.abs() <= (1e-6 if which.name == "js" else 0.0)).all()


@runs
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 4), words=st.integers(1, 150), size=st.sampled_from([0.1, 3.0, 20.0]),
       names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_block(seed: int, rows: int, words: int, size: float, names: list[str]) -> None:
    from klamp.kernels import triton_loops

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_loops, "WORDS", 32)
        patch.setattr(triton_loops, "PAIR_WORDS", 16)
        z = block(seed, rows, words, size)
        y = z + block(seed + 1, rows, words, 0.3)
        check_take(triton_loops, [z, y], moment=seed % 2 == 0)
        check_tilted(triton_loops, STREAMS[seed % len(STREAMS)], [(z, y), (y, z)])
        check_logprob_slopes(triton_loops, z, HEADS[seed % 2], (True, seed % 3 == 0))
        check_pairs(triton_loops, z, y, [kind(name) for name in names], HEADS[seed % 2], torch.float64)


# --- everything together ------------------------------------------------------------------------------------------


def drawn(seed: int, tokens: int, words: int, apart: float = 0.3) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (tokens, 6), "weight": (words, 6), "bias": (words,)}
    old = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    new = {name: one + apart * torch.randn(one.shape, generator=random) for name, one in old.items()}
    return {f"{name}_{which}": one for which, parts in (("new", new), ("old", old)) for name, one in parts.items()}


def outcome(call: Any, parts: dict[str, Tensor], dtype: torch.dtype, device: str) -> list[Tensor]:
    """What a call finds from the parts, and the gradients of a mixture of it."""
    leaves = {name: one.to(device, dtype).requires_grad_() for name, one in parts.items()}
    found = [one for one in call(leaves) if one is not None]
    grown = [one for one in found if one.requires_grad]
    up = torch.linspace(-1.0, 2.0, len(grown[0]), dtype=torch.float64, device=device)
    total = sum((one.double() * up * (-0.7) ** index).sum() for index, one in enumerate(grown))
    new = [leaf for name, leaf in leaves.items() if name.endswith("new")]
    return [*(one.detach() for one in found), *torch.autograd.grad(total, new)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton for all that is float32, and several blocks."""
    monkeypatch.setattr(loops, "choice", "triton")
    monkeypatch.setattr(room, "WORDS", 37)
    monkeypatch.setattr(room, "CUDA_WORDS", 37)


@runs
@pytest.mark.parametrize("options", [*HEADS, {"top_k": 4}, {"at": True}])
@pytest.mark.parametrize(("tokens", "words"), [(1, 5), (7, 100)])
def test_log_probs_and_their_gradients(small: None, options: dict[str, Any], tokens: int, words: int) -> None:
    """Against the same call in float64, which PyTorch computes."""
    ids = torch.randint(0, words, (tokens,), generator=torch.Generator().manual_seed(0))
    ids[3:4] = -1
    others = torch.stack([torch.randperm(words)[:3] - 1 for _ in range(tokens)])

    def call(p: dict[str, Tensor]) -> Any:
        where = p["hidden_new"].device
        more = options | {"at": others.to(where)} if "at" in options else options
        return token_logprobs(
            p["hidden_new"], p["weight_new"], ids.to(where), p["bias_new"], entropy=True, chunk=4, **more
        )

    parts = drawn(0, tokens, words)
    parts["hidden_new"][3:4] = float("nan")
    for got, wanted in zip(
        outcome(call, parts, torch.float32, DEVICE), outcome(call, parts, torch.float64, "cpu"), strict=True
    ):
        close(got, wanted)


@runs
@pytest.mark.parametrize("given_lse", [False, True])
@pytest.mark.parametrize("names", [NAMES, ("kl_old_new", "kl_new_old", "power(3.0)"), ("hellinger2",), ("tv",)])
@pytest.mark.parametrize("options", HEADS)
def test_divergences_and_their_gradients(
    small: None, options: dict[str, Any], names: tuple[str, ...], given_lse: bool
) -> None:
    def call(p: dict[str, Tensor]) -> Any:
        lses: dict[str, Tensor] = {}
        for which in ("new", "old") if given_lse else ():
            z = torch.addmm(p[f"bias_{which}"], p[f"hidden_{which}"], p[f"weight_{which}"].t()) * options.get(
                "scale", 1.0
            )
            cap = options.get("softcap")
            z = z if cap is None else cap * torch.tanh(z / cap)
            lses[f"lse_{which}"] = (z / options.get("temperature", 1.0)).logsumexp(1).detach()
        rows = {
            name: p[name] for name in ("hidden_new", "weight_new", "hidden_old", "weight_old", "bias_new", "bias_old")
        }
        return divergences(**rows, measures=names, chunk=4, **options, **lses).values()

    parts = drawn(1, 6, 100)
    for got, wanted in zip(
        outcome(call, parts, torch.float32, DEVICE), outcome(call, parts, torch.float64, "cpu"), strict=True
    ):
        close(got, wanted)


@runs
def test_no_token_at_all(small: None) -> None:
    parts = drawn(2, 3, 10)
    nothing = torch.full((3,), -1, device=DEVICE)
    p = {name: one.to(DEVICE).requires_grad_() for name, one in parts.items()}
    found = token_logprobs(p["hidden_new"], p["weight_new"], nothing, entropy=True, top_k=2).logp
    apart = divergences(
        p["hidden_new"], p["weight_new"], p["hidden_old"], p["weight_old"], ("tv", "kl_old_new"), nothing
    )
    grads = torch.autograd.grad(found.sum() + apart["tv"].sum(), [p["hidden_new"], p["weight_new"]])
    assert all((one == 0).all() for one in (found, *apart.values(), *grads))


@runs
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_at_its_own_sizes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Triton's against PyTorch's on the same GPU, chosen as a user has it."""
    parts = {name: one.to("cuda", dtype) for name, one in drawn(3, 5000, 20011, 0.1).items()}
    ids = torch.randint(0, 20011, (5000,), generator=torch.Generator().manual_seed(0)).cuda()

    def call(p: dict[str, Tensor]) -> Any:
        made = token_logprobs(p["hidden_new"], p["weight_new"], ids, p["bias_new"], entropy=True, top_k=5)
        rows = {
            name: p[name] for name in ("hidden_new", "weight_new", "hidden_old", "weight_old", "bias_new", "bias_old")
        }
        return [made.logp, made.entropy, *divergences(**rows, measures=NAMES).values(), *divergences(**rows).values()]

    found = []
    for choice in (None, "torch"):
        monkeypatch.setattr(loops, "choice", choice)
        found.append(outcome(call, parts, dtype, "cuda"))
    for got, wanted in zip(*found, strict=True):
        close(got, wanted, 1e-4 if dtype == torch.float32 else 2e-2)


# --- the compiler, without a GPU ----------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, architecture: int) -> Iterator[list[str]]:
    """Kernels are compiled for a GPU that need not be there, as a launch would, and not run; their names."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from klamp.kernels import triton_loops

    made: list[str] = []

    def launch(
        kernel: Any, z: Tensor, block: int, warps: int, *arguments: Any, pieces: bool = False, **constants: Any
    ) -> None:
        built = kernel.warmup(*arguments, BLOCK=block, num_warps=warps, grid=(1, 1), **constants)
        assert len(built.asm["cubin"]) > 0
        made.append(kernel.__name__)

    absent = SimpleNamespace(
        get_current_device=lambda: 1000 + architecture, get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
    )  # fmt: skip
    monkeypatch.setattr(triton_loops, "_launch", launch)
    driver.set_active(absent)
    yield made
    if torch.cuda.is_available():
        driver.reset_active()


@installed
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("architecture", [80, 90])
def test_every_kernel_compiles(compiled: list[str]) -> None:
    from klamp.kernels import triton_loops

    z, y, row, ids = torch.empty(4, 8192), torch.empty(4, 8192), torch.empty(4), torch.zeros(4, 20, dtype=torch.int64)
    one_word = z[:, :1]
    heads = [Head(torch.empty(2, 1), **options) for options in HEADS[::2]]  # type: ignore[arg-type]
    for moment in (None, row):
        triton_loops.take(row, row, moment, z)
        triton_loops.take(row, row, moment, one_word)
    for leave in (False, True):
        triton_loops.lift(z, ids, 0, torch.empty(4, 20), leave)
    for streams in STREAMS:
        triton_loops.take_tilted(streams, *sums(4, len(streams), torch.float32), z, y)
    for head in heads:
        for one, two in ((row, None), (None, row), (row, row)):
            triton_loops.logprob_slopes(z, z.bfloat16(), head, 0, row, row, ids[:, 0], one, two)
        for kinds in (KINDS, *([which] for which in KINDS)):
            found = torch.empty(4, len(kinds), dtype=torch.float64)
            triton_loops.pair_sums(z, y, (row, row), kinds, found, found)
            triton_loops.pair_slopes(z, y, z, (row, row.double()), kinds, head, torch.empty(4, len(kinds)), row)
    assert set(compiled) == {"_take", "_lift", "_take_tilted", "_logprob_slopes", "_pair_sums", "_pair_slopes"}
