"""Options and settings of all tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import settings

# The machines that run these tests are shared: a slow example is no fault, and a failure must come again.
settings.register_profile("laminar", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("laminar")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the long tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)


# ---------------------------------------------------------------- a small project

PROJECT_CONFIG = """
iterations = 3

[model]
path = "build/model"

[data]
train = "build/rows.jsonl"

[reward]
functions = ["reward.py:score"]

[rollout]
max_new_tokens = 12
"""
PROJECT_REWARDS = """
def score(completions, answer): ...
def needs_more(completions, answer, solution, hint): ...
def takes_all(completions, **kwargs): ...
def with_default(completions, style=None): ...
def scaled(completions, scale): ...
model = "org/reward-model"
"""
PROJECT_ROW = {"prompt": "1+1=", "answer": "2"}
PROJECT_MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder from which a run could start, as far as files can tell: its model has no weights."""
    model = tmp_path / "build" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(PROJECT_MODEL))
    (model / "model.safetensors").touch()
    (model / "tokenizer.json").touch()
    (model / "tokenizer_config.json").write_text("{}")
    (tmp_path / "build" / "rows.jsonl").write_text(json.dumps(PROJECT_ROW) + "\n")
    (tmp_path / "reward.py").write_text(PROJECT_REWARDS)
    (tmp_path / "config.toml").write_text(PROJECT_CONFIG)
    return tmp_path
