"""What a data store has done once it is open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from laminar.config import load
from laminar.data.open import open_store
from laminar.errors import DataError
from laminar.run_folder import RunFolder
from tests.data.test_prompts import TOKENIZER

ROW = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}


@pytest.fixture
def folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    TOKENIZER.save_pretrained(project / "build" / "model")
    locks: list[IO[str]] = []
    monkeypatch.setattr("laminar.data.open._held_locks", locks)
    folder = RunFolder(project / "run")
    folder.create()
    yield folder
    for lock in locks:
        lock.close()


def test_the_first_prompt_is_kept_as_the_model_sees_it(project: Path, folder: RunFolder) -> None:
    (project / "build" / "rows.jsonl").write_text(json.dumps(ROW))
    config = load(project / "config.toml")
    open_store(folder, config, config.settings(), lambda: 0.0).close()
    assert folder.first_prompt.read_text() == "<s><|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"


def test_a_broken_line_in_the_middle_is_one_message(project: Path, folder: RunFolder) -> None:
    good = json.dumps(ROW)
    (project / "build" / "rows.jsonl").write_text("\n".join([good] * 500 + ['{"prompt": '] + [good] * 500))
    config = load(project / "config.toml")
    with pytest.raises(DataError, match=r"rows\.jsonl:501: not valid JSON: .*\n  expected: one JSON object a line"):
        open_store(folder, config, config.settings(), lambda: 0.0)
