"""Every published method over a whole step, written out by hand: float64, plain loops, gradients from autograd.

A method maps the responses of a step to the terms of their tokens: the objective J, the penalty, and whether a token
counts in the mean. Nothing here knows of guards, factors or regions; each method is the sentence of its paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oracles import measures
from oracles.batches import Fields
from oracles.objective import GENERATORS, Response, Result, Term, average, clip, dual_clip, f_penalty, unclipped


@dataclass
class Sample(Response):
    """One response with at least one unmasked token, as vectors [n]."""

    segment: Tensor | None = None
    chosen: Tensor | None = None  # where a method draws tokens at random: the ones that were drawn
    micro: int = 0
    distance: Tensor | None = None  # over the vocabulary


@dataclass
class Terms:
    """Of one response's tokens: J to maximise, the penalty to add to the loss, and which are counted in the mean."""

    j: Tensor
    penalty: Tensor
    counts: Tensor


Method = Callable[[list[Sample]], list[Terms]]


def each(term: Term, *penalties: Term) -> Method:
    """A method that looks at one response at a time."""

    def method(step: list[Sample]) -> list[Terms]:
        return [
            Terms(term(s), sum((p(s) for p in penalties), 0.0 * s.new), torch.ones_like(s.new, dtype=torch.bool))
            for s in step
        ]

    return method


# --- small words ----------------------------------------------------------------------------------------------


def gap(s: Response, ratio: str = "new/old") -> Tensor:
    """x = log of the ratio, detached."""
    top, bottom = (getattr(s, role) for role in ratio.split("/"))
    return (top - bottom).detach()


def over(x: Tensor, scope: str) -> Tensor:
    """log of: each token's ratio, their product over the response, their geometric mean."""
    return {"token": x, "sequence": x.sum().expand(x.shape), "geometric": x.mean().expand(x.shape)}[scope]


def outward(x: Tensor, advantage: Tensor) -> Tensor:
    return ((advantage > 0) & (x > 0)) | ((advantage < 0) & (x < 0))


def score(weight: Callable[[Response], Tensor]) -> Term:
    """J = stop_gradient(weight) A log pi_new."""
    return lambda s: weight(s).detach() * s.advantage * s.new


def bounds(name: str, radius: float) -> tuple[float, float]:
    low, high = measures.bounds(name, radius)
    return math.exp(low), math.exp(high)


# --- clips of a token, a turn, a response ---------------------------------------------------------------------


def two_sided(delta: float, low: float, high: float) -> Term:
    def j(s: Response) -> Tensor:
        return torch.minimum(s.ratio.clamp(max=delta) * s.advantage, s.ratio.clamp(low, high) * s.advantage)

    return j


def rollback(alpha: float, epsilon: float) -> Term:
    def j(s: Response) -> Tensor:
        w, a = s.ratio, s.advantage
        up, down = (w > 1 + epsilon) & (a > 0), (w < 1 - epsilon) & (a < 0)
        found = torch.where(up, (-alpha * w + (1 + alpha) * (1 + epsilon)) * a, w * a)
        return torch.where(down, (-alpha * w + (1 + alpha) * (1 - epsilon)) * a, found)

    return j


def sequence_clip(low: float, high: float) -> Term:
    """GSPO: the geometric mean of the ratios, each token with its own advantage (token form)."""

    def j(s: Response) -> Tensor:
        mean = (s.new - s.old).mean()
        ratio = torch.exp(mean.detach() + s.new - s.new.detach())
        return torch.minimum(ratio * s.advantage, ratio.clamp(low, high) * s.advantage)

    return j


def response_clip(low: float, high: float) -> Term:
    """GSPO: the gradient through the mean (sequence form); one advantage per response."""

    def j(s: Response) -> Tensor:
        ratio = torch.exp((s.new - s.old).mean())
        return torch.minimum(ratio * s.advantage, ratio.clamp(low, high) * s.advantage)

    return j


def turn_clip(epsilon: float) -> Term:
    """The geometric mean of the ratios of each turn, clipped, for every token of the turn."""

    def j(s: Sample) -> Tensor:
        found = 0.0 * s.new
        for turn in s.segment.unique():
            own = s.segment == turn
            ratio = torch.exp((s.new[own] - s.old[own]).mean())
            value = torch.minimum(ratio * s.advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * s.advantage)
            found = torch.where(own, value, found)
        return found

    return j


def gmpo(epsilon: float) -> Term:
    def j(s: Response) -> Tensor:
        x = s.new - s.old
        held = torch.where(s.advantage > 0, x.clamp(max=epsilon), x.clamp(min=-epsilon))
        return s.advantage * torch.exp(held.mean())

    return j


# --- weights of the score -------------------------------------------------------------------------------------


def capped(low: float, high: float) -> Term:
    return score(lambda s: s.ratio.clamp(low, high))


def topr(scope: str) -> Term:
    return score(lambda s: torch.where(s.advantage > 0, 1.0, torch.exp(over(gap(s), scope)).clamp(max=1.0)))


def vespo(k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float, ratio: str = "new/old") -> Term:
    def weight(s: Response) -> Tensor:
        log_w = over(gap(s, ratio), "sequence")
        w = torch.exp(log_w)
        up = torch.exp(lambda_pos + k_pos * log_w - lambda_pos * w)
        down = torch.exp(lambda_neg + k_neg * log_w - lambda_neg * w)
        return torch.where(s.advantage > 0, up, down)

    return score(weight)


