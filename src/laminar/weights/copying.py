"""Copies of tensors into and out of weight files, with the digest taken on the way.

A digest after the copy reads everything a second time from memory; taken piece by piece it finds the bytes
still in the processor's cache. What is digested is always the *destination*, so that a copy that went wrong
can't have the digest of one that went right.
"""

from __future__ import annotations

import torch
import xxhash

from laminar.weights.digests import PIECE_BYTES, copy_bytes, digest_of


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, shared with it."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def copy_in(tensor: torch.Tensor, target: memoryview, dtype: torch.dtype) -> str:
    """Writes a tensor of any device and dtype into `target` as `dtype`; returns the digest of what was written.

    `target` has exactly the bytes of the tensor in `dtype`.
    """
    if tensor.device.type == "cpu" and tensor.dtype == dtype:
        return copy_bytes(bytes_of(tensor), target)
    digest = xxhash.xxh3_128()
    if tensor.numel():
        pieces = torch.frombuffer(target, dtype=dtype).split(PIECE_BYTES // dtype.itemsize)
        start = 0
        for piece, values in zip(pieces, _pieces(tensor, dtype), strict=True):
            piece.copy_(values)
            digest.update(target[start : start + PIECE_BYTES])
            start += PIECE_BYTES
    return digest.hexdigest()


def digest_as(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """The digest that `copy_in` would return, without writing anything."""
    if tensor.device.type == "cpu" and tensor.dtype == dtype:
        return digest_of(bytes_of(tensor))
    digest = xxhash.xxh3_128()
    staging = torch.empty(PIECE_BYTES // dtype.itemsize, dtype=dtype)
    staged = bytes_of(staging)
    for values in _pieces(tensor, dtype):
        staging[: len(values)].copy_(values)
        digest.update(staged[: len(values) * dtype.itemsize])
    return digest.hexdigest()


def copy_out(source: memoryview, tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """Fills a tensor of any device, dtype and strides with the bytes of a `dtype` tensor; returns their digest.

    Where the destination has the same bytes (CPU, `dtype`, contiguous) they are digested there.
    """
    if tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous():
        return copy_bytes(source, bytes_of(tensor))
    staging = bytearray(source)
    if staging:
        tensor.detach().copy_(torch.frombuffer(staging, dtype=dtype).view(tensor.shape))
    return digest_of(memoryview(staging))


def _pieces(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Runs of elements, [<= PIECE_BYTES / itemsize of `dtype`] each; one empty run of an empty tensor."""
    pieces: tuple[torch.Tensor, ...] = tensor.detach().reshape(-1).split(PIECE_BYTES // dtype.itemsize)
    return pieces
