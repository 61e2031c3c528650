"""Divergences over the vocabulary against the written-out float64 sums: values, gradients, hard logits, buckets, order."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import klamp
from klamp.kernels import bucket_divergences, divergences, head, partition, token_logprobs

NAMES = ("kl_old_new", "kl_new_old", "tv", "js", "hellinger2", "chi2_new_old", "chi2_old_new", "power(0.3)", "power(3.0)",
         "power(-0.7)")  # fmt: skip
RUNNING = tuple(name for name in NAMES if name not in ("tv", "js"))


def written(name: str, logq: Tensor, logp: Tensor) -> Tensor:
    """The definitions, as textbooks have them."""
    q, p = logq.exp(), logp.exp()
    middle = torch.logaddexp(logq, logp) - math.log(2.0)

    def kl(one: Tensor, log_one: Tensor, log_two: Tensor) -> Tensor:
        return torch.where(one > 0, one * (log_one - log_two), 0.0)

    def power(a: float) -> Tensor:
        return ((1 - a) * logp + a * logq).exp()

    sums = {
        "kl_old_new": lambda: kl(p, logp, logq), "kl_new_old": lambda: kl(q, logq, logp), "tv": lambda: (q - p).abs() / 2,
        "js": lambda: (kl(q, logq, middle) + kl(p, logp, middle)) / 2, "hellinger2": lambda: (q.sqrt() - p.sqrt()) ** 2,
        "chi2_new_old": lambda: (2 * logq - logp).exp() - 2 * q + p, "chi2_old_new": lambda: (2 * logp - logq).exp() - 2 * p + q,
    }  # fmt: skip
    if name in sums:
        return sums[name]().sum(1)
    a = float(name[6:-1])
    return (power(a) - a * q - (1 - a) * p).sum(1) / (a * (a - 1))


def draw(seed: int, tokens: int, words: int, size: float = 1.0, apart: float = 0.3) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    hidden, weight, bias = size * normal(tokens, 6), normal(words, 6), normal(words)
    return {
        "hidden_new": hidden + apart * normal(tokens, 6), "weight_new": weight + 0.1 * apart * normal(words, 6),
        "hidden_old": hidden, "weight_old": weight, "bias_new": bias + 0.1 * apart * normal(words), "bias_old": bias,
    }  # fmt: skip


def logits(
    parts: dict[str, Any], which: str, temperature: float = 1.0, softcap: float | None = None, scale: float = 1.0
) -> Tensor:
    z = (parts[f"hidden_{which}"] @ parts[f"weight_{which}"].T + parts[f"bias_{which}"]) * scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


LEAVES = ("hidden_new", "weight_new", "bias_new")


def compared(
    parts: dict[str, Any], names: tuple[str, ...], options: dict[str, Any], given_lse: bool, **more: Any
) -> list[tuple[Tensor, Tensor]]:
    """(ours, written out) for every divergence and the gradients of a mixture of them."""
    mix = torch.linspace(-1.0, 1.5, len(names) * len(parts["hidden_new"]), dtype=torch.float64).view(len(names), -1)
    results = []
    for ours in (True, False):
        mine = parts | {name: parts[name].clone().requires_grad_() for name in LEAVES}
        if ours:
            wide = {name: value.double() for name, value in parts.items()}
            lses = {f"lse_{w}": logits(wide, w, **options).logsumexp(1) for w in ("new", "old")} if given_lse else {}
            lses = {
                name: lse.to(torch.promote_types(parts["hidden_new"].dtype, torch.float32))
                for name, lse in lses.items()
            }
            found = list(divergences(**mine, measures=names, **options, **lses, **more).values())
        else:
            logq, logp = (torch.log_softmax(logits(mine, which, **options), 1) for which in ("new", "old"))
            found = [written(name, logq, logp) for name in names]
        total = sum((one * weight).sum() for one, weight in zip(found, mix, strict=True))
        grads = torch.autograd.grad(total, [mine[name] for name in LEAVES])
        results.append([*(one.detach() for one in found), *grads])
    return list(zip(*results, strict=True))


def close(pairs: list[tuple[Tensor, Tensor]], tolerance: float) -> None:
    for got, wanted in pairs:
        scale = max(1.0, wanted.abs().max().item())
        assert (got.double() - wanted).abs().max().item() <= tolerance * scale


@given(
    seed=st.integers(0, 10**6), tokens=st.integers(1, 6), words=st.integers(2, 30), block=st.integers(1, 40), chunk=st.integers(1, 7),
    given_lse=st.booleans(), names=st.sampled_from([NAMES, RUNNING, *((name,) for name in NAMES)]), temperature=st.sampled_from([1.0, 0.7]),
    softcap=st.sampled_from([None, 3.0]), scale=st.sampled_from([1.0, 0.5]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_equal_to_the_written_out_sums(
    seed: int, tokens: int, words: int, block: int, chunk: int, given_lse: bool, names: tuple[str, ...], temperature: float,
    softcap: float | None, scale: float,
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "WORDS", block)
        options = {"temperature": temperature, "softcap": softcap, "scale": scale}
        close(compared(draw(seed, tokens, words), names, options, given_lse, chunk=chunk), 1e-11)


@pytest.mark.parametrize("given_lse", [True, False])
@pytest.mark.parametrize("name", ["power(0.001)", "power(1.0000001)", "power(-1e-9)", "power(0.97)"])
def test_powers_near_the_two_divergences_of_kullback_and_leibler(name: str, given_lse: bool) -> None:
    a = float(name[6:-1])
    parts = draw(3, 5, 20)
    found = divergences(**parts, measures=(name, "kl_old_new", "kl_new_old"))
    (near,) = (one for key, one in found.items() if key == name)
    limit = found["kl_old_new" if abs(a) < 0.5 else "kl_new_old"]
    logq, logp = (torch.log_softmax(logits(parts, which), 1) for which in ("new", "old"))
    measure = klamp.measure(f"power({a!r})")
    wanted = (logp.exp() * measure.raw(logq - logp)).sum(1)
    assert (near - wanted).abs().max() < 1e-14
    assert (near - limit).abs().max() < 2 * min(abs(a), abs(a - 1)) + 1e-12


@pytest.mark.parametrize(("name", "wanted"), [("power(-1e-09)", 51.2), ("power(1e-05)", 51.19)])
def test_a_power_near_the_divergence_in_float32_where_policies_are_far_apart(name: str, wanted: float) -> None:
    eye = torch.eye(2)
    found = divergences(torch.tensor([[102.4, 0.0]]), eye, torch.zeros(1, 2), eye, (name, "kl_old_new"))
    assert found["kl_old_new"].item() == pytest.approx(51.2 - math.log(2.0), rel=1e-6)
    assert found[name].item() == pytest.approx(wanted - math.log(2.0), rel=1e-3)


@pytest.mark.parametrize("high", [1e4, -1e4])
@pytest.mark.parametrize("given_lse", [True, False])
def test_hard_logits(high: float, given_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """+-1e4, one-hot, uniform, and words that both policies filter out."""
    monkeypatch.setattr(head, "WORDS", 5)
    eye = torch.eye(13, dtype=torch.float64)
    bias = torch.zeros(13, dtype=torch.float64)
    bias[[6, 7, 8, 9, 10, 11]] = -math.inf
    states = torch.cat([high * eye[:4], 0.0 * eye[:2], eye[:3]])
    parts = {
        "hidden_new": states.roll(1, 0),
        "hidden_old": states,
        "weight_new": eye,
        "weight_old": eye,
        "bias_new": bias,
        "bias_old": bias,
    }
    logq, logp = (torch.log_softmax(logits(parts, which).clamp(min=-1e30), 1) for which in ("new", "old"))
    lses = {f"lse_{w}": logits(parts, w).logsumexp(1) for w in ("new", "old")} if given_lse else {}
    found = divergences(**parts, measures=("tv", "js", "hellinger2", "kl_old_new", "kl_new_old"), **lses)
    for name, got in found.items():
        wanted = written(name, logq, logp)
        assert torch.isfinite(got).all()
        assert (got - wanted).abs().max() <= 1e-12 * max(1.0, wanted.abs().max().item())
        assert (got >= 0).all()


def test_a_word_that_one_policy_cannot_say() -> None:
    eye, bias = torch.eye(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    gone = bias.clone()
    gone[2] = -math.inf
    found = divergences(eye, eye, eye, eye, NAMES, bias_new=gone, bias_old=bias)
    infinite = {name for name, value in found.items() if torch.isinf(value).all()}
    assert infinite == {"kl_old_new", "chi2_old_new", "power(-0.7)"}
    assert all(torch.isfinite(value).all() for name, value in found.items() if name not in infinite)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gone", [-math.inf, -1e4, -100.0])
def test_policies_that_share_no_word(dtype: torch.dtype, gone: float) -> None:
    first = torch.tensor([0.0, 0.0, gone, gone], dtype=dtype)
    nothing = torch.zeros(1, 1, dtype=dtype), torch.zeros(4, 1, dtype=dtype)
    found = divergences(*nothing, *nothing, ("tv", "js", "hellinger2"), bias_new=first, bias_old=first.flip(0))
    for name, wanted in {"tv": 1.0, "js": math.log(2.0), "hellinger2": 2.0}.items():
        assert found[name].item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("given_lse", [True, False])
def test_the_same_policy_twice_is_exactly_nowhere(given_lse: bool) -> None:
    parts = draw(5, 40, 300, size=4.0, apart=0.0)
    parts = {name: value.float() for name, value in parts.items()}
    lse = logits(parts, "new").logsumexp(1)
    lses = {"lse_new": lse, "lse_old": lse} if given_lse else {}
    for name, found in divergences(**parts, measures=NAMES, **lses).items():
        assert (found <= 1e-6).all(), name
        assert (found >= 0).all(), name
    tiny = divergences(**parts, measures=("kl_old_new", "kl_new_old", "tv", "hellinger2"), **lses)
    assert all((found == 0).all() for found in tiny.values())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("names", [NAMES[:5], ("kl_old_new", "hellinger2")])
def test_narrow_numbers(dtype: torch.dtype, tolerance: float, names: tuple[str, ...]) -> None:
    narrow = {name: value.to(dtype) for name, value in draw(8, 30, 2100).items()}
    wide = {name: value.double() for name, value in narrow.items()}
    for given_lse in (True, False):
        got = [one for one, _ in compared(narrow, names, {}, given_lse)]
        wanted = [one for _, one in compared(wide, names, {}, given_lse)]
        assert got[0].dtype == torch.float32
        close(list(zip(got, wanted, strict=True)), tolerance)


def test_masked_positions_change_nothing_whatever_they_hold() -> None:
    parts = draw(2, 5, 17)
    places, ids = torch.tensor([0, 2, 3, 5, 6]), torch.full((7,), -100)
    ids[places] = torch.arange(5)
    wide = dict(parts)
    for name in ("hidden_new", "hidden_old"):
        wide[name] = torch.full((7, 6), math.nan, dtype=torch.float64).index_put((places,), parts[name])
    wide["hidden_new"].requires_grad_()
    got = divergences(**wide, measures=NAMES, token_ids=ids)
    for name, wanted in divergences(**parts, measures=NAMES).items():
        assert torch.equal(got[name][places].detach(), wanted)
        assert got[name][1].item() == got[name][4].item() == 0.0
    (grad,) = torch.autograd.grad(sum(one.sum() for one in got.values()), wide["hidden_new"])
    assert torch.isfinite(grad).all()
    assert (grad[[1, 4]] == 0).all()
    nothing = divergences(**(wide | {"hidden_new": wide["hidden_new"].detach()}), token_ids=torch.full((7,), -1))
    assert (nothing["kl_old_new"] == 0).all()


@pytest.mark.parametrize(("change", "says"), [
    ({"measures": ("kl",)}, "unknown divergence 'kl'; known"), ({"measures": ("power(nan)",)}, "unknown divergence"),
    ({"weight_old": torch.randn(9, 6)}, "vocabularies of 8 and 9"), ({"hidden_old": torch.randn(3, 6)}, "must fit"),
    ({"lse_old": torch.zeros(3)}, r"lse_old must be \[N\]"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], says: str) -> None:
    parts = {
        "hidden_new": torch.randn(4, 6),
        "weight_new": torch.randn(8, 6),
        "hidden_old": torch.randn(4, 6),
        "weight_old": torch.randn(8, 6),
    }
    with pytest.raises((klamp.UserError, TypeError), match=says):
        divergences(**(parts | change))


# --- buckets ---------------------------------------------------------------------------------------------------

ORDERED = ("kl_old_new", "kl_new_old", "tv", "js", "hellinger2")


def in_buckets(parts: dict[str, Any], ids: Tensor, top: int, names: tuple[str, ...] = ORDERED) -> dict[str, Tensor]:
    """Top-K divergences as a trainer finds them: the old policy's top is stored, the new one is asked for it."""
    old = token_logprobs(parts["hidden_old"], parts["weight_old"], ids, parts["bias_old"], top_k=top)
    new = token_logprobs(parts["hidden_new"], parts["weight_new"], ids, parts["bias_new"], at=old.top_ids)
    logp = partition(old.logp, ids, old.top_logp, old.top_ids, old.tail_logp)
    logq = partition(new.logp, ids, new.at_logp, old.top_ids, new.tail_logp)
    return dict(bucket_divergences(logq, logp, names))


