"""What a user sees when a part of a run fails: the run ends soon, says why, and loses nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar import reports
from laminar.errors import RunFailed, StorageError
from laminar.run_folder import read_jsonl
from laminar.runtime import launch
from tests.runtime.conftest import TOY, Command, Run, check_account, sort_config, wait_until

pytestmark = pytest.mark.timeout(900)
"""Real processes on a machine that may be busy: the deadlines inside say what did not come."""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    """Reward functions of a careless user."""
    path = tmp_path / "rewards.py"
    path.write_text(
        "def raises(completions, answer):\n"
        "    raise ZeroDivisionError('my own mistake')\n"
        "def hangs(completions, answer):\n"
        "    import time\n"
        "    time.sleep(600)\n"
        "def some_fail(completions, answer):\n"
        "    return [None if c[:1] < '3' else float('nan') if c[:1] < '6' else 1.0 * len(c) for c in completions]\n"
    )
    return path


def test_a_reward_that_always_raises_stops_the_run(run: Run, rewards: Path) -> None:
    """Faults 4 and 18: the message names the function and what it raised; the account stays closed."""
    with pytest.raises(RunFailed) as failure:
        run(sort_config("iterations=5", f'reward.functions=["{rewards}:raises"]', "reward.max_failures=3"))
    assert "raises" in str(failure.value) and "my own mistake" in str(failure.value)


def test_a_run_that_stalls_says_who_waits_and_what_all_were_doing(run: Run, rewards: Path) -> None:
    """Fault 1: nothing is ever scored; the run ends, names the ids, and the stacks of all are in the logs."""
    with pytest.raises(RunFailed) as failure:
        run(
            sort_config(
                *("iterations=5", f'reward.functions=["{rewards}:hangs"]', "reward.timeout_s=600"),
                *("faults.stall_timeout_s=6", "faults.adopt_timeout_s=1"),
            ),
            name="stalled",
        )
    message = str(failure.value)
    assert "nothing has finished for" in message and "batch 0 needs 4 buffered groups" in message
    logs = Path(message.partition("logs: ")[2].splitlines()[0])
    for process in ("trainer", "replica-0", "relay-0", "datastore", "scorer", "manager", "driver", "rewards"):
        assert "most recent call first" in (logs / f"{process}.log").read_text(), process
    assert "in hangs" in (logs / "rewards.log").read_text(), "which reward function it is"


def test_failed_scores_are_dropped_not_trained(run: Run, rewards: Path) -> None:
    """Invariant 3 and fault 16: what could not be scored has a reason in the ledger and is in no batch."""
    outcome = run(sort_config("iterations=3", f'reward.functions=["{rewards}:some_fail"]', "reward.max_failures=1000"))
    account = reports.ledger(outcome.folder)["samples"]
    assert set(account["dropped"]) <= {"reward_error", "reward_none", "group_incomplete", "run_ended"}
    assert {"reward_error", "reward_none"} & set(account["dropped"])
    rows = reports.samples(outcome.folder)["samples"]
    trained = [r for r in rows if r["state"] == "trained"]
    assert len(trained) == account["trained"] and all(r["reward"] is not None for r in trained)


def test_sockets_go_where_their_paths_are_short_enough(tmp_path: Path) -> None:
    """A long TMPDIR, as clusters have it, is no reason not to run."""
    long = tmp_path / ("x" * launch.LONGEST_PLACE)
    long.mkdir()
    found = launch.session_folder([str(long), "/nowhere", "/tmp"])
    found.rmdir()
    assert found.parent == Path("/tmp")
    with pytest.raises(StorageError, match="no place for Ray's sockets"):
        launch.session_folder([str(long)])


SLOW = pytest.mark.slow

IMPATIENT = ("faults.suspect_after_s=1.5", "faults.dead_after_s=4")


@pytest.mark.parametrize(
    "role",
    [
        "replica",
        "trainer",
        pytest.param("manager", marks=SLOW),
        pytest.param("datastore", marks=SLOW),
        pytest.param("relay", marks=SLOW),
        pytest.param("scorer", marks=SLOW),
    ],
)
def test_a_process_that_dies_is_replaced_and_nothing_is_lost(command: Callable[..., Command], role: str) -> None:
    """Faults 1 and 2: any part is killed in mid-run; one line says so, and the run completes with a closed account."""
    run = command("iterations=30", config=TOY)
    run.wait_for_rows(3)
    victim = run.pid_of(role)
    os.kill(victim, signal.SIGKILL)
    code, out = run.wait()
    assert code == 0, out
    assert "died" in out and "restarting it" in out and "Traceback" not in out
    run.assert_nothing_left()
    account = check_account(run.folder, completed=True)
    assert set(account["samples"]["dropped"]) <= {"run_ended"}
    assert [row["version"] for row in read_jsonl(run.folder.metrics)] == list(range(1, 31))


def test_the_first_death_ends_a_run_without_restarts(command: Callable[..., Command]) -> None:
    run = command("iterations=100000", "faults.max_restarts=0", config=TOY)
    run.wait_for_rows(1)
    os.kill(run.pid_of("trainer"), signal.SIGKILL)
    code, out = run.wait(within_s=30)
    assert code == 1 and "trainer died" in out and "--resume" in out
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "training"),
        (signal.SIGTERM, "starting"),
        pytest.param(signal.SIGINT, "starting", marks=SLOW),
        pytest.param(signal.SIGTERM, "training", marks=SLOW),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_signal_ends_the_run_in_order(command: Callable[..., Command], number: signal.Signals, moment: str) -> None:
    """Fault 10: all children are gone within 10 s, the exit code is 130, and `--resume` goes on."""
    first = command("iterations=100000", config=TOY)
    if moment == "training":
        first.wait_for_rows(2)
    else:
        wait_until(first.pids, "the first process")
    first.process.send_signal(number)
    code, out = first.wait(within_s=15)
    assert code == 130 and "--resume" in out and "Traceback" not in out
    first.assert_nothing_left()

    second = command(f"iterations={first.num_rows + 2}", resume=True)
    code, out = second.wait()
    assert code == 0, out
    account = check_account(second.folder, completed=True)
    assert account["restarts"] == (moment == "training")


def test_a_run_can_not_be_resumed_twice_at_once(command: Callable[..., Command]) -> None:
    """A run folder has one driver: the second one is refused with one message."""
    first = command("iterations=100000", config=TOY)
    first.wait_for_rows(1)
    code, out = command(resume=True).wait()
    assert code == 2 and "is going on" in out
    assert first.process.poll() is None


@pytest.mark.parametrize(
    "role",
    [
        "manager",
        "replica",
        *(pytest.param(role, marks=SLOW) for role in ("datastore", "trainer", "relay", "scorer")),
    ],
)
def test_a_process_that_is_stopped_is_taken_for_dead_and_replaced(command: Callable[..., Command], role: str) -> None:
    """Faults 2 and 26: SIGSTOP, of which the operating system tells nobody."""
    run = command("iterations=100000", *IMPATIENT, config=TOY)
    run.wait_for_rows(2)
    wait_until(lambda: set(states(run).values()) == {"alive"}, "everybody's first word")
    victim = run.pid_of(role)
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: victim not in run.pids(), "the end of the stopped process", within_s=60)
    wait_until(lambda: run.pid_of(role) != victim and states(run)[role] == "alive", "its successor", within_s=60)
    run.wait_for_rows(run.num_rows + 2)
    run.process.terminate()
    code, out = run.wait(within_s=20)
    assert code == 130, out
    assert "silent for" in out and "is back after" in out and "Traceback" not in out
    run.assert_nothing_left()
    check_account(run.folder, completed=False)


def states(run: Command) -> dict[str, str]:
    """By role; of several processes, one that is not alive if there is one."""
    rows = sorted(reports.processes(run.folder)["processes"], key=lambda row: row["state"] != "alive")
    return {row["role"]: row["state"] for row in rows}


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=lambda number: number.name)
def test_a_run_without_a_manager_can_be_interrupted(command: Callable[..., Command], number: signal.Signals) -> None:
    """Fault 10: it ends in time though nobody is there to end it in order, and goes on later."""
    run = command("iterations=100000", *IMPATIENT, config=TOY)
    run.wait_for_rows(2)
    os.kill(run.pid_of("manager"), number)
    run.process.terminate()
    code, out = run.wait(within_s=10)
    assert code == 130 and "--resume" in out and "Traceback" not in out
    run.assert_nothing_left()
    check_account(run.folder, completed=False)
