"""Whole runs in memory, from random seeds: every run ends, and nothing is lost, doubled, or too old."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from laminar.control.events import CutTrained, Recovered, StoreEvents
from laminar.control.ledger import TERMINAL
from laminar.control.manager import replay
from laminar.sim.plan import Chances, Plan
from laminar.sim.world import World
from tests.control.plans import batches, dropped, make_plan, make_settings, max_staleness, random_plan

SEEDS = range(320)


def finished(plan: Plan) -> World:
    """A world that has run to its end, with all that must hold of any run checked."""
    world = World(plan, record=True)
    world.after_commit.append(lambda: ledger_closes(world))
    end = world.run(until=3000)
    assert end.outcome == "completed", end.message
    settings, store = plan.settings, world.store
    groups = store.groups.values()

    # invariant 2: every group and sample is accounted for, every group is in at most one cut, a cut is trained once
    assert all(g.state in TERMINAL and all(s.state in TERMINAL for s in g.samples) for g in groups)
    draws = sorted(g.cursor for g in groups if g.kind == "train")
    assert draws == list(range(store.accounts.cursor))
    cut = [g for c in store.cuts.values() for g in c.groups]
    assert len(cut) == len(set(cut))
    assert sorted(cut) == sorted(g.id for g in groups if g.kind == "train" and g.state == "trained")
    assert sorted(i.update for i in store.iterations) == sorted({update for update, _ in store.cuts})
    trained = sum(len(store.groups[g].members("trained")) for g in cut)
    assert sum(i.num_samples for i in store.iterations) == trained
    assert dropped(world) == store.accounts.dropped

    # invariant 7: age at use is bounded
    if settings.max_staleness is not None:
        assert max_staleness(world) <= settings.max_staleness

    # the run is as long as it was asked to be, unless the prompts ended
    assert sorted({update for update, _ in store.cuts}) == list(range(len(batches(world))))
    sizes = [len(batch) for batch in batches(world)]
    if plan.prompts is None or not store.accounts.exhausted:
        assert sizes == [settings.groups_per_batch] * (settings.iterations or 0)
    else:
        assert all(size == settings.groups_per_batch for size in sizes[:-1])
        assert sizes[-1:] == [settings.groups_per_batch] * len(sizes[-1:]) or settings.last_batch == "train"
    assert store.accounts.num_live == 0

    # invariant 11
    assert list(replay(settings, world.records or [])) == []
    return world


def ledger_closes(world: World) -> None:
    """Invariant 2, after every transaction."""
    store = world.store
    assert sum(g.kind == "train" for g in store.groups.values()) == store.accounts.cursor
    assert {g.id for g in store.groups.values() if g.state not in TERMINAL} == set(store.accounts.groups)


@pytest.mark.parametrize("seeds", [SEEDS[i::16] for i in range(16)], ids=lambda seeds: f"from {seeds[0]}")
def test_every_run_ends_and_its_ledger_closes(seeds: range) -> None:
    """Invariants 2, 7, 10, 11; faults 3, 4, 6, 7, 9, 12, 13, 14, 28, 29, 30 of docs/faults.md, at the level of ids."""
    for seed in seeds:
        try:
            finished(random_plan(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{random_plan(seed)}") from error


@pytest.mark.parametrize("seed", range(24))
def test_staleness_0_trains_the_batches_of_sync(seed: int) -> None:
    """Invariant 8, at the level of ids: the same draws in the same batches, whatever the timing. Fault 31."""
    plan = replace(random_plan(seed), restarts=())
    settings = replace(plan.settings, max_staleness=0, max_outstanding_groups=plan.settings.groups_per_batch)
    found = [
        batches(finished(replace(plan, settings=replace(settings, schedule=schedule), prefetch=prefetch)))
        for schedule, prefetch in (("sync", False), ("laminar", False), ("laminar", True))
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("k", [0, 1, 2, 4, None])
@pytest.mark.parametrize(("batch", "size"), [(1, 1), (1, 4), (3, 2), (8, 1)])
def test_every_bound_makes_progress(k: int | None, batch: int, size: int) -> None:
    """Fault 6: staleness 0 neither admits nothing nor throws everything away."""
    settings = make_settings(
        max_staleness=k,
        iterations=6,
        groups_per_batch=batch,
        group_size=size,
        min_group_size=min(2, size),
        max_outstanding_groups=batch * (3 if k is None else k + 1),
    )
    world = finished(make_plan(settings, seed=1))
    assert not dropped(world)
    assert world.store.accounts.cursor == 6 * batch
    if k == 0:
        assert max_staleness(world) == 0


def test_a_filter_that_drops_nine_tenths_leaves_the_target_constant() -> None:
    """Fault 7: for 50 batches, what is live never exceeds the quota, and always comes back to it."""
    settings = make_settings(
        iterations=50, drop_zero_variance=True, max_staleness=4, max_outstanding_groups=6, groups_in_flight=3
    )
    world = World(make_plan(settings, seed=3, chances=Chances(zero_variance=0.9)))
    most: Counter[int] = Counter()

    def watch() -> None:
        live = world.store.accounts.num_live
        assert live <= 6
        tenth = world.store.accounts.update // 10
        most[tenth] = max(most[tenth], live)

    world.after_commit.append(watch)
    assert world.run(until=20_000).outcome == "completed"
    assert dropped(world)["zero_variance"] > 5 * 100
    assert [most[tenth] for tenth in range(5)] == [6] * 5


@pytest.mark.parametrize("last_batch", ["train", "drop"])
@pytest.mark.parametrize("schedule", ["laminar", "sync"])
@pytest.mark.parametrize("prompts", [1, 4, 7])
def test_prompts_that_end_first(schedule: str, last_batch: str, prompts: int) -> None:
    """Faults 3, 9, 12, 13: the last groups go by the policy, the last evaluation is done, the run completes."""
    settings = make_settings(
        schedule=schedule,
        max_staleness=0,
        iterations=None,
        last_batch=last_batch,
        eval_groups=3,
        eval_after_train=True,
    )
    world = finished(make_plan(settings, prompts=prompts, replicas=3))
    full, left = divmod(prompts, 2)
    trained = full + (left if last_batch == "train" else 0)
    assert len(world.store.cuts) == trained
    assert dropped(world) == ({"data_exhausted": 2} if left and last_batch == "drop" else {})
    assert [v.number for v in world.store.evals_done] == [trained]


def test_an_evaluation_of_every_version_is_done_or_given_up() -> None:
    settings = make_settings(iterations=6, eval_groups=4, eval_every=1, eval_before_train=True, max_staleness=2)
    world = finished(make_plan(settings, seed=5, replicas=3))
    done = {v.number for v in world.store.evals_done}
    gone = {g.version.number for g in world.store.groups.values() if g.kind == "eval" and g.reason == "version_gone"}
    given_up = {v.number for v in world.manager.manager.state.evaluations} - done
    assert done | given_up == set(range(7)) and gone <= given_up
    assert 6 in done


def test_a_restart_at_any_moment_trains_every_batch_once() -> None:
    """Invariants 2 and 12; faults 12, 28, 29: the draws that are trained are those of the uninterrupted run."""
    settings = make_settings(iterations=4, max_staleness=2, max_outstanding_groups=6)
    length = finished(make_plan(settings, seed=7)).kernel.now
    for step in range(40):
        world = finished(make_plan(settings, seed=7, restarts=(length * step / 40,), checkpoint_every=1 + step % 3))
        assert [len(b) for b in batches(world)] == [2] * 4
        assert sorted(d for b in batches(world) for d in b) == list(range(8))
        assert world.term == 2
        records = world.records or []
        recovered = [r.event for r in records if isinstance(r.event, Recovered)]
        assert recovered[1].trained <= recovered[1].update <= recovered[1].trained + 2
        told = [e.update for r in records if isinstance(r.event, StoreEvents) for e in r.event.events
                if isinstance(e, CutTrained)]  # fmt: skip
        assert set(told) <= set(range(4))
