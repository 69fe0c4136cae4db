"""The real runtime without a model: the lengths of the profile, a closed account, and a resume that changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from laminar import config as configs
from laminar import preflight, reports
from laminar.config import Config
from laminar.data import schema
from laminar.errors import ConfigError
from laminar.run_folder import RunFolder
from laminar.runtime import launch
from laminar.timing import load_profile
from tests.runtime.conftest import TOY, Run

FAST = ("simulation.time_scale=20", "rollout.stream_interval_s=0.1")
"""Batches of 32 samples of some 60 tokens, with room for about eight of them in each of two replicas."""


def config(*overrides: str) -> Config:
    loaded = configs.load(TOY, [*FAST, *overrides])
    preflight.check(loaded)
    return loaded


def test_a_run_has_the_lengths_of_its_profile_and_goes_on_where_it_was(run: Run) -> None:
    """Invariants 2, 7 and 12. Two commands for one run: each version is recorded once, in the first lineage."""
    first = run(config("iterations=3"))
    begun = first.versions
    assert first.code == 0
    outcome = run(config("iterations=5"), resume=True)
    assert outcome.code == 0
    assert [row["version"] for row in outcome.metrics] == [1, 2, 3, 4, 5]
    assert {row["num_samples"] for row in outcome.metrics} == {32}
    assert {row["reward_mean"] for row in outcome.metrics} == {1.0}
    assert max(row["staleness_use_max"] for row in outcome.metrics) <= 4
    assert [(row["lineage"], row["version"]) for row in outcome.versions] == [(0, number) for number in range(6)]
    assert len(begun) == 4 and outcome.versions[:4] == begun
    profile = load_profile("toy")
    with schema.connect_read_only(outcome.folder.database) as db:
        lengths = db.execute("SELECT group_id, idx, length FROM samples WHERE state = 'trained'").fetchall()
    db.close()
    assert len(lengths) == 5 * 32
    assert all(length == profile.response_length(0, group, index) for group, index, length in lengths)
    with pytest.raises(ConfigError, match="has no model to export"):
        reports.export(outcome.folder, None, None)


def test_ray_starts_nothing_that_is_not_used(shared_ray: None) -> None:
    from ray._private import node, worker

    assert {"gcs_server", "raylet"} <= worker._global_node.all_processes.keys()
    assert not {"monitor", "log_monitor", "dashboard"} & worker._global_node.all_processes.keys()
    for name in launch.NOT_NEEDED:
        assert getattr(node.Node, name).__qualname__ == f"Node.{name}", "a Ray of the user's own gets what it wants"


RAY_FIRST = f"""
import ray, sys
from pathlib import Path
from laminar import config
from laminar.runtime import launch
for run in sys.argv[1:]:
    code = launch.train(config.load(Path({str(TOY)!r}), {[*FAST, "iterations=1"]}), Path(run), False)
    assert code == 0, code
"""


def test_ray_may_have_been_imported_and_used_before(tmp_path: Path) -> None:
    """A script of a user's may import it for itself, and train twice: each run has a Ray of its own, with its token."""
    runs = [tmp_path / "one", tmp_path / "two"]
    done = subprocess.run([sys.executable, "-c", RAY_FIRST, *runs], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [reports.ledger(RunFolder(run))["closed"] for run in runs] == [True, True]
