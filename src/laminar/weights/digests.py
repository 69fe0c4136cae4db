"""Digests of bytes, alone and while copying. Needs no torch: also for processes that have no model."""

from __future__ import annotations

from typing import Final

import xxhash

PIECE_BYTES: Final = 256 * 1024


def digest_of(memory: memoryview) -> str:
    """xxh3 of these bytes, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(memory)


def copy_bytes(source: memoryview, target: memoryview) -> str:
    """Copies, and returns `digest_of` what was written, taken piece by piece from the processor's cache."""
    digest = xxhash.xxh3_128()
    for start in range(0, len(source), PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        piece[:] = source[start : start + PIECE_BYTES]
        digest.update(piece)
    return digest.hexdigest()
