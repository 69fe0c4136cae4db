"""All schedules on the sort example: each closes its ledger and replays, with the staleness that it allows."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from laminar.config import Config
from laminar.control import codec
from laminar.control.commands import Command, Pull
from laminar.data import schema
from tests.runtime.conftest import Outcome, Run, sort_config

ITERATIONS = 6


def config(schedule: str, *overrides: str) -> Config:
    rules = f"schedule={schedule}", f"iterations={ITERATIONS}", "rollout.replicas=2", "train.num_mini_batches=2"
    return sort_config(*rules, *overrides)


def commands(outcome: Outcome) -> list[Command]:
    """Everything that the manager ever said."""
    return [
        command
        for path in sorted(outcome.folder.events.glob("*.jsonl"))
        for line in path.read_text().splitlines()[1:]
        for command in codec.decode_record(json.loads(line)).commands
    ]


def versions_in_chunks(outcome: Outcome) -> dict[tuple[int, int], set[int]]:
    """Trained sample -> numbers of the versions of its tokens (kept until a checkpoint has its batch)."""
    query = (
        "SELECT c.group_id, c.idx, c.version FROM chunks c JOIN samples s ON s.group_id = c.group_id AND s.idx = c.idx "
        "WHERE s.state = 'trained'"
    )
    found: dict[tuple[int, int], set[int]] = {}
    with closing(schema.connect_read_only(outcome.folder.database)) as db:
        for group, index, version in db.execute(query):
            found.setdefault((group, index), set()).add(version)
    return found


@pytest.mark.parametrize(
    ("schedule", "bound"),
    [
        pytest.param("sync", 0, marks=pytest.mark.slow),
        ("one_step", 1),
        ("stream", 1),
        pytest.param("partial", 2, marks=pytest.mark.slow),
        ("laminar", 2),
    ],
)
def test_every_schedule_trains_and_accounts_for_everything(run: Run, schedule: str, bound: int) -> None:
    """Invariants 2, 7 and 11; the fixture looks at ledger and replay. `max_staleness` is for the last two."""
    outcome = run(config(schedule, "max_staleness=2", "train.checkpoint_every=1000"))
    assert outcome.code == 0
    assert [row["version"] for row in outcome.metrics] == list(range(1, ITERATIONS + 1))
    assert {row["num_samples"] for row in outcome.metrics} == {16}
    ages = [row["staleness_use_max"] for row in outcome.metrics]
    assert max(ages) <= bound
    if schedule in ("one_step", "stream"):
        assert ages[:2] == [0, 1], "the second batch is begun before the first is trained"
    with closing(schema.connect_read_only(outcome.folder.database)) as db:
        parts = [row[0] for row in db.execute("SELECT COUNT(*) FROM cuts GROUP BY batch ORDER BY batch")]
    assert parts == [2 if schedule == "stream" else 1] * ITERATIONS
    if schedule != "partial":
        assert not [c for c in commands(outcome) if isinstance(c, Pull) and c.interrupt]
        assert all(len(versions) == 1 for versions in versions_in_chunks(outcome).values())


def test_a_new_version_interrupts_what_is_generated(run: Run) -> None:
    """Schedule `partial`: a few responses at a time, so that there is always one that a publish meets in its midst."""
    rules = "max_staleness=2", "train.checkpoint_every=1000", "rollout.max_num_seqs=4"
    outcome = run(config("partial", *rules, "iterations=24"))  # not every publication meets one
    assert outcome.code == 0
    assert [c for c in commands(outcome) if isinstance(c, Pull) and c.interrupt]
    found = versions_in_chunks(outcome)
    assert [sample for sample, versions in found.items() if len(versions) > 1], "tokens of one version follow another's"


def test_fresh_admission_keeps_the_bound(run: Run) -> None:
    """Invariants 1 and 7: replicas take new groups as old ones end, each trajectory still has one version."""
    outcome = run(config("laminar", "rollout.admission=fresh", "max_staleness=1", "train.checkpoint_every=1000"))
    assert outcome.code == 0
    assert max(row["staleness_use_max"] for row in outcome.metrics) <= 1
    assert all(len(versions) == 1 for versions in versions_in_chunks(outcome).values())
