"""Policy objectives as the papers write them, in torch float64 with autograd, one response at a time.

Nothing here knows of guards, factors or weights: every method is its own sentence, averages are averages, and
gradients come from ``torch.autograd``. Log-ratios must stay where exp is finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Response:
    """The unmasked tokens of one response, as vectors [n]."""

    new: Tensor
    old: Tensor
    advantage: Tensor
    rollout: Tensor | None = None
    ref: Tensor | None = None
    entropy: Tensor | None = None
    group: int = 0

    @property
    def ratio(self) -> Tensor:
        return torch.exp(self.new - self.old)


Term = Callable[[Response], Tensor]  # the objective J of each token, to be maximised (penalties: to be subtracted)


# --- policy terms ---------------------------------------------------------------------------------------------


def clip(low: float, high: float) -> Term:
    def j(r: Response) -> Tensor:
        return torch.minimum(r.ratio * r.advantage, r.ratio.clamp(low, high) * r.advantage)

    return j


def dual_clip(low: float, high: float, c: float) -> Term:
    inner = clip(low, high)

    def j(r: Response) -> Tensor:
        plain = inner(r)
        return torch.where(r.advantage < 0, torch.maximum(plain, c * r.advantage), plain)

    return j


def gspo(low: float, high: float) -> Term:
    def j(r: Response) -> Tensor:
        s = torch.exp((r.new - r.old).mean())
        return torch.minimum(s * r.advantage, s.clamp(low, high) * r.advantage)

    return j


def gspo_token(low: float, high: float) -> Term:
    def j(r: Response) -> Tensor:
        s = torch.exp((r.new - r.old).mean()).detach() * torch.exp(r.new - r.new.detach())
        return torch.minimum(s * r.advantage, s.clamp(low, high) * r.advantage)

    return j


def cispo(low: float, high: float) -> Term:
    return lambda r: r.ratio.clamp(low, high).detach() * r.advantage * r.new


def sapo(tau_positive: float, tau_negative: float) -> Term:
    def j(r: Response) -> Tensor:
        up = torch.sigmoid(tau_positive * (r.ratio - 1)) * 4 / tau_positive
        down = torch.sigmoid(tau_negative * (r.ratio - 1)) * 4 / tau_negative
        return torch.where(r.advantage > 0, up, down) * r.advantage

    return j


def reinforce(r: Response) -> Tensor:
    return r.advantage * r.new


def unclipped(r: Response) -> Tensor:
    return r.ratio * r.advantage


def masked(
    divergence: Callable[[Tensor], Tensor], radius: float, gate: str, of: str = "new/old", base: Term = unclipped
) -> Term:
    """w A where D <= radius or the gate is closed, else nothing; D of any two policies."""

    def j(r: Response) -> Tensor:
        top, bottom = (getattr(r, role) for role in of.split("/"))
        x = (top - bottom).detach()
        inside = divergence(torch.exp(x)) <= radius
        applies = {
            "always": torch.ones_like(inside),
            "outward": x * r.advantage > 0,
            "positive": r.advantage > 0,
            "negative": r.advantage < 0,
        }[gate]
        return torch.where(inside | ~applies, base(r), 0.0)

    return j


def sequence_mask(base: Term, low: float, high: float) -> Term:
    """The base weighed by v = prod old / rollout of the response; nothing unless low <= v <= high."""

    def j(r: Response) -> Tensor:
        assert r.rollout is not None
        v = torch.exp((r.old - r.rollout).sum()).detach()
        return base(r) * v if low <= float(v) <= high else 0.0 * r.new

    return j


def capped_correction(base: Term, high: float) -> Term:
    """Truncated importance sampling: the base weighed by min(old / rollout, high) per token, detached."""
    return lambda r: base(r) * torch.exp(r.old - r.rollout).clamp(max=high).detach()


# --- penalties, added to the loss -----------------------------------------------------------------------------


def f_penalty(f: Callable[[Tensor], Tensor], beta: float, of: str = "old") -> Term:
    return lambda r: beta * f(torch.exp(r.new - getattr(r, of)))


def kl_reference(beta: float, estimator: str, weighted: bool) -> Term:
    def penalty(r: Response) -> Tensor:
        log_gap = r.new - r.ref
        value = {
            "k1": log_gap,
            "k2": log_gap**2 / 2,
            "k3": torch.exp(-log_gap) - 1 + log_gap,
        }[estimator]
        return beta * value * (r.ratio if weighted else 1.0)

    return penalty


def entropy_bonus(coefficient: float) -> Term:
    return lambda r: -coefficient * r.entropy


# --- textbook generators in w, normalised to f''(1) = 1 -------------------------------------------------------


def power(a: float) -> Callable[[Tensor], Tensor]:
    if a == 0:
        return lambda w: w - 1 - torch.log(w)
    if a == 1:
        return lambda w: w * torch.log(w) - w + 1
    return lambda w: (w**a - 1 - a * (w - 1)) / (a * (a - 1))


def renyi(a: float) -> Callable[[Tensor], Tensor]:
    return lambda w: torch.log(w**a - a * (w - 1)) / (a * (a - 1))


GENERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "ratio_dev": lambda w: (w - 1).abs(),
    "tv": lambda w: (w - 1).abs() / 2,
    "log_ratio": lambda w: torch.log(w).abs(),
    "k1": lambda w: -torch.log(w),
    "k2": lambda w: torch.log(w) ** 2 / 2,
    "k3": power(0),
    "k3_flipped": lambda w: 1 / w - 1 + torch.log(w),
    "k3_reverse": power(1),
    "jeffreys": lambda w: (w - 1) * torch.log(w) / 2,
    "js": lambda w: 2 * (w * torch.log(2 * w / (1 + w)) + torch.log(2 / (1 + w))),
    "hellinger2": lambda w: 2 * (torch.sqrt(w) - 1) ** 2,
    "pearson": lambda w: (w - 1) ** 2 / 2,
    "neyman": lambda w: (w - 1) ** 2 / w / 2,
    "lecam": lambda w: (w - 1) ** 2 / (w + 1),
    "sym_chi2": lambda w: (w - 1) ** 2 * (w + 1) / w / 4,
    "power(-2.5)": power(-2.5),
    "power(0.3)": power(0.3),
    "power(3.0)": power(3),
    "renyi(2.0)": renyi(2),
    "renyi(-1.5)": renyi(-1.5),
}


# --- averages -------------------------------------------------------------------------------------------------


def average(kind: str, terms: list[Tensor], groups: list[int], constant: float = 1.0, every: bool = False) -> Tensor:
    """The mean over what: ``terms`` are the losses of each response's unmasked tokens, possibly none."""
    filled = [t for t in terms if t.numel()]
    zero = torch.zeros((), dtype=torch.float64)
    if not filled:
        return zero
    if kind == "token_mean":
        return torch.cat(filled).mean()
    rows = len(terms) if every else len(filled)
    if kind == "sequence_mean":
        return sum((t.mean() for t in filled), zero) / rows
    if kind == "sequence_sum":
        return sum((t.sum() / constant for t in filled), zero) / rows
    assert kind == "prompt_mean"
    prompts = sorted({g for g, t in zip(groups, terms, strict=True) if t.numel()})
    means = [torch.cat([t for g, t in zip(groups, terms, strict=True) if g == p]).mean() for p in prompts]
    return torch.stack(means).mean()


