"""A manager and what it is told, in a line an event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from laminar.control.commands import Command, Issue, Restart
from laminar.control.events import (
    Issued,
    ProcessStarted,
    Recovered,
    RelayBeat,
    ReplicaBeat,
    StoreEvent,
    StoreEvents,
    Tick,
    TrainerBeat,
)
from laminar.control.manager import Manager, Record
from laminar.types import SampleId, Settings, Version
from tests.control.plans import make_settings


def v(number: int) -> Version:
    return Version(0, number)


class Scene:
    """`replicas` of them are there from the start, without weights. Each method returns what the manager commands."""

    def __init__(self, replicas: int = 1, settings: Settings | None = None, **changes: Any) -> None:
        self.manager = Manager(settings or make_settings(**changes))
        self.state = self.manager.state
        self.now, self.outbox, self.next_group, self.size = 0.0, 0, 0, self.manager.settings.group_size
        self.records: list[Record] = []
        self.handle(Recovered(1))
        names = [f"r{i}" for i in range(replicas)]
        for role, id_ in [("trainer", "trainer"), ("relay", "relay"), *(("replica", name) for name in names)]:
            self.handle(ProcessStarted(role, id_, 1))
        for name in names:
            self.beat(name, None)

    def handle(self, event: Any) -> list[Command]:
        commands = self.manager.handle(self.now, event)
        self.records.append(Record(self.now, event, tuple(commands)))
        return commands

    def tick(self, seconds: float = 0.5, *beats: Any) -> list[Command]:
        self.now += seconds
        return self.handle(Tick(beats))

    def beat(
        self, replica: str, version: int | None, state: str = "idle", step: int = 0, failed: int = 0
    ) -> list[Command]:
        held = None if version is None else v(version)
        return self.handle(ReplicaBeat(replica, 1, state, held, step, node="n", failed_pulls=failed))

    def relay(self, *versions: int, problems: tuple[str, ...] = ()) -> list[Command]:
        return self.handle(RelayBeat("relay", 1, "n", tuple(map(v, versions)), 1, problems))

    def trainer(self, version: int | None, state: str = "training") -> list[Command]:
        return self.handle(TrainerBeat(1, None if version is None else v(version), 0, state))

    def store(self, *events: StoreEvent) -> list[Command]:
        self.outbox += len(events)
        return self.handle(StoreEvents(self.outbox, events))

    def issued(self, command: Command, groups: int | None = None) -> list[Command]:
        """The store carries a grant out, as a whole if not told otherwise."""
        if isinstance(command, Restart):
            return self.store(Issued(command.replica, 1, command.version, "train", (), command.samples, True))
        assert isinstance(command, Issue)
        count = command.num_groups if groups is None else groups
        ids = range(self.next_group, self.next_group + count)
        self.next_group += count
        size = self.size if command.kind == "train" else self.manager.settings.eval_group_size
        samples = tuple(SampleId(g, i) for g in ids for i in range(size))
        return self.store(Issued(command.replica, 1, command.version, command.kind, tuple(ids), samples, False))

    def ready(self, version: int = 0) -> list[Command]:
        """The trainer has published, the relay shows it, every replica has loaded it. What the last of them is told."""
        self.trainer(version)
        commands = self.relay(version)
        for name in sorted(self.state.replicas):
            commands = self.beat(name, version)
        return commands


def samples(groups: Iterable[int], size: int = 2) -> tuple[SampleId, ...]:
    return tuple(SampleId(g, i) for g in groups for i in range(size))


def kinds(commands: Sequence[Command]) -> list[str]:
    return [type(c).__name__ for c in commands]
