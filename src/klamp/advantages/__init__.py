"""Advantages: the signal of each response from the rewards of its group; a value of the run, not of the spec.

An estimator is a value, ``Estimator(baseline=, scale=, eps=, ...)``; the published ones, with the constants of each
framework, are ``estimator("grpo", framework="trl")``. Advantages belong to a whole generation batch: they are
computed before it is cut into micro-batches.
"""

from klamp.advantages.estimators import Advantages, Estimator, Whiten, group_advantages
from klamp.advantages.groups import BASELINES, SCALES, Groups
from klamp.advantages.named import ESTIMATORS, Named, estimator

__all__ = [
    "BASELINES",
    "ESTIMATORS",
    "SCALES",
    "Advantages",
    "Estimator",
    "Groups",
    "Named",
    "Whiten",
    "estimator",
    "group_advantages",
]
