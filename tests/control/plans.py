"""Settings and plans of small simulated runs, and what can be asked of a run that has ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

from laminar.sim.plan import Chances, Delays, Plan
from laminar.sim.world import World
from laminar.timing import load_profile
from laminar.types import Settings

TOY = load_profile("toy")
ROUGH = Delays(coalesce_s=0.1, exchange_s=0.3, poll_s=0.3, beat_s=0.3, tick_s=1.0, stream_s=0.5, jitter=True, loss=0.15)
"""Messages take long, overtake those of others, and get lost."""


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


def make_plan(settings: Settings, seed: int = 0, **changes: Any) -> Plan:
    """Two replicas of the toy profile, on one machine with the trainer, and messages that are slow and get lost."""
    plain = Plan(
        settings,
        TOY,
        seed,
        replicas=2,
        one_machine=True,
        checkpoint_every=2,
        newest_first=seed % 2 == 1,
        delays=ROUGH,
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
    return make_plan(
        settings,
        seed,
        replicas=r.choice([1, 2, 3, 5]),
        prompts=prompts,
        chances=Chances(
            engine_error=r.choice([0, 0, 0.1, 0.3]),
            reward_error=r.choice([0, 0, 0.1, 0.3]),
            zero_variance=r.choice([0, 0, 0.5, 0.9]),
            overlong=r.choice([0, 0, 0.2]),
        ),
        prefetch=r.random() < 0.5,
        checkpoint_every=r.choice([1, 2, 5]),
        restarts=tuple(sorted(r.uniform(0, 20) for _ in range(r.choice([0, 0, 1, 2])))),
    )


def batches(world: World) -> list[list[int]]:
    """Draws of the prompt pool in each batch, sorted."""
    found: dict[int, list[int]] = {}
    for (update, _), cut in sorted(world.store.cuts.items()):
        found.setdefault(update, []).extend(world.store.groups[g].cursor for g in cut.groups)
    return [sorted(found[update]) for update in sorted(found)]


def dropped(world: World) -> Counter[str]:
    """Training samples dropped, by reason."""
    samples = (s for g in world.store.groups.values() if g.kind == "train" for s in g.samples)
    return Counter(str(s.reason) for s in samples if s.state == "dropped")


def max_staleness(world: World) -> int:
    """At use"""
    return max((age for i in world.store.iterations for age in i.staleness_use), default=0)
