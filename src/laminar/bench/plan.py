"""How long the manager thinks about one repack of a fleet."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from statistics import median

from laminar.control.repack import RepackLimits, ReplicaLoad, plan_repack

RUNS = 9
KV_CAPACITY = 800_000
"""Tokens; about that of a 32B model on four GPUs of 80 GB."""
LIMITS = RepackLimits(kv_fraction=0.9, max_requests=256)


@dataclass(frozen=True, slots=True)
class PlanTime:
    replicas: int
    seconds: float
    """Processor time of one plan, median of `RUNS`: other work on the machine does not count."""
    moves: int


def measure(replicas: int, seed: int = 0) -> PlanTime:
    """Plan for a random fleet in its tail, the same one for the same seed."""
    loads = fleet(replicas, seed)
    seconds = []
    for _ in range(RUNS):
        start = time.process_time()
        plan = plan_repack(loads, LIMITS)
        seconds.append(time.process_time() - start)
    return PlanTime(replicas, median(seconds), len(plan.moves))


def fleet(replicas: int, seed: int) -> list[ReplicaLoad]:
    """Three versions; one replica in ten has requests that wait, one in ten admits, the others run up to 200."""
    rng = Random(seed)
    loads = []
    for index in range(replicas):
        num_running = rng.randint(1, 200)
        kv_used = num_running * rng.randint(500, 4_000)
        waiting, admitting = rng.random() < 0.1, rng.random() < 0.1
        loads.append(
            ReplicaLoad(
                f"replica-{index}",
                rng.randint(7, 9),
                min(kv_used, KV_CAPACITY),
                KV_CAPACITY,
                num_running,
                8 * waiting,
                admitting,
            )
        )
    return loads
