"""Advantages, by hand and by property."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.trainer.advantage import group_advantages, reward_statistics


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([0.5, 0.5, 0.5, 0.5], [0, 0, 0, 0]),
        ([0.1, 0.1, 0.1], [0, 0, 0]),
        ([0, 1, 0, 1], [-0.86588, 0.86588, -0.86588, 0.86588]),
        ([0, 1], [-0.70701, 0.70701]),
        ([1], [0]),
    ],
)
def test_one_group(rewards: list[float], expected: list[float]) -> None:
    """Fault 36: zero variance is exactly zero, and a partial group has its own baseline."""
    advantages = group_advantages(np.array(rewards, dtype=float), np.zeros(len(rewards), dtype=int), "group")
    assert advantages == pytest.approx(expected, abs=5e-6)
    if len(set(rewards)) == 1:
        assert not advantages.any()


REWARDS = np.array([0.0, 1.0, 3.0, 5.0, 2.0])
GROUPS = np.array([7, 7, 9, 9, 11])


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [-0.5 / (0.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4), -1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4), 0]),
        # mean 2.2, squared deviations 4.84 + 1.44 + 0.64 + 7.84 + 0.04 = 14.8, over 4 = 3.7
        ("batch", [x / (3.7**0.5 + 1e-4) for x in (-0.5, 0.5, -1, 1, 0)]),
        ("none", [-0.5, 0.5, -1, 1, 0]),
    ],
)
def test_scales(scale: str, expected: list[float]) -> None:
    assert group_advantages(REWARDS, GROUPS, scale) == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-100, 100)), min_size=1, max_size=20),
    st.sampled_from(["group", "batch", "none"]),
)
def test_centred_in_each_group_and_deaf_to_the_other_groups_mean(pairs: list[tuple[int, float]], scale: str) -> None:
    groups = np.array([g for g, _ in pairs])
    rewards = np.array([r for _, r in pairs])
    advantages = group_advantages(rewards, groups, scale)  # type: ignore[arg-type]
    for group in set(groups):
        members = groups == group
        assert abs(advantages[members].sum()) < 1e-9
        if scale != "batch":
            alone = group_advantages(rewards[members], groups[members], scale)  # type: ignore[arg-type]
            assert (advantages[members] == alone).all()


def test_statistics() -> None:
    statistics = reward_statistics(np.array([0.0, 0.0, 1.0, 3.0]), np.array([1, 1, 2, 2]))
    assert statistics["reward_mean"] == 1.0
    assert statistics["reward_std"] == pytest.approx(2**0.5)
    assert statistics["zero_variance_fraction"] == 0.5


def test_statistics_of_nothing() -> None:
    assert set(reward_statistics(np.zeros(0), np.zeros(0, dtype=int)).values()) == {None}
