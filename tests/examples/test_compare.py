"""The comparison of schedules: what it makes of metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest


def rows(seconds: float, reward: float) -> list[dict[str, float]]:
    """Four iterations of 64 samples, the processes' start of 20 s before them."""
    return [
        {
            "time_s": 20 + seconds * (i + 1),
            "iteration_s": seconds,
            "num_samples": 64,
            "reward_mean": reward * i,
            "staleness_use_mean": 0.5,
            "staleness_use_max": 1,
            "rollout_busy_fraction": 0.25,
            "trainer_wait_s": seconds / 2,
        }
        for i in range(4)
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_a_table_and_a_picture_of_two_schedules(load_example: Callable[[str], ModuleType], tmp_path: Path) -> None:
    compare = load_example("sort/compare.py")
    curves = [compare.curve_of("sync", rows(4, 0.1)), compare.curve_of("laminar", rows(2, 0.2))]
    assert curves[0].seconds == [4, 8, 12, 16] and curves[0].samples == [64, 128, 192, 256]
    assert curves[0].rewards == pytest.approx([0, 0.05, 0.1, 0.15])
    assert (curves[0].rollout_busy, curves[0].trainer_waits) == pytest.approx((0.25, 0.5))
    assert curves[1].seconds_to(0.15) == 6 and curves[1].seconds_to(0.9) is None
    head, sync, laminar = compare.table(curves)
    assert "time to 0.15" in head
    assert sync.split()[:5] == ["sync", "16.0", "s", "16.0", "0.150"] and "16.0 s" in sync
    assert "6.0 s" in laminar and laminar.endswith("25%             50%")
    compare.draw(curves, tmp_path / "compare.svg")
    assert ElementTree.parse(tmp_path / "compare.svg").getroot().tag.endswith("svg")


def test_lists_have_a_long_tail(load_example: Callable[[str], ModuleType]) -> None:
    prepare = load_example("sort/prepare.py")
    lengths = sorted(len(row["answer"]) for row in prepare.make_rows(2_000, 0, prepare.long_tail))
    assert lengths[0] >= 2 and lengths[-1] == prepare.MAX_DIGITS
    assert 5 <= lengths[1_000] <= 9 and lengths[1_900] > 3 * lengths[1_000]
