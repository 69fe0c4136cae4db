from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.types import Version
from laminar.weights import (
    Reclaimed,
    Rejected,
    Relay,
    RelayBeat,
    RelayEvent,
    RelayReply,
    RelaySettings,
    SlotStore,
    VersionLog,
    VersionRecord,
    describe,
)
from laminar.weights.copying import digest_of
from tests.weights.conftest import SHAPES, Machine, make_tensors

V0, V1, V2 = (Version(0, number) for number in range(3))


class ScriptedManager:
    """Keeps all beats, answers with the latest reply, and lets a test wait for a beat."""

    def __init__(self) -> None:
        self.reply = RelayReply()
        self.beats: list[RelayBeat] = []
        self._arrived = threading.Condition()

    def beat(self, beat: RelayBeat) -> RelayReply:
        with self._arrived:
            self.beats.append(beat)
            self._arrived.notify_all()
            return self.reply

    def wait_for(self, wanted: Callable[[RelayBeat], bool]) -> RelayBeat:
        with self._arrived:
            assert self._arrived.wait_for(lambda: any(map(wanted, self.beats)), timeout=30)
            return next(filter(wanted, self.beats))


def events(relay: Relay) -> tuple[RelayEvent, ...]:
    """What the relay has to tell: it beats once and is told to stop."""
    manager = ScriptedManager()
    manager.reply = RelayReply(stop=True)
    relay.run(threading.Event(), manager)
    return manager.beats[0].events


# ---------------------------------------------------------------- checking


def test_nothing_is_shown_before_its_record_is_there(machine: Machine) -> None:
    """Invariant 4 of docs/architecture.md, and the order that resume relies on."""
    result = machine.store.publish(V0, make_tensors(0).items(), [])
    assert not machine.relay.step()
    assert machine.relay.whole_versions() == ()
    machine.log.append(VersionRecord(V0, result.fingerprint))
    assert machine.relay.step()
    assert not machine.relay.step()
    assert machine.relay.whole_versions() == machine.store.whole() == (V0,)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "none"])
def test_a_flipped_bit_is_never_shown_and_its_tensor_is_named(machine: Machine, name: str) -> None:
    """Faults 22 and 24; invariant 4 of docs/architecture.md."""
    machine.publish(0)
    machine.publish(1, show=False)
    machine.corrupt(1, name)
    assert machine.relay.step()
    assert machine.store.whole() == (V0,)
    (event,) = events(machine.relay)
    assert isinstance(event, Rejected)
    assert (event.version, event.tensors) == (V1, (name,))
    assert machine.store.num_free() == 4, "its slot is free again"
    machine.publish(1)
    assert machine.store.whole() == (V0, V1)


def test_a_version_that_is_not_the_recorded_one_is_never_shown(machine: Machine) -> None:
    """Fault 24: one number, two weights."""
    machine.log.append(VersionRecord(V0, "0" * 32))
    machine.store.publish(V0, make_tensors(0).items(), [])
    assert machine.relay.step()
    assert machine.store.whole() == ()
    (event,) = events(machine.relay)
    assert isinstance(event, Rejected) and "recorded is 000" in event.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"layout": "other"}, "its layout is other"), ({"fingerprint": "1" * 32}, "its fingerprint is 111")],
)
def test_a_manifest_that_contradicts_itself_is_never_shown(
    machine: Machine, change: dict[str, str], reason: str
) -> None:
    machine.publish(0, show=False)
    slot = machine.store.slots[0]
    slot.write_manifest(replace(slot.read_manifest(), **change))
    assert machine.relay.step()
    assert machine.store.whole() == ()
    (event,) = events(machine.relay)
    assert isinstance(event, Rejected) and event.reason.startswith(reason)


def test_digests_that_do_not_give_the_fingerprint_are_never_shown(machine: Machine) -> None:
    """Bytes and per-tensor digests exchanged together still differ from the recorded fingerprint."""
    machine.publish(0, show=False)
    machine.corrupt(0, "scale")
    slot = machine.store.slots[0]
    manifest = slot.read_manifest()
    entry = machine.layout.tensors["scale"]
    digests = list(manifest.digests)
    digests[list(SHAPES).index("scale")] = digest_of(slot.memory()[entry.start : entry.stop])
    slot.write_manifest(replace(manifest, digests=tuple(digests)))
    assert machine.relay.step()
    (event,) = events(machine.relay)
    assert isinstance(event, Rejected) and "do not give the fingerprint" in event.reason


def test_the_newest_is_checked_first_and_the_older_are_not_forgotten(machine: Machine) -> None:
    for number in range(3):
        machine.publish(number, show=False)
    shown = []
    while machine.relay.step():
        shown.append(machine.store.whole())
    assert shown == [(V2,), (V1, V2), (V0, V1, V2)]


