"""The folder of a run: names of what is in it, and how it is written so that a crash leaves no half-truth."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from laminar.errors import StorageError

SHARED_MEMORY = Path("/dev/shm")
NODE = "local"
"""Name of the only machine."""
SHOW_STACKS = signal.SIGUSR1
"""A process of a run that gets it writes what each of its threads is doing into its log, whatever holds it up."""


class RunFolder:
    """Paths of one run. Creating the object touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.config = self.path / "config.toml"
        self.run = self.path / "run.json"
        self.processes = self.path / "processes.json"
        self.versions = self.path / "versions.jsonl"
        self.events = self.path / "events"
        self.requests = self.path / "requests"
        self.first_prompt = self.path / "first_prompt.txt"
        self.metrics = self.path / "metrics.jsonl"
        self.evals = self.path / "eval.jsonl"
        self.reported = self.path / "reported.json"
        self.database = self.path / "data.sqlite"
        self.lock = self.path / "lock"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.export = self.path / "export"
        self.user_code = self.path / "user_code.pkl"

    def create(self) -> None:
        """Make the folder and what must be in it. Raises StorageError if that can't be done."""
        try:
            for folder in (self.path, self.events, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"the run folder can't be made: {error.strerror}",
                where=str(self.path),
                fix="give another one with --run-dir",
            ) from error

    def expect_run(self) -> None:
        """Raises StorageError unless a run was begun here."""
        if not self.config.is_file():
            raise StorageError(
                "this is not the folder of a run: it has no config.toml",
                where=str(self.path),
                fix="give the folder that `laminar train` printed",
            )

    @property
    def tag(self) -> str:
        """Short name of this run on this machine, the same after a resume: for shared memory and for the sweep."""
        return hashlib.sha256(str(self.path).encode()).hexdigest()[:12]

    def slots(self, node: str) -> Path:
        """Where the relay of `node` keeps weights: shared memory, which all nodes on one machine share."""
        return SHARED_MEMORY / f"laminar-{self.tag}-{node}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises StorageError for what keeps `path` from being written: a full disk, a missing right, a quota."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"can't be written: {error.strerror or error}",
            where=str(path),
            fix="make room or give the right, then go on",
        ) from error


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`: readers see the old or the new, never half. Raises StorageError."""
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)


def write_json(path: Path, value: object) -> None:
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, default: Any = None) -> Any:
    """What is in `path`; `default` if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file. A last line without its end (a crash in mid-write) is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


class NewRows:
    """Rows of a JSONL file that grows, each once; what has been read is not read again."""

    def __init__(self, path: Path, skip: int = 0) -> None:
        self._path, self._skip, self._offset = path, skip, 0

    def take(self) -> list[dict[str, Any]]:
        """Those since the last call, the first `skip` of the file apart."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        self._offset += sum(map(len, lines))
        new, self._skip = lines[self._skip :], max(0, self._skip - len(lines))
        return [json.loads(line) for line in new]


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its remains."""
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def children_of(pid: int) -> list[int]:
    """Processes that this one has started and that are there, or their remains."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [p for p in pids if (stat := _stat(p)) is not None and int(stat[1]) == pid]


def _stat(pid: int) -> list[str] | None:
    """State, parent and more of a process, as /proc has them."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()
