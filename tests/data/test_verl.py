"""What verl users bring: a parquet of their preprocessing and `compute_score`, in every form that verl calls."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from laminar import preflight
from laminar.config import load
from laminar.data.rewards import (
    Completion,
    FunctionFailed,
    RewardFunctions,
    ScorableGroup,
    check_function,
    load_functions,
)
from laminar.data.rows import load_rows
from laminar.errors import RewardError
from laminar.types import GroupScore

QUESTIONS = [("What is 1 + 1?", "1 + 1 = 2\n#### 2"), ("What is 3 * 4?", "3 * 4 = <<3*4=12>>12\n#### 12")]

VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f'{question} Output the final answer after "####".'}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": re.findall(r"#### (-?\d+)", answer)[0]},
        "extra_info": {"split": "train", "index": index, "answer": answer, "question": question},
    }
    for index, (question, answer) in enumerate(QUESTIONS)
]
"""The rows of verl's examples/data_preprocess/gsm8k.py."""

COMPUTE_SCORE = '''
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None, method="strict", **kwargs):
    """As a custom_reward_function of verl."""
    assert data_source == "openai/gsm8k" and extra_info["split"] == "train" and kwargs == {"format_score": 0.1}
    found = re.findall(r"#### (-?\\d+)", solution_str)
    acc = bool(found) and found[-1] == ground_truth
    return {"score": 1.0 if acc else kwargs["format_score"], "acc": acc, "pred": found[-1] if found else "[none]"}
'''


def group_of(row: dict[str, Any], *texts: str) -> ScorableGroup:
    """As the scorer makes it: the row has been JSON in between."""
    completions = tuple(Completion(i, 0, 3, text, [i]) for i, text in enumerate(texts))
    return ScorableGroup(5, json.loads(json.dumps(row)), "shown", completions)


def score(function: Callable[..., Any], row: dict[str, Any] | None = None, **settings: Any) -> GroupScore:
    rewards = RewardFunctions({"judge": function}, **settings)
    try:
        return rewards.score(group_of(VERL_ROWS[1] if row is None else row, "#### 12", "twelve"))
    finally:
        rewards.close()


def values(score: GroupScore) -> list[float | None]:
    return [member.reward for member in score.members]


# ---------------------------------------------------------------- a parquet and a function, from the check to a reward


