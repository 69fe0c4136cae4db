"""Commands that look at a run folder: what they print, as text and as JSON, and their exit codes."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from laminar import cli
from laminar.config import dump, load
from laminar.run_folder import RunFolder, write_json
from tests.runs import make_run

COMMANDS = ["ledger", "ps", "samples", "replay", "export"]


class Laminar:
    """Runs `laminar ARGUMENTS` in this process; keeps what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._monkeypatch.setattr(sys, "argv", ["laminar", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        self.out, self.err = self._capsys.readouterr()
        return int(stopped.value.code or 0)

    def json(self, *arguments: object, code: int = 0) -> dict[str, object]:
        """The one object that is printed, with nothing else on either stream."""
        assert self(*arguments, "--json") == code
        assert self.err == "" and self.out.count("\n") == 1
        found: dict[str, object] = json.loads(self.out)
        return found


@pytest.fixture
def laminar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Laminar:
    return Laminar(monkeypatch, capsys)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


def test_ledger(laminar: Laminar, folder: RunFolder) -> None:
    assert laminar("ledger", folder.path) == 0
    assert laminar.out.splitlines() == [
        "train samples  14 dispatched = 8 trained + 2 prompt_overlong dropped + 4 in flight",
        "train groups   7 dispatched = 4 trained + 1 prompt_overlong dropped + 2 in flight",
        "eval samples  0 dispatched = 0 trained + 0 dropped + 0 in flight",
        "eval groups   0 dispatched = 0 trained + 0 dropped + 0 in flight",
        "restarts 0, replayed cuts 0",
        "closed",
    ]
    account = laminar.json("ledger", folder.path)
    assert set(account) == {"samples", "groups", "eval", "restarts", "replayed_cuts", "closed", "violations"}
    assert account["samples"] == {
        "dispatched": 14,
        "trained": 8,
        "dropped": {"prompt_overlong": 2},
        "in_flight": 4,
    }


def test_a_ledger_that_does_not_close_exits_with_1(laminar: Laminar, folder: RunFolder) -> None:
    """Invariant 2."""
    with closing(sqlite3.connect(folder.database, isolation_level=None)) as db:
        db.execute("UPDATE groups SET cursor = 1 WHERE id = 2")
    assert laminar("ledger", folder.path) == 1
    assert laminar.out.splitlines()[-2:] == [
        "NOT CLOSED",
        "violation: 1 draws of the prompt pool were used twice",
    ]
    assert laminar.json("ledger", folder.path, code=1)["closed"] is False


def test_ps(laminar: Laminar, folder: RunFolder) -> None:
    assert laminar.json("ps", folder.path) == {"processes": []}
    common = {"node": "local", "state": "alive"}
    rows: list[dict[str, object]] = [
        common | {"role": "driver", "id": "driver", "pid": os.getpid(), "doing": None, "version": None},
        common | {"role": "trainer", "id": "trainer", "pid": os.getpid(), "doing": "training", "version": 3},
        common | {"role": "replica", "id": "replica-0", "pid": 2**22 + 1, "doing": "generating 12", "version": 3},
    ]
    write_json(folder.processes, {"processes": rows})
    assert laminar.json("ps", folder.path) == {"processes": [*rows[:2], rows[2] | {"state": "ended", "doing": None}]}
    assert laminar("ps", folder.path) == 0
    assert [line.split() for line in laminar.out.splitlines()] == [
        ["role", "id", "pid", "state", "doing", "version"],
        ["driver", "driver", str(os.getpid()), "alive", "-", "-"],
        ["trainer", "trainer", str(os.getpid()), "alive", "training", "3"],
        ["replica", "replica-0", str(2**22 + 1), "ended", "-", "3"],
    ]


def test_samples(laminar: Laminar, folder: RunFolder) -> None:
    found = laminar.json("samples", folder.path, "--group", 3)
    common = {"group": 3, "attempt": 0, "version": 1, "state": "trained", "prompt": "prompt text", "completion": "text"}
    assert found == {"samples": [common | {"index": 0, "reward": 0.0}, common | {"index": 1, "reward": 1.0}]}
    assert laminar("samples", folder.path, "--last", 1) == 0
    assert laminar.out.split("\n")[1] == "group 3  prompt text"
    assert laminar("samples", folder.path, "--group", 6) == 0
    assert "(text no longer kept)" in laminar.out and "reward       -" in laminar.out
    assert laminar("samples", folder.path, "--best", 1, "--worst", 1) == 0
    assert [line.split()[1:3] for line in laminar.out.splitlines() if "reward" in line] == [
        ["reward", "1.000"],
        ["reward", "0.000"],
    ]


def test_replay(laminar: Laminar, folder: RunFolder) -> None:
    """Invariant 11."""
    assert laminar("replay", folder.path) == 0
    assert laminar.out == "3 events replayed, 0 differences\n"
    (log,) = folder.events.iterdir()
    log.write_text(log.read_text().replace('"commands":[]', '"commands":[{"type":"Complete","reason":"planted"}]', 1))
    assert laminar("replay", folder.path) == 1
    assert "1 differences" in laminar.out and "planted" in laminar.out
    assert laminar.json("replay", folder.path, code=1)["agrees"] is False


def test_timeline(laminar: Laminar, folder: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert laminar("timeline", folder.path, file) == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert laminar.out == f"{file}: {len(events)} events; open it with https://ui.perfetto.dev\n"
    assert [e["name"] for e in events if e["ph"] == "i"] == ["batch 0 is cut", "batch 1 is cut"]
    assert laminar("timeline", tmp_path, file) == 2 and "not the folder of a run" in laminar.err
    assert laminar("timeline", folder.path, tmp_path / "gone" / "run.json") == 2 and "fix: mkdir" in laminar.err


def test_export_without_a_checkpoint(laminar: Laminar, folder: RunFolder, project: Path) -> None:
    folder.config.write_text(dump(load(project / "config.toml")))
    assert laminar("export", folder.path) == 2
    assert laminar.err.startswith(f"laminar: {folder.checkpoints}: the run has no checkpoint yet")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_not_a_run(laminar: Laminar, tmp_path: Path, command: str) -> None:
    assert laminar(command, tmp_path / "nowhere") == 2
    assert "not the folder of a run" in laminar.err and "Traceback" not in laminar.err


@pytest.mark.parametrize("command", ["ledger", "samples", "replay", "export"])
def test_a_run_that_has_just_begun(laminar: Laminar, tmp_path: Path, command: str) -> None:
    """Its config is there, and nothing else: a message, not a traceback."""
    folder = RunFolder(tmp_path)
    folder.create()
    folder.config.touch()
    assert laminar(command, tmp_path) == 2
    assert laminar.err.startswith("laminar: ") and "Traceback" not in laminar.err
