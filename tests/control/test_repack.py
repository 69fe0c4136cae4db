"""Repack plans: the words of the module's docstring, and what they are worth beside an exact search."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.control.repack import THOROUGH, RepackLimits, RepackPlan, ReplicaLoad, plan_repack
from laminar.errors import ProtocolError
from tests.hash_seeds import printed_under_two_hash_seeds


def load(
    replica: str,
    kv: int,
    requests: int = 1,
    *,
    capacity: int = 100,
    version: int = 3,
    waiting: int = 0,
    admits: bool = False,
) -> ReplicaLoad:
    return ReplicaLoad(replica, version, kv, capacity, requests, waiting, admits)


def pairs(plan: RepackPlan) -> list[tuple[str, str]]:
    return [(move.source, move.destination) for move in plan.moves]


# ---------------------------------------------------------------- tables

PLANS = {
    "the smaller joins the larger": ([load("a", 40), load("b", 20)], RepackLimits(), [("b", "a")]),
    "the fullest destination with room": (
        [load("a", 10), load("b", 60), load("c", 85), load("d", 95)],
        RepackLimits(),
        [("a", "c")],
    ),
    "several onto one": ([load("a", 20), load("b", 30), load("c", 50)], RepackLimits(), [("a", "c"), ("b", "c")]),
    "ties by id": ([load("b", 10), load("c", 10), load("a", 10)], RepackLimits(), [("b", "a"), ("c", "a")]),
    "KV just within the bound": ([load("a", 40), load("b", 50)], RepackLimits(kv_fraction=0.9), [("a", "b")]),
    "KV just beyond it": ([load("a", 41), load("b", 50)], RepackLimits(kv_fraction=0.9), []),
    "requests just within the bound": ([load("a", 1, 3), load("b", 2, 5)], RepackLimits(max_requests=8), [("a", "b")]),
    "requests just beyond it": ([load("a", 1, 4), load("b", 2, 5)], RepackLimits(max_requests=8), []),
    "a destination is never a source": ([load("a", 10), load("b", 45), load("c", 50)], RepackLimits(), [("a", "c")]),
    "equally full: by id, though the other has less room": (
        [load("a", 80, capacity=120), load("b", 80), load("c", 10)],
        RepackLimits(),
        [("c", "a")],
    ),
    "the bound is the destination's": (
        [load("a", 150, capacity=1000), load("b", 90)],
        RepackLimits(),
        [("b", "a")],
    ),
    "versions stay apart": (
        [load("a", 1), load("b", 2, version=4), load("c", 3), load("d", 4, version=4)],
        RepackLimits(),
        [("a", "c"), ("b", "d")],
    ),
    "only what there is work for, cheapest first": (
        [load("a", 20), load("b", 10), load("c", 30), load("d", 40)],
        RepackLimits(max_released=2),
        [("b", "d"), ("a", "d")],
    ),
    "work for none": ([load("a", 1), load("b", 1)], RepackLimits(max_released=0), []),
    "a move that does not pay leaves the one that does": (
        [load("a", 20), load("b", 30), load("c", 25)],
        RepackLimits(prefill_tok_s=10.0, expected_freed_s=2.5),
        [("a", "b")],
    ),
    "prefill for free": ([load("a", 20), load("b", 30)], RepackLimits(expected_freed_s=0.1), [("a", "b")]),
    "time to be freed unknown": ([load("a", 20), load("b", 30)], RepackLimits(prefill_tok_s=0.1), [("a", "b")]),
    "nobody": ([], RepackLimits(), []),
    "the only one": ([load("a", 1)], RepackLimits(), []),
}


@pytest.mark.parametrize(("loads", "limits", "expected"), PLANS.values(), ids=PLANS)
def test_plans(loads: list[ReplicaLoad], limits: RepackLimits, expected: list[tuple[str, str]]) -> None:
    assert pairs(plan_repack(loads, limits)) == expected


BESIDE = load("z", 50)
DECLINED = {
    "waits": (load("a", 10, waiting=2), RepackLimits(), "2 requests wait"),
    "admits": (load("a", 10, admits=True), RepackLimits(), "admits new work"),
    "empty": (load("a", 0, 0), RepackLimits(), "empty"),
    "full": (load("a", 90), RepackLimits(kv_fraction=0.9), "KV at 90 tokens, bound 0.9 x 100"),
    "many requests": (load("a", 10, 8), RepackLimits(max_requests=8), "8 requests, bound 8"),
    "other version": (load("a", 10, version=2), RepackLimits(), "no other candidate holds version 2"),
    "no room": (load("a", 60), RepackLimits(), "no destination has room"),
    "no work": (load("a", 10), RepackLimits(max_released=0), "there is work for no more than 0 released replicas"),
}


@pytest.mark.parametrize(("asked", "limits", "reason"), DECLINED.values(), ids=DECLINED)
def test_reasons(asked: ReplicaLoad, limits: RepackLimits, reason: str) -> None:
    plan = plan_repack([asked, BESIDE], limits)
    assert plan.moves == ()
    assert plan.declined["a"] == reason
    assert list(plan.declined) == ["a", "z"]


def test_a_move_says_what_it_frees_and_what_the_destination_then_holds() -> None:
    first, second = plan_repack([load("a", 20), load("b", 30, 7), load("c", 50)], RepackLimits()).moves
    assert first.reason == "frees a: 1 requests, 20 tokens; c then holds 70 of 1 x 100"
    assert second.reason == "frees b: 7 requests, 30 tokens; c then holds 100 of 1 x 100"


def test_repack_declines_when_prefill_is_dear() -> None:
    """Fault 41."""
    loads = [load(name, kv) for name, kv in (("a", 1000), ("b", 2000), ("c", 4000))]
    loads = [ReplicaLoad(x.replica, 3, x.kv_used, 100_000, 8, 0, False) for x in loads]
    assert len(plan_repack(loads, RepackLimits(prefill_tok_s=10_000.0, expected_freed_s=60.0)).moves) == 2
    plan = plan_repack(loads, RepackLimits(prefill_tok_s=10.0, expected_freed_s=60.0))
    assert plan.moves == ()
    assert plan.declined["a"] == "does not pay: prefill of 1000 tokens at 10.0 a second, to be free 60.0 s sooner"


def test_nonsense_is_refused() -> None:
    with pytest.raises(ProtocolError, match="two loads of replica 'a'"):
        plan_repack([load("a", 1), load("b", 1), load("a", 2)], RepackLimits())
    with pytest.raises(ProtocolError, match="negative"):
        load("a", -1)
    with pytest.raises(ProtocolError, match="negative"):
        RepackLimits(max_released=-1)
    with pytest.raises(ProtocolError, match="positive"):
        RepackLimits(prefill_tok_s=0.0)


# ---------------------------------------------------------------- invariants


def is_candidate(x: ReplicaLoad, limits: RepackLimits) -> bool:
    return (
        x.num_waiting == 0
        and not x.admitting
        and 0 < x.num_running < limits.max_requests
        and x.kv_used < limits.kv_fraction * x.kv_capacity
    )


def pays(x: ReplicaLoad, limits: RepackLimits) -> bool:
    if limits.prefill_tok_s is None or limits.expected_freed_s is None:
        return True
    return x.kv_used / limits.prefill_tok_s < limits.expected_freed_s


def check(loads: Sequence[ReplicaLoad], limits: RepackLimits, plan: RepackPlan) -> None:
    """The plan keeps every invariant of the module's docstring."""
    by_id = {x.replica: x for x in loads}
    sources = [move.source for move in plan.moves]
    destinations = {move.destination for move in plan.moves}
    assert len(set(sources)) == len(sources)
    assert not destinations & set(sources)
    assert limits.max_released is None or len(sources) <= limits.max_released
    assert set(plan.declined) == set(by_id) - destinations - set(sources)
    assert list(plan.declined) == sorted(plan.declined)
    assert all(plan.declined.values())

    kv, requests = Counter[str](), Counter[str]()
    for x in loads:
        kv[x.replica], requests[x.replica] = x.kv_used, x.num_running
    for move in plan.moves:
        source, to = by_id[move.source], by_id[move.destination]
        assert is_candidate(source, limits)
        assert is_candidate(to, limits)
        assert source.version == to.version
        assert pays(source, limits)
        kv[move.destination] += source.kv_used
        requests[move.destination] += source.num_running
    for name in destinations:
        assert kv[name] <= limits.kv_fraction * by_id[name].kv_capacity
        assert requests[name] <= limits.max_requests

    for name, reason in plan.declined.items():
        if reason == "no destination has room":
            for x in loads:
                if x.replica in sources or x.replica == name or x.version != by_id[name].version:
                    continue
                if is_candidate(x, limits):
                    assert (
                        kv[x.replica] + by_id[name].kv_used > limits.kv_fraction * x.kv_capacity
                        or requests[x.replica] + by_id[name].num_running > limits.max_requests
                    )


