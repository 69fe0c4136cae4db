"""Checkpoints: the trainer's state in a folder a version, whole or not there.

A folder is written under a temporary name, synced, and renamed; its last file lists the digests of the others,
so that a folder which is torn all the same (a disk that lied, a copy that broke off) is known and passed over.
Tensors are safetensors, the rest JSON: loading runs no code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from laminar.errors import StorageError
from laminar.trainer.policy import named_weights
from laminar.trainer.step import TrainState
from laminar.types import Version

MODEL, OPTIMIZER, CONFIG, STATE = "model.safetensors", "optimizer.safetensors", "config.json", "state.json"
RANDOM_KEY = "random.torch"
_NUMBERED = re.compile(r"\d{6,}")


def save(folder: Path, state: TrainState, keep: int = 2) -> Path:
    """Write the checkpoint of `state.version` durably, then remove all but the newest `keep`.

    Args:
        folder: of all checkpoints, made if missing
        state: written as it is
        keep: checkpoints left in the folder, this one included

    Raises:
        StorageError: it can't be written
    """
    target = folder / f"{state.version.number:06d}"
    temporary = folder / f".{target.name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write(temporary, state)
        shutil.rmtree(target, ignore_errors=True)  # a torn one: what is whole was loaded, and never comes again
        temporary.rename(target)
        _sync(folder)
        _remove_older(folder, keep)
    except OSError as error:
        raise StorageError("the checkpoint can't be written", where=str(target), got=str(error)) from error
    return target


def newest(folder: Path) -> Path | None:
    """Newest whole checkpoint of the folder, or None. Torn ones and leftovers are passed over."""
    return next((path for path in reversed(_numbered(folder)) if is_whole(path)), None)


def is_whole(path: Path) -> bool:
    """Whether every file of a checkpoint is there with the content it was written with."""
    try:
        digests = json.loads((path / STATE).read_text())["files"]
        return all(_digest(path / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint says about itself."""

    version: Version
    optimizer_steps: int
    skipped_steps: int


def read_info(path: Path) -> CheckpointInfo:
    """Read the small part of a whole checkpoint."""
    state = json.loads((path / STATE).read_text())
    return CheckpointInfo(Version(*state["version"]), state["optimizer_steps"], state["skipped_steps"])


def restore(path: Path, state: TrainState) -> None:
    """Set a fresh state to that of a whole checkpoint, random state included.

    Raises:
        StorageError: the checkpoint belongs to another model
    """
    load_weights(path, state)
    tensors = load_file(path / OPTIMIZER)
    torch.set_rng_state(tensors.pop(RANDOM_KEY))
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, field = key.rpartition("/")
        moments.setdefault(name, {})[field] = tensor
    order = [name for name, _ in state.model.named_parameters()]
    state.optimizer.load_state_dict(
        {
            "state": {i: moments[name] for i, name in enumerate(order) if name in moments},
            "param_groups": state.optimizer.state_dict()["param_groups"],
        }
    )
    info = read_info(path)
    state.version, state.optimizer_steps, state.skipped_steps = info.version, info.optimizer_steps, info.skipped_steps


def load_weights(path: Path, state: TrainState) -> None:
    """Set the model alone to a whole checkpoint's weights."""
    tensors = load_file(path / MODEL)
    own = dict(named_weights(state.model))
    if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in own.items()}:
        raise StorageError(
            "the checkpoint belongs to another model", where=str(path), fix="resume with the run's model"
        )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def _write(folder: Path, state: TrainState) -> None:
    save_file({name: tensor.contiguous() for name, tensor in named_weights(state.model)}, folder / MODEL)
    names = [name for name, _ in state.model.named_parameters()]
    moments = state.optimizer.state_dict()["state"]
    tensors = {f"{names[i]}/{field}": value for i, fields in moments.items() for field, value in fields.items()}
    save_file(tensors | {RANDOM_KEY: torch.get_rng_state()}, folder / OPTIMIZER)
    state.model.config.save_pretrained(folder)
    record = {
        "version": list(state.version),
        "optimizer_steps": state.optimizer_steps,
        "skipped_steps": state.skipped_steps,
        "files": {path.name: _digest(path) for path in sorted(folder.iterdir())},
    }
    (folder / STATE).write_text(json.dumps(record, indent=1))
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _numbered(folder: Path) -> list[Path]:
    """Checkpoint folders, whole or not, the oldest first."""
    paths = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((path for path in paths if _NUMBERED.fullmatch(path.name)), key=lambda path: int(path.name))


def _remove_older(folder: Path, keep: int) -> None:
    for path in _numbered(folder)[:-keep]:
        shutil.rmtree(path)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
