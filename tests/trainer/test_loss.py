"""The loss, by hand, by finite differences and by property. All in float64."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from laminar.trainer.loss import LossSettings, policy_loss, token_weights

SETTINGS = LossSettings()
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of_one(
    ratio: float, advantage: float, mismatch: float = 1.0, settings: LossSettings = SETTINGS, **kwargs: Any
) -> tuple[float, dict[str, float]]:
    """Loss of one token of weight 1 with the given new / old and old / behaviour."""
    old = f64([-1.0])
    loss, sums = policy_loss(
        old + log(ratio),
        old,
        old - log(mismatch),
        torch.tensor([True]),
        f64([advantage]),
        f64([1.0]),
        settings,
        **kwargs,
    )
    return float(loss), {name: float(value) for name, value in sums.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "mismatch", "expected", "clipped"),
    [
        (1.0, 2.0, 1.0, -2.0, 0),
        (1.1, 2.0, 1.0, -2.2, 0),
        (1.5, 2.0, 1.0, -2.56, 1),  # upper clip 1.28
        (0.5, 2.0, 1.0, -1.0, 0),  # a positive advantage is not clipped below
        (0.5, -2.0, 1.0, 1.6, 1),  # lower clip 0.8
        (1.5, -2.0, 1.0, 3.0, 0),  # a negative one is not clipped above
        (5.0, -2.0, 1.0, 6.0, 1),  # but for the dual clip 3
        (1.0, 2.0, 1.5, -3.0, 0),  # importance weight
        (1.0, 2.0, 8.0, -4.0, 0),  # truncated at 2
        (1.0, 2.0, 0.25, -0.5, 0),
    ],
)
def test_one_token(ratio: float, advantage: float, mismatch: float, expected: float, clipped: int) -> None:
    loss, sums = loss_of_one(ratio, advantage, mismatch)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert sums["clipped"] == clipped
    assert sums["is_weight"] == pytest.approx(min(mismatch, 2.0))
    assert sums["is_capped"] == (mismatch > 2)
    assert sums["kl_old"] == pytest.approx(ratio - 1 - log(ratio))
    assert sums["kl_rollout"] == pytest.approx(mismatch - 1 - log(mismatch))


def test_kl_to_the_reference() -> None:
    """k3 at new = -1, reference = -1.5: exp(-0.5) - (-0.5) - 1."""
    loss, sums = loss_of_one(1.0, 0.0, settings=LossSettings(kl_loss_coef=0.1), reference=f64([-1.5]))
    assert sums["kl_ref"] == pytest.approx(exp(-0.5) - 0.5)
    assert loss == pytest.approx(0.1 * (exp(-0.5) - 0.5))


SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2])
MASK = torch.tensor([True, True, False, True, False, False])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 3, 1 / 3, 0, 1 / 3, 0, 0]),
        ("seq-mean-token-mean", [1 / 4, 1 / 4, 0, 1 / 2, 0, 0]),
        ("seq-mean-token-sum-norm", [1 / 20, 1 / 20, 0, 1 / 20, 0, 0]),
    ],
)
def test_weights(mode: Any, expected: list[float]) -> None:
    """Three unmasked tokens in two sequences; the third sequence is masked whole and counts nowhere."""
    weights = token_weights(MASK, SEQUENCE, mode, num_tokens=3, num_sequences=2, max_new_tokens=10)
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_all_masked_is_zero(mode: Any) -> None:
    """Fault 33."""
    mask = torch.zeros(6, dtype=torch.bool)
    weights = token_weights(mask, SEQUENCE, mode, num_tokens=0, num_sequences=0, max_new_tokens=10)
    new = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    loss, sums = policy_loss(new, new.detach(), new.detach(), mask, f64([1.0] * 6), weights, SETTINGS)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not new.grad.any()  # type: ignore[union-attr]
    assert not any(float(value) for value in sums.values())


def random_tokens(seed: int, size: int = 40) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64) * scale

    new = normal(1.0) - 3
    return {
        "new": new,
        "old": new + normal(0.4),
        "behaviour": new + normal(0.8),
        "mask": torch.rand(size, generator=generator) < 0.7,
        "advantage": normal(1.0),
        "weight": torch.rand(size, generator=generator, dtype=torch.float64) / size,
        "reference": new + normal(0.5),
    }


@pytest.mark.parametrize("kl_loss_coef", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_by_finite_differences(seed: int, kl_loss_coef: float) -> None:
    tokens = random_tokens(seed)
    settings = LossSettings(kl_loss_coef=kl_loss_coef)
    tokens["new"].requires_grad_(True)
    loss, _ = policy_loss(**tokens, settings=settings)
    loss.backward()
    gradient = tokens["new"].grad
    assert gradient is not None
    with torch.no_grad():
        for i in range(len(gradient)):
            sides = []
            for step in (1e-6, -1e-6):
                moved = dict(tokens, new=tokens["new"].detach().clone())
                moved["new"][i] += step
                sides.append(float(policy_loss(**moved, settings=settings)[0]))
            assert float(gradient[i]) == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-7)


FIELDS = ["new", "old", "behaviour", "reference"]


@pytest.mark.parametrize("value", [1e4, -1e4, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("field", [*FIELDS, "advantage"])
def test_masked_places_have_no_effect(field: str, value: float) -> None:
    """Fault 32: whatever lies in a masked place, loss, gradient and metrics keep their bits."""
    results = []
    for spoil in (False, True):
        tokens = random_tokens(0)
        if spoil:
            tokens[field] = torch.where(tokens["mask"], tokens[field], value)
        weight = torch.where(tokens["mask"], tokens["weight"], 0.0)
        new = tokens["new"].requires_grad_(True)
        loss, sums = policy_loss(**dict(tokens, weight=weight), settings=LossSettings(kl_loss_coef=0.1))
        loss.backward()
        results.append((float(loss.detach()), new.grad.tolist(), {k: float(v) for k, v in sums.items()}))  # type: ignore[union-attr]
    assert results[0] == results[1]


@pytest.mark.parametrize("kl_loss_coef", [0.0, 0.1])
@given(
    extremes=st.lists(st.tuples(st.integers(0, 39), st.sampled_from(FIELDS), st.sampled_from([1e4, -1e4])), max_size=30)
)
def test_extreme_log_ratios_stay_finite(kl_loss_coef: float, extremes: list[tuple[int, str, float]]) -> None:
    """Fault 32: log-ratios of +-1e4 anywhere give a finite loss, gradient and metrics, in float32 too."""
    tokens = random_tokens(1)
    for i, field, value in extremes:
        tokens[field][i] = value
    tokens = {name: t if t.dtype == torch.bool else t.float() for name, t in tokens.items()}
    new = tokens["new"].requires_grad_(True)
    loss, sums = policy_loss(**tokens, settings=LossSettings(kl_loss_coef=kl_loss_coef))
    loss.backward()
    assert torch.isfinite(loss)
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()
    assert all(torch.isfinite(value) for value in sums.values())


def test_on_policy_is_exact() -> None:
    """Ratio and weight are exactly 1, so the loss is exactly the weighted sum of -A."""
    tokens = random_tokens(2)
    same = tokens["new"]
    mask, weight, advantage = tokens["mask"], tokens["weight"], tokens["advantage"]
    loss, sums = policy_loss(same, same, same, mask, advantage, weight, SETTINGS)
    assert torch.equal(loss, (torch.where(mask, -advantage, 0.0) * weight).sum())
    assert int(sums["is_weight"]) == int(mask.sum())
    assert not any(float(sums[name]) for name in ("kl_old", "kl_rollout", "is_capped", "clipped"))


@given(cut=st.integers(1, 39), mode=st.sampled_from(MODES))
def test_micro_batches_add_up(cut: int, mode: Any) -> None:
    """However the sequences of a mini-batch are cut into micro-batches, the losses add up to the same."""
    tokens = random_tokens(3)
    sequence = torch.arange(40) // 4
    mask = tokens["mask"]
    counts = {"num_tokens": int(mask.sum()), "num_sequences": len(torch.unique(sequence[mask])), "max_new_tokens": 8}
    cut = cut // 4 * 4
    parts = [slice(0, 40)], [slice(0, cut), slice(cut, 40)]
    totals = []
    for slices in parts:
        total = 0.0
        for part in slices:
            weight = token_weights(mask[part], sequence[part], mode, **counts)
            values = {name: t[part] for name, t in tokens.items() if name != "reference"} | {"weight": weight}
            total += float(policy_loss(**values, settings=SETTINGS)[0])
        totals.append(total)
    assert totals[0] == pytest.approx(totals[1], abs=1e-12)
