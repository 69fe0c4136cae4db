"""Keyed sampling: which token is drawn depends on the row's logits and its key, and on nothing else.

Shapes: B rows of the batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from laminar.rollout.native import Native
from laminar.types import Sampling

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BUCKET = 128
"""Probabilities are summed in buckets of this many tokens; a multiple of every SIMD width."""


def keyed_uniform(
    seed: int, group: ArrayLike, index: ArrayLike, attempt: ArrayLike, position: ArrayLike
) -> NDArray[np.float64]:
    """One number in [0, 1) for each key, the same on every machine: five rounds of the splitmix64 finaliser.

    Args:
        seed: of the run.
        group, index, attempt: of the sample; integers or arrays that broadcast.
        position: of the token in the response, from 0.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    keys = np.broadcast_arrays(*(np.asarray(key, dtype=np.int64) for key in (seed, group, index, attempt, position)))
    with np.errstate(over="ignore"):
        state = np.zeros(keys[0].shape, dtype=np.uint64)
        for key in keys:
            state = _mix(state + key.astype(np.uint64) + _GOLDEN_GAMMA)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample(
    logits: torch.Tensor, uniforms: ArrayLike, sampling: Sequence[Sampling], native: Native | None = None
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Draw one token a row by inverse CDF.

    Args:
        logits: fp32 or bf16 [B, V].
        uniforms: float64 [B] in [0, 1).
        sampling: [B] parameters of each row. Temperature 0 takes the most likely token. `top_k`, then
            `top_p` narrow what may be drawn.
        native: kernels for the rows that are not narrowed. Which way a row takes is its own affair.

    Returns:
        tokens int32 [B], and their log-probs float32 [B] under the *full* softmax at the row's temperature
        (at temperature 1 for greedy rows).
    """
    drawn = np.asarray(uniforms, dtype=np.float64)
    if native is None:
        return _sample(logits.float(), drawn, sampling)
    narrowed = [i for i, row in enumerate(sampling) if _is_narrowed(row)]
    tokens, logprobs = native.draw(logits, np.array([row.temperature for row in sampling], dtype=np.float32), drawn)
    if narrowed:
        rows = [sampling[i] for i in narrowed]
        tokens[narrowed], logprobs[narrowed] = _sample(logits[narrowed].float(), drawn[narrowed], rows)
    return tokens, logprobs


def _is_narrowed(row: Sampling) -> bool:
    return row.temperature > 0 and (row.top_p < 1 or row.top_k > 0)


def _sample(
    logits: torch.Tensor, uniforms: NDArray[np.float64], sampling: Sequence[Sampling]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """`sample` with torch, for fp32 logits."""
    scaled = _scale(logits, [row.temperature or 1.0 for row in sampling])
    peak = scaled.amax(-1, keepdim=True)
    weights = (scaled - peak).exp_()
    totals = _bucket_sums(weights).sum(-1)
    for i, row in enumerate(sampling):
        if _is_narrowed(row):
            _narrow(weights[i], row)
    tokens = _draw(weights, torch.as_tensor(uniforms, device=logits.device))
    greedy = [i for i, row in enumerate(sampling) if row.temperature == 0]
    if greedy:
        tokens[greedy] = logits[greedy].argmax(-1)
    shifted = scaled.gather(1, tokens[:, None]).double() - peak.double()
    # The logarithm is taken number by number: vectorised ones round the last few of a batch differently.
    logprobs = [value - math.log(total) for value, total in zip(shifted[:, 0].tolist(), totals.tolist(), strict=True)]
    return tokens.cpu().numpy().astype(np.int32), np.array(logprobs, dtype=np.float32)


def _scale(logits: torch.Tensor, temperatures: list[float]) -> torch.Tensor:
    """logits / temperature, padded with -inf to whole buckets: [B, V'].

    Elementwise kernels treat the end of a tensor apart; with whole buckets no row ever lies there.
    """
    num_rows, vocab_size = logits.shape
    padded = -(-vocab_size // _BUCKET) * _BUCKET
    scaled = logits
    if padded != vocab_size:
        scaled = logits.new_full((num_rows, padded), -math.inf)
        scaled[:, :vocab_size] = logits
    if any(temperature != 1.0 for temperature in temperatures):
        scaled = scaled / torch.tensor(temperatures, dtype=scaled.dtype, device=scaled.device)[:, None]
    return scaled


def _bucket_sums(weights: torch.Tensor) -> torch.Tensor:
    """Float64 [B, V' / bucket]."""
    return weights.view(weights.shape[0], -1, _BUCKET).sum(-1).double()


def _narrow(weights: torch.Tensor, row: Sampling) -> None:
    """Set the weights [V'] that `top_k` and `top_p` cut off to 0."""
    ordered, order = weights.sort(descending=True, stable=True)
    if row.top_k > 0:
        weights[order[row.top_k :]] = 0
        ordered[row.top_k :] = 0
    if row.top_p < 1:
        mass = ordered.double().cumsum(0)
        before = mass - ordered.double()
        weights[order[before >= row.top_p * mass[-1]]] = 0


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse CDF in two stages, bucket then token, in float64: int64 [B]."""
    edges = _bucket_sums(weights).cumsum(-1)
    total = edges[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    bucket = (edges <= target).sum(-1, keepdim=True)
    below = torch.where(bucket > 0, edges.gather(1, (bucket - 1).clamp(min=0)), 0.0)
    inside = weights.view(weights.shape[0], -1, _BUCKET)[torch.arange(len(weights)), bucket[:, 0]].double()
    offset = (below + inside.cumsum(-1) <= target).sum(-1)
    # Rounding may leave the target past the last token with any weight: that token is drawn then.
    places = torch.arange(_BUCKET, device=weights.device)
    last = torch.where(inside > 0, places, 0).amax(-1)
    return bucket[:, 0] * _BUCKET + torch.minimum(offset, last)
