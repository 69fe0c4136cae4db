"""A run as a Chrome trace, which https://ui.perfetto.dev opens: what each process did when, from the manager's log.

The log of a real run and that of a simulated one are the same events, so one function draws both. One lane a replica
(generate, load), one for the trainer (train, wait), one a relay (receive); moves, cuts and deaths are marks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from laminar.control.commands import Move, Pull
from laminar.control.events import (
    Adopted,
    Buffered,
    CutGivenUp,
    CutMade,
    Dropped,
    Finished,
    Issued,
    Orphaned,
    ProcessEnded,
    RelayBeat,
    ReplicaBeat,
    StoreEvent,
    StoreEvents,
    Tick,
    TrainerBeat,
)
from laminar.control.manager import Record
from laminar.types import Load, SampleId, Version

Json = dict[str, Any]

PROCESSES = {"trainer": 1, "replica": 2, "relay": 3}
"""Roles that have lanes, in the order in which a viewer shows them."""
COUNTERS = 4
"""Where the counters are: the mean of the KV caches, and the groups in the buffer."""


@dataclass(slots=True)
class _Span:
    name: str
    began: float


class _Timeline:
    """The trace so far. Invariant: a lane does one thing at a time."""

    def __init__(self) -> None:
        self.events: list[Json] = []
        self._origin: float | None = None
        self._now = 0.0
        self._lanes: dict[tuple[str, str], int] = {}
        self._spans: dict[tuple[str, str], _Span] = {}
        self._cut: set[int] = set()
        """Batches that are cut and not trained."""
        self._version: Version | None = None
        self._buffered: set[int] = set()
        self._loads: dict[str, Load] = {}
        self._owners: dict[SampleId, str] = {}
        """Replicas of the unfinished samples."""
        self._num_held: Counter[str] = Counter()
        self._versions: dict[str, Version | None] = {}
        self._pulling: dict[str, Version] = {}

    def take(self, record: Record) -> None:
        """One more record; times do not decrease."""
        if self._origin is None:
            self._origin = record.now
        self._now = record.now - self._origin
        match record.event:
            case Tick(beats=beats):
                for beat in beats:
                    self._beat(beat)
                self._count("KV caches, % full", round(100 * self._kv_full(), 1))
            case StoreEvents(events=events):
                for event in events:
                    self._store_event(event)
            case ProcessEnded(role=role, id=id_, cause=cause) if role in PROCESSES:
                self._let_go([sample for sample, owner in self._owners.items() if owner == id_])
                self._loads.pop(id_, None)
                self._pulling.pop(id_, None)
                self._becomes(role, id_, None)
                self._mark(role, id_, "left" if cause is None else f"died: {cause}")
            case beat:
                self._beat(beat)
        for command in record.commands:
            match command:
                case Move():
                    self._mark("replica", command.source, f"moves to {command.destination}", {"reason": command.reason})
                case Pull():
                    self._pulling[command.replica] = command.version
                    self._show(command.replica)

    def close(self) -> Json:
        """All that has been taken, what is still going on included."""
        for role, id_ in list(self._spans):
            self._becomes(role, id_, None)
        names = [
            *({"name": "process_name", "pid": pid, "args": {"name": f"{role}s"}} for role, pid in PROCESSES.items()),
            {"name": "process_name", "pid": COUNTERS, "args": {"name": "counters"}},
            *(
                {"name": "thread_name", "pid": PROCESSES[role], "tid": tid, "args": {"name": id_}}
                for (role, id_), tid in self._lanes.items()
            ),
        ]
        return {"displayTimeUnit": "ms", "traceEvents": [{"ph": "M", **name} for name in names] + self.events}

    # ------------------------------------------------------------ events

    def _beat(self, beat: object) -> None:
        match beat:
            case ReplicaBeat():
                self._loads[beat.replica], self._versions[beat.replica] = beat.load, beat.version
                if beat.version == self._pulling.get(beat.replica):
                    self._pulling.pop(beat.replica, None)
                self._show(beat.replica)
            case RelayBeat():
                self._lane("relay", beat.relay)
                if self._version in beat.whole:
                    self._becomes("relay", beat.relay, None)
            case TrainerBeat(version=Version() as version) if version != self._version:
                self._version = version
                self._cut -= {update for update in self._cut if update < version.number}
                self._becomes("trainer", "trainer", None)
                for role, id_ in self._lanes:
                    if role == "relay":
                        self._becomes(role, id_, _named("receive", version))
                self._train()
            case TrainerBeat(state="done"):
                self._becomes("trainer", "trainer", None)

    def _store_event(self, event: StoreEvent) -> None:
        match event:
            case Buffered(groups=groups):
                self._buffered.update(groups)
            case CutMade(update=update, part=part, groups=groups):
                self._buffered -= {*groups}
                self._cut.add(update)
                self._mark("trainer", "trainer", f"batch {update} is cut" + f", part {part}" * (part > 0))
                self._train()
            case CutGivenUp(update=update):
                self._cut.discard(update)
            case Issued(replica=replica, samples=samples) | Adopted(replica=replica, samples=samples):
                self._let_go(samples)
                self._owners.update(dict.fromkeys(samples, replica))
                self._num_held[replica] += len(samples)
                self._pulling.pop(replica, None)
                self._show(replica)
            case Finished(samples=samples) | Dropped(samples=samples) | Orphaned(samples=samples):
                self._let_go(samples)
        if isinstance(event, Buffered | CutMade):
            self._count("groups in the buffer", len(self._buffered))

    def _let_go(self, samples: Sequence[SampleId]) -> None:
        for sample in samples:
            if (owner := self._owners.pop(sample, None)) is not None:
                self._num_held[owner] -= 1
                self._show(owner)

    def _show(self, replica: str) -> None:
        """A replica loads what it was told to, else it generates if it holds something."""
        pulling = self._pulling.get(replica)
        if pulling is not None:
            self._becomes("replica", replica, _named("load", pulling))
        elif self._num_held[replica]:
            self._becomes("replica", replica, _named("generate", self._versions.get(replica)))
        else:
            self._becomes("replica", replica, None)

    def _train(self) -> None:
        """It trains as soon as it has both the weights of its last batch and the next one."""
        if self._version is not None:
            number = self._version.number
            self._becomes("trainer", "trainer", f"train batch {number}" if number in self._cut else "wait")

    def _kv_full(self) -> float:
        shares = [load.kv_used / load.kv_capacity for load in self._loads.values() if load.kv_capacity]
        return sum(shares) / len(shares) if shares else 0.0

    # ------------------------------------------------------------ trace

    def _lane(self, role: str, id_: str) -> Json:
        number = self._lanes.setdefault((role, id_), 1 + sum(r == role for r, _ in self._lanes))
        return {"pid": PROCESSES[role], "tid": number}

    def _becomes(self, role: str, id_: str, name: str | None) -> None:
        """What goes on in a lane ends, unless it is the same; something else begins, or nothing."""
        lane, span = self._lane(role, id_), self._spans.get((role, id_))
        if span is not None and span.name == name:
            return
        if span is not None:
            began, duration = _microseconds(span.began), _microseconds(self._now - span.began)
            self.events.append({"ph": "X", "name": span.name, "ts": began, "dur": duration, **lane})
            del self._spans[role, id_]
        if name is not None:
            self._spans[role, id_] = _Span(name, self._now)

    def _mark(self, role: str, id_: str, name: str, details: Json | None = None) -> None:
        mark = {"ph": "i", "s": "t", "name": name, "ts": _microseconds(self._now), **self._lane(role, id_)}
        self.events.append(mark | ({"args": details} if details else {}))

    def _count(self, name: str, value: float) -> None:
        at = {"ts": _microseconds(self._now), "pid": COUNTERS, "tid": 0}
        self.events.append({"ph": "C", "name": name, **at, "args": {"value": value}})


def trace(records: Iterable[Record]) -> Json:
    """The trace of one run, its starts one after the other. JSON as the Trace Event Format wants it."""
    timeline = _Timeline()
    for record in records:
        timeline.take(record)
    return timeline.close()


def _named(verb: str, version: Version | None) -> str:
    return verb if version is None else f"{verb} version {version.number}"


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)
