"""Real runs on the sort example: in a Ray that tests share, or as the command a user types."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from laminar import config as configs
from laminar import reports
from laminar.config import Config
from laminar.run_folder import NODE, RunFolder, read_json, read_jsonl
from laminar.runtime import guard, launch

SORT = Path(__file__).parents[2] / "examples" / "sort" / "config.toml"
TOY = Path(__file__).parents[2] / "configs" / "emulated" / "toy.toml"
SMALL = (
    *("train.groups_per_batch=4", "train.group_size=4", "data.eval=none", "eval.temperature=0.0"),
    *("faults.dead_after_s=20", "train.lr_schedule=constant"),
)
"""A batch of 16 samples and no evaluation; patience, since the machine may be busy; an lr that no later end changes."""


def sort_config(*overrides: str) -> Config:
    return configs.load(SORT, [*SMALL, *overrides])


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """One local Ray for all tests that do not test its start and end."""
    with launch.local_ray(f"tests-{os.getpid()}", []):
        yield


@dataclass
class Outcome:
    """A run that ended by itself."""

    folder: RunFolder
    code: int
    lines: list[str]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.folder.metrics))

    @property
    def versions(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.folder.versions))


Run = Callable[..., Outcome]


@pytest.fixture
def run(shared_ray: None, tmp_path: Path) -> Iterator[Run]:
    """Run a config in the shared Ray; whatever it is, the account must close and the events must replay."""
    outcomes: list[Outcome] = []

    def start(config: Config, name: str = "run", resume: bool = False) -> Outcome:
        lines: list[str] = []
        folder = launch.prepare(config, tmp_path / name, resume)
        code = launch.run_in(folder, config, time.monotonic(), threading.Event(), lines.append)
        outcomes.append(Outcome(folder, code, lines))
        return outcomes[-1]

    yield start
    for outcome in outcomes:
        check_account(outcome.folder, completed=outcome.code == 0)
        assert not outcome.folder.slots(NODE).exists(), "nothing of a run stays in shared memory"


def check_account(folder: RunFolder, completed: bool) -> dict[str, Any]:
    """Invariants 2, 7 and 11 on a run that has ended."""
    account = reports.ledger(folder)
    assert account["violations"] == [] and account["closed"]
    if completed:
        assert account["samples"]["in_flight"] == account["groups"]["in_flight"] == 0
    assert reports.replay(folder)["details"] == []
    return account


def wait_until(condition: Callable[[], Any], what: str, within_s: float = 240.0) -> Any:
    """The first true value of `condition`; fails after `within_s`, saying what did not come."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {within_s:.0f} s"
        time.sleep(0.02)
    return value


@dataclass
class Command:
    """`laminar train` as a user runs it, in a process group of its own."""

    folder: RunFolder
    process: subprocess.Popen[str]
    killed: bool = field(default=False, init=False)

    @property
    def num_rows(self) -> int:
        return sum(1 for _ in read_jsonl(self.folder.metrics))

    def wait_for_rows(self, number: int) -> None:
        """Until `number` iterations are on record; fails at once if the command ends before."""

        def enough() -> bool:
            assert self.process.poll() is None, f"the command ended: {self.wait()}"
            return self.num_rows >= number

        wait_until(enough, f"iteration {number}")

    def pids(self) -> list[int]:
        return guard.marked(self.folder.tag)

    def pid_of(self, role: str) -> int:
        """Process of this role, once it is known."""

        def found() -> int | None:
            rows = read_json(self.folder.processes, {"processes": []})["processes"]
            return next((row["pid"] for row in rows if row["role"] == role and row["pid"] in self.pids()), None)

        pid: int = wait_until(found, f"the {role} process")
        return pid

    def replicas(self) -> dict[str, int]:
        """Pids of those that are there and hold weights, by id."""
        rows = reports.processes(self.folder)["processes"]
        return {
            row["id"]: row["pid"]
            for row in rows
            if row["role"] == "replica" and row["state"] in ("alive", "suspect") and row["version"] is not None
        }

    def kill_everything(self) -> None:
        """SIGKILL the driver and all that it started, at once; its guard is left to sweep."""
        self.process.kill()
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def wait(self, within_s: float = 240.0) -> tuple[int, str]:
        """Exit code and what it printed."""
        out, _ = self.process.communicate(timeout=within_s)
        return self.process.returncode, out

    def assert_nothing_left(self, within_s: float = 10.0) -> None:
        """No process of the run, and nothing of it in shared memory."""
        wait_until(lambda: not self.pids(), "the end of all processes", within_s)
        wait_until(lambda: not self.folder.slots(NODE).exists(), "the end of the shared memory", within_s)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `laminar train` in a new run folder, or resume one. `config`: instead of the small sort task."""
    started: list[Command] = []

    def start(*arguments: str, name: str = "run", resume: bool = False, config: Path | None = None) -> Command:
        folder = RunFolder(tmp_path / name)
        what = [str(SORT), *SMALL] if config is None else [str(config)]
        where = ["--resume", str(folder.path)] if resume else [*what, "--run-dir", str(folder.path)]
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("laminar")), "train", *where, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(Command(folder, process))
        return started[-1]

    yield start
    for c in started:
        if c.process.poll() is None:
            c.kill_everything()
        if c.process.stdout is not None:
            c.process.stdout.close()


def fingerprints(outcome: Outcome) -> dict[int, str]:
    """Version number -> fingerprint of its weights."""
    return {row["version"]: row["fingerprint"] for row in outcome.versions}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
