"""Schedules: when a replica pulls, and when it is granted work."""

from __future__ import annotations

import pytest

from laminar.control.commands import GiveUpEval, Issue, Pull, Restart
from laminar.control.events import (
    Buffered,
    CutMade,
    CutTrained,
    Dropped,
    EvalDone,
    Exhausted,
    Finished,
    Recovered,
    RelayBeat,
    ReplicaBeat,
)
from laminar.types import Load, SampleId, Version
from tests.control.scene import Scene, kinds, samples, v

# ---------------------------------------------------------------- laminar


def test_first_weights_then_work() -> None:
    scene = Scene(replicas=2, groups_in_flight=2)
    assert scene.trainer(0) == []
    assert scene.relay(0) == [Pull(f"r{i}", 1, v(0), "first weights") for i in range(2)]
    (issue,) = scene.beat("r1", 0)
    assert issue == Issue("r1", 1, v(0), 2, "train", "idle, and the staleness rule has room")


def test_an_empty_replica_pulls_before_it_is_granted() -> None:
    scene = Scene(max_staleness=4, max_outstanding_groups=10)
    scene.issued(scene.ready()[0])
    assert scene.relay(0, 1) == [] or "Pull" not in kinds(scene.records[-1].commands), "not while it generates"
    commands = scene.store(Finished(samples([0])))
    assert [c for c in commands if isinstance(c, Pull | Issue)] == [
        Pull("r0", 1, v(1), "empty, and a newer version is here")
    ]
    assert "Issue" in kinds(scene.beat("r0", 1))


def test_grants_not_answered_count_against_the_room() -> None:
    """Invariant 7: two replicas that ask at the same moment do not share one place."""
    scene = Scene(replicas=3, max_staleness=0, groups_in_flight=1)
    scene.trainer(0)
    scene.relay(0)
    counts = [kinds(scene.beat(f"r{i}", 0)) for i in range(3)]
    assert counts == [["Issue"], ["Issue"], []]
    assert scene.state.room(v(0)) == 0


def recovered(scene: Scene, orphans: dict[SampleId, int]) -> None:
    live = tuple((g, "issued") for g in sorted({s.group for s in orphans}))
    scene.state.recover(0.0, Recovered(1, live, orphans=tuple((s, v(n), n + 1) for s, n in orphans.items())))


def test_orphans_begin_anew_in_whole_groups_and_before_new_ones() -> None:
    scene = Scene(groups_in_flight=2, max_outstanding_groups=9)
    recovered(scene, dict.fromkeys(samples([3, 1, 2]), 0))
    (restart,) = scene.ready(1)
    assert isinstance(restart, Restart) and restart.samples == samples([1, 2])
    assert restart.version == v(1), "nobody has version 0 any more"
    scene.issued(restart)
    assert list(scene.state.orphans) == list(samples([3]))


def test_orphans_wait_for_a_version_that_is_not_older() -> None:
    """Protocol §5."""
    scene = Scene(max_outstanding_groups=9, max_staleness=4)
    recovered(scene, {SampleId(0, 0): 2, SampleId(1, 0): 0})
    restart = scene.ready(1)[0]
    assert isinstance(restart, Restart) and restart.samples == (SampleId(1, 0),)
    scene.issued(restart)
    scene.relay(1, 3)
    scene.store(Finished((SampleId(1, 0),)))
    restart = scene.beat("r0", 3)[0]
    assert isinstance(restart, Restart) and restart.samples == (SampleId(0, 0),)


# ---------------------------------------------------------------- evaluation


