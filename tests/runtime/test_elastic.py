"""Replicas that join and leave while a run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.conftest import TOY, Command, check_account, wait_until

pytestmark = pytest.mark.timeout(900)
"""Real processes on a machine that may be busy: the deadlines inside say what did not come."""

LAMINAR = str(Path(sys.executable).with_name("laminar"))


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LAMINAR, *arguments], capture_output=True, text=True, timeout=60)


def test_replicas_join_and_leave_a_run_and_nothing_is_lost(command: Callable[..., Command]) -> None:
    """Fault 41: one is asked for, pulls by itself and works; the first one is drained; the account closes."""
    run = command("iterations=100000", "rollout.replicas=1", config=TOY)
    folder = str(run.folder.path)
    run.wait_for_rows(1)
    assert ask("scale", folder, "replicas=3").returncode == 0
    wait_until(lambda: run.replicas().keys() == {"replica-0", "replica-1", "replica-2"}, "three replicas with weights")
    assert ask("drain", folder, "replica-0").returncode == 0
    wait_until(lambda: run.replicas().keys() == {"replica-1", "replica-2"}, "the end of the drained replica")
    assert ask("scale", folder, "replicas=1").returncode == 0
    wait_until(lambda: run.replicas().keys() == {"replica-1"}, "the end of the last but one")
    run.wait_for_rows(run.num_rows + 2)
    refused = ask("drain", folder, "replica-1")
    assert refused.returncode == 2 and "last replica" in refused.stderr
    run.process.terminate()
    code, out = run.wait(within_s=20)
    assert code == 130, out
    assert "replica-2 joins" in out and "replica-0 is drained and leaves" in out and "died" not in out
    account = check_account(run.folder, completed=False)
    assert account["samples"]["dropped"] == {}


@pytest.mark.slow
def test_sigterm_to_a_replica_is_a_drain_and_the_last_one_is_replaced(command: Callable[..., Command]) -> None:
    """Fault 41: a machine that is taken away says so before: nothing dies, and nothing is begun anew."""
    run = command("iterations=100000", "rollout.replicas=2")
    run.wait_for_rows(1)
    wait_until(lambda: run.replicas().keys() == {"replica-0", "replica-1"}, "two replicas with weights")
    os.kill(run.replicas()["replica-0"], signal.SIGTERM)
    wait_until(lambda: run.replicas().keys() == {"replica-1"}, "the end of the first")
    os.kill(run.replicas()["replica-1"], signal.SIGTERM)
    wait_until(lambda: run.replicas().keys() == {"replica-2"}, "one in the place of the last")
    run.wait_for_rows(run.num_rows + 2)
    run.process.terminate()
    code, out = run.wait(within_s=20)
    assert code == 130, out
    assert out.count("is drained and leaves") == 2 and "replica-2 joins" in out and "died" not in out
    assert check_account(run.folder, completed=False)["samples"]["dropped"] == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("scale", "replicas=2"), "not going on"),
        (("scale", "workers=2"), "replicas=N"),
        (("drain", "r"), "not going on"),
    ],
)
def test_a_run_that_is_over_can_not_be_asked(tmp_path: Path, arguments: tuple[str, str], says: str) -> None:
    (tmp_path / "config.toml").write_text("")
    refused = ask(arguments[0], str(tmp_path), arguments[1])
    assert refused.returncode == 2 and says in refused.stderr and "Traceback" not in refused.stderr
