"""Options and settings of all tests."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """A thread that outlives its test would keep the interpreter from its end, long after the last test has passed."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} still runs"


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


def write_safetensors(path: Path, shapes: dict[str, list[int]], missing_bytes: int = 0) -> None:
    """Tensors of zeros of these shapes, a byte an element."""
    header: dict[str, object] = {}
    size = 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [size, size + math.prod(shape)]}
        size += math.prod(shape)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size - missing_bytes))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder from which a run could start, as far as files can tell: its model has no tensors and no tokens."""
    model = tmp_path / "build" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(PROJECT_MODEL))
    write_safetensors(model / "model.safetensors", {})
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text("{}")
    (tmp_path / "build" / "rows.jsonl").write_text(json.dumps(PROJECT_ROW) + "\n")
    (tmp_path / "reward.py").write_text(PROJECT_REWARDS)
    (tmp_path / "config.toml").write_text(PROJECT_CONFIG)
    return tmp_path
