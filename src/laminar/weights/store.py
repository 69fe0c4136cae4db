"""Weight versions of one machine: a ring of slots in shared memory.

Owns a folder (`layout.json`, `keep.json` and the slots), the same for every process of the machine.
Consumes what the trainer publishes; frees nothing but by writing over it.
Waits for nobody: publishing takes a slot that is free at once, reading takes a version that is whole.
Invariants:
  * memory is `num_slots` files of one size, whatever happens;
  * a version is seen by readers only after the relay has marked it whole, and all of its bytes are then constant
    for as long as anybody leases it;
  * the newest whole version is never given up; a kept one only when no other slot can be had, and that is reported.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import psutil

from laminar.errors import StorageError, VersionGone, WeightsError
from laminar.types import TRAINER_SLOTS, SlotRef, Version
from laminar.weights.digests import copy_bytes, digest_of
from laminar.weights.manifest import Layout, Manifest, fingerprint_of
from laminar.weights.slot import EMPTY, Lock, Slot, SlotState, State, replace_text, try_flock

if TYPE_CHECKING:
    import torch

    Weights = torch.Tensor | np.ndarray
    """An array must have the published form already; a tensor is converted. Tensors alone need torch here."""

WAIT_FOR_PLACE_S: Final = 0.01

_HELD: Final = (State.WRITTEN, State.WHOLE)


class NoFreeSlot(WeightsError):
    """Every slot is leased or holds the newest version: there are more readers than the ring was made for."""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """A version that is no longer held, because its slot was needed."""

    version: Version
    was_kept: bool
    """Some trajectory may still have needed it."""


@dataclass(frozen=True, slots=True)
class Published:
    """What came of one publish."""

    fingerprint: str
    digests: tuple[str, ...]
    """Of each tensor, in the order of the layout."""
    stall_s: float
    """How long the trainer was held up."""
    slot: int
    reclaimed: Reclaimed | None = None
    """What had to go."""


class Lease:
    """A version that can't be overwritten while the `with` block of `SlotStore.lease` lasts."""

    def __init__(self, layout: Layout, slot: Slot, manifest: Manifest) -> None:
        self.layout = layout
        self.manifest = manifest
        self._slot = slot

    @property
    def golden(self) -> tuple[float, ...]:
        """The trainer's log-probs on the golden prompt; empty when the version has none."""
        return self.manifest.golden

    def tensors(self, *, verify: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Views on the slot, name by name in the order of the layout, without a copy.

        They end with the lease: afterwards their contents change. Writing to one changes the writer's private
        memory only.

        Args:
            verify: digest each tensor before it is handed out.

        Raises:
            WeightsError: a tensor is not what the manifest says (with `verify`).
        """
        import torch

        memory = self._slot.private_memory()
        for entry, digest in zip(self.layout, self.manifest.digests, strict=True):
            source = memory[entry.start : entry.stop]
            if verify and digest_of(source) != digest:
                raise WeightsError(_differs(self.manifest.version, [entry.name]))
            dtype = self.layout.torch_dtype
            flat = torch.frombuffer(source, dtype=dtype) if source else torch.empty(0, dtype=dtype)
            yield entry.name, flat.view(entry.shape)

    def copy_into(self, destination: Mapping[str, torch.Tensor]) -> None:
        """Copies the version into tensors of the same names and shapes, and checks what arrived.

        Fastest into contiguous CPU tensors of the published dtype.

        Raises:
            WeightsError: a name or shape differs (nothing is copied then), or the bytes are not those of the
                version (`destination` is spoilt then).
        """
        from laminar.weights.copying import copy_out

        _check_tensors(self.layout, {name: tensor.shape for name, tensor in destination.items()})
        memory = self._slot.memory()
        bad = []
        for entry, digest in zip(self.layout, self.manifest.digests, strict=True):
            source = memory[entry.start : entry.stop]
            if copy_out(source, destination[entry.name], self.layout.torch_dtype) != digest:
                bad.append(entry.name)
        if bad:
            raise WeightsError(_differs(self.manifest.version, bad))


class SlotStore:
    """The ring of slots in one folder, as one process uses it. Not for several threads at once, except `keep`."""

    def __init__(self, folder: Path, layout: Layout, num_slots: int, *, writable: bool) -> None:
        self.folder = folder
        self.layout = layout
        self.slots = tuple(Slot(folder, index, layout, writable=writable) for index in range(num_slots))

    @classmethod
    def create_or_open(cls, folder: Path, layout: Layout, num_slots: int) -> SlotStore:
        """The store in this folder, made if it is not there. Any process may call this, also at the same time.

        Raises:
            StorageError: memory lacks room for the slots, or the folder holds slots of another form.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "create.lock").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            existing = cls.open(folder, writable=True)
            if existing is None:
                check_room(folder, layout, num_slots)
                store = cls(folder, layout, num_slots, writable=True)
                for slot in store.slots:
                    slot.create()
                store.keep(())
                fields = {"num_slots": num_slots, "layout": layout.to_json()}
                replace_text(folder / "layout.json", json.dumps(fields))  # last: it says that the rest is there
                return store
        if existing.layout != layout or len(existing.slots) != num_slots:
            raise StorageError(
                "the folder holds the weight slots of another model or configuration",
                where=str(folder),
                expected=f"{num_slots} slots of layout {layout.digest}",
                got=f"{len(existing.slots)} slots of layout {existing.layout.digest}",
                fix="remove the folder; if a run is using it, stop that run first",
            )
        return existing

    @classmethod
    def open(cls, folder: Path, *, writable: bool = False) -> SlotStore | None:
        """The store in this folder, or None if it has not been made (yet)."""
        try:
            fields = json.loads((folder / "layout.json").read_text())
        except FileNotFoundError:
            return None
        return cls(folder, Layout.from_json(fields["layout"]), fields["num_slots"], writable=writable)

    @staticmethod
    def destroy(folder: Path) -> None:
        """Removes the folder and gives its memory back. Nothing happens if there is none."""
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)

    # ------------------------------------------------------------ writing

    def publish(self, version: Version, tensors: Iterable[tuple[str, Weights]], golden: Sequence[float]) -> Published:
        """Copies a version into a slot, in one pass, and goes on: the relay checks it and shows it.

        A version that readers may have is not written again, only compared. One that has been written but not shown
        is written anew: a trainer that died may have left it without a record, with other contents.

        Args:
            version: what readers will know it by.
            tensors: every tensor of the layout once, in any order, of any float dtype.
            golden: log-probs on the golden prompt.

        Raises:
            NoFreeSlot: see there. Can't happen: readers leave `TRAINER_SLOTS`.
            WeightsError: the tensors are not those of the layout, or readers have the version with other contents.
                The slot is then free again.
        """
        start = time.perf_counter()
        for slot, state in self.states():
            if state.version == version and _forget_unshown(slot):
                continue
            if state.version == version and state.state in _HELD:
                digests = self._digests(tensors)
                if fingerprint_of(digests) != state.fingerprint:
                    raise WeightsError(f"version {version} is held with other contents; it needs a new lineage")
                return Published(state.fingerprint, digests, time.perf_counter() - start, slot.index)

        with self._claim() as (slot, reclaimed):
            slot.mark(SlotState(State.WRITING, version))
            slot.allocate()
            digests = self._digests(tensors, slot.memory())
            fingerprint = fingerprint_of(digests)
            slot.write_manifest(
                Manifest(version, self.layout.dtype, fingerprint, digests, tuple(golden), self.layout.digest)
            )
            slot.mark(SlotState(State.WRITTEN, version, fingerprint))
        return Published(fingerprint, digests, time.perf_counter() - start, slot.index, reclaimed)

    def digest_only(self, tensors: Iterable[tuple[str, Weights]]) -> str:
        """The fingerprint that publishing these tensors would give.

        Raises:
            WeightsError: the tensors are not those of the layout.
        """
        return fingerprint_of(self._digests(tensors))

    def keep(self, versions: Collection[Version]) -> None:
        """Sets which versions are given up last, in place of those set before."""
        replace_text(self.folder / "keep.json", json.dumps(sorted(versions)))

    def kept(self) -> frozenset[Version]:
        return frozenset(Version(*fields) for fields in json.loads((self.folder / "keep.json").read_text()))

    def num_free(self) -> int:
        """Slots that a publish could take now without giving up a kept version, leases left out of account."""
        protected = self.kept() | set(self.whole()[-1:])
        return sum(state.state not in _HELD or state.version not in protected for _, state in self.states())

    def prefault(self) -> bool:
        """Brings some more pages of the slots into memory and into this process; false once all are there.

        Fresh pages cost several times the copy into them. Call it from idle moments.
        """
        return any(slot.prefault() for slot in self.slots)

    @contextmanager
    def _claim(self) -> Iterator[tuple[Slot, Reclaimed | None]]:
        """Holds a slot to write to: a free one, else one whose version can best be spared."""
        kept = self.kept()
        for slot, expected in self._reclaim_order(kept):
            with slot.locked(Lock.EXCLUSIVE) as is_ours:
                if not is_ours or slot.read() != expected:
                    continue
                held = expected.state in _HELD
                yield slot, Reclaimed(expected.version, expected.version in kept) if held else None
                return
        raise NoFreeSlot(f"none of the {len(self.slots)} weight slots in {self.folder} can be written to")

    def _reclaim_order(self, kept: Collection[Version]) -> list[tuple[Slot, SlotState]]:
        """Slots that may be written to, best first: without a version; not kept; kept; each from the oldest.

        Versions order by lineage first, so those of a retired lineage are the oldest.
        """
        states = self.states()
        newest = max((state.version for _, state in states if state.state is State.WHOLE), default=None)
        free = [(slot, state) for slot, state in states if state.state not in _HELD]
        held = [(slot, state) for slot, state in states if state.state in _HELD and state.version != newest]
        return free + sorted(held, key=lambda pair: (pair[1].version in kept, pair[1].version))

    def _digests(self, tensors: Iterable[tuple[str, Weights]], memory: memoryview | None = None) -> tuple[str, ...]:
        """Digests in the order of the layout; the tensors are written to `memory` on the way if it is given."""
        digests: dict[str, str] = {}
        for name, tensor in tensors:
            entry = self.layout.tensors.get(name)
            if entry is None or entry.shape != tensor.shape or name in digests:
                why = "twice" if name in digests else f"shape {list(tensor.shape)}"
                expected = f"one of shape {list(entry.shape)}" if entry is not None else "no such tensor"
                raise WeightsError(f"tensor {name!r} ({why}) does not fit the layout, which has {expected}")
            digests[name] = self._digest(tensor, None if memory is None else memory[entry.start : entry.stop])
        missing = [entry.name for entry in self.layout if entry.name not in digests]
        if missing:
            raise WeightsError(f"{len(missing)} tensors of the layout are missing, the first is {missing[0]!r}")
        return tuple(digests[entry.name] for entry in self.layout)

    def _digest(self, tensor: Weights, target: memoryview | None) -> str:
        """Digest in the published form; on the way the tensor is written to `target` if it is given."""
        if isinstance(tensor, np.ndarray):
            if tensor.itemsize != self.layout.itemsize:
                raise WeightsError(f"an array of {tensor.dtype} is not in the form of {self.layout.dtype}")
            source = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
            return digest_of(source) if target is None else copy_bytes(source, target)
        from laminar.weights.copying import copy_in, digest_as

        dtype = self.layout.torch_dtype
        return digest_as(tensor, dtype) if target is None else copy_in(tensor, target, dtype)

    # ------------------------------------------------------------ reading

    def whole(self) -> tuple[Version, ...]:
        """The versions that readers may use, oldest first."""
        return tuple(sorted(state.version for _, state in self.states() if state.state is State.WHOLE))

    def newest(self) -> SlotRef | None:
        """The newest whole version, or None."""
        whole = [(slot, state) for slot, state in self.states() if state.state is State.WHOLE]
        return self._ref(*max(whole, key=lambda pair: pair[1].version)) if whole else None

    def find(self, version: Version) -> SlotRef | None:
        """This version if it is whole, or None."""
        for slot, state in self.states():
            if state.state is State.WHOLE and state.version == version:
                return self._ref(slot, state)
        return None

    @contextmanager
    def lease(self, ref: SlotRef) -> Iterator[Lease]:
        """Holds a version so that it can't be overwritten. The kernel ends the lease if the process dies.

        Raises:
            VersionGone: its slot was given, or is being given, to another version.
        """
        slot = next((slot for slot in self.slots if str(slot.path) == ref.path), None)
        if slot is None:
            raise WeightsError(f"{ref.path} is not a slot of {self.folder}")
        with self._place(), slot.locked(Lock.SHARED) as is_ours:
            # Only now can the version no longer change.
            if not is_ours or slot.read() != SlotState(State.WHOLE, ref.version, ref.fingerprint):
                raise VersionGone(f"version {ref.version} is no longer in {ref.path}")
            yield Lease(self.layout, slot, slot.read_manifest())

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the places for readers: there are so many that a publish always finds a slot that nobody reads.

        A run that was scaled up has more replicas than places; they wait for each other here, not the trainer for them.
        """
        places = [self.folder / f"reader-{i:02d}.lock" for i in range(max(1, len(self.slots) - TRAINER_SLOTS))]
        while True:
            for place in places:
                with place.open("a") as file:
                    if try_flock(file.fileno(), Lock.EXCLUSIVE):
                        yield
                        return
            time.sleep(WAIT_FOR_PLACE_S)

    def states(self) -> list[tuple[Slot, SlotState]]:
        """What each slot holds at this moment, shown or not."""
        return [(slot, slot.read()) for slot in self.slots]

    def _ref(self, slot: Slot, state: SlotState) -> SlotRef:
        return SlotRef(str(slot.path), state.version, state.fingerprint, self.layout.dtype)


def _forget_unshown(slot: Slot) -> bool:
    """Empty a slot that is written and not shown, unless the relay is at it."""
    with slot.locked(Lock.EXCLUSIVE) as is_ours:
        if not is_ours or slot.read().state is not State.WRITTEN:
            return False
        slot.mark(EMPTY)
        return True


def _check_tensors(layout: Layout, shapes: Mapping[str, Sequence[int]]) -> None:
    for entry in layout:
        if tuple(shapes.get(entry.name, ())) != entry.shape or entry.name not in shapes:
            got = list(shapes[entry.name]) if entry.name in shapes else "nothing"
            raise WeightsError(f"tensor {entry.name!r} has shape {list(entry.shape)}; the destination has {got}")
    surplus = sorted(shapes.keys() - layout.tensors.keys())
    if surplus:
        raise WeightsError(f"no weights for {len(surplus)} tensors of the destination, the first is {surplus[0]!r}")


def _differs(version: Version, names: Sequence[str]) -> str:
    return f"version {version} is not what was published: {len(names)} tensors differ, the first is {names[0]!r}"


def check_room(folder: Path, layout: Layout, num_slots: int) -> None:
    """Raises StorageError if shared memory has no room for so many slots, which are allocated whole."""
    needed = num_slots * layout.size
    free = _free_bytes(folder)
    if free < needed:
        raise StorageError(
            "there is no room for the weight slots in shared memory",
            where=str(folder),
            expected=f"{needed / 1e9:.3f} GB free ({num_slots} slots of {layout.size / 1e9:.3f} GB)",
            got=f"{free / 1e9:.3f} GB free",
            fix='lower rollout.replicas or relay.spare_slots, or set rollout.dtype = "bf16"',
        )


def _free_bytes(folder: Path) -> int:
    """Shared memory is bounded by its file system and by the machine's memory."""
    available: int = psutil.virtual_memory().available
    return min(shutil.disk_usage(folder).free, available)
