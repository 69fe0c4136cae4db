"""The trainer on torch, as the loop sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from laminar.config import Config
from laminar.trainer import checkpoint
from laminar.trainer.export import export_model
from laminar.trainer.policy import golden, named_weights
from laminar.trainer.step import TrainState, train_batch
from laminar.types import Batch, Statistics, Version


class TorchBackend:
    """A `laminar.trainer.loop.Backend` on a `TrainState`."""

    def __init__(self, config: Config, state: TrainState | None = None) -> None:
        """`state`: made from the model's folder unless given. Raises ModelError if that can't be used."""
        self.state = state or TrainState.create(config)
        self._config = config

    @property
    def version(self) -> Version:
        return self.state.version

    @version.setter
    def version(self, version: Version) -> None:
        self.state.version = version

    def train(self, batch: Batch) -> Statistics:
        return train_batch(self.state, batch, self._config)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.state.model)

    def golden(self) -> list[float]:
        return golden(self.state.model, self._config.rollout.dtype)

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self.state)

    def restore(self, path: Path) -> None:
        checkpoint.restore(path, self.state)

    def export(self, out: Path) -> None:
        export_model(self.state.model, self._config.model_path, out)
