"""The vocabulary in the trainer: log-probs by ``klamp.kernels`` in TRL's forward pass, and the divergences that a spec needs.

TRL runs the backbone, gathers the output matrix where FSDP2 or ZeRO-3 has sharded it (``DTensor.full_tensor``,
``GatheredParameters``), and hands hidden states and matrix of the completions' tokens to one function; it is that call which
is answered here. So the spec's divergences see exactly what the log-probs are made of, and no module is called twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl.trainer import utils as trl_utils

from klamp.errors import UserError
from klamp.kernels import TokenLogProbs, bucket_divergences, divergences, named_memory, partition, token_logprobs
from klamp.penalties import DivergencePenalty
from klamp.spec import Spec
from klamp.survey import guards_of
from klamp.whole import TOP_K, split

_CALL = [
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
]
_LESS = "set a smaller per_device_train_batch_size (with more gradient_accumulation_steps), or a shorter max_completion_length"
_KEEP = (
    "the old policy's hidden states and output matrix do not fit: set old_states_offload=true, old_states_dtype=bfloat16, a smaller "
    "per_device_train_batch_size, or take a topk_* measure, which keeps a few numbers per token"
)
_OLD = "klamp_old_"  # what a rollout keeps of the old policy, per token of each completion


@dataclass(frozen=True)
class Seen:
    """One call of the output layer: tokens in the order of the completions' masks."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor
    options: dict[str, Any]
    found: TokenLogProbs