def test_an_evaluation_is_shared_and_comes_before_training() -> None:
    scene = Scene(replicas=2, eval_groups=5, eval_before_train=True)
    scene.trainer(0)
    scene.relay(0)
    (first,) = [c for c in scene.beat("r0", 0) if isinstance(c, Issue)]
    (second,) = [c for c in scene.beat("r1", 0) if isinstance(c, Issue)]
    assert [(c.kind, c.num_groups) for c in (first, second)] == [("eval", 5), ("train", 1)]

    scene = Scene(replicas=2, eval_groups=5, eval_before_train=False, eval_every=1)
    scene.ready(0)
    scene.trainer(1)
    scene.relay(0, 1)
    assert set(scene.state.evaluations) == {v(1)}


@pytest.mark.parametrize(
    ("version", "state", "settings", "due"),
    [
        (0, "training", {"eval_before_train": True}, True),
        (0, "training", {"eval_every": 1}, False),
        (1, "training", {"eval_every": 2}, False),
        (2, "training", {"eval_every": 2}, True),
        (3, "training", {"eval_after_train": True}, False),
        (3, "done", {"eval_after_train": True}, True),
        (3, "done", {}, False),
        (2, "training", {"eval_every": 2, "eval_groups": 0}, False),
    ],
)
def test_which_versions_are_evaluated(version: int, state: str, settings: dict[str, object], due: bool) -> None:
    scene = Scene(**({"eval_groups": 3} | settings))
    scene.trainer(version, state)
    assert (v(version) in scene.state.evaluations) == due


def test_a_version_to_be_evaluated_is_kept_and_pulled_though_a_newer_one_is_there() -> None:
    scene = Scene(eval_groups=2, eval_every=2, max_staleness=4, max_outstanding_groups=10)
    scene.issued(scene.ready()[0])
    scene.trainer(2)
    scene.relay(2, 3)
    assert scene.state.relays["relay"].keep == (v(0), v(2))
    (pull, *_) = scene.store(Finished(samples([0])))
    assert pull == Pull("r0", 1, v(2), "evaluation of version 2")
    (issue, *_) = scene.beat("r0", 2)
    assert isinstance(issue, Issue) and (issue.kind, issue.num_groups) == ("eval", 2)
    scene.issued(issue)
    scene.store(Finished(samples([1, 2], size=1)))
    scene.store(EvalDone(v(2)))
    assert scene.state.relays["relay"].keep == ()
    assert scene.state.replicas["r0"].pulling == v(3)


def test_an_evaluation_whose_weights_are_gone_is_given_up() -> None:
    """Protocol §5: completion does not wait for a version that nobody holds."""
    scene = Scene(eval_groups=2, eval_every=2, max_staleness=4, max_outstanding_groups=10)
    scene.issued(scene.ready()[0])
    scene.trainer(2)
    scene.relay(3)
    commands = scene.store(Finished(samples([0])))
    assert GiveUpEval(v(2), "no relay and no replica holds it any more") in commands


@pytest.mark.parametrize("gone", ["stopped", "given up"])
def test_a_replica_that_is_gone_holds_no_version(gone: str) -> None:
    """As above: the last replica that held the weights was drained, or died once too often."""
    scene = Scene(2, eval_groups=2, eval_every=2, max_staleness=4, max_outstanding_groups=10)
    scene.issued(scene.ready()[0])
    scene.state.replicas["r0"].version = v(2)
    scene.state.processes["replica", "r0"].state = gone
    scene.trainer(2)
    scene.relay(3)
    commands = scene.store(Finished(samples([0])))
    assert GiveUpEval(v(2), "no relay and no replica holds it any more") in commands
    assert scene.state.evaluations[v(2)].done
    assert "Pull" in kinds(scene.tick())


# ---------------------------------------------------------------- sync


def wave(scene: Scene, version: int) -> list[Issue]:
    """All replicas load `version`; the grants of the wave that opens."""
    scene.trainer(version)
    scene.relay(version)
    grants = []
    for name in sorted(scene.state.replicas):
        grants += [c for c in scene.beat(name, version) if isinstance(c, Issue)]
    return grants


def sync(replicas: int = 2, **changes: object) -> Scene:
    return Scene(replicas, schedule="sync", max_staleness=0, groups_per_batch=4, **changes)