@st.composite
def fleets(draw: st.DrawFn, max_size: int = 12) -> tuple[list[ReplicaLoad], RepackLimits]:
    """Loads around the bounds, so that every rule has something to say."""
    capacities = draw(st.sampled_from([(100,), (60, 100, 250)]))
    shapes = draw(
        st.lists(
            st.builds(
                ReplicaLoad,
                replica=st.just(""),
                version=st.integers(0, 1),
                kv_used=st.integers(0, 110),
                kv_capacity=st.sampled_from(capacities),
                num_running=st.integers(0, 17),
                num_waiting=st.sampled_from([0, 0, 0, 0, 2]),
                admitting=st.sampled_from([False, False, False, True]),
            ),
            max_size=max_size,
        )
    )
    names = draw(st.permutations([f"r{i}" for i in range(len(shapes))]))
    loads = [
        ReplicaLoad(n, x.version, x.kv_used, x.kv_capacity, x.num_running, x.num_waiting, x.admitting)
        for n, x in zip(names, shapes, strict=True)
    ]
    limits = RepackLimits(
        kv_fraction=draw(st.sampled_from([0.5, 0.9, 1.0])),
        max_requests=draw(st.sampled_from([0, 8, 16, 1000])),
        prefill_tok_s=draw(st.sampled_from([None, 10.0])),
        expected_freed_s=draw(st.sampled_from([None, 3.0])),
        max_released=draw(st.sampled_from([None, None, 0, 1, 3])),
    )
    return loads, limits