@dataclass
class Vocabulary:
    """What a spec needs of whole distributions: ``exact`` and ``topk`` kinds, ``top_k`` tokens, and whether D gets a gradient.

    ``dtype``, ``offload``: how the old policy's hidden states are kept (the exact kinds alone need them).
    """

    exact: dict[str, str]
    topk: dict[str, str]
    top_k: int
    differentiable: bool
    dtype: torch.dtype | None = None
    offload: bool = False
    at: Tensor | None = None
    seen: list[Seen] = field(default_factory=list)
    old_head: tuple[Tensor, Tensor | None] | None = None

    @property
    def offers(self) -> frozenset[str]:
        return frozenset(f"divergences[{name}]" for name in {**self.exact, **self.topk})

    # --- in TRL's forward pass ----------------------------------------------------------------------------------

    @contextmanager
    def watching(self, at: Tensor | None = None) -> Iterator[None]:
        """TRL's output layer is answered by this object; ``at`` [n, K]: tokens whose log-probs are wanted too."""
        self.seen, self.at = [], at
        own = trl_utils._ChunkedLogProbFunction, trl_utils._use_triton
        trl_utils._ChunkedLogProbFunction, trl_utils._use_triton = self, lambda device: True  # only unmasked tokens
        try:
            with named_memory(_LESS):
                yield
        finally:
            trl_utils._ChunkedLogProbFunction, trl_utils._use_triton = own

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, temperature: float, chunk: int,
        softcap: float | None, scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """What TRL asks of its own function: log-prob and entropy of each token."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "scale": scale}
        top_k = self.top_k if self.topk and self.at is None else None
        found = token_logprobs(
            hidden, weight, ids, bias, entropy="entropy" in outputs, phi="entropy" in outputs, top_k=None if top_k is None else min(top_k, len(weight)), at=self.at,
            **options,
        )  # fmt: skip
        self.seen.append(Seen(hidden, weight, bias, ids, options, found))
        return found.logp, found.entropy, None, None, None

    # --- the old policy ---------------------------------------------------------------------------------------------

    def keep_old(self, mask: Tensor) -> dict[str, Tensor]:
        """What is kept of the calls just seen, for the tokens of ``mask`` [B, T]: one entry per token, 0 elsewhere."""
        with named_memory(_KEEP):
            return self._keep_old(mask)

    def _keep_old(self, mask: Tensor) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        if self.topk:
            kept |= {name: self._joined(name) for name in ("logp", "top_ids", "top_logp", "tail_logp")}
        if self.exact:
            kept["lse"] = self._joined("lse")
            hidden = torch.cat([seen.hidden.detach() for seen in self.seen])
            kept["hidden"] = hidden if self.dtype is None else hidden.to(self.dtype)
            self.old_head = self._copied(self.seen[0])
        where = torch.device("cpu") if self.offload else mask.device
        return {_OLD + name: _spread(value, mask).to(where) for name, value in kept.items()}

    def _joined(self, name: str) -> Tensor:
        return torch.cat([getattr(seen.found, name) for seen in self.seen])

    def _copied(self, seen: Seen) -> tuple[Tensor, Tensor | None]:
        """The output matrix as it was; itself where it is not trained, so that it never changes."""
        if not seen.weight.requires_grad:
            return seen.weight.detach(), None if seen.bias is None else seen.bias.detach()
        kind = seen.weight.dtype if self.dtype is None else self.dtype
        device = "cpu" if self.offload else seen.weight.device
        bias = None if seen.bias is None else seen.bias.detach().to(device, kind, copy=True)
        return seen.weight.detach().to(device, kind, copy=True), bias

    def phi_mean(self, mask: Tensor) -> Tensor | None:
        """sum q^2 (log q + H) of the call just seen, [B, T]."""
        (seen,) = self.seen
        return None if seen.found.phi_mean is None else _spread(seen.found.phi_mean, mask)

    def fields(self, inputs: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
        """What the batch gets: the divergences, and what the exploration metric reads."""
        return {"divergences": self.divergences(inputs, mask), "phi_mean": self.phi_mean(mask)}

    # --- divergences ------------------------------------------------------------------------------------------------

    def old_top(self, inputs: Mapping[str, Any], mask: Tensor) -> Tensor | None:
        """The old policy's likeliest tokens of the tokens of ``mask``, [n, K]."""
        ids = inputs.get(f"{_OLD}top_ids")
        return None if ids is None else ids.to(mask.device)[mask]

    def divergences(self, inputs: Mapping[str, Any], mask: Tensor) -> dict[str, Tensor]:
        """D(old, new) by name, [B, T], of the call just seen; 0 where there is no separate old policy."""
        if not any(name.startswith(_OLD) for name in inputs):
            return {name: torch.zeros(mask.shape, device=mask.device) for name in {**self.exact, **self.topk}}
        (seen,) = self.seen
        old = {
            name.removeprefix(_OLD): value.to(mask.device)[mask]
            for name, value in inputs.items()
            if name.startswith(_OLD)
        }
        found = self._topk(seen, old) if self.topk else {}
        if self.exact:
            found |= self._exact(seen, old)
        return {name: _spread(value, mask) for name, value in found.items()}

    def _topk(self, seen: Seen, old: dict[str, Tensor]) -> dict[str, Tensor]:
        new = seen.found
        assert new.at_logp is not None
        assert new.tail_logp is not None
        logq = partition(new.logp.detach(), seen.ids, new.at_logp, old["top_ids"], new.tail_logp)
        logp = partition(old["logp"], seen.ids, old["top_logp"], old["top_ids"], old["tail_logp"])
        values = bucket_divergences(logq, logp, tuple(self.topk.values()))
        return {name: values[kind].to(logq.dtype) for name, kind in self.topk.items()}

    def _exact(self, seen: Seen, old: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self.old_head is not None
        assert seen.found.lse is not None
        weight, bias = (one if one is None else one.to(seen.weight.device, seen.weight.dtype) for one in self.old_head)
        assert weight is not None
        hidden = old["hidden"].to(seen.hidden.dtype)
        rounded = self.dtype is not None and self.dtype != seen.hidden.dtype  # then the log-normaliser is another
        with named_memory(_KEEP), torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            values = divergences(
                seen.hidden, seen.weight, hidden, weight, tuple(self.exact.values()), lse_new=seen.found.lse,
                lse_old=None if rounded else old["lse"], bias_new=seen.bias, bias_old=bias, **seen.options,
            )  # fmt: skip
        return {name: values[kind] for name, kind in self.exact.items()}


def vocabulary(spec: Spec, dtype: str = "auto", offload: bool = False) -> Vocabulary | None:
    """What the spec needs of whole distributions, or None where it needs nothing of them."""
    names = sorted(need[len("divergences[") : -1] for need in spec.needs if need.startswith("divergences["))
    known = {name: found for name in names if (found := split(name)) is not None}
    if not known:
        return None
    _check_call()
    for _, guard in guards_of(spec):
        if getattr(guard.region, "measure", None) in known and guard.ratio != "new/old":
            raise UserError(
                f"{spec} takes {guard.region.measure} of {guard.ratio}: over the vocabulary the trainer has new/old alone; "  # type: ignore[union-attr]
                "the sampler records no other tokens' log-probs"
            )
    sizes = [size for _, guard in guards_of(spec) if (size := getattr(guard.region, "top_k", None)) is not None]
    return Vocabulary(
        {name: kind.name for name, (where, kind) in known.items() if where == "exact"},
        {name: kind.name for name, (where, kind) in known.items() if where == "topk"},
        sizes[0] if sizes else TOP_K,
        any(isinstance(penalty, DivergencePenalty) for penalty in spec.penalties),
        None if dtype == "auto" else getattr(torch, dtype),
        offload,
    )


def _check_call() -> None:
    """Refuse a TRL whose output layer is called in another way than the one answered here."""
    own = getattr(trl_utils, "_ChunkedLogProbFunction", None)
    found = [] if own is None else [*inspect.signature(own.forward).parameters][1:]
    if found != _CALL or not hasattr(trl_utils, "_use_triton"):
        raise UserError(
            "divergences over the vocabulary need the output layer of TRL 1.16; pip install 'trl>=1.16,<1.17'"
        )


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """Values of the unmasked tokens at their places [B, T, ...], 0 elsewhere."""
    return values.new_zeros((*mask.shape, *values.shape[1:])).index_put(mask.nonzero(as_tuple=True), values)