def faded(
    measure: Callable[[Tensor], Tensor], radius: float, shape: str, power: float, only_outward: bool
) -> Term:  # fmt: skip
    """The divergence gate: w h(f(w) / radius)."""

    def weight(s: Response) -> Tensor:
        x = gap(s)
        y = measure(x) / radius
        h = torch.exp(-(y**power)) if shape == "exp" else 1 / (1 + y**power)
        return torch.exp(x) * torch.where(outward(x, s.advantage), h, 1.0 if only_outward else h)

    return score(weight)


def k3(x: Tensor) -> Tensor:
    return torch.expm1(x) - x


def rollout_is(low: float, high: float) -> Term:
    def weight(s: Response) -> Tensor:
        v = torch.exp(gap(s, "new/rollout"))
        return torch.where((v >= 1 - low) & (v <= 1 + high), v, 0.0)

    return score(weight)


def rec(clipped: str, weighted: str, low: float, high: float, ring_low: float, ring_high: float, heat: float) -> Term:
    """All four are offsets from 1; the ring lets a far ratio be pulled back."""

    def keep(s: Response) -> Tensor:
        w, a = s.ratio.detach(), s.advantage
        one = ((a > 0) & (w > 1 + high)) | ((a < 0) & (w < 1 - low))
        two = (w > 1 + high) | (w < 1 - low)
        back = ((a > 0) & (w <= 1 - ring_low)) | ((a < 0) & (w >= 1 + ring_high))
        return ~{"none": one & ~one, "one_side": one, "two_side": two, "ring": two & ~back}[clipped]

    def weight(s: Response) -> Tensor:
        scale = {"none": torch.ones_like(s.advantage), "is": s.ratio, "exp_advantage": torch.exp(s.advantage / heat)}
        return torch.where(keep(s), scale[weighted], 0.0)

    return score(weight)


def fipo(low: float, high: float, half_life: float, most: float) -> Term:
    inner = clip(low, high)

    def j(s: Response) -> Tensor:
        x = gap(s).tolist()
        influence = []
        for t in range(len(x)):
            future = sum(0.5 ** ((k - t) / half_life) * x[k] for k in range(t, len(x)))
            influence.append(min(max(math.exp(future), 1.0), most))
        return inner(s) * torch.tensor(influence, dtype=torch.float64)

    return j


# --- divergence masks -----------------------------------------------------------------------------------------


def split_divergence(kind: str, top: Tensor, bottom: Tensor) -> Tensor:
    """Between (p, 1 - p) and (q, 1 - q), p and q the token's probability under the bottom and the top policy."""
    p, q = torch.exp(bottom), torch.exp(top)
    if kind == "tv":
        return (q - p).abs()
    rest_p, rest_q = -torch.expm1(bottom), -torch.expm1(top)
    return p * (bottom - top) + rest_p * (torch.log(rest_p) - torch.log(rest_q))


def dppo(kind: str, delta: float, cap: float = math.inf, ratio: str = "new/old") -> Term:
    def j(s: Response) -> Tensor:
        top, bottom = (getattr(s, role) for role in ratio.split("/"))
        x = top - bottom
        cut = (split_divergence(kind, top.detach(), bottom) > delta) & outward(x.detach(), s.advantage)
        if cap == math.inf:
            return torch.where(cut, 0.0, torch.exp(x) * s.advantage)
        return torch.where(cut, 0.0, torch.exp(x.detach()).clamp(max=cap) * s.advantage * s.new)

    return j


def dppo_whole(delta: float, cap: float = math.inf) -> Term:
    """DPPO's mask where the divergence is of whole distributions."""

    def j(s: Sample) -> Tensor:
        x = s.new - s.old
        cut = (s.distance > delta) & outward(x.detach(), s.advantage)
        if cap == math.inf:
            return torch.where(cut, 0.0, torch.exp(x) * s.advantage)
        return torch.where(cut, 0.0, torch.exp(x.detach()).clamp(max=cap) * s.advantage * s.new)

    return j


def truly(delta: float, alpha: float) -> Term:
    """Truly-PPO's penalty: only beyond the region, and not where the step leads back."""

    def penalty(s: Sample) -> Tensor:
        back = gap(s) * s.advantage < 0
        return torch.where((s.distance > delta) & ~back, alpha * s.distance, 0.0)

    return penalty


def ipo(threshold: float) -> Term:
    def j(s: Response) -> Tensor:
        cut = (torch.exp(s.new.detach()) - torch.exp(s.rollout)).abs() > threshold
        return torch.where(cut, 0.0, torch.exp(s.new - s.rollout) * s.advantage)

    return j


def relaxed(low: float, high: float, p_low: float, p_high: float, cap: float, ratio: str) -> Term:
    """A clip, as a mask, that leaves unlikely tokens alone."""

    def weight(s: Response) -> Tensor:
        v, p = torch.exp(gap(s, ratio)), torch.exp(getattr(s, ratio.split("/")[1]))
        up = (s.advantage > 0) & (v > 1 + high) & (p >= p_high)
        down = (s.advantage < 0) & (v < 1 - low) & (p >= p_low)
        return torch.where(up | down, 0.0, v.clamp(max=cap))

    return score(weight)


# --- corrections of another method ----------------------------------------------------------------------------


def corrected(base: Method, weight: Callable[[Sample], Tensor]) -> Method:
    """The base's J times a detached weight; nothing where the weight is 0."""

    def method(step: list[Sample]) -> list[Terms]:
        found = []
        for s, terms in zip(step, base(step), strict=True):
            w = weight(s).detach().expand(s.new.shape)
            found.append(Terms(torch.where(w == 0, 0.0, terms.j * w), terms.penalty, terms.counts))
        return found

    return method