def test_coarser_is_never_further_apart() -> None:
    """binary <= top-K <= exact, and more buckets never less, over 10,000 tokens."""
    for seed, words in ((0, 50), (1, 50), (2, 12), (3, 200)):
        parts = draw(seed, 2500, words, size=1.5, apart=0.8)
        ids = torch.randint(0, words, (2500,), generator=torch.Generator().manual_seed(seed))
        exact = divergences(**parts, measures=ORDERED)
        one = token_logprobs(parts["hidden_old"], parts["weight_old"], ids, parts["bias_old"]).logp
        two = token_logprobs(parts["hidden_new"], parts["weight_new"], ids, parts["bias_new"]).logp
        rest = [torch.log(-torch.expm1(logp)) for logp in (two, one)]
        chain = [bucket_divergences(torch.stack([two, rest[0]], 1), torch.stack([one, rest[1]], 1), ORDERED)]
        chain += [in_buckets(parts, ids, top) for top in (1, 2, 5, 10)] + [exact]
        for name in ORDERED:
            for coarse, fine in itertools.pairwise(chain):
                assert (coarse[name] <= fine[name] + 1e-13).all(), name
        everything = in_buckets(parts, ids, words)
        close([(everything[name], exact[name]) for name in ORDERED], 1e-12)


def test_without_a_bucket_for_the_sampled_token_the_order_fails() -> None:
    """A rare token that moved far: the two-way split sees it, the top with a tail does not."""
    logp = torch.log(torch.tensor([[0.6, 0.38, 0.01, 0.01]], dtype=torch.float64))
    logq = torch.log(torch.tensor([[0.6, 0.38, 0.019, 0.001]], dtype=torch.float64))
    tail = [torch.logsumexp(one[:, 2:], 1, keepdim=True) for one in (logq, logp)]
    without = bucket_divergences(
        torch.cat([logq[:, :2], tail[0]], 1), torch.cat([logp[:, :2], tail[1]], 1), ("kl_old_new",)
    )
    binary = klamp.binary.binary_divergence("binary_kl_old_new", logq[0, 2] - logp[0, 2], logp[0, 2])
    assert without["kl_old_new"].item() < 1e-15 < binary.item()
    own = bucket_divergences(logq, logp, ("kl_old_new",))
    assert own["kl_old_new"].item() >= binary.item()


