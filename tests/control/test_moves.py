"""Moves between live replicas: repack, drain, scale; and that both sides are bound until a move has ended."""

from __future__ import annotations

import pytest

from laminar.control.commands import CancelMove, Command, Issue, Move, Orphan, Pull, Remove, Replace
from laminar.control.events import (
    Adopted,
    DrainRequested,
    Finished,
    Issued,
    MoveEnded,
    ProcessEnded,
    ReplicaBeat,
    ScaleRequested,
    Tick,
)
from laminar.types import Load, SampleId
from tests.control.scene import Scene, samples, v

PATIENT = {"dead_after_s": 1e9, "suspect_after_s": 1e9, "stall_timeout_s": 1e9}


def some(commands: list[Command], *which: type) -> list[Command]:
    return [c for c in commands if isinstance(c, which)]


def tail(kv: dict[str, int], version: int = 0, **changes: object) -> Scene:
    """Replicas that have so many tokens in their KV cache of 100, each with one sample of a group left to finish.

    There is room for work under a newer version, which the relay shows.
    """
    rules = {"repack": True, "max_staleness": 4, "max_outstanding_groups": 20, "groups_in_flight": 2}
    scene = Scene(len(kv), **(PATIENT | rules | changes))
    scene.relay(version)
    for number, name in enumerate(kv):
        scene.state.replicas[name].granted = 0
        scene.beat(name, version)
        (sample,) = samples([number], size=1)
        scene.store(Issued(name, 1, v(version), "train", (number,), (sample,), False))
    report(scene, kv, version)
    scene.relay(version, version + 1)
    return scene


def report(scene: Scene, kv: dict[str, int], version: int = 0, waiting: int = 0) -> None:
    for name, used in kv.items():
        running = len(scene.state.replicas[name].unfinished)
        load = Load(used, 100, running, waiting)
        scene.handle(ReplicaBeat(name, 1, "generating", v(version), int(scene.now * 10) + 1, load, "n"))


def look(scene: Scene) -> list[Command]:
    """The next time that repack looks."""
    scene.now += 10.0
    return scene.handle(Tick())


def ended(scene: Scene, move: Command) -> list[Command]:
    assert isinstance(move, Move)
    left = tuple(scene.state.replicas[move.source].unfinished)
    return scene.store(Adopted(move.destination, 1, move.version, left), MoveEnded(move.source, move.destination))


# ---------------------------------------------------------------- repack


def test_the_tail_of_several_moves_onto_one_and_the_freed_pull() -> None:
    scene = tail({"r0": 20, "r1": 50, "r2": 10})
    moves = some(look(scene), Move)
    assert [(m.source, m.destination, m.version) for m in moves] == [("r2", "r1", v(0)), ("r0", "r1", v(0))]  # type: ignore[attr-defined]
    assert scene.state.num_moves == 2
    assert [c for _ in range(3) for c in some(look(scene), Move)] == [], "bound replicas are not planned with"
    commands = ended(scene, moves[0])
    assert some(commands, Pull) == [Pull("r2", 1, v(1), "empty, and a newer version is here")]
    assert scene.state.replicas["r1"].bound, "the other move goes on"
    assert some(ended(scene, moves[1]), Pull) == [Pull("r0", 1, v(1), "empty, and a newer version is here")]
    assert not scene.state.replicas["r1"].bound
    assert len(scene.state.replicas["r1"].unfinished) == 3


@pytest.mark.parametrize(
    "changes", [{"repack": False}, *({"schedule": s} for s in ("sync", "one_step", "stream", "partial"))]
)
def test_repack_is_of_laminar_and_can_be_switched_off(changes: dict[str, object]) -> None:
    scene = tail({"r0": 20, "r1": 50}, **changes)
    assert some(look(scene), Move) == []


@pytest.mark.parametrize("why", ["another version", "waits for KV", "drains", "no work for it", "full", "not alive"])
def test_no_move(why: str) -> None:
    no_work = {"iterations": 1} if why == "no work for it" else {}
    kv = {"r0": 20, "r1": 75 if why == "full" else 50}
    scene = tail(kv, **no_work)
    first = scene.state.replicas["r0"]
    if why == "another version":
        first.version = v(1)
    elif why == "waits for KV":
        report(scene, {"r0": 20}, waiting=1)
    elif why == "drains":
        first.draining, scene.state.unwanted["r0"] = True, scene.now
        scene.state.replicas["r1"].version = v(3)  # so that the drain has nowhere to go either
    elif why == "no work for it":
        scene.state.cut_groups = 2
    elif why == "not alive":
        scene.state.processes["replica", "r0"].state = "suspect"
    assert some(look(scene), Move) == []


