"""The manager's and the data store's process, without processes: long polls, repeats, and how all hear of the end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from laminar.control import codec
from laminar.control.commands import EndRun, Issue, Numbered, Pull, Stop
from laminar.control.events import (
    Beat,
    Issued,
    ProcessEnded,
    ProcessStarted,
    Recovered,
    RelayBeat,
    ReplicaBeat,
    StopRequested,
    StoreEvents,
    Tick,
    TrainerBeat,
)
from laminar.control.mailbox import Inbox
from laminar.errors import StorageError
from laminar.runtime import handles
from laminar.runtime.loop import Driver
from laminar.runtime.services import ManagerService, StoreService
from laminar.types import ReplicaReport, ScoreReport, Trained, Version
from tests.control.plans import make_settings
from tests.control.scene import samples
from tests.data.driving import V0, Clock, Hand, Prompts, open_store

V1 = Version(0, 1)
NOTHING = Inbox()
"""No command has been taken in."""
WITHIN_S = 20.0
"""Everything here is a matter of milliseconds; whoever waits longer waits for ever."""
T = TypeVar("T")


def run(body: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(body, WITHIN_S))


def replica(version: Version | None, name: str = "r0", step: int = 0, failed: int = 0) -> ReplicaBeat:
    return ReplicaBeat(name, 1, "idle", version, step, node="n", failed_pulls=failed)


def relay(*versions: Version) -> RelayBeat:
    return RelayBeat("relay", 1, "n", versions, 1)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ManagerService]:
    """A manager that knows of one trainer, relay and replica."""
    service = ManagerService(make_settings(), tmp_path, Recovered(1), Clock())
    for role, id_ in (("trainer", "trainer"), ("relay", "relay"), ("replica", "r0")):
        service.handle(ProcessStarted(role, id_, 1))
    yield service
    service.log.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreService]:
    service = StoreService(open_store(tmp_path, make_settings(), Prompts()))
    yield service
    service.store.close()


# ---------------------------------------------------------------- the manager's process


def test_a_beat_that_waits_is_answered_when_there_is_something_to_do(manager: ManagerService) -> None:
    async def body() -> None:
        waiting = asyncio.create_task(manager.beat(replica(None), NOTHING, WITHIN_S))
        await asyncio.sleep(0)
        assert not waiting.done()
        await manager.beat(relay(V0), NOTHING, 0.0)
        (numbered,) = await waiting
        assert numbered == Numbered(1, 1, Pull("r0", 1, V0, "first weights"))

    run(body())


def test_a_beat_that_waits_in_vain_is_answered_too(manager: ManagerService) -> None:
    assert run(manager.beat(replica(None), NOTHING, 0.01)) == []


def test_commands_are_repeated_until_they_are_acknowledged(manager: ManagerService) -> None:
    async def body() -> None:
        await manager.beat(replica(None), NOTHING, 0.0)
        await manager.beat(relay(V0), NOTHING, 0.0)
        first = await manager.beat(replica(None), NOTHING, 0.0)
        assert first == await manager.beat(replica(None), NOTHING, 0.0), "the answer was lost"
        assert [n.number for n in first] == [1]
        assert await manager.beat(replica(None), Inbox(1, 1), 0.0) == []

    run(body())


def test_a_quiet_beat_is_told_in_the_next_tick_unless_there_is_newer_news(
    manager: ManagerService, tmp_path: Path
) -> None:
    """A beat from before a load must not undo it: the manager would grant work under weights that are gone."""

    async def body() -> None:
        await manager.beat(replica(None), NOTHING, 0.0)
        await manager.beat(relay(V0), NOTHING, 0.0)
        await manager.beat(replica(None, step=1), NOTHING, 0.0)
        assert set(manager.quiet) == {("replica", "r0")}
        await manager.beat(replica(V0), NOTHING, 0.0)
        ticks = asyncio.create_task(manager.run())
        while not any(isinstance(e, Tick) for e in events(tmp_path)):
            await asyncio.sleep(0)
        ticks.cancel()

    run(body())
    assert manager.manager.state.replicas["r0"].version == V0
    assert next(e for e in events(tmp_path) if isinstance(e, Tick)).beats == ()


def events(folder: Path) -> list[object]:
    lines = (folder / "000001.jsonl").read_text().splitlines()[1:]
    return [codec.decode_record(json.loads(line)).event for line in lines]


def test_stop_reaches_those_who_have_spoken_and_those_who_speak_later(manager: ManagerService) -> None:
    """Fault 9: a process that was still loading its model when the run ended hears of it in its first answer."""

    async def body() -> None:
        await manager.beat(replica(None), NOTHING, 0.0)
        commands, *_ = await manager.driver_poll([StopRequested("enough")], NOTHING, 0.0)
        assert [n.command for n in commands] == [EndRun("interrupted", "enough")]
        for beat in (replica(None), replica(None, "r1"), relay(), TrainerBeat(1, None, 0, "starting")):
            (numbered,) = await manager.beat(beat, NOTHING, 0.0)
            assert isinstance(numbered.command, Stop)
        (numbered,) = await manager.store_poll(1, StoreEvents(0, ()), NOTHING, 0.0)
        assert isinstance(numbered.command, Stop)

    run(body())


def test_of_a_failed_run_nobody_is_told_to_stop_before_the_driver_has_heard_of_it(manager: ManagerService) -> None:
    """Fault 1: it asks all what they are doing, and those that end at the same moment could not say."""

    async def body() -> None:
        await manager.beat(relay(), NOTHING, 0.0)
        (end,), *_ = await manager.driver_poll([ProcessEnded("replica", "r0", 1, "boom")], NOTHING, 0.0)
        for beat in (relay(), TrainerBeat(1, None, 0, "starting")):
            assert not await manager.beat(beat, NOTHING, 0.0)
        assert (await manager.driver_poll([], Inbox(end.term, end.number), 0.0))[0] == []
        for beat in (relay(), TrainerBeat(1, None, 0, "starting")):
            (numbered,) = await manager.beat(beat, NOTHING, 0.0)
            assert isinstance(numbered.command, Stop)

    run(body())


def test_the_driver_hears_of_the_end_while_it_waits(manager: ManagerService) -> None:
    """Fault 2."""

    async def body() -> None:
        waiting = asyncio.create_task(manager.driver_poll([], NOTHING, WITHIN_S))
        await asyncio.sleep(0)
        await manager.driver_poll([ProcessEnded("replica", "r0", 1, "boom")], NOTHING, 0.0)
        commands, _, processes, _ = await waiting
        assert [n.command for n in commands] == [EndRun("failed", "replica r0 died: boom")]
        assert {(p["id"], p["state"]) for p in processes} >= {("r0", "dead"), ("trainer", "starting")}

    run(body())


def test_an_event_is_on_disk_before_its_commands_are_known(manager: ManagerService, tmp_path: Path) -> None:
    """Protocol §8: replay knows everything that anybody was told."""

    async def body() -> None:
        await manager.beat(replica(None), NOTHING, 0.0)
        await manager.beat(relay(V0), NOTHING, 0.0)
        before = (tmp_path / "000001.jsonl").read_text()
        assert await manager.beat(replica(None), NOTHING, 0.0)
        assert '"Pull"' in before and before.endswith("\n")

    run(body())


def test_an_event_log_that_can_not_be_written_is_one_message(tmp_path: Path) -> None:
    """Who asks hears it, and ends the run: another start would end in the same way."""
    (tmp_path / "events").write_text("not a folder")
    with pytest.raises(StorageError, match=r"events/000001\.jsonl: can't be written: Not a directory"):
        ManagerService(make_settings(), tmp_path / "events", Recovered(1), Clock())


def test_what_each_process_does_is_told(manager: ManagerService) -> None:
    """`laminar ps` and the live view: replicas and trainer in their own words, others by being there."""

    async def body() -> None:
        await manager.beat(TrainerBeat(1, V0, 0, "waiting"), NOTHING, 0.0)
        await manager.beat(relay(V0), NOTHING, 0.0)
        await manager.beat(replica(V0), NOTHING, 0.0)
        await manager.store_poll(
            1, StoreEvents(1, (Issued("r0", 1, V0, "train", (0,), samples([0]), False),)), NOTHING, 0.0
        )
        said = {p["id"]: p["doing"] for p in manager.processes()}
        assert said == {"trainer": "waiting", "relay": None, "r0": "generating 2", "datastore": None}

    run(body())


def test_orders_outlive_the_data_store_but_not_the_replica_that_they_are_for(manager: ManagerService) -> None:
    """Fault 2: a store that died before it carried out an Issue is sent it again; a new replica gets no old Pull."""

    async def body() -> None:
        await manager.store_poll(1, StoreEvents(0, ()), NOTHING, 0.0)
        await manager.beat(replica(None), NOTHING, 0.0)
        (pull,) = await manager.beat(relay(V0), NOTHING, 0.0) or await manager.beat(replica(None), NOTHING, 0.0)
        assert isinstance(pull.command, Pull)
        await manager.beat(replica(V0), NOTHING, 0.0)
        for incarnation in (1, 2):
            (issue,) = await manager.store_poll(incarnation, StoreEvents(0, ()), NOTHING, 0.0)
            assert isinstance(issue.command, Issue)
        assert await manager.beat(replace(replica(None), incarnation=2), NOTHING, 0.0) != [pull]

    run(body())


# ---------------------------------------------------------------- the data store's process


def test_an_idle_replica_waits_for_work(store: StoreService) -> None:
    async def body() -> None:
        waiting = asyncio.create_task(store.exchange(ReplicaReport("r0", 1, 1, wait_s=WITHIN_S)))
        await asyncio.sleep(0)
        assert not waiting.done()
        store._obey([Numbered(1, 1, Issue("r1", 1, V0, 1, "train", ""))])
        await asyncio.sleep(0)
        assert not waiting.done(), "that was for another one"
        store._obey([Numbered(1, 2, Issue("r0", 1, V0, 1, "train", ""))])
        assert [w.sample for w in (await waiting).work] == [(1, 0), (1, 1)]

    run(body())


def test_a_scorer_waits_for_a_finished_group_and_the_trainer_for_a_batch(store: StoreService) -> None:
    async def body() -> None:
        batch = asyncio.create_task(store.next_batch(0, 0, WITHIN_S))
        groups = asyncio.create_task(store.exchange_scores(ScoreReport(1, want=4), WITHIN_S))
        hand = Hand(store.store)
        work = hand.issue(2)
        store._changed()
        await asyncio.sleep(0)
        assert not groups.done()
        hand.finish(work)
        store._changed()
        found, stopping = await groups
        assert [g.group for g in found] == [0, 1] and not stopping and not batch.done()
        store.store.exchange_scores(ScoreReport(2))
        hand.score()
        store._changed()
        made, over = await batch
        assert made is not None and len(made.ids) == 4 and not over

    run(body())


def test_a_batch_that_will_never_come_is_said_at_once(tmp_path: Path) -> None:
    """Fault 3."""
    service = StoreService(open_store(tmp_path, make_settings(iterations=None), Prompts(rows=1, epochs=1)))

    async def body() -> None:
        hand = Hand(service.store)
        hand.make(3)
        assert (await service.next_batch(0, 0, 0.0))[0] is not None
        assert await service.next_batch(1, 0, WITHIN_S) == (None, True)

    run(body())
    service.store.close()


def test_events_travel_in_batches_and_commands_come_back_once(store: StoreService) -> None:
    """Commands are repeated in every reply; each is carried out once. Events come in order, each once."""
    told: list[StoreEvents] = []
    commands = [Numbered(1, 1, Issue("r0", 1, V0, 1, "train", "")), Numbered(1, 2, Issue("r0", 1, V0, 1, "train", ""))]

    async def poll(incarnation: int, events: StoreEvents, acked: Inbox, wait_s: float) -> list[Numbered]:
        if events.events:
            told.append(events)
        await asyncio.sleep(0)
        return (
            commands[:2]
            if sum(len(t.events) for t in told) < 2
            else [*commands, Numbered(1, 3, Stop("datastore", "*", ""))]
        )

    run(store.run(1, poll))
    assert store.store.accounts.cursor == 2
    assert [t.last for t in told] == sorted({t.last for t in told})
    assert sum(len(t.events) for t in told) == told[-1].last == 2


def test_what_comes_after_the_stop_is_still_taken_in(store: StoreService) -> None:
    """Fault 10: a trainer in mid-step and a replica in mid-report end in order when the run is stopped."""

    async def poll(incarnation: int, events: StoreEvents, acked: Inbox, wait_s: float) -> list[Numbered]:
        await asyncio.sleep(0)
        return [Numbered(1, acked.number + 1, Stop("datastore", "*", ""))]

    async def body() -> None:
        hand = Hand(store.store)
        hand.make(2)
        assert (await store.next_batch(0, 0, 0.0))[0] is not None
        waiting: list[Awaitable[Any]] = [
            asyncio.create_task(store.next_batch(1, 0, WITHIN_S)),
            asyncio.create_task(store.exchange(ReplicaReport("r0", 1, 9, wait_s=WITHIN_S))),
            asyncio.create_task(store.exchange_scores(ScoreReport(1, want=1), WITHIN_S)),
        ]
        await asyncio.sleep(0)
        await store.run(1, poll)
        batch, reply, scores = await asyncio.gather(*waiting)
        assert batch == (None, False) and reply.work == () and scores == ([], True)
        await store.trained(Trained(0, V1, 0))
        assert store.store.accounts.trained_version == 1
        assert await store.next_batch(1, 0, WITHIN_S) == (None, False), "nobody waits any more"

    run(body())


def test_a_store_and_a_manager_together(tmp_path: Path) -> None:
    """Work is issued to a replica that says what it holds, and what becomes of it reaches the manager."""
    settings = make_settings()
    service = StoreService(open_store(tmp_path, settings))
    manager = ManagerService(settings, tmp_path, service.store.recovered(), Clock())

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0)

    async def body() -> None:
        for role, id_ in (("trainer", "trainer"), ("relay", "relay"), ("replica", "r0")):
            manager.handle(ProcessStarted(role, id_, 1))
        running = asyncio.create_task(service.run(1, manager.store_poll))
        beats: list[Beat] = [replica(None), TrainerBeat(1, V0, 0, "training"), relay(V0), replica(V0)]
        for beat in beats:
            await manager.beat(beat, NOTHING, 0.0)
        reply = await service.exchange(ReplicaReport("r0", 1, 1, wait_s=WITHIN_S))
        hand = Hand(service.store)
        hand.finish(reply.work)
        service._changed()
        state = manager.manager.state
        await until(lambda: state.replicas["r0"].granted > 0 or len(state.live) > 1)
        assert 0 in state.live
        await manager.driver_poll([StopRequested("enough")], NOTHING, 0.0)
        await running

    run(body())
    service.store.close()
    manager.log.close()


# ---------------------------------------------------------------- the driver


def test_a_driver_that_can_not_write_ends_the_run_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can be told anything more through the run folder; what was acknowledged is durable."""

    def full(done: object) -> None:
        raise StorageError("can't be written: No space left on device", where="processes.json")

    monkeypatch.setattr(handles, "wait_for_any", lambda references, timeout_s: [])
    supervisor = SimpleNamespace(awaited=lambda: [], news=full)
    manager = SimpleNamespace(driver_poll=lambda events, acked, wait_s: object())
    driver = Driver(supervisor, make_settings(), None, manager, [], print)  # type: ignore[arg-type]
    end = driver.drive(threading.Event())
    assert end == EndRun("failed", "processes.json: can't be written: No space left on device")
