"""The database of a run: tables, and how an account's rows are written and read back.

One SQLite file, one writer (the data store). WAL; `synchronous=NORMAL` for exchanges (survives SIGKILL), FULL for cuts
(survives power loss). Tokens, log-probs and masks are appended once, as flat arrays, a row a chunk.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from laminar.control.accounts import Accounts, Cut, EvalRound, Group, MoveOrder, Sample
from laminar.control.ledger import TERMINAL
from laminar.control.mailbox import Inbox
from laminar.errors import StorageError
from laminar.types import SampleId, Settings, Version

TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, cursor INTEGER NOT NULL, lineage INTEGER NOT NULL,
    version INTEGER NOT NULL, deadline INTEGER, state TEXT NOT NULL, batch INTEGER, part INTEGER, reason TEXT,
    buffered_order INTEGER, data TEXT, prompt BLOB, prompt_tokens INTEGER, prompt_text TEXT, logged TEXT);
CREATE INDEX IF NOT EXISTS groups_by_batch ON groups (batch);
CREATE TABLE IF NOT EXISTS samples (
    group_id INTEGER NOT NULL, idx INTEGER NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL, owner TEXT,
    incarnation INTEGER NOT NULL, owner_epoch INTEGER NOT NULL, lineage INTEGER NOT NULL, version INTEGER NOT NULL,
    length INTEGER NOT NULL, finish_reason TEXT, reward REAL, reason TEXT, staleness_generation INTEGER,
    rewards TEXT, completion TEXT, PRIMARY KEY (group_id, idx)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (
    group_id INTEGER NOT NULL, idx INTEGER NOT NULL, start INTEGER NOT NULL, lineage INTEGER NOT NULL,
    version INTEGER NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL, mask BLOB NOT NULL,
    PRIMARY KEY (group_id, idx, start));
CREATE TABLE IF NOT EXISTS cuts (
    batch INTEGER NOT NULL, part INTEGER NOT NULL, num_parts INTEGER NOT NULL, groups TEXT NOT NULL,
    trained INTEGER NOT NULL, PRIMARY KEY (batch, part)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS metrics (version INTEGER PRIMARY KEY, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evals (
    lineage INTEGER, version INTEGER, data TEXT NOT NULL, PRIMARY KEY (lineage, version)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT NOT NULL);
"""


