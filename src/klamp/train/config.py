"""KlampConfig: TRL's GRPOConfig plus a spec. TRL options that would fight the spec are refused, never ignored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trl import GRPOConfig

from klamp.errors import UserError, check_choice
from klamp.penalties import KLReference
from klamp.presets import parse, with_aggregate
from klamp.spec import Spec
from klamp.train.vocabulary import vocabulary

DEFAULT_SPEC = "atr_grpo(delta=0.02)"
_PRECISIONS = ("auto", "float32", "bfloat16", "float16")

# TRL option -> the spec that says the same, given its value; None where no spec says it.
_BY_LOSS = {"cispo": "cispo_absolute()", "luspo": "luspo()", "vespo": "vespo()"}
_BY_LOSS |= {name: f"{name}()" for name in ("grpo", "bnpo", "dapo", "dr_grpo", "sapo")}
_SAYS: dict[str, Callable[[Any], str | None]] = {
    "loss_type": lambda v: _BY_LOSS.get(v),
    "epsilon": lambda v: f"grpo(epsilon={v})",
    "epsilon_high": lambda v: f"dapo(epsilon_high={v}) (for CISPO, whose cap is absolute: cispo_absolute(high={v}))",
    "delta": lambda v: f"dual_clip(c={v})",
    "importance_sampling_level": lambda v: "gspo()" if v == "sequence" else "grpo()",
    "sapo_temperature_pos": lambda v: f"sapo(tau_pos={v})",
    "sapo_temperature_neg": lambda v: f"sapo(tau_neg={v})",
    "use_bias_correction_kl": lambda v: f"... + kl_reference(weighted={bool(v)})",
    "entropy_coef": lambda v: f"... + entropy_bonus(coefficient={v})",
    "use_adaptive_entropy": lambda v: "... + entropy_bonus() (a fixed coefficient)",
    "top_entropy_quantile": lambda v: f"... + guard(region='nowhere', gate=entropy_below(quantile={1.0 - v!r}))",
    "off_policy_mask_threshold": lambda v: f"... + opsm(delta={v})",
    "vespo_k_pos": lambda v: f"vespo(k_pos={v})",
    "vespo_lambda_pos": lambda v: f"vespo(lambda_pos={v})",
    "vespo_k_neg": lambda v: f"vespo(k_neg={v})",
    "vespo_lambda_neg": lambda v: f"vespo(lambda_neg={v})",
    "vllm_importance_sampling_correction": lambda v: "the spec alone, with correction=False (--no-correction)",
    "vllm_importance_sampling_mode": lambda v: "... + sequence_mask(), tis(), or mis()",
    "vllm_importance_sampling_clip_max": lambda v: f"... + sequence_mask(high={v})",
    "vllm_importance_sampling_clip_min": lambda v: f"... + sequence_mask(low={v})",
    "vllm_importance_sampling_cap": lambda v: f"... + sequence_mask(high={v})",
}


@dataclass
class KlampConfig(GRPOConfig):  # type: ignore[misc]
    """Options of a run: every option of TRL's ``GRPOConfig``, and the policy loss as a spec.

    ``spec``: text of a ``klamp.Spec`` (a Spec is taken too). ``correction``: with vLLM, and no part of the spec on old/rollout, append
    TRL's default correction as ``sequence_mask(high=3.0)``. Raises UserError where a TRL option says something
    about the loss: the message gives the spec that says the same.
    """

    spec: str = field(default=DEFAULT_SPEC, metadata={"help": "policy loss, for example 'atr_grpo(delta=0.02)'"})
    correction: bool = field(
        default=True,
        metadata={"help": "append sequence_mask(high=3.0) when vLLM samples and the spec lacks a correction"},
    )

    old_states_dtype: str = field(
        default="auto",
        metadata={
            "help": "precision of the old hidden states and output matrix that exact_* measures keep: auto (the model's), bfloat16, float16, float32"
        },
    )
    old_states_offload: bool = field(
        default=False,
        metadata={"help": "keep what exact_* and topk_* measures need of the old policy in the CPU's memory"},
    )

    def __post_init__(self) -> None:
        self.resolved_spec = resolve(self)
        check_choice("old_states_dtype", self.old_states_dtype, _PRECISIONS)
        vocabulary(self.resolved_spec)  # refuses what no trainer can know of whole distributions
        self.spec = str(self.spec)
        super().__post_init__()
        self._check_windows()

    def _check_windows(self) -> None:
        rollout = self.steps_per_generation * self.num_iterations
        if rollout % self.gradient_accumulation_steps:
            raise UserError(
                f"an optimizer step of {self.gradient_accumulation_steps} micro-batches would span two rollouts of "
                f"{rollout}: its token counts are not known when it starts; set steps_per_generation to a multiple of "
                f"gradient_accumulation_steps, for example {self.gradient_accumulation_steps}"
            )

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps made from one rollout; above 1 the policy moves away from the one that sampled."""
        return int(self.steps_per_generation * self.num_iterations // self.gradient_accumulation_steps)


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    """Remember what a call said explicitly. One that gives every field (a parser's, ``replace``) says nothing by it."""

    @functools.wraps(init)
    def wrapped(self: KlampConfig, *args: Any, **kwargs: Any) -> None:
        every = sum(item.init for item in fields(self))
        object.__setattr__(self, "_said", frozenset(kwargs) if len(kwargs) < every else frozenset())
        init(self, *args, **kwargs)

    return wrapped


KlampConfig.__init__ = _noting(KlampConfig.__init__)  # type: ignore[method-assign]


def resolve(config: KlampConfig) -> Spec:
    """The spec that the run uses: parsed, with what the run supplies filled in; TRL's switches set to match it."""
    _refuse_fights(config)
    spec = parse(config.spec)
    mean = spec.mean
    if mean.kind == "sequence_sum" and mean.divisor is None:
        spec = with_aggregate(spec, replace(mean, divisor=float(config.max_completion_length)))
    ratios = {guard.ratio for guard in spec.guards} | {factor.ratio for factor in spec.factors}
    if config.use_vllm and config.correction and "old/rollout" not in ratios:
        spec = spec + parse("sequence_mask(high=3.0)")
    config.vllm_importance_sampling_correction = False
    _match_beta(config, spec)
    return spec


def _refuse_fights(config: KlampConfig) -> None:
    defaults = {item.name: item.default for item in fields(GRPOConfig)}
    for name in _SAYS:
        switched_off = name == "vllm_importance_sampling_correction" and not config.vllm_importance_sampling_correction
        said = name in getattr(config, "_said", ())
        if name in defaults and (said or getattr(config, name) != defaults[name]) and not switched_off:
            refuse(name, getattr(config, name), config.spec)


def refuse(name: str, value: Any, spec: str) -> None:
    """Raise UserError if a TRL option says something about the loss, with the spec that says the same."""
    if name in _SAYS:
        same = _SAYS[name](value)
        way = f"say it in the spec: {same}" if same else "no spec says this yet; leave the option out"
        raise UserError(f"{name}={value!r} would fight the spec {spec!r}, which decides the loss alone; {way}")


def _match_beta(config: KlampConfig, spec: Spec) -> None:
    """TRL loads the reference model exactly when beta is not 0, so beta follows the spec's KL penalty."""
    references = [penalty for penalty in spec.penalties if isinstance(penalty, KLReference)]
    wanted = references[0].beta if references else 0.0
    uses_reference = "logp_ref" in spec.needs
    if config.beta not in (0.0, wanted):
        raise UserError(
            f"beta={config.beta!r} would fight the spec {config.spec!r}; say it in the spec: "
            f"'{config.spec} + kl_reference(beta={config.beta!r})'"
        )
    config.beta = wanted or (1.0 if uses_reference else 0.0)
