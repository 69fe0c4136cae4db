"""TRL's names and defaults, in the words of the config file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laminar.errors import UserError
from laminar.trl import COMBINED, FIXED, NAMES, WITHOUT_EFFECT, GRPOConfig, GRPOTrainer

ROWS = [{"prompt": "1+1=", "answer": "2"}] * 100


def flat(keys: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in keys.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"iterations": 300, "train.groups_per_batch": 1, "train.num_mini_batches": 1, "train.lr": 1e-6}),
        ({}, {"train.lr_schedule": "linear", "train.clip_ratio_high": 0.2, "train.loss_agg_mode": "token-mean"}),
        ({"num_train_epochs": 1, "per_device_train_batch_size": 32}, {"iterations": 25, "train.groups_per_batch": 4}),
        (
            {
                "per_device_train_batch_size": 16,
                "steps_per_generation": 4,
                "gradient_accumulation_steps": 2,
                "max_steps": 9,
            },
            {"iterations": 5, "train.groups_per_batch": 8, "train.num_mini_batches": 2},
        ),
        ({"generation_batch_size": 64, "num_generations": 4}, {"train.groups_per_batch": 16, "train.group_size": 4}),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, {"train.clip_ratio_low": 0.1, "train.clip_ratio_high": 0.3}),
        ({"scale_rewards": False, "loss_type": "dr_grpo"}, {"train.scale_rewards": "none"}),
        ({"top_k": None, "bf16": True}, {"rollout.top_k": 0, "train.dtype": "bf16"}),
        (
            {"eval_strategy": "steps", "eval_steps": 10, "num_generations_eval": 2, "temperature": 0.7},
            {"eval.every": 10, "eval.samples_per_prompt": 2, "eval.temperature": 0.7, "eval.before_train": False},
        ),
        ({"laminar": {"max_staleness": 2, "rollout": {"replicas": 3}}}, {"max_staleness": 2, "rollout.replicas": 3}),
    ],
)
def test_names_mean_what_they_mean_in_trl(given: dict[str, Any], expected: dict[str, Any]) -> None:
    keys = flat(GRPOConfig(**given).keys(len(ROWS)))
    assert {key: keys.get(key) for key in expected} == expected


def test_nothing_is_evaluated_unless_that_is_asked_for() -> None:
    assert not [key for key in flat(GRPOConfig().keys(8)) if key.startswith("eval.")]


def test_each_name_has_one_meaning() -> None:
    tables = (NAMES, COMBINED, FIXED, WITHOUT_EFFECT)
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert GRPOConfig().learning_rate == 1e-6 and GRPOConfig(max_steps=3).max_steps == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_generation": 4}, "num_generation: is not a name of GRPOConfig\n  fix: did you mean num_generations?"),
        ({"wobble": 4}, "wobble: means nothing here"),
        ({"num_iterations": 2}, "num_iterations: this version has one value for it\n  expected: 1\n  got: 2"),
        (
            {"loss_type": "cispo"},
            "loss_type: this version does not have it\n  expected: one of 'dapo', 'grpo', 'dr_grpo'",
        ),
    ],
)
def test_what_has_no_meaning_here_is_refused(given: dict[str, Any], message: str) -> None:
    """Fault 39: never passed over in silence."""
    with pytest.raises(UserError) as problem:
        GRPOConfig(**given)
    assert message in str(problem.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": {"num_generations": 3}}, "num_generations: a batch is not made of whole groups"),
        (
            {"args": {"steps_per_generation": 3, "gradient_accumulation_steps": 2}},
            "gradient_accumulation_steps: a batch is not made of whole optimizer steps",
        ),
        ({"train_dataset": iter(ROWS)}, "max_steps: the training set does not know its length"),
        ({"train_dataset": None}, "train_dataset: missing"),
        ({"peft_config": object()}, "peft_config: this version does not take it"),
        ({"model": object()}, "model: not a model folder"),
        ({"model": "Qwen/Qwen3-0.6B"}, "Qwen3-0.6B"),
    ],
)
def test_what_can_not_be_trained_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(project)
    values = {"model": project / "build" / "model", "reward_funcs": reward, "train_dataset": ROWS} | arguments
    values["args"] = GRPOConfig(**values.get("args", {}))
    with pytest.raises(UserError) as problem:
        GRPOTrainer(**values)
    assert message in str(problem.value)


def test_a_script_of_defaults_can_be_trained(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    args = GRPOConfig(max_completion_length=4)
    trainer = GRPOTrainer(str(project / "build" / "model"), reward, args, ROWS, processing_class=None)
    with pytest.raises(UserError, match="laminar train --resume"):
        trainer.train(resume_from_checkpoint=True)
