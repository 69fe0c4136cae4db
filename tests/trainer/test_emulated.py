"""The trainer without a model, in the loop that torch's trainer runs in."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os import pathsep
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from laminar.config import Config
from laminar.timing import load_profile
from laminar.trainer import checkpoint_folder
from laminar.trainer.emulated import EmulatedBackend
from laminar.trainer.loop import TrainerLoop
from laminar.trainer.step import TrainState, train_batch
from laminar.types import Batch, Trained, Version

ITERATIONS = 5
MakeBatch = Callable[..., Batch]


class Killed(Exception):
    """Stands for SIGKILL."""


class World:
    """A data store that has every batch, slots that keep all versions, and a manager that listens."""

    def __init__(self, make_batch: MakeBatch, seed: int = 0) -> None:
        self.make_batch, self.seed = make_batch, seed
        self.recorded: dict[Version, str] = {}
        self.reports: list[Trained] = []
        self.kill_after: int | None = None

    def next_batch(self, update: int, part: int) -> Batch:
        return self.make_batch(update, seed=self.seed)

    def trained(self, report: Trained) -> None:
        self.reports.append(report)
        if report.update == self.kill_after:
            raise Killed

    def records(self) -> list[tuple[Version, str]]:
        return list(self.recorded.items())

    def digest(self, weights: Iterator[tuple[str, Any]]) -> str:
        return str(hash(tuple((name, array.tobytes()) for name, array in weights)))

    def append_record(self, version: Version, fingerprint: str) -> None:
        assert version not in self.recorded
        self.recorded[version] = fingerprint

    def publish(self, version: Version, weights: Iterator[tuple[str, Any]], golden: Sequence[float]) -> str:
        assert len(golden) == 63
        return self.digest(weights)

    def published(self, version: Version, checkpoint: int) -> None:
        assert version in self.recorded


@pytest.fixture
def config() -> Config:
    return Config.model_validate(
        {
            "iterations": ITERATIONS,
            "rollout": {"engine": "emulated"},
            "train": {"backend": "emulated", "checkpoint_every": 2, "num_mini_batches": 4},
            "simulation": {"profile": "toy", "time_scale": 1e6},
        }
    )


def run(config: Config, world: World, folder: Path) -> dict[Version, str]:
    backend = EmulatedBackend(config)
    assert TrainerLoop(config, backend, world, world, world, folder).run()
    return world.recorded


@pytest.mark.parametrize("kill_after", range(ITERATIONS))
def test_a_replay_gives_the_recorded_fingerprints(
    config: Config, make_batch: MakeBatch, tmp_path: Path, kill_after: int
) -> None:
    """Invariant 12: killed after any batch, the same versions in the same lineage."""
    expected = run(config, World(make_batch), tmp_path / "whole")
    assert len(set(expected.values())) == ITERATIONS + 1
    world = World(make_batch)
    world.kill_after = kill_after
    with pytest.raises(Killed):
        run(config, world, tmp_path / "killed")
    world.kill_after = None
    assert run(config, world, tmp_path / "killed") == expected
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {"000004", "000005"}


def test_other_cuts_give_other_weights(config: Config, make_batch: MakeBatch, tmp_path: Path) -> None:
    """The fingerprint tells which groups were trained, and in which order."""

    class Shifted(World):
        def next_batch(self, update: int, part: int) -> Batch:
            return replace(self.make_batch(update), ids=self.make_batch(update, first_group=update == 3).ids)

    straight, shifted = run(config, World(make_batch), tmp_path / "a"), run(config, Shifted(make_batch), tmp_path / "b")
    same = [straight[version] == shifted[version] for version in sorted(straight)]
    assert same == [True, True, True, True, False, False]


def test_an_empty_batch_changes_nothing(config: Config, make_batch: MakeBatch) -> None:
    backend = EmulatedBackend(config)
    before = {name: array.tobytes() for name, array in backend.weights()}
    statistics = backend.train(make_batch(0, groups=()))
    assert {name: array.tobytes() for name, array in backend.weights()} == before
    assert statistics["reward_mean"] is None and statistics["truncated_fraction"] is None


def test_statistics_have_the_names_and_rewards_of_a_real_step(
    config: Config, make_config: Callable[..., Config], make_batch: MakeBatch
) -> None:
    batch, real = make_batch(0), make_config()
    emulated = EmulatedBackend(config).train(batch)
    trained = train_batch(TrainState.create(real), batch, real)
    assert emulated.keys() == trained.keys()
    for name in ("reward_mean", "reward_std", "zero_variance_fraction", "truncated_fraction"):
        assert emulated[name] == trained[name], name


def test_a_step_lasts_what_the_profile_says(
    config: Config, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    profile, batch = load_profile("toy"), make_batch(0)
    EmulatedBackend(config).train(batch)
    tokens = sum(batch.prompt_lengths) + sum(batch.response_lengths)
    expected = profile.train_step_s(tokens, mini_batches=4, gpus=config.train_gpus) + profile.publish_s()
    assert slept == [pytest.approx(expected / 1e6)]


def test_the_parts_of_a_batch_last_as_long_as_the_whole(
    config: Config, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    backend, part = EmulatedBackend(config), make_batch(0)
    for number in range(4):
        backend.train(replace(part, part=number, num_parts=4))
    tokens = 4 * (sum(part.prompt_lengths) + sum(part.response_lengths))
    profile = config.profile
    assert sum(slept) == pytest.approx(profile.train_step_s(tokens, 4, config.train_gpus) + profile.publish_s())
    assert slept[1] == slept[2] < min(slept[0], slept[3])


@pytest.mark.parametrize(("dtype", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_weights_have_the_published_form(config: Config, dtype: str, itemsize: int) -> None:
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"dtype": dtype})})
    weights = dict(EmulatedBackend(config).weights())
    assert {array.itemsize for array in weights.values()} == {itemsize}
    assert 1e6 < sum(array.nbytes for array in weights.values()) < 1e7
    assert len({array.tobytes() for array in weights.values()}) == len(weights)


def test_a_checkpoint_holds_the_weights_for_others_to_read(
    config: Config, make_batch: MakeBatch, tmp_path: Path
) -> None:
    backend = EmulatedBackend(config)
    backend.train(make_batch(0))
    backend.version = Version(0, 1)
    backend.save(tmp_path)
    path = checkpoint_folder.newest(tmp_path)
    assert path == tmp_path / "000001"
    stored = load_file(path / "model.safetensors")
    assert all(np.array_equal(stored[name], array) for name, array in backend.weights())


def test_an_emulated_trainer_needs_no_torch() -> None:
    code = "import sys, laminar.trainer.emulated, laminar.trainer.loop; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": pathsep.join(sys.path)})
