"""The relay chain: order and repair by table and by random histories, and the time a broadcast takes."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.control.chain import (
    Chain,
    Link,
    accepts,
    best_num_chunks,
    broadcast_s,
    from_tail,
    join,
    lead,
    leave,
    links,
    next_transfer,
    to_tail,
)
from laminar.errors import ProtocolError
from laminar.types import Version

V1, V2, V3, OTHER = Version(0, 1), Version(0, 2), Version(0, 3), Version(1, 1)
Change = Callable[[Chain, str], Chain]
BEFORE = Chain(5, ("m", "a", "b", "s", "t"), num_slow=2)

# (change, relay, order after it, how many are slow)
CHANGES: dict[str, tuple[Change, str, str, int]] = {
    "a new member comes before the slow ones": (join, "n", "mabnst", 2),
    "a member goes": (leave, "a", "mbst", 2),
    "the last goes": (leave, "t", "mabs", 1),
    "the master goes": (leave, "m", "abst", 2),
    "a slow member to the tail": (to_tail, "a", "mbsta", 3),
    "a slow member recovers": (from_tail, "t", "mabts", 1),
    "a member leads": (lead, "b", "bmast", 2),
    "a slow member leads": (lead, "s", "smabt", 1),
    "a stranger leads": (lead, "n", "nmabst", 2),
}


@pytest.mark.parametrize(("change", "relay", "order", "num_slow"), CHANGES.values(), ids=CHANGES)
def test_changes(change: Change, relay: str, order: str, num_slow: int) -> None:
    assert change(BEFORE, relay) == Chain(6, tuple(order), num_slow)


@pytest.mark.parametrize(
    ("change", "relay"),
    [(join, "a"), (leave, "n"), (to_tail, "s"), (to_tail, "m"), (from_tail, "a"), (lead, "m")],
)
def test_what_changes_nothing_leaves_the_epoch(change: Change, relay: str) -> None:
    assert change(BEFORE, relay) == BEFORE


def test_the_first_member_is_the_master_and_a_slow_one_becomes_it_when_no_other_is_left() -> None:
    assert Chain().master is None
    chain = join(Chain(), "a")
    assert (chain.master, chain.epoch) == ("a", 1)
    assert leave(Chain(7, ("m", "s", "t"), num_slow=2), "m") == Chain(8, ("s", "t"), num_slow=1)
    assert leave(chain, "a") == Chain(2)


@pytest.mark.parametrize("change", [to_tail, from_tail])
def test_only_members_are_slow(change: Change) -> None:
    with pytest.raises(ProtocolError, match="'n' is not in the chain"):
        change(BEFORE, "n")


@pytest.mark.parametrize("wrong", [{"order": ("a", "a")}, {"order": ("a",), "num_slow": 1}, {"num_slow": -1}])
def test_what_is_no_chain_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="not a chain"):
        Chain(0, **wrong)  # type: ignore[arg-type]


def test_links_name_both_neighbours_and_the_epoch() -> None:
    assert links(Chain()) == ()
    assert links(Chain(4, ("m",))) == (Link("m", None, None, 4),)
    assert links(Chain(4, ("m", "a", "b"))) == (
        Link("m", None, "a", 4),
        Link("a", "m", "b", 4),
        Link("b", "a", None, 4),
    )


def test_a_lower_epoch_is_refused() -> None:
    assert accepts(highest=4, offered=5)
    assert accepts(highest=4, offered=4)
    assert not accepts(highest=4, offered=3)


# ---------------------------------------------------------------- random histories

steps = st.lists(st.tuples(st.sampled_from([join, join, leave, to_tail, from_tail, lead]), st.sampled_from("abcdefgh")))


@given(steps)
def test_any_history_keeps_one_path_through_every_live_member(history: list[tuple[Change, str]]) -> None:
    chain, live = Chain(), set[str]()
    for change, relay in history:
        if change in (to_tail, from_tail) and relay not in live:
            continue
        before, chain = chain, change(chain, relay)
        if change in (join, lead):
            live.add(relay)
        elif change is leave:
            live.discard(relay)

        assert chain.epoch == before.epoch + (chain != before)
        assert walk(chain) == list(chain.order)
        assert sorted(chain.order) == sorted(live)
        assert chain.master not in chain.slow
        if change is to_tail and relay != chain.master:
            assert relay in chain.slow
        if change is from_tail:
            assert relay not in chain.slow
        if change is lead:
            assert chain.master == relay
        check_repair(before, chain, change)


def walk(chain: Chain) -> list[str]:
    """Members met from the master on, by links alone."""
    by_relay = {link.relay: link for link in links(chain)}
    assert [link.relay for link in by_relay.values() if link.upstream is None] == list(chain.order[:1])
    path: list[str] = []
    at = chain.master
    while at is not None:
        assert by_relay[at].upstream == (path[-1] if path else None)
        path.append(at)
        at = by_relay[at].downstream
    return path


def check_repair(before: Chain, after: Chain, change: Change) -> None:
    """A member that goes leaves two links and one new one behind; a member that comes, the reverse."""
    old = {(link.relay, link.downstream) for link in links(before) if link.downstream}
    new = {(link.relay, link.downstream) for link in links(after) if link.downstream}
    if change is leave:
        assert len(old - new) <= 2
        assert len(new - old) <= 1
    elif change is join:
        assert len(old - new) <= 1
        assert len(new - old) <= 2


# ---------------------------------------------------------------- time

GB = 1e9
FAST, START_S = 1 / (400 * GB), 5e-6  # the nominal link of the paper: 400 GB/s, 5 us a start


def test_the_example_of_the_paper() -> None:
    """70B in BF16 are 140 GB, 0.35 s on the link; 2,000 starts cost 10 ms."""
    starts = broadcast_s(2_001, 140 * GB, FAST, START_S, 1) - broadcast_s(2_001, 140 * GB, FAST, 0.0, 1)
    assert starts == pytest.approx(0.010)
    chunks = best_num_chunks(2_002, 140 * GB, FAST, START_S)
    assert chunks == pytest.approx(sqrt(2_000 * 0.35 / 5e-6), rel=1e-4)
    assert broadcast_s(2_002, 140 * GB, FAST, START_S, chunks) == pytest.approx(
        0.35 + 0.010 + 2 * sqrt(2_000 * 0.35 * 5e-6), rel=1e-6
    )


@pytest.mark.parametrize(
    ("num_bytes", "of_4", "of_128"), [(65.5 * GB, 0.17, 0.185), (145.4 * GB, 0.37, 0.39)], ids=["32B", "72B"]
)
def test_a_long_chain_takes_hardly_longer_than_a_short_one(num_bytes: float, of_4: float, of_128: float) -> None:
    for num_nodes, expected in ((4, of_4), (128, of_128)):
        chunks = best_num_chunks(num_nodes, num_bytes, FAST, START_S)
        assert broadcast_s(num_nodes, num_bytes, FAST, START_S, chunks) == pytest.approx(expected, rel=0.04)


def test_short_chains() -> None:
    assert broadcast_s(1, 100.0, 0.1, 0.5, 4) == 0.0
    assert broadcast_s(2, 100.0, 0.1, 0.5, 4) == pytest.approx(4 * (25 * 0.1 + 0.5))
    assert broadcast_s(3, 100.0, 0.1, 0.5, 4) == pytest.approx(5 * (25 * 0.1 + 0.5))
    assert best_num_chunks(1, 100.0, 0.1, 0.5) == best_num_chunks(2, 100.0, 0.1, 0.5) == 1
    assert best_num_chunks(3, 100.0, 0.1, 0.0) == 100


@given(st.integers(3, 200), st.integers(1, 300), st.floats(1e-3, 10.0), st.floats(1e-3, 10.0))
def test_no_other_number_of_chunks_is_faster(num_nodes: int, num_bytes: int, byte_s: float, start_s: float) -> None:
    times = [broadcast_s(num_nodes, num_bytes, byte_s, start_s, chunks) for chunks in range(1, num_bytes + 1)]
    best = best_num_chunks(num_nodes, num_bytes, byte_s, start_s)
    assert times[best - 1] <= min(times) * (1 + 1e-9)


# ---------------------------------------------------------------- transfers


@pytest.mark.parametrize(
    ("in_progress", "waiting", "now", "after"),
    [
        (None, [], None, None),
        (None, [V1, V3, V2], V3, None),
        (V1, [], V1, None),
        (V1, [V2, V3], V1, V3),
        (V2, [V1], V2, None),
        (V3, [V3], V3, None),
        (V3, [OTHER], OTHER, None),
    ],
)
def test_a_transfer_is_finished_and_of_those_that_wait_the_newest_is_next(
    in_progress: Version | None, waiting: list[Version], now: Version | None, after: Version | None
) -> None:
    """Only a version of a retired lineage is given up half-way."""
    assert next_transfer(in_progress, waiting) == (now, after)


def test_versions_arrive_though_they_are_published_faster_than_they_travel() -> None:
    receiving: Version | None = None
    waiting: list[Version] = []
    arrived: list[Version | None] = []
    for number in range(30):  # a transfer takes three times as long as it takes until the next version is published
        receiving, after = next_transfer(receiving, [*waiting, Version(0, number)])
        waiting = [] if after is None else [after]
        if number % 3 == 2:
            arrived.append(receiving)
            receiving = None
    numbers = [version.number for version in arrived if version is not None]
    assert numbers == sorted(set(numbers)) and len(numbers) == 10
