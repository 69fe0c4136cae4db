"""The manager: how a run ends, what it says when it does not, and that it decides the same again."""

from __future__ import annotations

import pytest

from laminar.control.commands import Complete, EndRun, Keep, Stop
from laminar.control.events import (
    Buffered,
    Completed,
    EvalDone,
    Fatal,
    Finished,
    Orphaned,
    ProcessEnded,
    Recovered,
    RelayBeat,
    ReplicaBeat,
    StopRequested,
    TrainerBeat,
)
from laminar.control.manager import Record, is_news, replay
from laminar.sim.world import World
from laminar.types import SampleId
from tests.control.plans import make_settings, random_plan
from tests.control.scene import Scene, kinds, samples, v
from tests.hash_seeds import printed_under_two_hash_seeds

STOPS = [("replica", "*"), ("trainer", "*"), ("relay", "*"), ("datastore", "*")]


def end(commands: list[object]) -> EndRun:
    """The one EndRun, with everybody told to stop after it."""
    (ended,) = [c for c in commands if isinstance(c, EndRun)]
    assert [(c.role, c.id) for c in commands if isinstance(c, Stop)] == STOPS
    return ended


# ---------------------------------------------------------------- how a run ends


def test_a_run_completes_when_the_trainer_is_done() -> None:
    scene = Scene()
    scene.ready()
    assert kinds(scene.trainer(3, "done")) == ["Complete"]
    assert scene.tick() == [] and scene.beat("r0", 1) == [], "the account is closed before anybody is told to stop"
    assert end(scene.store(Completed())).outcome == "completed"
    assert scene.tick() == [] and scene.beat("r0", 1) == [], "nothing follows the end"


def test_completion_waits_for_evaluations() -> None:
    """Protocol §5."""
    scene = Scene(eval_groups=1, eval_after_train=True)
    scene.ready()
    assert "Complete" not in kinds(scene.trainer(3, "done"))
    assert scene.store(EvalDone(v(3))) == [Complete("all batches are trained")]
    assert end(scene.store(Completed())).outcome == "completed"


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (ProcessEnded("replica", "r0", 1, "EngineError: no memory"), "replica r0 died: EngineError: no memory"),
        (
            ProcessEnded("trainer", "trainer", 1, "its process was killed"),
            "trainer died: its process was killed",
        ),
        (ProcessEnded("relay", "relay", 1, None), "relay ended before the run did"),
    ],
)
def test_a_death_fails_the_run(event: ProcessEnded, message: str) -> None:
    """Fault 2: in the same moment, and with the cause."""
    scene = Scene()
    scene.ready()
    commands = scene.handle(event)
    assert end(commands) == EndRun("failed", message)
    assert not any(isinstance(c, Complete) for c in commands), "what is in flight stays so, for a resume"


def test_a_fatal_reward_fails_the_run() -> None:
    """Fault 18."""
    scene = Scene()
    scene.ready()
    assert end(scene.store(Fatal("reward.py:score failed 10 times"))) == EndRun(
        "failed", "reward.py:score failed 10 times"
    )


def test_a_death_of_an_earlier_start_or_an_orderly_end_is_no_failure() -> None:
    scene = Scene()
    scene.ready()
    assert scene.handle(ProcessEnded("replica", "r0", 0, "killed")) == []
    scene.trainer(3, "done")
    assert scene.handle(ProcessEnded("trainer", "trainer", 1, None)) == []
    assert scene.handle(ProcessEnded("nobody", "x", 1, "killed")) == []


def test_an_interruption_keeps_what_is_in_flight() -> None:
    """Fault 10, protocol §5."""
    scene = Scene()
    scene.ready()
    commands = scene.handle(StopRequested("interrupted by the user"))
    assert end(commands) == EndRun("interrupted", "interrupted by the user")
    assert not any(isinstance(c, Complete) for c in commands)


# ---------------------------------------------------------------- silence and stalls


