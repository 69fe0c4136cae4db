"""Attention over the KV cache, with torch; where the kernels of `native.cpp` run, `native_attention` replaces it.

One batched matmul reads a level of the cache in place, only sequences that reach a level take part in it, and the
softmax is summed block by block, in order. No shape of the arithmetic depends on how long a sequence is, so its bits
are independent of its neighbours and of prefill or decode.

Shapes: N new tokens, S sequences of a step, T new tokens of the longest, H query heads, G query heads a KV head,
K KV heads, D head size, B block length, R = T * G query rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch.nn import functional as F

from laminar.rollout.kernels import MIN_QUERY_ROWS, Rotary, batched_matmul, rms_norm, rotate
from laminar.rollout.kv_cache import BLOCK, KvCache, KvSequence


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Root-mean-square norm over each head."""

    query: torch.Tensor
    """[D]"""
    key: torch.Tensor
    """[D]"""
    eps: float

    def stacked(self, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        """[H + K, D]"""
        return torch.cat((self.query.expand(num_heads, -1), self.key.expand(num_kv_heads, -1)))


@dataclass(frozen=True, slots=True)
class Step:
    """Where the new tokens of one forward pass go, and what they look at. The same for every layer."""

    positions: torch.Tensor
    """int64 [N]"""
    last: torch.Tensor
    """int64 [S]: index of each sequence's last token among the N."""


P = TypeVar("P", bound=Step)
LayerAttention = Callable[[P, torch.Tensor], torch.Tensor]
"""[N, (H + 2K) * D] -> [N, H * D]: keeps keys and values and attends, one layer."""


class Attention(Protocol[P]):
    """Plans a pass over sequences of one cache, and attends."""

    def advance(self, sequences: Sequence[KvSequence], counts: Sequence[int]) -> P:
        """Make room for `counts[i]` >= 1 new tokens of each sequence and plan the pass that fills it."""

    def layer(self, i: int, scale: float, norm: HeadNorm | None) -> LayerAttention[P]:
        """Attention of layer `i`; `scale` is that of the queries."""


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
class TorchStep(Step):
    rotation: tuple[torch.Tensor, torch.Tensor] | None
    """Rotary tables of the tokens."""
    num_sequences: int
    num_queries: int
    """T"""
    places: torch.Tensor | None
    """int64 [N]: place of each token in the padded [S * T]; None when every sequence has T tokens."""
    writes: list[_Write]
    reads: list[_Read]


class TorchAttention:
    """An `Attention`, on any device."""

    def __init__(self, cache: KvCache, num_heads: int, rotary: Rotary | None) -> None:
        self._cache, self._num_heads, self._rotary = cache, num_heads, rotary
        self._num_groups = num_heads // cache.num_kv_heads

    def advance(self, sequences: Sequence[KvSequence], counts: Sequence[int]) -> TorchStep:
        starts = [sequence.length for sequence in sequences]
        for sequence, count in zip(sequences, counts, strict=True):
            self._cache.extend(sequence, count)
        num_queries = max(counts)
        owners = np.repeat(np.arange(len(sequences)), counts)
        ends = np.cumsum(counts)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        positions = within + np.repeat(starts, counts)
        padded = None if min(counts) == num_queries else self._tensor(owners * num_queries + within)
        positions_tensor, longest = self._tensor(positions), int(positions.max()) + 1
        return TorchStep(
            positions=positions_tensor,
            last=self._tensor(ends - 1),
            rotation=None if self._rotary is None else self._rotary.tables(positions_tensor, longest),
            num_sequences=len(sequences),
            num_queries=num_queries,
            places=padded,
            writes=self._plan_writes(sequences, owners, positions),
            reads=self._plan_reads(sequences, np.array(starts), num_queries),
        )

    def layer(self, i: int, scale: float, norm: HeadNorm | None) -> LayerAttention[TorchStep]:
        heads, kv_heads = self._num_heads, self._cache.num_kv_heads
        norm_weight = None if norm is None else norm.stacked(heads, kv_heads)

        def attend(step: TorchStep, qkv: torch.Tensor) -> torch.Tensor:
            parts = qkv.unflatten(-1, (heads + 2 * kv_heads, self._cache.head_dim))
            qk, v = parts[:, :-kv_heads], parts[:, -kv_heads:]
            if norm is not None and norm_weight is not None:
                qk = rms_norm(qk, norm_weight, norm.eps)
            if step.rotation is not None:
                qk = rotate(qk, *step.rotation)
            q = (qk[:, :heads] * scale).unflatten(1, (kv_heads, -1))
            return self._attend(step, i, q, qk[:, heads:], v)

        return attend

    def _attend(self, step: TorchStep, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Scaled q [N, K, G, D], k and v [N, K, D] -> [N, H * D]"""
        for write in step.writes:
            level = self._cache.levels[write.level]
            chosen_k, chosen_v = (k, v) if write.tokens is None else (k[write.tokens], v[write.tokens])
            level.keys[layer][write.rows, :, :, write.offsets] = chosen_k
            level.values[layer][write.rows, :, write.offsets] = chosen_v
        queries = self._pad(step, q)
        out = self._attention(step, layer, queries)
        return self._unpad(step, out)

    # ------------------------------------------------------------ layout

    def _pad(self, step: TorchStep, q: torch.Tensor) -> torch.Tensor:
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

    def _unpad(self, step: TorchStep, out: torch.Tensor) -> torch.Tensor:
        """[S, K, R, D] -> [N, H * D]"""
        num_sequences, num_kv_heads, _, head_dim = out.shape
        out = out.view(num_sequences, num_kv_heads, step.num_queries, self._num_groups, head_dim)
        flat = out.transpose(1, 2).reshape(num_sequences * step.num_queries, -1)
        return flat if step.places is None else flat.index_select(0, step.places)

    # ------------------------------------------------------------ attention

    def _attention(self, step: TorchStep, layer: int, q: torch.Tensor) -> torch.Tensor:
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
        keys = self._cache.levels[read.level].keys[layer][read.rows]
        scores = batched_matmul(q.flatten(0, 1), keys.flatten(0, 1)).float().view(*q.shape[:3], BLOCK)
        if read.hidden is not None:
            scores[:, :, : read.hidden.shape[2]].masked_fill_(read.hidden, -torch.inf)
        return scores

    def _weighted_values(self, read: _Read, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """[rows, K, >= R, D]"""
        values = self._cache.levels[read.level].values[layer][read.rows]
        return batched_matmul(weights.flatten(0, 1), values.flatten(0, 1)).view(*weights.shape[:3], -1)

    # ------------------------------------------------------------ plans

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
        return torch.from_numpy(array).to(self._cache.device)
