"""The scorer: gives a finished group its rewards, after the time that a reward takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from laminar.control.accounts import Group
from laminar.sim.links import Link
from laminar.sim.process import Client
from laminar.timing import keyed_uniform

if TYPE_CHECKING:
    from laminar.sim.world import World


class Scorer(Client):
    """One incarnation. Groups are scored side by side."""

    role = "scorer"

    def __init__(self, world: World, incarnation: int) -> None:
        super().__init__(world, "scorer", incarnation)
        self.from_store, self.to_store = world.link(0.0), world.link(world.plan.delays.exchange_s)

    def inboxes(self) -> tuple[Link, ...]:
        return (self.from_store,)

    def links_with(self, peer: str) -> Sequence[Link]:
        return (self.from_store, self.to_store) if peer == "datastore" else ()

    def receive(self, group: Group) -> None:
        self.after(self.world.plan.profile.reward_s, lambda: self.ask(lambda: self._score(group)))

    def _score(self, group: Group) -> None:
        """The scores reach the data store. If the answer gets lost they come again, and may be others."""
        plan, rewards = self.world.plan, []
        chances = plan.chances
        flat = chances.zero_variance > 0 and keyed_uniform("flat", plan.seed, group.id) < chances.zero_variance
        for s in group.members("finished"):
            failed = chances.reward_error > 0 and keyed_uniform("reward", plan.seed, *s.id) < chances.reward_error
            rewards.append((s.id, s.attempt, None if failed else 1.0 if flat else float(s.id.index)))
        self.world.store.scored(group, rewards)
        if self.to_store.lost():
            self.world.store.scored(group, [(sample, attempt, -1.0) for sample, attempt, _ in rewards])