def icepop(base: Method, low: float, high: float, scope: str = "token") -> Method:
    def weight(s: Sample) -> Tensor:
        rho = torch.exp(over(gap(s, "old/rollout"), scope))
        return torch.where((rho >= low) & (rho <= high), rho, 0.0)

    return corrected(base, weight)


def tis(base: Method, high: float, low: float = 0.0, scope: str = "token") -> Method:
    return corrected(base, lambda s: torch.exp(over(gap(s, "old/rollout"), scope)).clamp(low, high))


def tis_normalised(base: Method, high: float, low: float = 0.0, scope: str = "token") -> Method:
    """The capped weights divided by their mean over the step: of its tokens, or of its responses if each has one."""

    def method(step: list[Sample]) -> list[Terms]:
        weights = []
        for s in step:
            every = torch.exp(over(gap(s, "old/rollout"), scope)).tolist()
            weights += [min(max(w, low), high) for w in (every if scope == "token" else every[:1])]
        mean = math.fsum(weights) / max(len(weights), 1)
        return corrected(base, lambda s: torch.exp(over(gap(s, "old/rollout"), scope)).clamp(low, high) / mean)(step)

    return method


def entropy_mask(base: Method, quantile: float) -> Method:
    """Only tokens whose entropy reaches the quantile of the step's, by linear interpolation of the sorted values."""

    def method(step: list[Sample]) -> list[Terms]:
        every = sorted(value for s in step for value in s.entropy.detach().tolist())
        if not every:
            return base(step)
        place = quantile * (len(every) - 1)
        low, high = every[math.floor(place)], every[math.ceil(place)]
        least = low + (high - low) * (place - math.floor(place))
        return corrected(base, lambda s: (s.entropy.detach() >= least).double())(step)

    return method


def sequence_mask(base: Method, high: float, low: float) -> Method:
    return icepop(base, low, high, "sequence")


def geometric_mask(base: Method, low: float, high: float) -> Method:
    def weight(s: Sample) -> Tensor:
        rho = torch.exp(over(gap(s, "old/rollout"), "geometric"))
        return ((rho >= low) & (rho <= high)).double()

    return corrected(base, weight)


def opsm(base: Method, delta: float, ratio: str = "new/rollout") -> Method:
    def weight(s: Sample) -> Tensor:
        far = -gap(s, ratio).mean() > delta
        return 1.0 - ((s.advantage < 0) & far).double()

    return corrected(base, weight)


def vaco(base: Method, radius: float, cap: float) -> Method:
    def weight(s: Sample) -> Tensor:
        x = gap(s, "old/rollout")
        far = torch.expm1(x).abs().mean() > radius
        return torch.where(far & outward(x, s.advantage), 0.0, torch.exp(x).clamp(max=cap))

    return corrected(base, weight)


def behaviour(base: Method, cap: float) -> Method:
    """Decoupled PPO's weight of the behaviour policy."""
    return tis(base, cap)


def rejected(base: Method, inside: Callable[[Sample], Tensor]) -> Method:
    """Tokens that are not inside leave the loss and the count alike."""

    def method(step: list[Sample]) -> list[Terms]:
        found = []
        for s, terms in zip(step, base(step), strict=True):
            stay = inside(s).expand(s.new.shape) & terms.counts
            found.append(Terms(torch.where(stay, terms.j, 0.0), torch.where(stay, terms.penalty, 0.0), stay))
        return found

    return method


def rs_k1(base: Method, low: float, high: float, scope: str = "token") -> Method:
    """Bounds on rollout / old: of a token, of the response's product or geometric mean."""

    def inside(s: Sample) -> Tensor:
        name = {"token": "token", "sequence_sum": "sequence", "sequence_mean": "geometric"}[scope]
        inverse = torch.exp(-over(gap(s, "old/rollout"), name))
        return (inverse >= low) & (inverse <= high)

    return rejected(base, inside)


def rs(base: Method, kind: str, radius: float, scope: str = "token") -> Method:
    """k2 or k3 of old / rollout within the radius: of each token, or its mean, sum or largest over the response."""

    def inside(s: Sample) -> Tensor:
        x = gap(s, "old/rollout")
        d = x**2 / 2 if kind == "k2" else k3(x)
        found = {"token": d, "sequence_mean": d.mean(), "sequence_sum": d.sum(), "sequence_max": d.max()}[scope]
        return found <= radius

    return rejected(base, inside)


# --- methods that look at the whole step ----------------------------------------------------------------------


def m2po(threshold: float, ratio: str = "new/old", both_tails: bool = False, of_the_rest: bool = False) -> Method:
    """w A of the tokens that stay; those far apart in ``ratio`` go first, of the outward ones or of all."""

    def method(step: list[Sample]) -> list[Terms]:
        every, free = 0, []  # free: (second moment, response, token) of the tokens that may be dropped
        for i, s in enumerate(step):
            x = gap(s, ratio)
            for t in range(len(x)):
                every += 1
                if both_tails or bool(outward(x, s.advantage)[t]):
                    free.append((float(x[t]) ** 2, i, t))
        free.sort()
        dropped = set()
        while free and math.fsum(m for m, _, _ in free) / (len(free) if of_the_rest else every) > threshold:
            _, i, t = free.pop()
            dropped.add((i, t))
        found = []
        for i, s in enumerate(step):
            keep = torch.tensor([(i, t) not in dropped for t in range(len(s.new))])
            found.append(Terms(torch.where(keep, s.ratio * s.advantage, 0.0), 0.0 * s.new, torch.ones_like(keep)))
        return found

    return method


