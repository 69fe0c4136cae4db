"""The trainer: takes a batch, trains it, publishes, takes the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from laminar.control.accounts import Cut
from laminar.control.commands import Command, Stop
from laminar.control.events import TrainerBeat
from laminar.errors import ProtocolError
from laminar.sim.links import Link
from laminar.sim.process import Client, Process
from laminar.types import Version

if TYPE_CHECKING:
    from laminar.sim.world import World


class Trainer(Process[TrainerBeat], Client):
    """One incarnation, from a checkpoint on: it takes a batch, trains it, publishes, and takes the next."""

    role = "trainer"

    def __init__(self, world: World, incarnation: int, checkpoint: int) -> None:
        super().__init__(world, "trainer", incarnation)
        self.checkpoint = self.version = checkpoint
        self.state = "starting"
        delays = world.plan.delays
        self.from_store, self.to_store = world.link(delays.exchange_s), world.link(delays.exchange_s)
        self._waiting: list[Cut | None] = []
        """Parts of batches that have come; None: there will be no more."""
        self._training = False
        self.after(world.publish_s, self._begin)

    def inboxes(self) -> tuple[Link, ...]:
        return (*super().inboxes(), self.from_store)

    def links_with(self, peer: str) -> Sequence[Link]:
        return (self.from_store, self.to_store) if peer == "datastore" else super().links_with(peer)

    # ------------------------------------------------------------ manager

    def beat(self) -> TrainerBeat:
        shown = self.state != "starting" and self.version >= self.world.highest
        version = Version(0, self.version) if shown else None
        return TrainerBeat(self.incarnation, version, self.checkpoint, self.state)

    def obey(self, command: Command) -> None:
        if not isinstance(command, Stop):
            raise ProtocolError(f"the trainer can't do {command}")
        self.kill()

    # ------------------------------------------------------------ batches

    def receive(self, cut: Cut | None) -> None:
        if self.alive:
            self._waiting.append(cut)
            self._go_on()

    def _request(self, update: int, part: int) -> None:
        if update != self.world.settings.iterations:
            self.ask(lambda: self.world.store.want(update, part, self))
        else:
            self._waiting.append(None)

    def request_again(self, update: int, part: int) -> None:
        """The data store died before the answer came."""
        self.ask_again(lambda: self.world.store.want(update, part, self))

    def _request_after(self, cut: Cut) -> None:
        last = cut.part + 1 == cut.num_parts
        self._request(cut.update + last, 0 if last else cut.part + 1)

    def _go_on(self) -> None:
        if self._training or not self._waiting:
            return
        cut = self._waiting.pop(0)
        if cut is None:
            self.state = "done"
            self.speak()
            self.to_manager.send(lambda: self.world.driver.returned(self))
            return
        if cut.update != self.version:
            raise ProtocolError(f"batch {cut.update} came while the weights are version {self.version}")
        self._training = True
        if self.world.plan.prefetch:
            self._request_after(cut)
        step_s = self._step_s(cut)
        self.world.trainer_busy_s += step_s
        if cut.part == 0 and self.world.plan.colocated:
            step_s += self.world.plan.profile.switch_s
        if cut.part + 1 == cut.num_parts:  # what repack will know of the loads when this is published
            loads_s = step_s + self.world.publish_s - self.world.plan.delays.load_age_s
            self.after(max(0.0, loads_s), lambda: self.world.manager.look())
        self.after(step_s, lambda: self._stepped(cut))

    def _step_s(self, cut: Cut) -> float:
        """Seconds of training on one part of a batch."""
        plan = self.world.plan
        if not cut.groups:
            return 0.0
        mini_batches = self.world.settings.num_mini_batches // cut.num_parts
        tokens = self.world.store.num_tokens(cut)
        return plan.profile.train_step_s(tokens, mini_batches, plan.train_gpus, first=cut.part == 0)

    def _stepped(self, cut: Cut) -> None:
        if cut.part + 1 == cut.num_parts:
            self.after(self.world.publish_s, lambda: self._iterated(cut))
            return
        self._training = False
        if not self.world.plan.prefetch:
            self._request_after(cut)
        self._go_on()

    def _iterated(self, cut: Cut) -> None:
        self.version += 1
        self._published()
        self._report(cut)

    def _begin(self) -> None:
        self._published()
        self._request(self.version, 0)
        self._go_on()

    def _published(self) -> None:
        """The weights are where the relay of this machine finds them, unless newer ones once were."""
        self.state = "training"
        if self.version >= self.world.highest:
            self.world.publish(Version(0, self.version))
        self.speak()

    def _report(self, cut: Cut) -> None:
        """Tell the data store; again, if its answer gets lost."""
        self.ask(lambda: self._reported(cut))

    def _reported(self, cut: Cut) -> None:
        self.world.store.trained(cut.update)
        if self.to_store.lost():
            self.ask_again(lambda: self._reported(cut))
        else:
            self.when_running(lambda: self._answered(cut))

    def _answered(self, cut: Cut) -> None:
        if self.version % self.world.plan.checkpoint_every == 0:
            self.checkpoint = self.world.checkpoint = self.version
        self._training = False
        if not self.world.plan.prefetch:
            self._request_after(cut)
        self._go_on()
