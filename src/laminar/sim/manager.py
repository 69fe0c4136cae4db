"""The manager's process: the very `control.manager.Manager`, with its ticks and its post."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from laminar.control.commands import Command, EndRun, Numbered, Remove, Replace, Stop, address
from laminar.control.events import Beat, Event, Recovered, ScorerBeat, Tick, sender_of
from laminar.control.mailbox import Inbox, Mailbox
from laminar.control.manager import Manager, Record, is_news
from laminar.sim.kernel import TICK
from laminar.sim.links import Link
from laminar.sim.process import Life

if TYPE_CHECKING:
    from laminar.sim.process import AnyProcess
    from laminar.sim.store import Store
    from laminar.sim.world import World


class ManagerProcess(Life):
    """One term. Commands leave when the event that they follow from has been handled, and again if they get lost."""

    role = "manager"

    def __init__(self, world: World, incarnation: int, recovered: Recovered) -> None:
        super().__init__(world, "manager", incarnation)
        self.manager = Manager(world.settings)
        self.term = recovered.term
        self._last: dict[tuple[str, str], Beat] = {}
        self._boxes: dict[tuple[str, str, int], Mailbox] = {}
        self.handle(recovered)
        self.after(world.plan.delays.tick_s, self._tick, TICK)

    def links_with(self, peer: str) -> Sequence[Link]:
        """With the data store alone, or with everybody."""
        store = self.world.store
        callers = [store] if peer == "datastore" else [*self.world.processes(), store]
        return [link for caller in callers for link in caller.links_with("manager")]

    def _continue(self) -> None:
        """Time-outs are judged before what has come meanwhile is read: the harder case."""
        if self.alive and not self.stopped:
            self.handle(Tick())
        super()._continue()

    def handle(self, event: Event) -> None:
        world = self.world
        commands = tuple(self.manager.handle(self.kernel.now, event))
        if world.records is not None:
            world.records.append(Record(self.kernel.now, event, commands))
        for command in commands:
            self._send(command)

    def beat(self, beat: Beat) -> None:
        """A beat has come by itself: what says nothing new is left to the next tick."""
        sender = sender_of(beat)
        if is_news(self._last.get(sender), beat):
            self._last[sender] = beat
            self.handle(beat)

    def look(self) -> None:
        """A tick out of turn, so that loads are those of this moment."""
        if not self.alive or self.stopped:
            return
        beats: list[Beat] = [b for p in self.world.processes() if (b := p.quiet_beat()) is not None]
        if (b := self.world.store.quiet_beat()) is not None:
            beats.append(b)
        scorer = self.world.scorer
        if scorer.alive and not scorer.stopped:
            beats.append(ScorerBeat(scorer.incarnation))
        self._last.update((sender_of(beat), beat) for beat in beats)
        self.handle(Tick(tuple(beats)))

    def _tick(self) -> None:
        self.look()
        self.after(self.world.plan.delays.tick_s, self._tick, TICK)

    # ------------------------------------------------------------ post

    def _send(self, command: Command) -> None:
        world = self.world
        if isinstance(command, EndRun | Replace | Remove):
            world.driver.obey(command)
            return
        for receiver in self._receivers(command):
            box = self._box(receiver)
            box.put(command)
            self._post(receiver, box)

    def _receivers(self, command: Command) -> Iterator[Store | AnyProcess]:
        role, id_ = address(command)
        if role == "datastore":
            yield self.world.store
            return
        incarnation = getattr(command, "incarnation", None)
        for process in self.world.processes():
            wanted = process.role == role and (id_ == process.id or (isinstance(command, Stop) and id_ == "*"))
            if wanted and incarnation in (None, process.incarnation):
                yield process

    def _box(self, receiver: Store | AnyProcess) -> Mailbox:
        """The data store keeps what it has taken in over its deaths; another process begins anew."""
        incarnation = 0 if receiver.role == "datastore" else receiver.incarnation
        return self._boxes.setdefault((receiver.role, receiver.id, incarnation), Mailbox(self.term))

    def _post(self, receiver: Store | AnyProcess, box: Mailbox) -> None:
        """Send what has not been acknowledged; again, if the acknowledgement gets lost."""
        if (sent := box.after(Inbox())) and self.alive:
            receiver.from_manager.send(lambda: receiver.take(lambda: self._arrived(receiver, box, sent)))

    def _arrived(self, receiver: Store | AnyProcess, box: Mailbox, sent: Sequence[Numbered]) -> None:
        receiver.hear(sent)
        if receiver.from_manager.lost():
            self.after(self.world.plan.delays.retry_s, lambda: self._post(receiver, box))
        else:
            box.after(Inbox(self.term, sent[-1].number))

    def polled(self, acked: Inbox) -> None:
        """The data store is there, perhaps again: it is sent what it has not carried out."""
        store = self.world.store
        box = self._box(store)
        box.after(acked)
        self._post(store, box)
