"""The comparison with TRL, as far as it goes without TRL: its tasks, and how it looks at a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.against_trl import GROUP_SIZE, GROUPS, Run, Task, as_toml, broken, make_5m, middle, picture, watch
from laminar import config as configs

WRITES_STEPS = """
import sys, time
with open(sys.argv[1], "a") as file:
    for step in range(20):
        file.write('{"reward_mean": %s}\\n' % (step / 20))
        file.flush()
        until = time.process_time() + 0.02  # processor time is counted in hundredths of a second
        while time.process_time() < until:
            pass
"""


def test_the_same_task_for_both(tmp_path: Path) -> None:
    model, rows, reward = make_5m(tmp_path / "5M")
    task = Task("5M", model, rows, reward, 4, 32, 1e-4, 2)
    (tmp_path / "config.toml").write_text(as_toml(task.laminar()))
    config, theirs = configs.load(tmp_path / "config.toml"), task.trl()
    train = config.train
    assert train.groups_per_batch * train.group_size == theirs["per_device_train_batch_size"] == GROUPS * GROUP_SIZE
    assert (config.iterations, train.lr, config.rollout.max_new_tokens) == (
        theirs["max_steps"],
        theirs["learning_rate"],
        theirs["max_completion_length"],
    )
    assert (train.lr_schedule, train.warmup_steps) == (theirs["lr_scheduler_type"], theirs["warmup_steps"])
    assert 4e6 < sum(file.stat().st_size for file in model.glob("*.safetensors")) / 4 < 6e6


def test_a_run_is_timed_by_the_lines_it_writes(tmp_path: Path) -> None:
    task = Task("sort", tmp_path, tmp_path, tmp_path, 20, 12, 1e-4, 2)
    steps = tmp_path / "steps.jsonl"
    run = watch([sys.executable, "-c", WRITES_STEPS, steps], steps, tmp_path, task, None)
    assert run.samples_per_s > 0 and run.cpu_s_per_sample > 0
    assert run.goal_s is None, "the last ten steps have a mean of 0.725"
    assert run.curve[-1][1] == pytest.approx(0.725) and "TRL" in picture({"laminar": [run], "TRL": [run, run]})
    with pytest.raises(SystemExit, match="no such task"):
        watch([sys.executable, "-c", "raise SystemExit('no such task')"], steps, tmp_path, task, None)


def test_what_is_out_of_bounds_is_said() -> None:
    slow, fast, never = Run(10, 0.1, 20.0), Run(20, 0.05, 10.0), Run(20, 0.05, None)
    assert broken("sort", {"laminar": fast, "TRL": slow}) == []
    assert broken("sort", {"laminar": slow, "TRL": fast}) == [
        "sort: 0.50 x is below 1.5 x",
        "sort: not sooner at reward 0.75",
    ]
    assert broken("sort", {"laminar": never, "TRL": slow}) == ["sort: not sooner at reward 0.75"]
    assert middle([slow, fast]) == Run(15, pytest.approx(0.075), 15.0) and middle([slow, never]).goal_s is None
