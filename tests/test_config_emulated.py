"""Emulated runs in the config: what the profile fills in, and what such a run can't have."""

from __future__ import annotations

import re
import subprocess
import sys
from os import pathsep
from pathlib import Path

import pytest

from laminar import preflight
from laminar.config import Config, InvalidConfig, dump, load

EMULATED = """
iterations = 3

[rollout]
engine = "emulated"

[train]
backend = "emulated"
"""

WITH_A_MODEL = """
iterations = 1
model = { path = "m" }
data = { train = "rows.jsonl" }
reward = { functions = ["r.py:f"] }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(EMULATED)
    return path


def only_problem(path: Path, *overrides: str) -> str:
    with pytest.raises(InvalidConfig) as caught:
        load(path, overrides)
    assert len(caught.value.problems) == 1, str(caught.value)
    return str(caught.value)


def test_neither_model_nor_dataset_nor_reward_is_needed(path: Path) -> None:
    config = load(path)
    assert config.emulated
    assert (config.model.path, config.data.train, config.reward.functions) == (None, None, None)
    preflight.check(config)


def test_lengths_and_room_are_those_of_the_profile_unless_set(path: Path) -> None:
    def numbers(*overrides: str) -> tuple[int, int, int | None, int | None]:
        config = load(path, overrides)
        rollout = config.rollout
        return rollout.max_new_tokens, rollout.max_num_seqs, rollout.kv_tokens, config.data.max_prompt_tokens

    assert numbers() == (16384, 1024, 820_000, 100)
    assert numbers("simulation.profile=toy") == (200, 8, 1000, 10)
    assert numbers("rollout.max_new_tokens=500", "rollout.kv_tokens=none") == (500, 1024, 820_000, 100)


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ([], (8, 4, 4, 1)),
        (["rollout.replicas=8"], (64, 32, 32, 8)),
        (["gpus=64"], (64, 32, 32, 8)),
        (["gpus=64", "train.gpus=16"], (64, 48, 16, 12)),
        (["gpus=64", "rollout.gpus=16"], (64, 16, 48, 4)),
        (["gpus=64", "rollout.replicas=4"], (64, 16, 48, 4)),
        (["rollout.gpus=16", "train.gpus=20"], (36, 16, 20, 4)),
        (["gpus=none", "train.gpus=20", "rollout.replicas=2"], (28, 8, 20, 2)),
    ],
)
def test_gpus_are_split_evenly_unless_said_otherwise(
    path: Path, overrides: list[str], gpus: tuple[int, int, int, int]
) -> None:
    """All, the replicas', the trainer's, and how many replicas that makes (4 GPUs each in profile 32b)."""
    config = load(path, overrides)
    assert (config.gpus, config.rollout.gpus, config.train_gpus, config.rollout.replicas) == gpus


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.backend=torch", r'train.backend: an emulated engine and .*\n  expected: "emulated", as rollout.engine'),
        ("rollout.engine=torch", r'train.backend: an emulated engine and .*\n  expected: "torch", as rollout.engine'),
        ("simulation.profile=8b", r"simulation.profile: no such profile\n  expected: .*32b, 72b, 7b, toy\n  got: 8b"),
        ("simulation.time_scale=0", r"simulation.time_scale: can't have this value\n  expected: a number > 0"),
        ("simulation.speed=2", r"simulation.speed: unknown key"),
        ("data.eval=rows.jsonl", r"data.eval: an emulated run has no dataset"),
        ("data.epochs=2", r"data.epochs: an emulated run has no dataset"),
        ("simulation.splits.fast=[[8, 4]]", r"simulation.splits.fast: is no split\n  expected: \[all GPUs, .*laminar"),
        ("simulation.splits.sync=[[8, 9]]", r"simulation.splits.sync: is no split\n.*\n  got: \[8, 9\]"),
        ("simulation.splits.sync=[[8, 0]]", r"simulation.splits.sync: is no split\n.*\n  got: \[8, 0\]"),
        ("simulation.splits.sync=[8]", r"simulation.splits: item sync can't have this value"),
        ("rollout.batches_in_flight=0", r"rollout.batches_in_flight: can't have this value\n  expected: a number > 0"),
        ("rollout.gpus=6", r"rollout.gpus: does not fit the replicas\n  expected: 4: rollout.replicas x 4 of profile"),
        ("gpus=abc", r"gpus: can't have this value\n  expected: an integer >= 1, or none"),
        ("gpus=4", r"rollout.gpus: does not fit the replicas\n  expected: 4: .*\n  got: 2"),
        ("rollout.kv_tokens=16483", r"rollout.kv_tokens: too small .*\n  expected: >= .*, 16484"),
    ],
)
def test_each_mistake_has_its_one_message(path: Path, override: str, message: str) -> None:
    """Fault 39."""
    assert re.search(message, only_problem(path, override)), only_problem(path, override)


def test_gpus_must_add_up(path: Path) -> None:
    message = only_problem(path, "gpus=9", "rollout.gpus=4", "train.gpus=4")
    assert "gpus: is not the sum of its parts\n  expected: rollout.gpus + train.gpus, 4 + 4\n  got: 9" in message


@pytest.mark.parametrize("key", ["gpus", "rollout.gpus", "train.gpus"])
def test_gpus_are_for_emulated_runs_only(path: Path, key: str) -> None:
    path.write_text(WITH_A_MODEL)
    message = rf"{key}: this version does not place .*\n.*\n  fix: use .*threads"
    assert re.search(message, only_problem(path, f"{key}=8"))


@pytest.mark.parametrize("key", ["model.path", "data.train"])
def test_other_runs_need_a_model_and_a_dataset(path: Path, key: str) -> None:
    path.write_text(WITH_A_MODEL)
    assert f"{key}: missing: only emulated runs do without" in only_problem(path, f"{key}=none")


def test_the_resolved_config_loads_back_equal(path: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text((Path(preflight.__file__).parent / "profiles" / "toy.toml").read_text())
    config = load(path, ["gpus=20", "train.gpus=4", f"simulation.profile={tmp_path}/mine.toml"])
    copy = tmp_path / "deep" / "config.toml"
    copy.parent.mkdir()
    copy.write_text(dump(config))
    assert load(copy) == config and dump(load(copy)) == dump(config)


def test_a_profile_of_ones_own_counts_from_the_file_it_stands_in(path: Path, tmp_path: Path) -> None:
    toy = (Path(preflight.__file__).parent / "profiles" / "toy.toml").read_text()
    (tmp_path / "tools.toml").write_text(toy + "tool_calls = 1\ntool_latency_quantiles = [[0, 1], [1, 2]]\n")
    path.write_text(EMULATED + '\n[simulation]\nprofile = "tools.toml"\n')
    assert "simulation.profile: the emulated engine calls no tools" in only_problem(path)


def test_defaults_are_the_same_in_python() -> None:
    config = Config.model_validate(
        {"iterations": 1, "rollout": {"engine": "emulated"}, "train": {"backend": "emulated"}}
    )
    assert config.rollout.max_new_tokens == 16384 and config.train_gpus == 4


def test_checking_an_emulated_run_imports_no_torch(path: Path) -> None:
    code = f"""
import sys
from laminar import preflight
from laminar.config import load
import laminar.runtime.actors, laminar.rollout.emulated_engine, laminar.data.emulated
preflight.check(load({str(path)!r}))
assert 'torch' not in sys.modules and 'transformers' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": pathsep.join(sys.path)})
