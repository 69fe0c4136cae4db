"""Samplers: the order in which buffered groups are offered to a batch. The staleness rule picks from it.

A sampler of the user's is called as `sampler(groups=...)` with a list of `BufferedGroup`, first buffered first, and
gives back the same groups in the order it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from laminar.control.accounts import Group, Order
from laminar.errors import UserCodeError
from laminar.user_code import failed, load_function


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """A group that waits to be trained, as a sampler of the user's sees it."""

    id: int
    version: int
    """Of the weights that generated it."""
    rewards: tuple[float, ...]
    """Weighted sums, of the members that have one."""
    response_tokens: tuple[int, ...]
    """Of the same members."""


def fifo(groups: Sequence[Group]) -> Sequence[Group]:
    """First buffered, first trained."""
    return sorted(groups, key=lambda g: (g.buffered_order or 0, g.id))


@dataclass(frozen=True, slots=True)
class UserSampler:
    """An `Order` made of a function of the user's. Raises UserCodeError for what can't be an order."""

    spec: str
    function: Callable[..., Any]

    def __call__(self, groups: Sequence[Group]) -> Sequence[Group]:
        ordered = fifo(groups)
        try:
            chosen = [group.id for group in self.function(groups=[_seen(group) for group in ordered])]
        except Exception as cause:  # the user's code
            raise failed(self.spec, cause) from cause
        if sorted(chosen) != sorted(group.id for group in groups):
            raise UserCodeError(
                "a sampler only orders: it must give back each group once",
                where=f"`{self.spec}`",
                expected=f"the {len(groups)} groups it was given",
                got=f"groups {', '.join(map(str, chosen[:20]))}",
            )
        by_id = {group.id: group for group in groups}
        return [by_id[id_] for id_ in chosen]


def _seen(group: Group) -> BufferedGroup:
    scored = [s for s in group.samples if s.reward is not None]
    return BufferedGroup(
        group.id, group.version.number, tuple(s.reward or 0.0 for s in scored), tuple(s.length for s in scored)
    )


SAMPLERS: dict[str, Order] = {"fifo": fifo}


def make_order(name: str) -> Order:
    """The sampler of this name or `file.py:function`. Raises UserCodeError."""
    return SAMPLERS[name] if name in SAMPLERS else UserSampler(name, load_function(name, "data.sampler"))
