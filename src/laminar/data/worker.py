"""One killable process in which reward functions run, and the handle on it.

Owns: the child process, its process group and the socket to it. The child runs this file as a program.
Consumes: `ScorableGroup`s one at a time. Gives back: a `GroupScore`, or `CallFailed` with a reason.
Waits for: the child's answer, never longer than the limit of the call.
Invariants: a call that is over its limit leaves no process behind, its children included; a worker
never outlives the process that made it; what user code prints goes to the log file.

The child is started as a plain program, not through multiprocessing: that would import the parent's main
module first, which in a Ray actor costs a second of a core for each worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import laminar
from laminar.data import rewards
from laminar.errors import LaminarError, RewardError
from laminar.run_folder import SHOW_STACKS
from laminar.types import GroupScore

START_LIMIT_S = 300.0
"""For importing the user's modules, which may load a model."""

_PR_SET_PDEATHSIG = 1
# -u: what a function printed before it was killed is in the log. -P: the current folder hides no module.
_COMMAND = (sys.executable, "-u", "-P", "-X", "faulthandler", "-m", __name__)


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker needs to know to call the functions."""

    functions: tuple[str, ...]
    """As in `reward.functions`"""
    base_folder: Path
    weights: tuple[float, ...] | None
    kwargs: Mapping[str, Any]
    prompt_column: str
    max_steps: int | None
    module_path: tuple[str, ...]
    """`sys.path` of the process that asks."""


class CallFailed(LaminarError):
    """A call that gave no scores. `reason` is a drop reason: `reward_error` or `reward_timeout`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class WorkerClosed(LaminarError):
    """The worker was closed for good."""


class RewardWorker:
    """Handle on one worker process.

    `start` and `call` belong to one thread, which must live as long as the process (the kernel kills a worker
    with the thread that started it); `close` may be called from any.
    """

    def __init__(self, setup: WorkerSetup, log_path: Path) -> None:
        self._setup = setup
        self._log_path = log_path
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Starts the process and waits until it has imported the functions.

        Raises RewardError when it can't, which no second try would mend, and WorkerClosed.
        """
        with self._lock:
            if self._closed:
                raise WorkerClosed("the worker is closed")
            self._spawn()
        try:
            message = self._exchange(self._setup, START_LIMIT_S)
        except CallFailed as cause:
            raise RewardError(
                f"importing the reward functions failed: {cause}", where=", ".join(self._setup.functions)
            ) from cause
        if isinstance(message, str):
            self._kill()
            raise RewardError(message)

    def call(self, group: rewards.ScorableGroup, limit_s: float) -> GroupScore:
        """Scores of the group. Starts a new process if the last call cost one.

        Raises CallFailed, RewardError as `start` does, and WorkerClosed.
        """
        if self._process is None:
            self.start()
        message = self._exchange(group, limit_s)
        if isinstance(message, str):
            raise CallFailed("reward_error", message)
        score: GroupScore = message
        return score

    def close(self) -> None:
        """Ends the process; it is not started again. A call in progress ends with WorkerClosed."""
        with self._lock:
            self._closed = True
            self._end_process()

    def _spawn(self) -> None:
        package_folder = str(Path(laminar.__file__).parents[1])
        python_path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
        ours, theirs = socket.socketpair()
        try:
            with self._log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [*_COMMAND, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env=os.environ | {"PYTHONPATH": python_path},
                    process_group=0,
                )
        finally:
            theirs.close()
        self._connection = Connection(ours.detach())

    def _exchange(self, payload: object, limit_s: float) -> Any:
        """Sends, and returns the answer: True or scores, or text that says what failed."""
        assert self._connection is not None
        deadline = time.monotonic() + limit_s
        running = ""
        try:
            self._connection.send(payload)
            while self._connection.poll(max(0.0, deadline - time.monotonic())):
                kind, value = self._connection.recv()
                if kind == "answer":
                    return value
                running = f"reward function `{value}` "
        except (EOFError, ConnectionError):
            ended = self._kill()
            raise CallFailed("reward_error", f"{running}ended its process: {ended}; see {self._log_path}") from None
        self._kill()
        raise CallFailed("reward_timeout", f"{running}was killed after its limit of {limit_s:g} s")

    def _kill(self) -> str:
        """Ends the process and says how it had ended. Raises WorkerClosed if that was `close`'s doing."""
        assert self._connection is not None
        with self._lock:
            self._connection.close()
            if self._closed:
                raise WorkerClosed("the worker was closed during a call")
            code = self._end_process()
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def _end_process(self) -> int:
        """Kills what there is, the processes it made included; returns the exit code. Needs the lock."""
        if self._process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._process = None
        return code


# ---------------------------------------------------------------- inside the process


def main(descriptor: int, parent: int) -> None:
    """Body of the worker: first the setup, then groups, until the other end closes."""
    _die_with_parent(parent)
    faulthandler.register(SHOW_STACKS)
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    setup: WorkerSetup = connection.recv()
    sys.path[:] = setup.module_path
    try:
        functions = rewards.RewardFunctions(
            rewards.load_functions(setup.functions, setup.base_folder),
            weights=setup.weights,
            kwargs=setup.kwargs,
            prompt_column=setup.prompt_column,
            max_steps=setup.max_steps,
            on_call=lambda names: connection.send(("calling", names)),
        )
    except RewardError as failure:
        connection.send(("answer", str(failure)))
        return
    connection.send(("answer", True))
    while True:
        try:
            group = connection.recv()
        except EOFError:
            functions.close()
            return
        try:
            answer: object = functions.score(group)
        except rewards.FunctionFailed as failure:
            answer = str(failure)
        connection.send(("answer", answer))


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
