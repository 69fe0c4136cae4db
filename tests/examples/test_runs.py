"""The examples as a user runs them, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)
"""Real processes on a machine that may be busy: the deadlines inside say what did not come."""

ROOT = Path(__file__).parents[2]
LAMINAR = str(Path(sys.executable).with_name("laminar"))


def run(*command: str, cwd: Path, within_s: float = 300.0) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=within_s)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("example", "short"),
    [
        ("sort", ["iterations=4"]),
        pytest.param("sort", ["iterations=3", "schedule=sync", "rollout.replicas=2"], marks=pytest.mark.slow),
        ("arithmetic", ["iterations=1", "train.groups_per_batch=2", "train.group_size=2", "data.eval=none"]),
        ("reasoning_gym", ["iterations=1", "train.groups_per_batch=2", "train.group_size=2", "data.eval=none"]),
    ],
    ids=["sort", "sort in sync with two replicas", "arithmetic", "reasoning_gym"],
)
def test_an_example_trains(tmp_path: Path, example: str, short: list[str]) -> None:
    config = str(ROOT / "examples" / example / "config.toml")
    summary = run(LAMINAR, "train", config, *short, "--run-dir", "run", cwd=tmp_path)
    assert "closed" in summary and "reward" in summary
    assert (tmp_path / "run" / "export" / "config.json").exists()
    if example == "sort":
        check_commands(tmp_path)


def check_commands(cwd: Path) -> None:
    """What a user asks of a run that has ended: they say that all is well, and the model is one that others load."""
    account = json.loads(run(LAMINAR, "ledger", "run", "--json", cwd=cwd))
    assert account["closed"] and account["samples"]["in_flight"] == 0
    ended = json.loads(run(LAMINAR, "ps", "run", "--json", cwd=cwd))
    assert {row["state"] for row in ended["processes"]} == {"ended"}
    for seed in ("0", "1"):
        replay = ["env", f"PYTHONHASHSEED={seed}", LAMINAR, "replay", "run", "--json"]
        assert json.loads(run(*replay, cwd=cwd))["agrees"]
    load = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; import sys; "
    load += "M.from_pretrained(sys.argv[1]); T.from_pretrained(sys.argv[1])"
    run(sys.executable, "-W", "ignore", "-c", load, "run/export", cwd=cwd)


def test_an_example_is_evaluated_without_training(tmp_path: Path) -> None:
    config = str(ROOT / "examples" / "sort" / "config.toml")
    found = json.loads(run(LAMINAR, "eval", config, "eval.temperature=0", "--run-dir", "run", "--json", cwd=tmp_path))
    assert 0 < found["eval_reward_mean"] < 1
    account = json.loads(run(LAMINAR, "ledger", "run", "--json", cwd=tmp_path))
    assert account["closed"] and account["eval"]["samples"]["trained"] == found["num_samples"]
    assert account["samples"]["dispatched"] == 0
    assert not (tmp_path / "run" / "export").exists()


@pytest.mark.parametrize("script", ["python_api.py", "trl_script.py"])
def test_a_script_trains(tmp_path: Path, script: str) -> None:
    """As it is: the Python form, and one written for TRL."""
    assert "closed" in run(sys.executable, str(ROOT / "examples" / script), cwd=tmp_path)
    if script == "trl_script.py":
        assert (tmp_path / "sort-grpo" / "model.safetensors").exists()