def test_a_stalled_run_says_who_waits_for_what() -> None:
    """Invariant 10, fault 1: the ids that have not finished, and what every replica does."""
    scene = Scene(replicas=2, groups_per_batch=3, max_outstanding_groups=3, stall_timeout_s=60.0, dead_after_s=1e9)
    scene.trainer(0)
    scene.relay(0)
    for name in ("r0", "r1"):
        (command, *_) = scene.beat(name, 0)
        scene.issued(command)
    scene.store(Finished(samples([0])), Buffered((0,)))
    scene.store(Orphaned((SampleId(1, 1),), v(0)))
    (ended,) = [c for _ in range(130) for c in scene.tick(0.5) if isinstance(c, EndRun)]
    text = ended.message
    assert ended.outcome == "failed" and text.startswith("nothing has finished for 60 s")
    assert "batch 0 needs 3 buffered groups" in text and "1 are buffered" in text
    assert "these are not finished: 1" in text
    assert "replica r1: generating, version 0, has 1 unfinished: 1/0" in text


def test_a_stalled_evaluation_ends_the_run_too() -> None:
    scene = Scene(eval_groups=1, eval_after_train=True, stall_timeout_s=60.0, dead_after_s=1e9)
    scene.ready()
    scene.trainer(3, "done")
    commands = [c for _ in range(130) for c in scene.tick(0.5)]
    assert "evaluations that are not done: of version 3" in end(commands).message


def test_progress_of_any_kind_is_no_stall() -> None:
    scene = Scene(stall_timeout_s=60.0, dead_after_s=1e9)
    scene.ready()
    for number in range(4):
        assert not any(isinstance(c, EndRun) for _ in range(100) for c in scene.tick(0.5))
        scene.trainer(number + 1)


def beats(scene: Scene) -> tuple[object, ...]:
    return (
        TrainerBeat(1, v(0), 0, "training"),
        RelayBeat("relay", 1, "n", (v(0),), 1),
        ReplicaBeat("r0", 1, "idle", v(0), 0, node="n"),
    )


def test_silence_is_noted_and_then_fatal() -> None:
    scene = Scene(suspect_after_s=2.0, dead_after_s=10.0)
    scene.ready()
    scene.manager.take_notes()
    commands = []
    while not any(isinstance(c, EndRun) for c in commands):
        commands = scene.tick(0.5, *beats(scene)[:2])
    assert scene.manager.take_notes() == [
        "replica r0 is suspect: silent for 2.5 s",
        "replica r0 is dead: silent for 10.5 s",
    ]
    assert end(commands).message == "replica r0 died: silent for 10.5 s"


def test_an_engine_that_is_stuck_is_found_though_the_replica_beats() -> None:
    """Fault 1: the thread that beats is not the one that generates."""
    scene = Scene(suspect_after_s=2.0, dead_after_s=10.0)
    (command, *_) = scene.ready()
    scene.issued(command)
    commands = []
    while not any(isinstance(c, EndRun) for c in commands):
        stuck = ReplicaBeat("r0", 1, "generating", v(0), 5, node="n")
        commands = scene.tick(0.5, *beats(scene)[:2], stuck)
        assert scene.now < 20
    assert "its engine has not moved for 10.5 s though it has work" in end(commands).message


