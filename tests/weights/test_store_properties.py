"""Random orders of publishing, checking, leasing, keeping and dying, against what must always hold."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from laminar.errors import VersionGone
from laminar.types import SlotRef, Version
from laminar.weights import Lease, SlotStore, VersionRecord
from tests.weights.conftest import Machine, make_tensors

READERS, SPARE = 2, 1


class Died(Exception):
    """The trainer, in mid-copy."""


class RingOfSlots(RuleBasedStateMachine):
    """Invariants 4, 5 and 6 of docs/architecture.md for a ring of 4 + readers + spare slots."""

    refs = Bundle("refs")
    leases = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.machine = Machine(folder, num_slots=4 + READERS + SPARE)
        reader = SlotStore.open(folder / "slots")
        assert reader is not None
        self.reader = reader
        self.number = 0
        self.open: dict[Version, int] = {}
        self.kept: list[Version] = []
        self.shown: list[Version] = []

    @rule()
    def publish(self) -> None:
        """Never blocks and never fails; gives up what can best be spared."""
        before = self.machine.store.whole()
        version = Version(0, self.number)
        result = self.machine.store.publish(version, make_tensors(self.number).items(), [])
        self.machine.log.append(VersionRecord(version, result.fingerprint))
        self.number += 1
        if result.reclaimed is not None:
            gone = result.reclaimed.version
            assert gone not in self.open, "a leased version was overwritten"
            assert gone != max(before, default=None), "the newest whole version was given up"
            assert result.reclaimed.was_kept == (gone in self.kept)
            if result.reclaimed.was_kept:
                spare = set(before[:-1]) - set(self.kept) - self.open.keys()
                assert not spare, "a kept version went though another could be spared"

    @rule(count=st.integers(0, 4))
    def die_in_mid_copy(self, count: int) -> None:
        def half() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(make_tensors(-1).items())[:count]
            raise Died

        with suppress(Died):
            self.machine.store.publish(Version(0, 10_000), half(), [])

    @rule()
    def check(self) -> None:
        self.machine.relay.step()

    @rule(target=refs)
    def look(self) -> object:
        ref = self.reader.newest()
        return multiple() if ref is None else ref

    @precondition(lambda self: sum(self.open.values()) < READERS)
    @rule(target=leases, ref=consumes(refs))
    def lease(self, ref: SlotRef) -> object:
        stack = ExitStack()
        try:
            lease = stack.enter_context(self.reader.lease(ref))
        except VersionGone:
            assert self.reader.find(ref.version) is None
            return multiple()
        self.open[ref.version] = self.open.get(ref.version, 0) + 1
        return ref.version, lease, stack

    @rule(held=consumes(leases))
    def read_and_unlock(self, held: tuple[Version, Lease, ExitStack]) -> None:
        version, lease, stack = held
        expected = make_tensors(version.number)
        arrived = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        lease.copy_into(arrived)
        assert all(torch.equal(arrived[name], tensor) for name, tensor in expected.items())
        stack.close()
        self.open[version] -= 1
        if not self.open[version]:
            del self.open[version]

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        self.kept = (
            data.draw(st.lists(st.sampled_from(self.machine.store.whole()), unique=True))
            if self.machine.store.whole()
            else []
        )
        self.machine.store.keep(self.kept)

    @rule()
    def restart_relay(self) -> None:
        self.machine.relay = type(self.machine.relay)(
            self.machine.store.folder, self.machine.log, self.machine.relay.settings
        )

    @invariant()
    def what_is_shown_is_what_was_published(self) -> None:
        if not hasattr(self, "machine"):
            return
        whole = self.reader.whole()
        assert len(set(whole)) == len(whole)
        assert self.open.keys() <= set(whole), "a leased version is no longer shown"
        for version in whole:
            ref = self.reader.find(version)
            assert ref is not None
            assert ref.fingerprint == self.machine.store.digest_only(make_tensors(version.number).items())

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()


RingOfSlots.TestCase.settings = settings(max_examples=20, stateful_step_count=40)
TestRingOfSlots = RingOfSlots.TestCase