def test_a_wave_opens_when_all_hold_the_version_and_shares_the_batch() -> None:
    scene = sync(replicas=3)
    scene.trainer(0)
    scene.relay(0)
    assert scene.beat("r0", 0) == [] and scene.beat("r2", 0) == []
    grants = scene.beat("r1", 0)
    assert [(c.replica, c.num_groups) for c in grants if isinstance(c, Issue)] == [("r0", 2), ("r1", 1), ("r2", 1)]
    assert {c.reason for c in grants if isinstance(c, Issue)} == {"wave 0 opens"}


def test_the_next_wave_waits_for_the_batch_and_for_everybody() -> None:
    scene = sync()
    for command in wave(scene, 0):
        scene.issued(command)
    assert scene.relay(0, 1) == [], "nobody pulls in a wave"
    assert [c for c in scene.store(Finished(samples([0, 1]))) if isinstance(c, Pull | Issue)] == []
    pulls = [c for c in scene.store(Finished(samples([2, 3]))) if isinstance(c, Pull | Issue)]
    assert pulls == [Pull(f"r{i}", 1, v(1), "empty, and a newer version is here") for i in range(2)]
    scene.store(Buffered((0, 1, 2, 3)), CutMade(0, 0, (0, 1, 2, 3)), CutTrained(0))
    assert scene.beat("r0", 1) == []
    grants = [c for c in scene.beat("r1", 1) if isinstance(c, Issue)]
    assert [(c.num_groups, c.version, c.reason) for c in grants] == [(2, v(1), "wave 1 opens")] * 2


def test_without_the_new_version_no_wave_opens() -> None:
    """k = 0: batch 1 may only hold groups of version 1."""
    scene = sync()
    for command in wave(scene, 0):
        scene.issued(command)
    scene.store(Finished(samples(range(4))), Buffered((0, 1, 2, 3)), CutMade(0, 0, (0, 1, 2, 3)))
    assert [c for c in scene.tick() if isinstance(c, Pull | Issue)] == []


def test_a_refill_goes_to_a_replica_whose_weights_are_new_enough() -> None:
    """The least busy one came late to the wave and holds older weights; nobody else was asked."""
    scene = Scene(2, schedule="one_step", iterations=9, groups_per_batch=2, max_outstanding_groups=8)
    owned = (("r1", 1, samples([4])),)
    scene.handle(Recovered(1, ((4, "issued"),), cut_groups=4, update=2, trained=1, owned=owned))
    scene.relay(0)
    assert not any(isinstance(c, Issue) for c in scene.beat("r0", 0))
    scene.relay(0, 1)
    (refill,) = [c for c in scene.beat("r1", 1) if isinstance(c, Issue)]
    assert refill == Issue("r1", 1, v(1), 1, "train", "refill of the open wave")


def test_a_refill_joins_the_open_wave() -> None:
    """A hole left by a dropped group is filled by the least busy replica, under the version of the wave."""
    scene = sync()
    for command in wave(scene, 0):
        scene.issued(command)
    (refill,) = scene.store(Finished(samples([2])), Dropped(samples([3]), (3,), "engine_error"))
    assert refill == Issue("r1", 1, v(0), 1, "train", "refill of the open wave")
    assert [c for c in scene.tick() if isinstance(c, Issue)] == [], "once"
    scene.issued(refill)
    commands = scene.store(Dropped(samples([4]), (4,), "engine_error"), Dropped((), (0,), "zero_variance"))
    assert [(c.replica, c.num_groups) for c in commands if isinstance(c, Issue)] == [("r1", 2)]