def test_an_engine_that_moves_slowly_is_not_stuck() -> None:
    """One long trajectory is work, however long no sample finishes."""
    scene = Scene(suspect_after_s=2.0, dead_after_s=10.0)
    (command, *_) = scene.ready()
    scene.issued(command)
    for number in range(100):
        moving = ReplicaBeat("r0", 1, "generating", v(0), number // 10, node="n")
        assert not any(isinstance(c, EndRun) for c in scene.tick(0.5, *beats(scene)[:2], moving))
    assert not [note for note in scene.manager.take_notes() if "r0" in note]


@pytest.mark.parametrize("first", ["tick", "beat"])
def test_a_manager_that_was_away_declares_nobody_dead(first: str) -> None:
    """Protocol §8: whatever it handles first after it was stopped for an hour."""
    scene = Scene(suspect_after_s=2.0, dead_after_s=10.0, stall_timeout_s=600.0)
    scene.ready()
    scene.tick(0.5, *beats(scene))
    scene.now += 3600.0
    if first == "beat":
        assert not any(isinstance(c, EndRun) for c in scene.beat("r0", 0, failed=1))
    assert not any(isinstance(c, EndRun) for c in scene.tick(0.0))
    for _ in range(10):
        assert not any(isinstance(c, EndRun) for c in scene.tick(0.5, *beats(scene)))
    assert all(p.state == "alive" for p in scene.state.processes.values())


# ---------------------------------------------------------------- relays


def test_relays_keep_what_trajectories_live_under() -> None:
    """The set is absolute, and said when it changes."""
    scene = Scene(max_staleness=4, max_outstanding_groups=10)
    (command, *_) = scene.ready()
    keeps = [c for c in scene.issued(command) if isinstance(c, Keep)]
    assert [(k.relay, k.versions) for k in keeps] == [("relay", (v(0),))]
    assert not any(isinstance(c, Keep) for c in scene.tick())
    scene.relay(0, 1)
    keeps = [c for c in scene.store(Finished(samples([0]))) if isinstance(c, Keep)]
    assert [k.versions for k in keeps] == [()]


def test_what_a_relay_refused_is_told_to_the_user() -> None:
    """Fault 22."""
    scene = Scene()
    scene.relay(0, problems=("version 1 was refused: fingerprint",))
    assert scene.manager.take_notes() == ["version 1 was refused: fingerprint"]


# ---------------------------------------------------------------- news


REPLICA = ReplicaBeat("r0", 1, "idle", v(0), 4, node="n")


@pytest.mark.parametrize(
    ("last", "beat", "news"),
    [
        (None, REPLICA, True),
        (REPLICA, REPLICA, False),
        (REPLICA, ReplicaBeat("r0", 1, "generating", v(0), 9, node="n"), False),
        (REPLICA, ReplicaBeat("r0", 1, "idle", v(1), 4, node="n"), True),
        (REPLICA, ReplicaBeat("r0", 2, "idle", v(0), 4, node="n"), True),
        (REPLICA, ReplicaBeat("r0", 1, "idle", v(0), 4, node="n", failed_pulls=1), True),
        (RelayBeat("relay", 1, "n", (), 1), RelayBeat("relay", 1, "n", (), 0), False),
        (RelayBeat("relay", 1, "n", (), 1), RelayBeat("relay", 1, "n", (v(0),), 0), True),
        (RelayBeat("relay", 1, "n", (), 1), RelayBeat("relay", 1, "n", (), 1, ("refused",)), True),
        (TrainerBeat(1, v(0), 0, "training"), TrainerBeat(1, v(0), 0, "done"), True),
        (TrainerBeat(1, v(0), 0, "training"), TrainerBeat(1, v(0), 0, "training"), False),
    ],
)
def test_what_is_news(last: object, beat: object, news: bool) -> None:
    assert is_news(last, beat) is news  # type: ignore[arg-type]


# ---------------------------------------------------------------- replay


def world_with_restarts() -> World:
    plan = next(p for p in map(random_plan, range(1000)) if len(p.restarts) == 2 and p.settings.eval_groups)
    world = World(plan, record=True)
    world.run(until=3000)
    return world


def test_a_replay_goes_on_across_restarts() -> None:
    """Invariant 11, protocol §8."""
    world = world_with_restarts()
    assert sum(isinstance(r.event, Recovered) for r in world.records) == 3
    assert list(replay(world.settings, world.records)) == []


def test_a_replay_shows_the_record_that_differs() -> None:
    scene = Scene()
    scene.ready()
    records = list(scene.records)
    at = next(i for i, r in enumerate(records) if r.commands)
    records[at] = Record(records[at].now, records[at].event, ())
    ((record, commands),) = replay(scene.manager.settings, records)
    assert record is records[at] and commands == scene.records[at].commands
    changed = make_settings(groups_in_flight=2)
    assert list(replay(changed, scene.records)), "other settings decide otherwise"


def test_decisions_do_not_depend_on_the_hash_seed() -> None:
    """Invariant 11: no iteration over sets, no order by identity."""
    code = (
        "import json\n"
        "from laminar.control import codec\n"
        "from tests.control.test_manager import world_with_restarts\n"
        "print(json.dumps([codec.encode_record(r) for r in world_with_restarts().records]))\n"
    )
    said = printed_under_two_hash_seeds(code)
    assert said[0] == said[1] and len(said[0]) > 10_000
