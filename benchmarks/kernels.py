"""What log-probs and divergences over the vocabulary cost: time and peak memory of one forward and backward pass.

    python benchmarks/kernels.py [--shapes small large] [--dtypes float32 bfloat16] [--rounds N] [--only NAME ...] [--write]

Every measurement is a process of its own; the ways take turns, ``--rounds`` times, and the fastest time of each counts, for
absolute times are noisy. Memory is the peak of the resident set above what the process held with its inputs, less the
gradients of the inputs. Upstream gradients are random, one per token. ``--write``: into docs/kernels.json and the tables of
docs/kernels.md. Liger takes part where it is installed (pip install --no-deps liger-kernel).

The ways: ``klamp`` (klamp.kernels), ``plain`` (logits, log_softmax, gather), ``trl`` (the chunked head of TRL's trainers, in the
size that they use), ``torch`` (linear_cross_entropy, chunked), ``liger`` (LigerFusedLinearGRPOLoss, eager).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DOCS = Path(__file__).parents[1] / "docs"
SHAPES = {"tiny": (64, 32, 700), "small": (2048, 576, 49152), "large": (4096, 1024, 151936)}
Way = Callable[[dict[str, Tensor]], Tensor]


def plain(parts: dict[str, Tensor], which: str = "new") -> Tensor:
    return torch.log_softmax((parts[f"hidden_{which}"] @ parts[f"weight_{which}"].T).float(), dim=-1)


def plain_logp(parts: dict[str, Tensor]) -> Tensor:
    return plain(parts).gather(1, parts["ids"][:, None])[:, 0] @ parts["up"]


def plain_entropy(parts: dict[str, Tensor]) -> Tensor:
    logp = plain(parts)
    return logp.gather(1, parts["ids"][:, None])[:, 0] @ parts["up"] - (logp.exp() * logp).sum(1) @ parts["up"].flip(0)


def plain_kl(parts: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        old = plain(parts, "old")
    return (old.exp() * (old - plain(parts))).sum(1) @ parts["up"]


def klamp_logp(parts: dict[str, Tensor], entropy: bool = False) -> Tensor:
    from klamp.kernels import token_logprobs

    found = token_logprobs(parts["hidden_new"], parts["weight_new"], parts["ids"], entropy=entropy)
    total = found.logp @ parts["up"]
    return total if found.entropy is None else total + found.entropy @ parts["up"].flip(0)


def klamp_entropy(parts: dict[str, Tensor]) -> Tensor:
    return klamp_logp(parts, entropy=True)


def klamp_divergence(measure: str, given: bool = False) -> Way:
    def way(parts: dict[str, Tensor]) -> Tensor:
        from klamp.kernels import divergences

        inputs = [parts[f"{what}_{which}"] for which in ("new", "old") for what in ("hidden", "weight")]
        lses = {name: parts[name] for name in ("lse_new", "lse_old")} if given else {}
        return divergences(*inputs, (measure,), **lses)[measure] @ parts["up"]

    return way


def trl_head(parts: dict[str, Tensor], outputs: tuple[str, ...] = ()) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as SIZE

    logp, entropy, *_ = ChunkedLogProbFunction.apply(
        parts["hidden_new"], parts["weight_new"], None, parts["ids"], 1.0, SIZE, None, 1.0, outputs
    )
    total = logp @ parts["up"]
    return total if entropy is None else total + entropy @ parts["up"].flip(0)


def trl_entropy(parts: dict[str, Tensor]) -> Tensor:
    return trl_head(parts, ("entropy",))


def torch_head(parts: dict[str, Tensor]) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    found = torch.nn.functional.linear_cross_entropy(
        parts["hidden_new"], parts["weight_new"], parts["ids"], reduction="none", options=options
    )
    return -found.float() @ parts["up"]


def liger_loss(parts: dict[str, Tensor]) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    rows = 8
    shape = (rows, len(parts["ids"]) // rows)
    loss, _ = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, chunk_size=1)(
        parts["hidden_new"].view(*shape, -1), parts["weight_new"], parts["ids"].view(shape),
        torch.ones(shape, dtype=torch.int64), parts["up"][:rows].float(),
    )  # fmt: skip
    return loss


WAYS: dict[str, Way] = {
    "plain log-prob": plain_logp, "klamp log-prob": klamp_logp, "trl log-prob": trl_head, "torch log-prob": torch_head,
    "liger GRPO loss": liger_loss, "plain log-prob, entropy": plain_entropy, "klamp log-prob, entropy": klamp_entropy,
    "trl log-prob, entropy": trl_entropy, "plain kl_old_new": plain_kl,
    **{f"klamp {name}": klamp_divergence(name) for name in ("kl_old_new", "hellinger2", "power(2.0)", "tv", "js")},
    **{f"klamp {name}, normalisers given": klamp_divergence(name, True) for name in ("kl_old_new", "tv", "js")},
}  # fmt: skip
BASE = {"log-prob, entropy": "plain log-prob, entropy"}  # what a way is compared with, by what it returns


def inputs(shape: tuple[int, int, int], dtype: torch.dtype, both: bool) -> dict[str, Tensor]:
    tokens, width, words = shape
    torch.manual_seed(0)
    made: dict[str, Tensor] = {"ids": torch.randint(words, (tokens,)), "up": torch.randn(tokens) / tokens}
    for which in ("new", "old") if both else ("new",):
        made[f"hidden_{which}"] = torch.randn(tokens, width).to(dtype)
        made[f"weight_{which}"] = (3.0 * torch.randn(words, width) / width**0.5).to(dtype)
        if both:
            made[f"lse_{which}"] = torch.cat(
                [
                    torch.logsumexp(part.float() @ made[f"weight_{which}"].float().T, 1)
                    for part in made[f"hidden_{which}"].split(64)
                ]
            )
    for name in ("hidden_new", "weight_new"):
        made[name].requires_grad_()
    return made


def measure(name: str, shape: str, dtype: str) -> dict[str, float]:
    """Seconds and MB of one way, in this process."""
    way, kind = WAYS[name], getattr(torch, dtype)
    way(inputs(SHAPES["tiny"], kind, both=True)).backward()  # imports and first calls
    parts = inputs(SHAPES[shape], kind, not any(word in name for word in ("log-prob", "GRPO")))
    grads = sum(parts[leaf].nbytes for leaf in ("hidden_new", "weight_new"))
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that is free, but still the process's, would hide what is needed
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.perf_counter()
    way(parts).backward()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "megabytes": (_status("VmHWM") - before - grads) / 1e6}


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def rows(found: dict[str, dict[str, float]]) -> Iterator[tuple[str, float, float, float, float]]:
    """(way, seconds, ratio, MB, ratio): compared with the plain way to the same, divergences with plain log-probs."""
    for name, one in found.items():
        base = found.get("plain log-prob, entropy" if "entropy" in name else "plain log-prob")
        memory = found.get("plain kl_old_new") if "kl" in name or ("klamp" in name and "log-prob" not in name) else base
        yield (
            name, one["seconds"], one["seconds"] / base["seconds"] if base else float("nan"), one["megabytes"],
            one["megabytes"] / memory["megabytes"] if memory else float("nan"),
        )  # fmt: skip


def table(found: dict[str, dict[str, float]]) -> str:
    lines = ["| way | seconds | against plain | MB | against plain |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {s:.2f} | {rs:.2f} | {m:,.0f} | {100 * rm:.1f} % |" for name, s, rs, m, rm in rows(found)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["small", "large"], choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, help="also write the results there, as JSON")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*given.one)))
        return 0
    names = [name for name in WAYS if not given.only or any(word in name for word in given.only)]
    names = [name for name in names if "liger" not in name or importlib.util.find_spec("liger_kernel")]
    results: dict[str, Any] = {"threads": torch.get_num_threads(), "versions": _versions(), "measured": {}}
    for shape in given.shapes:
        for dtype in given.dtypes:
            found: dict[str, dict[str, float]] = {}
            for name in names * given.rounds:
                command = [sys.executable, __file__, "--one", name, shape, dtype]
                done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
                if done.returncode:
                    print(f"{name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                    continue
                one = json.loads(done.stdout.splitlines()[-1])
                print(
                    f"{shape} {dtype} {name}: {one['seconds']:.2f} s, {one['megabytes']:.0f} MB",
                    file=sys.stderr,
                    flush=True,
                )
                best = found.setdefault(name, one)
                best["seconds"] = min(best["seconds"], one["seconds"])
            results["measured"][f"{shape} {dtype}"] = found
            tokens, width, words = SHAPES[shape]
            if given.out:
                given.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"\n{tokens:,} tokens x {width} x {words:,}, {dtype}\n\n{table(found)}\n")
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n")
    if given.write:
        (DOCS / "kernels.json").write_text(json.dumps(results, indent=1) + "\n")
        page = DOCS / "kernels.md"
        page.write_text(filled(page.read_text(), results))
    return 0


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with its tables made again from the results."""
    return re.sub(
        r"<!-- (\w+ \w+) -->\n.*?<!-- end -->",
        lambda match: f"<!-- {match[1]} -->\n{table(results['measured'][match[1]])}\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "trl", "liger-kernel") if _installed(name)}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name.replace("-", "_")) is not None


if __name__ == "__main__":
    sys.exit(main())
