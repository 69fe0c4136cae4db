"""From a config to the report of a simulated run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from laminar.config import Config
from laminar.errors import ConfigError, RunFailed
from laminar.sim.plan import Delays, Plan
from laminar.sim.report import Report, report
from laminar.sim.world import World
from laminar.timing import TICK_S, together_s

GPUS_PER_MACHINE = 8


def simulate(config: Config, say: Callable[[str], None] = lambda line: None) -> Report:
    """Run an emulated config in simulated time, and measure its `iterations`. `say` is given a line an iteration.

    Raises ConfigError for a config that is not emulated, RunFailed for a run that fails.
    """
    return simulate_world(config, say)[1]


def simulate_world(
    config: Config, say: Callable[[str], None] = lambda line: None, record: bool = False
) -> tuple[World, Report]:
    """As `simulate`, with the world in which it happened; with what its manager was told, if that is to be recorded.

    The run goes on behind the iterations of the config, so that none is measured in which nothing new was issued
    because the end was near.
    """
    began = time.perf_counter()
    plan = plan_of(config)
    wanted = plan.settings.iterations
    assert wanted is not None, "nothing else ends an emulated run"
    ahead = 1 + -(-plan.settings.max_outstanding_groups // plan.settings.groups_per_batch)
    world = World(replace(plan, settings=replace(plan.settings, iterations=wanted + ahead)), record)
    told = 0

    def progress() -> None:
        nonlocal told
        if told < len(world.store.iterations) <= wanted:
            told = len(world.store.iterations)
            say(f"iteration {told} at {world.kernel.now:.1f} s")

    world.after_commit.append(progress)
    with _without_collector():
        while len(world.store.iterations) < wanted:
            world.kernel.step()
            if world.end is not None:
                raise RunFailed(world.end.message)
    return world, report(world, wanted, time.perf_counter() - began)


@contextmanager
def _without_collector() -> Iterator[None]:
    """A world makes next to no cycles, and the collector would walk over all its groups again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan_of(config: Config) -> Plan:
    """The plan for an emulated config. Raises ConfigError for any other."""
    if not config.emulated:
        raise ConfigError(
            "only emulated runs can be simulated",
            where="rollout.engine",
            expected='"emulated", and a profile in simulation.profile',
            got=f'"{config.rollout.engine}"',
        )
    profile, settings, rollout = config.profile, config.settings(), config.rollout
    longest_batch = settings.groups_per_batch * settings.group_size * (profile.prompt_tokens + rollout.max_new_tokens)
    longest_step_s = profile.train_step_s(longest_batch, settings.num_mini_batches, config.train_gpus)
    looks = settings.repack and settings.schedule == "laminar"
    return Plan(
        # a step of this trainer may take longer than a real run would wait for news
        settings=replace(settings, stall_timeout_s=max(settings.stall_timeout_s, 2 * longest_step_s)),
        profile=profile,
        seed=config.seed,
        replicas=rollout.replicas,
        replicas_per_machine=max(1, GPUS_PER_MACHINE // profile.gpus_per_replica),
        train_gpus=config.train_gpus,
        colocated=config.simulation.colocated,
        kv_tokens=rollout.kv_tokens,
        max_num_seqs=rollout.max_num_seqs,
        max_new_tokens=rollout.max_new_tokens,
        checkpoint_every=config.train.checkpoint_every,
        spare_slots=config.spare_slots,
        # loads are looked at twice as often as repack does; without it, a tick only says that time passes
        delays=Delays(
            coalesce_s=together_s(rollout.replicas, Delays().coalesce_s),
            poll_s=together_s(rollout.replicas, Delays().poll_s),
            tick_s=settings.repack_interval_s / 2 if looks else 10.0,
            load_age_s=(config.faults.heartbeat_s + TICK_S) / 2,  # up to a beat of the replica, and to the next tick
            news_s=rollout.stream_interval_s,
            command_s=config.faults.heartbeat_s,
        ),
    )
