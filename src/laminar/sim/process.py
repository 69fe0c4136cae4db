"""What replicas, relays and the trainer have in common: one life, and a voice to the manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from laminar.control.commands import Command
from laminar.control.events import Beat
from laminar.sim.kernel import Action

if TYPE_CHECKING:
    from laminar.sim.world import World

B = TypeVar("B", bound=Beat)


class Process(Generic[B]):
    """One incarnation. What it has sent arrives even if it has died since; what it has planned does not happen."""

    role: str

    def __init__(self, world: World, id_: str, incarnation: int) -> None:
        self.id, self.incarnation = id_, incarnation
        self.alive = True
        self.world, self.kernel = world, world.kernel
        self.from_manager = world.link(world.plan.delays.beat_s)
        self.to_manager = world.link(world.plan.delays.beat_s)
        self._beats_on_their_way = 0

    def kill(self) -> None:
        self.alive = False

    def obey(self, command: Command) -> None:
        """Do what the manager wants."""
        raise NotImplementedError

    def beat(self) -> B:
        """What there is to say at this moment."""
        raise NotImplementedError

    def quiet_beat(self) -> B | None:
        """What the next tick carries; None while a beat is on its way, which is newer than what it would replace."""
        return None if self._beats_on_their_way else self.beat()

    def speak(self) -> None:
        """Send a beat now: there is news."""
        beat = self.beat()
        self._beats_on_their_way += 1
        self.to_manager.send(lambda: self._heard(beat))

    def _heard(self, beat: B) -> None:
        self._beats_on_their_way -= 1
        self.world.manager.beat(beat)

    def after(self, seconds: float, action: Action) -> None:
        """Do something later, if still alive then."""
        self.kernel.after(seconds, lambda: self._if_alive(action))

    def _if_alive(self, action: Action) -> None:
        if self.alive:
            action()
