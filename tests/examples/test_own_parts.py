"""The example of a sampler, an advantage and a loss of one's own, as the run calls them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from laminar.control.accounts import Group, Sample
from laminar.data.samplers import make_order
from laminar.errors import UserCodeError
from laminar.trainer.advantage import UserAdvantage
from laminar.trainer.loss import LossSettings, UserLoss, policy_loss
from laminar.types import SampleId, Version

PARTS = Path(__file__).parents[2] / "examples" / "own_parts" / "parts.py"


def make_group(id_: int, version: int, order: int, *rewards: float | None) -> Group:
    samples = [
        Sample(SampleId(id_, i), "scored" if r is not None else "dropped", reward=r, length=5)
        for i, r in enumerate(rewards)
    ]
    return Group(id_, "train", id_, Version(0, version), None, samples, "buffered", buffered_order=order)


GROUPS = [make_group(1, 3, 2, 0.5, None), make_group(2, 5, 0, 1.0), make_group(3, 3, 1, 0.0, 1.0)]


def test_a_sampler_orders_groups_it_sees_in_the_order_they_were_buffered() -> None:
    assert [group.id for group in make_order(f"{PARTS}:youngest_first")(GROUPS)] == [2, 3, 1]
    assert [group.id for group in make_order("fifo")(GROUPS)] == [2, 3, 1]
    assert [group.id for group in make_order("fifo")(GROUPS[::-1])] == [2, 3, 1]


SAMPLERS = """
def sees(groups):
    assert [(g.id, g.version, g.rewards, g.response_tokens) for g in groups] == [
        (2, 5, (1.0,), (5,)), (3, 3, (0.0, 1.0), (5, 5)), (1, 3, (0.5,), (5,))
    ]
    return reversed(groups)
def loses(groups):
    return groups[1:]
def doubles(groups):
    return [*groups, groups[0]]
def fails(groups):
    return groups[99]
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loses", "must give back each group once.*\n  got: groups 3, 1"),
        ("doubles", "must give back each group once"),
        ("fails", "failed\n  got: IndexError: list index out of range"),
    ],
)
def test_a_sampler_can_only_order(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "own.py").write_text(SAMPLERS)
    assert [group.id for group in make_order(f"{tmp_path}/own.py:sees")(GROUPS)] == [1, 3, 2]
    with pytest.raises(UserCodeError, match=rf"(?s)own.py:{name}`: .*{expected}"):
        make_order(f"{tmp_path}/own.py:{name}")(GROUPS)


def test_leave_one_out() -> None:
    rewards, groups = np.array([0.0, 1.0, 1.0, 5.0]), np.array([0, 0, 0, 1])
    advantages = UserAdvantage.load(f"{PARTS}:leave_one_out")(rewards, groups)
    assert advantages == pytest.approx([-1.0, 0.5, 0.5, 0.0])


ADVANTAGES = """
def short(rewards, groups):
    return rewards[1:]
def endless(rewards, groups):
    return rewards / 0.0
def fails(rewards, groups):
    raise ValueError("no baseline")
def spoils(rewards, groups):
    rewards[:] = 0
    return rewards + 1
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("short", "expected: 2 finite numbers\n  got: shape \\[1\\]"),
        ("endless", "expected: 2 finite numbers"),
        ("fails", "got: ValueError: no baseline"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_what_is_no_advantage(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "own.py").write_text(ADVANTAGES)
    rewards, groups = np.array([1.0, 2.0]), np.array([0, 0])
    with pytest.raises(UserCodeError, match=rf"(?s)own.py:{name}`: .*{expected}"):
        UserAdvantage.load(f"{tmp_path}/own.py:{name}")(rewards, groups)
    UserAdvantage.load(f"{tmp_path}/own.py:spoils")(rewards, groups)
    assert rewards.tolist() == [1.0, 2.0]


def test_truncated_reinforce() -> None:
    """Weights of 1 and of the cap 2, a masked token with garbage in it, and nothing to clip."""
    behaviour = torch.tensor([-1.0, -9.0, float("nan")])
    new = torch.tensor([-1.0, -1.0, float("inf")], requires_grad=True)
    mask, advantage = torch.tensor([True, True, False]), torch.tensor([1.0, -1.0, 1.0])
    loss, sums = policy_loss(
        new,
        new.detach(),
        behaviour,
        mask,
        advantage,
        torch.ones(3),
        LossSettings(),
        token_loss=UserLoss.load(f"{PARTS}:truncated_reinforce"),
    )
    loss.backward()
    assert loss.item() == pytest.approx(1 * 1.0 - 2 * 1.0)
    assert new.grad is not None and new.grad.tolist() == [-1.0, 2.0, 0.0]
    assert "clipped" not in sums and int(sums["tokens"]) == 2


LOSSES = """
def scalar(new, **rest):
    return new.sum()
def number(new, **rest):
    return 0.0
"""


@pytest.mark.parametrize(("name", "got"), [("scalar", r"shape \[\]"), ("number", "float")])
def test_what_is_no_loss(tmp_path: Path, name: str, got: str) -> None:
    (tmp_path / "own.py").write_text(LOSSES)
    with pytest.raises(UserCodeError, match=rf"(?s)own.py:{name}`: .*expected: a tensor of shape \[2\]\n  got: {got}"):
        UserLoss.load(f"{tmp_path}/own.py:{name}")(torch.zeros(2))
