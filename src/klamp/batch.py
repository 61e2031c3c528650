"""Batch: what a policy loss is computed from, checked once; and the log-ratios between its policies.

This is the one room that subtracts log-probs. Masked positions are selected away before any arithmetic that
could overflow, so nothing stored in padding can reach a loss, a gradient or a metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from klamp import scopes
from klamp.errors import UserError

ROLES = ("new", "old", "rollout", "ref")
Missing = Literal["row", "token", "raise"]


class Batch:
    """Log-probs of sampled tokens under several policies, advantages and a mask; shapes [B, T] (responses, tokens).

    ``logp_new``: under the policy being trained, with gradient. ``logp_old``: before the update. ``logp_rollout``:
    as the sampler recorded them; NaN means missing. ``logp_ref``: under the reference policy. ``advantages``: [B]
    or [B, T]. ``mask``: true where a token counts. ``entropy``: [B, T], nats. ``phi_mean``: [B, T], sum over the
    vocabulary of q^2 (log q + H), for a diagnostic alone. ``divergences``: name -> [B, T] whole-
    distribution divergences. ``group``, ``reward``: [B]. ``row``: [B], or [B, T] where several responses are packed
    into one row: an id per token, unique in the batch. ``segment``: [B, T] turn numbers.

    ``missing``: what a missing ``logp_rollout`` does: exclude the ``row`` (default), the ``token``, or ``raise``;
    ``missing_rows`` and ``missing_tokens`` count what was excluded. ``validate=False`` skips the checks of values, never those of shapes.

    Raises UserError naming the field and the first offending position. On CUDA non-finite values are counted in
    ``nonfinite`` instead, without waiting for the device; the objective reports the count with its metrics.
    """

    def __init__(
        self,
        logp_new: Float[Tensor, "B T"],
        logp_old: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        *,
        logp_rollout: Float[Tensor, "B T"] | None = None,
        logp_ref: Float[Tensor, "B T"] | None = None,
        entropy: Float[Tensor, "B T"] | None = None,
        phi_mean: Float[Tensor, "B T"] | None = None,
        divergences: Mapping[str, Float[Tensor, "B T"]] | None = None,
        group: Integer[Tensor, "B"] | None = None,
        row: Integer[Tensor, "B"] | Integer[Tensor, "B T"] | None = None,
        segment: Integer[Tensor, "B T"] | None = None,
        reward: Float[Tensor, "B"] | None = None,
        missing: Missing = "row",
        validate: bool = True,
    ) -> None:
        self.logp_new, self.logp_old = logp_new, logp_old
        self.logp_rollout, self.logp_ref = logp_rollout, logp_ref
        self.advantages, self.mask = advantages, mask
        self.entropy, self.phi_mean, self.divergences = entropy, phi_mean, dict(divergences or {})
        self.group, self.row, self.segment, self.reward = group, row, segment, reward
        self._ratios: dict[tuple[str, str, str, float], Tensor] = {}
        self.nonfinite: Int[Tensor, ""] | None = None
        self.missing_rows: Int[Tensor, ""] | None = None
        self.missing_tokens: Int[Tensor, ""] | None = None
        self._check_fields()
        for name in ("group", "row", "segment"):  # a narrow integer would overflow in a hash, or index as a mask
            value: Tensor | None = getattr(self, name)
            setattr(self, name, None if value is None else value.long())
        if missing not in ("row", "token", "raise"):
            raise UserError(f"missing={missing!r} is unknown; choose 'row', 'token' or 'raise'")
        if advantages.ndim == 1:
            self.advantages = advantages.unsqueeze(1)
        if logp_rollout is not None:
            self._apply_missing(logp_rollout, missing)
        if validate:
            self._check_values()

    @property
    def shape(self) -> tuple[int, int]:
        return self.mask.shape[0], self.mask.shape[1]

    @property
    def offers(self) -> frozenset[str]:
        """The names of the optional information that this batch carries."""
        fields = ("logp_rollout", "logp_ref", "entropy", "phi_mean", "group", "row", "segment", "reward")
        return frozenset(name for name in fields if getattr(self, name) is not None) | frozenset(
            f"divergences[{name}]" for name in self.divergences
        )

    @property
    def packed(self) -> bool:
        return self.row is not None and self.row.ndim == 2

    def logp(self, role: str) -> Float[Tensor, "B T"]:
        value: Tensor | None = getattr(self, f"logp_{role}")
        if value is None:
            raise UserError(f"the spec compares with the {role} policy: give logp_{role}= to Batch")
        return value

    def select(self, values: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Values as float64, detached, 0 at masked positions."""
        return torch.where(self.mask, values.detach().double(), 0.0)

    def log_ratio(
        self, ratio: str, scope: str = "token", reduce: str = "mean", discount: float = 1.0
    ) -> Float[Tensor, "B *T"]:
        """x = log(numerator / denominator), detached, at least float32, 0 at masked positions.

        ``scope``: the mean or the sum of x over what ``klamp.scopes`` defines, broadcastable to [B, T]; a ``group`` is
        taken over this batch alone.
        """
        key = (ratio, scope, reduce, discount)
        if key not in self._ratios:  # guards and factors ask for the same few
            if scope == "token":
                numerator, _, denominator = ratio.partition("/")
                x = _wide(self.logp(numerator)) - _wide(self.logp(denominator))
                self._ratios[key] = torch.where(self.mask, x, 0.0)
            else:
                self._ratios[key] = self.reduce(self.log_ratio(ratio), scope, reduce, discount)
        return self._ratios[key]

    def reduce(self, values: Tensor, scope: str, how: str = "mean", discount: float = 1.0) -> Tensor:
        """The mean, sum or max of values (0 where masked) over the scope of each token; see ``klamp.scopes``."""
        return scopes.reduce(self, values, scope, how, discount)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sums over each response, broadcastable to [B, T]: [B, 1], or [B, T] where rows are packed."""
        return scopes.totals(self, values, "sequence")

    @cached_property
    def responses(self) -> tuple[int, Int[Tensor, "B T"]]:
        """The number of responses, and which one each position belongs to."""
        if not self.packed:
            rows = torch.arange(self.shape[0], device=self.mask.device)
            return self.shape[0], rows.unsqueeze(1).expand(self.shape)
        identity, index = torch.unique(self.row, return_inverse=True)
        return identity.numel(), index

    @property
    def first(self) -> Bool[Tensor, "B T"]:
        """The first unmasked token of each response."""
        return self.mask & (scopes.positions(self) == 0)

    def restricted(self, mask: Bool[Tensor, "B T"]) -> Batch:
        """The same batch with fewer unmasked tokens."""
        other = copy(self)
        other.mask, other._ratios = mask, {}
        return other

    def lottery(self, seed: int, step: int) -> Float[Tensor, "B T"]:
        """A number in [0, 1) per token, a hash of (seed, step, row, position): the same on any rank and in any order."""
        assert self.row is not None
        row = self.row if self.row.ndim == 2 else self.row.unsqueeze(1)
        value = _mix(torch.full_like(row, seed & 0x7FFFFFFF) * 0x10001 + step)
        value = _mix(_mix(value + row) + scopes.positions(self))
        return (value >> 11 & 0x1FFFFFFFFFFFFF).double() / 2.0**53

    def sequence_count(self) -> tuple[Int[Tensor, ""], Int[Tensor, ""]]:
        """The numbers of responses with an unmasked token, and of all; a packed one without a token is not seen."""
        filled = self._count_sequences(self.mask)
        return filled, filled if self.packed else torch.tensor(self.shape[0], device=self.mask.device)

    def _count_sequences(self, flags: Tensor) -> Int[Tensor, ""]:
        """The number of responses with a true flag."""
        if not self.packed:
            return flags.any(dim=1).sum()
        slots, index = self.responses
        flagged = torch.zeros(slots, dtype=torch.int64, device=flags.device)
        return (flagged.index_add(0, index.reshape(-1), flags.expand(self.shape).reshape(-1).to(torch.int64)) > 0).sum()

    # --- checks ---------------------------------------------------------------------------------------------

    def _check_fields(self) -> None:
        mask = self.mask
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise UserError(f"mask must be a tensor of shape [B, T]; got {_describe(mask)}")
        if mask.dtype != torch.bool:
            raise UserError(f"mask must be boolean; got {mask.dtype}: write mask.bool()")
        b, t = self.shape
        either = ((b,), (b, t))
        shapes: dict[str, tuple[tuple[int, ...], ...]] = {
            **{f"logp_{role}": ((b, t),) for role in ROLES},
            "advantages": either, "entropy": ((b, t),), "phi_mean": ((b, t),), "segment": ((b, t),), "row": either,
            "group": ((b,),), "reward": ((b,),),
        }  # fmt: skip
        values = {name: getattr(self, name) for name in shapes}
        values |= {f"divergences[{name}]": value for name, value in self.divergences.items()}
        for name, value in values.items():
            if value is None and name not in ("logp_new", "logp_old", "advantages"):
                continue
            allowed = shapes.get(name, ((b, t),))
            if not isinstance(value, Tensor) or tuple(value.shape) not in allowed:
                wanted = " or ".join(str(list(shape)) for shape in allowed)
                raise UserError(
                    f"{name} must be a tensor of shape {wanted} (mask is [{b}, {t}]); got {_describe(value)}"
                )
            integral = name in ("group", "row", "segment")
            if integral == value.is_floating_point() or value.dtype == torch.bool:
                kind = "integer" if integral else "floating-point"
                raise UserError(f"{name} must be {kind}; got {value.dtype}")
            if value.device != mask.device:
                raise UserError(f"{name} is on {value.device}, mask on {mask.device}; put both on one device")

    def _apply_missing(self, rollout: Tensor, missing: Missing) -> None:
        gone = torch.isnan(rollout) & self.mask
        if missing == "raise":
            _raise_first("logp_rollout", rollout, gone)
        elif missing == "token":
            self.missing_tokens = gone.sum()
            self.mask = self.mask & ~gone
        else:
            broken = self.sequence_sum(gone) > 0
            self.missing_rows = self._count_sequences(broken)
            self.mask = self.mask & ~broken

    def _check_values(self) -> None:
        counted: list[Tensor] = []
        names = ["logp_new", "logp_old", "logp_rollout", "logp_ref", "advantages", "entropy", "phi_mean"]
        for name in names:
            value: Tensor | None = getattr(self, name)
            if value is None:
                continue
            bad = ~torch.isfinite(value.detach()) & self.mask
            if bad.device.type == "cpu":
                if bool(bad.any()):
                    _raise_first(name, value.expand(self.shape), bad)
            else:
                counted.append(bad.sum())
        if counted:
            self.nonfinite = torch.stack(counted).sum()


def segments(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Turn numbers from the mask: each run of unmasked tokens is a turn (tool output between them is masked)."""
    starts = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return starts.cumsum(dim=1)


def _mix(value: Tensor) -> Tensor:
    """A bijection of int64 that scatters neighbours (the finaliser of splitmix64, modulo 2^64)."""
    value = value + -7046029254386353131
    value = (value ^ (value >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    value = (value ^ (value >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return value ^ (value >> 31 & 0x1FFFFFFFF)


def _wide(logp: Tensor) -> Tensor:
    value = logp.detach()
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def _describe(value: object) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _raise_first(name: str, value: Tensor, bad: Tensor) -> None:
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        many = int(bad.sum())
        raise UserError(
            f"{name}[{row}, {column}] = {float(value.detach()[row, column])} at an unmasked position ({many} in all); "
            "mask the position, or find out where the forward pass broke"
        )
