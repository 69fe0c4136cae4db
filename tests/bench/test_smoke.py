"""Every benchmark of whole runs, in small: it ends by itself and prints what it promises. No figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import repack_gain

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
TOY = ("configs/emulated/toy.toml", "simulation.time_scale=20")


def measured(name: str, *arguments: str) -> dict[str, Any]:
    """The JSON object that a benchmark prints; 1 means that a figure is out of its bounds."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_overhead() -> None:
    found = measured("overhead", "iterations=8")
    assert found["samples_per_s"] > 0 and "overhead_s" in found


def test_failover() -> None:
    found = measured("failover", "manager", "--kills", "1")
    (row,) = found["failover"]
    assert row["deaths"] == 1 and row["max_s"] > 0 and row["tok_s_after"] > 0
    assert found["problems"] == [], "the account is closed and the event log replays, however slow the machine is"


def test_footprint() -> None:
    rows = measured("footprint", *TOY, "iterations=16", "--look-every", "0.1")["footprint"]
    assert {"manager", "datastore", "trainer"} <= {row["process"] for row in rows}
    assert all(row["memory_mb_end"] > 0 for row in rows) and any(row["cpu"] > 0 for row in rows)


def test_speedup(tmp_path: Path) -> None:
    rows = measured("speedup", *TOY, "iterations=3", "--plot", str(tmp_path / "speedup.svg"))["speedup"]
    assert [row["variant"] for row in rows] == ["laminar", "laminar, no repack", "one_step", "sync"]
    assert "one_step" in (tmp_path / "speedup.svg").read_text()
    assert all(row["real_tok_s"] > 0 and row["simulated_tok_s"] > 0 for row in rows)


def test_repack_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack_gain, "ITERATIONS", 2)
    monkeypatch.setattr(repack_gain, "WARM_UP", 1)
    gain = repack_gain.gain_of(repack_gain.Case(replicas=2))
    assert gain.gain > -1 and gain.moves_an_iteration > 0 and gain.prefill_share > 0
