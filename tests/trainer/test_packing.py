"""Orders and layouts: nothing is lost, and everything is a function of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.errors import ProtocolError
from laminar.trainer.packing import (
    SHARED_ROW_TOKENS,
    Lines,
    Samples,
    generated_by,
    make_layout,
    make_rows,
    micro_batches,
    mini_batches,
    row_length,
    unpack,
)
from laminar.types import Batch, BatchChunk, Version

sizes = st.lists(st.integers(1, 4), max_size=12)


@given(sizes=sizes, num=st.integers(1, 5), seed=st.integers(0, 3), update=st.integers(0, 3))
def test_mini_batches_split_whole_groups_evenly(sizes: list[int], num: int, seed: int, update: int) -> None:
    groups = np.repeat(np.arange(len(sizes)) * 3, sizes)
    parts = mini_batches(groups, num, seed, update)
    assert sorted(i for part in parts for i in part) == list(range(len(groups)))
    assert len(parts) == min(num, len(sizes))
    counts = [len(set(groups[part])) for part in parts]
    assert sum(counts) == len(sizes)
    assert max(counts, default=0) - min(counts, default=0) <= 1
    assert parts == mini_batches(groups, num, seed, update)


def test_the_order_of_groups_depends_on_seed_and_update() -> None:
    groups = np.repeat(np.arange(16), 2)
    orders = {tuple(mini_batches(groups, 1, seed, update)[0]) for seed in range(3) for update in range(3)}
    assert len(orders) == 9


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120), st.booleans())
def test_micro_batches_keep_the_budget(lengths: list[int], budget: int, packed: bool) -> None:
    batches = micro_batches(lengths, budget, packed)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        rows = [lengths[i] for i in batch]
        assert len(batch) == 1 or (sum(rows) if packed else max(rows) * len(rows)) <= budget


@pytest.mark.parametrize(("packed", "expected"), [(True, [[1, 2, 0], [3]]), (False, [[1], [2, 0, 3]])])
def test_packed_rows_fill_a_micro_batch(packed: bool, expected: list[list[int]]) -> None:
    assert micro_batches([3, 8, 4, 3], 15, packed) == expected


def samples_of(prompts: list[list[int]], responses: list[list[int]], groups: list[int]) -> Samples:
    starts = np.cumsum([0, *map(len, responses)])
    total = int(starts[-1])
    return Samples(
        groups=np.array(groups),
        prompts=tuple(np.array(p, dtype=np.int64) for p in prompts),
        responses=tuple(np.array(r, dtype=np.int64) for r in responses),
        starts=starts,
        behaviour=np.zeros(total, dtype=np.float32),
        mask=np.ones(total, dtype=np.bool_),
        rewards=np.zeros(len(groups)),
        truncated=np.zeros(len(groups), dtype=np.bool_),
    )


def test_a_packed_layout_of_a_shared_and_a_plain_row() -> None:
    samples = samples_of([[1, 2]] * 2 + [[9]], [[3, 4, 5], [6, 7], [8, 8]], [0, 0, 1])
    rows = make_rows(samples, [0, 1, 2], share_prompts=True)
    assert rows == [(0, 1), (2,)]
    layout = make_layout(samples, rows, packed=True)
    assert layout.input_ids.tolist() == [[1, 2, 3, 4, 6, 9, 8]], "no padding"
    assert layout.positions is not None
    assert layout.positions.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert layout.targets.tolist() == [3, 4, 5, 6, 7, 8, 8]
    assert layout.predictors.tolist() == [1, 2, 3, 1, 4, 5, 6]
    assert layout.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6]
    shared, plain = layout.rows
    assert (shared.start, shared.stop, plain.start, plain.stop, plain.attention) == (0, 5, 5, 7, None)
    assert isinstance(shared.attention, np.ndarray)
    assert shared.attention.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_a_shared_row_of_like_lengths_is_attended_to_as_lines() -> None:
    """Where a mask of all against all would mostly hide."""
    prompt, length = list(range(1, 21)), 41
    samples = samples_of([prompt] * 8, [[50 + i] * length for i in range(8)], [0] * 8)
    (row,) = make_layout(samples, [tuple(range(8))], packed=True).rows
    assert isinstance(row.attention, Lines)
    places, origins = row.attention.places, row.attention.origins
    assert places.tolist() == [[*range(20), *range(20 + 40 * i, 60 + 40 * i)] for i in range(8)]
    assert places.flatten()[origins].tolist() == list(range(20 + 8 * 40)), "each token of the row comes from one place"


def test_a_padded_layout_has_one_sample_a_row() -> None:
    samples = samples_of([[1, 2]] * 2, [[3, 4, 5], [6, 7]], [0, 0])
    rows = make_rows(samples, [0, 1], share_prompts=False)
    assert rows == [(0,), (1,)]
    layout = make_layout(samples, rows, packed=False)
    assert layout.input_ids.tolist() == [[1, 2, 3, 4], [1, 2, 6, 0]]
    assert layout.predictors.tolist() == [1, 2, 3, 5, 6]
    assert layout.targets.tolist() == [3, 4, 5, 6, 7]
    assert (layout.positions, layout.rows) == (None, ())


@pytest.mark.parametrize("other", [([1, 3], 0), ([1, 2], 1)])
def test_only_one_prompt_of_one_group_is_shared(other: tuple[list[int], int]) -> None:
    prompt, group = other
    samples = samples_of([[1, 2], prompt], [[3], [4]], [0, group])
    assert make_rows(samples, [0, 1], share_prompts=True) == [(0,), (1,)]


@given(st.lists(st.integers(0, SHARED_ROW_TOKENS), min_size=1, max_size=6))
def test_rows_hold_each_sample_once_and_stay_short(lengths: list[int]) -> None:
    samples = samples_of([[1, 2]] * len(lengths), [[5] * n for n in lengths], [0] * len(lengths))
    rows = make_rows(samples, range(len(lengths)), share_prompts=True)
    assert [i for row in rows for i in row] == list(range(len(lengths)))
    assert all(len(row) == 1 or row_length(samples, row) <= SHARED_ROW_TOKENS for row in rows)
    layout = make_layout(samples, rows, packed=True)
    assert layout.input_ids.size == sum(row_length(samples, row) for row in rows)
    assert len(layout.targets) == sum(lengths)


def test_unpack_keeps_every_array(make_batch: Callable[..., Batch]) -> None:
    batch = make_batch(groups=(2, 1))
    samples = unpack(batch)
    assert [len(prompt) for prompt in samples.prompts] == list(batch.prompt_lengths)
    assert np.concatenate(samples.responses).astype("<i4").tobytes() == batch.response_tokens
    assert samples.behaviour.tobytes() == batch.logprobs
    assert samples.mask.astype(np.uint8).tobytes() == batch.mask
    assert samples.groups.tolist() == [0, 0, 1]
    assert np.bincount(samples.sequence).tolist() == list(batch.response_lengths)


def test_unpack_of_an_empty_batch(make_batch: Callable[..., Batch]) -> None:
    samples = unpack(make_batch(groups=()))
    assert len(samples.groups) == len(samples.prompts) == len(samples.responses) == len(samples.sequence) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": ((1, 0, 0), (0, 0, 0))}, "not sorted"),
        ({"ids": ((0, 0, 0), (0, 0, 1))}, "not sorted"),
        ({"prompt_lengths": (0, 1)}, "empty prompt"),
        ({"logprobs": b""}, "lengths"),
        ({"prompt_tokens": b""}, "lengths"),
    ],
)
def test_unpack_refuses(make_batch: Callable[..., Batch], change: dict[str, object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        unpack(replace(make_batch(groups=(1, 1)), **change))  # type: ignore[arg-type]


def test_generated_by_looks_at_both_parts_of_the_version_of_each_chunk(make_batch: Callable[..., Batch]) -> None:
    """Invariant 1: under `partial` each chunk has its own version."""
    runs = ((BatchChunk(Version(0, 3), 2), BatchChunk(Version(0, 4), 1)), (BatchChunk(Version(1, 4), 1),))
    batch = replace(make_batch(groups=(2,)), chunks=runs)
    assert generated_by(batch, Version(0, 4)).tolist() == [False, False, True, False]