def covariances(step: list[Sample]) -> list[Tensor]:
    """(A - mean A)(log pi_new - its mean), the means over all tokens of the step."""
    if not step:
        return []
    mean_a = torch.cat([s.advantage for s in step]).mean()
    mean_l = torch.cat([s.new.detach() for s in step]).mean()
    return [(s.advantage - mean_a) * (s.new.detach() - mean_l) for s in step]


def kl_cov(share: float, coefficient: float) -> Method:
    def method(step: list[Sample]) -> list[Terms]:
        cov = covariances(step)
        order = sorted(((float(c), i, t) for i, row in enumerate(cov) for t, c in enumerate(row)), reverse=True)
        count = max(int(share * len(order)), 1)
        top = {(i, t) for _, i, t in order[:count]}
        if len(order) > count and order[count - 1][0] == order[count][0]:  # a tie is drawn: take the draw, check it
            drawn = {(i, t) for i, s in enumerate(step) for t in range(len(s.new)) if bool(s.chosen[t])}
            assert len(drawn) <= count
            assert all(float(cov[i][t]) >= order[count][0] for i, t in drawn)
            top = drawn
        found = []
        for i, s in enumerate(step):
            hit = torch.tensor([(i, t) in top for t in range(len(s.new))])
            penalty = torch.where(hit, coefficient * (s.new - s.old).abs(), 0.0)
            found.append(Terms(s.ratio * s.advantage, penalty, torch.ones_like(hit)))
        return found

    return method


def clip_cov(share: float, low: float, high: float, epsilon: float) -> Method:
    """The tokens that were drawn are given; they must be of the window, not clipped, and as many as can be."""
    inner = clip(1 - epsilon, 1 + epsilon)

    def method(step: list[Sample]) -> list[Terms]:
        every, eligible, drawn, found = 0, 0, 0, []
        for s, cov in zip(step, covariances(step), strict=True):
            w = s.ratio.detach()
            clipped = ((s.advantage > 0) & (w > 1 + epsilon)) | ((s.advantage < 0) & (w < 1 - epsilon))
            open_ = (cov > low) & (cov < high) & ~clipped
            hit = s.chosen & ~clipped
            assert not bool((hit & ~open_).any()), "a token outside the window was drawn"
            every, eligible, drawn = every + len(w), eligible + int(open_.sum()), drawn + int(hit.sum())
            found.append(Terms(torch.where(hit, 0.0, inner(s)), 0.0 * s.new, torch.ones_like(hit)))
        assert drawn == min(max(int(share * every), 1), eligible), f"{drawn} tokens drawn of {eligible}, {every} in all"
        return found

    return method


def real(tau: float) -> Method:
    """The gradient of log(1 + sum over A < 0 of e^S) + log(1 + sum over A > 0 of e^-S), S = mean x / tau, by group.

    A group whose answers are all of one kind is left out of the loss; its size and the size of A do not matter.
    """

    def method(step: list[Sample]) -> list[Terms]:
        leaves = [s.new.detach().clone().requires_grad_(True) for s in step]
        loss = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for group in {s.group for s in step}:
            sums = {1: [], -1: []}
            for s, leaf in zip(step, leaves, strict=True):
                sign = int(torch.sign(s.advantage[0]))
                if s.group == group and sign:
                    sums[sign].append(torch.exp(-sign * (leaf - s.old).mean() / tau))
            if sums[1] and sums[-1]:
                loss = loss + sum(torch.log(1 + sum(side)) for side in sums.values())
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True) if step else []
        found = []
        for s, slope in zip(step, slopes, strict=True):
            g = torch.zeros_like(s.new) if slope is None else -slope * len(s.new)  # the mean over tokens divides by it
            found.append(Terms(g * s.new, 0.0 * s.new, torch.ones_like(s.new, dtype=torch.bool)))
        return found

    return method


# --- means and gradients --------------------------------------------------------------------------------------


def _mean(kind: str, terms: list[Tensor], step: list[Sample], divisor: float, micros: int) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    filled = [(t, s) for t, s in zip(terms, step, strict=True) if t.numel()]
    if not filled:
        return zero
    if kind == "token_sum":
        return sum((t.sum() for t, _ in filled), zero)
    if kind == "prompt_sum":
        return sum((t.mean() for t, _ in filled), zero) / len({s.group for _, s in filled})
    if kind == "local_token_mean":
        parts = [[t for t, s in filled if s.micro == m] for m in range(micros)]
        return sum((torch.cat(p).mean() for p in parts if p), zero) / micros  # an empty one counts, with 0
    return average(kind, terms, [s.group for s in step], divisor)