def test_the_last_wave_may_be_short() -> None:
    """Faults 3 and 9: prompts that end in the middle of a wave end it, and what comes after it goes on."""
    scene = sync(iterations=None, eval_groups=2, eval_after_train=True)
    first, second = wave(scene, 0)
    scene.issued(first)
    scene.store(Exhausted())
    scene.issued(second, groups=1)
    scene.store(Finished(samples([0, 1, 2])), Buffered((0, 1, 2)), CutMade(0, 0, (0, 1, 2)), CutTrained(0))
    scene.relay(1)
    scene.trainer(1, "done")
    assert scene.manager.ended is None
    assert [r.pulling for r in scene.state.replicas.values()] == [v(1)] * 2
    grants = [c for name in ("r0", "r1") for c in scene.beat(name, 1) if isinstance(c, Issue)]
    assert [(c.kind, c.version, c.num_groups) for c in grants] == [("eval", v(1), 1)] * 2


def test_orphans_come_before_the_next_wave() -> None:
    """They are begun anew in a wave of their own: no group of the next batch goes out while one is left."""
    scene = sync()
    recovered(scene, dict.fromkeys(samples([0, 1, 2, 3]), 0))
    again = Version(1, 0)
    scene.handle(RelayBeat("relay", 1, "n", (again,), 1))
    commands = [
        c
        for name in ("r0", "r1")
        for c in scene.handle(ReplicaBeat(name, 1, "idle", again, 0, node="n"))
        if isinstance(c, Restart | Issue)
    ]
    assert [(type(c), c.replica) for c in commands] == [(Restart, "r0")], "two a replica, if both were there"
    scene.issued(commands[0])
    assert not scene.state.orphans and scene.state.replicas["r1"].activity == "idle"


# ---------------------------------------------------------------- one step and stream


def test_one_step_generates_a_batch_while_the_one_before_is_trained() -> None:
    """k = 1: wave 1 goes out under version 0; wave 2 waits for version 1, and is the first under it."""
    scene = Scene(2, schedule="one_step", max_staleness=1, groups_per_batch=4, max_outstanding_groups=8)
    for command in wave(scene, 0):
        scene.issued(command)
    commands = scene.store(Finished(samples(range(4))), Buffered((0, 1, 2, 3)))
    second = [c for c in commands if isinstance(c, Issue)]
    assert [(c.num_groups, c.version, c.reason) for c in second] == [(2, v(0), "wave 1 opens")] * 2
    for command in second:
        scene.issued(command)
    scene.store(CutMade(0, 0, (0, 1, 2, 3)))
    commands = scene.store(Finished(samples(range(4, 8))), Buffered((4, 5, 6, 7)), CutMade(1, 0, (4, 5, 6, 7)))
    assert [c for c in commands if isinstance(c, Issue)] == [], "batch 2 may hold nothing of version 0"
    grants = [c for c in wave(scene, 1) if isinstance(c, Issue)]
    assert [(c.num_groups, c.version, c.reason) for c in grants] == [(2, v(1), "wave 2 opens")] * 2


def test_the_waves_of_stream_do_not_count_parts() -> None:
    """A batch that is cut in parts leaves no room for a second wave before all of it is generated."""
    scene = Scene(1, schedule="stream", max_staleness=1, groups_per_batch=4, num_mini_batches=2,
                  max_outstanding_groups=8)  # fmt: skip
    (command,) = wave(scene, 0)
    scene.issued(command)
    scene.store(Finished(samples([0, 1])), Buffered((0, 1)))
    commands = scene.store(CutMade(0, 0, (0, 1), last=False))
    assert [c for c in commands if isinstance(c, Issue)] == [] and scene.state.update == 0
    scene.store(Finished(samples([2, 3])), Buffered((2, 3)))
    (grant,) = [c for c in scene.records[-1].commands if isinstance(c, Issue)]
    assert (grant.num_groups, grant.reason) == (4, "wave 1 opens")
    scene.store(CutMade(0, 1, (2, 3)))
    assert scene.state.update == 1


# ---------------------------------------------------------------- fresh


