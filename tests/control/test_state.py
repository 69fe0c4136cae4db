"""What the manager believes: which beats count, and how a replica's work comes and goes."""

from __future__ import annotations

from laminar.control.commands import Adopt, Issue, Pull
from laminar.control.events import (
    Adopted,
    Dropped,
    Exhausted,
    Finished,
    MoveEnded,
    Orphaned,
    ReplicaBeat,
    StoreEvents,
)
from laminar.types import SampleId, Version
from tests.control.scene import Scene, kinds, samples, v


def granted(scene: Scene) -> Issue:
    command = scene.ready()[0]
    assert isinstance(command, Issue)
    return command


def test_only_a_beat_says_what_a_replica_holds() -> None:
    """Invariant 4: a replica that was told to pull is not believed to hold anything yet."""
    scene = Scene()
    (pull,) = scene.relay(0)
    replica = scene.state.replicas["r0"]
    assert isinstance(pull, Pull) and replica.version is None and replica.activity == "pulling"
    scene.beat("r0", None, "loading")
    assert replica.version is None
    assert kinds(scene.beat("r0", 0)) == ["Issue"]
    assert replica.version == v(0)


def test_beats_of_an_earlier_start_are_ignored() -> None:
    scene = Scene()
    scene.ready()
    scene.handle(ReplicaBeat("r0", 2, "idle", None, 0, node="n"))
    scene.handle(ReplicaBeat("r0", 1, "generating", v(7), 99, node="n"))
    replica = scene.state.replicas["r0"]
    assert (replica.incarnation, replica.version) == (2, None)


def test_a_replica_is_idle_when_its_last_sample_is_finished_or_dropped() -> None:
    scene = Scene(groups_in_flight=2)
    scene.issued(granted(scene))
    replica = scene.state.replicas["r0"]
    assert list(replica.unfinished) == list(samples([0, 1])) and replica.activity == "generating"
    scene.store(Finished(samples([0])))
    scene.store(Dropped((SampleId(1, 1),), (), "engine_error"))
    assert replica.activity == "generating"
    scene.store(Dropped((SampleId(1, 0),), (1,), "group_incomplete"))
    assert not replica.unfinished and replica.activity == "granted", "and it was granted more at once"
    assert scene.state.live == {0: "issued"} and not scene.state.owners


def test_a_grant_that_brought_nothing_leaves_the_replica_idle() -> None:
    scene = Scene()
    command = granted(scene)
    scene.store(Exhausted())
    scene.issued(command, groups=0)
    assert scene.state.replicas["r0"].activity == "idle"
    assert scene.state.granted == 0 and scene.state.num_unfinished == 0


def test_news_of_the_store_counts_once() -> None:
    """Protocol §8: rows are resent until they are acknowledged, old ones together with new ones."""
    scene = Scene()
    command = granted(scene)
    scene.issued(command)
    told = scene.records[-1].event
    assert isinstance(told, StoreEvents)
    live = dict(scene.state.live)
    scene.handle(told)
    scene.handle(StoreEvents(told.last + 1, (*told.events, Dropped((), (0,), "filter"))))
    assert scene.state.live == {g: s for g, s in live.items() if g != 0}
    scene.handle(told)
    assert scene.state.outbox == told.last + 1 and 0 not in scene.state.live


def test_orphans_wait_until_somebody_owns_them() -> None:
    scene = Scene()
    scene.issued(granted(scene))
    scene.store(Orphaned(samples([0]), v(0), 1))
    replica = scene.state.replicas["r0"]
    assert not replica.unfinished
    assert scene.records[-1].commands[0] == Adopt("r0", 1, v(0), samples([0]), "it holds their version")
    assert not scene.state.orphans and replica.bound, "one that is given away is not given twice"
    scene.store(Adopted("r0", 1, v(0), samples([0])))
    assert list(replica.unfinished) == list(samples([0])) and replica.activity == "generating" and not replica.bound


