"""Advantages of group-relative policy optimisation (GRPO), pure, in float64, or of a function of the user's.

That one is called as `advantage(rewards=..., groups=...)`, float64 [N] and int64 [N] in the canonical order, and gives
back [N] finite numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from laminar.errors import UserCodeError
from laminar.user_code import failed, load_function

Float64 = NDArray[np.float64]
Scale = Literal["group", "batch", "none"]

STD_EPSILON = 1e-4


def group_advantages(rewards: Float64, group_ids: NDArray[np.int64], scale: Scale) -> Float64:
    """Reward of each sample against the mean of its group.

    The standard deviation (n - 1) is that of the group, that of the whole batch, or absent (TRL's three
    choices; "none" is Dr. GRPO). A group counts the members it has, so a partial group has its own baseline.

    Args:
        rewards: [N]
        group_ids: [N], in any order
        scale: what the centred reward is divided by

    Returns:
        [N]; exactly 0 for all members of a group whose rewards are equal, so also for a group of one.
    """
    advantages = np.zeros(len(rewards))
    batch_std = _std(rewards)
    for group in np.unique(group_ids):
        members = group_ids == group
        own = rewards[members]
        if own.max() == own.min():
            continue
        centred = own - own.mean()
        if scale == "none":
            advantages[members] = centred
        else:
            advantages[members] = centred / ((_std(own) if scale == "group" else batch_std) + STD_EPSILON)
    return advantages


@dataclass(frozen=True, slots=True)
class UserAdvantage:
    """Advantages by a function of the user's."""

    spec: str
    function: Callable[..., Any]

    @classmethod
    def load(cls, spec: str) -> UserAdvantage:
        """Raises UserCodeError."""
        return cls(spec, load_function(spec, "train.advantage"))

    def __call__(self, rewards: Float64, groups: NDArray[np.int64]) -> Float64:
        """[N]. Raises UserCodeError for what can't be advantages."""
        try:
            advantages = np.asarray(self.function(rewards=rewards.copy(), groups=groups.copy()), dtype=np.float64)
        except Exception as cause:  # the user's code
            raise failed(self.spec, cause) from cause
        if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
            raise UserCodeError(
                "returned something that is not an advantage a sample",
                where=f"`{self.spec}`",
                expected=f"{len(rewards)} finite numbers",
                got=f"shape {list(advantages.shape)}, {int(np.isfinite(advantages).sum())} finite",
            )
        return advantages


def reward_statistics(rewards: Float64, group_ids: NDArray[np.int64]) -> dict[str, float | None]:
    """`reward_mean`, `reward_std` (n - 1, over the batch) and the fraction of groups with equal rewards.

    Args:
        rewards: [N]
        group_ids: [N]

    Returns:
        None for each of them in an empty batch.
    """
    if len(rewards) == 0:
        return {"reward_mean": None, "reward_std": None, "zero_variance_fraction": None}
    flat = [np.ptp(rewards[group_ids == group]) == 0 for group in np.unique(group_ids)]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": _std(rewards),
        "zero_variance_fraction": float(np.mean(flat)),
    }


def _std(values: Float64) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