def connect(path: Path) -> sqlite3.Connection:
    """Open for writing, creating the tables. Raises StorageError if the file can't be used."""
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA secure_delete=OFF")  # some builds overwrite what is deleted, which doubles what is written
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(TABLES)
    except sqlite3.Error as error:
        raise StorageError(f"the run's database can't be opened: {error}", where=str(path)) from error
    return db


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open beside a live run; never changes anything."""
    if not path.exists():
        raise StorageError(
            "no database here", where=str(path), fix="give the folder of a run, as `laminar train` printed it"
        )
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    db.row_factory = sqlite3.Row
    return db


def get_meta(db: sqlite3.Connection, key: str, default: str = "") -> str:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return default if row is None else str(row[0])


def set_meta(db: sqlite3.Connection, key: str, value: object) -> None:
    db.execute(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, str(value))
    )


def save_groups(db: sqlite3.Connection, groups: Iterable[Group]) -> None:
    """Write the rows of these groups; those of their samples are apart, which change far more often."""
    db.executemany(
        "INSERT INTO groups (id, kind, cursor, lineage, version, deadline, state, batch, part, reason, buffered_order) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state, "
        "batch = excluded.batch, part = excluded.part, reason = excluded.reason, "
        "buffered_order = excluded.buffered_order",
        [
            (g.id, g.kind, g.cursor, *g.version, g.deadline, g.state, g.update, g.part, g.reason, g.buffered_order)
            for g in groups
        ],
    )


def save_samples(db: sqlite3.Connection, samples: Iterable[Sample]) -> None:
    """Write the rows of these samples."""
    db.executemany(
        "INSERT INTO samples (group_id, idx, state, attempt, owner, incarnation, owner_epoch, lineage, version, "
        "length, finish_reason, reward, reason, staleness_generation) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (group_id, idx) DO UPDATE SET state = excluded.state, attempt = excluded.attempt, "
        "owner = excluded.owner, incarnation = excluded.incarnation, owner_epoch = excluded.owner_epoch, "
        "lineage = excluded.lineage, version = excluded.version, length = excluded.length, "
        "finish_reason = excluded.finish_reason, reward = excluded.reward, reason = excluded.reason, "
        "staleness_generation = excluded.staleness_generation",
        [
            (*s.id, s.state, s.attempt, s.owner, s.incarnation, s.owner_epoch, *s.version, s.length, *_outcome(s))
            for s in samples
        ],
    )


def free_rows(db: sqlite3.Connection, groups: Iterable[int]) -> None:
    """Let go of what only generating, scoring and training these groups needed: tokens, prompt, dataset row."""
    ids = [(group,) for group in groups]
    db.executemany("DELETE FROM chunks WHERE group_id = ?", ids)
    db.executemany("UPDATE groups SET data = NULL, prompt = NULL WHERE id = ?", ids)


def _outcome(s: Sample) -> tuple[str | None, float | None, str | None, int | None]:
    return s.finish_reason, s.reward, s.reason, s.staleness_generation


def save_counters(db: sqlite3.Connection, accounts: Accounts) -> None:
    """What no row tells: prompt cursor, next ids, place of the next cut, last command. They never go back."""
    counters = {name: getattr(accounts, name) for name in COUNTERS}
    counters["failures"] = accounts.failures
    counters["exhausted"] = int(accounts.exhausted)
    counters["inbox"] = accounts.inbox.term, accounts.inbox.number
    counters["ahead"], counters["given_up"] = sorted(accounts.ahead), sorted(accounts.given_up)
    counters["evals"] = [[r.version, r.issued, r.open_groups, r.rewards] for r in accounts.eval_rounds.values()]
    counters["moves"] = [
        [m.source, m.destination, m.incarnation, m.version, list(m.pending)] for m in accounts.moves.values()
    ]
    set_meta(db, "counters", json.dumps(counters))


COUNTERS = (
    *("next_group", "next_eval", "cursor", "buffered_count", "update", "part", "trained_version", "cut_groups"),
    *("num_moved", "num_adopted", "num_restarted", "num_retried", "deaths", "earlier_deaths"),
)


def load_accounts(db: sqlite3.Connection, settings: Settings) -> Accounts:
    """The account as the last committed transaction left it."""
    accounts = Accounts(settings)
    counters = json.loads(get_meta(db, "counters", "{}"))
    for name in COUNTERS:
        setattr(accounts, name, counters.get(name, getattr(accounts, name)))
    accounts.inbox = Inbox(*counters.get("inbox", ()))
    accounts.failures.update(counters.get("failures", {}))
    accounts.exhausted = bool(counters.get("exhausted", 0))
    accounts.ahead, accounts.given_up = set(counters.get("ahead", ())), set(counters.get("given_up", ()))
    for version, issued, open_groups, rewards in counters.get("evals", ()):
        accounts.eval_rounds[Version(*version)] = EvalRound(Version(*version), issued, open_groups, rewards)
    for source, destination, incarnation, version, pending in counters.get("moves", ()):
        samples = dict.fromkeys(SampleId(*sample) for sample in pending)
        accounts.moves[source] = MoveOrder(source, destination, incarnation, Version(*version), samples)
    marks = ", ".join("?" * len(TERMINAL))
    terminal = sorted(TERMINAL)
    for row in db.execute(
        "SELECT id, kind, cursor, lineage, version, deadline, state, batch, part, reason, buffered_order "
        f"FROM groups WHERE state NOT IN ({marks}) ORDER BY id",
        terminal,
    ):
        id_, kind, cursor, lineage, number, deadline, state, batch, part, reason, order = row
        accounts.groups[id_] = Group(
            id_, kind, cursor, Version(lineage, number), deadline, [], state, batch, part, reason, order
        )
    newest = {
        SampleId(group_id, idx): Version(lineage, number)
        for group_id, idx, lineage, number, _ in db.execute(
            "SELECT group_id, idx, lineage, version, MAX(start) FROM chunks GROUP BY group_id, idx"
        )
    }
    for row in db.execute(
        "SELECT group_id, idx, s.state, attempt, owner, incarnation, owner_epoch, s.lineage, s.version, length, "
        "finish_reason, reward, s.reason, staleness_generation FROM samples s JOIN groups g ON g.id = s.group_id "
        f"WHERE g.state NOT IN ({marks}) ORDER BY group_id, idx",
        terminal,
    ):
        group_id, idx, state, attempt, owner, incarnation, epoch, lineage, number, length, *outcome = row
        version = Version(lineage, number)
        sample = Sample(SampleId(group_id, idx), state, attempt, owner, incarnation, epoch, version, version, length)
        sample.last_version = newest.get(sample.id, version)
        sample.finish_reason, sample.reward, sample.reason, sample.staleness_generation = outcome
        accounts.groups[group_id].samples.append(sample)
    accounts.recount()
    for batch, part, num_parts, groups in db.execute(
        "SELECT batch, part, num_parts, groups FROM cuts WHERE NOT trained ORDER BY batch, part"
    ):
        accounts.cuts[batch, part] = Cut(batch, part, num_parts, tuple(json.loads(groups)))
    for reason, count in db.execute(
        "SELECT s.reason, COUNT(*) FROM samples s JOIN groups g ON g.id = s.group_id "
        "WHERE s.state = 'dropped' AND g.kind = 'train' GROUP BY s.reason"
    ):
        accounts.dropped[reason] = count
    return accounts