def test_a_load_that_is_older_than_the_news_of_an_end_hinders_no_move() -> None:
    """A replica with fewer samples left than it last said is no less in its tail."""
    scene = tail({"r0": 10, "r1": 20})
    for name in ("r0", "r1"):
        load = Load(10, 100, 2, 0)
        scene.handle(ReplicaBeat(name, 1, "generating", v(0), 9, load, "n"))
    assert some(look(scene), Move)


@pytest.mark.parametrize("missing, hinders", [(15, False), (16, True)])
def test_work_on_its_way_hinders_a_move_and_the_news_of_an_end_does_not(missing: int, hinders: bool) -> None:
    """A load may be newer than the news of which samples have ended, or older than a grant, which is whole groups."""
    rules = {"repack": True, "max_staleness": 4, "max_outstanding_groups": 20, "groups_in_flight": 4, "group_size": 16}
    scene = Scene(2, **(PATIENT | rules))
    scene.relay(0)
    for number, name in enumerate(("r0", "r1")):
        scene.state.replicas[name].granted = 0
        scene.beat(name, 0)
        numbers = (2 * number, 2 * number + 1)
        held = tuple(SampleId(group, i) for group in numbers for i in range(16))
        scene.store(Issued(name, 1, v(0), "train", numbers, held, False))
        load = Load(10 + number, 100, len(held) - missing, 0)
        scene.handle(ReplicaBeat(name, 1, "generating", v(0), 9, load, "n"))
    scene.relay(0, 1)
    assert (some(look(scene), Move) == []) == hinders


def test_those_that_have_just_begun_are_not_packed_onto_one() -> None:
    """Few tokens, but a whole batch each: nobody ends up with more than a replica takes at a time, 4 samples here."""
    scene = tail({"r0": 4, "r1": 6, "r2": 2})
    for name, running in (("r0", 4), ("r1", 3), ("r2", 2)):
        scene.handle(ReplicaBeat(name, 1, "generating", v(0), 9, Load(running, 100, running, 0), "n"))
    assert some(look(scene), Move) == []
    scene.handle(ReplicaBeat("r2", 1, "generating", v(0), 9, Load(2, 100, 1, 0), "n"))
    (move,) = some(look(scene), Move)
    assert isinstance(move, Move) and (move.source, move.destination) == ("r2", "r1")


def test_no_more_are_freed_than_there_is_work_for() -> None:
    """Quota of 4 groups, 3 live: one replica's worth of new work."""
    scene = tail({"r0": 10, "r1": 20, "r2": 30}, max_outstanding_groups=4)
    assert len(some(look(scene), Move)) == 1


def test_repack_looks_at_every_new_version_and_at_its_interval() -> None:
    scene = tail({"r0": 20, "r1": 50}, repack_interval_s=1000.0)
    assert some(look(scene), Move) == []
    assert len(some(scene.trainer(1), Move)) == 1


def test_both_sides_are_given_nothing_while_a_move_goes_on() -> None:
    """Protocol §5: a destination that pulled meanwhile would not hold the version of what arrives; a source that
    pulled would not either, should the move be called off."""
    scene = tail({"r0": 20, "r1": 50})
    (move,) = some(look(scene), Move)
    assert isinstance(move, Move)
    commands = scene.store(Finished((SampleId(1, 0),)))
    assert scene.state.replicas["r1"].activity == "idle" and some(commands, Pull, Issue) == []
    commands = scene.store(Adopted("r1", 1, v(0), (SampleId(0, 0),)))
    assert scene.state.replicas["r0"].activity == "idle" and some(commands, Pull, Issue) == []
    commands = scene.store(MoveEnded("r0", "r1"))
    assert some(commands, Pull) == [Pull("r0", 1, v(1), "empty, and a newer version is here")]
    assert scene.state.replicas["r1"].activity == "generating"