CASES: list[dict[str, Any]] = [
    {"logits_old": [0.617406, 0.788309, -1.322275, 3.435061, 1.113219, 2.39401, -1.240666, -1.479032, -0.688093, -0.212843, 1.264157, 0.496855],
     "logits_new": [0.393729, 0.309853, -1.58257, 4.045522, 0.709246, 2.516389, -1.027407, -2.223904, -0.663856, 0.440279, 0.256975, 0.336058],
     "sampled": 10,
     1: {"kl_old_new": 0.0822664251931634, "kl_new_old": 0.06766497511640883, "tv": 0.16517717541206142, "js": 0.018142079242324072, "hellinger2": 0.03685933120791788}},
    {"logits_old": [-0.511761, 1.022863, -0.452192, -0.630137, -1.860036, -0.426604, 2.223835, 0.848293, 2.073758, 0.497805, 0.789539, 0.370653],
     "logits_new": [-1.344792, 1.450488, -0.199, -0.380728, -2.705718, -1.298548, 1.779027, 0.614198, 2.226481, 0.474849, 1.050026, 0.049536],
     "sampled": 6,
     1: {"kl_old_new": 0.028495544726864597, "kl_new_old": 0.026085642062115517, "tv": 0.10136825815708424, "js": 0.006787267083022092, "hellinger2": 0.013609777920592614},
     3: {"kl_old_new": 0.03929273056377587, "kl_new_old": 0.03896144928842752, "tv": 0.11221287773055325, "js": 0.009715859302867924, "hellinger2": 0.019497329890375076},
     12: {"kl_old_new": 0.0596103685754318, "kl_new_old": 0.0568335000600778, "tv": 0.15238694614407947, "js": 0.014412820469522214, "hellinger2": 0.02896686659464427}},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_buckets_by_an_independent_computation(case: dict[Any, Any]) -> None:
    rows = {which: torch.tensor([case[f"logits_{which}"]], dtype=torch.float64) for which in ("old", "new")}
    eye = torch.eye(12, dtype=torch.float64)
    parts = {
        "hidden_old": rows["old"],
        "hidden_new": rows["new"],
        "weight_old": eye,
        "weight_new": eye,
        "bias_old": None,
        "bias_new": None,
    }
    for top in (1, 3, 12):
        for name, wanted in case.get(top, {}).items():
            found = in_buckets(parts, torch.tensor([case["sampled"]]), top)[name].item()
            assert found == pytest.approx(wanted, rel=1e-12)
