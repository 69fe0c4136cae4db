"""Arithmetic of the fast path, written so that a row's bits do not depend on the other rows.

What that takes on CPU was measured, and holds for fp32 and bf16: oneDNN-prepacked linear layers give a row
the same bits for any number of rows >= 2; batched matmul does so for any number >= 2 of matrices with >= 4
rows each, if the other sizes are fixed; elementwise kernels do so if no row reaches into the scalar tail of the
tensor, that is if the last dimension is whole SIMD vectors, or is walked by itself because it is strided.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from laminar.rollout.native import Native

MIN_LINEAR_ROWS = 2
MIN_QUERY_ROWS = 4
_COLUMNS = 64
"""Output columns are padded to a multiple of this, so that rows of the result are strided or whole vectors."""


class Linear:
    """y = x W^T + b with the weight laid out for the device; made anew after each load of weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out, in], bias [out]."""
        self._out_features = weight.shape[0]
        self._prepacked = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        if not self._prepacked:
            self._weight, self._bias = weight, bias
            return
        missing = -self._out_features % _COLUMNS
        if missing:
            weight = F.pad(weight, (0, 0, 0, missing))
            bias = None if bias is None else F.pad(bias, (0, missing))
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]"""
        if not self._prepacked:
            return F.linear(x, self._weight, self._bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y if y.shape[-1] == self._out_features else y[..., : self._out_features]


Norm = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""(hidden [N, M], what to add to it or None) -> (their sum, its norm). May write the sum into `hidden`."""


def batched_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n, r, i] x [n, i, j] -> [n, r, j], for r >= `MIN_QUERY_ROWS`."""
    if len(a) > 1:
        return torch.bmm(a, b)
    return torch.bmm(torch.cat((a, a)), torch.cat((b, b)))[:1]  # a lone bf16 matrix takes another path


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, statistics in float32."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class RmsNorm:
    """A `Norm` with root-mean-square statistics."""

    def __init__(self, weight: torch.Tensor, eps: float, native: Native | None) -> None:
        self._weight, self._eps, self._native = weight, eps, native

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if self._native is not None:
            return hidden, self._native.rms_norm(hidden, delta, self._weight, self._eps)
        hidden = hidden if delta is None else hidden + delta
        return hidden, rms_norm(hidden, self._weight, self._eps)


class LayerNorm:
    """A `Norm` with mean and variance."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden if delta is None else hidden + delta
        return hidden, F.layer_norm(hidden, self._weight.shape, self._weight, self._bias, self._eps)


class Rotary:
    """Rotary position embedding in the half-split layout, from a table that grows in fixed pieces."""

    _PIECE = 1024

    def __init__(self, inverse_frequencies: torch.Tensor, scaling: float, dtype: torch.dtype) -> None:
        """inverse_frequencies: float32 [D/2]. dtype: what the table is rounded to, as transformers does."""
        self._frequencies, self._scaling, self._dtype = inverse_frequencies, scaling, dtype
        self._cos = self._sin = inverse_frequencies.new_empty((0, 2 * len(inverse_frequencies)))

    def whole(self, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, signed sin) float32 [P, D], P >= `longest` positions. Never written to again."""
        while len(self._cos) < longest:
            self._grow()
        return self._cos, self._sin

    def tables(self, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, signed sin) [N, 1, D] for int64 positions [N], all < `longest`."""
        cos, sin = (table.index_select(0, positions)[:, None] for table in self.whole(longest))
        return cos.to(self._dtype), sin.to(self._dtype)

    def _grow(self) -> None:
        start = len(self._cos)
        steps = torch.arange(start, start + self._PIECE, device=self._frequencies.device, dtype=torch.float32)
        angles = steps[:, None] * self._frequencies
        cos, sin = ((part * self._scaling).to(self._dtype).float() for part in (angles.cos(), angles.sin()))
        self._cos = torch.cat((self._cos, torch.cat((cos, cos), -1)))
        self._sin = torch.cat((self._sin, torch.cat((-sin, sin), -1)))


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Apply `Rotary.tables` to x [N, H, D]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * signed_sin
