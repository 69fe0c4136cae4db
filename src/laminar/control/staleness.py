"""Bounded staleness, in groups: when one more may be issued, and which may make up a batch.

Words: `B` groups a batch; `k` = max_staleness (None = no bound); `u` = the lowest batch not fully cut; `live` =
issued, not dropped, not in a standing cut. A group issued under version v has deadline d = v + k for ever: the last
batch that may use it.

Issue: live + 1 <= min(v + k + 1, iterations) * B - cut. When a group with deadline d was admitted there was a place
for it in batches 0 .. d, so there are never more groups with deadline <= d than those batches can take (Hall).
Cut: whatever is picked for batch u, for every h >= u the live groups left with deadline <= h must fit the places left
in batches <= h. What must go and is not finished is waited for. Together they never break the bound and never get
stuck.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from laminar.types import Settings


def deadline(version: int, max_staleness: int | None) -> int | None:
    """Last batch that may use a group issued under `version`; None = any."""
    return None if max_staleness is None else version + max_staleness


def room(settings: Settings, version: int, live: int, cut: int) -> int:
    """Groups that may still be issued under `version` (a number), by the staleness rule and the quota."""
    places = [settings.max_outstanding_groups - live]
    if settings.max_staleness is not None:
        places.append((version + settings.max_staleness + 1) * settings.groups_per_batch - cut - live)
    if settings.iterations is not None:
        places.append(settings.iterations * settings.groups_per_batch - cut - live)
    return max(0, min(places))


@dataclass(frozen=True, slots=True)
class Choice:
    """`groups` to cut, or None and the ids of live groups of which some have to finish first."""

    groups: tuple[int, ...] | None
    waits_for: tuple[int, ...] = ()
    num_missing: int = 0
    """So many of them at least; 0 if any other group would do as well."""


def choose(
    update: int,
    batch: int,
    empty: int,
    size: int,
    live: Iterable[tuple[int, int | None]],
    candidates: Sequence[int],
    taken: Mapping[int, int] | None = None,
) -> Choice:
    """Pick `size` of `candidates` for batch `update`, which has `empty` of its `batch` places left.

    `live` holds (group, deadline) of every live group, `candidates` the buffered ones in the order that the sampler
    prefers, `taken` the places of later batches that are taken already (batch `update` was given up after them). The
    first candidates are taken but where that would leave a deadline that can't be met.
    """
    deadlines = {group: due for group, due in live if due is not None}
    horizon = max(deadlines.values(), default=update)
    ordered = sorted(deadlines.values())
    # how many live groups with deadline <= h have to go now; the sets are nested, so picking greedily is exact
    open_must = {}
    later = 0
    """places in batches after `update` and up to h"""
    for h in range(update, horizon + 1):
        later += batch - (taken or {}).get(h, 0) if h > update else 0
        open_must[h] = max(0, bisect_right(ordered, h) - (empty - size) - later)
    picked: list[int] = []
    for group in candidates:
        if len(picked) == size:
            break
        due_at = deadlines.get(group)
        needed = max((n for h, n in open_must.items() if due_at is None or due_at > h), default=0)
        if needed > size - len(picked) - 1:
            continue
        picked.append(group)
        if due_at is not None:
            for h in open_must:
                if due_at <= h:
                    open_must[h] -= 1
    unmet = [h for h, n in open_must.items() if n > 0]
    if len(picked) == size and not unmet:
        return Choice(tuple(picked))
    buffered = set(candidates)
    limit = min(unmet, default=None)
    missing = 0 if limit is None else open_must[limit]
    waits = (g for g, due in deadlines.items() if g not in buffered and (limit is None or due <= limit))
    return Choice(None, tuple(sorted(waits)), missing)
