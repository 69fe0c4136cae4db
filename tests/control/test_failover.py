"""What follows from a death: who is replaced, and who goes on with what the dead held."""

from __future__ import annotations

import pytest

from laminar.control.commands import Adopt, Command, EndRun, Issue, NoteDeaths, Orphan, Pull, Replace, Restart
from laminar.control.events import (
    Adopted,
    Buffered,
    DrainRequested,
    Finished,
    Orphaned,
    ProcessEnded,
    Recovered,
    RelayBeat,
    ReplicaBeat,
    TrainerBeat,
)
from laminar.control.manager import Manager
from laminar.types import SampleId, Version
from tests.control.scene import Scene, samples, v

EVAL = 2**40


def some(commands: list[Command], *which: type) -> list[Command]:
    return [c for c in commands if isinstance(c, which)]


def scene_of(replicas: int = 3, versions: tuple[int | None, ...] = (), **changes: object) -> Scene:
    """Replicas with these versions, without work: the run has all the groups that it may have."""
    rules = {"max_restarts": 2, "max_staleness": 4, "max_outstanding_groups": 1, "adopt_timeout_s": 30.0,
             "dead_after_s": 1e9, "suspect_after_s": 1e9, "stall_timeout_s": 1e9}  # fmt: skip
    scene = Scene(replicas, **(rules | changes))
    scene.state.live[0] = "issued"
    whole = sorted({n for n in versions if n is not None})
    scene.trainer(max(whole, default=0))
    scene.relay(*whole)
    for i, version in enumerate(versions):
        if version is not None:
            scene.handle(ReplicaBeat(f"r{i}", 1, "idle", v(version), 0, node="n"))
    return scene


def orphaned(scene: Scene, groups: dict[int, tuple[int, int | None]]) -> list[Command]:
    """Group -> version and deadline."""
    return scene.store(*(Orphaned(samples([g]), v(n), due) for g, (n, due) in groups.items()))


# ---------------------------------------------------------------- who is replaced


def test_a_dead_replica_is_replaced_and_its_work_orphaned() -> None:
    scene = Scene(2, max_restarts=2)
    (command, *_) = scene.ready()
    scene.issued(command)
    commands = scene.handle(ProcessEnded("replica", command.replica, 1, "out of memory"))
    assert commands[:2] == [
        Orphan(command.replica, 1, "out of memory"),
        Replace("replica", command.replica, 2, "out of memory"),
    ]
    assert scene.manager.take_notes()[-1] == (
        f"replica {command.replica} died: out of memory; it held 2 unfinished samples; restarting it"
    )
    process = scene.state.processes["replica", command.replica]
    assert (process.state, process.incarnation) == ("starting", 2)
    assert scene.handle(ProcessEnded("replica", command.replica, 1, "out of memory")) == [], "once"
    assert scene.beat(command.replica, 0) == [], "what the dead still says is not heard"


def test_work_granted_to_the_dead_is_not_waited_for() -> None:
    """A grant that was on its way counts no longer; if it was carried out, its samples come back as orphans."""
    scene = Scene(2, max_restarts=2, max_staleness=0, groups_per_batch=1, max_outstanding_groups=1)
    scene.trainer(0)
    scene.relay(0)
    (issue,) = some(scene.beat("r0", 0), Issue)
    assert some(scene.beat("r1", 0), Issue) == []
    scene.issued(issue)
    scene.handle(ProcessEnded("replica", "r0", 1, "killed"))
    assert scene.state.granted == 0 and scene.state.live == {0: "issued"}
    (adopt,) = some(scene.store(Orphaned(samples([0]), v(0), 0)), Adopt)
    assert adopt == Adopt("r1", 1, v(0), samples([0]), "it holds their version")


@pytest.mark.parametrize(("max_restarts", "deaths"), [(1, 2), (3, 4)])
def test_a_replica_is_given_up_after_so_many_restarts(max_restarts: int, deaths: int) -> None:
    scene = Scene(2, max_restarts=max_restarts)
    scene.ready()
    for n in range(1, deaths + 1):
        commands = scene.handle(ProcessEnded("replica", "r0", n, "boom"))
        assert bool(some(commands, Replace)) == (n < deaths) and some(commands, Orphan) and scene.manager.ended is None
    assert scene.state.processes["replica", "r0"].state == "given up"
    assert scene.manager.take_notes()[-1].endswith(f"given up after {max_restarts} restarts")
    scene.beat("r1", 0)
    assert scene.state.num_replicas == 1, "waves do not wait for it"


