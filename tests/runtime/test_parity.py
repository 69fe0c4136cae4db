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
    assert len(batches) == 5 * 4
