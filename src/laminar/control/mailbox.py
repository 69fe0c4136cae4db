"""Commands on their way: numbered, sent until they are acknowledged, and carried out once, for the newest manager only.

The receiver's `Inbox` is as durable as what its commands change: the data store keeps it in the transaction that
carries them out, so that a command is neither lost nor repeated when the store dies in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from laminar.control.commands import Command, Numbered


class Mailbox:
    """What one manager has for one process, kept until the process says that it has it."""

    def __init__(self, term: int) -> None:
        self.term = term
        self._waiting: list[Numbered] = []
        self._last = 0

    def put(self, command: Command) -> None:
        self._last += 1
        self._waiting.append(Numbered(self.term, self._last, command))

    def after(self, acked: Inbox) -> list[Numbered]:
        """All commands that are not in that inbox, in order; the others are forgotten."""
        if acked.term == self.term:
            self._waiting = [n for n in self._waiting if n.number > acked.number]
        return list(self._waiting)

    def begin(self, incarnation: int) -> None:
        """A new process reads it: what was meant for its predecessor alone is forgotten."""
        self._waiting = [n for n in self._waiting if getattr(n.command, "incarnation", incarnation) == incarnation]


@dataclass(slots=True)
class Inbox:
    """What one process has taken in: commands up to `number` of the manager of `term`."""

    term: int = 0
    number: int = 0

    def take(self, sent: Iterable[Numbered]) -> list[Command]:
        """The commands that are new, in order. Those of a lower term are refused, a higher one begins at its first."""
        new = []
        for n in sent:
            if n.term > self.term:
                self.term, self.number = n.term, 0
            if n.term == self.term and n.number > self.number:
                self.number = n.number
                new.append(n.command)
        return new