@given(fleets())
def test_every_plan_keeps_the_invariants(fleet: tuple[list[ReplicaLoad], RepackLimits]) -> None:
    """Invariant 1: work moves only between replicas of one version."""
    loads, limits = fleet
    check(loads, limits, plan_repack(loads, limits))


@given(fleets(), st.randoms(use_true_random=False))
def test_the_order_of_the_loads_does_not_matter(fleet: tuple[list[ReplicaLoad], RepackLimits], random: Random) -> None:
    """Invariant 11."""
    loads, limits = fleet
    shuffled = random.sample(loads, len(loads))
    plan, other = plan_repack(loads, limits), plan_repack(shuffled, limits)
    assert plan == other
    assert list(plan.declined) == list(other.declined)


def random_fleet(rng: Random, size: int, kind: str) -> tuple[list[ReplicaLoad], RepackLimits]:
    """Candidates for the most part. `kind`: `alike`, `requests` bind too, capacities `differ` and moves have to pay."""
    share = rng.choice([0.3, 0.5, 0.8, 1.0])
    max_requests = 10_000 if kind == "alike" else rng.choice([32, 64, 128])
    most = int(max_requests * rng.choice([0.3, 0.6, 0.9]))
    loads = []
    for i in range(size):
        capacity = rng.choice([4_000, 10_000, 16_000]) if kind == "differ" else 10_000
        kv, version, waiting = rng.randint(0, int(capacity * share)), rng.randint(0, 9) // 9, rng.randint(0, 9) // 9
        loads.append(ReplicaLoad(f"r{i}", version, kv, capacity, rng.randint(1, most), waiting, False))
    dear = RepackLimits(0.95, max_requests, prefill_tok_s=1_000.0, expected_freed_s=rng.choice([3.0, 6.0, 60.0]))
    return loads, dear if kind == "differ" else RepackLimits(0.95, max_requests)


@pytest.mark.parametrize("kind", ["alike", "requests", "differ"])
def test_a_large_fleet_keeps_the_invariants_too(kind: str) -> None:
    loads, limits = random_fleet(Random(1), 3 * THOROUGH, kind)
    plan = plan_repack(loads, limits)
    assert plan.moves
    plan = RepackPlan(
        plan.moves, {name: reason.replace("no destination has", "found no") for name, reason in plan.declined.items()}
    )
    check(loads, limits, plan)


def test_in_a_large_fleet_too_the_bound_is_the_destinations() -> None:
    loads = []
    for version in range(THOROUGH):
        loads += [load(f"small-{version}", 90, version=version)]
        loads += [load(f"large-{version}", 150, capacity=1000, version=version)]
    plan = plan_repack(loads, RepackLimits())
    assert {move.source for move in plan.moves} == {f"small-{version}" for version in range(THOROUGH)}


