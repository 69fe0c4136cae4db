"""The Python form: what a script hands over, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.data.rewards import load_functions
from laminar.data.rows import load_rows
from laminar.errors import ConfigError

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def make(project: Path, **arguments: Any) -> laminar.Trainer:
    defaults = {
        "model": project / "build" / "model",
        "reward_funcs": lambda completions, answer: [1.0] * len(completions),
        "train_dataset": ROWS,
        "config": {"iterations": 1, "rollout": {"max_new_tokens": 4}},
        "run_dir": project / "run",
    }
    return laminar.Trainer(**(defaults | arguments))


def stream() -> Any:
    from datasets import Dataset

    return Dataset.from_list(ROWS).to_iterable_dataset()


def held() -> Any:
    from datasets import Dataset

    return Dataset.from_list(ROWS)


@pytest.mark.parametrize("make_dataset", [lambda: ROWS, lambda: lambda: iter(ROWS), held, stream])
def test_datasets_travel(project: Path, make_dataset: Any) -> None:
    trainer = make(project, train_dataset=make_dataset())
    assert load_rows(trainer.config.train_data, Path("/")) == ROWS


def test_functions_travel_and_keep_their_names(project: Path) -> None:
    def exact(completions: list[str], answer: list[str]) -> list[float]:
        return [float(a == b) for a, b in zip(completions, answer, strict=True)]

    trainer = make(project, reward_funcs=[exact, lambda completions: [0.0] * len(completions)])
    functions = load_functions(trainer.config.reward_functions, Path("/"))
    assert functions["exact"](completions=["2", "3"], answer=["2", "4"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_dataset": (row for row in ROWS)}, "an argument can't be sent to other processes"),
        ({"reward_funcs": lambda completions, solution: []}, "needs `solution`, which the rows don't have"),
        ({"reward_funcs": "org/reward-model"}, "names no function"),
        ({"config": {"model": {"path": "x"}}}, "`model.path` is given twice"),
        ({"config": {"iterations": 1, "num_generations": 4}}, "it is called train.group_size here"),
    ],
)
def test_mistakes_are_told_at_once(project: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as failure:
        make(project, **arguments)
    assert message in str(failure.value)