@pytest.fixture
def verl_project(project: Path) -> Path:
    """A project whose data and reward are those of a verl run."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VERL_ROWS), project / "train.parquet")
    (project / "build" / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (project / "verl_reward.py").write_text(COMPUTE_SCORE)
    (project / "config.toml").write_text(
        'iterations = 3\n[model]\npath = "build/model"\n[data]\ntrain = "train.parquet"\n'
        "[rollout]\nmax_new_tokens = 32\n"
        '[reward]\nfunctions = ["verl_reward.py:compute_score"]\nkwargs = {format_score = 0.1}\n'
    )
    return project


def test_a_verl_parquet_with_compute_score_runs_unchanged(
    verl_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(verl_project / "config.toml")
    assert preflight.find_problems(config) == []
    rows = load_rows(config.train_data, Path("/"))
    assert rows == VERL_ROWS
    functions = load_functions(config.reward_functions, Path("/"))
    scored = score(functions["compute_score"], dict(rows[1]), kwargs=config.reward.kwargs)
    assert values(scored) == [1.0, 0.1]
    assert scored.metrics == {"acc": 0.5}
    assert json.loads(capsys.readouterr().out) == {"group": 5, "column": "pred", "values": ["12", "[none]"]}


def test_verl_rows_without_a_function(verl_project: Path) -> None:
    text = (verl_project / "config.toml").read_text()
    (verl_project / "config.toml").write_text(text.partition("[reward]")[0])
    (problem,) = preflight.find_problems(load(verl_project / "config.toml"))
    assert "verl's built-in scorers are not included" in str(problem)


def test_a_function_of_verl_on_other_rows_says_what_is_missing(verl_project: Path) -> None:
    rows = [{"prompt": row["prompt"], "answer": "2"} for row in VERL_ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), verl_project / "train.parquet")
    (problem,) = preflight.find_problems(load(verl_project / "config.toml"))
    message = str(problem)
    assert "`compute_score`: needs `data_source`, `ground_truth`, which the rows don't have" in message
    assert "got: columns answer, prompt" in message and "`reward_model` with `ground_truth`" in message


# ---------------------------------------------------------------- forms


def plain(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return float(solution_str.endswith(ground_truth) and extra_info["index"] == 1)


async def asynchronous(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return plain(data_source, solution_str, ground_truth, extra_info)


def with_dict(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": plain(data_source, solution_str, ground_truth, extra_info), "length": len(solution_str)}


def batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[dict[str, Any]]
) -> list[float]:
    return [plain(*one) for one in zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)]


async def async_batch(solution_strs: list[str], **kwargs: Any) -> list[dict[str, Any]]:
    return [{"score": float(text.endswith("12"))} for text in solution_strs]


class Judge:
    def __call__(self, data_source: str, solution_str: str, **kwargs: Any) -> float:
        return float(solution_str.endswith(kwargs["ground_truth"]))


FORMS: list[Callable[..., Any]] = [
    plain,
    asynchronous,
    with_dict,
    batch,
    async_batch,
    Judge(),
    lambda solution_str: float("12" in solution_str),
    functools.partial(lambda solution_str, ground_truth, by: by * float(ground_truth in solution_str), by=1.0),
]


@pytest.mark.parametrize("function", FORMS, ids=lambda f: getattr(f, "__name__", type(f).__name__))
def test_every_form(function: Callable[..., Any]) -> None:
    check_function("judge", function, VERL_ROWS[1])
    assert values(score(function)) == [1.0, 0.0]


def test_numbers_of_a_dict_are_logged() -> None:
    assert score(with_dict).metrics == {"length": 6.5}


def test_keywords_are_verls_and_those_of_reward_kwargs_alone() -> None:
    seen: list[dict[str, Any]] = []

    def everything(solution_str: str, **kwargs: Any) -> float:
        seen.append(kwargs)
        return 0.0

    score(everything, kwargs={"strict": True})
    assert seen[0] == {
        "data_source": "openai/gsm8k",
        "ground_truth": "12",
        "extra_info": VERL_ROWS[1]["extra_info"],
        "strict": True,
    }


@pytest.mark.parametrize("extra_info", [{}, {"extra_info": None}])
def test_a_missing_extra_info_is_empty(extra_info: dict[str, Any]) -> None:
    row = {key: value for key, value in VERL_ROWS[1].items() if key != "extra_info"} | extra_info
    check_function("judge", plain, row)
    assert values(score(lambda solution_str, extra_info: 1.0 if extra_info == {} else 0.0, row)) == [1.0, 1.0]


def test_what_one_call_changes_in_extra_info_the_next_does_not_see() -> None:
    def greedy(solution_str: str, extra_info: dict[str, Any]) -> float:
        return float(extra_info.pop("index"))

    assert values(score(greedy)) == [1.0, 1.0]


def failing(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    raise RuntimeError("no judge today")


async def failing_later(solution_str: str) -> float:
    return failing("", "", "", {})


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda solution_str: True, ["bool True for completion 0"]),
        (lambda solution_str: "1.0", ["str '1.0' for completion 0"]),
        (lambda solution_str: {"acc": 1.0}, ["dict {'acc': 1.0} for completion 0"]),
        (lambda solution_str: {"score": float("nan")}, ["float nan"]),
        (lambda solution_strs: [1.0], ["2 numbers or None", "1 values: [1.0]"]),
        (lambda solution_strs: 1.0, ["2 numbers or None", "float 1.0"]),
        (failing, ["raised RuntimeError: no judge today", "in failing"]),
        (failing_later, ["raised RuntimeError: no judge today", "in failing_later"]),
    ],
)
def test_what_is_no_reward_is_a_failure(function: Callable[..., Any], expected: list[str]) -> None:
    """Fault 20."""
    with pytest.raises(FunctionFailed) as failure:
        score(function)
    for text in ["reward function `judge`", *expected]:
        assert text in str(failure.value)


def test_a_function_that_wants_more_than_verl_gives() -> None:
    with pytest.raises(RewardError, match="needs `ability`, which the rows don't have"):
        check_function("judge", lambda solution_str, ability: 0.0, VERL_ROWS[0])
    check_function("judge", lambda solution_str, ability: 0.0, VERL_ROWS[0], ["ability"])
