"""A trainer without a model: the time that a profile says, and weights that tell what they were trained on.

The weights are a few megabytes of noise, a pure function of all that was ever trained, in order. So a replay of the
same cuts gives the recorded fingerprints, and any other order, or a batch more or less, does not.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from laminar.config import Config
from laminar.golden import GOLDEN_LENGTH
from laminar.trainer import checkpoint_folder
from laminar.trainer.advantage import reward_statistics
from laminar.types import Batch, Statistics, Version

NUM_LAYERS, LAYER_ELEMENTS = 4, 2**18
WEIGHTS = "model.safetensors"

_MEASURED_ON_A_MODEL: Statistics = {
    "loss": 0.0,
    "lr": None,
    "grad_norm": 0.0,
    "skipped_steps": 0.0,
    "entropy": 0.0,
    "kl_old": 0.0,
    "kl_rollout": 0.0,
    "kl_ref": None,
    "is_weight_mean": 1.0,
    "is_capped_fraction": 0.0,
    "clip_fraction": 0.0,
    "logprob_gap_mean": 0.0,
    "logprob_gap_max": 0.0,
}


class EmulatedBackend:
    """A `laminar.trainer.loop.Backend` without a model."""

    def __init__(self, config: Config) -> None:
        """Of version 0."""
        self.version = Version(0, 0)
        self._config, self._profile = config, config.profile
        self._history = _digest(b"", {"seed": config.seed})

    def train(self, batch: Batch) -> Statistics:
        """Take as long as the profile says; the last part of a batch includes the stall of publishing."""
        tokens = sum(batch.prompt_lengths) + sum(batch.response_lengths)
        seconds = self._profile.publish_s() if batch.part + 1 == batch.num_parts else 0.0
        if batch.ids:
            gpus, mini_batches = self._config.train_gpus, self._config.train.num_mini_batches // batch.num_parts
            seconds += self._profile.train_step_s(tokens, mini_batches, gpus, first=batch.part == 0)
            self._history = _digest(self._history, {"update": batch.update, "ids": batch.ids})
        time.sleep(seconds)
        rewards = reward_statistics(np.array(batch.rewards), np.array([group for group, _, _ in batch.ids]))
        truncated = float(np.mean(batch.truncated)) if batch.ids else None
        return rewards | {"truncated_fraction": truncated} | _MEASURED_ON_A_MODEL | {"lr": self._config.train.lr}

    def weights(self) -> Iterator[tuple[str, NDArray[Any]]]:
        key = int.from_bytes(self._history, "little")
        for layer in range(NUM_LAYERS):
            numbers: NDArray[Any]
            raw = np.random.Philox(key=key, counter=layer << 64).random_raw(LAYER_ELEMENTS)
            numbers = ((raw >> 40) * 2.0**-24).astype(np.float32)
            if self._config.rollout.dtype == "bf16":
                numbers = (numbers.view(np.uint32) >> 16).astype(np.uint16)
            yield f"layers.{layer}.weight", numbers

    def golden(self) -> list[float]:
        return [0.0] * (GOLDEN_LENGTH - 1)

    def save(self, folder: Path) -> None:
        record = {"version": list(self.version), "history": self._history.hex()}
        checkpoint_folder.write(folder, self.version.number, self._fill, record)

    def _fill(self, folder: Path) -> None:
        save_file(dict(self.weights()), folder / WEIGHTS)

    def restore(self, path: Path) -> None:
        record = checkpoint_folder.read_record(path)
        self.version, self._history = Version(*record["version"]), bytes.fromhex(record["history"])

    def export(self, out: Path) -> None:
        """There is no model to write."""


def _digest(before: bytes, what: dict[str, object]) -> bytes:
    return hashlib.blake2b(before + json.dumps(what).encode(), digest_size=16).digest()
