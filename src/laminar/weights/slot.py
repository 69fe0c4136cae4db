"""One slot: a file of weights, a small record of its state, and the lock that guards both.

Owns `slot-NN.safetensors` (the bytes), `slot-NN.manifest.json` (what they must be) and `slot-NN.json` (the state).
Consumes nothing; waits for nobody: every lock is taken at once or not at all.
States: EMPTY -> WRITING -> WRITTEN -> WHOLE -> WRITING ..., and WRITTEN -> EMPTY for a version that failed its check.
Invariants:
  * the file's `flock` is the lease. EXCLUSIVE: the writer; SHARED: readers and the verifier. The kernel frees it when
    its holder dies, so nothing has to be cleaned up after a death;
  * the state changes only under the lock (shared is enough to mark WRITTEN as WHOLE or EMPTY: it keeps writers out),
    by replacing the record in one step, and is WRITING before the first byte of the old version is overwritten;
  * WRITING without a holder of the lock is a dead writer's slot: free.
A lease belongs to the open file. Never fork in a process that holds one: the child would hold it too, unseen.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Final

from laminar.errors import StorageError
from laminar.types import Version
from laminar.weights.manifest import Layout, Manifest

_PREFAULT_BYTES: Final = 16 << 20
_MADV_POPULATE_READ: Final = 22  # Linux 5.14; the mmap module has no names for them
_MADV_POPULATE_WRITE: Final = 23


class Lock(IntEnum):
    """How a slot's file is locked; never waited for."""

    SHARED = fcntl.LOCK_SH | fcntl.LOCK_NB
    EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB


class State(StrEnum):
    """How far a slot's version has come."""

    EMPTY = "empty"
    WRITING = "writing"
    WRITTEN = "written"
    """All bytes are there, but nobody else has checked them."""
    WHOLE = "whole"
    """Checked by the relay; readers see it."""


_NO_VERSION: Final = Version(-1, -1)


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a slot holds at one moment."""

    state: State
    version: Version = _NO_VERSION
    """Meaningless when empty."""
    fingerprint: str = ""
    """Known once written."""


EMPTY: Final = SlotState(State.EMPTY)


class Slot:
    """Access of one process to one slot. Mappings are kept, because making one anew costs more than a copy."""

    def __init__(self, folder: Path, index: int, layout: Layout, *, writable: bool) -> None:
        self.index = index
        self.path = folder / f"slot-{index:02d}.safetensors"
        self._state_path = folder / f"slot-{index:02d}.json"
        self._manifest_path = folder / f"slot-{index:02d}.manifest.json"
        self._layout = layout
        self._writable = writable
        self._mapping: mmap.mmap | None = None
        self._prefaulted_bytes = 0

    def create(self) -> None:
        """Makes an empty slot of full length, whose pages are not there yet. Doing it again empties the slot."""
        with self.path.open("wb") as file:
            file.write(self._layout.header)
            file.truncate(self._layout.size)
        self.mark(EMPTY)

    @contextmanager
    def locked(self, lock: Lock) -> Iterator[bool]:
        """Holds the lock inside the `with`, if it could be had at once; says whether."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            yield try_flock(fd, lock)
        finally:
            os.close(fd)

    def read(self) -> SlotState:
        fields = json.loads(self._state_path.read_text())
        return SlotState(State(fields["state"]), Version(*fields["version"]), fields["fingerprint"])

    def mark(self, state: SlotState) -> None:
        """Replaces the state in one step. Only under the lock."""
        fields = {"state": state.state, "version": list(state.version), "fingerprint": state.fingerprint}
        replace_text(self._state_path, json.dumps(fields))

    def read_manifest(self) -> Manifest:
        """The manifest of a slot that is written or whole."""
        return Manifest.from_json(self._manifest_path.read_text())

    def write_manifest(self, manifest: Manifest) -> None:
        """Only under the exclusive lock, while the state is WRITING."""
        replace_text(self._manifest_path, manifest.to_json())

    def memory(self) -> memoryview:
        """All bytes of the file, mapped; read-only unless the slot was opened to write."""
        return memoryview(self._map())

    def private_memory(self) -> memoryview:
        """All bytes in a mapping of its own: what a careless reader writes there is seen by nobody."""
        with self.path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), self._layout.size, access=mmap.ACCESS_COPY))

    def allocate(self) -> None:
        """Makes sure that all pages are there, so that writing to the mapping can't fail.

        Raises:
            StorageError: no room is left.
        """
        with self.path.open("r+b") as file:
            if os.fstat(file.fileno()).st_blocks * 512 < self._layout.size:
                self._fallocate(file.fileno(), 0, self._layout.size)

    def prefault(self) -> bool:
        """Brings the next 16 MiB of pages into this process; false once all are there. Harmless to contents."""
        start = self._prefaulted_bytes
        length = min(_PREFAULT_BYTES, self._layout.size - start)
        if length <= 0:
            return False
        if self._writable:
            with self.path.open("r+b") as file:
                self._fallocate(file.fileno(), start, length)
        try:
            self._map().madvise(_MADV_POPULATE_WRITE if self._writable else _MADV_POPULATE_READ, start, length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # An older kernel: the pages are there, and enter this process at the first touch.
        self._prefaulted_bytes += length
        return True

    def _fallocate(self, fd: int, start: int, length: int) -> None:
        try:
            os.posix_fallocate(fd, start, length)
        except OSError as error:
            raise StorageError(
                "no room is left for weights",
                where=str(self.path),
                expected=f"{length / 2**20:.1f} MiB",
                got=str(error),
                fix="free shared memory, or lower rollout.replicas or relay.spare_slots",
            ) from error

    def _map(self) -> mmap.mmap:
        if self._mapping is None:
            protection = mmap.PROT_READ | mmap.PROT_WRITE if self._writable else mmap.PROT_READ
            with self.path.open("r+b" if self._writable else "rb") as file:
                self._mapping = mmap.mmap(file.fileno(), self._layout.size, prot=protection)
        return self._mapping


def replace_text(path: Path, text: str) -> None:
    """Replaces a small file in one step; readers see the old text or the new one."""
    # A name of its own for each process: two may replace the same file.
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(text)
    draft.replace(path)


def try_flock(fd: int, lock: Lock) -> bool:
    try:
        fcntl.flock(fd, lock)
    except BlockingIOError:
        return False
    return True
