"""The scorer: gives a finished group its rewards, after the time that a reward takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laminar.control.accounts import Group
from laminar.timing import keyed_uniform

if TYPE_CHECKING:
    from laminar.sim.world import World


class Scorer:
    """One incarnation. Groups are scored side by side."""

    def __init__(self, world: World, incarnation: int) -> None:
        self.world, self.incarnation = world, incarnation
        self._link = world.link(world.plan.delays.exchange_s)
        self.alive = True

    def take(self, group: Group) -> None:
        reward_s = self.world.plan.profile.reward_s
        self.world.kernel.after(reward_s, lambda: self._link.send(lambda: self._score(group)))

    def _score(self, group: Group) -> None:
        if not self.alive:
            return
        plan, rewards = self.world.plan, []
        chances = plan.chances
        flat = chances.zero_variance > 0 and keyed_uniform("flat", plan.seed, group.id) < chances.zero_variance
        for s in group.members("finished"):
            failed = chances.reward_error > 0 and keyed_uniform("reward", plan.seed, *s.id) < chances.reward_error
            rewards.append((s.id, s.attempt, None if failed else 1.0 if flat else float(s.id.index)))
        self.world.store.scored(group, rewards)
        if self._link.lost():
            self.world.store.scored(group, [(sample, attempt, -1.0) for sample, attempt, _ in rewards])