def test_samples_that_change_hands_are_with_their_new_owner() -> None:
    """The destination of a move is at work with the first sample that arrives; both are free when it has ended."""
    scene = Scene(replicas=2, groups_in_flight=1, max_outstanding_groups=2)
    first, second = scene.state.replicas["r0"], scene.state.replicas["r1"]
    scene.relay(0)
    scene.issued(scene.beat("r0", 0)[0])
    first.moving_to, second.receives["r0"] = "r1", None
    assert scene.beat("r1", 0) == [], "it is given nothing but what the move brings"
    a, b = samples([0])
    scene.store(Adopted("r1", 1, v(0), (a,)))
    assert list(first.unfinished) == [b] and list(second.unfinished) == [a]
    assert (first.activity, second.activity) == ("generating", "generating") and scene.state.owners[a] == "r1"
    scene.store(Adopted("r1", 1, v(0), (b,)))
    assert not first.unfinished and first.bound and second.bound
    assert [c for c in scene.records[-1].commands if isinstance(c, Issue)] == [], "not while the move goes on"
    scene.store(MoveEnded("r0", "r1"))
    assert not first.bound and not second.bound and second.activity == "generating"
    assert first.activity == "granted"


def test_what_arrives_while_a_grant_is_open_waits_with_it() -> None:
    scene = Scene(groups_in_flight=1)
    command = granted(scene)
    replica = scene.state.replicas["r0"]
    scene.store(Adopted("r0", 1, v(0), samples([7])))
    assert replica.activity == "granted" and list(replica.unfinished) == list(samples([7]))
    scene.issued(command, groups=0)
    assert replica.activity == "generating", "it has work, though the grant brought none"


def test_what_arrives_at_an_earlier_start_is_nobodys() -> None:
    """Protocol §4: the replica died meanwhile; the data store says next that its samples are orphans again."""
    scene = Scene()
    scene.ready()
    scene.handle(ReplicaBeat("r0", 2, "idle", None, 0, node="n"))
    scene.store(Adopted("r0", 1, v(0), samples([7])))
    assert not scene.state.replicas["r0"].unfinished and not scene.state.owners
    scene.store(Orphaned(samples([7]), v(0), 1))
    assert set(scene.state.orphans) == set(samples([7]))


def test_a_replica_that_pulls_with_work_in_hand_goes_on_with_it() -> None:
    """Schedule `partial`: what was interrupted is still there, under the new version."""
    scene = Scene(schedule="partial", max_staleness=2, max_outstanding_groups=1)
    command = granted(scene)
    scene.issued(command)
    replica = scene.state.replicas["r0"]
    (pull, *_) = scene.relay(1)
    assert pull == Pull("r0", 1, v(1), "a newer version is here", interrupt=True)
    assert replica.activity == "pulling" and list(replica.unfinished) == list(samples([0]))
    scene.beat("r0", 1)
    assert replica.activity == "generating" and replica.version == v(1) and replica.pulling is None


def test_a_failed_pull_leaves_what_was_held() -> None:
    """Fault 24: with its old weights a replica is idle, without any it starts over; either can be given something."""
    scene = Scene(max_staleness=0)
    command = granted(scene)
    scene.issued(command)
    scene.relay(1)
    (pull, *_) = scene.store(Finished(samples([0])))
    assert pull == Pull("r0", 1, v(1), "empty, and a newer version is here")
    scene.relay(0)
    commands = scene.beat("r0", 0, failed=1)
    assert scene.state.replicas["r0"].activity == "granted" and kinds(commands) == ["Issue"]

    scene = Scene()
    scene.relay(0)
    assert kinds(scene.beat("r0", None, failed=1)) == ["Pull"], "again"
    assert scene.state.replicas["r0"].failed_pulls == 1


def test_a_failed_pull_of_a_replica_with_work_leaves_it_at_work() -> None:
    """Schedule `partial`: it goes on under the version that it had, and is interrupted for the next one."""
    scene = Scene(schedule="partial", max_staleness=2, max_outstanding_groups=1)
    scene.issued(granted(scene))
    scene.relay(1)
    scene.relay(2)
    assert scene.state.replicas["r0"].pulling == v(1)
    commands = scene.beat("r0", 0, "generating", failed=1)
    assert commands[0] == Pull("r0", 1, v(2), "a newer version is here", interrupt=True)


def test_versions_of_a_higher_lineage_are_newer() -> None:
    assert Version(1, 3) > Version(0, 7)
    scene = Scene()
    scene.ready(7)
    assert scene.state.newest(scene.state.replicas["r0"]) == v(7)