def test_a_move_that_takes_too_long_is_called_off_and_asked_again() -> None:
    scene = tail({"r0": 20, "r1": 50}, move_timeout_s=10.0, repack_interval_s=3.0)
    (move,) = some(look(scene), Move)
    assert isinstance(move, Move)
    assert some(scene.tick(10.0), CancelMove) == []
    assert some(scene.tick(0.5), CancelMove) == [CancelMove("r0", "not done within 10 s")]
    assert some(scene.tick(9.0), CancelMove) == [], "the store may be busy"
    assert some(scene.tick(1.5), CancelMove) == [CancelMove("r0", "not done within 10 s")]
    scene.store(MoveEnded("r0", "r1"))
    assert list(scene.state.replicas["r0"].unfinished) == [SampleId(0, 0)]
    assert scene.state.replicas["r0"].activity == "generating" and not scene.state.replicas["r0"].bound


@pytest.mark.parametrize("dead", ["r0", "r1"])
def test_a_death_on_either_side_frees_the_other(dead: str) -> None:
    """The data store ends the moves of the dead and says so."""
    scene = tail({"r0": 20, "r1": 50}, max_restarts=2)
    look(scene)
    other = scene.state.replicas["r1" if dead == "r0" else "r0"]
    scene.handle(ProcessEnded("replica", dead, 1, "killed"))
    assert other.bound
    scene.store(MoveEnded("r0", "r1"))
    assert not other.bound


# ---------------------------------------------------------------- drain


def test_a_drain_moves_the_work_and_removes_the_replica() -> None:
    scene = tail({"r0": 20, "r1": 50, "r2": 10}, repack=False)
    (move,) = some(scene.handle(DrainRequested("r1")), Move)
    assert isinstance(move, Move) and (move.source, move.destination) == ("r1", "r2"), "the emptiest takes it"
    assert some(look(scene), Move) == []
    commands = ended(scene, move)
    assert some(commands, Remove, Pull) == [Remove("replica", "r1", "drained")]
    assert scene.state.processes["replica", "r1"].state == "stopped"
    assert scene.manager.take_notes() == ["replica r1 is being drained", "replica r1 is drained and leaves"]
    assert scene.handle(ProcessEnded("replica", "r1", 1, None)) == [] and scene.manager.ended is None


def test_a_drain_without_anybody_to_take_over_waits_for_the_end() -> None:
    scene = tail({"r0": 20, "r1": 50}, repack=False)
    scene.state.replicas["r1"].version = v(3)
    assert some(scene.handle(DrainRequested("r0")), Move) == []
    assert some(look(scene), Move, Remove, Issue) == []
    commands = scene.store(Finished((SampleId(0, 0),)))
    assert some(commands, Remove, Pull, Issue) == [Remove("replica", "r0", "drained")]


def test_a_replica_that_drains_is_no_destination() -> None:
    scene = tail({"r0": 20, "r1": 50, "r2": 70}, repack=False)
    scene.state.replicas["r2"].version = v(3)
    assert len(some(scene.handle(DrainRequested("r0")), Move)) == 1
    assert some(scene.handle(DrainRequested("r1")), Move) == [], "it is bound, and has nobody"
    scene.store(MoveEnded("r0", "r1"))
    assert some(look(scene), Move) == []


def test_a_drain_waits_for_a_grant_that_is_on_its_way() -> None:
    """What it brings is moved too."""
    scene = Scene(2, **PATIENT)
    (issue, *_) = some(scene.ready(), Issue)
    assert isinstance(issue, Issue)
    assert some(scene.handle(DrainRequested(issue.replica)), Remove) == []
    (move,) = some(scene.issued(issue), Move)
    assert isinstance(move, Move) and move.source == issue.replica


def test_a_drain_of_nobody() -> None:
    scene = Scene()
    assert scene.handle(DrainRequested("r7")) == []


def test_of_two_drains_at_once_one_is_refused_if_nobody_would_be_left() -> None:
    """Found by chaos: each was asked for while the other replica seemed to stay, and the death of one ended the run."""
    scene = tail({"r0": 20, "r1": 50}, repack=False, max_restarts=2)
    scene.state.replicas["r1"].version = v(3)
    scene.handle(DrainRequested("r0"))
    assert some(scene.handle(DrainRequested("r1")), Move, Remove) == []
    assert scene.manager.take_notes() == ["replica r0 is being drained", "replica r1 is the last one and stays"]
    assert scene.state.staying() == ["r1"]
    replaced = some(scene.handle(ProcessEnded("replica", "r1", 1, "killed")), Replace)
    assert replaced == [Replace("replica", "r1", 2, "killed")] and scene.manager.ended is None


