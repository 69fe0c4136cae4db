"""What all simulated processes have in common: one life at a time, and a voice to those whom they call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from laminar.control.commands import Command, Numbered
from laminar.control.events import Beat
from laminar.control.mailbox import Inbox
from laminar.errors import ProtocolError
from laminar.sim.kernel import MESSAGE, Action
from laminar.sim.links import Link

if TYPE_CHECKING:
    from laminar.sim.manager import ManagerProcess
    from laminar.sim.world import World

B = TypeVar("B", bound=Beat)


def nothing() -> None:
    """What happens if a call fails that nobody waits for."""


def new_commands(inbox: Inbox, sent: Sequence[Numbered]) -> list[Command]:
    """Raises ProtocolError if one that an earlier manager has sent is taken for new."""
    term, commands = inbox.term, inbox.take(sent)
    if commands and any(n.term < term for n in sent):
        raise ProtocolError(f"{commands} were carried out in term {term}")
    return commands


class Life(ABC):
    """One incarnation. What it has sent arrives even if it has died since; what it has planned does not happen."""

    role: str

    def __init__(self, world: World, id_: str, incarnation: int) -> None:
        self.world, self.kernel = world, world.kernel
        self.id, self.incarnation = id_, incarnation
        self.alive = True
        self._stopped_until = 0.0
        self._calls: list[tuple[Action, Action]] = []
        """Calls that came while it was stopped, each with what happens if it is never taken in."""

    def kill(self) -> None:
        self.alive = False
        calls, self._calls = self._calls, []
        for _, failed in calls:
            failed()

    def stall(self, seconds: float) -> None:
        """Stop, and continue later: what it has planned and what comes in meanwhile wait until then."""
        self._stopped_until = max(self._stopped_until, self.kernel.now + seconds)
        self.kernel.at(self._stopped_until, self._continue)  # before anything that waits for this moment
        for link in self.inboxes():
            link.hold(self._stopped_until)

    def _continue(self) -> None:
        while self._calls and self.alive and not self.stopped:
            self._calls.pop(0)[0]()

    @property
    def stopped(self) -> bool:
        return self.kernel.now < self._stopped_until

    def inboxes(self) -> tuple[Link, ...]:
        """Links that end here and wait while it is stopped."""
        return ()

    @abstractmethod
    def links_with(self, peer: str) -> Sequence[Link]:
        """Both directions between this process and `manager` or `datastore`."""

    def take(self, call: Action, failed: Action = nothing) -> None:
        """A call from outside: taken in now or when continued; `failed` if that does not happen in this life."""
        if not self.alive:
            failed()
        elif self.stopped or self._calls:
            self._calls.append((call, failed))
        else:
            call()

    def after(self, seconds: float, action: Action, priority: int = MESSAGE) -> None:
        """Do something later, if still alive then, and not before it is continued."""
        incarnation = self.incarnation
        self.kernel.after(seconds, lambda: self._when_running(incarnation, action, priority), priority)

    def when_running(self, action: Action) -> None:
        """Do something now; if it is stopped, when it is continued."""
        self._when_running(self.incarnation, action, MESSAGE)

    def _when_running(self, incarnation: int, action: Action, priority: int) -> None:
        if not self.alive or self.incarnation != incarnation:
            return
        if self.stopped:
            self.kernel.at(self._stopped_until, lambda: self._when_running(incarnation, action, priority), priority)
        else:
            action()


class Client(Life):
    """Who calls the data store: again and again, until it has taken in what there is to say."""

    from_store: Link
    to_store: Link

    def ask(self, question: Action) -> None:
        self.to_store.send(lambda: self.world.store.take(question, lambda: self.ask_again(question)))

    def ask_again(self, question: Action) -> None:
        """The answer did not come."""
        self.after(self.world.plan.delays.retry_s, lambda: self.ask(question))


class Process(Life, Generic[B]):
    """Who reports to the manager."""

    def __init__(self, world: World, id_: str, incarnation: int) -> None:
        super().__init__(world, id_, incarnation)
        delays = world.plan.delays
        self.manager: ManagerProcess = world.manager
        """Whom it calls; if that one is dead, it is told of the next."""
        self.inbox = Inbox()
        self.from_manager, self.to_manager = world.link(delays.beat_s), world.link(delays.beat_s)
        self.from_driver = world.link(delays.beat_s)
        self._beats_on_their_way = 0

    def inboxes(self) -> tuple[Link, ...]:
        return (self.from_manager, self.from_driver)

    def links_with(self, peer: str) -> Sequence[Link]:
        return (self.from_manager, self.to_manager) if peer == "manager" else ()

    def meet(self, manager: ManagerProcess) -> None:
        """The driver has made another manager: it is told all there is to say, and the last one is obeyed no more."""
        if self.alive:
            self.manager, self.inbox = manager, Inbox(manager.term)
            self.speak()

    def hear(self, sent: Sequence[Numbered]) -> None:
        """Commands, some of which may have come before."""
        for command in new_commands(self.inbox, sent):
            self.obey(command)

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
        silent = self._beats_on_their_way or self.stopped or self.to_manager.held
        return None if silent or self.manager is not self.world.manager else self.beat()

    def speak(self) -> None:
        """Send a beat now: there is news."""
        beat, manager = self.beat(), self.manager
        self._beats_on_their_way += 1
        self.to_manager.send(lambda: self._arrived(beat, manager))

    def _arrived(self, beat: B, manager: ManagerProcess) -> None:
        self._beats_on_their_way -= 1
        manager.take(lambda: manager.beat(beat))


AnyProcess = Process[Any]
