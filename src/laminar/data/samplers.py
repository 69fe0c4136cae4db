"""Samplers: the order in which buffered groups are offered to a batch. The staleness rule picks from it."""

from __future__ import annotations

from collections.abc import Sequence

from laminar.control.accounts import Group, Order


def fifo(groups: Sequence[Group]) -> Sequence[Group]:
    """First buffered, first trained."""
    return sorted(groups, key=lambda g: (g.buffered_order or 0, g.id))


SAMPLERS: dict[str, Order] = {"fifo": fifo}
