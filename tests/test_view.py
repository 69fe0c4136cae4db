"""The live view: what it shows of a run folder."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from laminar.run_folder import RunFolder
from laminar.view import SHOWN_CHARACTERS, View


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
