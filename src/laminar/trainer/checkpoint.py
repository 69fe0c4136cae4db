"""Checkpoints of a `TrainState`: model, optimizer, random state, counters.

Tensors are safetensors, the rest JSON: loading runs no code.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from laminar.errors import StorageError
from laminar.trainer import checkpoint_folder
from laminar.trainer.policy import named_weights
from laminar.trainer.step import TrainState
from laminar.types import Version

MODEL, OPTIMIZER, CONFIG = "model.safetensors", "optimizer.safetensors", "config.json"
RANDOM_KEY = "random.torch"


def save(folder: Path, state: TrainState, keep: int = 2) -> Path:
    """Write the checkpoint of `state.version` durably, then remove all but the newest `keep`.

    Args:
        folder: of all checkpoints, made if missing
        state: written as it is
        keep: checkpoints left in the folder, this one included

    Raises:
        StorageError: it can't be written
    """
    info = CheckpointInfo(state.version, state.optimizer_steps, state.skipped_steps)
    number = state.version.number
    return checkpoint_folder.write(folder, number, lambda path: _fill(path, state), asdict(info), keep=keep)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint says about itself."""

    version: Version
    optimizer_steps: int
    skipped_steps: int


def read_info(path: Path) -> CheckpointInfo:
    """Read the small part of a whole checkpoint."""
    record = checkpoint_folder.read_record(path)
    return CheckpointInfo(Version(*record["version"]), record["optimizer_steps"], record["skipped_steps"])


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


def _fill(folder: Path, state: TrainState) -> None:
    save_file({name: tensor.contiguous() for name, tensor in named_weights(state.model)}, folder / MODEL)
    names = [name for name, _ in state.model.named_parameters()]
    moments = state.optimizer.state_dict()["state"]
    tensors = {f"{names[i]}/{field}": value for i, fields in moments.items() for field, value in fields.items()}
    save_file(tensors | {RANDOM_KEY: torch.get_rng_state()}, folder / OPTIMIZER)
    state.model.config.save_pretrained(folder)
