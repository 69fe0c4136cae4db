"""What replicas, relays and the trainer have in common: one life, and a voice to the manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from laminar.control.commands import Command
from laminar.control.events import Beat
from laminar.sim.kernel import Action
from laminar.sim.links import Link

if TYPE_CHECKING:
    from laminar.sim.world import World

B = TypeVar("B", bound=Beat)


class Process(ABC, Generic[B]):
    """One incarnation. What it has sent arrives even if it has died since; what it has planned does not happen."""

    role: str

    def __init__(self, world: World, id_: str, incarnation: int) -> None:
        self.id, self.incarnation = id_, incarnation
        self.alive = True
        self._stopped_until = 0.0
        self.world, self.kernel = world, world.kernel
        self.from_manager = world.link(world.plan.delays.beat_s)
        self.to_manager = world.link(world.plan.delays.beat_s)
        self._beats_on_their_way = 0

    def kill(self) -> None:
        self.alive = False

    def inboxes(self) -> tuple[Link, ...]:
        """Links that end here."""
        return (self.from_manager,)

    def links_with(self, peer: str) -> tuple[Link, ...]:
        """Both directions between this process and `manager` or `datastore`."""
        return (self.from_manager, self.to_manager) if peer == "manager" else ()

    def stall(self, seconds: float) -> None:
        """Stop, and continue later: what it has planned and what comes in meanwhile wait until then."""
        self._stopped_until = max(self._stopped_until, self.kernel.now + seconds)
        for link in self.inboxes():
            link.hold(self._stopped_until)

    @property
    def stopped(self) -> bool:
        return self.kernel.now < self._stopped_until

    @abstractmethod
    def obey(self, command: Command) -> None:
        """Do what the manager wants."""

    @abstractmethod
    def beat(self) -> B:
        """What there is to say at this moment."""

    def quiet_beat(self) -> B | None:
        """What the next tick carries; None while a beat is on its way, which is newer than what it would replace.

        None as well while it is stopped or nothing gets through.
        """
        return None if self._beats_on_their_way or self.stopped or self.to_manager.held else self.beat()

    def speak(self) -> None:
        """Send a beat now: there is news."""
        beat = self.beat()
        self._beats_on_their_way += 1
        self.to_manager.send(lambda: self._heard(beat))

    def _heard(self, beat: B) -> None:
        self._beats_on_their_way -= 1
        self.world.manager.beat(beat)

    def after(self, seconds: float, action: Action) -> None:
        """Do something later, if still alive then, and not before it is continued."""
        self.kernel.after(seconds, lambda: self.when_running(action))

    def when_running(self, action: Action) -> None:
        """Do something now; if it is stopped, when it is continued."""
        if self.alive and self.stopped:
            self.kernel.at(self._stopped_until, lambda: self.when_running(action))
        elif self.alive:
            action()