def test_deaths_are_told_when_their_number_changes() -> None:
    """By role, all of this start; a manager that takes over says once more what it was told."""
    scene = Scene(2, max_restarts=3)
    scene.ready()
    told = [
        some(scene.handle(ProcessEnded(role, id_, n, "boom")), NoteDeaths)
        for role, id_, n in [
            ("replica", "r0", 1),
            ("replica", "r0", 1),
            ("replica", "r1", 1),
            ("trainer", "trainer", 1),
        ]
    ]
    assert told == [
        [NoteDeaths((("replica", 1),))],
        [],
        [NoteDeaths((("replica", 2),))],
        [NoteDeaths((("replica", 2), ("trainer", 1)))],
    ]
    assert some(scene.tick(), NoteDeaths) == []
    again = Manager(scene.manager.settings)
    commands = again.handle(scene.now, Recovered(2, processes=scene.state.seen()))
    assert some(commands, NoteDeaths) == [NoteDeaths((("replica", 2), ("trainer", 1)))]


def test_without_its_last_replica_the_run_fails() -> None:
    scene = Scene(2, max_restarts=1)
    scene.ready()
    commands: list[Command] = []
    for replica in ("r0", "r1"):
        for n in (1, 2):
            assert scene.manager.ended is None
            commands = scene.handle(ProcessEnded("replica", replica, n, "boom"))
    assert some(commands, EndRun) == [EndRun("failed", "replica r1 died: boom, 1 restarts did not help")]


def test_a_replica_that_was_removed_is_no_reason_to_go_on() -> None:
    scene = Scene(2, max_restarts=1, groups_in_flight=4)
    scene.handle(DrainRequested("r1"))
    scene.handle(ProcessEnded("replica", "r0", 1, "boom"))
    assert scene.manager.ended is None
    scene.handle(ProcessEnded("replica", "r0", 2, "boom"))
    assert scene.manager.ended == EndRun("failed", "replica r0 died: boom, 1 restarts did not help")


def test_a_trainer_that_can_not_be_mended_fails_the_run() -> None:
    scene = Scene(max_restarts=1)
    scene.ready()
    assert some(scene.handle(ProcessEnded("trainer", "trainer", 1, "boom")), Replace, EndRun) == [
        Replace("trainer", "trainer", 2, "boom")
    ]
    assert some(scene.handle(ProcessEnded("trainer", "trainer", 2, "boom")), EndRun) == [
        EndRun("failed", "trainer died: boom, 1 restarts did not help")
    ]


def test_silence_is_a_death_like_another() -> None:
    scene = Scene(2, max_restarts=1, suspect_after_s=2.0, dead_after_s=5.0)
    scene.ready()
    commands: list[Command] = []
    while not some(commands, Replace):
        others = ReplicaBeat("r1", 1, "idle", v(0), 0, node="n"), RelayBeat("relay", 1, "n", (v(0),), 1)
        commands = scene.tick(0.5, *others, TrainerBeat(1, v(0), 0, "training"))
        assert scene.now < 10
    assert some(commands, Orphan, Replace) == [
        Orphan("r0", 1, "silent for 5.5 s"),
        Replace("replica", "r0", 2, "silent for 5.5 s"),
    ]


# ---------------------------------------------------------------- who adopts


def test_a_live_holder_adopts_the_least_busy_first() -> None:
    scene = scene_of(3, (0, 0))
    scene.state.replicas["r0"].unfinished.update(dict.fromkeys(samples([8, 9])))
    assert some(orphaned(scene, {5: (0, 4)}), Adopt, Pull, Restart) == [
        Adopt("r1", 1, v(0), samples([5]), "it holds their version")
    ]
    assert not scene.state.orphans
    assert some(scene.tick(), Adopt, Pull) == [], "once"
    scene.store(Adopted("r1", 1, v(0), samples([5])))
    assert scene.state.owners[SampleId(5, 0)] == "r1" and not scene.state.replicas["r1"].bound


