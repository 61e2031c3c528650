"""One objective on one batch, and how its numbers are compared with an oracle's."""

from __future__ import annotations

from typing import Any

import torch
from oracles import objective
from oracles.batches import Fields
from oracles.written import CONSTANT, Case

import klamp


def batch(fields: Fields, **options: Any) -> klamp.Batch:
    """The batch of these fields; ``distance`` is whichever divergence over the vocabulary a spec asks for."""
    own = dict(fields)
    distance = own.pop("distance", None)
    names = () if distance is None else ("topk_tv", "topk_kl_old_new", "exact_kl_old_new")
    return klamp.Batch(**own, divergences=dict.fromkeys(names, distance), **options)


def run(spec: str | klamp.Spec, fields: Fields, stats: Any = None, state: Any = None, **options: Any) -> Any:
    """(output, d loss / d logp_new, d loss / d entropy), leaving the fields alone."""
    own = dict(fields)
    new = own["logp_new"].detach().clone().requires_grad_(True)
    own["logp_new"] = new
    entropy = own.get("entropy")
    if entropy is not None:
        entropy = own["entropy"] = entropy.detach().clone().requires_grad_(True)
    out = klamp.Objective(spec)(batch(own, **options), stats, state)
    wanted = [new] if entropy is None else [new, entropy]
    grads = torch.autograd.grad(out.loss, wanted, allow_unused=True)
    found = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)]
    return out, found[0], None if entropy is None else found[1]


def close(got: torch.Tensor, wanted: Any, rtol: float = 1e-12, atol: float = 1e-14) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    assert torch.allclose(got.detach().double(), wanted, rtol=rtol, atol=atol), float(
        (got.detach() - wanted).abs().max()
    )


def compare(case: Case, fields: Fields, **tolerance: float) -> None:
    text, policy, penalties, kind = case
    out, grad, grad_entropy = run(text, fields)
    wanted = objective.evaluate(fields, policy, penalties, kind, CONSTANT.get(kind, 1.0))
    close(out.loss, wanted.loss, **tolerance)
    close(grad, wanted.grad, **tolerance)
    close(grad_entropy, wanted.grad_entropy, **tolerance)
    close(out.per_token, wanted.per_token, **tolerance)
    close(out.grad_policy, wanted.grad_policy, **tolerance)
    close(out.grad_penalty, wanted.grad_penalty, **tolerance)
