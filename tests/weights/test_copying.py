from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from laminar.weights.copying import PIECE_BYTES, bytes_of, copy_in, copy_out, digest_as

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Lengths around the edges of a piece, in elements of 2 and 4 bytes.
LENGTHS = [0, 1, 7, PIECE_BYTES // 4 - 1, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, PIECE_BYTES // 2, PIECE_BYTES + 3]


@pytest.mark.parametrize("published", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_in_and_out_move_the_same_bytes_and_agree_on_their_digest(
    length: int, source: torch.dtype, published: torch.dtype
) -> None:
    tensor = torch.randn(length, dtype=torch.float64).to(source).requires_grad_()
    expected = tensor.detach().to(published)
    slot = memoryview(bytearray(length * published.itemsize))

    digest = copy_in(tensor, slot, published)
    assert bytes(slot) == bytes(bytes_of(expected))
    assert digest == xxhash.xxh3_128_hexdigest(slot) == digest_as(tensor, published)

    for dtype in DTYPES:
        arrived = torch.empty(length, dtype=dtype)
        assert copy_out(slot.toreadonly(), arrived, published) == digest
        assert torch.equal(arrived, expected.to(dtype))


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.sampled_from(DTYPES), st.booleans())
def test_strides_do_not_matter(shape: list[int], dtype: torch.dtype, is_parameter: bool) -> None:
    tensor = torch.randn(shape).to(dtype).transpose(0, 1)
    slot = memoryview(bytearray(tensor.numel() * 4))
    digest = copy_in(tensor, slot, torch.float32)
    arrived = torch.empty(shape).transpose(0, 1)
    if is_parameter:
        arrived = torch.nn.Parameter(arrived)
    assert copy_out(slot, arrived, torch.float32) == digest
    assert torch.equal(arrived, tensor.to(torch.float32))


def test_bytes_are_shared_with_the_tensor() -> None:
    tensor = torch.zeros(2, 2)
    bytes_of(tensor)[:] = torch.ones(4).numpy().tobytes()
    assert tensor.tolist() == [[1, 1], [1, 1]]