@pytest.mark.parametrize("busy", ["drains", "lets go", "pulls", "suspect"])
def test_who_can_not_keep_its_version_adopts_nothing(busy: str) -> None:
    scene = scene_of(1, (0,))
    replica = scene.state.replicas["r0"]
    replica.unfinished[SampleId(9, 0)] = None
    replica.activity = "generating"
    if busy == "drains":
        replica.draining, scene.state.unwanted["r0"] = True, scene.now
    elif busy == "lets go":
        replica.moving_to = "r9"
    elif busy == "pulls":
        replica.pulling = v(1)
    else:
        scene.state.processes["replica", "r0"].state = "suspect"
    assert some(orphaned(scene, {5: (0, 4)}), Adopt) == [] and set(scene.state.orphans) == set(samples([5]))


def test_without_a_holder_one_empty_replica_loads_the_version() -> None:
    """Protocol §5: before it admits or pulls anything else; and only one of them, others go on."""
    scene = scene_of(3, (2, 2, None))
    scene.relay(1, 2)
    scene.state.replicas["r0"].activity = "generating"
    scene.state.replicas["r0"].unfinished[SampleId(9, 0)] = None
    (pull,) = some(orphaned(scene, {5: (1, 5)}), Pull)
    assert pull == Pull("r1", 1, v(1), "orphans of this version wait for it")
    assert some(scene.tick(), Pull) == []
    assert scene.state.relays["relay"].keep == (v(1), v(2)), "the relay keeps it for them"
    assert some(scene.beat("r1", 1), Adopt) == [Adopt("r1", 1, v(1), samples([5]), "it holds their version")]


def test_what_nobody_has_begins_anew_under_the_newest() -> None:
    """Neither a replica nor a relay has version 1: no reason to wait."""
    scene = scene_of(2, (2, 2))
    commands = orphaned(scene, {5: (1, 5), 6: (3, 7)})
    assert some(commands, Restart) == [Restart("r0", 1, v(2), samples([5]), "nobody can go on with them")]
    assert set(scene.state.orphans) == set(samples([6])), "never under an older version"


def test_a_replica_with_old_weights_restarts_nothing() -> None:
    scene = scene_of(1, (2,))
    scene.relay(3)
    scene.state.replicas["r0"].activity = "generating"
    orphaned(scene, {5: (1, 5)})
    (pull,) = some(scene.tick(), Pull) or [None]
    assert pull is None
    scene.state.replicas["r0"].activity = "idle"
    assert some(scene.tick(), Pull, Restart) == [Pull("r0", 1, v(3), "empty, and a newer version is here")]
    assert some(scene.beat("r0", 3), Restart) == [Restart("r0", 1, v(3), samples([5]), "nobody can go on with them")]


def test_orphans_do_not_wait_for_ever() -> None:
    """Protocol §5: the only holder drains, a relay has the version but no replica is empty until it is too late."""
    scene = scene_of(2, (1, 2))
    first, second = scene.state.replicas["r0"], scene.state.replicas["r1"]
    first.draining, scene.state.unwanted["r0"] = True, scene.now
    for replica in (first, second):
        replica.activity = "generating"
        replica.unfinished[SampleId(90 + int(replica.id[1]), 0)] = None
    assert some(orphaned(scene, {5: (1, 5)}), Adopt, Pull, Restart) == []
    assert [c for _ in range(59) for c in some(scene.tick(0.5), Adopt, Pull, Restart)] == []
    scene.tick(1.0)
    second.unfinished.clear()
    second.activity = "idle"
    assert some(scene.tick(), Pull, Restart) == [Restart("r1", 1, v(2), samples([5]), "nobody can go on with them")]


def test_the_earliest_deadline_comes_first() -> None:
    scene = scene_of(2, (3, 3), groups_in_flight=1)
    commands = orphaned(scene, {5: (1, 5), 6: (0, 4), 7: (2, None)})
    assert [c.samples for c in some(commands, Restart)] == [samples([6]), samples([5])]  # type: ignore[attr-defined]


