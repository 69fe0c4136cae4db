"""The staleness rule: room for one more, and which groups may make up a batch."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.control.staleness import Choice, choose, deadline, room
from tests.control.plans import make_settings


@pytest.mark.parametrize(("version", "k", "due"), [(0, 0, 0), (3, 0, 3), (3, 4, 7), (3, None, None)])
def test_a_deadline_is_version_plus_k(version: int, k: int | None, due: int | None) -> None:
    assert deadline(version, k) == due


@pytest.mark.parametrize(
    ("k", "quota", "iterations", "version", "live", "cut", "expected"),
    [
        (0, 99, None, 0, 0, 0, 4),  # batch 0 has four places
        (0, 99, None, 0, 3, 0, 1),
        (0, 99, None, 0, 4, 0, 0),
        (0, 99, None, 0, 0, 4, 0),  # batch 0 is cut: nothing until version 1
        (0, 99, None, 1, 0, 4, 4),
        (2, 99, None, 0, 0, 0, 12),
        (2, 99, None, 1, 8, 4, 4),
        (2, 5, None, 0, 0, 0, 5),  # the quota is smaller
        (2, 5, None, 0, 6, 0, 0),
        (4, 99, 2, 0, 0, 0, 8),  # the run has two batches
        (4, 99, 2, 1, 3, 4, 1),
        (None, 12, None, 0, 2, 400, 10),
        (None, 12, 3, 0, 1, 8, 3),
        (0, 99, None, 0, 1, 5, 0),  # never below zero
    ],
)
def test_room(
    k: int | None, quota: int, iterations: int | None, version: int, live: int, cut: int, expected: int
) -> None:
    settings = make_settings(max_staleness=k, max_outstanding_groups=quota, iterations=iterations, groups_per_batch=4)
    assert room(settings, version, live, cut) == expected


@pytest.mark.parametrize(
    ("update", "empty", "size", "live", "candidates", "expected"),
    [
        # as the sampler likes it
        (0, 2, 2, {1: 5, 2: 5, 3: 5}, [3, 1, 2], Choice((3, 1))),
        (0, 2, 2, {1: None, 2: None}, [2, 1], Choice((2, 1))),
        # what is due now goes first
        (4, 2, 2, {1: 9, 2: 9, 3: 4}, [1, 2, 3], Choice((1, 3))),
        (4, 2, 2, {1: None, 2: None, 3: 4}, [1, 2, 3], Choice((1, 3))),
        # due later, but together too many for the batches until then
        (4, 2, 2, {1: 9, 2: 9, 3: 5, 4: 5, 5: 5}, [1, 2, 3, 4, 5], Choice((1, 3))),
        (4, 2, 2, {1: 9, 2: 9, 3: 5, 4: 5, 5: 5, 6: 5}, [1, 2, 3, 4, 5, 6], Choice((3, 4))),
        # what must go is not finished: wait for it, whatever else is there
        (4, 2, 2, {1: 9, 2: 9, 3: 4}, [1, 2], Choice(None, (3,), 1)),
        (4, 2, 2, {1: 9, 2: 9, 3: 4, 7: 9}, [1, 2], Choice(None, (3,), 1)),
        # too few, nothing due: anything will do
        (4, 2, 2, {1: 9, 2: 9}, [1], Choice(None, (2,), 0)),
        (0, 2, 2, {}, [], Choice(None, (), 0)),
        # a part of a batch: the other places of the batch are still empty
        (4, 4, 2, {1: 9, 2: 9, 3: 4}, [1, 2, 3], Choice((1, 2))),
        (4, 2, 2, {1: 9, 3: 4}, [1, 3], Choice((1, 3))),
    ],
)
def test_choose(
    update: int, empty: int, size: int, live: dict[int, int | None], candidates: list[int], expected: Choice
) -> None:
    assert choose(update, max(2, empty), empty, size, live.items(), candidates) == expected


def fits(update: int, batch: int, empty: int, deadlines: list[int]) -> bool:
    """Hall's condition: for every h, what is due until then has a place left until then."""
    return all(
        sum(d <= h for d in deadlines) <= empty + (h - update) * batch
        for h in range(update, max(deadlines, default=0) + 1)
    )


@st.composite
def pools(draw: st.DrawFn) -> tuple[int, int, int, int, dict[int, int | None], list[int]]:
    """A batch that is open, and live groups whose deadlines can be met."""
    update, batch = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    size = draw(st.integers(1, batch))
    empty = draw(st.integers(size, batch))
    live: dict[int, int | None] = {}
    for group, ahead in enumerate(draw(st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=9))):
        due = None if ahead is None else update + ahead
        if fits(update, batch, empty, [d for d in [*live.values(), due] if d is not None]):
            live[group] = due
    candidates = draw(st.permutations([g for g in live if draw(st.booleans())]))
    return update, batch, empty, size, live, candidates


@given(pools())
def test_a_choice_keeps_every_deadline_and_is_made_if_one_can_be(
    pool: tuple[int, int, int, int, dict[int, int | None], list[int]],
) -> None:
    """Protocol §2: never picks what breaks a deadline, and never waits when some pick would break none."""
    update, batch, empty, size, live, candidates = pool
    choice = choose(update, batch, empty, size, live.items(), candidates)

    def left_fits(picked: tuple[int, ...]) -> bool:
        left = [d for g, d in live.items() if g not in picked and d is not None]
        return fits(update, batch, empty - size, left)

    if choice.groups is not None:
        assert len(choice.groups) == len(set(choice.groups)) == size
        assert set(choice.groups) <= set(candidates)
        assert [g for g in candidates if g in choice.groups] == list(choice.groups), "the sampler's order"
        assert left_fits(choice.groups)
    else:
        assert not any(left_fits(pick) for pick in combinations(candidates, size))
        assert not set(choice.waits_for) & set(candidates)


@given(pools())
def test_with_everything_buffered_there_is_nothing_to_wait_for(
    pool: tuple[int, int, int, int, dict[int, int | None], list[int]],
) -> None:
    """Never stuck: once all that is live has finished, a batch of enough groups can be cut."""
    update, batch, empty, size, live, _ = pool
    choice = choose(update, batch, empty, size, live.items(), list(live))
    assert (choice.groups is not None) == (len(live) >= size)
