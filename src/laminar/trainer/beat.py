"""The trainer's voice to the manager, in a thread of its own: a step may take longer than a heartbeat.

Owns: what the manager is told (version, checkpoint, state). Consumes: commands; the only one is to stop.
Unblocked by: a new version (told at once), else the heartbeat.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from laminar.control.commands import Numbered, Stop
from laminar.control.events import TrainerBeat
from laminar.control.mailbox import Inbox
from laminar.types import Version


class Manager(Protocol):
    def beat(self, beat: TrainerBeat, acked: Inbox, wait_s: float) -> Sequence[Numbered]: ...


class TrainerVoice:
    """Tells the manager what the trainer has published, and the trainer when to stop (`is_set`)."""

    def __init__(self, manager: Manager, incarnation: int, heartbeat_s: float) -> None:
        self._manager, self._incarnation, self._heartbeat_s = manager, incarnation, heartbeat_s
        self._news = threading.Event()
        self._stop = threading.Event()
        self._version: Version | None = None
        self._checkpoint = 0
        self._state = "starting"
        self._inbox = Inbox()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._thread.start()

    def published(self, version: Version, checkpoint: int) -> None:
        """A version lies in a slot; `checkpoint` is the number of the newest durable one."""
        self._version, self._checkpoint, self._state = version, checkpoint, "training"
        self._news.set()

    def is_set(self) -> bool:
        """Whether the trainer is to stop. Raises what kept the manager from being told."""
        if self._failure is not None:
            raise self._failure
        return self._stop.is_set()

    def done(self, version: Version) -> None:
        """Say that all batches are trained, and be heard, before the process ends."""
        self._state, self._version = "done", version
        self._stop.set()
        self._news.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._beat()
                self._news.wait(self._heartbeat_s)
                self._news.clear()
            if self._state == "done":
                self._beat()
        except BaseException as error:
            self._failure = error

    def _beat(self) -> None:
        beat = TrainerBeat(self._incarnation, self._version, self._checkpoint, self._state)
        for command in self._inbox.take(self._manager.beat(beat, self._inbox, 0.0)):
            if isinstance(command, Stop):
                self._stop.set()
