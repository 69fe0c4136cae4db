"""KV cache in blocks of a fixed number of tokens, and attention over it.

A sequence's tokens 0..63 lie in a row of level 0, tokens 64..127 in a row of level 1, and so on. The rows of a
level are kept without holes (the last row moves into a freed one), so one batched matmul reads a level in
place, only sequences that reach a level take part in it, and no shape of the arithmetic depends on how long
a sequence is. That is what makes its bits independent of its neighbours and of prefill or decode.

Shapes: L layers, C rows of a level, N new tokens, S sequences of a step, T new tokens of the longest,
H query heads, G query heads a KV head, K KV heads, D head size, B block length, R = T * G query rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional as F

from laminar.rollout.kernels import MIN_QUERY_ROWS, batched_matmul

BLOCK = 64
_FIRST_CAPACITY = 4


@dataclass(eq=False, slots=True)
class KvSequence:
    """Tokens of one sequence in the cache."""

    length: int = 0
    rows: list[int] = field(default_factory=list)
    """Its row at each level that it reaches."""


@dataclass(slots=True)
class _Level:
    members: list[KvSequence]
    """Owner of each row."""
    keys: torch.Tensor
    """[L, C, K, D, B]: transposed, as the product with queries wants it."""
    values: torch.Tensor
    """[L, C, K, B, D]"""


@dataclass(frozen=True, slots=True)
class _Write:
    level: int
    tokens: torch.Tensor | None
    """Which of the N tokens; None = all."""
    rows: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Read:
    level: int
    rows: slice | torch.Tensor
    queries: torch.Tensor | None
    """Which of the S sequences each row belongs to; None = all in order."""
    hidden: torch.Tensor | None
    """bool [rows, 1, R, B]: keys that a query may not see; None = it sees all."""


@dataclass(frozen=True, slots=True)
class Step:
    """Where the new tokens of one forward pass go, and what they look at. The same for every layer."""

    num_sequences: int
    num_queries: int
    """T"""
    places: torch.Tensor | None
    """int64 [N]: place of each token in the padded [S * T]; None when every sequence has T tokens."""
    positions: torch.Tensor
    """int64 [N]"""
    longest: int
    """Largest position + 1."""
    last: torch.Tensor
    """int64 [S]: index of each sequence's last token among the N."""
    writes: list[_Write]
    reads: list[_Read]


