"""The task of examples/reasoning_gym, as the run uses it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType


def test_rows_and_scores_go_together(load_example: Callable[[str], ModuleType]) -> None:
    tasks = load_example("reasoning_gym/tasks.py")
    train, evaluation = tasks.train(), tasks.evaluation()
    assert len(train) == 4_000 and 0 < len(evaluation) <= 64
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in evaluation}
    entries = [row["entry"] for row in train[:3]]
    assert tasks.score([f" {entry['answer']}\n" for entry in entries], entries) == [1.0, 1.0, 1.0]
    assert 0 < tasks.score([f"It is {entries[0]['answer']}"], entries[:1])[0] < 1
    assert tasks.score(["no"], entries[:1]) == [0.0]
