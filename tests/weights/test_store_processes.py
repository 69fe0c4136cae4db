"""Readers and writers that are stopped or killed half-way."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from laminar.errors import VersionGone
from laminar.types import Version
from laminar.weights.slot import State
from tests.weights.conftest import Machine, make_tensors

Spawn = Callable[[str, Path], "subprocess.Popen[str]"]

READER = """
import sys
from pathlib import Path
import torch
from laminar.weights import SlotStore
from tests.weights.conftest import SHAPES

class Half(dict):
    "A destination whose second tensor is handed out after a line has come on stdin."
    def __getitem__(self, name):
        if name == "layers.0.q.weight":
            print("ready", flush=True)
            sys.stdin.readline()
        return super().__getitem__(name)

store = SlotStore.open(Path(sys.argv[1]) / "slots")
with store.lease(store.newest()) as lease:
    lease.copy_into(Half({name: torch.empty(shape) for name, shape in SHAPES.items()}))
print("verified", flush=True)
"""

WRITER = """
import sys
from pathlib import Path
from laminar.types import Version
from laminar.weights import SlotStore
from tests.weights.conftest import make_tensors

def half():
    for index, pair in enumerate(make_tensors(99).items()):
        if index == 2:
            print("ready", flush=True)
            sys.stdin.readline()
        yield pair

store = SlotStore.open(Path(sys.argv[1]) / "slots", writable=True)
store.publish(Version(0, 99), half(), [])
"""


def test_a_stopped_reader_delays_nobody_and_a_killed_one_frees_its_lease(tmp_path: Path, spawn: Spawn) -> None:
    """Invariants 5 and 6 of docs/architecture.md."""
    machine = Machine(tmp_path)
    machine.publish(0)
    reader = spawn(READER, tmp_path)
    os.kill(reader.pid, signal.SIGSTOP)
    for number in range(1, 20):
        machine.publish(number)
        assert machine.store.find(Version(0, 0)) is not None
    os.kill(reader.pid, signal.SIGCONT)
    out, _ = reader.communicate("\n")
    assert out == "verified\n", "it read one version, whole, across nineteen others"

    reader = spawn(READER, tmp_path)  # in the middle of version 19
    for number in range(20, 30):
        machine.publish(number)
    assert machine.store.find(Version(0, 19)) is not None
    reader.kill()
    reader.wait()
    for number in range(30, 35):
        machine.publish(number)
    assert machine.store.find(Version(0, 19)) is None
    assert len(machine.store.whole()) == 5


def test_a_writer_stopped_or_killed_in_mid_copy(tmp_path: Path, spawn: Spawn) -> None:
    """Invariants 4 and 6 of docs/architecture.md; fault 24: a version whose write failed is nowhere."""
    machine = Machine(tmp_path, num_slots=3)
    for number in range(3):
        machine.publish(number)
    old = machine.store.find(Version(0, 0))
    assert old is not None

    writer = spawn(WRITER, tmp_path)
    os.kill(writer.pid, signal.SIGSTOP)
    assert machine.store.slots[0].read().state is State.WRITING
    assert machine.store.whole() == (Version(0, 1), Version(0, 2)), "given up before its first byte was overwritten"
    machine.relay.step()
    assert machine.store.whole() == (Version(0, 1), Version(0, 2))
    with pytest.raises(VersionGone), machine.store.lease(old):
        pass
    newest = machine.store.newest()
    assert newest is not None
    with machine.store.lease(newest) as lease:  # no reader waits for the writer
        assert torch.equal(dict(lease.tensors())["scale"], make_tensors(2)["scale"])
    assert machine.store.publish(Version(0, 3), make_tensors(3).items(), []).slot == 1, "its slot is not taken"

    writer.kill()
    writer.wait()
    assert machine.store.publish(Version(0, 4), make_tensors(4).items(), []).slot == 0, "its slot is free"
