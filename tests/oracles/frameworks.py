"""What training frameworks compute from their flags, written out by hand in float64; the gradient is autograd's.

``loss(framework, flags, fields)`` reads the flags over the framework's own defaults (a default that adds something acts
unless a flag turns it off) and adds up the micro-batches of one step. ``without`` names differences that were announced:
each formula has them as branches, so that they can be taken away one by one. What is left must be the spec's loss.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oracles.batches import Fields

INF = math.inf
Flags = Mapping[str, Any]


@dataclass(frozen=True)
class Wanted:
    """The spec's own choices, for where a framework's are taken away: its mean, and the ratio's denominator."""

    kind: str = "token_mean"
    divisor: float | None = None
    rows: str = "nonempty"
    anchor: str | None = None


class Part:
    """One micro-batch of a step, masked positions harmless, with the counts of the whole step."""

    def __init__(self, fields: Fields, where: slice, without: frozenset[str], wanted: Wanted, parts: int) -> None:
        whole = fields["mask"]
        self.m = whole[where]
        self.without, self.wanted, self.parts = without, wanted, parts

        def take(name: str) -> Tensor:
            return torch.where(self.m, fields[name][where], 0.0)

        self.lp, self.lo, self.lr, self.lref = (take(f"logp_{role}") for role in ("new", "old", "rollout", "ref"))
        self.sampler = self.lr
        if self.seen("anchor") is False and wanted.anchor is not None:
            self.lo = self.lr = self.lr if wanted.anchor == "rollout" else self.lo
        spread = fields["advantages"]
        self.A = (spread if spread.ndim == 2 else spread[:, None].expand(whole.shape))[where]
        self.A = torch.where(torch.isfinite(self.A), self.A, 0.0)
        self.entropy = take("entropy")
        self.score, self.group, self.turn = fields["reward"][where], fields["group"], fields["segment"][where]
        self.where, self.whole = where, whole
        self.n = self.m.sum(dim=1, keepdim=True)
        self.tokens, self.rows = int(whole.sum()), len(whole)
        self.filled = int(whole.any(dim=1).sum())

    def seen(self, key: str) -> bool:
        """Whether this difference is still there."""
        return key not in self.without

    def per_row(self, x: Tensor, tiny: float = 0.0) -> Tensor:
        """Means over responses, [B, 1]."""
        return (x * self.m).sum(dim=1, keepdim=True) / (self.n + self.tiny(tiny)).clamp(min=tiny if tiny else 1.0)

    def tiny(self, size: float) -> float:
        return size if self.seen("count_1e-8") else 0.0

    def narrow(self, x: Tensor) -> Tensor:
        return x.float().double() if self.seen("float32") else x

    def clamped(self, x: Tensor, key: str, low: float, high: float) -> Tensor:
        return x.clamp(low, high) if self.seen(key) else x

    def response(self, x: Tensor, tiny: float = 0.0) -> Tensor:
        """The mean log-ratio of a response, with the gradient through the mean, or else at each token."""
        mean = self.per_row(x, tiny)
        if self.seen("gradient_per_response"):
            return mean.expand(self.m.shape)
        return self.lp - self.lp.detach() + mean.detach()

    def at_token(self, mean: Tensor) -> Tensor:
        return self.lp - self.lp.detach() + mean.detach()

    def advantage_of_response(self, tiny: float = 0.0) -> Tensor:
        return self.per_row(self.A, tiny).expand(self.m.shape) if self.seen("advantage_per_response") else self.A

    def mean(self, loss: Tensor, kind: str, divisor: float | None = None, rows: str = "all", tiny: float = 0.0,
             mask: Tensor | None = None, tokens: int | None = None, count: int | None = None) -> Tensor:  # fmt: skip
        """This micro-batch's share of the mean; ``rows``, ``tokens``, ``count``: what the denominators count."""
        if not self.seen("aggregate"):
            kind, divisor, rows = self.wanted.kind, self.wanted.divisor, self.wanted.rows
        if not self.seen("empty_rows"):
            rows = self.wanted.rows
        tiny = self.tiny(tiny)
        m = self.m if mask is None else mask
        loss = torch.where(m, loss, 0.0)
        tokens = self.tokens if tokens is None else tokens
        count = (self.rows if rows == "all" else self.filled) if count is None else count
        sums, length = loss.sum(dim=1), m.sum(dim=1)
        if kind == "token_mean":
            return sums.sum() / max(tokens + tiny, 1e-300)
        if kind == "sequence_mean":
            return (sums / (length + tiny).clamp(min=tiny or 1.0)).sum() / max(count, 1)
        if kind == "sequence_sum":
            return sums.sum() / (max(count, 1) * divisor)
        if kind == "token_sum":
            return sums.sum()
        if kind == "local_token_mean":
            return sums.sum() / max(int(m.sum()), 1) / self.parts
        assert kind == "prompt_mean"
        prompts = [p for p in self.group.unique() if bool(self.whole[self.group == p].any())]
        found = [sums[self.group[self.where] == p].sum() / int(self.whole[self.group == p].sum()) for p in prompts]
        return sum(found, sums.sum() * 0.0) / max(len(prompts), 1)


Formula = Callable[[Part, dict[str, Any]], Tensor]


