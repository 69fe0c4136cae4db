"""The two processes that others call: the manager and the data store, each one asyncio thread.

A decision or a transaction runs to its end without an await in between; only waiting for something new is awaited (long
polls). Calls may arrive in any order: commands are numbered, reports carry what makes a repeat harmless.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from laminar import __version__
from laminar.control import codec
from laminar.control.commands import Command, EndRun, Numbered, Stop, address
from laminar.control.events import (
    Beat,
    DriverEvent,
    Event,
    ProcessSeen,
    Recovered,
    StoreBeat,
    StoreEvents,
    Tick,
    sender_of,
)
from laminar.control.mailbox import Inbox, Mailbox
from laminar.control.manager import Manager, Record, is_news
from laminar.control.state import Replica
from laminar.data.store import DataStore
from laminar.run_folder import writing
from laminar.timing import TICK_S
from laminar.types import Batch, ReplicaReply, ReplicaReport, ScoreReport, Settings, Trained, UnscoredGroup

EVENTS_WITHIN_S = 0.005
"""Store events travel to the manager within this time, in batches: in a run of few replicas."""

FREE_EVERY_S = 0.05
"""Between two pieces of what is deleted, so that others come first."""


class Pulse:
    """Wakes everybody who waits; nobody misses a beat that comes after he has looked."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except TimeoutError:
            return


class WakingMailbox(Mailbox):
    """Wakes who waits for a command."""

    def __init__(self, term: int) -> None:
        super().__init__(term)
        self.pulse = Pulse()

    def put(self, command: Command) -> None:
        super().put(command)
        self.pulse.beat()


class EventLog:
    """`events/<term>.jsonl`: what the manager of that term was told and what it said. Written before it is acted on."""

    def __init__(self, folder: Path, term: int, settings: Settings) -> None:
        self._path = folder / f"{term:06d}.jsonl"
        with writing(self._path):
            self._file = self._path.open("w", encoding="utf-8")
        self._write({"settings": asdict(settings), "code": __version__, "term": term})

    def append(self, record: Record) -> None:
        self._write(codec.encode_record(record))

    def close(self) -> None:
        self._file.close()

    def _write(self, value: object) -> None:
        with writing(self._path):
            self._file.write(json.dumps(value, separators=(",", ":")) + "\n")
            self._file.flush()


Sender = tuple[str, str]


class ManagerService:
    """The manager's process: its clock, its event log, and a mailbox for everybody it commands."""

    def __init__(self, settings: Settings, events: Path, recovered: Recovered, clock: Callable[[], float]) -> None:
        self.manager = Manager(settings)
        self.term = recovered.term
        self.log = EventLog(events, self.term, settings)
        self.clock = clock
        self.boxes: dict[Sender, WakingMailbox] = {}
        self.last: dict[Sender, Beat] = {}
        self.quiet: dict[Sender, Beat] = {}
        """Beats with no news since the last tick."""
        self.stopped: dict[str, Stop] = {}
        """Roles that have been told to stop: who speaks up later is told too."""
        self.held_back: list[Stop] = []
        """Of a run that has failed: nobody is told to stop before the driver has asked all what they are doing."""
        self.handle(recovered)

    def handle(self, event: Event) -> None:
        now = self.clock()
        commands = tuple(self.manager.handle(now, event))
        self.log.append(Record(now, event, commands))
        failed = any(isinstance(command, EndRun) and command.outcome == "failed" for command in commands)
        for command in commands:
            if not isinstance(command, Stop) or command.id != "*":
                self._box(address(command)).put(command)
            elif failed:
                self.held_back.append(command)
            else:
                self._stop(command)

    def _stop(self, command: Stop) -> None:
        """Tell a whole role."""
        self.stopped[command.role] = command
        for role, id_ in list(self.boxes):
            if role == command.role:
                self._box((role, id_)).put(command)

    def _box(self, sender: Sender) -> WakingMailbox:
        box = self.boxes.get(sender)
        if box is None:
            box = self.boxes[sender] = WakingMailbox(self.term)
            if sender[0] in self.stopped:
                box.put(self.stopped[sender[0]])
        return box

    async def beat(self, beat: Beat, acked: Inbox, wait_s: float) -> list[Numbered]:
        """A sign of life; the answer holds the commands above `acked`, if need be after waiting `wait_s` for one."""
        sender = sender_of(beat)
        box, last = self._box(sender), self.last.get(sender)
        if last is not None and last.incarnation > beat.incarnation:
            return [Numbered(self.term, acked.number + 1, Stop(*sender, "another process has taken its place"))]
        if sender[0] != "datastore" and (last is None or last.incarnation < beat.incarnation):
            box.begin(beat.incarnation)  # the store keeps over its deaths what it has taken in, and its orders
        if is_news(last, beat):
            self.quiet.pop(sender, None)  # what the next tick would carry is older than this
            self.handle(beat)
        else:
            self.quiet[sender] = beat
        self.last[sender] = beat
        if not box.after(acked) and wait_s > 0:
            await box.pulse.wait(wait_s)
        return box.after(acked)

    async def store_poll(self, incarnation: int, events: StoreEvents, acked: Inbox, wait_s: float) -> list[Numbered]:
        """Rows of the outbox; the answer is that of `beat`."""
        if events.events and events.last > self.manager.state.outbox:
            self.handle(events)
        return await self.beat(StoreBeat(incarnation), acked, wait_s)

    async def driver_poll(
        self, events: Sequence[DriverEvent], acked: Inbox, wait_s: float
    ) -> tuple[list[Numbered], list[str], list[dict[str, object]], tuple[ProcessSeen, ...]]:
        """Commands for the driver, lines for the user, the state of every process, what the next manager must know."""
        box = self._box(("driver", "driver"))
        if not box.after(acked):
            while self.held_back:
                self._stop(self.held_back.pop(0))
        for event in events:
            self.handle(event)
        if not box.after(acked) and not self.manager.state.notes and wait_s > 0:
            await box.pulse.wait(wait_s)
        return box.after(acked), self.manager.take_notes(), self.processes(), self.manager.state.seen()

    def processes(self) -> list[dict[str, object]]:
        state = self.manager.state
        versions: dict[Sender, object] = {("trainer", "trainer"): state.trainer.version}
        versions |= {("replica", r.id): r.version for r in state.replicas.values()}
        versions |= {("relay", r.id): max(r.whole, default=None) for r in state.relays.values()}
        doing = {("replica", r.id): _doing(r) for r in state.replicas.values()}
        doing["trainer", "trainer"] = state.trainer.state
        return [
            {
                "role": role,
                "id": id_,
                "state": "alive" if role == "manager" else process.state,  # it says this itself
                "doing": doing.get((role, id_)),
                "version": getattr(versions.get((role, id_)), "number", None),
            }
            for (role, id_), process in sorted(state.processes.items())
        ]

    async def run(self) -> None:
        """Ticks, until the process ends with the run."""
        while True:
            beats, self.quiet = tuple(self.quiet[s] for s in sorted(self.quiet)), {}
            self.handle(Tick(beats))
            await asyncio.sleep(TICK_S)


