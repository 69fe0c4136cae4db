"""Rewards rise because of what is learned: what may not learn does not, and the importance weight makes up for lag."""

from __future__ import annotations

from statistics import fmean

import pytest

from tests.runtime import learning

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NOISE = 0.05
"""In reward, of means over `learning.ENDS` iterations: seeds differ by less."""


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, learning.Curve]:
    folder = tmp_path_factory.mktemp("learning")
    return {variant: learning.train(variant, 0, folder / str(i)) for i, variant in enumerate(learning.VARIANTS)}


def test_the_lag_is_what_was_forced(curves: dict[str, learning.Curve]) -> None:
    """Fault 30: by the metrics of staleness at use, the time in the buffer included."""
    lags = {variant: fmean(curve["staleness"]) for variant, curve in curves.items()}
    assert min(lags["lag 4"], lags["lag 4, no importance weight"]) > 2.8
    assert max(lags["lag 0"], lags["lr 0"], lags["shuffled rewards"]) == 0


@pytest.mark.parametrize("variant", ["lr 0", "shuffled rewards"])
def test_without_a_reason_nothing_is_learned(curves: dict[str, learning.Curve], variant: str) -> None:
    assert learning.gain(curves[variant]) < NOISE < learning.gain(curves["lag 0"])


def test_the_importance_weight_makes_up_for_the_lag(curves: dict[str, learning.Curve]) -> None:
    """Fault 34: stale training with it learns like training without lag; without it, no better than that."""
    fresh, stale, uncorrected = (
        learning.gain(curves[variant]) for variant in ("lag 0", "lag 4", "lag 4, no importance weight")
    )
    assert abs(stale - fresh) < NOISE
    assert uncorrected < stale + NOISE
