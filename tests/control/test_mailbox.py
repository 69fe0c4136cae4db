"""Commands on their way: none is lost, carried out twice, or taken from a manager that is no more."""

from __future__ import annotations

from laminar.control.commands import CancelMove, Command, Numbered
from laminar.control.mailbox import Inbox, Mailbox

A, B, C = (CancelMove(name, "") for name in "abc")


def sent(term: int, *commands: Command) -> list[Numbered]:
    box = Mailbox(term)
    for command in commands:
        box.put(command)
    return box.after(Inbox())


def test_commands_are_sent_until_acknowledged() -> None:
    box = Mailbox(3)
    for command in (A, B, C):
        box.put(command)
    assert box.after(Inbox()) == [Numbered(3, 1, A), Numbered(3, 2, B), Numbered(3, 3, C)]
    assert box.after(Inbox(3, 2)) == [Numbered(3, 3, C)] == box.after(Inbox()), "what was acknowledged is gone for good"


def test_each_is_carried_out_once() -> None:
    """Protocol, "Truth, terms, events": also when the answer got lost and all come again."""
    inbox = Inbox()
    assert inbox.take(sent(1, A, B)) == [A, B]
    assert inbox.take(sent(1, A, B, C)) == [C]
    assert inbox.take(sent(1, A)) == []


def test_an_earlier_manager_is_refused_and_a_later_one_begins_at_its_first() -> None:
    inbox = Inbox(2, 5)
    assert inbox.take(sent(1, A, B, C)) == []
    assert inbox.take(sent(3, A, B)) == [A, B]
    assert (inbox.term, inbox.number) == (3, 2)
    assert inbox.take(sent(2, A, B, C)) == []
