"""token_logprobs against the written-out float64 computation: values, gradients, hard logits, memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import klamp
from klamp.kernels import head as room
from klamp.kernels import named_memory, token_logprobs

Parts = dict[str, Any]


def plain(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, options: Parts) -> tuple[Tensor, Tensor]:
    """(log q(token), entropy) with the logits written out."""
    z = hidden @ weight.T
    z = z if bias is None else z + bias
    z = z * options.get("scale", 1.0)
    cap = options.get("softcap")
    z = z if cap is None else cap * torch.tanh(z / cap)
    z = z / options.get("temperature", 1.0)
    z = torch.where(z == -math.inf, -1e30, z)
    logq = z - torch.logsumexp(z, dim=1, keepdim=True)
    return logq.gather(1, ids[:, None])[:, 0], -(logq.exp() * logq).sum(1)


def parts(
    seed: int, tokens: int, words: int, width: int = 7, size: float = 1.0, bias: bool = True
) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    ids = torch.randint(0, words, (tokens,), generator=random)
    return size * draw(tokens, width), draw(words, width), ids, draw(words) if bias else None  # type: ignore[return-value]


def both(
    found: tuple[Tensor, ...], options: Parts, dtype: torch.dtype = torch.float64, **more: Any
) -> list[tuple[Tensor, Tensor]]:
    """(ours, the plain one's) for log-probs, entropy and their gradients to hidden, weight and bias."""
    hidden, weight, ids, bias = found
    results = []
    for ours in (True, False):
        kind = dtype if ours else torch.float64
        leaves = [None if one is None else one.to(dtype).to(kind).requires_grad_() for one in (hidden, weight, bias)]
        if ours:
            made = token_logprobs(leaves[0], leaves[1], ids, leaves[2], entropy=True, **options, **more)
            logp, entropy = made.logp, made.entropy
        else:
            logp, entropy = plain(leaves[0], leaves[1], ids, leaves[2], options)
        up = torch.linspace(-1.0, 2.0, len(ids), dtype=torch.float64)
        total = (logp * up).sum() + (entropy * up.flip(0) * 0.7).sum()
        grads = torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None])
        results.append([logp.detach(), entropy.detach(), *grads])
    return list(zip(*results, strict=True))


def close(pairs: list[tuple[Tensor, Tensor]], tolerance: float) -> None:
    for got, wanted in pairs:
        assert got.shape == wanted.shape
        if wanted.numel():
            scale = max(1.0, wanted.abs().max().item())
            assert (got.double() - wanted).abs().max().item() <= tolerance * scale