def test_under_partial_a_newer_replica_adopts_but_not_an_evaluation() -> None:
    """An evaluation has one version under every schedule."""
    scene = scene_of(1, (2,), schedule="partial", eval_groups=1)
    commands = scene.store(Orphaned(samples([5]), v(1), 5), Orphaned((SampleId(EVAL, 0),), v(1)))
    assert some(commands, Adopt) == [Adopt("r0", 1, v(2), samples([5]), "it holds their version")]
    assert set(scene.state.orphans) == {SampleId(EVAL, 0)}
    scene = scene_of(1, (2,), schedule="partial")
    assert some(orphaned(scene, {5: (3, 5)}), Adopt, Restart) == [], "nor an older one"


def test_adoption_after_a_resume() -> None:
    """A manager that begins adopts what its store found unowned, as soon as somebody holds the version."""
    scene = Scene(2, groups_in_flight=1, max_outstanding_groups=4)
    unowned = tuple((s, v(0), 1) for s in samples([0, 1]))
    scene.handle(Recovered(2, ((0, "issued"), (1, "issued")), orphans=unowned))
    scene.ready()
    adopts = [c for r in scene.records for c in r.commands if isinstance(c, Adopt)]
    assert [c.replica for c in adopts] == ["r0", "r1"], "what is meant for the second waits until it has loaded"
    assert adopts[0].samples == samples([0])


def test_an_adopter_that_dies_first_leaves_them_to_the_next() -> None:
    scene = scene_of(2, (0, 0))
    scene.state.replicas["r1"].unfinished.update(dict.fromkeys(samples([8, 9])))
    (adopt,) = some(orphaned(scene, {5: (0, 4)}), Adopt)
    assert isinstance(adopt, Adopt) and adopt.replica == "r0"
    scene.handle(ProcessEnded("replica", "r0", 1, "killed"))
    scene.store(Adopted("r0", 1, v(0), samples([5])))
    (adopt,) = some(orphaned(scene, {5: (0, 4)}), Adopt)
    assert isinstance(adopt, Adopt) and adopt.replica == "r1"


def test_a_raised_lineage_is_another_version() -> None:
    """Protocol §6: work of a retired lineage is never adopted across; it begins anew, with its deadline."""
    scene = scene_of(1)
    new = Version(1, 2)
    scene.handle(RelayBeat("relay", 1, "n", (new,), 1))
    scene.handle(ReplicaBeat("r0", 1, "idle", new, 0, node="n"))
    commands = scene.store(Orphaned(samples([5]), v(2), 6), Finished(()), Buffered(()))
    assert some(commands, Adopt, Restart) == [Restart("r0", 1, new, samples([5]), "nobody can go on with them")]


# ---------------------------------------------------------------- what the user is told


def test_a_line_says_who_goes_on_with_what_the_dead_held_and_when() -> None:
    """Fault 5."""
    scene = Scene(3, max_restarts=2, groups_in_flight=2)
    scene.ready()
    held = samples([7, 8])
    scene.state.owners.update(dict.fromkeys(held, "r0"))
    scene.state.replicas["r0"].unfinished.update(dict.fromkeys(held))
    scene.handle(ProcessEnded("replica", "r0", 1, "killed"))
    scene.manager.take_notes()
    scene.now += 0.5
    scene.store(Orphaned(held, v(0), 4))
    scene.now += 0.75
    scene.store(Adopted("r1", 1, v(0), held[:2]))
    assert scene.manager.take_notes() == []
    scene.store(Finished(held[:1]), Adopted("r2", 1, v(0), held[2:]))
    assert scene.manager.take_notes() == ["the 4 unfinished samples of r0 are taken over after 1.2 s: 2 by r1, 2 by r2"]
    assert not scene.state.estates and not scene.state.left_by
    scene.handle(ReplicaBeat("r0", 2, "loading", None, 0, node="n"))
    assert scene.manager.take_notes() == [], "it can do nothing yet"
    scene.now += 2.0
    scene.handle(ReplicaBeat("r0", 2, "idle", v(0), 0, node="n"))
    assert scene.manager.take_notes() == ["replica r0 is back after 3.2 s"]
