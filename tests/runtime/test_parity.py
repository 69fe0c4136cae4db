"""The simulator foretells the runtime: with one replica and fixed times, every group has its version and its batch."""

from __future__ import annotations

import pytest

from benchmarks import parity
from tests.runtime.conftest import Run

ALSO_WHEN_QUICK = ("laminar", "partial")
"""Those in which replicas choose their own moments."""


@pytest.mark.parametrize(
    "schedule", [s if s in ALSO_WHEN_QUICK else pytest.param(s, marks=pytest.mark.slow) for s in parity.SCHEDULES]
)
def test_one_replica_trains_the_same_batches_in_the_simulator(run: Run, schedule: str) -> None:
    config = parity.config_of(schedule, replicas=1)
    outcome = run(config)
    assert outcome.code == 0
    batches = parity.batches_of(outcome.folder)
    assert batches == parity.batches_of_simulation(parity.simulated(config))
    assert len(batches) == config.iterations * config.train.groups_per_batch


@pytest.mark.parametrize("schedule", parity.SCHEDULES)
@pytest.mark.parametrize("later_s", [-0.45, -0.2, 0.2, 0.45])
def test_a_machine_that_is_late_by_less_than_half_a_second_changes_no_batch(schedule: str, later_s: float) -> None:
    """Of the fixed times; else the test above would be one of the machine's moods."""
    config = parity.config_of(schedule, replicas=1)
    late = parity.batches_of_simulation(parity.simulated(config, later_s))
    assert late == parity.batches_of_simulation(parity.simulated(config))
