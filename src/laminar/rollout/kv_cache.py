"""KV cache in blocks of a fixed number of tokens.

A sequence's tokens 0..63 lie in a row of level 0, tokens 64..127 in a row of level 1, and so on. The rows of a
level are kept without holes (the last row moves into a freed one), so that a level can be read in place, and no
shape of the arithmetic on a block depends on how long a sequence is.

Shapes: L layers, C rows of a level, K KV heads, D head size, B block length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

BLOCK = 64
_FIRST_CAPACITY = 4


@dataclass(eq=False, slots=True)
class KvSequence:
    """Tokens of one sequence in the cache."""

    length: int = 0
    rows: list[int] = field(default_factory=list)
    """Its row at each level that it reaches."""


@dataclass(slots=True)
class Level:
    members: list[KvSequence]
    """Owner of each row."""
    keys: torch.Tensor
    """[L, C, K, D, B]: transposed, as the product with queries wants it."""
    values: torch.Tensor
    """[L, C, K, B, D]"""


class KvCache:
    """KV of all running sequences. Memory follows the tokens held, in whole blocks."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.dtype, self.device = dtype, device
        self.levels: list[Level] = []

    def free(self, sequence: KvSequence) -> None:
        """Give back all blocks of a sequence."""
        for depth, row in enumerate(sequence.rows):
            level = self.levels[depth]
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
        self.extend(copy, source.length)
        for level, old, new in zip(self.levels, source.rows, copy.rows, strict=False):
            level.keys[:, new] = level.keys[:, old]
            level.values[:, new] = level.values[:, old]
        return copy

    def extend(self, sequence: KvSequence, count: int) -> None:
        """Make a sequence `count` tokens longer: it gets a row at each level that they reach."""
        sequence.length += count
        for depth in range(len(sequence.rows), -(-sequence.length // BLOCK)):
            if depth == len(self.levels):
                self.levels.append(Level([], *self._blocks(_FIRST_CAPACITY)))
            level = self.levels[depth]
            row, capacity = len(level.members), level.keys.shape[1]
            if row == capacity:
                keys, values = self._blocks(2 * capacity)
                keys[:, :capacity], values[:, :capacity] = level.keys, level.values
                level.keys, level.values = keys, values
            level.members.append(sequence)
            sequence.rows.append(row)

    def _blocks(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros, not garbage: a key that is hidden still meets its value, with weight 0."""
        layers, heads, size = self.num_layers, self.num_kv_heads, self.head_dim
        keys = torch.zeros((layers, capacity, heads, size, BLOCK), dtype=self.dtype, device=self.device)
        return keys, torch.zeros((layers, capacity, heads, BLOCK, size), dtype=self.dtype, device=self.device)
