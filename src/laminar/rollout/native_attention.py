"""Attention over the KV cache by the kernels of `native.cpp`: one call a layer, norm and rotation included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from laminar.rollout.attention import HeadNorm, LayerAttention, Step
from laminar.rollout.kernels import Rotary
from laminar.rollout.kv_cache import KvCache, KvSequence
from laminar.rollout.native import Heads, Native, Plan


@dataclass(frozen=True, slots=True)
class NativeStep(Step):
    plan: Plan
    """`keys` and `values` are set for each layer in turn."""
    blocks: tuple[int, int, int]
    """Where the addresses of the first layer's keys by level are, of its values, and bytes from layer to layer."""
    kept: tuple[object, ...]
    """What the plan's addresses point to."""


class NativeAttention:
    """An `Attention` on CPU."""

    def __init__(self, cache: KvCache, num_heads: int, rotary: Rotary | None, native: Native) -> None:
        self._cache, self._num_heads, self._rotary, self._native = cache, num_heads, rotary, native

    def advance(self, sequences: Sequence[KvSequence], counts: Sequence[int]) -> NativeStep:
        starts = np.array([sequence.length for sequence in sequences])
        for sequence, count in zip(sequences, counts, strict=True):
            self._cache.extend(sequence, count)
        new, last = np.array(counts), np.cumsum(counts)
        positions = np.arange(last[-1]) + np.repeat(starts - last + new, new)
        rows = np.array(list(chain.from_iterable(sequence.rows for sequence in sequences)))
        ends = np.cumsum([len(sequence.rows) for sequence in sequences])
        tables = None if self._rotary is None else self._rotary.whole(int(positions.max()) + 1)
        cos, sin = (None, None) if tables is None else (table.data_ptr() for table in tables)
        blocks, arrays = self._blocks(), (starts, new, rows, ends)
        return NativeStep(
            positions=torch.from_numpy(positions),
            last=torch.from_numpy(last - 1),
            plan=Plan(len(sequences), *(array.ctypes.data for array in arrays), None, None, cos, sin),
            blocks=(blocks.ctypes.data, blocks[1].ctypes.data, blocks.strides[1]),
            kept=(*arrays, blocks, tables),
        )

    def layer(self, i: int, scale: float, norm: HeadNorm | None) -> LayerAttention[NativeStep]:
        norms = (0.0, None, None) if norm is None else (norm.eps, norm.query.data_ptr(), norm.key.data_ptr())
        heads = Heads(self._num_heads, self._cache.num_kv_heads, self._cache.head_dim, scale, *norms)

        def attend(step: NativeStep, qkv: torch.Tensor) -> torch.Tensor:
            keys, values, stride = step.blocks
            step.plan.keys, step.plan.values = keys + i * stride, values + i * stride
            return self._native.attend(heads, step.plan, qkv)

        return attend

    def _blocks(self) -> NDArray[np.int64]:
        """[2, L, levels]: addresses of keys, and of values."""
        layers = np.arange(self._cache.num_layers)[:, None]
        levels = [(level.keys, level.values) for level in self._cache.levels]
        return np.stack(
            [
                np.array([tensor.data_ptr() for tensor in kind])
                + layers * np.array([tensor.stride(0) * tensor.element_size() for tensor in kind])
                for kind in zip(*levels, strict=True)
            ]
        )
