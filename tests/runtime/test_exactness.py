"""Invariant 9 on real processes: samples come out as if nothing had happened, tokens and log-probs, bit for bit.

With a learning rate of 0 all versions have the same weights, so two runs can be compared by sampling key.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import pytest

from laminar.control.events import DrainRequested, ScaleRequested
from laminar.data import schema
from laminar.requests import send
from laminar.run_folder import RunFolder, read_jsonl
from tests.runtime.conftest import Command, check_account, wait_until

pytestmark = pytest.mark.timeout(900)

LONG = (
    *("train.lr=0", "train.checkpoint_every=100000", "train.groups_per_batch=24", "train.group_size=8"),
    *("rollout.temperature=4.0", "rollout.max_new_tokens=50", "rollout.max_num_seqs=4", "rollout.replicas=3"),
    *("rollout.stream_interval_s=0.02", "rollout.repack_interval_s=0.2", "faults.max_restarts=100"),
)
"""Long responses, few at a time: whoever is hit has some half done. Tokens of all batches are kept."""

Key = tuple[int, int, int]


@dataclass(frozen=True)
class Response:
    tokens: bytes
    logprobs: bytes


def responses(folder: RunFolder) -> tuple[dict[Key, Response], set[Key]]:
    """All that have ended, by (group, index, attempt), and those of them that more than one replica has made."""
    found: dict[Key, Response] = {}
    with closing(schema.connect_read_only(folder.database)) as db:
        ended = db.execute(
            "SELECT group_id, idx, attempt, owner_epoch FROM samples WHERE state IN ('finished', 'scored', 'trained')"
        ).fetchall()
        for group, idx, attempt, _ in ended:
            rows = db.execute(
                "SELECT tokens, logprobs FROM chunks WHERE group_id = ? AND idx = ? ORDER BY start", (group, idx)
            ).fetchall()
            found[group, idx, attempt] = Response(b"".join(t for t, _ in rows), b"".join(p for _, p in rows))
    return found, {(group, idx, attempt) for group, idx, attempt, epoch in ended if epoch > attempt}


def all_three(run: Command) -> dict[str, int]:
    return wait_until(lambda: len(found := run.replicas()) == 3 and found, "three replicas")  # type: ignore[no-any-return]


def unfinished(run: Command, replica: str) -> int:
    """Samples that it owns."""
    with closing(schema.connect_read_only(run.folder.database)) as db:
        (count,) = db.execute(
            "SELECT COUNT(*) FROM samples WHERE owner = ? AND state IN ('issued', 'running')", (replica,)
        ).fetchone()
    return int(count)


def kill_one(run: Command, dice: random.Random) -> None:
    """SIGKILL of a replica in the middle of its work."""
    name, pid = dice.choice(sorted(all_three(run).items()))
    least = dice.randint(4, 32)
    wait_until(lambda: unfinished(run, name) >= least, f"{least} samples at {name}")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: run.replicas().get(name, pid) != pid, f"the successor of {name}")


def drain_one(run: Command) -> None:
    name = sorted(all_three(run))[0]
    wait_until(lambda: unfinished(run, name) >= 8, f"work for {name}")
    send(run.folder, DrainRequested(name))
    wait_until(lambda: name not in run.replicas(), f"the end of {name}")
    send(run.folder, ScaleRequested(3))
    all_three(run)


def wake_a_zombie(run: Command) -> None:
    """A replica is stopped, its work goes on elsewhere, and it is continued before the driver can kill it."""
    name, pid = sorted(all_three(run).items())[0]
    wait_until(lambda: unfinished(run, name) >= 8, f"work for {name}")
    run.process.send_signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: unfinished(run, name) == 0, f"the adoption of what {name} holds")
    os.kill(pid, signal.SIGCONT)
    run.wait_for_rows(run.num_rows + 1)
    run.process.send_signal(signal.SIGCONT)
    wait_until(lambda: run.replicas().get(name, pid) != pid, f"the successor of {name}")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 10])
def test_samples_are_those_of_an_undisturbed_run(command: Callable[..., Command], kills: int) -> None:
    """Invariant 9 and fault 5: repack, SIGKILL, a drain, and a replica that is continued after others took over."""
    run, dice = command("iterations=100000", *LONG, "faults.dead_after_s=8"), random.Random(kills)
    run.wait_for_rows(1)
    for _ in range(kills):
        kill_one(run, dice)
    drain_one(run)
    wake_a_zombie(run)
    run.wait_for_rows(run.num_rows + 1)
    run.process.terminate()
    code, out = run.wait(within_s=30)
    assert code == 130 and "Traceback" not in out, out
    check_account(run.folder, completed=False)

    calm = command(f"iterations={run.num_rows}", *LONG, name="calm")
    code, out = calm.wait()
    assert code == 0, out
    disturbed, handed_over = responses(run.folder)
    expected, _ = responses(calm.folder)
    common = disturbed.keys() & expected.keys()
    assert len(common) > 0.7 * len(expected)
    assert [key for key in common if disturbed[key] != expected[key]] == []
    assert len(handed_over & common) >= 8, "what others have gone on with is among them"
    rows = list(read_jsonl(run.folder.metrics))
    assert sum(row["num_adopted"] for row in rows) and sum(row["num_moved"] for row in rows)