def test_hashes_do_not_matter() -> None:
    """Invariant 11: two interpreters with different hash seeds plan alike."""
    program = (
        "from laminar.control.repack import *\n"
        "loads = [ReplicaLoad(f'r{i * 7 % 40}', i % 3, i * 37 % 90, 100 + i % 2, 1 + i % 5, i % 11 // 10, i % 13 == 0)"
        " for i in range(40)]\n"
        "print(plan_repack(loads, RepackLimits(0.9, 16, max_released=12)))"
    )
    first, second = printed_under_two_hash_seeds(program)
    assert first == second
    assert "RepackMove" in first


# ---------------------------------------------------------------- quality


def most_freed(loads: Sequence[ReplicaLoad], limits: RepackLimits) -> int:
    """Exact: the candidates of a version fall into sets, each gathered on one member that has room for all."""
    groups: dict[int, list[ReplicaLoad]] = defaultdict(list)
    for x in loads:
        if is_candidate(x, limits):
            groups[x.version].append(x)
    return sum(_most_freed_of_group(group, limits) for group in groups.values())


def _most_freed_of_group(group: Sequence[ReplicaLoad], limits: RepackLimits) -> int:
    gathered: dict[int, list[int]] = defaultdict(list)
    for mask in range(1, 1 << len(group)):
        members = [x for i, x in enumerate(group) if mask >> i & 1]
        homes = [x for x in members if all(y is x or pays(y, limits) for y in members)]
        room = max((limits.kv_fraction * x.kv_capacity for x in homes), default=-1.0)
        if sum(x.kv_used for x in members) <= room and sum(x.num_running for x in members) <= limits.max_requests:
            gathered[mask & -mask].append(mask)

    @cache
    def best(left: int) -> int:
        if not left:
            return 0
        lowest = left & -left
        sets = (mask for mask in gathered[lowest] if mask & left == mask)
        return max(itertools.chain([best(left ^ lowest)], (mask.bit_count() - 1 + best(left ^ mask) for mask in sets)))

    return best((1 << len(group)) - 1)


def freed_by_algorithm_1(loads: Sequence[ReplicaLoad], limits: RepackLimits) -> int:
    """The paper's best fit, with the one rule added that a destination stays one."""
    candidates = sorted((x for x in loads if is_candidate(x, limits)), key=lambda x: (x.kv_used, x.replica))
    kv = {x.replica: x.kv_used for x in candidates}
    requests = {x.replica: x.num_running for x in candidates}
    emptied: set[str] = set()
    received: set[str] = set()
    for s in candidates:
        if s.replica in received or not pays(s, limits):
            continue
        fits = [
            d
            for d in candidates
            if d is not s
            and d.replica not in emptied
            and d.version == s.version
            and kv[d.replica] + s.kv_used <= limits.kv_fraction * d.kv_capacity
            and requests[d.replica] + s.num_running <= limits.max_requests
        ]
        if fits:
            to = min(fits, key=lambda d: (-kv[d.replica], d.replica)).replica
            kv[to] += s.kv_used
            requests[to] += s.num_running
            received.add(to)
            emptied.add(s.replica)
    return len(emptied)


@pytest.mark.parametrize("kind", ["alike", "requests", "differ"])
def test_nearly_as_many_freed_as_can_be_and_never_fewer_than_by_the_paper(kind: str) -> None:
    rng = Random(7)
    freed = possible = 0
    for _ in range(400):
        loads, limits = random_fleet(rng, rng.randint(2, 10), kind)
        planned, exact = len(plan_repack(loads, limits).moves), most_freed(loads, limits)
        assert freed_by_algorithm_1(loads, limits) <= planned <= exact
        freed, possible = freed + planned, possible + exact
    assert freed >= 0.975 * possible


def test_the_exact_search_sees_what_greedy_packings_miss() -> None:
    loads = [load(str(i), kv) for i, kv in enumerate([44, 43, 31, 30, 26, 26])]
    assert most_freed(loads, RepackLimits()) == 4
    assert freed_by_algorithm_1(loads, RepackLimits()) == 3


@pytest.mark.parametrize("kind", ["alike", "requests", "differ"])
def test_never_fewer_than_by_the_paper_on_mid_size_fleets(kind: str) -> None:
    rng = Random(11)
    for _ in range(10):
        loads, limits = random_fleet(rng, rng.randint(40, 120), kind)
        assert freed_by_algorithm_1(loads, limits) <= len(plan_repack(loads, limits).moves)
