"""Rewards: math answers, exact and numeric match, choices, reasoning-gym tasks, shaping, a user's own, and their sums.

A reward is a TRL reward function ``f(prompts, completions, **columns) -> list[float | None]``; None means
unscored: the row is excluded, which is not the same as wrong. Completions are strings or lists of chat
messages. Nothing heavy is imported before a reward needs it. Texts of a model are handed to math-verify,
reasoning-gym and regular expressions only inside killable processes, because all of them can hang on one answer.
"""

from klamp.rewards.base import (
    BUDGET,
    REASONS,
    TIME_LIMIT,
    Reward,
    RewardFunction,
    Verdict,
    completion_text,
    verdict_counts,
)
from klamp.rewards.gym import GYM_HELDOUT_SIZE, GYM_PREFIX, reasoning_gym_task
from klamp.rewards.language import FORMS, REWARDS, reward
from klamp.rewards.math import verify
from klamp.rewards.own import guarded
from klamp.worker import WORKER

__all__ = [
    "BUDGET",
    "FORMS",
    "GYM_HELDOUT_SIZE",
    "GYM_PREFIX",
    "REASONS",
    "REWARDS",
    "TIME_LIMIT",
    "WORKER",
    "Reward",
    "RewardFunction",
    "Verdict",
    "completion_text",
    "guarded",
    "reasoning_gym_task",
    "reward",
    "verdict_counts",
    "verify",
]
