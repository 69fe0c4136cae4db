"""Drives a data store by hand: what replicas, scorer and trainer would say, one call at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from laminar.control.commands import Command, Issue, Numbered
from laminar.data.prompts import Drawn
from laminar.data.samplers import fifo
from laminar.data.store import DataStore
from laminar.types import (
    Batch,
    Chunk,
    Finish,
    GroupScore,
    MemberScore,
    ReplicaReply,
    ReplicaReport,
    SampleId,
    ScoreReport,
    Settings,
    Trained,
    Version,
    Work,
)

V0 = Version(0, 0)


@dataclass
class Prompts:
    """A prompt pool: prompt n is the tokens [n, n + 1]."""

    rows: int = 8
    epochs: int | None = None
    overlong: Collection[int] = ()

    def __len__(self) -> int:
        return self.rows

    def exhausted(self, cursor: int) -> bool:
        return self.epochs is not None and cursor >= self.epochs * self.rows

    def draw(self, cursor: int) -> Drawn:
        epoch, row = divmod(cursor, self.rows)
        return self.take(row, epoch)

    def take(self, row: int, epoch: int = 0) -> Drawn:
        ids = None if row in self.overlong else np.array([row, row + 1], np.int32)
        return Drawn(row, epoch, {"prompt": row}, json.dumps({"prompt": row}), ids)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def open_store(
    folder: Path,
    settings: Settings,
    prompts: Prompts | None = None,
    evaluation: Prompts | None = None,
    anew: bool = True,
) -> DataStore:
    return DataStore(folder, settings, prompts or Prompts(), evaluation, fifo, Clock(), anew)  # type: ignore[arg-type]


def tokens_of(work: Work, length: int, start: int = 0) -> np.ndarray:
    """Response tokens that say whose they are: [length] int32."""
    return np.arange(start, start + length, dtype=np.int32) + 1000 * work.owner_epoch + 10 * work.sample.index


def chunk(work: Work, length: int, start: int = 0) -> Chunk:
    tokens = tokens_of(work, length, start)
    logprobs, mask = -np.ones(length, np.float32), np.ones(length, np.uint8)
    return Chunk(
        work.sample, work.owner_epoch, start, work.version, tokens.tobytes(), logprobs.tobytes(), mask.tobytes()
    )


def apply(store: DataStore, commands: Sequence[Command]) -> None:
    """The manager of this term has these commands for the store."""
    last = store.acked.number
    store.obey([Numbered(store.term, last + i, command) for i, command in enumerate(commands, start=1)])


@dataclass
class Hand:
    """One replica, the scorer and the trainer of a store."""

    store: DataStore
    replica: str = "r0"
    incarnation: int = 1
    sequence: int = 0
    cancelled: list[tuple[object, int]] = field(default_factory=list)

    def issue(self, groups: int, version: Version = V0, kind: str = "train") -> list[Work]:
        """New groups for this replica, and the work that comes of it."""
        apply(self.store, [Issue(self.replica, self.incarnation, version, groups, kind, "")])
        return self.take()

    def take(self) -> list[Work]:
        work = list(self.exchange().work)
        self.exchange(accepted=tuple((w.sample, w.owner_epoch) for w in work))
        return work

    def exchange(self, **parts: object) -> ReplicaReply:
        self.sequence += 1
        reply = self.store.exchange(ReplicaReport(self.replica, self.incarnation, self.sequence, **parts))  # type: ignore[arg-type]
        self.cancelled += reply.cancel
        return reply

    def finish(self, work: Sequence[Work], length: int = 3) -> None:
        ends = tuple(Finish(w.sample, w.owner_epoch, length, "stop") for w in work)
        self.exchange(chunks=tuple(chunk(w, length) for w in work), finished=ends)

    def score(self, reward: Callable[[int, int], float | None] = lambda group, index: float(index)) -> list[int]:
        """Score everything that is finished. Returns the groups."""
        groups = self.store.exchange_scores(ScoreReport(1, want=1000))
        scores = tuple(
            GroupScore(
                g.group,
                tuple(
                    MemberScore(
                        m.index, m.attempt, reward(g.group, m.index), {"score": reward(g.group, m.index)}, "text"
                    )
                    for m in g.members
                ),
                "prompt text",
            )
            for g in groups
        )
        self.store.exchange_scores(ScoreReport(1, scores))
        return [g.group for g in groups]

    def make(self, groups: int, version: Version = V0) -> None:
        """Groups from draw to buffer."""
        self.finish(self.issue(groups, version))
        self.score()

    def train(self, update: int, checkpoint: int = 0) -> Batch:
        batch = self.store.next_batch(update)
        assert batch is not None
        self.store.trained(Trained(update, Version(0, update + 1), checkpoint, {"loss": 0.5}))
        return batch


def stored(store: DataStore, sample: SampleId) -> np.ndarray:
    """Response tokens in the database: [R] int32."""
    rows = store.db.execute("SELECT tokens FROM chunks WHERE group_id = ? AND idx = ? ORDER BY start", sample)
    return np.frombuffer(b"".join(row[0] for row in rows), np.int32)


def states(store: DataStore, kind: str = "train") -> dict[int, str]:
    """State of each group."""
    return dict(store.db.execute("SELECT id, state FROM groups WHERE kind = ? ORDER BY id", (kind,)))


def reasons(store: DataStore) -> Counter[str]:
    """Dropped samples by reason."""
    return Counter(r for (r,) in store.db.execute("SELECT reason FROM samples WHERE state = 'dropped'"))
