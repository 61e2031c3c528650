"""What log-probs and divergences over the vocabulary cost on a GPU: PyTorch's loops, Triton's, and others; prints JSON.

    python benchmarks/kernels_gpu.py [--tokens 16384] [--width 2048] [--words 151936] [--dtype bfloat16] [--rounds 5] [--only NAME ...]

Milliseconds of one forward and backward pass (median; the ways take turns) and the peak of allocated memory above what was
there before, less the gradients of the inputs. The ways are those of benchmarks/kernels.py, ``klamp`` once with each kind of
loops; Liger takes part where it is installed (pip install --no-deps liger-kernel). What runs out of memory is null.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from typing import Any

import torch
from kernels import WAYS, Way, _versions
from torch import Tensor

from klamp.kernels import loops


def inputs(tokens: int, width: int, words: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Two policies a little apart, ids, upstream gradients and both log-normalisers."""
    random = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device="cuda")

    made = {"ids": torch.randint(words, (tokens,), generator=random, device="cuda"), "up": draw(tokens) / tokens}
    hidden, weight = draw(tokens, width), 3.0 * draw(words, width) / width**0.5
    for which, apart in (("old", 0.0), ("new", 0.05)):
        made[f"hidden_{which}"] = (hidden + apart * draw(tokens, width)).to(dtype)
        made[f"weight_{which}"] = weight.to(dtype)
        pieces = made[f"hidden_{which}"].split(1024)
        made[f"lse_{which}"] = torch.cat([(one @ made[f"weight_{which}"].T).float().logsumexp(1) for one in pieces])
    for name in ("hidden_new", "weight_new"):
        made[name].requires_grad_()
    return made


def once(way: Way, parts: dict[str, Tensor]) -> tuple[float, float]:
    """(milliseconds, MB) of one pass."""
    leaves = [parts["hidden_new"], parts["weight_new"]]
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    way(parts).backward()
    end.record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - sum(leaf.nbytes for leaf in leaves)
    return start.elapsed_time(end), peak / 1e6


def ways(only: list[str] | None) -> dict[str, tuple[Way, Any]]:
    """(way, the loops it asks for) by name."""
    found: dict[str, tuple[Way, Any]] = {}
    for name, way in WAYS.items():
        if "klamp" in name:
            found |= {f"{name} ({choice})": (way, choice) for choice in ("torch", "triton")}
        elif "liger" not in name or importlib.util.find_spec("liger_kernel"):
            found[name] = way, None
    return {name: one for name, one in found.items() if not only or any(word in name for word in only)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("tokens", 16384), ("width", 2048), ("words", 151936), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--only", nargs="+", metavar="NAME")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a GPU; benchmarks/kernels.py measures on a CPU", file=sys.stderr)
        return 2
    parts = inputs(given.tokens, given.width, given.words, getattr(torch, given.dtype))
    measured: dict[str, list[tuple[float, float]] | None] = {name: [] for name in ways(given.only)}
    for turn in range(given.rounds + 1):
        for name, (way, choice) in ways(given.only).items():
            found = measured[name]
            if found is None:
                continue
            loops.choice = choice
            try:
                one = once(way, parts)
            except torch.OutOfMemoryError:
                measured[name] = None
                continue
            if turn:  # the first compiles
                found.append(one)
    results = {
        name: found
        and {"milliseconds": statistics.median(ms for ms, _ in found), "megabytes": max(mb for _, mb in found)}
        for name, found in measured.items()
    }
    about = {"gpu": torch.cuda.get_device_name(), "versions": _versions(), **vars(given)}
    print(json.dumps({"about": about, "measured": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
