"""The live view: what it shows of a run folder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from laminar.run_folder import NewRows, RunFolder, write_json
from laminar.view import SHOWN_CHARACTERS, View, activities, curve


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.create()
    return folder


def shown(folder: RunFolder) -> list[str]:
    """Lines of a view that has looked once, where there is no terminal."""
    console = Console(file=io.StringIO(), width=10_000, highlight=False)
    with View(folder, iterations=3, console=console):
        pass
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_first_prompt_is_shown_once_and_cut(folder: RunFolder) -> None:
    assert not any("first prompt" in line for line in shown(folder))
    folder.first_prompt.write_text("<s>[bold]1 + 1\n" + "x" * SHOWN_CHARACTERS)
    (line,) = [line for line in shown(folder) if "first prompt" in line]
    assert line.startswith("first prompt: '<s>[bold]1 + 1\\nxxx") and line.endswith("xxx ...'")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], ""),
        ([0.5], "▁"),
        ([0.0, 1.0], "▁█"),
        ([0.0, 0.0, 0.5, 0.5, 1.0, 1.0], "▁▅█"),
        ([0.0, None, 1.0], "▁█"),
    ],
)
def test_the_curve_goes_from_the_lowest_to_the_highest(rewards: list[float | None], expected: str) -> None:
    assert curve(rewards, cells=3 if len(rewards) > 3 else 16) == expected


def process(role: str, id_: str, state: str = "alive", doing: str | None = None) -> dict[str, object]:
    return {"role": role, "id": id_, "pid": 1, "state": state, "doing": doing, "version": 1}


PROCESSES = [
    process("driver", "driver"),
    process("manager", "manager"),
    process("trainer", "trainer", doing="waiting"),
    process("replica", "replica-0", doing="generating 12"),
    process("replica", "replica-1", doing="generating 4"),
    process("replica", "replica-2", doing="idle"),
    process("replica", "replica-3", "suspect", doing="generating 8"),
    process("scorer", "scorer"),
]


def test_what_all_do_is_one_line() -> None:
    assert activities([]) == ""
    assert activities(PROCESSES[:2]) == "alive: manager"
    assert activities(PROCESSES) == (
        "alive: manager, scorer  waiting: trainer  suspect: replica-3  replicas: 2 generating 16, 1 idle"
    )


def test_a_terminal_shows_reward_pace_staleness_and_what_all_do(folder: RunFolder) -> None:
    """With the curve of the reward, and the time that is left."""
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    write_json(folder.processes, {"processes": PROCESSES})
    row = {"samples_per_s": 8.0, "tokens_per_s": 300.0, "staleness_use_mean": 1.0, "staleness_use_max": 2}
    with View(folder, iterations=4, console=console):
        for version in (1, 2):
            append(folder.metrics, row | {"version": version, "time_s": 60.0 * version, "reward_mean": version / 4})
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "iteration 2/4  reward 0.500  8 samples/s  300 tok/s  staleness 1.0 (max 2)  ▁█" in text
    assert "about 2 min 0 s left" in text
    assert "waiting: trainer  suspect: replica-3  replicas: 2 generating 16, 1 idle" in text


def append(path: Path, row: dict[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_rows_are_read_once_and_only_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows, later = NewRows(path), NewRows(path, skip=2)
    assert rows.take() == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert rows.take() == [{"a": 1}, {"a": 2}] and later.take() == []
    with path.open("a") as file:
        file.write(": 3}\n")
    assert rows.take() == later.take() == [{"a": 3}]
    assert rows.take() == later.take() == []
