"""Starting, watching, replacing and ending the processes of a run.

Owns: the actors and the references of their bodies. Waits for: the start of each process and the end of any of them. A
process is replaced once its predecessor is seen to be gone. One that has not ended some time after it was told to is
killed.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from laminar.control.commands import Remove, Replace
from laminar.control.events import DriverEvent, ProcessEnded, ProcessStarted, Recovered
from laminar.errors import LaminarError, RunFailed, UserError
from laminar.run_folder import NODE, SHOW_STACKS, RunFolder, children_of, is_running, write_json, writing
from laminar.runtime import handles

CALLED = ("manager", "datastore")
"""Roles that others call, one process each."""
STOP_WITHIN_S = 5.0
"""After this long a process that was told to stop is killed."""
STACKS_WITHIN_S = 3.0
"""A process that was asked for its stacks gets this long to write them."""
LEAVE_WITHIN_S = 1.0
"""A process that was asked to leave gets this long to be gone."""
NOT_WAITED_FOR = ("manager", "relay")
"""Roles that need not return to be let go: others still call the one, and all that the other has lies in the slots."""


@dataclass(slots=True)
class Process:
    """One incarnation."""

    role: str
    id: str
    actor: Any
    pid_known: Any
    """Reference to the pid: done when the process is there, or could not be made."""
    pid: int = 0
    incarnation: int = 0
    body: Any = None
    """Reference that is done when the body has returned or died."""
    began: float = 0.0
    """Instant at which it was there."""
    answered: bool = False
    """It has answered the driver at least once."""
    unwanted: bool = False
    """Its end is in order, however it comes."""
    ended: bool = False

    @property
    def awaited(self) -> Any:
        """What happens to it next: its start, then its end."""
        return self.body if self.pid else self.pid_known


@dataclass(frozen=True, slots=True)
class Failure:
    """How a body ended that did not return."""

    cause: str | None
    is_final: bool = False
    """Another start would end in the same way."""


@dataclass(slots=True)
class Supervisor:
    """All processes of one start of a run."""

    folder: RunFolder
    kinds: dict[str, tuple[Any, ...]]
    """By role: the class of its actors and what the constructor takes."""
    bodies: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """By role: what the body of an actor takes, after its incarnation."""
    processes: list[Process] = field(default_factory=list)
    start: str = field(default_factory=lambda: secrets.token_hex(8))
    """Names this start of the run in its Ray."""
    told_to_stop: bool = False
    """The manager has told everybody to stop."""
    first_traceback: str | None = None
    """Of the first body that failed by something unforeseen."""
    _coming: list[Replace] = field(default_factory=list)
    """Processes whose predecessor may not be gone yet."""

    def create(self, role: str, id_: str) -> Process:
        """A process that has nothing to do yet."""
        kind, *arguments = self.kinds[role]
        name = f"{self.name(role)}/{len(self._named(role, id_))}" if role in CALLED else None
        actor = handles.create(name, kind, role, id_, self.folder.path, *arguments)
        self.processes.append(Process(role, id_, actor, handles.pid(actor)))
        return self.processes[-1]

    def name(self, role: str) -> str:
        """By which, with a number after it, others find whoever has this role."""
        return f"{self.start}/{role}"

    def run(self, process: Process, incarnation: int, *more: object) -> None:
        process.incarnation = incarnation
        process.body = handles.run(process.actor, incarnation, *self.bodies[process.role], *more)

    def begin(self, recovered: Recovered, interrupted: threading.Event) -> list[ProcessStarted]:
        """Let all run, and wait until every process is there. Raises what kept one from starting."""
        for process in self.processes:
            self.run(process, recovered.term, *((recovered,) if process.role == "manager" else ()))
        for process in self.processes:
            process.pid, process.began = handles.wait_for(process.pid_known, interrupted), time.monotonic()
        self.write([])
        return [ProcessStarted(p.role, p.id, p.incarnation) for p in self.processes]

    # ------------------------------------------------------------ while it runs

    def awaited(self) -> list[Any]:
        """References of which one is done when something has happened that the manager should know."""
        return [p.awaited for p in self.processes if not p.ended and p.awaited is not None]

    def news(self, done: Sequence[Any]) -> list[DriverEvent]:
        """What these references say: who is there, and who has ended, with the cause unless that was in order."""
        events: list[DriverEvent] = []
        for process in [p for p in self.processes if not p.ended and p.awaited in done]:
            if not process.pid and (failure := self._failure(process, process.pid_known)) is None:
                process.pid, process.began = handles.result_of(process.pid_known), time.monotonic()
                events.append(ProcessStarted(process.role, process.id, process.incarnation))
                continue
            process.ended = True
            failure = self._failure(process, process.awaited) or Failure(cause=None)
            cause = None if process.unwanted else failure.cause
            events.append(ProcessEnded(process.role, process.id, process.incarnation, cause, failure.is_final))
        return events

    def obey(self, command: Replace | Remove) -> None:
        """Begin to replace a process, or let it go. `advance` goes on with it."""
        match command:
            case Replace():
                self._coming.append(command)
            case Remove():
                for process in self._named(command.role, command.id):
                    process.unwanted = True
        self.kill(command.role, command.id)

    def advance(self) -> None:
        """Start those whose predecessors are gone for certain. A manager runs when the data store has told it all."""
        for command in list(self._coming):
            if any(is_running(p.pid) for p in self._named(command.role, command.id) if p.pid):
                continue
            self._coming.remove(command)
            process = self.create(command.role, command.id)
            process.incarnation = command.incarnation
            if command.role != "manager":
                self.run(process, command.incarnation)

    def newest(self, role: str) -> Process:
        """Of a role that one process has."""
        return self._named(role, role)[-1]

    def waiting_manager(self) -> Process | None:
        """A manager that has been started and not begun."""
        return next((p for p in self.processes if p.role == "manager" and p.body is None and not p.ended), None)

    def kill(self, role: str, id_: str) -> None:
        for process in self._named(role, id_):
            _kill(process)

    def show_stacks(self) -> None:
        """Let every process, this one and the workers of the scorer included, write into its log what it is doing.

        Returns when all have written, or after `STACKS_WITHIN_S`: they are about to be ended.
        """
        there = [p for p in self.processes if p.pid and not p.ended]
        workers = [pid for p in there if p.role == "scorer" for pid in children_of(p.pid)]
        logs = {p.pid: self.folder.logs / f"{p.id}.log" for p in there}
        silent = {pid: _size(log) for pid, log in logs.items()}
        for pid in [*logs, *workers]:
            with suppress(ProcessLookupError):
                os.kill(pid, SHOW_STACKS)
        with suppress(OSError), (self.folder.logs / "driver.log").open("a", encoding="utf-8") as log:
            faulthandler.dump_traceback(log, all_threads=True)
        deadline = time.monotonic() + STACKS_WITHIN_S
        while silent and time.monotonic() < deadline:
            time.sleep(0.01)
            silent = {pid: size for pid, size in silent.items() if is_running(pid) and _size(logs[pid]) == size}

    def _named(self, role: str, id_: str) -> list[Process]:
        return [p for p in self.processes if (p.role, p.id) == (role, id_)]

    def write(self, states: Sequence[dict[str, object]]) -> None:
        """processes.json: who runs where, with state, version and what it does, as the manager sees them."""
        by_id = {(s["role"], s["id"]): s for s in states}
        driver = {"role": "driver", "id": "driver", "pid": os.getpid(), "node": NODE, "state": "alive"}
        rows = [driver | {"doing": None, "version": None}]
        newest = {(p.role, p.id): p for p in self.processes}
        for key, p in newest.items():
            seen = by_id.get(key, {})
            rows.append(
                {"role": p.role, "id": p.id, "pid": p.pid, "node": NODE}
                | {"state": seen.get("state", "starting"), "doing": seen.get("doing"), "version": seen.get("version")}
            )
        write_json(self.folder.processes, {"processes": rows})

    def _failure(self, process: Process, reference: Any) -> Failure | None:
        """What a reference failed with, None if it did not; it goes to logs/errors.log, with its traceback if any."""
        try:
            handles.result_of(reference)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if not isinstance(cause, UserError):
                self.first_traceback = self.first_traceback or str(error)
            self._log(process, str(error))
            if isinstance(cause, LaminarError):
                return Failure(str(cause), is_final=isinstance(cause, UserError | RunFailed))
            return Failure(f"{type(cause).__name__}: {cause}")
        except RayActorError as error:
            if not process.unwanted:
                self._log(process, str(error))
            return Failure(f"its process (pid {process.pid}) was killed or crashed")
        return None

    def _log(self, process: Process, text: str) -> None:
        path = self.folder.logs / "errors.log"
        with writing(path), path.open("a", encoding="utf-8") as log:
            log.write(f"{process.role} {process.id} (pid {process.pid}) failed:\n{text}\n\n")

    def stop(self) -> None:
        """Give who was told to stop STOP_WITHIN_S to return; let go who has, and who need not; then kill the others.

        What has been acknowledged is durable, however a process ends.
        """
        self._coming.clear()
        deadline = time.monotonic() + (STOP_WITHIN_S if self.told_to_stop else 0.0)
        while time.monotonic() < deadline:
            running = [p for p in self.processes if not p.ended and p.role not in NOT_WAITED_FOR]
            waiting = [p.body for p in running if p.body is not None]
            if not waiting:
                break
            self.news(handles.wait_for_any(waiting, timeout_s=0.2))
        for process in self.processes:
            if process.role == "datastore" and process.ended:
                handles.close_store(process.actor)
        for process in self.processes:
            if process.ended or process.role in NOT_WAITED_FOR:
                handles.leave(process.actor)
        deadline = min(deadline, time.monotonic() + LEAVE_WITHIN_S)
        pids = [p.pid for p in self.processes if p.pid]
        while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in self.processes:
            _kill(process)


def _kill(process: Process) -> None:
    """End it now. By its pid, because Ray takes seconds for a process that is stopped."""
    if not process.pid:
        handles.kill(process.actor)
        return
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
