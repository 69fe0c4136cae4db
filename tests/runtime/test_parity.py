"""The simulator foretells the runtime: with one replica and fixed times, every group has its version and its batch."""

from __future__ import annotations

import pytest

from benchmarks import parity
from tests.runtime.conftest import Run

ALSO_WHEN_QUICK = ("laminar", "partial")
"""Those in which replicas choose their own moments."""

TRIES = 3
"""A machine that stands still for half a second at the wrong moment makes another history, which is as true; a runtime
that decides otherwise than the simulator makes one each time."""


@pytest.mark.parametrize(
    "schedule", [s if s in ALSO_WHEN_QUICK else pytest.param(s, marks=pytest.mark.slow) for s in parity.SCHEDULES]
)
def test_one_replica_trains_the_same_batches_in_the_simulator(run: Run, schedule: str) -> None:
    config = parity.config_of(schedule, replicas=1)
    foretold = parity.batches_of_simulation(parity.simulated(config))
    assert len(foretold) == config.iterations * config.train.groups_per_batch
    for attempt in range(TRIES):
        outcome = run(config, f"run-{attempt}")
        assert outcome.code == 0
        batches = parity.batches_of(outcome.folder)
        if batches == foretold:
            break
    assert batches == foretold


@pytest.mark.parametrize("schedule", parity.SCHEDULES)
@pytest.mark.parametrize("later_s", [-0.45, -0.2, 0.2, 0.45])
def test_a_machine_that_is_late_by_less_than_half_a_second_changes_no_batch(schedule: str, later_s: float) -> None:
    """Of the fixed times; else the test above would be one of the machine's moods."""
    config = parity.config_of(schedule, replicas=1)
    late = parity.batches_of_simulation(parity.simulated(config, later_s))
    assert late == parity.batches_of_simulation(parity.simulated(config))