@given(
    seed=st.integers(0, 10**6), tokens=st.integers(1, 9), words=st.integers(2, 40), block=st.integers(1, 50), chunk=st.integers(1, 12),
    size=st.sampled_from([0.1, 1.0, 30.0]), bias=st.booleans(), temperature=st.sampled_from([1.0, 0.7, 2.5]),
    softcap=st.sampled_from([None, 3.0]), scale=st.sampled_from([1.0, 0.25]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_equal_to_the_plain_computation(
    seed: int, tokens: int, words: int, block: int, chunk: int, size: float, bias: bool, temperature: float, softcap: float | None, scale: float
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "WORDS", block)
        options = {"temperature": temperature, "softcap": softcap, "scale": scale}
        close(both(parts(seed, tokens, words, size=size, bias=bias), options, chunk=chunk), 1e-12)


@pytest.mark.parametrize("words", [1000, 1024, 2600])
def test_whole_blocks_and_what_is_left_of_one(words: int) -> None:
    found = parts(0, 700, words)
    close(both(found, {}), 1e-12)
    close(both(found, {}, torch.float32), 1e-5)
    close(both(found, {}, torch.bfloat16), 1e-2)


@pytest.mark.parametrize("high", [1e4, -1e4])
def test_hard_logits(high: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """+-1e4, one-hot, uniform, and words that are filtered out by a bias of -inf."""
    monkeypatch.setattr(room, "WORDS", 5)
    eye = torch.eye(13, dtype=torch.float64)
    hidden = torch.cat([high * eye[:4], 0.0 * eye[:2], eye[:3]])
    ids = torch.tensor([0, 1, 2, 5, 3, 4, 12, 1, 2])
    bias = torch.zeros(13, dtype=torch.float64)
    bias[[6, 7, 8, 9, 10, 11]] = -math.inf
    close(both((hidden, eye.clone(), ids, torch.zeros_like(bias)), {}), 1e-12)
    found = token_logprobs(hidden, eye, ids, bias, entropy=True)
    logp, entropy = plain(hidden, eye, ids, bias, {})
    close([(found.logp, logp), (found.entropy, entropy)], 1e-12)  # type: ignore[list-item]
    assert found.entropy is not None
    assert found.entropy[4].item() == pytest.approx(math.log(7), rel=1e-14)
    gone = token_logprobs(hidden, eye, torch.full_like(ids, 8), bias)
    assert torch.isneginf(gone.logp).all()


def test_masked_positions_change_nothing_whatever_they_hold() -> None:
    hidden, weight, ids, bias = parts(3, 8, 30)
    wide = torch.full((11, 7), math.nan, dtype=torch.float64)
    names = torch.full((11,), -100)
    places = torch.tensor([0, 2, 3, 4, 6, 7, 9, 10])
    wide[places], names[places] = hidden, ids
    leaves = [wide.requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    found = token_logprobs(leaves[0], leaves[1], names, leaves[2], entropy=True, top_k=3)
    alone = token_logprobs(hidden, weight, ids, bias, entropy=True, top_k=3)
    for got, wanted in zip(found, alone, strict=True):
        if wanted is not None:
            assert torch.equal(got[places].detach(), wanted)  # type: ignore[index]
    assert found.entropy is not None
    assert found.top_ids is not None
    assert found.logp[1].item() == found.entropy[1].item() == 0.0
    assert (found.top_ids[1] == -1).all()
    grads = torch.autograd.grad((found.logp.sum() + found.entropy.sum()), leaves)
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert (grads[0][[1, 5, 8]] == 0).all()


@pytest.mark.parametrize("names", [[], [-1, -1]])
def test_no_token_at_all(names: list[int]) -> None:
    hidden = torch.full((len(names), 4), math.nan, requires_grad=True)
    weight = torch.randn(6, 4, requires_grad=True)
    found = token_logprobs(hidden, weight, torch.tensor(names, dtype=torch.int64), entropy=True, top_k=2)
    assert found.logp.shape == (len(names),)
    grads = torch.autograd.grad(found.logp.sum(), [hidden, weight])
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("top", [1, 4, 23])
def test_the_likeliest_tokens(top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "WORDS", 5)
    hidden, weight, ids, bias = parts(5, 6, 23)
    found = token_logprobs(hidden, weight, ids, bias, top_k=top)
    wanted, names = torch.log_softmax(hidden @ weight.T + bias, 1).topk(top)
    assert found.top_ids is not None
    assert torch.equal(found.top_ids, names)
    close([(found.top_logp, wanted)], 1e-12)  # type: ignore[list-item]
    assert found.entropy is None


@given(seed=st.integers(0, 10**6), words=st.integers(2, 23), top=st.integers(1, 23), block=st.integers(1, 25))
@settings(max_examples=100, deadline=None)
def test_the_token_the_likeliest_and_the_rest_are_all_there_is(seed: int, words: int, top: int, block: int) -> None:
    """Tails by their own log-sum-exp, of the policy that chose the tokens and of another one."""
    hidden, weight, ids, bias = parts(seed, 6, words, size=3.0)
    top = min(top, words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "WORDS", block)
        found = token_logprobs(hidden, weight, ids, bias, top_k=top, entropy=True, phi=True, chunk=4)
        other = token_logprobs(-hidden, weight, ids, bias, at=found.top_ids, entropy=True, phi=True, chunk=4)
    for made, states in ((found, hidden), (other, -hidden)):
        logq = torch.log_softmax(states @ weight.T + bias, 1)
        boxed = torch.zeros_like(logq, dtype=torch.bool).scatter(1, found.top_ids, True).scatter(1, ids[:, None], True)
        wanted = torch.where(boxed, -torch.inf, logq).logsumexp(1)
        gone = torch.isneginf(wanted)
        assert torch.equal(torch.isneginf(made.tail_logp), gone)
        close([(made.tail_logp[~gone], wanted[~gone]), (made.logp, logq.gather(1, ids[:, None])[:, 0])], 1e-12)
        wanted_phi = (logq.exp() ** 2 * (logq - (logq.exp() * logq).sum(1, keepdim=True))).sum(1)
        close([(made.phi_mean, wanted_phi)], 1e-12)
        close([(made.entropy, -(logq.exp() * logq).sum(1)), (made.lse, (states @ weight.T + bias).logsumexp(1))], 1e-12)
        at = made.top_logp if made is found else made.at_logp
        close([(at, logq.gather(1, found.top_ids))], 1e-12)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    hidden, weight, ids, bias = parts(6, 5, 12)
    found = token_logprobs(hidden.requires_grad_(), weight, ids, bias, entropy=True)
    (found.logp.sum() + found.entropy.sum()).backward()  # type: ignore[union-attr]
    assert hidden.grad is not None
    assert weight.grad is None
    assert not token_logprobs(hidden.detach(), weight, ids).logp.requires_grad


@pytest.mark.parametrize(("change", "says"), [
    ({"token_ids": torch.tensor([1, 2, 30, 1])}, "token id 30 is beyond the vocabulary of 20"),
    ({"token_ids": torch.tensor([1, 2])}, r"hidden \[N, H\]"), ({"weight": torch.randn(20, 4)}, r"hidden \[N, H\]"),
    ({"bias": torch.zeros(3)}, "a bias"), ({"temperature": 0.0}, "temperature=0.0"), ({"scale": -1.0}, "scale"),
    ({"softcap": 0.0}, "softcap"), ({"top_k": 21}, "top_k=21"), ({"chunk": 0}, "chunk=0"),
    ({"at": torch.tensor([[1], [2]])}, r"at must be \[N, K\]"), ({"at": torch.full((4, 1), 20)}, "token id 20 in at"),
    ({"at": torch.zeros(4, 1, dtype=torch.int64), "top_k": 2}, "not both"), ({"phi": True}, "needs entropy=True"), ({"hidden": torch.randn(4, 3).double()}, "cast one"),
    ({"weight": torch.ones(20, 3, dtype=torch.int8), "hidden": torch.ones(4, 3, dtype=torch.int8)}, "quantised"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change: Parts, says: str) -> None:
    given = {"hidden": torch.randn(4, 3), "weight": torch.randn(20, 3), "token_ids": torch.tensor([0, 1, 2, 3])}
    with pytest.raises((klamp.UserError, TypeError), match=says):
        token_logprobs(**(given | change))


def test_the_end_of_the_memory_has_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, ids, bias = parts(6, 5, 12)
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):

        def full(*sizes: Any, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(room, "product", full)
            with pytest.raises(klamp.UserError, match="give a smaller chunk="):
                token_logprobs(hidden, weight, ids, bias)
            with (
                pytest.raises(MemoryError, match="memory; set old_states_offload"),
                named_memory("set old_states_offload"),
            ):
                token_logprobs(hidden, weight, ids, bias)
    with pytest.raises(RuntimeError, match="another"), named_memory("no way"):
        raise RuntimeError("another")


def test_adapters_of_the_head_learn_through_the_sum_of_both() -> None:
    """LoRA on the output matrix: the weight given is W + B A, and the gradient goes on to B and A."""
    hidden, weight, ids, bias = parts(9, 6, 40)
    draw = torch.Generator().manual_seed(0)
    down, up = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in ((2, 7), (40, 2))
    )
    found = token_logprobs(hidden, weight + up @ down, ids, bias).logp.sum()
    wanted = plain(hidden, weight + up @ down, ids, bias, {})[0].sum()
    for got, want in zip(*(torch.autograd.grad(total, [down, up]) for total in (found, wanted)), strict=True):
        close([(got, want)], 1e-12)


def test_a_real_models_log_probs() -> None:
    """The tied head of a real model: equal to its own logits, with the gradient to the tied matrix."""
    from transformers import AutoModelForCausalLM

    from klamp.tasks import embedded_model

    model = AutoModelForCausalLM.from_pretrained(embedded_model("embedded:sort"), dtype=torch.float64)
    ids = torch.randint(4, 90, (3, 12), generator=torch.Generator().manual_seed(0))
    wanted = torch.log_softmax(model(input_ids=ids).logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    wanted.sum().backward()
    grad = model.lm_head.weight.grad.clone()
    model.zero_grad()
    states = model.model(input_ids=ids).last_hidden_state[:, :-1]
    found = token_logprobs(states.flatten(0, 1), model.lm_head.weight, ids[:, 1:].flatten()).logp
    found.sum().backward()
    close([(found.detach(), wanted.detach().flatten()), (model.lm_head.weight.grad, grad)], 1e-12)
