"""A cut as flat arrays, read from the database in the canonical order (group, index)."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from laminar.control.accounts import Cut
from laminar.errors import ProtocolError
from laminar.types import Batch, BatchChunk, Version


def read_batch(db: sqlite3.Connection, cut: Cut) -> Batch:
    """All scored members of the groups of a cut. An empty cut gives an empty batch.

    Raises ProtocolError if the rows have been freed.
    """
    ids: list[tuple[int, int, int]] = []
    versions: list[Version] = []
    prompts: list[bytes] = []
    rewards: list[float] = []
    truncated: list[bool] = []
    chunks: list[tuple[BatchChunk, ...]] = []
    tokens: list[bytes] = []
    logprobs: list[bytes] = []
    masks: list[bytes] = []
    response_lengths: list[int] = []
    for group_id in sorted(cut.groups):
        (prompt,) = db.execute("SELECT prompt FROM groups WHERE id = ?", (group_id,)).fetchone()
        if prompt is None:
            raise ProtocolError(f"batch {cut.update} was asked for after a checkpoint that holds it was reported")
        members = db.execute(
            "SELECT idx, attempt, lineage, version, length, finish_reason, reward FROM samples "
            "WHERE group_id = ? AND state IN ('scored', 'trained') ORDER BY idx",
            (group_id,),
        ).fetchall()
        for idx, attempt, lineage, number, length, finish_reason, reward in members:
            runs = db.execute(
                "SELECT lineage, version, tokens, logprobs, mask FROM chunks "
                "WHERE group_id = ? AND idx = ? ORDER BY start",
                (group_id, idx),
            ).fetchall()
            ids.append((group_id, idx, attempt))
            versions.append(Version(lineage, number))
            prompts.append(prompt)
            rewards.append(reward)
            truncated.append(finish_reason == "length")
            response_lengths.append(length)
            chunks.append(_runs([(Version(r[0], r[1]), len(r[4])) for r in runs]))
            tokens += [r[2] for r in runs]
            logprobs += [r[3] for r in runs]
            masks += [r[4] for r in runs]
    return Batch(
        update=cut.update,
        part=cut.part,
        num_parts=cut.num_parts,
        ids=tuple(ids),
        versions=tuple(versions),
        prompt_lengths=tuple(len(p) // 4 for p in prompts),
        response_lengths=tuple(response_lengths),
        prompt_tokens=b"".join(prompts),
        response_tokens=b"".join(tokens),
        logprobs=b"".join(logprobs),
        mask=b"".join(masks),
        chunks=tuple(chunks),
        rewards=tuple(rewards),
        truncated=tuple(truncated),
    )


def _runs(lengths: Sequence[tuple[Version, int]]) -> tuple[BatchChunk, ...]:
    """Neighbouring chunks of one version as one."""
    runs: list[BatchChunk] = []
    for version, length in lengths:
        if runs and runs[-1].version == version:
            runs[-1] = BatchChunk(version, runs[-1].length + length)
        else:
            runs.append(BatchChunk(version, length))
    return tuple(runs)
