"""The live view: what it shows of a run folder."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from laminar.run_folder import NewRows, RunFolder
from laminar.view import SHOWN_CHARACTERS, View, curve


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