def loss(
    framework: str,
    flags: Flags,
    fields: Fields,
    without: frozenset[str] = frozenset(),
    wanted: Wanted | None = None,
    parts: int = 1,
) -> Tensor:
    """The loss of one step. Raises AssertionError for a flag that the framework does not have."""
    formula, defaults = FRAMEWORKS[framework]
    unknown = set(flags) - set(defaults)
    assert not unknown, f"{framework} has no flag {sorted(unknown)}"
    rows = len(fields["mask"])
    edges = [rows * i // parts for i in range(parts + 1)]
    slices = [slice(a, b) for a, b in itertools.pairwise(edges)]
    chosen = defaults | dict(flags)
    return sum(formula(Part(fields, s, without, wanted or Wanted(), parts), chosen) for s in slices)


# --- pieces that several of them have -----------------------------------------------------------------------------


def clip(A: Tensor, w: Tensor, low: float, high: float, c: float | None = None) -> Tensor:
    """max(-w A, -clamp(w, 1 - low, 1 + high) A), and with c at most -c A for A < 0."""
    found = torch.maximum(-A * w, -A * w.clamp(1.0 - low, 1.0 + high))
    return found if c is None else torch.where(A < 0, torch.minimum(found, -c * A), found)


def two_sided(A: Tensor, w: Tensor, low: float, high: float, delta: float | None) -> Tensor:
    bounded = w.clamp(1.0 - low, 1.0 + high)
    return -torch.minimum((w if delta is None else w.clamp(max=delta)) * A, bounded * A)


def pick(where: Tensor, a: float, b: float, narrow: bool = False) -> Tensor:
    """a or b by a condition; ``narrow``: in float32, as torch.where makes of two Python numbers."""
    found = torch.where(where, torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
    return found.float().double() if narrow else found


def gate(A: Tensor, w: Tensor, up: float, down: float, narrow: bool = False) -> Tensor:
    tau = pick(A > 0, up, down, narrow)
    return -A * (4.0 / tau) * torch.sigmoid(tau * (w - 1.0))


def k3(x: Tensor) -> Tensor:
    """x = log new/ref."""
    return torch.exp(-x) - 1.0 + x


def estimate(name: str, x: Tensor) -> Tensor:
    return {"k1": x, "k2": 0.5 * x.square(), "k3": k3(x), "abs": x.abs()}[name]


def vespo(s: Part, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> Tensor:
    x = s.clamped(s.lp - s.lo, "gamma_clamp", -20.0, 20.0)
    total = s.clamped((x * s.m).sum(dim=1, keepdim=True), "gamma_clamp", math.log(1e-8), 20.0).detach()
    narrow = s.seen("float32_numbers")
    k, rate = (pick(s.A >= 0, a, b, narrow) for a, b in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
    return -torch.exp(rate + k * total - rate * total.exp()) * s.A * s.lp


def geometric(s: Part, x: Tensor, held: Tensor) -> Tensor:
    """-A R per token, R the geometric mean of the held ratios; g = A R where a token's own log-ratio is not held."""
    held = torch.where(s.A == 0, x, held)
    moved = torch.where((held == x).detach(), s.lp, s.lp.detach())
    return -s.A * (moved - moved.detach() + s.per_row(held).detach()).exp()


def topmost(s: Part, share: float) -> Tensor:
    """The share of this micro-batch's tokens with the largest covariance of advantage and log-prob."""
    a, lp = s.A[s.m], s.lp.detach()[s.m]
    chosen = torch.zeros_like(s.m)
    if len(a):
        covariance = (a - a.mean()) * (lp - lp.mean())
        places = s.m.nonzero()[covariance.topk(max(1, int(share * len(a)))).indices]
        chosen[places[:, 0], places[:, 1]] = True
    return chosen


def within(x: Tensor, low: float | None, high: float | None) -> Tensor:
    return (x >= (0.0 if low is None else low)) & (x <= (INF if high is None else high))


# --- TRL, Liger, ms-swift -----------------------------------------------------------------------------------------


TRL = {
    "call": "GRPOConfig", "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": None, "delta": None, "beta": 0.0,
    "use_bias_correction_kl": True, "importance_sampling_level": "token", "max_completion_length": 256,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "top_entropy_quantile": 1.0, "entropy_coef": 0.0,
    "off_policy_mask_threshold": None, "use_vllm": True, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
}  # fmt: skip


def trl(s: Part, f: dict[str, Any]) -> Tensor:
    high = f["epsilon"] if f["epsilon_high"] is None else f["epsilon_high"]
    x = s.lp - s.lo
    assert f["top_entropy_quantile"] == 1.0
    if f["call"] == "GMPOConfig":
        return _trl_gmpo(s, f, x, high)
    w = (s.response(x) if f["importance_sampling_level"] == "sequence" else x).exp()
    kind = f["loss_type"]
    if kind == "cispo":
        found = -w.clamp(max=high).detach() * s.A * s.lp
    elif kind == "sapo":
        narrow = s.seen("float32_numbers") and f["call"] == "GRPOConfig"
        found = gate(s.A, w, f["sapo_temperature_pos"], f["sapo_temperature_neg"], narrow)
    elif kind == "vespo":
        found = vespo(s, *(f[f"vespo_{name}"] for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")))
    else:
        found = two_sided(s.A, w, f["epsilon"], high, f["delta"])
    if f["off_policy_mask_threshold"] is not None:
        gap = s.per_row((s.lr if f["use_vllm"] else s.lo) - s.lp.detach())
        found = found * ((s.A >= 0) | (gap <= f["off_policy_mask_threshold"]))
    if f["use_vllm"] and f["vllm_importance_sampling_correction"] and kind != "vespo":
        found = found * _trl_weight(s, f)
    if f["beta"]:
        kl = k3(s.lp - s.lref)
        found = found + f["beta"] * (kl * w if f["use_bias_correction_kl"] else kl)
    mean = {"dapo": "token_mean", "cispo": "token_mean", "vespo": "token_mean", "grpo": "sequence_mean",
            "sapo": "sequence_mean", "bnpo": "local_token_mean", "dr_grpo": "sequence_sum", "luspo": "sequence_sum"}  # fmt: skip
    divisor = f["max_completion_length"] if kind == "dr_grpo" else 1.0
    total = s.mean(found, mean[kind], divisor)
    how = "local_token_mean" if s.seen("entropy_of_micro_batch") else s.wanted.kind
    bonus = s.mean(s.entropy, how, s.wanted.divisor) if f["entropy_coef"] else 0.0
    return total - f["entropy_coef"] * bonus


def _trl_weight(s: Part, f: dict[str, Any]) -> Tensor:
    level, _, action = f["vllm_importance_sampling_mode"].partition("_")
    x = s.lo - s.lr
    rho = (x if level == "token" else (x * s.m).sum(dim=1, keepdim=True)).exp()
    low, high = f["vllm_importance_sampling_clip_min"], f["vllm_importance_sampling_clip_max"]
    return rho.clamp(min=low, max=high) if action == "truncate" else rho * within(rho, low, high)


def _trl_gmpo(s: Part, f: dict[str, Any], x: Tensor, high: float) -> Tensor:
    held = x.clamp(-f["epsilon"], high)
    held = torch.where(s.A > 0, torch.minimum(x, held), torch.maximum(x, held))
    count = s.rows if s.seen("empty_rows") or s.wanted.rows == "all" else s.filled
    if not s.seen("advantage_per_response"):
        empty = -s.A[:, :1] * (s.n == 0) if s.seen("empty_geometric") else torch.zeros_like(s.A[:, :1])
        return s.mean(geometric(s, x, held) + f["beta"] * k3(s.lp - s.lref), "sequence_mean") + empty.sum() / max(
            count, 1
        )
    per_row = -s.A[:, :1] * s.per_row(held).exp()
    if not s.seen("empty_geometric"):
        per_row = per_row * (s.n > 0)
    per_row = per_row + f["beta"] * s.per_row(k3(s.lp - s.lref))
    return per_row.sum() / max(count, 1)


LIGER = {
    "call": "", "loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": None, "beta": 0.04, "use_ref_model": True,
    "use_bias_correction_kl": False, "importance_sampling_level": "token", "max_completion_length": None,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
}  # fmt: skip


def liger(s: Part, f: dict[str, Any]) -> Tensor:
    assert not f["beta"] or f["use_ref_model"]
    same = {name: f[name] for name in LIGER if name in TRL and name != "call"}
    return trl(
        s, TRL | same | {"epsilon": f["epsilon_low"], "vllm_importance_sampling_correction": False, "call": "liger"}
    )


SWIFT = {
    "--loss_type": "grpo", "--epsilon": 0.2, "--epsilon_high": None, "--delta": None, "--beta": 0.04, "--kl_in_reward": "false",
    "--importance_sampling_level": "token", "--max_completion_length": 512, "--tau_pos": 1.0, "--tau_neg": 1.05,
    "--top_entropy_quantile": 1.0, "--advantage_estimator": "grpo", "--off_policy_sequence_mask_delta": None,
    "--rollout_importance_sampling_mode": None, "--rollout_importance_sampling_threshold": 2.0,
}  # fmt: skip


def swift(s: Part, f: dict[str, Any]) -> Tensor:
    assert f["--kl_in_reward"] == "false"
    assert f["--top_entropy_quantile"] == 1.0
    high = f["--epsilon"] if f["--epsilon_high"] is None else f["--epsilon_high"]
    x, level = s.lp - s.lo, f["--importance_sampling_level"]
    x = s.response(x) if level == "sequence" else s.at_token(s.per_row(x)) if level == "sequence_token" else x
    w, kind = x.exp(), f["--loss_type"]
    if kind == "cispo":
        found = -w.clamp(max=high).detach() * s.A * s.lp
    elif kind == "sapo":
        found = gate(s.A, w, f["--tau_pos"], f["--tau_neg"])
    else:
        found = two_sided(s.A, w, f["--epsilon"], high, f["--delta"])
    weight = torch.ones_like(found)
    if f["--rollout_importance_sampling_mode"] is not None:
        weight = _swift_weight(s, f)
    mask = s.m
    if f["--off_policy_sequence_mask_delta"] is not None:
        sign = s.per_row(s.A) if s.seen("sign_of_response") else s.A
        cut = (s.per_row(s.lr - s.lp.detach()) > f["--off_policy_sequence_mask_delta"]) & (sign < 0)
        weight = weight * ~cut
        if s.seen("correction_denominator"):
            mask = mask & ~cut
    penalty = torch.zeros_like(found)
    if f["--beta"]:
        back = s.clamped(s.lref - s.lp, "kl_clamp", -20.0, 20.0)
        penalty = f["--beta"] * s.clamped(back.exp() - back - 1.0, "kl_clamp", -10.0, 10.0)
    total = weight * (found + penalty) if s.seen("penalty_corrected") else weight * found + penalty
    mean = {"dapo": "token_mean", "cispo": "token_mean", "grpo": "sequence_mean", "sapo": "sequence_mean",
            "bnpo": "local_token_mean", "dr_grpo": "sequence_sum"}[kind]  # fmt: skip
    local = mask if mean == "local_token_mean" else None
    return s.mean(total, mean, f["--max_completion_length"], mask=local)


def _swift_weight(s: Part, f: dict[str, Any]) -> Tensor:
    x = s.clamped(s.lo - s.lr, "rho_20", -20.0, 20.0)
    most, mode = f["--rollout_importance_sampling_threshold"], f["--rollout_importance_sampling_mode"]
    rho, whole = x.exp(), s.per_row(x).exp()
    if mode == "token_truncate":
        return rho.clamp(max=most)
    if mode == "token_mask":
        return rho * (rho <= most)
    return whole.clamp(max=most).expand(rho.shape) if mode == "sequence_truncate" else rho * (whole <= most)


# --- verl -----------------------------------------------------------------------------------------------------------

_A, _P = "actor_rollout_ref.actor.", "actor_rollout_ref.actor.policy_loss."
_R = "algorithm.rollout_correction."
VERL = {
    f"{_P}loss_mode": "vanilla", f"{_A}clip_ratio_low": 0.2, f"{_A}clip_ratio_high": 0.2, f"{_A}clip_ratio_c": 3.0,
    f"{_A}loss_agg_mode": "token-mean", f"{_A}loss_scale_factor": None, f"{_A}use_kl_loss": False, f"{_A}kl_loss_coef": 0.001,
    f"{_A}kl_loss_type": "low_var_kl", f"{_A}entropy_coeff": 0.0, f"{_A}tau_pos": 1.0, f"{_A}tau_neg": 1.05,
    f"{_P}dro_beta": None, f"{_P}kl_cov_ratio": 2e-4, f"{_P}ppo_kl_coef": 0.1, "algorithm.use_kl_in_reward": False,
    f"{_R}rollout_is": None, f"{_R}rollout_is_threshold": 2.0, f"{_R}rollout_rs": None, f"{_R}rollout_rs_threshold": None,
    f"{_R}bypass_mode": False, f"{_R}loss_type": "ppo_clip", f"+{_P}rollout_correction": None,
}  # fmt: skip


def verl(s: Part, f: dict[str, Any]) -> Tensor:
    f = {name.rpartition(".")[2]: value for name, value in f.items()}
    assert f["use_kl_in_reward"] is False
    mask, weight = s.m, torch.ones_like(s.lp)
    reinforce = f["loss_mode"] == "bypass_mode" and f["loss_type"] == "reinforce"
    if f["bypass_mode"]:
        s.lo = s.lr
        assert f["rollout_rs"] is None
    if f["loss_mode"] == "bypass_mode":  # a worker knows of the correction only so
        assert f["bypass_mode"]
        assert f["rollout_correction"] == "${algorithm.rollout_correction}"
    if f["rollout_rs"] is not None:
        mask = mask & _verl_kept(s, f)
    if f["rollout_is"] is not None and (reinforce or not f["bypass_mode"]):
        x, key = (s.lp.detach() - s.lr, "log_ratio_20") if f["bypass_mode"] else (s.lo - s.lr, "rho_20")
        x = x if f["rollout_is"] == "token" else (x * s.m).sum(dim=1, keepdim=True)
        rho = s.clamped(x, key, -20.0, 20.0).exp()
        low, _, high = str(f["rollout_is_threshold"]).rpartition("_")
        assert not low or 0.0 < float(low) <= float(high)
        least = float(low or 0.0) if s.seen(key) or low != "1e-09" else 0.0  # below every clamped ratio
        weight = rho * within(rho, least, float(high)) if low else rho.clamp(max=float(high))
    found, penalty, agg = _verl_policy(s, f, mask)
    if f["loss_mode"] == "geo_mean" and s.seen("advantage_per_response"):
        return found
    found = weight * (found + penalty) if s.seen("penalty_corrected") else weight * found + penalty
    total = _verl_mean(s, found, f, mask, agg)
    if f["use_kl_loss"]:
        total = total + f["kl_loss_coef"] * _verl_mean(s, _verl_kl(s, f["kl_loss_type"]), f, mask, f["loss_agg_mode"])
    return total - f["entropy_coeff"] * _verl_mean(s, s.entropy, f, mask, f["loss_agg_mode"])


def _verl_policy(s: Part, f: dict[str, Any], mask: Tensor) -> tuple[Tensor, Tensor, str]:
    """(the policy term, the penalty inside it, how it is averaged)."""
    mode, agg, A = f["loss_mode"], f["loss_agg_mode"], s.A
    low, high, c = f["clip_ratio_low"], f["clip_ratio_high"], f["clip_ratio_c"]
    c = c if s.seen("log_ratio_20") or c < 1e9 else INF  # beyond every ratio as long as log-ratios are clamped
    raw, zero = s.lp - s.lo, torch.zeros_like(s.lp)
    w = s.clamped(raw, "log_ratio_20", -20.0, 20.0).exp()
    if mode == "bypass_mode" and f["loss_type"] == "reinforce":
        return -A * s.lp, zero, agg
    if mode in ("vanilla", "bypass_mode"):
        assert c > 1.0
        return clip(A, w, low, high, c), zero, agg
    if mode in ("dppo_tv", "dppo_kl"):
        p, q = s.lp.exp(), s.lo.exp()
        if mode == "dppo_tv":
            cut = torch.where(A > 0, p - q > high, p - q < -low)
        else:
            extra = 1e-8 if s.seen("binary_kl_1e-8") else 0.0
            apart = q * (s.lo - s.lp) + (1 - q) * ((1 - q + extra).log() - (1 - p + extra).log())
            cut = torch.where(A > 0, (apart > high) & (p > q), (apart > low) & (p < q))
        return -A * w.clamp(max=c).detach() * s.lp * ~cut.detach(), zero, agg
    if mode == "gspo":
        mean = (raw * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        x = s.clamped(s.at_token(mean), "log_ratio_10", -INF, 10.0)
        return clip(A, x.exp(), low, high), zero, "seq-mean-token-mean"
    if mode == "sapo":
        return gate(A, w, f["tau_pos"], f["tau_neg"]), zero, "seq-mean-token-mean"
    if mode == "cispo":
        return -w.clamp(1.0 - low, 1.0 + high).detach() * A * s.lp, zero, agg
    if mode == "gpg":
        return -A * s.lp, zero, agg
    if mode == "dro":
        return -A * s.lp, 0.5 * f["dro_beta"] * raw.square(), agg
    if mode == "kl_cov":
        return -A * raw.exp(), f["ppo_kl_coef"] * raw.abs() * topmost(s, f["kl_cov_ratio"]), agg
    assert mode == "geo_mean"
    sign = torch.sign(A)
    held = sign * torch.minimum(sign * raw, sign * raw.clamp(-low, high))
    if s.seen("advantage_per_response"):
        per_row = -s.per_row(A, 1e-8) * s.per_row(held, 1e-8).exp()
        count = s.rows if s.seen("empty_rows") or s.wanted.rows == "all" else s.filled
        return per_row.sum() / max(count, 1), zero, agg
    return geometric(s, raw, held), zero, "seq-mean-token-mean"


def _verl_mean(s: Part, values: Tensor, f: dict[str, Any], mask: Tensor, agg: str) -> Tensor:
    kind = {"token-mean": "token_mean", "token-sum": "token_sum", "seq-mean-token-mean": "sequence_mean",
            "seq-mean-token-sum": "sequence_sum", "seq-mean-token-sum-norm": "sequence_sum"}[agg]  # fmt: skip
    divisor = (f["loss_scale_factor"] or mask.shape[1]) if agg.endswith("norm") else 1.0
    tiny = 1e-8 if kind == "sequence_mean" else 0.0
    if f["rollout_rs"] is None:
        return s.mean(values, kind, divisor, "all", tiny)
    rejected = s.filled - int(mask.any(dim=1).sum())
    count = s.rows if s.seen("empty_rows") or s.wanted.rows == "all" else s.filled
    count -= 0 if s.seen("rejected_rows") else rejected
    return s.mean(values, kind, divisor, "all", tiny, mask, int(mask.sum()), count)


def _verl_kept(s: Part, f: dict[str, Any]) -> Tensor:
    level, _, name = f["rollout_rs"].rpartition("_")
    x = s.clamped(s.lo - s.lr, "rho_20", -20.0, 20.0)
    measure = {"k1": -x, "k2": 0.5 * x.square(), "k3": x.exp() - 1.0 - x}[name]
    if level == "seq_sum":
        measure = (measure * s.m).sum(dim=1, keepdim=True)
    elif level == "seq_mean":
        measure = s.per_row(measure)
    elif level == "seq_max":
        measure = torch.where(s.m, measure, -INF).amax(dim=1, keepdim=True)
    text = str(f["rollout_rs_threshold"])
    if name != "k1":
        return (measure <= float(text)).expand(s.m.shape)
    low, _, high = text.partition("_")
    return within(measure.exp(), float(low), float(high)).expand(s.m.shape)


def _verl_kl(s: Part, name: str) -> Tensor:
    base, x = {"low_var_kl": "k3", "kl": "k1", "mse": "k2"}.get(name, name).removesuffix("+"), s.lp - s.lref
    if base == "k3":
        value = s.clamped(k3(s.clamped(x, "kl_clamp", -20.0, 20.0)), "kl_clamp", -10.0, 10.0)
    else:
        value = estimate(base, x)
    straight = 0.5 * x.square()
    return straight - straight.detach() + value.detach() if name.endswith("+") else value


# --- NeMo-RL, SkyRL, OpenRLHF -----------------------------------------------------------------------------------------

_N = "loss_fn."
NEMO = {
    f"{_N}disable_ppo_ratio": False, f"{_N}force_on_policy_ratio": False, f"{_N}use_cispo": False, f"{_N}token_level_loss": True,
    f"{_N}sequence_level_importance_ratios": False, f"{_N}ratio_clip_min": 0.2, f"{_N}ratio_clip_max": 0.2,
    f"{_N}ratio_clip_c": None, f"{_N}reference_policy_kl_penalty": 0.01, f"{_N}reference_policy_kl_type": "k3",
    f"{_N}kl_input_clamp_value": 20.0, f"{_N}kl_output_clamp_value": 10.0, f"{_N}use_kl_in_reward": False,
    f"{_N}use_importance_sampling_correction": False, f"{_N}truncated_importance_sampling_type": None,
    f"{_N}truncated_importance_sampling_ratio": None, f"{_N}truncated_importance_sampling_ratio_min": None,
    f"{_N}positive_example_nll_weight": 0.0,
}  # fmt: skip


def nemo(s: Part, f: dict[str, Any]) -> Tensor:
    f = {name.removeprefix(_N): value for name, value in f.items()}
    assert not f["force_on_policy_ratio"]
    assert not f["positive_example_nll_weight"]
    assert not f["use_kl_in_reward"]
    x, whole = s.lp - s.lo, f["sequence_level_importance_ratios"]
    assert not whole or not f["token_level_loss"]
    w = s.lp if f["disable_ppo_ratio"] else (s.response(x, 1e-8) if whole else x).exp()
    low, high = f["ratio_clip_min"], f["ratio_clip_max"]
    if f["use_cispo"]:
        assert f["ratio_clip_c"] is None
        assert f["token_level_loss"]
        found = -s.A * w.clamp(1.0 - low, 1.0 + high).detach() * s.lp
    elif f["disable_ppo_ratio"]:
        found = -s.A * s.lp
    else:
        found = clip(s.A, w, low, high, f["ratio_clip_c"])
    if f["use_importance_sampling_correction"]:
        found = found * _nemo_weight(s, f, whole)
    kind = "token_mean" if f["token_level_loss"] else "sequence_mean"
    total = s.mean(found, kind, tiny=1e-8) if kind == "token_mean" else _nemo_rows(s, found)
    if f["reference_policy_kl_penalty"]:
        x = s.lp - s.lref
        if f["kl_input_clamp_value"] is not None:
            x = x.clamp(-f["kl_input_clamp_value"], f["kl_input_clamp_value"])
        kl = estimate(f["reference_policy_kl_type"], x)
        kl = kl * (s.lp - s.lp.detach()).exp() if s.seen("kl_score") else kl
        if f["kl_output_clamp_value"] is not None:
            kl = kl.clamp(-f["kl_output_clamp_value"], f["kl_output_clamp_value"])
        averaged = s.mean(kl, kind, tiny=1e-8) if kind == "token_mean" else _nemo_rows(s, kl)
        total = total + f["reference_policy_kl_penalty"] * averaged
    return total


def _nemo_rows(s: Part, values: Tensor) -> Tensor:
    """Over responses; both denominators are larger by 1e-8."""
    tiny = s.tiny(1e-8)
    return s.mean(values, "sequence_mean", tiny=1e-8) * (s.rows / (s.rows + tiny) if s.seen("aggregate") else 1.0)


def _nemo_weight(s: Part, f: dict[str, Any], whole: bool) -> Tensor:
    x = s.lo - s.lr
    rho = ((x * s.m).sum(dim=1, keepdim=True) if whole else x).exp()
    kind = f["truncated_importance_sampling_type"]
    low, high = f["truncated_importance_sampling_ratio_min"], f["truncated_importance_sampling_ratio"]
    if kind == "tis":
        return rho.clamp(0.0 if low is None else low, high)
    if kind == "icepop":
        return rho * within(rho, low, high)
    assert kind == "seq-mask-tis"
    assert not whole
    return rho * within(s.per_row(x, 1e-8).exp(), low, high)


_T, _O = "trainer.algorithm.", "trainer.algorithm.off_policy_correction."
SKYRL = {
    f"{_T}policy_loss_type": "regular", f"{_T}loss_reduction": "token_mean", f"{_T}max_seq_len": None, f"{_T}eps_clip_low": 0.2,
    f"{_T}eps_clip_high": 0.2, f"{_T}clip_ratio_c": 3.0, f"{_T}use_kl_loss": True, f"{_T}kl_loss_coef": 0.001,
    f"{_T}kl_estimator_type": "k3", f"{_T}use_kl_in_reward": False, f"{_T}use_entropy_loss": False, f"{_T}entropy_loss_coef": 0.01,
    f"{_T}cispo.cispo_eps_clip_low": 1.0, f"{_T}cispo.cispo_eps_clip_high": 4.0, f"{_T}cispo.cispo_anchor": "old",
    f"{_T}dppo.dppo_type": "binary_tv", f"{_T}dppo.delta_low": 0.2, f"{_T}dppo.delta_high": 0.2, f"{_T}sapo.tau_pos": 1.0,
    f"{_T}sapo.tau_neg": 1.05, f"{_T}kl_cov.kl_cov_frac": 0.2, f"{_T}kl_cov.ppo_kl_coef": 1.0, f"{_O}tis_ratio_type": None,
    f"{_O}token_tis_ratio_clip_high": 2.0, f"{_O}sequence_tis_ratio_clip_high": 5.0, f"{_O}sequence_mask_metric": None,
    f"{_O}geo_mask_low": 0.99, f"{_O}geo_mask_high": 1.01, f"{_O}product_mask_low": 0.5, f"{_O}product_mask_high": 2.0,
    f"{_O}token_mask_is_threshold_low": None, f"{_O}token_mask_is_threshold_high": None,
}  # fmt: skip


def skyrl(s: Part, f: dict[str, Any]) -> Tensor:
    f = {name.rpartition(".")[2]: value for name, value in f.items()}
    assert f["use_kl_in_reward"] is False
    found, penalty = _skyrl_policy(s, f)
    found = found * _skyrl_correction(s, f) if f["policy_loss_type"] != "kl_cov" else found
    kind = {"token_mean": "token_mean", "sequence_mean": "sequence_mean", "prompt_mean": "prompt_mean",
            "seq_mean_token_sum_norm": "sequence_sum", "token_mean_legacy": "local_token_mean"}[f["loss_reduction"]]  # fmt: skip
    total = s.mean(found, kind, f["max_seq_len"])
    total = total + (penalty.sum() if s.seen("penalty_summed") else s.mean(penalty, kind, f["max_seq_len"]))
    if f["use_kl_loss"]:
        x, clamp = s.lp - s.lref, f["kl_estimator_type"] == "k3"
        kl = estimate(f["kl_estimator_type"], s.clamped(x, "kl_clamp", -20.0, 20.0) if clamp else x)
        kl = s.clamped(kl, "kl_clamp", -10.0, 10.0) if clamp else kl
        own = "sequence_mean" if s.seen("penalty_mean") else s.wanted.kind
        rows = "all" if s.seen("penalty_mean") else s.wanted.rows
        total = total + f["kl_loss_coef"] * s.mean(kl, own, s.wanted.divisor, rows)
    if f["use_entropy_loss"]:
        how = "local_token_mean" if s.seen("entropy_of_micro_batch") else s.wanted.kind
        total = total - f["entropy_loss_coef"] * s.mean(s.entropy, how, s.wanted.divisor, s.wanted.rows)
    return total


def _skyrl_policy(s: Part, f: dict[str, Any]) -> tuple[Tensor, Tensor]:
    kind, A, low, high = f["policy_loss_type"], s.A, f["eps_clip_low"], f["eps_clip_high"]
    zero = torch.zeros_like(s.lp)

    def ratio(base: Tensor) -> Tensor:
        return s.clamped(s.lp - base, "log_ratio_20", -20.0, 20.0).exp()

    if kind in ("regular", "dual_clip"):
        return clip(A, ratio(s.lo), low, high, f["clip_ratio_c"] if kind == "dual_clip" else None), zero
    if kind == "gspo":
        x = s.clamped(s.at_token(s.per_row(s.lp - s.lo)), "log_ratio_10", -INF, 10.0)
        return clip(A, x.exp(), low, high), zero
    if kind == "cispo":
        w = ratio(s.lr if f["cispo_anchor"] == "rollout" else s.lo)
        return -w.clamp(1.0 - f["cispo_eps_clip_low"], 1.0 + f["cispo_eps_clip_high"]).detach() * A * s.lp, zero
    if kind == "rollout_is":
        v = ratio(s.lr).detach()
        inside = (v > 1 - low) & (v < 1 + high) if s.seen("strict_bounds") else (v >= 1 - low) & (v <= 1 + high)
        return -v * inside * A * s.lp, zero
    if kind == "sapo":
        return gate(A, ratio(s.lo), f["tau_pos"], f["tau_neg"]), zero
    if kind == "kl_cov":
        x = s.lp - s.lo
        return -A * x.exp(), f["ppo_kl_coef"] * x.abs() * topmost(s, f["kl_cov_frac"])
    assert kind == "dppo"
    p, q, low, high = s.lp.exp(), s.lr.exp(), f["delta_low"], f["delta_high"]
    if f["dppo_type"] == "binary_tv":
        cut = ((A > 0) & (p - q > high)) | ((A < 0) & (q - p > low))
    else:
        extra = 1e-8 if s.seen("binary_kl_1e-8") else 0.0
        apart = q * (s.lr - s.lp) + (1 - q) * ((1 - q + extra).log() - (1 - p + extra).log())
        cut = ((A > 0) & (p > q) & (apart > high)) | ((A < 0) & (p < q) & (apart > low))
    return -A * ratio(s.lr) * ~cut.detach(), zero


def _skyrl_correction(s: Part, f: dict[str, Any]) -> Tensor:
    x, weight = s.lo - s.lr, torch.ones_like(s.lp)
    product = s.clamped((x * s.m).sum(dim=1, keepdim=True), "rho_20", -20.0, 20.0).exp()
    rho = s.clamped(x, "rho_20", -20.0, 20.0).exp()
    if f["token_mask_is_threshold_low"] is not None and f["token_mask_is_threshold_high"] is not None:
        weight = weight * within(rho, f["token_mask_is_threshold_low"], f["token_mask_is_threshold_high"])
    if f["tis_ratio_type"] == "token":
        weight = weight * rho.clamp(max=f["token_tis_ratio_clip_high"])
    elif f["tis_ratio_type"] == "sequence":
        weight = weight * product.clamp(max=f["sequence_tis_ratio_clip_high"])
    if f["sequence_mask_metric"] == "product":
        weight = weight * within(product, f["product_mask_low"], f["product_mask_high"])
    elif f["sequence_mask_metric"] == "geometric":
        weight = weight * within(s.per_row(x).exp(), f["geo_mask_low"], f["geo_mask_high"])
    return weight


OPENRLHF = {
    "--actor.policy_loss_type": "ppo", "--actor.eps_clip_low_high": [0.2, 0.2], "--actor.dual_clip": None,
    "--algo.kl.init_coef": 0.01, "--algo.kl.use_loss": False, "--algo.kl.estimator": "k1", "--actor.entropy_coef": None,
    "--algo.advantage.is_correction_enable": False, "--algo.advantage.is_correction_type": "tis",
    "--algo.advantage.is_correction_threshold": [0.5, 5.0],
}  # fmt: skip


def openrlhf(s: Part, f: dict[str, Any]) -> Tensor:
    f = {name.removeprefix("--"): value for name, value in f.items()}
    corrected, whole = f["algo.advantage.is_correction_enable"], f["actor.policy_loss_type"] == "gspo"
    low, high = f["actor.eps_clip_low_high"]
    if whole:
        w = s.response(s.lp - (s.lr if corrected else s.lo)).exp()
    else:
        w = s.clamped(s.lp - s.lo, "log_ratio_20", -20.0, 20.0).exp()
    found = clip(s.A, w, low, high, f["actor.dual_clip"])
    if corrected and not whole:
        found = found * _openrlhf_weight(s, f)
    total = s.mean(found, "sequence_mean", tiny=1e-8) if whole else s.mean(found, "token_mean")
    if f["algo.kl.init_coef"]:
        assert f["algo.kl.use_loss"], "a KL penalty in the reward changes the advantages"
        kl = estimate(f["algo.kl.estimator"], s.narrow(s.lp - s.lref))
        total = total + f["algo.kl.init_coef"] * s.mean(s.clamped(kl, "kl_value_clamp", -10.0, 10.0), "token_mean")
    return total - (f["actor.entropy_coef"] or 0.0) * s.mean(s.entropy, "token_mean")


def _openrlhf_weight(s: Part, f: dict[str, Any]) -> Tensor:
    low, high = f["algo.advantage.is_correction_threshold"]
    x, kind = s.lo - s.lr, f["algo.advantage.is_correction_type"]
    if kind == "tis":
        return x.exp().clamp(low, high)
    return x.exp() * within(x.exp() if kind == "icepop" else s.per_row(x).exp(), low, high)


# --- slime, AReaL, ROLL -----------------------------------------------------------------------------------------------

SLIME = {
    "--advantage-estimator": "grpo", "--eps-clip": 0.2, "--eps-clip-high": 0.2, "--eps-clip-c": None, "--use-tis": False,
    "--tis-clip": 2.0, "--tis-clip-low": 0.0, "--custom-tis-function-path": None, "--use-opsm": False, "--opsm-delta": 1e-4,
    "--calculate-per-token-loss": False, "--use-rollout-logprobs": False, "--kl-coef": 0.0, "--use-kl-loss": False,
    "--kl-loss-coef": 0.0, "--kl-loss-type": "k1", "--use-unbiased-kl": False, "--entropy-coef": 0.0,
}  # fmt: skip


def slime(s: Part, f: dict[str, Any]) -> Tensor:
    f = {name.removeprefix("--"): value for name, value in f.items()}
    assert not f["kl-coef"], "a KL penalty in the reward changes the advantages"
    old = s.lr if f["use-rollout-logprobs"] else s.lo
    x, kind = s.lp - old, f["advantage-estimator"]
    w = (s.response(x) if kind == "gspo" else x).exp()
    if kind == "cispo":
        found = -w.clamp(1.0 - f["eps-clip"], 1.0 + f["eps-clip-high"]).detach() * s.A * s.lp
    else:
        found = clip(s.A, w, f["eps-clip"], f["eps-clip-high"], f["eps-clip-c"])
    if f["use-opsm"]:
        found = found * ~((s.A < 0) & (s.per_row(old - s.lp.detach()) > f["opsm-delta"]))
    if f["use-tis"]:
        rho, custom = (s.lo - s.lr).exp(), f["custom-tis-function-path"]
        assert custom is None or custom.endswith("icepop_function")
        inside = rho * within(rho, f["tis-clip-low"], f["tis-clip"])
        found = found * (rho.clamp(f["tis-clip-low"], f["tis-clip"]) if custom is None else inside)
    mean = "token_mean" if f["calculate-per-token-loss"] else "sequence_mean"
    total = s.mean(found, mean) - f["entropy-coef"] * s.mean(s.entropy, mean)
    if f["use-kl-loss"]:
        kl = estimate(f["kl-loss-type"], s.narrow(s.lp - s.lref))
        if f["use-unbiased-kl"]:
            kl = kl * (s.lp - (old if s.seen("penalty_anchor") else s.lo)).exp()
        total = total + f["kl-loss-coef"] * s.mean(kl, mean)
    return total


AREAL = {
    "actor.importance_sampling_level": "token", "actor.use_sapo_loss": False, "actor.sapo_tau_pos": 1.0, "actor.sapo_tau_neg": 1.05,
    "actor.eps_clip": 0.2, "actor.eps_clip_higher": None, "actor.c_clip": None, "actor.m2_threshold": None,
    "actor.use_decoupled_loss": False, "actor.recompute_logprob": False, "actor.kl_ctl": 0.1,
    **{f"actor.rejection_sampling.{name}": None for name in ("level", "action", "metric", "agg", "upper", "lower")},
}  # fmt: skip


def areal(s: Part, f: dict[str, Any]) -> Tensor:
    f = {name.rpartition(".")[2]: value for name, value in f.items()}
    assert f["m2_threshold"] is None
    assert not f["kl_ctl"], "a KL penalty in the reward changes the advantages"
    whole, m, weight = f["importance_sampling_level"] == "sequence", s.m, torch.ones_like(s.lp)
    x = s.lp - (s.lo if f["use_decoupled_loss"] or f["recompute_logprob"] else s.lr)
    if f["use_decoupled_loss"] and f["metric"] is not None:
        assert f["metric"] == "ratio"
        assert not f["use_sapo_loss"]
        gap = s.narrow(s.lo - s.lr)
        rho = (s.per_row(gap).expand(gap.shape) if f["level"] == "sequence" else gap).exp()
        inside = within(rho, f["lower"], f["upper"])
        weight = rho.clamp(f["lower"] or 0.0, f["upper"]) if f["action"] == "clamp" else rho * inside
        m = m if f["action"] == "clamp" else m & inside
    if whole and s.seen("gradient_per_response"):
        mean = (x * m).sum(dim=1, keepdim=True) / m.sum(dim=1, keepdim=True).clamp(min=1)
        w = mean.exp().expand(x.shape)
    else:
        w = (s.response(x) if whole else x).exp()
    A = s.advantage_of_response() if whole else s.A
    if f["use_sapo_loss"]:
        return s.mean(gate(A, w, f["sapo_tau_pos"], f["sapo_tau_neg"]), "token_mean")
    high = f["eps_clip"] if f["eps_clip_higher"] is None else f["eps_clip_higher"]
    found = clip(A, w, f["eps_clip"], high)
    if f["c_clip"] is not None:
        assert f["c_clip"] > 1.0
        found = torch.minimum(found, torch.sign(A) * f["c_clip"] * A)
    return s.mean(found * weight, "token_mean")


ROLL = {
    "importance_sampling": "token", "ratio_type": None, "dual_clip_loss": False, "pg_clip": 0.2, "use_pg_clip_range": False,
    "pg_clip_low": 0.2, "pg_clip_high": 0.2, "loss_agg_mode": "seq-mean-token-sum", "use_kl_loss": False, "kl_loss_coef": 0.0,
    "init_kl_coef": 0.2, "entropy_loss_coef": 0.0, "actor_train.worker_cls": None, "actor_train.pg_variant": "vanilla",
    **{f"train_infer_correction.is_weight.{name}": None for name in ("enabled", "weight_type", "upper_bound")},
}  # fmt: skip


def roll(s: Part, f: dict[str, Any]) -> Tensor:
    f = {name.rpartition(".")[2]: value for name, value in f.items()}
    assert not f["init_kl_coef"], "a KL penalty in the reward changes the advantages"
    x, penalty = s.lp - s.lo, torch.zeros_like(s.lp)
    if f["worker_cls"] is not None:
        found, penalty = _roll_variant(s, f["pg_variant"], x.exp())
    else:
        low, high = (f["pg_clip_low"], f["pg_clip_high"]) if f["use_pg_clip_range"] else (f["pg_clip"], f["pg_clip"])
        if f["importance_sampling"] == "seq":
            x = s.response(x, 1e-8)
        elif f["ratio_type"] == "segment":
            x = _turns(s, x)
        found = clip(s.A, x.exp(), low, high, 1.0 + 2.0 * f["pg_clip"] if f["dual_clip_loss"] else None)
    weight = _roll_weight(s, f) if f["enabled"] else torch.ones_like(found)
    found = weight * (found + penalty) if s.seen("penalty_corrected") else weight * found + penalty
    total = _roll_mean(s, found, f["loss_agg_mode"])
    if f["use_kl_loss"]:
        kl = torch.where(s.m, s.clamped(k3(s.lp - s.lref), "kl_value_clamp", -10.0, 10.0), 0.0)
        total = total + f["kl_loss_coef"] * _roll_mean(s, kl, f["loss_agg_mode"])
    return total - f["entropy_loss_coef"] * _roll_mean(s, s.entropy, f["loss_agg_mode"])


def _roll_variant(s: Part, kind: str, w: Tensor) -> tuple[Tensor, Tensor]:
    zero = torch.zeros_like(s.lp)
    if kind == "topr":
        wrong = s.score[:, None] <= 0 if s.seen("split_by_score") else s.A < 0
        return -torch.where(wrong, w.clamp(0.0, 1.0), 1.0).detach() * s.A * s.lp, zero
    if kind == "kimi15":
        return -s.A * s.lp, 0.5 * 0.1 * (s.lp - s.lo).square()
    held = {"vanilla": torch.ones_like(w), "tis": w.clamp(0.0, 1.0), "cispo": w.clamp(1.0 - 0.1, 1.0 + 0.1)}[kind]
    return -held.detach() * s.A * s.lp, zero


def _turns(s: Part, x: Tensor) -> Tensor:
    """Means over the turns of a response, for each token of the turn."""
    same = (s.turn[:, :, None] == s.turn[:, None, :]) & s.m[:, None, :]
    size = same.sum(dim=2)
    mean = (same * x[:, None, :]).sum(dim=2) / (size + s.tiny(1e-8)).clamp(min=1e-8)
    return mean if s.seen("gradient_per_response") else s.at_token(mean)


def _roll_weight(s: Part, f: dict[str, Any]) -> Tensor:
    x, kind = s.lo - s.lr, f["weight_type"]
    if kind == "sequence":
        x = (x * s.m).sum(dim=1, keepdim=True).expand(x.shape)
    elif kind == "geometric":
        x = s.per_row(x, 1e-8).expand(x.shape)
    elif kind == "segment":
        x = _turns(s, x)
    return x.exp().clamp(max=f["upper_bound"]).detach() if f["upper_bound"] is not None else x.exp().detach()


def _roll_mean(s: Part, values: Tensor, mode: str) -> Tensor:
    tiny = s.tiny(1e-8)
    if mode == "token-mean":
        if s.seen("masked_advantage") and s.seen("aggregate"):
            return values.sum() / max(s.tokens, 1)
        return s.mean(values, "token_mean")
    scale = s.filled / (s.filled + tiny) if s.seen("aggregate") and s.filled else 1.0
    if mode == "seq-mean-token-mean":
        return s.mean(values, "sequence_mean", rows="nonempty", tiny=1e-8) * scale
    assert mode == "seq-mean-token-sum"
    return s.mean(values, "sequence_sum", 1.0, "nonempty") * scale


# --- prime-rl, tinker, tunix, open-instruct -----------------------------------------------------------------------------

_L = "trainer.loss."
PRIME = {f"{_L}type": "default", f"{_L}adv_tau": 1.0, f"{_L}kl_tau": 1e-3, f"{_L}dppo_mask_low": 0.2,
         f"{_L}dppo_mask_high": 0.2, f"{_L}ipo_threshold": 0.1}  # fmt: skip


def prime(s: Part, f: dict[str, Any]) -> Tensor:
    f = {name.removeprefix(_L): value for name, value in f.items()}
    x, moved = s.lp - s.lr, (s.lp.exp() - s.lr.exp()).detach()
    apart = (s.lp - s.sampler).square()
    if f["type"] == "ipo":
        cut = moved.abs() > f["ipo_threshold"]
    else:
        cut = torch.where(s.A > 0, moved > f["dppo_mask_high"], moved < -f["dppo_mask_low"])
    return s.mean(-(~cut).double() * f["adv_tau"] * s.A * x.exp() + f["kl_tau"] * apart, "token_mean")


TINKER = {"call": "", "loss_fn": "importance_sampling", "loss_fn_config.clip_low_threshold": None,
          "loss_fn_config.clip_high_threshold": None, "loss_fn_config.beta": None}  # fmt: skip


def tinker(s: Part, f: dict[str, Any]) -> Tensor:
    kind, x = f["loss_fn"], s.lp - s.lr
    low, high = (f[f"loss_fn_config.clip_{side}_threshold"] for side in ("low", "high"))
    if kind == "importance_sampling":
        found = -x.exp() * s.A
    elif kind == "ppo":
        low, high = (0.8 if low is None else low), (1.2 if high is None else high)
        found = torch.maximum(-s.A * x.exp(), -s.A * x.exp().clamp(low, high))
    elif kind == "cispo":
        low, high = (0.0 if low is None else low), (4.0 if high is None else high)
        found = -x.exp().clamp(low, high).detach() * s.A * s.lp
    else:
        assert kind == "dro"
        found = -(s.A * s.lp - 0.5 * f["loss_fn_config.beta"] * x.square())
    return s.mean(found, "token_sum")


TUNIX = {"call": "", "loss_algo": "grpo", "epsilon": 0.2, "epsilon_high": 0.2, ".epsilon_c": None, "beta": 0.04,
         "kl_loss_mode": "kl", "loss_agg_mode": "sequence-mean-token-mean", "use_rollout_logps": True, "sampler_is": None,
         "sampler_is_threshold": 2.0}  # fmt: skip


def tunix(s: Part, f: dict[str, Any]) -> Tensor:
    x = s.narrow(s.lp - (s.lr if f["use_rollout_logps"] else s.lo))
    x = s.clamped(x, "log_ratio_20", -20.0, 20.0)
    if f["loss_algo"] == "gspo-token":
        x = s.clamped(s.at_token(s.per_row(x)), "log_ratio_10", -INF, 10.0)
    found = clip(s.A, x.exp(), f["epsilon"], f["epsilon_high"], f[".epsilon_c"])
    if f["sampler_is"] is not None:
        assert f["sampler_is"] == "token"
        assert not f["use_rollout_logps"]
        gap = s.clamped(s.narrow(s.lo - s.lr), "rho_20", -20.0, 20.0)
        found = found * gap.exp().clamp(max=f["sampler_is_threshold"])
    kind = {
        "sequence-mean-token-mean": "sequence_mean",
        "token-mean": "token_mean",
        "seq-mean-token-sum": "sequence_sum",
    }
    total = s.mean(found, kind[f["loss_agg_mode"]], 1.0, "nonempty")
    if f["beta"]:
        name = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}[f["kl_loss_mode"]]
        kl = estimate(name, s.narrow(s.lp - s.lref))
        total = total + f["beta"] * s.mean(kl, kind[f["loss_agg_mode"]], 1.0, "nonempty")
    return total


OPEN_INSTRUCT = {
    "--loss_fn": "dapo", "--clip_lower": 0.2, "--clip_higher": 0.272, "--beta": 0.05, "--load_ref_policy": "true", "--kl_estimator": 2,
    "--loss_denominator": "token", "--use_vllm_logprobs": "false", "--use_rho_correction": "true",
    "--rho_clamp_lower_bound": 0.0, "--rho_clamp_upper_bound": 2.0, "--rho_mask_lower_bound": 0.0,
    "--rho_mask_upper_bound": 0.0, "--rho_mask_sequence_level": "false",
}  # fmt: skip


def open_instruct(s: Part, f: dict[str, Any]) -> Tensor:
    f = {name.removeprefix("--"): value for name, value in f.items()}
    old = s.lr if f["use_vllm_logprobs"] == "true" else s.lo
    w = (s.lp - old).exp()
    if f["loss_fn"] == "dapo":
        found = clip(s.A, w, f["clip_lower"], f["clip_higher"])
    else:
        found = -s.A * w.detach().clamp(max=1.0 + f["clip_higher"]) * s.lp
    if f["use_rho_correction"] == "true":
        found = found * _open_instruct_weight(s, f)
    assert f["loss_denominator"] == "token"
    total = s.mean(found, "token_mean")
    if f["beta"] and f["load_ref_policy"] == "true":
        x = s.clamped(s.lp - s.lref, "kl_log_40", -40.0, 40.0)
        weight = (s.lp - (old if s.seen("penalty_anchor") else s.lo)).exp()
        kl = [x, 0.5 * x.square(), k3(x), weight * x][f["kl_estimator"]]
        total = total + f["beta"] * s.mean(kl, "token_mean")
    return total


def _open_instruct_weight(s: Part, f: dict[str, Any]) -> Tensor:
    x = s.clamped(s.lo - s.lr, "rho_10", -10.0, 10.0)
    rho = (s.per_row(x).expand(x.shape) if f["rho_mask_sequence_level"] == "true" else x).exp()
    bounds = {
        name: f[f"rho_{name}_bound"] or None for name in ("clamp_lower", "clamp_upper", "mask_lower", "mask_upper")
    }
    for name, bound in bounds.items():
        assert bound is None or (bound < 1.0 if name.endswith("lower") else bound > 1.0), "refused by its validation"
    held = rho
    if bounds["clamp_lower"] is not None or bounds["clamp_upper"] is not None:
        held = rho.clamp(min=bounds["clamp_lower"], max=bounds["clamp_upper"])
    return held * within(rho, bounds["mask_lower"], bounds["mask_upper"])


FRAMEWORKS: dict[str, tuple[Formula, dict[str, Any]]] = {
    "trl": (trl, TRL), "verl": (verl, VERL), "openrlhf": (openrlhf, OPENRLHF), "nemo-rl": (nemo, NEMO), "skyrl": (skyrl, SKYRL),
    "prime-rl": (prime, PRIME), "slime": (slime, SLIME), "areal": (areal, AREAL), "roll": (roll, ROLL), "ms-swift": (swift, SWIFT),
    "tinker": (tinker, TINKER), "tunix": (tunix, TUNIX), "liger": (liger, LIGER), "open-instruct": (open_instruct, OPEN_INSTRUCT),
}  # fmt: skip
