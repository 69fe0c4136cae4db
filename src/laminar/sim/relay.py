"""A relay: the versions that lie in the shared memory of one machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laminar.control.chain import accepts, next_transfer
from laminar.control.commands import Command, Keep, Links, Stop
from laminar.control.events import RelayBeat
from laminar.errors import ProtocolError
from laminar.sim.links import Link
from laminar.sim.process import Process
from laminar.types import Version

if TYPE_CHECKING:
    from laminar.sim.world import World


class Relay(Process[RelayBeat]):
    """What lies in the shared memory of one machine."""

    role = "relay"

    def __init__(
        self, world: World, id_: str, incarnation: int, node: str, broadcast_s: float, slots: tuple[Version, ...]
    ) -> None:
        """`broadcast_s`: from a publish until the version is here; `slots`: what the last incarnation left there."""
        super().__init__(world, id_, incarnation)
        self.node, self.began = node, self.kernel.now
        self.whole = slots
        """Oldest first"""
        self.from_trainer = world.link(0.0)
        self.broadcast_s = broadcast_s
        self._receiving: Version | None = None
        self._next: Version | None = None
        self._keep: tuple[Version, ...] = ()
        self._epoch = 0
        self.speak()

    def offer(self, version: Version) -> None:
        """The chain has a version for this machine."""
        if not self.alive or version in self.whole:
            return
        waiting = [v for v in (self._next, version) if v is not None]
        self._transfer(*next_transfer(self._receiving, waiting))

    def _transfer(self, version: Version | None, after: Version | None) -> None:
        self._next = after
        if version is not None and version != self._receiving:
            self._receiving = version
            self.after(self.broadcast_s, lambda: self._received(version))

    def _received(self, version: Version) -> None:
        if version != self._receiving:
            return  # given up meanwhile
        self._receiving = None
        self.receive(version)
        self._transfer(self._next, None)

    def receive(self, version: Version) -> None:
        """A version has come and is verified. Of the older ones, those that are worth keeping stay, as slots allow."""
        if not self.alive or version in self.whole:
            return
        newest = max((version, *self.whole))
        kept = [v for v in self.whole if v in self._keep and v != newest]
        spare = self.world.plan.spare_slots
        self.whole = (*(kept[-spare:] if spare else ()), newest)
        self.speak()

    def inboxes(self) -> tuple[Link, ...]:
        return (*super().inboxes(), self.from_trainer)

    def beat(self) -> RelayBeat:
        return RelayBeat(self.id, self.incarnation, self.node, self.whole, 1)

    def obey(self, command: Command) -> None:
        match command:
            case Keep():
                self._keep = command.versions
            case Links():  # who forwards to whom is in the times, not in what is decided
                if not accepts(self._epoch, command.epoch):
                    raise ProtocolError(f"{self.id} has seen epoch {self._epoch} of the chain and is told {command}")
                self._epoch = command.epoch
            case Stop():
                self.kill()
            case other:
                raise ProtocolError(f"{self.id} can't do {other}")
