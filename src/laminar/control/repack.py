"""Repack: gather the unfinished tail of several replicas on few, so that the others can start on newer weights.

A replica's *bound* is `kv_fraction` of its KV capacity. A *candidate* has requests, none of them waiting, admits none,
has KV below its bound and fewer requests than `max_requests`. (That its KV fell since the last look is no usable test:
in the deep tail KV rises slowly.) Every plan keeps these invariants:

* sources and destinations are candidates, and a move joins two replicas of one version;
* a source moves whole, to one destination;
* a destination is never a source (the paper's Algorithm 1 forgets this, and overfills);
* with all moves counted, a destination has KV within its bound and at most `max_requests` requests;
* a move pays: `kv_used / prefill_tok_s < expected_freed_s`;
* there are at most `max_released` moves, the cheapest ones: a released replica without work would stand idle;
* every replica is a source, a destination, or declined with a reason;
* the plan depends on the set of loads alone: not on their order, nor on hashes. Ties go to the lower id.

With bounds all alike this is bin packing: a set of replicas that fits one bound frees all but one of them. Several
greedy packings are made, and the one that frees most wins; of equals, the one that moves fewest tokens. The paper's
is among them, so with up to `THOROUGH` candidates a plan never frees less than Algorithm 1 with the third invariant
added. Larger fleets get one packing, the one that does best there, in O(n log n).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import floor

from laminar.errors import ProtocolError

THOROUGH = 256
"""Up to so many candidates, every packing is tried and every destination looked at."""
WINDOW = 32
"""Beyond that: destinations looked at for one source, those with the least room for it first."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica holds. Raises ProtocolError if a count is negative."""

    replica: str
    version: int
    kv_used: int
    """tokens"""
    kv_capacity: int
    """tokens"""
    num_running: int
    num_waiting: int
    admitting: bool
    """It may still be given new work, so it is not in its tail."""

    def __post_init__(self) -> None:
        if min(self.kv_used, self.kv_capacity, self.num_running, self.num_waiting) < 0:
            raise ProtocolError(f"a load has no negative counts: {self}")


@dataclass(frozen=True, slots=True)
class RepackLimits:
    """What a plan may do. The defaults decline nothing that fits. Raises ProtocolError if one is out of range."""

    kv_fraction: float = 1.0
    """Share of a destination's KV capacity that may be in use after its moves."""
    max_requests: int = 2**31 - 1
    """Requests a destination may run after its moves: beyond some batch, decoding is bound by compute."""
    prefill_tok_s: float | None = None
    """Tokens a second at which a destination computes moved KV anew; None = for free."""
    expected_freed_s: float | None = None
    """How long a source would be held by its tail if it did not move; None = unknown, every move pays."""
    max_released: int | None = None
    """Sources that there is work for; None = any number."""

    def __post_init__(self) -> None:
        limits = (self.kv_fraction, self.max_requests, self.prefill_tok_s, self.expected_freed_s, self.max_released)
        if any(limit is not None and limit < 0 for limit in limits):
            raise ProtocolError(f"a limit is not negative: {self}")
        if self.prefill_tok_s == 0:
            raise ProtocolError(f"a prefill speed is positive, or None for free: {self}")


@dataclass(frozen=True, slots=True)
class RepackMove:
    """All unfinished work of `source` goes to `destination`."""

    source: str
    destination: str
    reason: str


@dataclass(frozen=True, slots=True)
class RepackPlan:
    """`moves`, cheapest first; `declined` gives, by id, why each replica without a part in them has none."""

    moves: tuple[RepackMove, ...]
    declined: Mapping[str, str]


def plan_repack(loads: Sequence[ReplicaLoad], limits: RepackLimits) -> RepackPlan:
    """Plan moves that free as many replicas as can be found. Raises ProtocolError if an id comes twice."""
    ordered = sorted(loads, key=lambda load: load.replica)
    for one, other in pairwise(ordered):
        if one.replica == other.replica:
            raise ProtocolError(f"two loads of replica {one.replica!r}")
    declined: dict[str, str] = {}
    groups: dict[int, list[ReplicaLoad]] = defaultdict(list)
    for load in ordered:
        if (obstacle := _obstacle(load, limits)) is not None:
            declined[load.replica] = obstacle
        else:
            groups[load.version].append(load)

    thorough = sum(map(len, groups.values())) <= THOROUGH
    pairs: list[tuple[ReplicaLoad, ReplicaLoad]] = []
    for group in groups.values():
        pairs += _best_packing(group, limits, thorough)
    pairs.sort(key=lambda pair: (pair[0].kv_used, pair[0].replica))
    pairs = pairs[: limits.max_released]

    moved = {load.replica for pair in pairs for load in pair}
    full = limits.max_released is not None and len(pairs) >= limits.max_released
    for group in groups.values():
        for load in group:
            if load.replica not in moved:
                declined[load.replica] = _why_not_moved(load, limits, alone=len(group) == 1, full=full)
    return RepackPlan(_as_moves(pairs, limits), dict(sorted(declined.items())))


def _obstacle(load: ReplicaLoad, limits: RepackLimits) -> str | None:
    """Why a replica is no candidate."""
    if load.num_waiting > 0:
        return f"{load.num_waiting} requests wait"
    if load.admitting:
        return "admits new work"
    if load.num_running == 0:
        return "empty"
    if load.kv_used >= limits.kv_fraction * load.kv_capacity:
        return f"KV at {load.kv_used} tokens, bound {limits.kv_fraction:g} x {load.kv_capacity}"
    if load.num_running >= limits.max_requests:
        return f"{load.num_running} requests, bound {limits.max_requests}"
    return None


