"""Random batches for the laws: every layout that a trainer produces, made from what a spec needs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from klamp.advantages import group_advantages
from klamp.batch import Batch
from klamp.binary import BINARY, binary_bounds
from klamp.conditions import Budget, Distance
from klamp.errors import UserError
from klamp.guards import Guard
from klamp.objective import LossOutput, Objective
from klamp.radii import number
from klamp.regions import Region
from klamp.spec import Spec
from klamp.stats import Stats
from klamp.survey import guards_of

# From the smallest to the largest, so that a broken law is shown on the smallest batch that breaks it.
KINDS = ("one token", "all masked", "one-token rows", "ragged rows", "packed rows", "per-token advantages",
         "tied rewards", "wide")  # fmt: skip
_SHAPES = {"one token": (1, 1), "all masked": (2, 3), "one-token rows": (4, 1), "ragged rows": (4, 6),
           "packed rows": (3, 8), "per-token advantages": (4, 6), "tied rewards": (8, 4), "wide": (12, 16)}  # fmt: skip
_FIELDS = frozenset({"logp_rollout", "logp_ref", "entropy", "group", "row", "segment", "reward"})
_DIVERGENCE = re.compile(r"divergences\[(.+)\]")
ROLES = ("logp_new", "logp_old", "logp_rollout", "logp_ref")
LEAVES = ("logp_new", "entropy")  # what the loss may be differentiated by, and divergences over the vocabulary
B = TypeVar("B", bound=Batch)


@dataclass(frozen=True)
class Draw:
    """The fields of one batch by their names in ``Batch``, divergences as ``divergences[name]``."""

    label: str
    fields: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    @property
    def mask(self) -> Tensor:
        return self.fields["mask"]

    @property
    def shape(self) -> tuple[int, int]:
        return self.mask.shape[0], self.mask.shape[1]

    @property
    def packed(self) -> bool:
        return "row" in self.fields and self.fields["row"].ndim == 2

    @property
    def advantages(self) -> Tensor:
        """[B, T], 0 at masked positions."""
        value = self.fields["advantages"]
        return torch.where(self.mask, value if value.ndim == 2 else value.unsqueeze(1), 0.0)

    def having(self, label: str, fields: dict[str, Tensor]) -> Draw:
        """The draw with other fields, and what changed in its label."""
        return Draw(f"{self.label}, {label}" if label else self.label, self.fields | fields)

    def each(self, change: Callable[[str, Tensor], Tensor], label: str = "") -> Draw:
        return self.having(label, {name: change(name, value) for name, value in self.fields.items()})

    def cast(self, dtype: torch.dtype) -> Draw:
        return self.each(lambda name, value: value.to(dtype) if value.is_floating_point() else value)

    def rows(self, index: Tensor, label: str = "") -> Draw:
        return self.each(lambda name, value: value[index], label)

    def build(self, kind: Callable[..., B]) -> B:
        plain = {name: value for name, value in self.fields.items() if not _DIVERGENCE.fullmatch(name)}
        named = {found[1]: self.fields[name] for name in self.fields if (found := _DIVERGENCE.fullmatch(name))}
        return kind(**plain, divergences=named)

    def leaves(self) -> tuple[Draw, list[Tensor]]:
        """The same draw with fresh leaves of autograd, and those leaves."""
        names = [name for name in self.fields if name in LEAVES or _DIVERGENCE.fullmatch(name)]
        fresh = {name: self.fields[name].detach().clone().requires_grad_() for name in names}
        return self.having("", fresh), list(fresh.values())


class Outcome(NamedTuple):
    """What an objective said of a draw; ``grads``: of the loss by each leaf, zeros where it does not depend on it."""

    out: LossOutput
    grads: list[Tensor]


def run(objective: Objective, draw: Draw, stats: Stats | None = None, state: dict[str, float] | None = None) -> Outcome:
    fresh, leaves = draw.leaves()
    out = objective(fresh.build(Batch), stats, state)
    found = torch.autograd.grad(out.loss, leaves, allow_unused=True)
    return Outcome(out, [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)])


# --- making ---------------------------------------------------------------------------------------------------


def check_needs(spec: Spec) -> None:
    """Refuse a spec that reads what no batch can be made with."""
    unknown = sorted(need for need in spec.needs if need not in _FIELDS and not _DIVERGENCE.fullmatch(need))
    if unknown:
        raise UserError(
            f"{spec} needs {', '.join(unknown)}, which is no field of Batch; "
            f"possible: {', '.join(sorted(_FIELDS))}, divergences[name]"
        )


def make(spec: Spec, kind: str, generator: torch.Generator) -> Draw:
    """A float64 draw: log-ratios as wide as the spec's regions, so that some tokens are cut and some are kept."""
    shape = _SHAPES[kind]
    mask = _mask(kind, shape, generator)
    fields: dict[str, Tensor] = {"mask": mask, **_policies(spec, shape, generator)}
    group = (torch.arange(shape[0]) // 2) % 3  # rows 2i and 2i + 1 share a prompt, so that they can be packed
    reward = torch.randint(0, 2, (shape[0],), generator=generator).double()
    reward[group == 0] = 1.0
    fields["advantages"] = _advantages(kind, shape, group, reward, generator)
    if kind == "packed rows":
        inside = torch.randint(1, shape[1], (shape[0], 1), generator=generator)
        fields["row"] = 2 * torch.arange(shape[0]).unsqueeze(1) + (torch.arange(shape[1]) >= inside)
    optional: dict[str, Tensor] = {
        "group": group,
        "reward": reward,
        "row": torch.arange(shape[0]),
        "entropy": torch.rand(shape, generator=generator, dtype=torch.float64) * 3.0,
        "segment": torch.arange(shape[1]).expand(shape) // 2,
    }
    optional |= distances(spec, shape, generator)
    for need in sorted(spec.needs - fields.keys()):
        fields[need] = optional[need] if need in optional else _normal(shape, generator).abs()
    return Draw(kind, fields)


def every_guard(spec: Spec) -> list[Guard]:
    """The guards of the policy term, those that a penalty is on, and those that a selecting gate spares."""
    found = [guard for _, guard in guards_of(spec)]
    spared = [getattr(guard.gate, "unless", None) for guard in found]
    return list(dict.fromkeys([*found, *(guard for guard in spared if guard is not None)]))


def widths(spec: Spec) -> list[float]:
    """The finite distances of the spec's bounds from w = 1, in log space, within what a batch can show."""
    bounds = [abs(bound) for guard in every_guard(spec) for bound in _bounds(guard.region)]
    return [min(max(bound, 1e-6), 2.0) for bound in bounds if 0.0 < bound < math.inf]


@lru_cache(maxsize=64)
def _bounds(region: Any) -> tuple[float, ...]:
    if isinstance(region, Budget):
        region = Region(region.measure, region.budget, region.budget)
    if isinstance(region, Region):
        return region.log_low, region.log_high
    radii = [number(getattr(region, f"radius_{side}", math.inf)) for side in ("low", "high")]
    if getattr(region, "measure", None) not in BINARY:
        return ()
    return binary_bounds(region.measure, 0.4, radii[0])[0], binary_bounds(region.measure, 0.4, radii[1])[1]


def distances(spec: Spec, shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Divergences over the vocabulary, about as large as the radii that bound them."""
    found = {}
    for guard in every_guard(spec):
        name = f"divergences[{getattr(guard.region, 'measure', None)}]"
        if isinstance(guard.region, Distance) and name in spec.needs:
            radii = [number(guard.region.radius_low), number(guard.region.radius_high)]
            size = next((radius for radius in radii if 0.0 < radius < math.inf), 1.0)
            found[name] = size * _normal(shape, generator).abs() * 1.5
    for name in sorted(spec.needs - found.keys()):
        if _DIVERGENCE.fullmatch(name):
            found[name] = 0.03 * _normal(shape, generator).abs()
    return found


def _policies(spec: Spec, shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Log-probs below 0 whose ratios new/old, old/rollout and ref/old are a row's drift plus a token's."""
    scales = [*widths(spec), 0.3]

    def drift() -> Tensor:
        scale = scales[int(torch.randint(0, len(scales), (), generator=generator))]
        return scale * (_normal((shape[0], 1), generator) + _normal(shape, generator))

    new, rollout, ref = drift(), -drift(), drift()
    top = torch.stack([new, rollout, ref, torch.zeros_like(new)]).amax(dim=0)
    old = -0.05 - 3.0 * torch.rand(shape, generator=generator, dtype=torch.float64) - top
    found = {"logp_new": old + new, "logp_old": old, "logp_rollout": old + rollout, "logp_ref": old + ref}
    return {name: value for name, value in found.items() if name in spec.needs or name in ("logp_new", "logp_old")}


def _mask(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    if kind == "all masked":
        return torch.zeros(shape, dtype=torch.bool)
    if kind in ("one token", "one-token rows"):
        mask = torch.ones(shape, dtype=torch.bool)
        mask[2:3] = False
        return mask
    length = torch.randint(0, shape[1] + 1, (shape[0], 1), generator=generator)
    length[0], length[1] = shape[1], 1
    length[2:3] = 0 if kind != "packed rows" else shape[1]
    start = torch.randint(0, 2, (shape[0], 1), generator=generator) * (length > 2)
    column = torch.arange(shape[1])
    holes = torch.rand(shape, generator=generator) < (0.15 if kind in ("ragged rows", "packed rows") else 0.0)
    return (column >= start) & (column < length) & ~holes


def _advantages(kind: str, shape: tuple[int, int], group: Tensor, reward: Tensor, generator: torch.Generator) -> Tensor:
    if kind == "tied rewards":
        return group_advantages(reward, group).values
    per_token = kind in ("per-token advantages", "packed rows")
    value = _normal(shape if per_token else shape[:1], generator)
    zero = torch.rand(value.shape, generator=generator) < 0.2
    return value if kind in ("one token", "one-token rows") else torch.where(zero, 0.0, value)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# --- the same responses laid out differently ------------------------------------------------------------------


def padded(draw: Draw, left: int, right: int, generator: torch.Generator) -> Draw:
    """Masked columns on either side, filled with noise."""
    rows, columns = draw.shape

    def widen(name: str, value: Tensor) -> Tensor:
        if value.ndim == 1:
            return value
        wide = value.new_zeros((rows, left + columns + right))
        if value.is_floating_point():
            wide = (10.0 * torch.randn(wide.shape, generator=generator)).to(value.dtype)
        elif name != "mask":  # ids: the padding belongs to the nearest response
            wide[:, :left], wide[:, left + columns :] = value[:, :1], value[:, -1:]
        wide[:, left : left + columns] = value
        return wide

    return draw.each(widen, f"{left} columns of padding left, {right} right")


def packed(draw: Draw) -> Draw:
    """Rows 2i and 2i + 1 side by side in one row."""
    rows, columns = draw.shape
    half = rows // 2

    def join(name: str, value: Tensor) -> Tensor:
        if name == "advantages":
            value = draw.advantages
        return value[::2] if value.ndim == 1 else value.reshape(half, 2 * columns)

    row = torch.arange(rows).repeat_interleave(columns).reshape(half, 2 * columns)
    return draw.each(join).having("packed in pairs", {"row": row})


def renamed(draw: Draw, names: Collection[str]) -> Draw:
    """Other ids for the same groups or responses."""

    def rename(name: str, value: Tensor) -> Tensor:
        return value.mul(-7).add(101) if name in names else value

    return draw.each(rename, f"{' and '.join(names)} ids renamed")


def poisoned(draw: Draw, values: list[float], generator: torch.Generator) -> Draw:
    """Every masked position of every floating-point field holds one of ``values``."""
    choices = torch.tensor(values, dtype=torch.float64)

    def poison(name: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        pick = torch.randint(0, len(values), value.shape, generator=generator)
        hidden = ~draw.mask if value.ndim == 2 else ~draw.mask.any(dim=1)
        return torch.where(hidden, choices.to(value.dtype)[pick], value)

    return draw.each(poison, f"masked positions = {', '.join(map(str, values))}")
