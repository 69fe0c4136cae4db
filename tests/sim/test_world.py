"""Simulated runs: times that can be worked out by hand, and what holds in all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from laminar.control.commands import Pull
from laminar.control.ledger import TERMINAL
from laminar.errors import RunFailed
from laminar.sim.plan import Chances, Delays, Plan
from laminar.sim.report import report
from laminar.sim.world import World
from laminar.types import Version
from tests.hash_seeds import printed_under_two_hash_seeds
from tests.sim.plans import (
    AT_ONCE,
    EQUAL,
    LENGTH,
    SCHEDULES,
    SIZE,
    TOY,
    B,
    by_hand,
    generation_s,
    make_settings,
    training_s,
)


def ended(plan: Plan, outcome: str = "completed") -> World:
    world = World(plan)
    end = world.run(until=10_000)
    assert end.outcome == outcome, end.message
    return world


def iterations_s(world: World) -> list[float]:
    """From publish to publish"""
    times = [mark.time for mark in world.marks]
    return [after - before for before, after in pairwise(times)]


# ---------------------------------------------------------------- by hand


def test_sync_takes_the_sum_of_its_parts() -> None:
    parts = EQUAL.load_s() + generation_s() + training_s() + EQUAL.publish_s()
    assert iterations_s(ended(by_hand("sync"))) == pytest.approx([parts] * 6)


def test_colocated_adds_exactly_the_switches() -> None:
    free = replace(EQUAL, publish_stall_s=0.0, load_weights_s=0.0)
    apart = iterations_s(ended(by_hand("sync", free)))
    shared = iterations_s(ended(by_hand("sync", EQUAL, colocated=True)))
    assert shared == pytest.approx([seconds + EQUAL.switch_s for seconds in apart])


@pytest.mark.parametrize("schedule", ["one_step", "stream", "laminar", "partial"])
def test_a_slow_trainer_is_never_kept_waiting(schedule: str) -> None:
    slow = replace(EQUAL, train_s_per_iteration=5.0)
    found = iterations_s(ended(by_hand(schedule, slow)))
    assert found[1:] == pytest.approx([training_s(slow) + slow.publish_s()] * 5)


def test_a_slow_replica_generates_without_a_pause_but_to_load() -> None:
    quick = replace(
        EQUAL,
        train_s_per_iteration=0.0,
        train_s_per_mini_batch=0.01,
        train_tokens_per_s_per_gpu=1e6,
        load_weights_s=0.05,
    )
    found = iterations_s(ended(by_hand("laminar", quick)))
    # the second batch begins before the first version is there; from then on there is a newer one each time
    assert found[1:] == pytest.approx([generation_s(quick)] + [generation_s(quick) + quick.load_s()] * 4)


def test_broadcast_and_load_come_before_the_next_wave() -> None:
    plan = by_hand("sync", one_machine=False, replicas=2, replicas_per_machine=1)
    half = generation_s(sequences=B * SIZE // 2)
    parts = EQUAL.broadcast_s(3) + EQUAL.load_s() + half + training_s() + EQUAL.publish_s()
    assert iterations_s(ended(plan)) == pytest.approx([parts] * 6)


@pytest.mark.parametrize("schedule", ["sync", "laminar"])
def test_a_replica_that_is_late_is_waited_for_by_a_wave_alone(schedule: str) -> None:
    late_s = (0.0, 2.5)
    world = ended(by_hand(schedule, replicas=2, late_s=late_s))
    share = B * SIZE // (2 if schedule == "sync" else 1)
    began = max(late_s) if schedule == "sync" else EQUAL.publish_s()
    parts = EQUAL.load_s() + generation_s(sequences=share) + training_s() + EQUAL.publish_s()
    assert world.marks[1].time == pytest.approx(began + parts)
    assert world.replicas["replica-1"].decoder.decoded_tokens > 0


def test_rewards_delay_a_batch() -> None:
    plain = iterations_s(ended(by_hand("sync")))
    late = iterations_s(ended(by_hand("sync", replace(EQUAL, reward_s=3.0))))
    assert late == pytest.approx([seconds + 3.0 for seconds in plain])


def test_more_gpus_train_faster() -> None:
    one, four = (iterations_s(ended(by_hand("sync", train_gpus=gpus)))[-1] for gpus in (1, 4))
    assert one - four == pytest.approx(training_s() - training_s(gpus=4))


def test_reported_rates_are_those_of_the_closed_form() -> None:
    world = ended(by_hand("sync"))
    found = report(world, len(world.store.iterations), 0.0)
    parts = EQUAL.load_s() + generation_s() + training_s() + EQUAL.publish_s()
    assert found.iteration_s == pytest.approx(parts)
    assert found.throughput_tok_s == pytest.approx(B * SIZE * (EQUAL.prompt_tokens + LENGTH) / parts)
    assert found.generation_tok_s == pytest.approx(B * SIZE * LENGTH / parts)
    assert found.rollout_busy_fraction == pytest.approx(generation_s() / parts)
    assert found.trainer_busy_fraction == pytest.approx(training_s() / parts)
    held = B * SIZE * (EQUAL.prompt_tokens + LENGTH / 2)
    assert found.kv_utilization_mean == pytest.approx(held * generation_s() / parts / EQUAL.kv_tokens, rel=0.02)


@pytest.mark.parametrize("schedule", ["laminar", "partial"])
def test_a_replica_that_generates_hears_of_news_when_it_next_asks(schedule: str) -> None:
    delays = replace(AT_ONCE, news_s=0.37, command_s=0.2)
    world = World(by_hand(schedule, delays=delays))
    replica = world.replicas["replica-0"]
    while not replica.decoder.num_running:
        world.kernel.step()
    told, held = world.kernel.now, next(iter(replica.held.values()))
    replica.release([(held.work.sample, held.work.epoch)])
    replica.obey(Pull(replica.id, replica.incarnation, Version(0, 0), "now", interrupt=True))
    while replica.beat().state != "loading":
        world.kernel.step()
    assert told < world.kernel.now <= told + delays.command_s
    while not held.ended:
        world.kernel.step()
    assert told < world.kernel.now <= told + delays.news_s


# ---------------------------------------------------------------- in all of them

SMALL = Delays(coalesce_s=0.01, exchange_s=0.005, poll_s=0.01, beat_s=0.005)


def mixed(schedule: str, **changes: object) -> Plan:
    """Three replicas on two machines, responses of all lengths, keys and values that do not suffice."""
    settings = make_settings(
        schedule, iterations=8, groups_per_batch=6, max_outstanding_groups=18, groups_in_flight=4, repack=True
    )
    plan = Plan(settings, TOY, seed=3, replicas=3, replicas_per_machine=2, kv_tokens=400, delays=SMALL)
    return replace(plan, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_everything_is_accounted_for(schedule: str) -> None:
    """Invariants 2 and 7."""
    world = ended(mixed(schedule))
    store, bound = world.store, world.settings.max_staleness
    assert bound is not None
    assert not store.accounts.groups and not store.accounts.cuts
    groups = store.groups.values()
    assert all(g.state in TERMINAL and all(s.state in TERMINAL for s in g.samples) for g in groups)
    trained = [s for g in groups for s in g.members("trained")]
    assert len(trained) == 8 * 6 * SIZE == sum(i.num_samples for i in store.iterations)
    assert all(s.length == world.plan.response_length(*s.id) for s in trained)
    for row in store.iterations:
        assert row.staleness_use.total() == row.staleness_generation.total() == row.num_samples == 6 * SIZE
        assert max(row.staleness_use) <= bound
    assert sum(i.tokens for i in store.iterations) == sum(s.length + TOY.prompt_tokens for s in trained)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_keys_and_values_fit_and_nobody_is_held_at_the_end(schedule: str) -> None:
    world = World(mixed(schedule))

    def look() -> None:
        for replica in world.replicas.values():
            d = replica.decoder
            assert d.kv_used <= d.kv_capacity or d.num_running == 1
            assert d.num_running <= d.max_num_seqs

    world.after_commit.append(look)
    assert world.run(until=10_000).outcome == "completed"
    assert sum(r.decoder.num_preempted for r in world.replicas.values()) > 0
    assert all(not r.held for r in world.replicas.values())


def test_one_version_a_sample_but_under_partial() -> None:
    """Invariant 1."""

    def mixes(schedule: str) -> int:
        groups = ended(mixed(schedule)).store.groups.values()
        return sum(s.last_version != s.version for g in groups for s in g.samples if s.state == "trained")

    assert [mixes(schedule) for schedule in SCHEDULES if schedule != "partial"] == [0] * 4
    assert mixes("partial") > 0


def test_repack_moves_tails_and_pays_for_their_prefill() -> None:
    settings = make_settings(
        iterations=10, groups_per_batch=8, max_outstanding_groups=32, groups_in_flight=2, repack=True,
        repack_interval_s=0.5,
    )  # fmt: skip
    slow = replace(TOY, kv_tokens=10_000, train_s_per_iteration=0.0)
    plan = Plan(settings, slow, replicas=2, replicas_per_machine=8, delays=replace(SMALL, tick_s=0.25))
    moved, still = (
        report(ended(replace(plan, settings=replace(settings, repack=on))), 10, 0.0) for on in (True, False)
    )
    assert moved.repack_moves > 0 and 0 < moved.repack_cost_s < 10
    assert (still.repack_moves, still.repack_cost_s) == (0, 0.0)


def test_evaluations_are_done_and_do_not_change_what_is_trained() -> None:
    settings = make_settings("sync", eval_groups=3, eval_every=2, eval_before_train=True, eval_after_train=True)
    plain, evaluated = (ended(Plan(s, TOY, delays=SMALL)) for s in (make_settings("sync"), settings))
    assert [v.number for v in evaluated.store.evals_done] == [0, 2, 4, 6]
    assert {key: cut.groups for key, cut in plain.store.cuts.items()} == {
        key: cut.groups for key, cut in evaluated.store.cuts.items()
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("last_batch", ["train", "drop"])
def test_prompts_that_end(schedule: str, last_batch: str) -> None:
    """Fault 13: the last groups go by the policy, and the run completes."""
    settings = make_settings(schedule, iterations=None, last_batch=last_batch)
    store = ended(Plan(settings, TOY, replicas=2, delays=SMALL, prompts=7)).store
    trained = {"train": 7, "drop": 6}[last_batch]
    assert sum(len(cut.groups) for cut in store.cuts.values()) == trained
    assert store.accounts.dropped == ({} if last_batch == "train" else {"data_exhausted": SIZE})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_dropped_is_replaced(schedule: str) -> None:
    """Fault 7: batches stay full, whatever engines, rewards and filters drop."""
    settings = make_settings(schedule, drop_zero_variance=True)
    chances = Chances(engine_error=0.1, reward_error=0.1, zero_variance=0.3, overlong=0.1)
    store = ended(Plan(settings, TOY, replicas=2, delays=SMALL, chances=chances)).store
    sizes = [sum(len(c.groups) for (u, _), c in store.cuts.items() if u == update) for update in range(6)]
    assert sizes == [B] * 6
    assert {"engine_error", "reward_error", "zero_variance", "prompt_overlong"} - set(store.accounts.dropped) <= {
        "prompt_overlong"
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_an_engine_fails_begins_anew(schedule: str) -> None:
    """Fault 16: batches stay full, and every failure is either another attempt or a drop."""
    settings = make_settings(schedule, engine_retries=2, stall_timeout_s=100.0)
    store = ended(Plan(settings, TOY, replicas=2, delays=SMALL, chances=Chances(engine_error=0.5))).store
    accounts = store.accounts
    assert [sum(len(c.groups) for (u, _), c in store.cuts.items() if u == update) for update in range(6)] == [B] * 6
    failed = sum(s.reason == "engine_error" for g in store.groups.values() for s in g.samples)
    assert accounts.num_retried > 10 and accounts.failures["engine"] == accounts.num_retried + failed
    assert max(s.attempt for g in store.groups.values() for s in g.samples) == 2


def test_a_run_that_does_not_end_in_time_says_what_it_waits_for() -> None:
    with pytest.raises(RunFailed, match="not over after 1 s\ntrainer: "):
        World(by_hand("sync")).run(until=1)


# ---------------------------------------------------------------- deaths


@pytest.mark.parametrize("at", [0.5, 1.3, 2.9, 6.1])
@pytest.mark.parametrize("victim", [("replica", "replica-1"), ("relay", "relay-1"), ("trainer", "trainer")])
@pytest.mark.parametrize("schedule", ["laminar", "sync"])
def test_a_death_is_mended_and_nothing_is_lost(schedule: str, victim: tuple[str, str], at: float) -> None:
    """Invariants 2 and 12, at the level of ids."""
    plan = mixed(schedule, checkpoint_every=2, delays=replace(SMALL, stream_s=0.2))
    world = World(replace(plan, settings=replace(plan.settings, max_restarts=2)))
    world.kernel.at(at, lambda: world.driver.kill(*victim))
    end = world.run(until=10_000)
    assert end.outcome == "completed", end.message
    assert sorted(i.update for i in world.store.iterations) == list(range(8))
    assert sum(i.num_samples for i in world.store.iterations) == 8 * 6 * SIZE
    assert world.store.accounts.all_deaths() == {victim[0]: 1}


# ---------------------------------------------------------------- the same again


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    first, again, other = (ended(mixed("laminar", seed=seed)) for seed in (3, 3, 4))
    assert first.marks == again.marks and first.store.iterations == again.store.iterations
    assert first.marks != other.marks


def test_the_hash_seed_changes_nothing() -> None:
    """Invariant 11"""
    code = (
        "from tests.sim.test_world import SCHEDULES, ended, mixed\n"
        "for schedule in SCHEDULES:\n"
        "    world = ended(mixed(schedule))\n"
        "    print(world.marks, world.store.iterations, world.kernel.num_events)\n"
    )
    said = printed_under_two_hash_seeds(code)
    assert said[0] == said[1] != ""


def test_no_delay_is_a_delay_of_zero() -> None:
    world = ended(mixed("laminar", delays=AT_ONCE))
    assert len(world.store.iterations) == 8
