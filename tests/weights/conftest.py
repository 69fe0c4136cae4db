"""A small model's tensors, stores in throw-away folders, and processes that can be stopped or killed half-way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from laminar.types import Version
from laminar.weights import Layout, Relay, RelaySettings, SlotStore, VersionLog, VersionRecord

SHAPES = {"embed.weight": (50, 16), "layers.0.q.weight": (16, 16), "layers.0.norm": (16,), "scale": (), "none": (0, 4)}
GOLDEN = [-0.5, -1.25, -3.0000001]


def make_tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


class Machine:
    """One machine's store, record file and relay, driven by hand."""

    def __init__(self, folder: Path, dtype: str = "fp32", num_slots: int = 5) -> None:
        self.layout = Layout.of(SHAPES.items(), dtype)
        self.store = SlotStore.create_or_open(folder / "slots", self.layout, num_slots)
        self.log = VersionLog(folder / "versions.jsonl")
        self.relay = Relay(folder / "slots", VersionLog(folder / "versions.jsonl"), RelaySettings("relay-0"))

    def publish(self, number: int, *, lineage: int = 0, show: bool = True) -> Version:
        """Publishes and records weights made from the number; the relay shows them unless told not to."""
        version = Version(lineage, number)
        published = self.store.publish(version, make_tensors(number + 1000 * lineage).items(), GOLDEN)
        self.log.append(VersionRecord(version, published.fingerprint))
        if show:
            assert self.relay.step()
        return version

    def corrupt(self, slot: int, tensor: str) -> None:
        """Flips one bit in the slot's file."""
        entry = self.layout.tensors[tensor]
        with self.store.slots[slot].path.open("r+b") as file:
            file.seek(entry.start + 1)
            byte = file.read(1)[0]
            file.seek(entry.start + 1)
            file.write(bytes([byte ^ 4]))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def spawn() -> Iterator[Callable[[str, Path], subprocess.Popen[str]]]:
    """Starts a Python script on a machine's folder and returns once it has printed `ready`."""
    processes: list[subprocess.Popen[str]] = []

    def start(script: str, folder: Path) -> subprocess.Popen[str]:
        root = Path(__file__).parents[2]
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"},
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()