def evaluate(
    fields: Fields, method: Method, kind: str, divisor: float = 1.0, chosen: Tensor | None = None, micros: int = 1
) -> Result:
    """Loss and gradients over [B, T] fields; ``micros``: the rows are cut into that many equal micro-batches."""
    new = fields["logp_new"].detach().double().requires_grad_(True)
    mask, advantages = fields["mask"], fields["advantages"].double()
    advantages = advantages[:, None].expand(mask.shape) if advantages.ndim == 1 else advantages
    rows = mask.shape[0]
    step, where = [], []
    for i in range(rows):
        if not bool(mask[i].any()):
            continue
        at = (torch.full((int(mask[i].sum()),), i), mask[i].nonzero()[:, 0])
        more = {
            name: None if fields.get(key) is None else fields[key].detach()[at].double()
            for name, key in (
                ("rollout", "logp_rollout"),
                ("ref", "logp_ref"),
                ("entropy", "entropy"),
                ("distance", "distance"),
            )
        }
        step.append(
            Sample(new[at], fields["logp_old"].double()[at], advantages[at], **more,
                   group=0 if fields.get("group") is None else int(fields["group"][i]),
                   segment=None if fields.get("segment") is None else fields["segment"][at],
                   chosen=None if chosen is None else chosen[at], micro=i * micros // rows)
        )  # fmt: skip
        where.append(at)
    terms = method(step)
    losses = [(t.penalty - t.j)[t.counts] for t in terms]
    loss = _mean(kind, losses, step, divisor, micros)

    def gradient(of: Tensor) -> Tensor:
        if not of.requires_grad:
            return torch.zeros_like(new)
        (found,) = torch.autograd.grad(of, new, retain_graph=True, allow_unused=True)
        return torch.zeros_like(new) if found is None else found

    per_token = torch.zeros(mask.shape, dtype=torch.float64)
    for at, t in zip(where, terms, strict=True):
        per_token[at] = torch.where(t.counts, t.penalty - t.j, 0.0).detach()
    nothing = torch.zeros((), dtype=torch.float64)
    return Result(
        loss.detach(), gradient(loss), None, per_token,
        gradient(sum((t.j.sum() for t in terms), nothing)), gradient(sum((t.penalty.sum() for t in terms), nothing)),
    )  # fmt: skip


# --- the methods, with the text of the spec that must agree ---------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A spec's text and the same objective written out. ``cuts``: hard cuts, of which batches must show both sides."""

    preset: str
    text: str
    method: Method
    kind: str = "token_mean"
    divisor: float = 1.0
    per_token: bool = True  # defined for advantages that differ within a response
    cuts: bool = True
    draws: bool = False  # draws tokens at random, or where covariances tie


GRPO, DAPO = clip(0.8, 1.2), clip(0.8, 1.28)
G = GENERATORS


def _clips() -> list[Case]:
    mean = "sequence_mean"
    wide, narrow = bounds("k3", 0.3), bounds("k3", 0.02)
    return [
        Case("ppo", "ppo()", each(GRPO)),
        Case("ppo", "ppo(epsilon=0.05)", each(clip(0.95, 1.05))),
        Case("grpo", "grpo()", each(GRPO), mean),
        Case("grpo", "grpo(epsilon=0.5)", each(clip(0.5, 1.5)), mean),
        Case("grpo", "grpo(aggregate=prompt_mean())", each(GRPO), "prompt_mean"),
        Case("grpo", "grpo(aggregate=prompt_sum())", each(GRPO), "prompt_sum"),
        Case("grpo", "grpo(aggregate=token_sum())", each(GRPO), "token_sum"),
        Case("dapo", "dapo()", each(DAPO)),
        Case("dapo", "dapo(epsilon_low=0.1, epsilon_high=0.6)", each(clip(0.9, 1.6))),
        Case("dr_grpo", "dr_grpo(divisor=9)", each(GRPO), "sequence_sum", 9.0),
        Case("dr_grpo", "dr_grpo(epsilon=0.1, divisor=3)", each(clip(0.9, 1.1)), "sequence_sum", 3.0),
        Case("bnpo", "bnpo()", each(GRPO), "local_token_mean"),
        Case("bnpo", "bnpo(epsilon=0.4)", each(clip(0.6, 1.4)), "local_token_mean"),
        Case("dual_clip", "dual_clip()", each(dual_clip(0.8, 1.2, 3.0)), mean),
        Case("dual_clip", "dual_clip(c=1.3, epsilon=0.1)", each(dual_clip(0.9, 1.1, 1.3)), mean),
        Case("dual_clip", "dual_clip(c=1.4, base=dapo())", each(dual_clip(0.8, 1.28, 1.4))),
        Case("two_sided", "two_sided()", each(two_sided(4.0, 0.8, 1.2)), mean),
        Case("two_sided", "two_sided(delta=1.3, epsilon=0.1)", each(two_sided(1.3, 0.9, 1.1)), mean),
        Case("two_sided", "two_sided(delta=1.5, base=dapo())", each(two_sided(1.5, 0.8, 1.28))),
        Case("atr_grpo", "atr_grpo()", each(clip(*narrow)), mean),
        Case("atr_grpo", "atr_grpo(delta=0.3)", each(clip(*wide)), mean),
        Case("power_clip", "power_clip()", each(clip(*narrow)), mean),
        Case("power_clip", "power_clip(a=-2.5, radius=0.1)", each(clip(*bounds("power(-2.5)", 0.1))), mean),
        Case("power_clip", "power_clip(a=3.0, radius=0.05)", each(clip(*bounds("power(3.0)", 0.05))), mean),
        Case("trust_region", "trust_region('k3', 0.02)", each(clip(*narrow)), mean),
        Case("trust_region", "trust_region('js', 0.1, base=dapo())", each(clip(*bounds("js", 0.1)))),
        Case("rollback", "rollback()", each(rollback(0.3, 0.2)), cuts=False),
        Case("rollback", "rollback(alpha=0.02, epsilon=0.05)", each(rollback(0.02, 0.05)), cuts=False),
        Case("decoupled_ppo", "decoupled_ppo()", behaviour(each(GRPO), 5.0)),
        Case("decoupled_ppo", "decoupled_ppo(epsilon=0.4, cap=1.1)", behaviour(each(clip(0.6, 1.4)), 1.1)),
        Case("fipo", "fipo()", each(fipo(0.8, 1.28, 32.0, 1.2))),
        Case("fipo", "fipo(epsilon_low=0.3, epsilon_high=0.1, half_life=2.0, high=3.0)", each(fipo(0.7, 1.1, 2.0, 3.0))),
    ]  # fmt: skip


def _sequences() -> list[Case]:
    mean, total = "sequence_mean", "sequence_sum"
    return [
        Case("gspo", "gspo()", each(response_clip(1 - 3e-4, 1 + 4e-4)), mean, per_token=False),
        Case("gspo", "gspo(epsilon_low=0.1, epsilon_high=0.15)", each(response_clip(0.9, 1.15)), mean, per_token=False),
        Case("gspo_token", "gspo_token()", each(sequence_clip(1 - 3e-4, 1 + 4e-4)), mean),
        Case("gspo_token", "gspo_token(epsilon_low=0.1, epsilon_high=0.05)", each(sequence_clip(0.9, 1.05)), mean),
        Case("gmpo", "gmpo()", each(gmpo(0.4)), mean, per_token=False),
        Case("gmpo", "gmpo(epsilon=0.1)", each(gmpo(0.1)), mean, per_token=False),
        Case("luspo", "luspo()", each(response_clip(1 - 2e-3, 1 + 2.5e-3)), total, per_token=False),
        Case("luspo", "luspo(epsilon_low=0.2, epsilon_high=0.1)", each(response_clip(0.8, 1.1)), total, per_token=False),
        Case("segment", "segment()", each(turn_clip(0.2)), mean, per_token=False),
        Case("segment", "segment(epsilon=0.05)", each(turn_clip(0.05)), mean, per_token=False),
        Case("topr", "topr()", each(topr("sequence")), total, cuts=False),
        Case("topr", "topr(scope='token')", each(topr("token")), total, cuts=False),
        Case("vespo", "vespo()", each(vespo(2.0, 3.0, 3.0, 2.0)), cuts=False),
        Case("vespo", "vespo(k_pos=1.0, lambda_pos=0.5, k_neg=0.7, lambda_neg=1.5, ratio='new/rollout')",
             each(vespo(1.0, 0.5, 0.7, 1.5, "new/rollout")), cuts=False),
        Case("real", "real()", real(0.5), "prompt_sum", per_token=False, cuts=False),
        Case("real", "real(tau=2.0)", real(2.0), "prompt_sum", per_token=False, cuts=False),
    ]  # fmt: skip


def _weights() -> list[Case]:
    plain = lambda s: s.advantage * s.new  # noqa: E731
    found = [
        Case("cispo", "cispo()", each(capped(0.0, 5.0)), cuts=False),
        Case("cispo", "cispo(epsilon_high=0.2, epsilon_low=0.1)", each(capped(0.9, 1.2)), cuts=False),
        Case("cispo", "cispo(epsilon_high=0.2, epsilon_low=10.0)", each(capped(0.0, 1.2)), cuts=False),
        Case("cispo_absolute", "cispo_absolute()", each(capped(0.0, 5.0)), cuts=False),
        Case("cispo_absolute", "cispo_absolute(high=1.3, low=0.7)", each(capped(0.7, 1.3)), cuts=False),
        Case("tis_loss", "tis_loss()", each(capped(0.0, 1.0)), cuts=False),
        Case("tis_loss", "tis_loss(high=1.2, low=0.5)", each(capped(0.5, 1.2)), cuts=False),
        Case("sapo", "sapo()", each(_sapo(1.0, 1.05)), "sequence_mean", cuts=False),
        Case("sapo", "sapo(tau_pos=4.0, tau_neg=0.5)", each(_sapo(4.0, 0.5)), "sequence_mean", cuts=False),
        Case("gpg", "gpg()", each(plain), cuts=False),
        Case("reinforce", "reinforce()", each(plain), cuts=False),
        Case("rollout_is", "rollout_is()", each(rollout_is(0.2, 0.2))),
        Case("rollout_is", "rollout_is(epsilon_low=0.6, epsilon_high=1.0)", each(rollout_is(0.6, 1.0))),
        Case("divergence_gate", "divergence_gate()", each(faded(k3, 0.02, "exp", 1.0, True)), "sequence_mean", cuts=False),
        Case("divergence_gate", "divergence_gate(measure='js', radius=0.1, shape='rational', power=2.0, outward=False)",
             each(faded(lambda x: G["js"](torch.exp(x)), 0.1, "rational", 2.0, False)), "sequence_mean", cuts=False),
        Case("divergence_gate", "divergence_gate(radius=0.3, shape='rational', outward=True)",
             each(faded(k3, 0.3, "rational", 1.0, True)), "sequence_mean", cuts=False),
        Case("divergence_gate", "divergence_gate(measure='k2', radius=0.1, power=0.5, outward=False)",
             each(faded(lambda x: x**2 / 2, 0.1, "exp", 0.5, False)), "sequence_mean", cuts=False),
    ]  # fmt: skip
    for clipped in ("none", "one_side", "two_side", "ring"):
        for weighted in ("none", "is", "exp_advantage"):
            text = f"rec(clip='{clipped}', weight='{weighted}')"
            term = rec(clipped, weighted, 0.2, 0.2, 0.6, 2.0, 1.0)
            found.append(Case("rec", text, each(term), cuts=clipped != "none"))
    more = "epsilon_low=0.1, epsilon_high=0.4, ring_low=0.3, ring_high=0.5, temperature=2.5"
    return [
        *found,
        Case("rec", "rec()", each(rec("one_side", "is", 0.2, 0.2, 0.6, 2.0, 1.0))),
        Case("rec", f"rec(clip='ring', weight='exp_advantage', {more})",
             each(rec("ring", "exp_advantage", 0.1, 0.4, 0.3, 0.5, 2.5))),
    ]  # fmt: skip


def _sapo(tau_pos: float, tau_neg: float) -> Term:
    """(4 / tau) sigmoid(tau (w - 1)) A; 1 / (1 + e^-z) keeps its derivative's digits where the sigmoid saturates."""

    def j(s: Response) -> Tensor:
        tau = torch.where(s.advantage > 0, tau_pos * torch.ones_like(s.advantage), tau_neg)
        z = (tau * (s.ratio - 1)).clamp(max=700.0)
        return 4 / tau / (1 + torch.exp(-z)) * s.advantage

    return j


def _divergences() -> list[Case]:
    rollout = "ratio='new/rollout'"
    far = lambda beta: lambda s: beta * (s.new - s.rollout) ** 2  # noqa: E731
    return [
        Case("dppo_tv", "dppo_tv()", each(dppo("tv", 0.15))),
        Case("dppo_tv", "dppo_tv(delta=0.02, cap=1.3)", each(dppo("tv", 0.02, 1.3))),
        Case("dppo_tv", f"dppo_tv(delta=0.05, cap=2.0, {rollout})", each(dppo("tv", 0.05, 2.0, "new/rollout"))),
        Case("dppo_tv", f"dppo_tv(delta=0.05, {rollout})", each(dppo("tv", 0.05, math.inf, "new/rollout"))),
        Case("dppo_kl", "dppo_kl()", each(dppo("kl", 0.05))),
        Case("dppo_kl", "dppo_kl(delta=0.01, cap=1.3)", each(dppo("kl", 0.01, 1.3))),
        Case("dppo_kl", f"dppo_kl(delta=0.02, {rollout})", each(dppo("kl", 0.02, math.inf, "new/rollout"))),
        Case("dppo_topk_tv", "dppo_topk_tv(delta=0.02)", each(dppo_whole(0.02))),
        Case("dppo_topk_tv", "dppo_topk_tv(k=5, cap=1.2)", each(dppo_whole(0.15, 1.2))),
        Case("dppo_topk_kl", "dppo_topk_kl()", each(dppo_whole(0.05))),
        Case("dppo_topk_kl", "dppo_topk_kl(delta=0.01, k=2, cap=1.3)", each(dppo_whole(0.01, 1.3))),
        Case("truly_ppo", "truly_ppo()", each(unclipped, truly(0.03, 5.0)), "sequence_mean", cuts=False),
        Case("truly_ppo", "truly_ppo(delta=0.01, alpha=2.0)", each(unclipped, truly(0.01, 2.0)), "sequence_mean", cuts=False),
        Case("ipo", "ipo()", each(ipo(0.1), far(1e-3))),
        Case("ipo", "ipo(threshold=0.02, kl_tau=0.3)", each(ipo(0.02), far(0.3))),
        Case("ppo_lowprob_relaxed", "ppo_lowprob_relaxed()", each(relaxed(0.2, 0.28, 0.2, 0.2, 3.0, "new/rollout"))),
        Case("ppo_lowprob_relaxed", "ppo_lowprob_relaxed(epsilon_low=0.1, epsilon_high=0.05, probability_low=0.5, "
             "probability_high=0.1, cap=1.2, ratio='new/old')", each(relaxed(0.1, 0.05, 0.5, 0.1, 1.2, "new/old"))),
        Case("m2po", "m2po()", m2po(0.04)),
        Case("m2po", "m2po(threshold=0.3)", m2po(0.3)),
        Case("m2po", f"m2po(threshold=0.02, {rollout})", m2po(0.02, "new/rollout")),
        Case("m2po", "m2po(threshold=0.01, ratio='old/rollout', gate='always', over='kept')",
             m2po(0.01, "old/rollout", True, True)),
        Case("kl_cov", "kl_cov()", kl_cov(2e-4, 1.0), cuts=False, draws=True),
        Case("kl_cov", "kl_cov(share=0.2, coefficient=0.3)", kl_cov(0.2, 0.3), cuts=False, draws=True),
        Case("clip_cov", "clip_cov()", clip_cov(2e-4, 1.0, 5.0, 0.2), draws=True),
        Case("clip_cov", "clip_cov(share=0.3, low=0.01, high=2.0, epsilon=0.5)", clip_cov(0.3, 0.01, 2.0, 0.5), draws=True),
        Case("clip_cov", "clip_cov(share=0.8, low=-0.5, high=0.5, epsilon=0.1)", clip_cov(0.8, -0.5, 0.5, 0.1), draws=True),
    ]  # fmt: skip


def _penalised() -> list[Case]:
    mean = "sequence_mean"
    plain = lambda s: s.advantage * s.new  # noqa: E731
    apart = lambda beta: lambda s: beta / 2 * (s.new - s.old) ** 2  # noqa: E731
    return [
        Case("ppo_kl_penalty", "ppo_kl_penalty()", each(unclipped, f_penalty(G["k3"], 1.0)), mean, cuts=False),
        Case("ppo_kl_penalty", "ppo_kl_penalty(beta=0.2, measure='jeffreys')",
             each(unclipped, f_penalty(G["jeffreys"], 0.2)), mean, cuts=False),
        Case("ppo_kl_penalty", "ppo_kl_penalty(beta=0.5, target=0.01, measure='k2')",
             each(unclipped, f_penalty(G["k2"], 0.5)), mean, cuts=False),
        Case("ppo_kl_adaptive", "ppo_kl_adaptive()", each(unclipped, f_penalty(G["k3"], 1.0)), mean, cuts=False),
        Case("ppo_kl_adaptive", "ppo_kl_adaptive(target=0.1, beta=0.3)",
             each(unclipped, f_penalty(G["k3"], 0.3)), mean, cuts=False),
        Case("dro", "dro()", each(plain, apart(0.05)), cuts=False),
        Case("dro", "dro(beta=2.0)", each(plain, apart(2.0)), cuts=False),
    ]  # fmt: skip


def _corrections() -> list[Case]:
    """Corrections of a clip, of a score and of a soft gate."""
    dapo, grpo, plain = each(DAPO), each(GRPO), each(lambda s: s.advantage * s.new)
    found = [
        Case("icepop", "dapo() + icepop()", icepop(dapo, 0.5, 5.0)),
        Case("icepop", "grpo() + icepop(low=0.9, high=1.2)", icepop(grpo, 0.9, 1.2), "sequence_mean"),
        Case("icepop", "reinforce() + icepop(low=0.9, high=1.2)", icepop(plain, 0.9, 1.2)),
        Case("tis", "dapo() + tis()", tis(dapo, 2.0)),
        Case("tis", "reinforce() + tis(high=1.1, low=0.9)", tis(plain, 1.1, 0.9), cuts=False),
        Case("tis", "dapo() + tis(high=1.2, scope='sequence')", tis(dapo, 1.2, 0.0, "sequence")),
        Case("tis", "dapo() + tis(high=1.05, low=0.9, scope='geometric')", tis(dapo, 1.05, 0.9, "geometric")),
        Case("tis", "dapo() + tis(high=1.1, normalize=True)", tis_normalised(dapo, 1.1)),
        Case("tis", "grpo() + tis(high=1.3, scope='sequence', normalize=True)",
             tis_normalised(grpo, 1.3, 0.0, "sequence"), "sequence_mean"),
        Case("mis", "dapo() + mis()", icepop(dapo, 0.5, 5.0)),
        Case("mis", "grpo() + mis(low=0.8, high=1.3, scope='sequence')", icepop(grpo, 0.8, 1.3, "sequence"), "sequence_mean"),
        Case("mis", "dapo() + mis(low=0.95, high=1.05, scope='geometric')", icepop(dapo, 0.95, 1.05, "geometric")),
        Case("sequence_mask", "grpo() + sequence_mask()", sequence_mask(grpo, 3.0, 0.0), "sequence_mean"),
        Case("sequence_mask", "reinforce() + sequence_mask(high=1.4, low=0.7)", sequence_mask(plain, 1.4, 0.7)),
        Case("entropy_mask", "dapo() + entropy_mask()", entropy_mask(dapo, 0.8)),
        Case("entropy_mask", "grpo() + entropy_mask(quantile=0.35)", entropy_mask(grpo, 0.35), "sequence_mean"),
        Case("geometric_mask", "dapo() + geometric_mask()", geometric_mask(dapo, 0.999, 1.001)),
        Case("geometric_mask", "grpo() + geometric_mask(low=0.95, high=1.05)", geometric_mask(grpo, 0.95, 1.05), "sequence_mean"),
        Case("opsm", "grpo() + opsm()", opsm(grpo, 0.5), "sequence_mean"),
        Case("opsm", "dapo() + opsm(delta=0.05, ratio='new/old')", opsm(dapo, 0.05, "new/old")),
        Case("opsm", "reinforce() + opsm(delta=0.05)", opsm(plain, 0.05)),
        Case("vaco", "dapo() + vaco()", vaco(dapo, 0.2, 2.0)),
        Case("vaco", "reinforce() + vaco(radius=0.15, cap=1.1)", vaco(plain, 0.15, 1.1)),
        Case("rs_k1", "dapo() + rs_k1()", rs_k1(dapo, 0.5, 2.0)),
    ]  # fmt: skip
    for scope, low, high in (("token", 0.8, 1.1), ("sequence_sum", 0.7, 1.2), ("sequence_mean", 0.95, 1.1)):
        text = f"rs_k1(low={low}, high={high}, scope='{scope}')"
        found.append(Case("rs_k1", f"dapo() + {text}", rs_k1(dapo, low, high, scope)))
        found.append(Case("rs_k1", f"grpo() + {text}", rs_k1(grpo, low, high, scope), "sequence_mean"))
    for kind in ("k2", "k3"):
        found.append(Case(f"rs_{kind}", f"dapo() + rs_{kind}()", rs(dapo, kind, 0.1)))
        radii = {"token": 0.01, "sequence_mean": 0.02, "sequence_sum": 0.06, "sequence_max": 0.06}
        for scope, radius in radii.items():
            text = f"rs_{kind}(radius={radius}, scope='{scope}')"
            found.append(Case(f"rs_{kind}", f"grpo() + {text}", rs(grpo, kind, radius, scope), "sequence_mean"))
            found.append(Case(f"rs_{kind}", f"reinforce() + {text}", rs(plain, kind, radius, scope)))
    mixed = icepop(rs(dapo, "k3", 0.03), 0.8, 1.5)
    return [*found, Case("rs_k3", "dapo() + rs_k3(radius=0.03) + icepop(low=0.8, high=1.5)", mixed)]


CASES = [*_clips(), *_sequences(), *_weights(), *_divergences(), *_penalised(), *_corrections()]
