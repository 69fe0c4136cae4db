"""The relay chain: the one path along which a version goes from the trainer's machine to all others.

Every member forwards to the next while it receives, so a broadcast takes hardly longer than one copy (`broadcast_s`),
and a slow member holds up only those behind it: its place is at the tail. Invariants:

* every live member is in the chain once; the order is the one path, from the master through all others;
* the slow members come last; the master never counts as slow, since new versions enter nowhere else;
* a change raises the epoch by one; what changes nothing leaves it;
* when a member goes, its upstream is given its downstream: no other link is touched.

When the master goes, the next in line feeds those behind it with what it holds, until `lead` says which relay is on
the trainer's machine: the same one, restarted, or another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, sqrt

from laminar.errors import ProtocolError
from laminar.types import Version


@dataclass(frozen=True, slots=True)
class Chain:
    """Raises ProtocolError if a relay comes twice, or if there is no room for so many slow ones behind the master."""

    epoch: int = 0
    order: tuple[str, ...] = ()
    """Ids of relays, the master's first."""
    num_slow: int = 0
    """How many, at the end, are slow."""

    def __post_init__(self) -> None:
        if len(set(self.order)) < len(self.order) or not 0 <= self.num_slow <= max(0, len(self.order) - 1):
            raise ProtocolError(f"not a chain: {self}")

    @property
    def master(self) -> str | None:
        """Where new versions enter; None if there are no members."""
        return self.order[0] if self.order else None

    @property
    def slow(self) -> tuple[str, ...]:
        """The slow members, in order."""
        return self.order[len(self.order) - self.num_slow :]


@dataclass(frozen=True, slots=True)
class Link:
    """The neighbours of one relay, whatever it was told before."""

    relay: str
    upstream: str | None
    """None for the master."""
    downstream: str | None
    """None for the last."""
    epoch: int


def links(chain: Chain) -> tuple[Link, ...]:
    """Who receives from whom and sends to whom, in the order of the chain."""
    order = chain.order
    return tuple(
        Link(relay, upstream, downstream, chain.epoch)
        for relay, upstream, downstream in zip(order, (None, *order), (*order[1:], None), strict=False)
    )


def accepts(highest: int, offered: int) -> bool:
    """Whether a relay listens to an upstream that shows the epoch `offered`.

    `highest` is the highest epoch that an *upstream* has shown it. The manager's word must not raise it: where a link
    did not change, the upstream may hear of the new epoch after the downstream, and is still the right one.
    """
    return offered >= highest


def next_transfer(in_progress: Version | None, waiting: Sequence[Version]) -> tuple[Version | None, Version | None]:
    """What a relay receives now, and what after that, of the versions that its upstream has for it.

    A transfer in progress is finished, unless its lineage is retired; of those that wait only the newest is kept. (If
    the newest overtook, no version would ever arrive when they are published faster than the link carries them.)
    """
    newest = max(waiting, default=None)
    if in_progress is None or (newest is not None and newest.lineage > in_progress.lineage):
        return newest, None
    return in_progress, newest if newest is not None and newest > in_progress else None


# ---------------------------------------------------------------- changes


def join(chain: Chain, relay: str) -> Chain:
    """Add a member before the slow ones; the first one is the master. A member that joins again changes nothing."""
    if relay in chain.order:
        return chain
    at = len(chain.order) - chain.num_slow
    return Chain(chain.epoch + 1, (*chain.order[:at], relay, *chain.order[at:]), chain.num_slow)


def leave(chain: Chain, relay: str) -> Chain:
    """Take out a member that left or died. One that is not there changes nothing."""
    if relay not in chain.order:
        return chain
    order = tuple(member for member in chain.order if member != relay)
    num_slow = chain.num_slow - (relay in chain.slow)
    return Chain(chain.epoch + 1, order, min(num_slow, max(0, len(order) - 1)))


def to_tail(chain: Chain, relay: str) -> Chain:
    """Move a member that has become slow behind all others. The master stays, and so does one that was slow before.

    Raises ProtocolError if the relay is not a member.
    """
    _expect_member(chain, relay)
    if relay == chain.master or relay in chain.slow:
        return chain
    order = (*(member for member in chain.order if member != relay), relay)
    return Chain(chain.epoch + 1, order, chain.num_slow + 1)


def from_tail(chain: Chain, relay: str) -> Chain:
    """Move a slow member that has recovered before those that are slow still; one that was not slow stays.

    Raises ProtocolError if the relay is not a member.
    """
    _expect_member(chain, relay)
    if relay not in chain.slow:
        return chain
    at = len(chain.order) - chain.num_slow
    still_slow = (member for member in chain.slow if member != relay)
    return Chain(chain.epoch + 1, (*chain.order[:at], relay, *still_slow), chain.num_slow - 1)


def lead(chain: Chain, relay: str) -> Chain:
    """Make the relay on the trainer's machine the master, be it a member yet or not."""
    if relay == chain.master:
        return chain
    others = (member for member in chain.order if member != relay)
    return Chain(chain.epoch + 1, (relay, *others), chain.num_slow - (relay in chain.slow))


def _expect_member(chain: Chain, relay: str) -> None:
    if relay not in chain.order:
        raise ProtocolError(f"{relay!r} is not in the chain {chain.order}")


# ---------------------------------------------------------------- time


def broadcast_s(num_nodes: int, num_bytes: float, byte_s: float, start_s: float, num_chunks: int) -> float:
    """Seconds until the last of `num_nodes` (the master counts) has all bytes, sent in `num_chunks` equal chunks.

    A hop of s bytes takes `s * byte_s + start_s`. The last chunk leaves the master after `num_chunks` hop times and has
    `num_nodes - 2` more hops to go (appendix D of the paper).
    """
    if num_nodes <= 1:
        return 0.0
    return (num_nodes + num_chunks - 2) * (num_bytes / num_chunks * byte_s + start_s)


def best_num_chunks(num_nodes: int, num_bytes: float, byte_s: float, start_s: float) -> int:
    """The number of chunks that makes `broadcast_s` shortest: sqrt((p - 2) * bytes * byte_s / start_s), as an integer.

    At least 1, and with free starts one byte a chunk.
    """
    if num_nodes <= 2:
        return 1
    most = max(1, floor(num_bytes))
    if start_s == 0:
        return most
    ideal = sqrt((num_nodes - 2) * num_bytes * byte_s / start_s)
    # the time is convex in the number of chunks, so the best integer is next to the best real number
    near = {min(max(1, rounded), most) for rounded in (floor(ideal), ceil(ideal))}
    return min(sorted(near), key=lambda num_chunks: broadcast_s(num_nodes, num_bytes, byte_s, start_s, num_chunks))
