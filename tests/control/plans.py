"""Random worlds, and the settings of small runs."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from laminar.types import Settings
from tests.control.world import Plan


def make_settings(**changes: Any) -> Settings:
    """A small run: two groups of two a batch, staleness at most 1, three iterations, no evaluation."""
    plain = Settings(
        schedule="laminar",
        max_staleness=1,
        iterations=3,
        groups_per_batch=2,
        group_size=2,
        min_group_size=2,
        num_mini_batches=1,
        max_outstanding_groups=4,
        groups_in_flight=1,
    )
    return replace(plain, **changes)


def random_plan(seed: int) -> Plan:
    """Everything that the seed can choose, in one plan."""
    r = Random(seed)
    schedule = r.choice(["laminar", "laminar", "sync"])
    k = 0 if schedule == "sync" else r.choice([0, 1, 2, 4, None])
    batch, size = r.choice([1, 2, 3, 5]), r.choice([1, 2, 4])
    prompts = r.choice([None, None, r.randint(1, 20)])
    evaluates = r.random() < 0.4
    settings = make_settings(
        schedule=schedule,
        max_staleness=k,
        iterations=None if prompts and r.random() < 0.5 else r.choice([1, 3, 5, 8]),
        groups_per_batch=batch,
        group_size=size,
        min_group_size=min(2, size),
        max_outstanding_groups=batch * max(1, r.choice([3 if k is None else k + 1, 1, 2])),
        groups_in_flight=r.choice([1, 2, batch]),
        last_batch=r.choice(["train", "drop"]),
        drop_zero_variance=size > 1 and r.random() < 0.5,
        eval_groups=r.choice([1, 3, 5]) if evaluates else 0,
        eval_every=r.choice([None, 1, 2]),
        eval_before_train=r.random() < 0.5,
        eval_after_train=r.random() < 0.5,
    )
    return Plan(
        settings,
        seed,
        replicas=r.choice([1, 2, 3, 5]),
        prompts=prompts,
        engine_errors=r.choice([0, 0, 0.1, 0.3]),
        reward_errors=r.choice([0, 0, 0.1, 0.3]),
        zero_variance=r.choice([0, 0, 0.5, 0.9]),
        overlong=r.choice([0, 0, 0.2]),
        prefetch=r.random() < 0.5,
        checkpoint_every=r.choice([1, 2, 5]),
        restarts=tuple(sorted(r.uniform(0, 20) for _ in range(r.choice([0, 0, 1, 2])))),
    )
