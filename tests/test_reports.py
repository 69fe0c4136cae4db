"""What the commands say of a run folder: ledgers that close, and violations that are found."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from laminar import reports
from laminar.errors import StorageError
from laminar.run_folder import RunFolder, write_json
from tests.control.plans import make_settings
from tests.data.driving import Hand, open_store
from tests.runs import make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def folder(made: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy that a test may spoil."""
    copy = RunFolder(tmp_path / "copy")
    copy.create()
    for source in (made.config, made.database, made.metrics, made.evals, *made.events.iterdir()):
        (copy.path / source.relative_to(made.path)).write_bytes(source.read_bytes())
    return copy


def edit(folder: RunFolder, *statements: str) -> None:
    with closing(sqlite3.connect(folder.database, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def test_the_ledger_of_a_run(folder: RunFolder) -> None:
    """Invariant 2: dispatched = trained + dropped + in flight."""
    account = reports.ledger(folder)
    assert account == {
        "samples": {"dispatched": 14, "trained": 8, "dropped": {"prompt_overlong": 2}, "in_flight": 4},
        "groups": {"dispatched": 7, "trained": 4, "dropped": {"prompt_overlong": 1}, "in_flight": 2},
        "eval": {
            "samples": {"dispatched": 0, "trained": 0, "dropped": {}, "in_flight": 0},
            "groups": {"dispatched": 0, "trained": 0, "dropped": {}, "in_flight": 0},
        },
        "restarts": 0,
        "replayed_cuts": 0,
        "closed": True,
        "violations": [],
    }


PLANTED = {
    "a lost group": (
        ["DELETE FROM groups WHERE id = 6", "DELETE FROM samples WHERE group_id = 6"],
        "7 prompts were drawn, but 6 groups are on record",
    ),
    "a draw used twice": (["UPDATE groups SET cursor = 1 WHERE id = 2"], "1 draws of the prompt pool were used twice"),
    "a group in two cuts": (
        ["UPDATE cuts SET groups = '[0, 2]' WHERE batch = 1"],
        "group 0 is in cut 0 and in cut 1",
    ),
    "a trained group in no cut": (
        ["UPDATE cuts SET groups = '[0]' WHERE batch = 0"],
        "group 1 was trained but is in no cut",
    ),
    "a cut of a group that is not there": (
        ["UPDATE cuts SET groups = '[0, 1, 99]' WHERE batch = 0"],
        "group 99 of cut 0 is on record as None",
    ),
    "a cut trained twice": (
        ["INSERT INTO metrics VALUES (3, '{}')"],
        "trained cuts [0, 1] do not match the metric rows [1, 2, 3]",
    ),
    "a trained cut without its row": (
        ["DELETE FROM metrics WHERE version = 1"],
        "trained cuts [0, 1] do not match the metric rows [2]",
    ),
    "a missing cut": (["UPDATE cuts SET batch = 4 WHERE batch = 0"], "trained cuts [1, 4] do not match"),
    "an unfinished sample of a trained group": (
        ["UPDATE samples SET state = 'scored' WHERE group_id = 0 AND idx = 1"],
        "sample 0/1 is scored in a group that is trained",
    ),
    "a trained sample of a dropped group": (
        ["UPDATE samples SET state = 'trained' WHERE group_id = 4 AND idx = 0"],
        "sample 4/0 is trained in a group that is",
    ),
    "a drop without a reason": (
        ["UPDATE samples SET reason = NULL WHERE state = 'dropped'"],
        "sample 5/0 is dropped in a group that is dropped",
    ),
    "lost tokens": (
        ["DELETE FROM chunks WHERE group_id = 3 AND idx = 1", "UPDATE samples SET length = 9 WHERE group_id = 3"],
        "sample 3/0 has 9 tokens on record and 3 stored",
    ),
    "a sample that was too old": (
        ["UPDATE samples SET version = -1 WHERE group_id = 2 AND idx = 0"],
        "sample 2/0 was trained at staleness 2, the bound is 1",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_found(folder: RunFolder, what: str) -> None:
    statements, message = PLANTED[what]
    edit(folder, *statements)
    account = reports.ledger(folder)
    assert not account["closed"]
    assert any(message in line for line in account["violations"]), account["violations"]


def test_the_ledger_beside_a_writer_is_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is committed between two queries of a report does not look like a violation."""
    folder = RunFolder(tmp_path)
    folder.create()
    store = open_store(tmp_path, make_settings())
    hand = Hand(store)
    hand.make(1)
    counts: Callable[..., object] = reports._counts

    def and_meanwhile(*args: object) -> object:
        found = counts(*args)
        hand.make(1)
        store.next_batch(0)
        return found

    monkeypatch.setattr(reports, "_counts", and_meanwhile)
    account = reports.ledger(folder)
    assert account["violations"] == [] and account["groups"]["dispatched"] == 1
    store.close()


def test_replay_agrees_and_shows_what_does_not(folder: RunFolder) -> None:
    """Invariant 11."""
    result = reports.replay(folder)
    assert (result["records"], result["agrees"]) == (3, True)
    (log,) = folder.events.iterdir()
    lines = log.read_text().splitlines()
    record = json.loads(lines[2])
    record["commands"] = [{"type": "Complete", "reason": "planted"}]
    lines[2] = json.dumps(record)
    log.write_text("\n".join(lines) + "\n")
    result = reports.replay(folder)
    assert (result["differences"], result["agrees"]) == (1, False)
    assert "planted" in result["details"][0] and "StoreEvents" in result["details"][0]


def test_a_torn_log_is_read_up_to_the_tear(folder: RunFolder) -> None:
    (log,) = folder.events.iterdir()
    log.write_text(log.read_text()[:-5])
    assert reports.replay(folder) == {"records": 2, "differences": 0, "agrees": True, "details": []}
    assert json.loads(log.read_text().splitlines()[0])["settings"] == asdict(make_settings())


def test_samples(folder: RunFolder) -> None:
    rows = reports.samples(folder, group=2)["samples"]
    assert [(r["group"], r["index"], r["version"], r["state"], r["completion"], r["reward"]) for r in rows] == [
        (2, 0, 1, "trained", "text", 0.0),
        (2, 1, 1, "trained", "text", 1.0),
    ]
    assert {r["group"] for r in reports.samples(folder, last=3)["samples"]} == {1, 2, 3}
    assert len(reports.samples(folder)["samples"]) == 14


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"best": 2}, [(0, 1), (1, 1)]),
        ({"worst": 2}, [(1, 0), (0, 0)]),
        ({"best": 1, "worst": 1}, [(0, 1), (0, 0)]),
        ({"best": 9, "last": 1}, [(3, 1), (3, 0)]),
        ({"worst": 1, "group": 2}, [(2, 0)]),
        ({"best": 1, "group": 6}, []),
    ],
    ids=str,
)
def test_the_best_and_the_worst_samples(
    folder: RunFolder, choice: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    """Rewards are 0 and 1 in each group; group 6 has none yet."""
    assert [(r["group"], r["index"]) for r in reports.samples(folder, **choice)["samples"]] == expected


def test_processes_that_are_gone_have_ended(folder: RunFolder) -> None:
    import os

    rows = [
        {"role": "driver", "id": "driver", "pid": os.getpid(), "node": "local", "state": "alive", "version": None},
        {"role": "replica", "id": "replica-0", "pid": 2**22 + 1, "node": "local", "state": "alive", "version": 3},
    ]
    assert reports.processes(folder) == {"processes": []}
    write_json(folder.processes, {"processes": rows})
    assert [p["state"] for p in reports.processes(folder)["processes"]] == ["alive", "ended"]


def test_folders_that_are_not_runs(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no config\.toml"):
        reports.open_run(tmp_path)
    (tmp_path / "config.toml").touch()
    folder = reports.open_run(tmp_path)
    with pytest.raises(StorageError, match="no database"):
        reports.ledger(folder)
    with pytest.raises(StorageError, match="no event log"):
        reports.replay(folder)
