"""The relay of one machine: it alone says which weight versions are whole.

Owns the step WRITTEN -> WHOLE of every slot of its machine, and the set of versions to keep.
Consumes slots that the trainer has written, records of `versions.jsonl`, and the manager's replies.
Waits for: a record (a version without one is not looked at), and the next beat. Never for a reader or the trainer.
Invariants:
  * nothing is shown that this process has not digested by itself and found equal to the manifest and the record;
  * all of its state lies in the slots: a relay that died is replaced by a new one on the same folder.
Two threads: the caller's checks versions, a second one beats, so that the digest of a large version does not look
like a death. They share the folder, whose changes are atomic, and the list of events, under a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from laminar.types import Version
from laminar.weights.digests import digest_of
from laminar.weights.manifest import Manifest, fingerprint_of
from laminar.weights.slot import EMPTY, Lock, Slot, SlotState, State
from laminar.weights.store import Reclaimed, SlotStore
from laminar.weights.versions import VersionLog, VersionRecord


@dataclass(frozen=True, slots=True)
class Rejected:
    """A version that was not what its manifest or record says. It was never shown; its slot is free."""

    version: Version
    reason: str
    tensors: tuple[str, ...] = ()
    """Names of those whose bytes differ."""


RelayEvent = Rejected | Reclaimed


def describe(event: RelayEvent) -> str:
    """The event as a sentence for people."""
    if isinstance(event, Reclaimed):
        return f"weights of version {event.version} were given up for newer ones, though trajectories needed them"
    tensors = f" (tensors {', '.join(event.tensors[:3])}{', ...' if len(event.tensors) > 3 else ''})"
    return f"weights of version {event.version} are not used: {event.reason}{tensors if event.tensors else ''}"


@dataclass(frozen=True, slots=True)
class RelayBeat:
    """What a relay tells the manager: absolute sets, so that a lost beat loses nothing but events."""

    relay: str
    incarnation: int
    sequence: int
    """Raised with each beat of an incarnation."""
    whole: tuple[Version, ...]
    """Oldest first."""
    free_slots: int
    """See `SlotStore.num_free`; 0 before the trainer has made the slots."""
    events: tuple[RelayEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class RelayReply:
    """What the manager wants."""

    keep: tuple[Version, ...] | None = None
    """All versions that live trajectories need; None leaves the set as it is."""
    stop: bool = False


class Manager(Protocol):
    """Where beats go."""

    def beat(self, beat: RelayBeat) -> RelayReply:
        """Called from the relay's second thread. An exception ends `Relay.run`."""
        ...


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Who the relay is, and its rhythm."""

    relay: str
    incarnation: int = 0
    heartbeat_s: float = 0.5
    poll_s: float = 0.02
    """How soon a written slot is noticed."""


class Relay:
    """Checks versions and shows them. `step` and `prefault` do one piece of work each; `run` does them for ever."""

    def __init__(self, folder: Path, versions: VersionLog, settings: RelaySettings) -> None:
        """The folder need not exist yet: until the trainer has made the slots there, there is nothing to do."""
        self.settings = settings
        self._folder = folder
        self._versions = versions
        self._store: SlotStore | None = None
        self._last_whole: frozenset[Version] = frozenset()
        self._events: list[RelayEvent] = []
        self._events_lock = threading.Lock()
        self._num_beats = 0

    def step(self) -> bool:
        """Checks the newest written version that has a record.

        Returns: whether the manager should hear of a change.
        """
        store = self._attach()
        if store is None:
            return False
        states = store.states()
        whole = frozenset(state.version for _, state in states if state.state is State.WHOLE)
        lost, self._last_whole = self._last_whole - whole, whole
        if lost:
            for version in sorted(lost & store.kept()):
                self._report(Reclaimed(version, was_kept=True))
        written = [(state.version, slot) for slot, state in states if state.state is State.WRITTEN]
        newest_first = sorted(written, key=lambda pair: pair[0], reverse=True)
        return any(self._check(store, slot) for _, slot in newest_first) or bool(lost)

    def prefault(self) -> bool:
        """Brings some more pages of the slots into memory, so that publishing touches no fresh ones.

        Returns: whether there is more to do now.
        """
        store = self._attach()
        return store is not None and store.prefault()

    def whole_versions(self) -> tuple[Version, ...]:
        """Oldest first."""
        return () if self._store is None else self._store.whole()

    def keep(self, versions: Collection[Version]) -> None:
        """Sets the versions that are given up last. Without slots there is nothing to keep."""
        if self._store is not None and self._store.kept() != set(versions):
            self._store.keep(versions)

    def run(self, stop: threading.Event, manager: Manager) -> None:
        """Works until `stop` is set or the manager says so; `stop` is set when it returns.

        Raises:
            Whatever `manager.beat` raises.
        """
        changed = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="relay-beat") as pool:
            beats = pool.submit(self._beat_until, stop, changed, manager)
            try:
                while not stop.is_set():
                    if self.step():
                        changed.set()
                    elif not self.prefault():
                        stop.wait(self.settings.poll_s)
            finally:
                stop.set()
                changed.set()
            beats.result()

    def _beat_until(self, stop: threading.Event, changed: threading.Event, manager: Manager) -> None:
        try:
            while not stop.is_set():
                changed.clear()
                beat = self._next_beat()
                reply = manager.beat(beat)
                with self._events_lock:
                    del self._events[: len(beat.events)]
                if reply.keep is not None:
                    self.keep(reply.keep)
                if reply.stop:
                    return
                changed.wait(self.settings.heartbeat_s)
        finally:
            stop.set()

    def _next_beat(self) -> RelayBeat:
        self._num_beats += 1
        with self._events_lock:
            events = tuple(self._events)
        free_slots = 0 if self._store is None else self._store.num_free()
        settings = self.settings
        return RelayBeat(
            settings.relay, settings.incarnation, self._num_beats, self.whole_versions(), free_slots, events
        )

    def _attach(self) -> SlotStore | None:
        if self._store is None:
            self._store = SlotStore.open(self._folder, writable=True)
        return self._store

    def _check(self, store: SlotStore, slot: Slot) -> bool:
        """Makes a written slot whole, or empty. False if it can't be judged yet."""
        with slot.locked(Lock.SHARED) as is_ours:
            state = slot.read()
            if not is_ours or state.state is not State.WRITTEN:
                return False
            record = self._versions.find(state.version)
            if record is None:
                return False
            rejected = _judge(store, slot, slot.read_manifest(), record)
            if rejected is None:
                slot.mark(SlotState(State.WHOLE, state.version, state.fingerprint))
            else:
                slot.mark(EMPTY)
                self._report(rejected)
            return True

    def _report(self, event: RelayEvent) -> None:
        with self._events_lock:
            self._events.append(event)


def _judge(store: SlotStore, slot: Slot, manifest: Manifest, record: VersionRecord) -> Rejected | None:
    """None if the slot holds exactly the recorded version."""
    if manifest.layout != store.layout.digest:
        return Rejected(record.version, f"its layout is {manifest.layout}, that of the run {store.layout.digest}")
    if manifest.fingerprint != record.fingerprint:
        return Rejected(record.version, f"its fingerprint is {manifest.fingerprint}, recorded is {record.fingerprint}")
    memory = slot.memory()
    digests = tuple(digest_of(memory[entry.start : entry.stop]) for entry in store.layout)
    differ = tuple(
        entry.name
        for entry, found, stated in zip(store.layout, digests, manifest.digests, strict=True)
        if found != stated
    )
    if differ:
        return Rejected(record.version, "its bytes are not those that were published", differ)
    if fingerprint_of(digests) != manifest.fingerprint:
        return Rejected(record.version, f"its digests do not give the fingerprint {manifest.fingerprint}")
    return None
