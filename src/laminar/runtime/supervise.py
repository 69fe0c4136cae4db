"""Starting, watching and ending the processes of a run.

Owns: the actors and the references of their bodies. Waits for: the end of any of them. A process that has not ended
some time after it was told to is killed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from laminar.control.events import ProcessEnded, ProcessStarted
from laminar.errors import LaminarError, UserError
from laminar.run_folder import NODE, RunFolder, is_running, write_json
from laminar.runtime import handles

STOP_WITHIN_S = 5.0
"""After this long a process that was told to stop is killed."""
EXIT_WITHIN_S = 1.0
"""After its body has returned a process gets this long to exit."""


@dataclass(slots=True)
class Process:
    role: str
    id: str
    actor: Any
    pid: int = 0
    body: Any = None
    """Reference that is done when the body has returned or died."""
    ended: bool = False


@dataclass(slots=True)
class Supervisor:
    """All processes of one start of a run."""

    folder: RunFolder
    incarnation: int = 0
    """The term of this start, once the data store has told it."""
    processes: list[Process] = field(default_factory=list)
    first_traceback: str | None = None
    """Of the first body that failed by something unforeseen."""

    def create(self, kind: type, role: str, id_: str, *args: object) -> Process:
        process = Process(role, id_, handles.create(kind, role, id_, self.folder.path, *args))
        self.processes.append(process)
        return process

    def run(self, process: Process, *args: object) -> None:
        process.body = handles.run(process.actor, *args)

    def started(self, interrupted: threading.Event) -> list[ProcessStarted]:
        """Wait until every process is there and write processes.json. Raises what kept one from starting."""
        for process in self.processes:
            process.pid = handles.wait_for(handles.pid(process.actor), interrupted)
        self.write([])
        return [ProcessStarted(p.role, p.id, self.incarnation) for p in self.processes]

    def write(self, states: Sequence[dict[str, object]]) -> None:
        """processes.json: who runs where, with the state and version that the manager sees."""
        by_id = {(s["role"], s["id"]): s for s in states}
        rows = [{"role": "driver", "id": "driver", "pid": os.getpid(), "node": NODE, "state": "alive", "version": None}]
        for p in self.processes:
            seen = by_id.get((p.role, p.id), {})
            rows.append(
                {"role": p.role, "id": p.id, "pid": p.pid, "node": NODE}
                | {"state": seen.get("state", "starting"), "version": seen.get("version")}
            )
        write_json(self.folder.processes, {"processes": rows})

    def bodies(self) -> list[Any]:
        return [p.body for p in self.processes if p.body is not None and not p.ended]

    def take_ended(self, references: Sequence[Any]) -> list[ProcessEnded]:
        """The processes that these references say have ended, with the cause for those that did not return."""
        events = []
        for process in self.processes:
            if process.body in references and not process.ended:
                process.ended = True
                events.append(ProcessEnded(process.role, process.id, self.incarnation, self._cause(process)))
        return events

    def _cause(self, process: Process) -> str | None:
        """None if the body returned. What it raised goes to logs/errors.log with its traceback."""
        try:
            handles.result_of(process.body)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if not isinstance(cause, UserError):
                self.first_traceback = self.first_traceback or str(error)
            self._log(process, str(error))
            return str(cause) if isinstance(cause, LaminarError) else f"{type(cause).__name__}: {cause}"
        except RayActorError as error:
            self._log(process, str(error))
            return f"its process (pid {process.pid}) was killed or crashed"
        return None

    def _log(self, process: Process, text: str) -> None:
        with (self.folder.logs / "errors.log").open("a", encoding="utf-8") as log:
            log.write(f"{process.role} {process.id} (pid {process.pid}) failed:\n{text}\n\n")

    def stop(self) -> None:
        """Give everybody STOP_WITHIN_S to return, the manager apart, which ends last; then kill what is left."""
        deadline = time.monotonic() + STOP_WITHIN_S
        while time.monotonic() < deadline:
            waiting = [p.body for p in self.processes if p.body is not None and not p.ended and p.role != "manager"]
            if not waiting:
                break
            self.take_ended(handles.wait_for_any(waiting, timeout_s=0.2))
        for process in self.processes:
            if process.role == "datastore" and process.ended:
                handles.close_store(process.actor)
        for process in self.processes:
            if process.ended or process.role == "manager":
                handles.end(process.actor)
        deadline = min(deadline, time.monotonic() + EXIT_WITHIN_S)
        pids = [p.pid for p in self.processes if p.pid]
        while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
