"""Faults of docs/faults.md that the account and the manager alone must keep away from users."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from laminar.control.accounts import Accounts
from laminar.control.ledger import TERMINAL
from laminar.sim.faults import Fault, run_faults
from laminar.sim.plan import Delays, Plan
from laminar.sim.world import World
from tests.control.plans import TOY, dropped, make_plan, make_settings
from tests.control.scene import samples, v

SLOW_TRAINER = replace(TOY, train_s_per_iteration=20.0)


def group_of(size: int, **changes: object) -> Accounts:
    """One group, issued to r0 and accepted."""
    accounts = Accounts(make_settings(group_size=size, **changes))
    for s in accounts.issue("r0", 1, v(0)).samples:
        accounts.accept(s.id, 0)
    return accounts


@pytest.mark.parametrize("at", [1.0, 2.0, 3.5])
def test_the_last_samples_of_a_dead_replica_are_not_waited_for(at: float) -> None:
    """Fault 5: others go on with them, and every batch is as large as it should be."""
    plan = make_plan(make_settings(group_size=4, max_restarts=2), replicas=2)
    world = World(plan)
    world.kernel.at(at, lambda: world.driver.kill("replica", "replica-1"))
    assert world.run(until=1000).outcome == "completed"
    assert [i.num_samples for i in world.store.iterations] == [8, 8, 8] and not dropped(world)


@pytest.mark.parametrize("quota", [4, 24])
def test_publishing_waits_for_no_request(quota: int) -> None:
    """Fault 8: an iteration takes as long with six times as many requests outstanding, and with replicas that stand."""
    settings = make_settings(iterations=6, max_staleness=None, max_outstanding_groups=quota, groups_in_flight=4)
    at_once = Delays(coalesce_s=0.0, exchange_s=0.0, poll_s=0.0, beat_s=0.0)
    world = World(Plan(settings, SLOW_TRAINER, replicas=3, one_machine=True, delays=at_once))
    for name in ("replica-0", "replica-1", "replica-2"):
        world.kernel.at(30.0, lambda name=name: world.replicas[name].stall(15.0))  # type: ignore[misc]
    assert world.run(until=10_000).outcome == "completed"
    published = [mark.time for mark in world.marks]
    tokens = [row.tokens for row in world.store.iterations]
    for (before, after), size in zip(pairwise(published[1:]), tokens[1:], strict=True):
        assert after - before == pytest.approx(SLOW_TRAINER.train_step_s(size, 1, 1) + SLOW_TRAINER.publish_s())


def test_a_full_buffer_drops_nothing() -> None:
    """Fault 11: the trainer is slow and the replicas are not; the account closes after each transaction."""
    settings = make_settings(iterations=6, max_staleness=None, max_outstanding_groups=6, groups_in_flight=3)
    world = World(make_plan(settings, profile=SLOW_TRAINER))
    most = 0

    def look() -> None:
        nonlocal most
        groups = world.store.groups.values()
        most = max(most, world.store.accounts.num_buffered)
        assert len(groups) == world.store.accounts.cursor
        assert {g.id for g in groups if g.state not in TERMINAL} == set(world.store.accounts.groups)

    world.after_commit.append(look)
    assert world.run(until=10_000).outcome == "completed"
    assert most == 6, "the whole quota waits in the buffer"
    assert set(dropped(world)) <= {"run_ended"}


def test_a_failed_response_is_never_a_complete_one() -> None:
    """Fault 14: whichever word comes first is the last, and a repeat counts no more."""
    accounts = group_of(3, min_group_size=2)
    failed, ended, _ = samples([0], 3)
    assert accounts.drop(failed, "engine_error", 0)
    assert not accounts.finish(failed, 0, 0, "stop") and not accounts.drop(failed, "engine_error", 0)
    assert accounts.finish(ended, 0, 0, "stop")
    assert not accounts.finish(ended, 0, 0, "stop")
    states = [s.state for s in accounts.groups[0].samples]
    assert states == ["dropped", "finished", "running"] and accounts.dropped == {"engine_error": 1}


@pytest.mark.parametrize("state", ["issued", "running", "orphan", "finished", "scored", "buffered", "cut"])
def test_cancelling_is_legal_in_every_state(state: str) -> None:
    """Fault 15: of a sample, and of its whole group."""

    def reached() -> Accounts:
        accounts = Accounts(make_settings(group_size=3, groups_per_batch=1, min_group_size=1))
        group = accounts.issue("r0", 1, v(0))
        order = ["issued", "running", "finished", "scored", "buffered", "cut"]
        step = order.index(state) if state in order else 1
        for s in group.samples:
            if step >= 1:
                accounts.accept(s.id, 0)
            if step >= 2:
                accounts.finish(s.id, 0, 0, "stop")
        for s in group.samples[: 1 if step == 3 else 3 if step > 3 else 0]:
            accounts.score(s.id, 0, 1.0, None)
        if state == "orphan":
            accounts.orphan(group.samples[0])
        if state == "cut":
            assert accounts.cut_next(lambda groups: groups) is not None
        return accounts

    accounts = reached()
    assert state in (accounts.groups[0].state, accounts.groups[0].samples[0].state)
    if state not in ("cut", "buffered"):
        assert accounts.drop(samples([0])[0], "interrupted")
        assert accounts.groups[0].samples[0].state == "dropped"
    accounts = reached()
    group = accounts.groups[0]
    accounts.drop_group(group, "interrupted")
    assert group.state == "dropped" and {s.state for s in group.samples} == {"dropped"}
    assert accounts.num_live == 0


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([1.0, 1.0, 1.0, 1.0], False),
        ([0.0, 0.0, 0.0, 0.0], False),
        ([0.5, 0.5, 0.5, 0.5], False),
        ([0.0, 1.0, 0.0, 1.0], True),
        ([0.0, 1.0, None, None], True),
        ([1.0, 1.0, None, None], False),
    ],
)
def test_zero_variance_is_that_of_the_members_with_a_score(rewards: list[float | None], kept: bool) -> None:
    """Fault 36: whatever their mean."""
    accounts = group_of(4, drop_zero_variance=True)
    for sample, reward in zip(samples([0], 4), rewards, strict=True):
        accounts.finish(sample, 0, 0, "stop")
        accounts.score(sample, 0, reward, None)
    for sample, reward in zip(samples([0], 4), rewards, strict=True):
        accounts.score(sample, 0, reward, None)
    assert accounts.groups[0].state == ("buffered" if kept else "dropped")


@pytest.mark.parametrize("role", ["replica", "trainer", "manager", "datastore", "scorer"])
def test_admission_does_not_inflate_after_a_recovery(role: str) -> None:
    """Faults 28 and 30: quota, bound and age at use hold while and after each process is replaced."""
    id_ = "replica-0" if role == "replica" else role
    plan = make_plan(make_settings(iterations=6, max_restarts=3), seed=4, replicas=2)
    result = run_faults(plan, tuple(Fault("kill", role, id_, at=at) for at in (2.0, 6.0)))
    assert (result.outcome, result.problems) == ("completed", ())