def _doing(replica: Replica) -> str:
    return f"{replica.activity} {len(replica.unfinished)}" if replica.unfinished else replica.activity


ManagerPoll = Callable[[int, StoreEvents, Inbox, float], Awaitable[list[Numbered]]]
Poll = Callable[[StoreEvents, Inbox, float], Awaitable[list[Numbered]]]


class StoreService:
    """The data store's process: waits for others, tells the manager, obeys it."""

    def __init__(self, store: DataStore, events_within_s: float = EVENTS_WITHIN_S) -> None:
        self.store, self.events_within_s = store, events_within_s
        self.pulse = Pulse()
        """Any change; replicas have pulses of their own, since there may be many that wait."""
        self.stopping = False
        self._changes = store.changes
        self._replicas: dict[tuple[str, int], Pulse] = {}
        """Those that wait for work."""

    def _changed(self) -> None:
        if self.store.changes != self._changes:
            self._changes = self.store.changes
            self._wake()

    def _wake(self) -> None:
        self.pulse.beat()
        for replica, pulse in self._replicas.items():
            if self.stopping or self.store.owes(*replica):
                pulse.beat()

    async def exchange(self, report: ReplicaReport) -> ReplicaReply:
        deadline = time.monotonic() + report.wait_s
        replica = report.replica, report.incarnation
        reply = self.store.exchange(report)
        self._changed()
        while not (reply.work or reply.release or reply.cancel or self.stopping):
            if (left := deadline - time.monotonic()) <= 0:
                break
            await self._replicas.setdefault(replica, Pulse()).wait(left)
            reply = self.store.exchange(ReplicaReport(*replica, report.sequence, busy_s=report.busy_s))
        self._replicas.pop(replica, None)
        return reply

    async def exchange_scores(self, report: ScoreReport, wait_s: float) -> tuple[list[UnscoredGroup], bool]:
        """Groups to score, and whether the run is stopping."""
        deadline = time.monotonic() + wait_s
        groups = self.store.exchange_scores(report)
        self._changed()
        waits = report.want > 0 and not report.scores
        while waits and not groups and not self.stopping and (left := deadline - time.monotonic()) > 0:
            await self.pulse.wait(left)
            groups = self.store.exchange_scores(ScoreReport(report.incarnation, want=report.want))
        return groups, self.stopping

    async def next_batch(self, update: int, part: int, wait_s: float) -> tuple[Batch | None, bool]:
        """This part of the batch, or None; and whether it will never come."""
        deadline = time.monotonic() + wait_s
        while True:
            batch = self.store.next_batch(update, part)
            self._changed()
            if batch is not None or self.store.over(update):
                return batch, batch is None
            if self.stopping or (left := deadline - time.monotonic()) <= 0:
                return None, False
            await self.pulse.wait(left)

    async def trained(self, report: Trained) -> None:
        self.store.trained(report)
        self._changed()

    async def run(self, incarnation: int, poll: ManagerPoll) -> None:
        """Carry events to the manager and its commands into the store, until told to stop.

        The store stays open after it: others may still be on their way to say what they have done.
        """
        poll_as_this = partial(poll, incarnation)
        await asyncio.gather(self._tell(poll_as_this), self._listen(poll_as_this), self._free())

    async def _free(self) -> None:
        """In pieces, with room for everybody's calls between them."""
        while not self.stopping:
            if self.store.free_some():
                await asyncio.sleep(FREE_EVERY_S)
            else:
                await self.pulse.wait(TICK_S)

    async def _listen(self, poll: Poll) -> None:
        while not self.stopping:
            self._obey(await poll(StoreEvents(0, ()), self.store.acked, TICK_S))

    async def _tell(self, poll: Poll) -> None:
        told = 0
        while not self.stopping:
            events = self.store.events(told)
            if events.events:
                told = events.last
                self._obey(await poll(events, self.store.acked, 0.0))
                await asyncio.sleep(self.events_within_s)
            else:
                await self.pulse.wait(TICK_S)

    def _obey(self, numbered: Sequence[Numbered]) -> None:
        new = self.store.obey(numbered)
        self.stopping = self.stopping or any(isinstance(command, Stop) for command in new)
        self._changed()
        if self.stopping:
            self._wake()