def _pays(load: ReplicaLoad, limits: RepackLimits) -> bool:
    if limits.prefill_tok_s is None or limits.expected_freed_s is None:
        return True
    return load.kv_used / limits.prefill_tok_s < limits.expected_freed_s


def _why_not_moved(load: ReplicaLoad, limits: RepackLimits, *, alone: bool, full: bool) -> str:
    if alone:
        return f"no other candidate holds version {load.version}"
    if not _pays(load, limits):
        return (
            f"does not pay: prefill of {load.kv_used} tokens at {limits.prefill_tok_s} a second, "
            f"to be free {limits.expected_freed_s} s sooner"
        )
    if full:
        return f"there is work for no more than {limits.max_released} released replicas"
    return "no destination has room"


def _as_moves(pairs: Iterable[tuple[ReplicaLoad, ReplicaLoad]], limits: RepackLimits) -> tuple[RepackMove, ...]:
    kv: dict[str, int] = {}
    moves = []
    for source, to in pairs:
        kv[to.replica] = kv.get(to.replica, to.kv_used) + source.kv_used
        reason = (
            f"frees {source.replica}: {source.num_running} requests, {source.kv_used} tokens; "
            f"{to.replica} then holds {kv[to.replica]} of {limits.kv_fraction:g} x {to.kv_capacity}"
        )
        moves.append(RepackMove(source.replica, to.replica, reason))
    return tuple(moves)


# ---------------------------------------------------------------- packing


class _Fleet:
    """Candidates of one version as columns [n]; a replica is its index in the order of ids."""

    def __init__(self, loads: Sequence[ReplicaLoad], limits: RepackLimits) -> None:
        self.size = len(loads)
        self.kv = [load.kv_used for load in loads]
        self.requests = [load.num_running for load in loads]
        self.bound = [floor(limits.kv_fraction * load.kv_capacity) for load in loads]
        self.pays = [_pays(load, limits) for load in loads]
        self.max_requests = limits.max_requests
        self.fewest_requests = min(self.requests)
        self.one_bound = len(set(self.bound)) == 1

    def trials(self, thorough: bool) -> Iterator[tuple[Sequence[int], bool]]:
        """Arguments `order` and `open_all` of `_pack`, the pair that does best on large fleets first."""
        share = [
            max(kv / max(bound, 1), requests / self.max_requests)
            for kv, bound, requests in zip(self.kv, self.bound, self.requests, strict=True)
        ]
        large_first = sorted(range(self.size), key=lambda i: -share[i])
        yield large_first, False
        if not thorough:
            return
        yield sorted(range(self.size), key=self.kv.__getitem__), True  # the paper's
        if not self.one_bound:
            yield large_first, True
            # much room makes a good destination, and what does not pay can be nothing else
            yield sorted(range(self.size), key=lambda i: (self.pays[i], self.kv[i] - self.bound[i])), False


def _best_packing(
    group: Sequence[ReplicaLoad], limits: RepackLimits, thorough: bool
) -> list[tuple[ReplicaLoad, ReplicaLoad]]:
    """(source, destination) pairs of the packing that frees most, `max_released` counted, then moves least."""
    fleet = _Fleet(group, limits)
    best: list[tuple[int, int]] = []
    best_score = (0, 0)
    for order, open_all in fleet.trials(thorough):
        pairs = _pack(fleet, order, open_all, window=fleet.size if thorough else WINDOW)
        costs = sorted(fleet.kv[source] for source, _ in pairs)[: limits.max_released]
        score = (len(costs), -sum(costs))
        if score > best_score:
            best, best_score = pairs, score
    return [(group[source], group[to]) for source, to in best]


def _pack(fleet: _Fleet, order: Sequence[int], open_all: bool, window: int) -> list[tuple[int, int]]:
    """One greedy packing: in `order`, each replica without a part in it joins the fullest destination with room.

    A replica that found none is a destination for those after it; with `open_all`, so is one that has not looked yet.
    At most `window` destinations are looked at for one source, those with the least room for it first.
    """
    n, bound, max_requests = fleet.size, fleet.bound, fleet.max_requests
    kv, requests = fleet.kv.copy(), fleet.requests.copy()
    most_to_receive = max_requests - fleet.fewest_requests
    # The open destinations by (room, index), as one integer each: comparing those is what takes the time.
    rooms = sorted((bound[i] - kv[i]) * n + i for i in range(n)) if open_all else []
    opened, settled = [open_all] * n, [False] * n
    # What does not fit under an earlier replica's bound may have that one fit under its own.
    again = () if open_all or fleet.one_bound else order
    pairs: list[tuple[int, int]] = []
    for source in chain(order, again):
        if settled[source]:
            continue
        size, own_room = kv[source], (bound[source] - kv[source]) * n + source
        if opened[source]:
            del rooms[bisect_left(rooms, own_room)]
        best_at = best = -1
        if fleet.pays[source]:
            first = bisect_left(rooms, size * n)
            for at in range(first, min(first + window, len(rooms))):
                to = rooms[at] % n
                if requests[to] + requests[source] > max_requests:
                    continue
                if best < 0 or (kv[to], -to) > (kv[best], -best):
                    best_at, best = at, to
                if fleet.one_bound:
                    break  # least room is fullest
        if best < 0:
            insort(rooms, own_room)
            opened[source] = True
            continue
        del rooms[best_at]
        kv[best] += size
        requests[best] += requests[source]
        settled[source] = settled[best] = True
        pairs.append((source, best))
        if requests[best] <= most_to_receive:
            insort(rooms, (bound[best] - kv[best]) * n + best)
    return pairs
