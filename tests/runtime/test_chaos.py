"""Short runs of benchmarks/chaos.py: whatever happens to its processes, a run ends and its books are right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_under_faults_ends_and_its_books_are_right(seed: int) -> None:
    """Faults 2, 5, 8, 9, 10, 26 and 29; the message says the seed, what did not hold, and where the run folder is."""
    command = [sys.executable, "-m", "benchmarks.chaos", "--seed", str(seed), "--minutes", "0.2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