class KvCache:
    """KV of all running sequences. Memory follows the tokens held, in whole blocks."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, num_groups: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        """num_groups: query heads a KV head (G)."""
        self._shape = (num_layers, num_kv_heads, head_dim)
        self._num_groups = num_groups
        self._dtype, self._device = dtype, device
        self._levels: list[_Level] = []

    def free(self, sequence: KvSequence) -> None:
        """Give back all blocks of a sequence."""
        for depth, row in enumerate(sequence.rows):
            level = self._levels[depth]
            last = level.members.pop()
            if last is not sequence:
                level.members[row] = last
                last.rows[depth] = row
                level.keys[:, row] = level.keys[:, len(level.members)]
                level.values[:, row] = level.values[:, len(level.members)]
        sequence.rows.clear()
        sequence.length = 0

    def fork(self, source: KvSequence) -> KvSequence:
        """A new sequence with a copy of the tokens of another."""
        copy = KvSequence()
        self._reserve(copy, source.length)
        for level, old, new in zip(self._levels, source.rows, copy.rows, strict=False):
            level.keys[:, new] = level.keys[:, old]
            level.values[:, new] = level.values[:, old]
        copy.length = source.length
        return copy

    def advance(self, sequences: Sequence[KvSequence], counts: Sequence[int]) -> Step:
        """Make room for `counts[i]` >= 1 new tokens of each sequence and plan the pass that fills it."""
        starts = [sequence.length for sequence in sequences]
        for sequence, count in zip(sequences, counts, strict=True):
            self._reserve(sequence, sequence.length + count)
            sequence.length += count
        num_queries = max(counts)
        owners = np.repeat(np.arange(len(sequences)), counts)
        ends = np.cumsum(counts)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        positions = within + np.repeat(starts, counts)
        padded = None if min(counts) == num_queries else self._tensor(owners * num_queries + within)
        return Step(
            num_sequences=len(sequences),
            num_queries=num_queries,
            places=padded,
            positions=self._tensor(positions),
            longest=int(positions.max()) + 1,
            last=self._tensor(ends - 1),
            writes=self._plan_writes(sequences, owners, positions),
            reads=self._plan_reads(sequences, np.array(starts), num_queries),
        )

    def attend(self, step: Step, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store the new keys and values, and attend.

        Args:
            q: [N, K, G, D], already scaled. k, v: [N, K, D].

        Returns:
            [N, H * D]
        """
        for write in step.writes:
            level = self._levels[write.level]
            chosen_k, chosen_v = (k, v) if write.tokens is None else (k[write.tokens], v[write.tokens])
            level.keys[layer][write.rows, :, :, write.offsets] = chosen_k
            level.values[layer][write.rows, :, write.offsets] = chosen_v
        queries = self._pad(step, q)
        out = self._attention(step, layer, queries)
        return self._unpad(step, out)

    # ------------------------------------------------------------ layout

    def _pad(self, step: Step, q: torch.Tensor) -> torch.Tensor:
        """[N, K, G, D] -> [S, K, R, D] with at least `MIN_QUERY_ROWS` rows."""
        num_kv_heads, head_dim = q.shape[1], q.shape[3]
        if step.places is not None:
            dense = q.new_zeros((step.num_sequences * step.num_queries, *q.shape[1:]))
            dense[step.places] = q
            q = dense
        q = q.view(step.num_sequences, step.num_queries, num_kv_heads, self._num_groups, head_dim)
        rows = step.num_queries * self._num_groups
        q = q.transpose(1, 2).reshape(step.num_sequences, num_kv_heads, rows, head_dim)
        return F.pad(q, (0, 0, 0, MIN_QUERY_ROWS - rows)) if rows < MIN_QUERY_ROWS else q

    def _unpad(self, step: Step, out: torch.Tensor) -> torch.Tensor:
        """[S, K, R, D] -> [N, H * D]"""
        num_sequences, num_kv_heads, _, head_dim = out.shape
        out = out.view(num_sequences, num_kv_heads, step.num_queries, self._num_groups, head_dim)
        flat = out.transpose(1, 2).reshape(num_sequences * step.num_queries, -1)
        return flat if step.places is None else flat.index_select(0, step.places)

    # ------------------------------------------------------------ attention

    def _attention(self, step: Step, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Softmax attention with the sums taken block by block, in order: [S, K, >= R, D] -> [S, K, R, D]."""
        scores = [self._scores(read, layer, q) for read in step.reads]
        rows = step.num_queries * self._num_groups
        peak, total, out = (q.new_zeros((*q.shape[:2], rows, n), dtype=torch.float32) for n in (1, 1, q.shape[3]))
        peak.fill_(-torch.inf)
        for read, score in zip(step.reads, scores, strict=True):
            highest = score[:, :, :rows].amax(-1, keepdim=True)
            if read.queries is None:
                peak = torch.maximum(peak, highest)
            else:
                peak[read.queries] = torch.maximum(peak[read.queries], highest)
        for read, score in zip(step.reads, scores, strict=True):
            weights = score[:, :, :rows]  # the rows beyond are padding: zeros, and they stay zeros
            weights.sub_(peak if read.queries is None else peak[read.queries]).exp_()
            part = self._weighted_values(read, layer, score.to(q.dtype))[:, :, :rows]
            if read.queries is None:
                total += weights.sum(-1, keepdim=True)
                out += part
            else:
                total.index_add_(0, read.queries, weights.sum(-1, keepdim=True))
                out.index_add_(0, read.queries, part.float())
        return out.div_(total).to(q.dtype)

    def _scores(self, read: _Read, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Float32 [rows, K, >= R, B]"""
        q = q if read.queries is None else q.index_select(0, read.queries)
        keys = self._levels[read.level].keys[layer][read.rows]
        scores = batched_matmul(q.flatten(0, 1), keys.flatten(0, 1)).float().view(*q.shape[:3], BLOCK)
        if read.hidden is not None:
            scores[:, :, : read.hidden.shape[2]].masked_fill_(read.hidden, -torch.inf)
        return scores

    def _weighted_values(self, read: _Read, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """[rows, K, >= R, D]"""
        values = self._levels[read.level].values[layer][read.rows]
        return batched_matmul(weights.flatten(0, 1), values.flatten(0, 1)).view(*weights.shape[:3], -1)

    # ------------------------------------------------------------ rows

    def _reserve(self, sequence: KvSequence, length: int) -> None:
        """Give a sequence a row at each level that `length` tokens reach."""
        for depth in range(len(sequence.rows), -(-length // BLOCK)):
            if depth == len(self._levels):
                self._levels.append(_Level([], *self._blocks(_FIRST_CAPACITY)))
            level = self._levels[depth]
            row, capacity = len(level.members), level.keys.shape[1]
            if row == capacity:
                keys, values = self._blocks(2 * capacity)
                keys[:, :capacity], values[:, :capacity] = level.keys, level.values
                level.keys, level.values = keys, values
            level.members.append(sequence)
            sequence.rows.append(row)

    def _blocks(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros, not garbage: a key that is hidden still meets its value, with weight 0."""
        layers, heads, size = self._shape
        keys = torch.zeros((layers, capacity, heads, size, BLOCK), dtype=self._dtype, device=self._device)
        return keys, torch.zeros((layers, capacity, heads, BLOCK, size), dtype=self._dtype, device=self._device)

    def _plan_writes(self, sequences: Sequence[KvSequence], owners: np.ndarray, positions: np.ndarray) -> list[_Write]:
        depths = positions // BLOCK
        writes = []
        for depth in np.unique(depths):
            chosen = np.flatnonzero(depths == depth)
            rows = np.array([sequences[owner].rows[depth] for owner in owners[chosen]])
            tokens = None if len(chosen) == len(positions) else self._tensor(chosen)
            writes.append(_Write(int(depth), tokens, self._tensor(rows), self._tensor(positions[chosen] % BLOCK)))
        return writes

    def _plan_reads(self, sequences: Sequence[KvSequence], starts: np.ndarray, num_queries: int) -> list[_Read]:
        reads = []
        for depth in range(max(len(sequence.rows) for sequence in sequences)):
            pairs = sorted((s.rows[depth], i) for i, s in enumerate(sequences) if len(s.rows) > depth)
            rows, queries = np.array([row for row, _ in pairs]), np.array([i for _, i in pairs])
            together = rows[-1] - rows[0] + 1 == len(rows)
            in_order = len(queries) == len(sequences) and bool((np.diff(queries) > 0).all())
            reads.append(
                _Read(
                    depth,
                    slice(int(rows[0]), int(rows[-1]) + 1) if together else self._tensor(rows),
                    None if in_order else self._tensor(queries),
                    self._hidden(depth, starts[queries], num_queries),
                )
            )
        return reads

    def _hidden(self, depth: int, starts: np.ndarray, num_queries: int) -> torch.Tensor | None:
        """Causal mask of one level for sequences whose new tokens begin at `starts`."""
        first_key = depth * BLOCK
        if starts.min() >= first_key + BLOCK - 1:
            return None
        positions = starts[:, None] + np.repeat(np.arange(num_queries), self._num_groups)
        return self._tensor(np.arange(first_key, first_key + BLOCK) > positions[:, None, :, None])

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
