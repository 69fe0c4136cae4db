"""The trainer's voice: what the manager hears, how a stop arrives, and what becomes of a manager that is gone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import pytest

from laminar.control.commands import Numbered, Stop
from laminar.control.events import TrainerBeat
from laminar.control.mailbox import Inbox
from laminar.trainer.beat import TrainerVoice
from laminar.types import Version

WITHIN_S = 20.0


class Boom(Exception):
    """A fault of the test's own making."""


class Manager:
    def __init__(self) -> None:
        self.beats: queue.SimpleQueue[TrainerBeat] = queue.SimpleQueue()
        self.acked: list[int] = []
        self.commands: list[Numbered] = []
        self.error: Exception | None = None

    def beat(self, beat: TrainerBeat, acked: Inbox, wait_s: float) -> Sequence[Numbered]:
        if self.error is not None:
            raise self.error
        self.acked.append(acked.number)
        self.beats.put(beat)
        return [n for n in self.commands if n.number > acked.number]

    def next(self) -> TrainerBeat:
        return self.beats.get(timeout=WITHIN_S)


def wait_until(condition: Callable[[], bool]) -> None:
    """Looks again at every turn of the other thread, within a deadline."""
    gone = threading.Event()
    for _ in range(int(WITHIN_S / 0.005)):
        if condition():
            return
        gone.wait(0.005)
    raise AssertionError("it never came true")


def test_a_version_is_told_at_once_and_the_end_for_certain() -> None:
    """With a heartbeat of an hour, whatever comes is news."""
    manager = Manager()
    voice = TrainerVoice(manager, 3, heartbeat_s=3600.0)
    assert manager.next() == TrainerBeat(3, None, 0, "starting")
    voice.published(Version(0, 1), 0)
    assert manager.next() == TrainerBeat(3, Version(0, 1), 0, "training")
    assert not voice.is_set()
    voice.done(Version(0, 2))
    assert manager.next() == TrainerBeat(3, Version(0, 2), 0, "done"), "heard before `done` returns"
    assert manager.beats.empty()


def test_a_heartbeat_goes_on_while_the_trainer_is_busy_and_brings_the_stop() -> None:
    manager = Manager()
    voice = TrainerVoice(manager, 1, heartbeat_s=0.005)
    for _ in range(3):
        manager.next()
    assert not voice.is_set()
    manager.commands.append(Numbered(1, 1, Stop("trainer", "*", "")))
    wait_until(voice.is_set)
    assert manager.acked[-1] == 0


def test_a_manager_that_is_gone_is_an_error_where_the_trainer_looks() -> None:
    """Fault 2."""
    manager = Manager()
    manager.error = Boom("no manager")
    voice = TrainerVoice(manager, 1, heartbeat_s=0.005)
    with pytest.raises(Boom, match="no manager"):
        wait_until(voice.is_set)
    with pytest.raises(Boom, match="no manager"):
        voice.done(Version(0, 1))