def test_fresh_admits_as_groups_end_while_it_has_the_newest_weights() -> None:
    scene = Scene(admission="fresh", groups_in_flight=2, max_staleness=4, max_outstanding_groups=10)
    scene.issued(scene.ready()[0])
    commands = scene.store(Finished(samples([0])))
    (grant,) = [c for c in commands if isinstance(c, Issue)]
    assert grant == Issue("r0", 1, v(0), 1, "train", "it holds the newest version and has room")
    assert [c for c in scene.tick() if isinstance(c, Issue)] == [], "once"
    scene.issued(grant)
    assert [c for c in scene.store(Finished((SampleId(1, 0),))) if isinstance(c, Issue)] == [], "no group has ended"

    scene.relay(0, 1)
    commands = scene.store(Finished((SampleId(1, 1),)))
    assert [c for c in commands if isinstance(c, Issue | Pull)] == [], "a newer version is here: it drains"
    commands = scene.store(Finished(samples([2])))
    assert [c for c in commands if isinstance(c, Issue | Pull)] == [
        Pull("r0", 1, v(1), "empty, and a newer version is here")
    ]


@pytest.mark.parametrize("why", ["waits for KV", "drains", "is part of a move", "an evaluation is due"])
def test_fresh_admits_nothing_more(why: str) -> None:
    evaluates = why == "an evaluation is due"
    scene = Scene(
        admission="fresh",
        groups_in_flight=2,
        max_staleness=4,
        max_outstanding_groups=10,
        eval_groups=int(evaluates),
        eval_every=1,
    )
    scene.issued(scene.ready()[0])
    replica = scene.state.replicas["r0"]
    if why == "waits for KV":
        replica.load = Load(10, 10, 1, 1)
    elif why == "drains":
        replica.draining, scene.state.unwanted["r0"] = True, scene.now
    elif why == "is part of a move":
        replica.receives["r9"] = None
    else:
        scene.trainer(1)
    assert [c for c in scene.store(Finished(samples([0]))) if isinstance(c, Issue)] == []


# ---------------------------------------------------------------- partial


def test_partial_interrupts_everybody_once_at_each_version() -> None:
    scene = Scene(2, schedule="partial", groups_in_flight=1, max_staleness=2, max_outstanding_groups=2)
    scene.trainer(0)
    scene.relay(0)
    for name in ("r0", "r1"):
        scene.issued(scene.beat(name, 0)[0])
    pulls = [c for c in scene.relay(1) if isinstance(c, Pull)]
    assert pulls == [Pull(f"r{i}", 1, v(1), "a newer version is here", interrupt=True) for i in range(2)]
    assert [c for c in scene.relay(2) if isinstance(c, Pull)] == [], "not while it loads"
    (pull,) = [c for c in scene.beat("r1", 1) if isinstance(c, Pull)]
    assert (pull.replica, pull.version, pull.interrupt) == ("r1", v(2), True)
    assert [c for c in scene.tick() if isinstance(c, Pull)] == []


def test_partial_does_not_interrupt_an_evaluation() -> None:
    """Invariant 1 for evaluations: they are of one version under every schedule."""
    scene = Scene(schedule="partial", max_staleness=2, eval_groups=1, eval_before_train=True)
    scene.issued(scene.ready()[0])
    scene.trainer(1)
    assert [c for c in scene.relay(0, 1) if isinstance(c, Pull)] == []
    scene.store(Finished((SampleId(0, 0),)), EvalDone(v(0)))
    assert scene.state.replicas["r0"].pulling == v(1)


def test_partial_keeps_replicas_full_under_the_newest_version() -> None:
    scene = Scene(schedule="partial", groups_in_flight=2, max_staleness=2, max_outstanding_groups=9)
    scene.issued(scene.ready()[0])
    (grant,) = [c for c in scene.store(Finished(samples([0]))) if isinstance(c, Issue)]
    assert (grant.num_groups, grant.version) == (1, v(0))
