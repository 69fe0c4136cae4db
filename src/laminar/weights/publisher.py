"""The two ends of one machine's slots: the trainer that fills them and a replica that looks in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.errors import VersionGone
from laminar.types import SlotRef, Version
from laminar.weights.manifest import Layout
from laminar.weights.store import Lease, SlotStore
from laminar.weights.versions import VersionLog, VersionRecord

if TYPE_CHECKING:
    from laminar.weights.store import Weights


class Publisher:
    """Writes versions into slots and into `versions.jsonl`. Makes the slots when it sees the first weights."""

    def __init__(self, slots: Path, versions: Path, dtype: str, num_slots: int) -> None:
        self._slots, self._log, self._dtype, self._num_slots = slots, VersionLog(versions), dtype, num_slots
        self._store: SlotStore | None = None

    def records(self) -> Iterable[tuple[Version, str]]:
        self._log.repair()
        return [(record.version, record.fingerprint) for record in self._log.records()]

    def append_record(self, version: Version, fingerprint: str) -> None:
        self._log.append(VersionRecord(version, fingerprint))

    def digest(self, weights: Iterator[tuple[str, Weights]]) -> str:
        named = list(weights)
        return self._opened(named).digest_only(named)

    def publish(self, version: Version, weights: Iterator[tuple[str, Weights]], golden: Sequence[float]) -> str:
        named = list(weights)
        return self._opened(named).publish(version, named, golden).fingerprint

    def _opened(self, named: Sequence[tuple[str, Weights]]) -> SlotStore:
        if self._store is None:
            layout = Layout.of([(name, tensor.shape) for name, tensor in named], self._dtype)
            self._store = SlotStore.create_or_open(self._slots, layout, self._num_slots)
        return self._store


class LocalVersions:
    """What a replica sees of its machine's slots. They may be made later than the replica."""

    def __init__(self, slots: Path) -> None:
        self._slots = slots
        self._store: SlotStore | None = None

    def find(self, version: Version) -> SlotRef | None:
        """Where this version lies whole, or None."""
        store = self._opened()
        return None if store is None else store.find(version)

    def lease(self, ref: SlotRef) -> AbstractContextManager[Lease]:
        """Raises VersionGone if the slot no longer holds it."""
        store = self._opened()
        if store is None:
            raise VersionGone(f"version {ref.version}: the slots are gone")
        return store.lease(ref)

    def _opened(self) -> SlotStore | None:
        if self._store is None:
            self._store = SlotStore.open(self._slots)
        return self._store
