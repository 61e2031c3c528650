"""What a named difference is, as a formula with its gradient by autograd."""

from __future__ import annotations

import torch

from conformance.cases import Arrays
from conformance.sides import Result, ours


def kl_of_the_response(arrays: Arrays, policy: str, beta: float) -> Result:
    """The policy term of a spec, plus beta mean_i s_i mean_t k3_it, s_i the response's geometric-mean ratio new/old."""
    new = torch.from_numpy(arrays["new"]).clone().requires_grad_(True)
    old, ref, mask = (torch.from_numpy(arrays[name]) for name in ("old", "ref", "mask"))
    n = mask.sum(1)
    ratio = (((new - old) * mask).sum(1) / n).exp()
    k3 = (ref - new).expm1() - (ref - new)
    penalty = beta * (ratio * (k3 * mask).sum(1) / n).mean()
    penalty.backward()
    assert new.grad is not None
    loss, gradient = ours(policy, arrays)
    return loss + float(penalty.detach()), gradient + new.grad.numpy()
