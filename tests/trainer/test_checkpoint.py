"""Checkpoints: the same bits back, or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from laminar.config import Config
from laminar.errors import StorageError
from laminar.trainer import checkpoint, checkpoint_folder
from laminar.trainer.step import TrainState, train_batch
from laminar.types import Batch, Version

FILES = ["config.json", "model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(train__warmup_steps=3)


@pytest.fixture
def state(config: Config, make_batch: Callable[..., Batch]) -> TrainState:
    """After two iterations."""
    state = TrainState.create(config)
    for update in range(2):
        train_batch(state, make_batch(update), config)
    state.version, state.skipped_steps = Version(1, 2), 5
    return state


def test_restore_gives_the_same_bits_and_goes_on_alike(
    tmp_path: Path, state: TrainState, config: Config, make_batch: Callable[..., Batch]
) -> None:
    """Invariant 12: model, optimizer, warm-up and random state."""
    path = checkpoint.save(tmp_path, state)
    drawn = torch.rand(3)
    fresh = TrainState.create(config)
    checkpoint.restore(path, fresh)
    assert torch.equal(torch.rand(3), drawn)
    assert (fresh.version, fresh.optimizer_steps, fresh.skipped_steps) == (Version(1, 2), 2, 5)
    assert fresh.model.lm_head.weight is fresh.model.model.embed_tokens.weight
    for each in (state, fresh):
        each.version = Version(0, 2)
    assert train_batch(state, make_batch(2), config) == train_batch(fresh, make_batch(2), config)
    for mine, theirs in zip(state.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_without_steps_has_a_checkpoint_too(tmp_path: Path, config: Config) -> None:
    path = checkpoint.save(tmp_path, TrainState.create(config))
    fresh = TrainState.create(config)
    checkpoint.restore(path, fresh)
    assert fresh.version == Version(0, 0)
    assert not fresh.optimizer.state_dict()["state"]


def save_at(folder: Path, state: TrainState, number: int, keep: int = 2) -> Path:
    state.version = Version(0, number)
    return checkpoint.save(folder, state, keep)


@pytest.mark.parametrize(("keep", "left"), [(1, ["000012"]), (2, ["000009", "000012"])])
def test_the_newest_are_kept(tmp_path: Path, state: TrainState, keep: int, left: list[str]) -> None:
    for number in (3, 9, 12):
        save_at(tmp_path, state, number, keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert checkpoint_folder.newest(tmp_path) == tmp_path / "000012"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "flipped"])
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, state: TrainState, name: str, damage: str) -> None:
    save_at(tmp_path, state, 1)
    path = save_at(tmp_path, state, 2)
    assert sorted(file.name for file in path.iterdir() if file.name != "generation_config.json") == FILES
    file = path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        flipped = bytes([content[0] ^ 0xFF]) + content[1:]
        file.write_bytes({"empty": b"", "short": content[:-2], "flipped": flipped}[damage])
    assert checkpoint_folder.newest(tmp_path) == tmp_path / "000001"
    assert checkpoint_folder.is_whole(save_at(tmp_path, state, 2))  # and is replaced when its number comes again


def test_a_writer_that_died_at_any_file_leaves_nothing_to_load(tmp_path: Path, state: TrainState) -> None:
    save_at(tmp_path, state, 1)
    path = save_at(tmp_path, state, 2)
    temporary = tmp_path / ".000002.tmp"
    path.rename(temporary)
    for name in reversed(FILES):
        assert checkpoint_folder.newest(tmp_path) == tmp_path / "000001"
        (temporary / name).unlink()
    assert checkpoint_folder.newest(tmp_path) == tmp_path / "000001"
    assert checkpoint_folder.newest(tmp_path / "none") is None
    save_at(tmp_path, state, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000002"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, state: TrainState, config: Config) -> None:
    path = checkpoint.save(tmp_path, state)
    state.model.resize_token_embeddings(40)
    with pytest.raises(StorageError, match="another model"):
        checkpoint.restore(path, state)


def test_a_full_disk_is_one_message(tmp_path: Path, state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    save_at(tmp_path, state, 1)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_folder, "_sync", fail)
    with pytest.raises(StorageError, match="No space left"):
        save_at(tmp_path, state, 2)
    assert checkpoint_folder.newest(tmp_path) == tmp_path / "000001"


def test_a_disk_that_is_full_while_tensors_are_written_is_one_too(tmp_path: Path, state: TrainState) -> None:
    """The library that writes them has an error of its own."""
    save_at(tmp_path, state, 1)

    def fail(_: Path) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(StorageError, match=r"the checkpoint can't be written\n  got: .*No space left"):
        checkpoint_folder.write(tmp_path, 2, fail, {})
    assert checkpoint_folder.newest(tmp_path) == tmp_path / "000001"


def test_nothing_but_tensors_and_json(tmp_path: Path, state: TrainState) -> None:
    path = checkpoint.save(tmp_path, state)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    assert json.loads((path / "state.json").read_text())["version"] == [1, 2]