def test_a_restarted_relay_finds_its_slots(machine: Machine) -> None:
    """A relay has no state but its slots."""
    machine.publish(0)
    machine.publish(1, show=False)
    again = Relay(machine.store.folder, VersionLog(machine.log.path), RelaySettings("relay-0", incarnation=1))
    assert again.step()
    assert again.whole_versions() == (V0, V1)


def test_giving_up_a_kept_version_is_an_event(tmp_path: Path) -> None:
    """Invariant 6 of docs/architecture.md: an event, not an out-of-memory."""
    machine = Machine(tmp_path, num_slots=3)
    for number in range(3):
        machine.publish(number)
    machine.relay.keep([V0, V1])
    machine.publish(3, show=False)
    assert machine.relay.step()
    assert events(machine.relay) == (Reclaimed(V0, was_kept=True),)
    assert machine.store.kept() == {V0, V1}, "a reply that says nothing changes nothing"
    machine.relay.keep([])
    machine.publish(4, show=False)
    assert machine.relay.step()
    assert events(machine.relay) == ()


# ---------------------------------------------------------------- running


def test_a_run_from_before_the_slots_are_there_to_the_stop(tmp_path: Path) -> None:
    relay = Relay(tmp_path / "slots", VersionLog(tmp_path / "versions.jsonl"), RelaySettings("relay-7", 3, 0.01))
    assert not relay.step()
    assert not relay.prefault()
    relay.keep([V0])
    manager = ScriptedManager()
    thread = threading.Thread(target=relay.run, args=(threading.Event(), manager))
    thread.start()
    first = manager.wait_for(lambda beat: True)
    assert (first.relay, first.incarnation, first.whole, first.free_slots) == ("relay-7", 3, (), 0)

    machine = Machine(tmp_path)
    machine.publish(0, show=False)
    manager.wait_for(lambda beat: beat.whole == (V0,) and beat.free_slots == 4)
    manager.reply = RelayReply(keep=(V0,))
    machine.publish(1, show=False)
    manager.wait_for(lambda beat: beat.whole == (V0, V1) and beat.free_slots == 3)
    assert machine.store.kept() == {V0}
    machine.publish(2, show=False)
    machine.corrupt(2, "scale")
    manager.reply = RelayReply(stop=True)
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert [beat.sequence for beat in manager.beats] == list(range(1, len(manager.beats) + 1))


def test_a_change_is_told_at_once_and_events_once(machine: Machine) -> None:
    relay = Relay(machine.store.folder, VersionLog(machine.log.path), RelaySettings("relay-0", heartbeat_s=3600))
    manager = ScriptedManager()
    stop = threading.Event()
    thread = threading.Thread(target=relay.run, args=(stop, manager))
    machine.log.append(VersionRecord(V0, "0" * 32))
    thread.start()
    manager.wait_for(lambda beat: True)
    machine.store.publish(V0, make_tensors(0).items(), [])
    manager.wait_for(lambda beat: bool(beat.events))
    machine.publish(1, show=False)
    last = manager.wait_for(lambda beat: beat.whole == (V1,))
    assert last.events == ()
    stop.set()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_slots_are_prefaulted_while_nothing_else_is_to_do(machine: Machine) -> None:
    manager = ScriptedManager()
    stop = threading.Event()
    thread = threading.Thread(target=machine.relay.run, args=(stop, manager))
    thread.start()
    manager.wait_for(lambda beat: beat.free_slots == 5)
    machine.publish(0, show=False)
    manager.wait_for(lambda beat: beat.whole == (V0,))
    stop.set()
    thread.join(timeout=30)
    while machine.relay.prefault():
        pass
    assert all(slot.path.stat().st_blocks * 512 >= machine.layout.size for slot in machine.store.slots)


def test_an_error_of_the_manager_ends_the_run_and_loses_no_event(machine: Machine) -> None:
    class Gone(Exception):
        pass

    class DeadManager:
        def beat(self, beat: RelayBeat) -> RelayReply:
            raise Gone

    machine.log.append(VersionRecord(V0, "0" * 32))
    machine.store.publish(V0, make_tensors(0).items(), [])
    machine.relay.step()
    with pytest.raises(Gone):
        machine.relay.run(threading.Event(), DeadManager())
    assert len(events(machine.relay)) == 1


def test_relay_attached_to_an_opened_store_shows_to_every_reader(machine: Machine) -> None:
    reader = SlotStore.open(machine.store.folder)
    assert reader is not None
    machine.publish(0)
    assert reader.newest() == machine.store.newest()


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            Reclaimed(V1, was_kept=True),
            "weights of version 1 were given up for newer ones, though trajectories needed them",
        ),
        (Rejected(V1, "too old"), "weights of version 1 are not used: too old"),
        (Rejected(V1, "bad", ("a", "b")), "weights of version 1 are not used: bad (tensors a, b)"),
        (Rejected(V1, "bad", tuple("abcd")), "weights of version 1 are not used: bad (tensors a, b, c, ...)"),
    ],
)
def test_events_in_words(event: RelayEvent, text: str) -> None:
    assert describe(event) == text
