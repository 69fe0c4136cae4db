"""metrics.jsonl and eval.jsonl: rows live in the database, the files are copies that one writer appends.

A row is stored in the transaction that it describes and appended after the commit. A file that a crash left torn or
short is rebuilt from the database, so steps never go back and never repeat.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from laminar.control.accounts import Group
from laminar.run_folder import write_atomic, writing

Row = dict[str, Any]


class RowFile:
    """An append-only JSONL copy of rows that the database holds."""

    def __init__(self, path: Path, rows: Iterable[Row]) -> None:
        """Make the file say what `rows` (the database) say, touching it only if it does not."""
        self.path = path
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomic(path, text)

    def append(self, row: Row) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def stored_rows(db: sqlite3.Connection, table: str) -> list[Row]:
    return [json.loads(data) for (data,) in db.execute(f"SELECT data FROM {table} ORDER BY version")]


def iteration_row(
    groups: Sequence[Group],
    update: int,
    num_tokens: int,
    rewards: Sequence[Row],
    logged: Sequence[Row],
) -> Row:
    """What the data store knows of iteration `update`: sizes, lengths, staleness, rewards by function.

    `rewards` = unweighted rewards by function of each trained sample; `logged` = what the functions logged with
    `log_metric`, of each group.
    """
    samples = [s for g in groups for s in g.members("trained")]
    lengths = [s.length for s in samples]
    generation = [s.staleness_generation or 0 for s in samples]
    use = [update - s.version.number for s in samples]
    return {
        "num_samples": len(samples),
        "num_reward_failures": sum(s.reason is not None for s in samples),
        "num_tokens": num_tokens,
        "response_tokens_mean": _mean(lengths),
        "response_tokens_max": max(lengths, default=None),
        "staleness_generation_mean": _mean(generation),
        "staleness_generation_max": max(generation, default=None),
        "staleness_use_mean": _mean(use),
        "staleness_use_max": max(use, default=None),
        **_means("rewards", rewards),
        **_means("logged", logged),
    }


def _means(prefix: str, rows: Sequence[Row]) -> Row:
    """`prefix/name` -> mean over the rows that have a number under `name`."""
    names = sorted({name for row in rows for name in row})
    return {f"{prefix}/{n}": _mean([v for row in rows if (v := row.get(n)) is not None]) for n in names}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
