"""What is found before a run starts: datasets, reward functions and their columns, trackers (faults 21, 39)."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from laminar import preflight
from laminar.config import InvalidConfig, load

CHAT_ROW = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}


def problems(project: Path, *overrides: str) -> list[str]:
    return [str(problem) for problem in preflight.find_problems(load(project / "config.toml", overrides))]


def only_problem(project: Path, *overrides: str) -> str:
    (problem,) = problems(project, *overrides)
    return problem


def test_a_run_that_could_start_has_no_problems(project: Path) -> None:
    assert problems(project) == []
    preflight.check(load(project / "config.toml"))


def test_everything_is_told_at_once(project: Path) -> None:
    (project / "build" / "rows.jsonl").unlink()
    (project / "build" / "model" / "config.json").unlink()
    with pytest.raises(InvalidConfig, match="2 problems in the config"):
        preflight.check(load(project / "config.toml"))


# ---------------------------------------------------------------- code of the user's


@pytest.mark.parametrize("key", ["data.sampler", "train.advantage", "train.loss"])
def test_functions_of_the_user_are_looked_at(project: Path, key: str) -> None:
    (project / "own.py").write_text("def fits(**keywords): ...\ndef does_not(): ...\n")
    assert problems(project, f"{key}={project}/own.py:fits") == []
    assert "can't be called as it will be" in only_problem(project, f"{key}={project}/own.py:does_not")
    assert "the file is not there" in only_problem(project, f"{key}={project}/absent.py:fits")


# ---------------------------------------------------------------- trackers


def test_a_tracker_whose_package_is_missing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> object:
        raise importlib.metadata.PackageNotFoundError(name)

    assert problems(project, 'report_to=["tensorboard"]') == []
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    message = only_problem(project, 'report_to=["trackio"]')
    assert "`trackio` is not installed" in message and "fix: pip install 'laminar-rl[trackio]'" in message
    assert problems(project) == []


# ---------------------------------------------------------------- data


def test_a_missing_dataset_names_the_script_that_makes_it(project: Path) -> None:
    (project / "prepare.py").touch()
    (project / "build" / "rows.jsonl").unlink()
    message = only_problem(project)
    assert "the dataset is not there" in message and f"python {project}/prepare.py" in message


def test_a_missing_prompt_column_lists_the_columns_found(project: Path) -> None:
    message = only_problem(project, "data.prompt_column=question")
    assert "no column `question`" in message and "got: columns answer, prompt" in message


def test_evaluation_data_is_checked_too(project: Path) -> None:
    assert "is not there" in only_problem(project, f"data.eval={project}/eval.jsonl")
    (project / "eval.jsonl").write_text('{"prompt": "2+2="}\n')
    message = only_problem(project, f"data.eval={project}/eval.jsonl")
    assert "needs `answer`" in message and "got: columns prompt" in message


@pytest.mark.parametrize("where", ["nowhere", "tokenizer_config.json", "chat_template.jinja"])
def test_chat_prompts_need_a_chat_template(project: Path, where: str) -> None:
    (project / "build" / "rows.jsonl").write_text(json.dumps(CHAT_ROW))
    if where == "tokenizer_config.json":
        (project / "build" / "model" / where).write_text('{"chat_template": "{{ messages }}"}')
    elif where == "chat_template.jinja":
        (project / "build" / "model" / where).write_text("{{ messages }}")
    found = problems(project)
    assert ("no chat template" in found[0]) if where == "nowhere" else found == []


def test_a_system_prompt_makes_a_chat_of_text(project: Path) -> None:
    message = only_problem(project, "data.system_prompt=Be brief.")
    assert "no chat template" in message and "the prompt is text beside data.system_prompt" in message
    (project / "build" / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert problems(project, "data.system_prompt=Be brief.") == []


# ---------------------------------------------------------------- reward functions


@pytest.mark.parametrize("name", ["takes_all", "with_default"])
def test_functions_that_ask_for_nothing_the_rows_lack(project: Path, name: str) -> None:
    assert problems(project, f'reward.functions=["{project}/reward.py:{name}"]') == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing.py:score", "the file is not there"),
        ("reward.py:skore", "did you mean `score`?"),
        ("no_such_module:score", "there is no module `no_such_module`"),
        ("reward.py:model", "the name of a reward model can't be used"),
        ("reward.py:needs_more", "needs `solution`, `hint`, which the rows don't have"),
    ],
)
def test_a_reward_function_that_can_not_be_used(
    project: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    """Fault 21."""
    monkeypatch.chdir(project)
    assert message in only_problem(project, f'reward.functions=["{spec}"]')


def test_a_run_needs_a_reward_function(project: Path) -> None:
    message = only_problem(project, "reward.functions=none")
    assert message.startswith("reward.functions: missing") and "verl" not in message
    assert "[reward]" in message.partition("fix: ")[2]


def test_a_missing_column_may_come_from_the_kwargs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    assert "got: columns answer, prompt" in only_problem(project, 'reward.functions=["reward.py:scaled"]')
    assert problems(project, 'reward.functions=["reward.py:scaled"]', "reward.kwargs.scale=2") == []
