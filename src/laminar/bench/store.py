"""`laminar bench store`: what it takes to publish a version and to pull one, as multiples of a plain copy.

A round is a copy of as many bytes from private memory to private memory, a publish and a pull, one after the other, so
that what else the machine does meets all three. Meanwhile other processes each hold a lease, as replicas in mid-pull
do, and sleep; between rounds one of them moves on to the newest version. They import this file, which therefore imports
torch only where tensors are.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

from laminar.errors import ConfigError
from laminar.types import TRAINER_SLOTS, Version
from laminar.weights import Layout, Relay, RelaySettings, SlotStore, VersionLog, VersionRecord

if TYPE_CHECKING:
    import torch

SHORT = 5
"""Rounds of each part but the first."""
LAYERS, MATRICES = 24, 12
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}


Took = tuple[float, float]
"""(seconds, seconds of processor time)"""


@dataclass(frozen=True, slots=True)
class Against:
    """What one operation took, over what a copy took in the same rounds."""

    median: float
    """Of the median times."""
    worst: float
    """The longest over the median copy."""
    cpu: float
    """Of the medians of processor time, in which work of others on the machine does not count."""

    @classmethod
    def of(cls, took: Sequence[Took], copy: Sequence[Took]) -> Against:
        (wall, cpu), (copy_wall, copy_cpu) = zip(*took, strict=True), zip(*copy, strict=True)
        return cls(median(wall) / median(copy_wall), max(wall) / median(copy_wall), median(cpu) / median(copy_cpu))


@dataclass(frozen=True, slots=True)
class Growth:
    """From the first tenth of the rounds to the last; 0 and 1 if nothing grows."""

    memory_bytes: int
    """Resident memory of this process, slots included."""
    shared_bytes: int
    """Memory of the slots."""
    files: int
    """In the folder of the slots."""
    publish: float
    """Its ratio to a copy in processor time, as a multiple."""
    pull: float


@dataclass(frozen=True, slots=True)
class StoreTimes:
    """What was measured."""

    bytes: int
    """Of one version."""
    readers: int
    slots: int
    versions: int
    memcpy_s: float
    """Median time of a copy."""
    ratios: dict[str, Against]
    """`publish` and `pull`; with `_slow_reader`, while one of the readers was stopped in mid-lease, and with
    `_killed_reader`, after it was killed; `publish_cast`, from fp32 weights; `prepack`, what an engine does with the
    weights after a pull (`rollout.kernels.Linear`)."""
    growth: Growth


def parse_size(text: str) -> int:
    """Bytes of `1.2GB`, `600MB` or `4096`. Raises ConfigError."""
    found = re.fullmatch(r"([0-9.]+) ?([kmg]?b)?", text.strip().lower())
    try:
        size = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError("not a size", where="--size", got=text, expected="a number with kB, MB or GB")
    return size


def measure(size: int, readers: int, versions: int) -> StoreTimes:
    """Publish and pull `versions` versions of about `size` bytes (bf16), and some more, beside `readers` readers.

    Needs `size` x (5 + readers) of shared memory and 4 x `size` of other memory.

    Raises:
        StorageError: shared memory has no room for the slots.
    """
    with _folder() as folder:
        machine = _Machine(folder, size, num_slots=TRAINER_SLOTS + readers + 1)
        with _readers(machine, readers) as held:
            return _measure(machine, held, versions)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder in memory that does not outlive the block, nor the process if somebody ends it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="laminar-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        signal.signal(signal.SIGTERM, before)


def _measure(machine: _Machine, held: _Readers, versions: int) -> StoreTimes:
    _rounds(machine, held, len(machine.writer.slots))  # every slot and page once
    before = machine.usage()
    main = _rounds(machine, held, versions)
    after = machine.usage()
    tenth = max(1, versions // 10)
    first, last = main.ratios(slice(tenth)), main.ratios(slice(-tenth, None))
    ratios = main.ratios()

    held.stop_first()
    ratios |= _named("slow_reader", _rounds(machine, held, SHORT).ratios())
    held.kill_first()
    ratios |= _named("killed_reader", _rounds(machine, held, SHORT).ratios())
    ratios["prepack"] = _prepack(machine)
    machine.widen()
    ratios["publish_cast"] = _rounds(machine, held, SHORT).ratios()["publish"]
    return StoreTimes(
        bytes=machine.layout.size,
        readers=held.number,
        slots=len(machine.writer.slots),
        versions=versions,
        memcpy_s=median(wall for wall, _ in main.copy),
        ratios=ratios,
        growth=Growth(
            memory_bytes=after[0] - before[0],
            shared_bytes=after[1] - before[1],
            files=after[2] - before[2],
            publish=last["publish"].cpu / first["publish"].cpu,
            pull=last["pull"].cpu / first["pull"].cpu,
        ),
    )


def _named(circumstance: str, ratios: Mapping[str, Against]) -> dict[str, Against]:
    return {f"{name}_{circumstance}": ratio for name, ratio in ratios.items()}


@dataclass(frozen=True, slots=True)
class _Times:
    """One entry a round."""

    copy: list[Took] = field(default_factory=list)
    publish: list[Took] = field(default_factory=list)
    pull: list[Took] = field(default_factory=list)

    def ratios(self, rounds: slice = slice(None)) -> dict[str, Against]:
        """Of `publish` and `pull`, in some of the rounds."""
        copy = self.copy[rounds]
        return {"publish": Against.of(self.publish[rounds], copy), "pull": Against.of(self.pull[rounds], copy)}


def _rounds(machine: _Machine, held: _Readers, number: int) -> _Times:
    times = _Times()
    for _ in range(number):
        times.copy.append(_timed(machine.copy))
        times.publish.append(_timed(machine.publish))
        machine.show()
        times.pull.append(_timed(machine.pull))
        held.move_one()
    return times


def _prepack(machine: _Machine) -> Against:
    """All matrices, each in place of its predecessor."""
    from laminar.rollout.kernels import Linear

    packed = {name: Linear(tensor) for name, tensor in machine.arrived.items()}

    def again() -> None:
        for name, tensor in machine.arrived.items():
            packed[name] = Linear(tensor)

    copy, pack = zip(*((_timed(machine.copy), _timed(again)) for _ in range(SHORT)), strict=True)
    return Against.of(pack, copy)


def _timed(function: Callable[[], None]) -> Took:
    start, cpu_start = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start, time.process_time() - cpu_start


class _Machine:
    """The trainer's, the relay's and a replica's end of one folder of slots, all in this process."""

    def __init__(self, folder: Path, size: int, num_slots: int) -> None:
        import torch

        torch.set_num_threads(1)  # as processes of a run have it
        hidden = max(8, round(math.sqrt(size / 2 / LAYERS / MATRICES) / 8) * 8)
        shapes = [(f"layers.{i}.{j}.weight", (hidden, hidden)) for i in range(LAYERS) for j in range(MATRICES)]
        self.layout = Layout.of(shapes, "bf16")
        self.folder = folder
        self.writer = SlotStore.create_or_open(folder / "slots", self.layout, num_slots)
        self.log = VersionLog(folder / "versions.jsonl")
        self.relay = Relay(folder / "slots", VersionLog(folder / "versions.jsonl"), RelaySettings("bench"))
        reader = SlotStore.open(folder / "slots")
        assert reader is not None
        self.reader = reader
        self.number = 0

        num_elements = len(self.layout) * hidden * hidden
        self._memory = torch.randn(MATRICES * hidden * hidden).repeat(LAYERS)
        self._target = torch.ones(num_elements, dtype=torch.bfloat16)
        self.weights = self._tensors(self._memory.view(torch.bfloat16)[:num_elements])
        self.arrived = self._tensors(self._target)
        while self.writer.prefault() or self.relay.prefault():
            pass
        self.publish()
        self.show()

    def _tensors(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views, by name."""
        step = len(flat) // len(self.layout)
        return {entry.name: part.view(entry.shape) for entry, part in zip(self.layout, flat.split(step), strict=True)}

    def widen(self) -> None:
        """From now on the trainer's weights are fp32."""
        self.weights = self._tensors(self._memory)

    def copy(self) -> None:
        self._target.copy_(self._memory.view(self._target.dtype)[: len(self._target)])

    def publish(self) -> None:
        self.number += 1
        version = Version(0, self.number)
        self.fingerprint = self.writer.publish(version, self.weights.items(), ()).fingerprint

    def show(self) -> None:
        self.log.append(VersionRecord(Version(0, self.number), self.fingerprint))
        self.relay.step()

    def pull(self) -> None:
        ref = self.reader.find(Version(0, self.number))
        assert ref is not None
        with self.reader.lease(ref) as lease:
            lease.copy_into(self.arrived)

    def usage(self) -> tuple[int, int, int]:
        """(resident bytes, bytes of the slots, files beside them)"""
        files = list((self.folder / "slots").iterdir())
        return psutil.Process().memory_info().rss, sum(file.stat().st_blocks * 512 for file in files), len(files)


class _Readers:
    """Processes that each hold a lease and sleep."""

    def __init__(self, machine: _Machine, number: int) -> None:
        self.number = number
        self._machine = machine
        self._next = 0
        context = multiprocessing.get_context("spawn")
        self._orders: list[Connection] = []
        self.processes = []
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=hold, args=(machine.folder / "slots", theirs), daemon=True)
            process.start()
            theirs.close()
            self._orders.append(ours)
            self.processes.append(process)
        for orders in self._orders:
            orders.recv()

    def move_one(self) -> None:
        """The next in turn gives its version up for the newest."""
        if self._orders:
            orders = self._orders[self._next % len(self._orders)]
            self._next += 1
            orders.send(True)
            assert orders.recv() == self._machine.number

    def stop_first(self) -> None:
        """The first process stops where it is, with its lease, and is not spoken to any more."""
        os.kill(self._pid(), signal.SIGSTOP)
        self._orders.pop(0)

    def kill_first(self) -> None:
        os.kill(self._pid(), signal.SIGKILL)
        self.processes[0].join()

    def _pid(self) -> int:
        pid = self.processes[0].pid
        assert pid is not None
        return pid


@contextmanager
def _readers(machine: _Machine, number: int) -> Iterator[_Readers]:
    readers = _Readers(machine, number)
    try:
        yield readers
    finally:
        for process in readers.processes:
            process.kill()
            process.join()


def hold(folder: Path, orders: Connection) -> None:
    """A reader: leases the newest version, says which, and sleeps until it is told to take the next."""
    store = SlotStore.open(folder)
    assert store is not None
    while True:
        ref = store.newest()
        assert ref is not None
        with store.lease(ref) as lease:
            orders.send(lease.manifest.version.number)
            try:
                orders.recv()
            except EOFError:
                return
