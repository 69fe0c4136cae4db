"""Lifecycles: what is not in a table raises, names who, and changes nothing."""

from __future__ import annotations

import itertools

import pytest

from laminar.control import ledger
from laminar.control.accounts import Accounts
from laminar.errors import IllegalTransition, ProtocolError
from laminar.types import SampleId, Version
from tests.control.plans import make_settings

V0, V1 = Version(0, 0), Version(0, 1)


@pytest.mark.parametrize("name", ledger.TABLES)
def test_every_step_that_is_not_in_the_table_is_illegal(name: str) -> None:
    table = ledger.TABLES[name]
    states = {state for state, _ in table} | set(table.values())
    events = {event for _, event in table}
    for state, event in itertools.product(sorted(states), sorted(events)):
        if (state, event) in table:
            assert ledger.step(table, state, event, "it") == table[state, event]
        else:
            with pytest.raises(IllegalTransition, match=f"group 3: no '{event}' in state '{state}'"):
                ledger.step(table, state, event, "group 3")


@pytest.mark.parametrize("name", ["sample", "group"])
def test_what_has_ended_stays_as_it_is(name: str) -> None:
    """Invariant 2: nothing is trained or dropped twice."""
    assert not {state for state, _ in ledger.TABLES[name]} & ledger.TERMINAL
    reached = {"new"}
    while more := {to for (state, _), to in ledger.TABLES[name].items() if state in reached} - reached:
        reached |= more
    assert reached == {s for s, _ in ledger.TABLES[name]} | set(ledger.TABLES[name].values())


@pytest.fixture
def accounts() -> Accounts:
    """One group of two, issued to r0 under version 0."""
    accounts = Accounts(make_settings())
    accounts.issue("r0", 1, V0)
    return accounts


def test_an_illegal_step_changes_nothing(accounts: Accounts) -> None:
    group = accounts.groups[0]
    accounts.finish(SampleId(0, 0), 0, 0, "stop")
    before = (group.state, group.samples[0].state, list(accounts.events))
    with pytest.raises(IllegalTransition):
        accounts.orphan(group.samples[0])
    assert (group.state, group.samples[0].state, list(accounts.events)) == before


@pytest.mark.parametrize(
    ("start", "length", "answer"),
    [(0, 3, False), (1, 2, False), (0, 1, False), (3, 2, True), (2, 2, ProtocolError), (4, 1, ProtocolError)],
)
def test_tokens_are_appended_without_gap_or_overlap(
    accounts: Accounts, start: int, length: int, answer: bool | type[Exception]
) -> None:
    """Three tokens are stored: what lies below is a resend, what touches is new, anything else is no owner's."""
    sample = SampleId(0, 0)
    assert accounts.append(sample, 0, 0, 3)
    if isinstance(answer, bool):
        assert accounts.append(sample, 0, start, length) is answer
        assert accounts.sample(sample).length == (start + length if answer else 3)  # type: ignore[union-attr]
    else:
        with pytest.raises(answer):
            accounts.append(sample, 0, start, length)
        assert accounts.sample(sample).length == 3  # type: ignore[union-attr]
    assert accounts.append(sample, 1, 3, 1) is None, "another epoch"


def test_a_finished_sample_takes_resends_and_nothing_new(accounts: Accounts) -> None:
    sample = SampleId(0, 0)
    accounts.append(sample, 0, 0, 3)
    accounts.finish(sample, 0, 3, "stop")
    assert accounts.append(sample, 0, 0, 3) is False
    assert accounts.finish(sample, 0, 3, "stop") is False
    with pytest.raises(ProtocolError):
        accounts.append(sample, 0, 3, 1)


@pytest.mark.parametrize(("version", "restarted"), [(V0, 0), (V1, 2)])
def test_orphans_never_begin_under_an_older_version(accounts: Accounts, version: Version, restarted: int) -> None:
    """Protocol §5: the staleness rule was asked under version 1; work begun under 0 would be too old for it."""
    accounts = Accounts(make_settings())
    group = accounts.issue("r0", 1, V1)
    for s in list(group.samples):
        accounts.orphan(s)
    found = accounts.restart("r1", 1, version, [s.id for s in group.samples])
    assert len(found) == restarted
    assert all((s.attempt, s.owner_epoch, s.length, s.owner) == (1, 2, 0, "r1") for s in found)
    assert group.deadline == 2, "the group keeps its deadline"


def test_a_group_goes_on_while_it_is_large_enough() -> None:
    accounts = Accounts(make_settings(group_size=4, min_group_size=2))
    group = accounts.issue("r0", 1, V0)
    for index in range(2):
        accounts.drop(SampleId(0, index), "engine_error", 0)
    assert group.state == "issued"
    accounts.finish(SampleId(0, 2), 0, 0, "stop")
    accounts.drop(SampleId(0, 3), "timeout", 0)
    assert (group.state, group.reason) == ("dropped", "group_incomplete")
    assert [s.reason for s in group.samples] == ["engine_error", "engine_error", "group_incomplete", "timeout"]
    assert accounts.num_live == 0 and accounts.dropped.total() == 4