@dataclass
class Result:
    loss: Tensor
    grad: Tensor  # d loss / d logp_new, [B, T]
    grad_entropy: Tensor | None
    per_token: Tensor  # the loss terms, 0 where masked
    grad_policy: Tensor  # d (sum of J) / d logp_new
    grad_penalty: Tensor  # d (sum of penalties) / d logp_new


def evaluate(
    fields: dict[str, Tensor | None],
    policy: Term,
    penalties: tuple[Term, ...] = (),
    kind: str = "token_mean",
    constant: float = 1.0,
    every: bool = False,
) -> Result:
    """Loss and gradients over [B, T] fields (float64); ``row`` [B, T] regroups tokens into responses."""
    new = fields["logp_new"].detach().double().requires_grad_(True)
    entropy = None if fields.get("entropy") is None else fields["entropy"].detach().double().requires_grad_(True)
    mask, advantages = fields["mask"], fields["advantages"].double()
    advantages = advantages[:, None].expand(mask.shape) if advantages.ndim == 1 else advantages
    row = fields.get("row")
    row = torch.arange(mask.shape[0])[:, None].expand(mask.shape) if row is None or row.ndim == 1 else row
    where = [((row == r) & mask).nonzero(as_tuple=True) for r in row.unique()]
    group = fields.get("group")
    groups = [0 if group is None or not len(w[0]) else int(group[w[0][0]]) for w in where]

    def pick(name: str, at: tuple[Tensor, Tensor]) -> Tensor | None:
        value = fields.get(name)
        return None if value is None else value.double()[at]

    j_terms, p_terms = [], []
    for at in where:
        response = Response(new[at], pick("logp_old", at), advantages[at], pick("logp_rollout", at), pick("logp_ref", at),
                            None if entropy is None else entropy[at])  # fmt: skip
        empty = response.new.numel() == 0
        j_terms.append(response.new if empty else policy(response))
        p_terms.append(response.new * 0 if empty else sum((p(response) for p in penalties), 0.0 * response.new))
    losses = [p - j for p, j in zip(p_terms, j_terms, strict=True)]
    loss = average(kind, losses, groups, constant, every)

    def gradient(of: Tensor, by: Tensor) -> Tensor:
        if not of.requires_grad:
            return torch.zeros_like(by)
        (found,) = torch.autograd.grad(of, by, retain_graph=True, allow_unused=True)
        return torch.zeros_like(by) if found is None else found

    per_token = torch.zeros(mask.shape, dtype=torch.float64)
    for at, term in zip(where, losses, strict=True):
        per_token[at] = term.detach()
    return Result(
        loss.detach(), gradient(loss, new), None if entropy is None else gradient(loss, entropy), per_token,
        gradient(sum((t.sum() for t in j_terms), new.sum() * 0), new),
        gradient(sum((t.sum() for t in p_terms), new.sum() * 0), new),
    )  # fmt: skip