def test_a_replica_that_dies_while_it_drains_does_not_come_back() -> None:
    scene = tail({"r0": 20, "r1": 50}, repack=False, max_restarts=2)
    scene.state.replicas["r1"].version = v(3)
    scene.handle(DrainRequested("r0"))
    commands = scene.handle(ProcessEnded("replica", "r0", 1, "killed"))
    assert some(commands, Replace) == [] and some(commands, Orphan) == [Orphan("r0", 1, "killed")]
    assert scene.manager.take_notes()[-1].endswith("it held 1 unfinished samples; it was being drained")
    assert scene.manager.ended is None


# ---------------------------------------------------------------- scale


def scaled(*names: str) -> Scene:
    scene = Scene(0, **PATIENT)
    for name in names:
        scene.handle(ReplicaBeat(name, 1, "idle", None, 0, node="n"))
    return scene


def test_scaling_up_starts_replicas_with_new_ids() -> None:
    scene = scaled("replica-0", "replica-9")
    assert scene.handle(ScaleRequested(4)) == [
        Replace("replica", "replica-10", 1, "scaled up"),
        Replace("replica", "replica-11", 1, "scaled up"),
    ]
    assert scene.handle(ScaleRequested(4)) == [], "they are on their way"
    scene.relay(0)
    commands = scene.handle(ReplicaBeat("replica-10", 1, "idle", None, 0, node="n"))
    assert some(commands, Pull) == [Pull("replica-10", 1, v(0), "first weights")]


def test_scaling_down_drains_those_with_the_highest_numbers() -> None:
    scene = scaled("replica-0", "replica-2", "replica-10")
    commands = scene.handle(ScaleRequested(1))
    assert some(commands, Remove) == [
        Remove("replica", "replica-10", "drained"),
        Remove("replica", "replica-2", "drained"),
    ]
    assert scene.handle(ScaleRequested(1)) == []
    assert scene.handle(ScaleRequested(2)) == [Replace("replica", "replica-11", 1, "scaled up")]


def test_scaling_down_reaches_a_replica_that_has_not_spoken_yet() -> None:
    scene = scaled("replica-0")
    scene.handle(ScaleRequested(2))
    scene.handle(ScaleRequested(1))
    commands = scene.handle(ReplicaBeat("replica-1", 1, "idle", None, 0, node="n"))
    assert some(commands, Remove) == [Remove("replica", "replica-1", "drained")]


def test_a_drained_replica_that_leaves_while_it_pulls_is_not_waited_for() -> None:
    """Orphans of a version that somebody is about to load wait for that; who has left loads nothing."""
    scene = tail({"r0": 10, "r1": 10}, repack=False)
    scene.store(Finished(samples([0], size=1)))
    assert scene.state.replicas["r0"].pulling == v(1)
    assert some(scene.handle(DrainRequested("r0")), Remove) == [Remove("replica", "r0", "drained")]
    assert scene.state.replicas["r0"].pulling is None


def test_a_drain_has_a_limit() -> None:
    """What cannot be ended or moved in time is orphaned, and the replica is removed."""
    scene = tail({"r0": 50, "r1": 50}, repack=False, drain_timeout_s=3.0)
    scene.state.replicas["r1"].version = v(3)
    scene.handle(DrainRequested("r0"))
    commands: list[Command] = []
    while not some(commands, Remove):
        assert scene.now < 4
        commands = scene.tick(0.5)
    assert some(commands, Orphan, Remove) == [
        Orphan("r0", 1, "its time to leave is over"),
        Remove("replica", "r0", "its time to leave is over"),
    ]
    assert scene.now > 3 and scene.state.processes["replica", "r0"].state == "stopped"
    assert "replica r0 has not left in 3 s and goes; it held 1 unfinished samples" in scene.manager.take_notes()
    assert some(scene.tick(10.0), Remove) == [], "once"


def test_a_replica_whose_machine_goes_is_drained_and_the_last_one_replaced() -> None:
    """SIGTERM of a spot machine."""
    scene = tail({"r0": 50, "r1": 50}, repack=False)

    def leaving(name: str) -> list[Command]:
        return scene.handle(ReplicaBeat(name, 1, "generating", scene.state.replicas[name].version, 1, leaving=True))

    (move,) = some(leaving("r0"), Move, Replace)
    assert isinstance(move, Move) and (move.source, move.destination) == ("r0", "r1")
    assert some(leaving("r0"), Move, Replace) == [], "once"
    assert some(leaving("r1"), Replace) == [Replace("replica", "replica-0", 1, "scaled up")]
