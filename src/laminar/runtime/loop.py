"""A run, on a page: start everybody, pass news between the processes' ends and the manager, stop everybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from laminar import requests
from laminar.config import Config
from laminar.control.commands import Command, EndRun, Numbered, Remove, Replace
from laminar.control.events import DriverEvent, ProcessEnded, ProcessSeen, ProcessStarted, StopRequested
from laminar.control.failover import without_manager
from laminar.control.liveness import lost_time
from laminar.control.mailbox import Inbox
from laminar.errors import ProtocolError, StorageError
from laminar.run_folder import RunFolder
from laminar.runtime import handles
from laminar.runtime.actors import kinds_of
from laminar.runtime.handles import ManagerHandle, StoreHandle
from laminar.runtime.supervise import Supervisor
from laminar.types import Settings

LOOK_S = 0.2
"""How often the driver looks for requests and signals."""
LONG_POLL_S = 0.5
"""How long a manager with nothing to say lets the driver wait."""
BY_THE_USER = "interrupted by the user"
INTERRUPTED_WITHIN_S = 2.0
"""A manager that does not end an interrupted run within this time is not waited for."""


def run(
    folder: RunFolder,
    config: Config,
    settings: Settings,
    origin: float,
    interrupted: threading.Event,
    say: Callable[[str], None],
) -> tuple[EndRun, str | None]:
    """Run to the end. Returns how it ended and, if a process failed by something unforeseen, the traceback.

    `origin`: the monotonic instant of run second 0. `interrupted`: set when the user wants to stop. `say`: shows a
    line.
    """
    supervisor = Supervisor(folder, kinds_of(config))
    replicas = [("replica", f"replica-{i}") for i in range(config.rollout.replicas)]
    others = [("relay", "relay-0"), ("trainer", "trainer"), *replicas, ("scorer", "scorer")]
    store_actor, manager_actor, *_ = [
        supervisor.create(role, id_).actor
        for role, id_ in [("datastore", "datastore"), ("manager", "manager"), *others]
    ]
    store = StoreHandle(supervisor.name("datastore"), store_actor)
    manager = ManagerHandle(supervisor.name("manager"), manager_actor)
    try:
        recovered = handles.wait_for(store.open(config, settings, origin), interrupted)
        supervisor.bodies = {
            "manager": (settings, origin),
            "datastore": (config, settings, origin, manager),
            "relay": (config, manager),
            "trainer": (config, store, manager),
            "replica": (config, store, manager),
            "scorer": (config, store, manager),
        }
        started = supervisor.begin(recovered, interrupted)
        end = Driver(supervisor, settings, store, manager, started, say).drive(interrupted)
        return end, supervisor.first_traceback
    finally:
        supervisor.stop()


class Driver:
    """Tells the manager who started, who ended and what the user wants, and obeys it, until it says that all is over.

    While there is no manager it replaces that one and the data store by itself, by the rule of
    `failover.without_manager`.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        settings: Settings,
        store: StoreHandle,
        manager: ManagerHandle,
        started: Sequence[ProcessStarted],
        say: Callable[[str], None],
    ) -> None:
        self._supervisor, self._settings, self._store, self._manager = supervisor, settings, store, manager
        self._say = say
        self._news: list[DriverEvent] = list(started)
        """What no manager has been told."""
        self._told: list[DriverEvent] = []
        """What is on its way: told again if there is no answer."""
        self._seen = tuple(ProcessSeen(e.role, e.id, e.incarnation, "starting") for e in started)
        """The last manager's word on all processes, and what has been done since."""
        self._inbox = Inbox()
        self._poll: Any = None
        self._term: Any = None
        """Reference to what the next manager begins with."""
        self._asked = self._looked = 0.0
        """When one of these two was asked, and when the driver last looked for the answer."""
        self._lost_manager: float | None = None
        """When the manager died, until there is another."""
        self._interrupted: float | None = None
        self._end: EndRun | None = None

    def drive(self, interrupted: threading.Event) -> EndRun:
        self._ask()
        while self._end is None:
            try:
                self._step(interrupted)
            except StorageError as error:  # nothing can be told to those who read the folder
                self._end = EndRun("failed", str(error))
        return self._end

    def _step(self, interrupted: threading.Event) -> None:
        """Wait for news for a moment, and pass it on."""
        awaited = [r for r in (self._poll, self._term) if r is not None]
        done = handles.wait_for_any([*awaited, *self._supervisor.awaited()], LOOK_S)
        now = time.monotonic()
        self._asked, self._looked = self._asked + lost_time(now - self._looked), now
        self._news += self._supervisor.news(done)
        self._news += requests.take(self._supervisor.folder)
        if interrupted.is_set():
            self._interrupt(now)
        self._supervisor.advance()
        if any(isinstance(e, ProcessEnded) and e.role == "manager" for e in self._news):
            self._poll, self._lost_manager = None, self._lost_manager or time.monotonic()
        if self._poll is None:
            self._without_manager(done)
        elif self._poll in done:
            if (answer := handles.answer_of(self._poll)) is not None:
                self._obey(*answer)
            self._ask()
        elif self._end is None:
            self._judge("manager")

    def _interrupt(self, now: float) -> None:
        """The user wants to stop: the manager ends the run, or, if it is not able to, this."""
        if self._interrupted is None:
            self._interrupted = now
            self._news.append(StopRequested(BY_THE_USER))
        elif now - self._interrupted > INTERRUPTED_WITHIN_S:
            self._end = EndRun("interrupted", BY_THE_USER)

    def _judge(self, role: str) -> None:
        """The manager that does not answer, or the data store that the next one waits for, is taken for dead."""
        process = self._supervisor.newest(role)
        if not process.pid or process.ended:
            return
        limit = self._settings.dead_after_s if process.answered else self._settings.start_timeout_s
        silent = self._looked - max(self._asked, process.began)
        if silent > limit:
            self._say(f"{role} is dead: silent for {silent:.1f} s")
            self._asked = self._looked
            self._supervisor.kill(role, role)

    def _ask(self) -> None:
        self._told, self._news = self._told + self._news, []
        self._asked = self._looked = time.monotonic()
        self._poll = self._manager.driver_poll(self._told, self._inbox, 0.0 if self._told else LONG_POLL_S)

    def _obey(
        self,
        commands: Sequence[Numbered],
        notes: Sequence[str],
        states: Sequence[dict[str, object]],
        seen: tuple[ProcessSeen, ...],
    ) -> None:
        self._told, self._seen = [], seen
        self._supervisor.newest("manager").answered = True
        if self._lost_manager is not None:
            self._say(f"manager is back after {time.monotonic() - self._lost_manager:.1f} s")
            self._lost_manager = None
        for note in notes:
            self._say(note)
        self._supervisor.write(states)
        for command in self._inbox.take(commands):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case EndRun():
                self._end = command
                self._supervisor.told_to_stop = self._poll is not None
                if command.outcome == "failed":
                    self._supervisor.show_stacks()
                    self._say(f"what each process was doing is at the end of {self._supervisor.folder.logs}/*.log")
            case Replace() | Remove():
                self._supervisor.obey(command)
            case other:
                raise ProtocolError(f"the driver can't do {other}")

    def _without_manager(self, done: Sequence[Any]) -> None:
        """Replace it, and the data store that it begins with, if need be."""
        self._news, self._told = self._told + self._news, []
        alone = [e for e in self._news if isinstance(e, ProcessEnded) and e.role in ("manager", "datastore")]
        if alone:
            self._news = [e for e in self._news if e not in alone]
            commands, self._seen, notes = without_manager(self._settings, self._seen, alone)
            for note in notes:
                self._say(note)
            for command in commands:
                self._carry_out(command)
        waiting = self._supervisor.waiting_manager()
        if waiting is None:
            return
        if self._term in done and (recovered := handles.answer_of(self._term)) is not None:
            self._term = None
            self._supervisor.newest("datastore").answered = True
            self._manager.find()
            self._supervisor.run(waiting, waiting.incarnation, replace(recovered, processes=self._seen))
            self._ask()
        elif self._term is None or self._term in done:
            self._store.find()
            self._asked = self._looked = time.monotonic()
            self._term = self._store.begin_term()
        else:
            self._judge("datastore")
