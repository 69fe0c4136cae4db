"""Invariant 12: after a kill at any point, resume trains the same cuts and gives the same weights."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar import config as configs
from laminar.control.accounts import Cut
from laminar.data import schema
from laminar.data.batches import read_batch
from laminar.run_folder import RunFolder, read_jsonl
from laminar.trainer.policy import named_weights
from laminar.trainer.step import TrainState, train_batch
from laminar.weights.publisher import Publisher
from tests.runtime.conftest import Command, check_account, wait_until

pytestmark = pytest.mark.timeout(900)
"""Real processes on a machine that may be busy: the deadlines inside say what did not come."""


def assert_weights_follow_from_cuts(folder: RunFolder, tmp_path: Path) -> int:
    """Train the recorded cuts in one uninterrupted pass: every fingerprint on record must come out again."""
    config = configs.load(folder.config)
    state = TrainState.create(config)
    slots = tmp_path / "check-slots"
    publisher = Publisher(slots, tmp_path / "check-versions.jsonl", config.rollout.dtype, config.num_slots)
    recorded = {row["version"]: row["fingerprint"] for row in read_jsonl(folder.versions)}
    assert publisher.digest(named_weights(state.model)) == recorded[0]
    db = schema.connect_read_only(folder.database)
    cuts = db.execute("SELECT batch, part, num_parts, groups FROM cuts ORDER BY batch, part").fetchall()
    checked = 0
    for update, part, num_parts, groups in cuts:
        if update + 1 not in recorded:
            break
        train_batch(state, read_batch(db, Cut(update, part, num_parts, tuple(json.loads(groups)))), config)
        assert publisher.digest(named_weights(state.model)) == recorded[update + 1], f"version {update + 1} differs"
        checked += 1
    shutil.rmtree(slots)
    return checked


def run_with_kills(command: Callable[..., Command], seed: int, num_kills: int, checkpoint_every: int) -> Command:
    """A run that is killed, driver and all, at `num_kills` random moments, each followed by a resume; the last one
    trains a bit more, and ends."""
    rng = random.Random(seed)
    current = command("iterations=1000", f"train.checkpoint_every={checkpoint_every}", "rollout.replicas=2")
    for kill in range(num_kills):
        rows = current.num_rows
        more = rng.choice([1, 2, 3] if kill == 0 else [0, 0, 1, 2, 3])
        wait_until(lambda c=current, n=rows + more: c.num_rows >= n and len(c.pids()) > 3, "progress")
        moment = rng.random()
        deadline_reached = iter(range(int(1 + 60 * moment)))
        wait_until(lambda it=deadline_reached: next(it, None) is None, "the moment")
        current.kill_everything()
        current.assert_nothing_left()
        until = [f"iterations={current.num_rows + 3}"] if kill == num_kills - 1 else []
        current = command(*until, resume=True)
    code, out = current.wait()
    assert code == 0, out
    current.assert_nothing_left()
    return current


def assert_each_group_once(folder: RunFolder) -> None:
    db = schema.connect_read_only(folder.database)
    groups = Counter(g for (text,) in db.execute("SELECT groups FROM cuts") for g in json.loads(text))
    assert groups and max(groups.values()) == 1
    cursors = [c for (c,) in db.execute("SELECT cursor FROM groups WHERE kind = 'train'")]
    assert sorted(cursors) == list(range(len(cursors))), "every draw of the prompt pool is on record once"


@pytest.mark.parametrize(
    ("seed", "num_kills"), [(0, 1), pytest.param(1, 20, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_killed_at_random_moments(command: Callable[..., Command], tmp_path: Path, seed: int, num_kills: int) -> None:
    """Faults 10 and 29: SIGKILL of everything; each group in one cut; the weights are those of an uninterrupted
    trainer on the same cuts."""
    last = run_with_kills(command, seed, num_kills, checkpoint_every=1000)
    assert assert_weights_follow_from_cuts(last.folder, tmp_path) >= 1
    account = check_account(last.folder, completed=True)
    # a start that was killed before its data store was open does not count
    assert 1 <= account["restarts"] <= num_kills and account["replayed_cuts"] >= 1
    assert {row["lineage"] for row in read_jsonl(last.folder.versions)} == {0}
    assert_each_group_once(last.folder)


def test_checkpoints_lose_nothing(command: Callable[..., Command]) -> None:
    """The same with a checkpoint each second iteration: what is trained again has the fingerprint on record."""
    last = run_with_kills(command, seed=6, num_kills=1, checkpoint_every=2)
    check_account(last.folder, completed=True)
    versions = list(read_jsonl(last.folder.versions))
    assert {row["lineage"] for row in versions} == {0}
    assert [row["version"] for row in versions] == list(range(len(versions)))
    assert_each_group_once(last.folder)
