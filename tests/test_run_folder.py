"""The run folder: what can't be written is one message, and what was there before stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.errors import RunFailed, StorageError
from laminar.run_folder import RunFolder, children_of, is_running, read_json, write_json

FULL = Path("/dev/full")
"""A file to which nothing can be written: no space is left on it."""


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_run_folder_that_can_not_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    folder = RunFolder(tmp_path / "file" if place == "a file" else tmp_path / "file" / "run")
    with pytest.raises(StorageError) as failure:
        folder.create()
    assert str(failure.value).startswith(f"{folder.path}: the run folder can't be made: ")
    assert str(failure.value).endswith("fix: give another one with --run-dir")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_leaves_the_earlier_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "processes.json"
    write_json(path, {"processes": [1]})
    (tmp_path / "processes.json.partial").symlink_to(FULL)
    with pytest.raises(StorageError, match=f"{path}: can't be written: No space left on device\n  fix: make room"):
        write_json(path, {"processes": [2]})
    assert read_json(path) == {"processes": [1]}


def test_the_cause_is_told_though_there_is_no_room_to_write_it_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message of a failed run is that of what failed first, not of `run.json`."""
    from laminar.config import load
    from laminar.control.commands import EndRun
    from laminar.runtime import launch, loop

    config = load(Path(__file__).parents[1] / "configs" / "emulated" / "toy.toml")
    folder = launch.prepare(config, tmp_path / "run", resume=False)
    (folder.path / "run.json.partial").symlink_to(FULL)
    monkeypatch.setattr(loop, "run", lambda *_: (EndRun("failed", "trainer died: no room"), None))
    with pytest.raises(RunFailed, match="the run failed: trainer died: no room\n"):
        launch.run_in(folder, config, 0.0, None, print)  # type: ignore[arg-type]
    monkeypatch.setattr(loop, "run", lambda *_: (EndRun("completed", ""), None))
    with pytest.raises(StorageError, match=r"run\.json: can't be written"):
        launch.run_in(folder, config, 0.0, None, print)  # type: ignore[arg-type]


def test_children_are_those_that_a_process_has_started() -> None:
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = json.loads(parent.stdout.readline())
        assert children_of(parent.pid) == [child] and parent.pid in children_of(os.getpid())
        os.kill(child, 9)
    assert children_of(parent.pid) == [] and not is_running(parent.pid)
