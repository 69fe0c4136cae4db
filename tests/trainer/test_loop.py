"""The trainer's process against an in-memory data store, slots and record."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laminar.config import Config
from laminar.errors import ProtocolError
from laminar.trainer import checkpoint, checkpoint_folder
from laminar.trainer.loop import Statistics, TrainerLoop, merge_statistics
from laminar.trainer.torch_backend import TorchBackend
from laminar.types import Batch, Trained, Version

ITERATIONS = 6
DEADLINE_S = 30.0


class Killed(Exception):
    """Stands for SIGKILL: what is durable stays, the rest is gone."""


class World:
    """What outlives a trainer: cuts, the record of versions, who was told what. Logs every call in order."""

    def __init__(self, make_batch: Callable[..., Batch], num_cuts: int = ITERATIONS) -> None:
        self.make_batch, self.num_cuts = make_batch, num_cuts
        self.recorded: list[tuple[Version, str]] = []
        self.log: list[tuple[str, object]] = []
        self.reports: list[Trained] = []
        self.slots: list[Version] = []
        self.final: dict[str, Tensor] = {}
        self.kill_at: tuple[str, object] | None = None
        self.outstanding = self.most_outstanding = 0

    def _note(self, what: str, about: object) -> None:
        self.log.append((what, about))
        if (what, about) == self.kill_at:
            raise Killed

    # the data store
    def next_batch(self, update: int, part: int) -> Batch | None:
        return self.make_batch(update) if update < self.num_cuts else None

    def trained(self, report: Trained) -> None:
        self.reports.append(report)
        self._note("trained", report.update)

    # weights
    def records(self) -> list[tuple[Version, str]]:
        return list(self.recorded)

    def digest(self, weights: Iterator[tuple[str, Tensor]]) -> str:
        self.final = {name: tensor.clone() for name, tensor in weights}
        return str(hash(tuple((name, tensor.numpy().tobytes()) for name, tensor in self.final.items())))

    def append_record(self, version: Version, fingerprint: str) -> None:
        self.recorded.append((version, fingerprint))
        self._note("record", version.number)

    def publish(self, version: Version, weights: Iterator[tuple[str, Tensor]], golden: Sequence[float]) -> str:
        assert len(golden) == 63
        self.slots.append(version)
        self._note("publish", version.number)
        return self.digest(weights)

    # the manager
    def published(self, version: Version, checkpoint: int) -> None:
        assert version in dict(self.recorded) and version in self.slots
        self._note("announce", version.number)


@pytest.fixture
def world(make_batch: Callable[..., Batch]) -> World:
    return World(make_batch)


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(
        iterations=ITERATIONS, train__num_mini_batches=2, train__warmup_steps=4, train__checkpoint_every=2
    )


def run(world: World, config: Config, folder: Path, **options: object) -> bool:
    loop = TrainerLoop(config, TorchBackend(config), world, world, world, folder, **options)  # type: ignore[arg-type]
    return loop.run()


def test_order_of_an_iteration(world: World, config: Config, tmp_path: Path) -> None:
    """Invariants 2 and 4: record, publish, trained, checkpoint. A checkpoint that held a batch which was never reported
    would leave that batch in flight for ever."""
    seen = []

    def look(report: Trained) -> None:
        seen.append((report.version.number, report.checkpoint, checkpoint_folder.newest(tmp_path)))

    assert run(world, config, tmp_path, on_iteration=look)
    expected: list[tuple[str, int]] = [("publish", 0), ("record", 0), ("announce", 0)]
    for u in range(ITERATIONS):
        expected += [("publish", u + 1), ("record", u + 1), ("announce", u + 1), ("trained", u)]
    assert world.log == expected
    assert [(number, at) for number, at, _ in seen] == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (6, 4)]
    newest = [None if path is None else int(path.name) for _, _, path in seen]
    assert newest == [None, 2, 2, 4, 4, 6]
    statistics = world.reports[0].statistics
    assert {"trainer_wait_s", "publish_stall_s", "loss", "reward_mean"} <= set(statistics)
    assert all(report.statistics.keys() == statistics.keys() for report in world.reports)


KINDS = [("record", 1), ("publish", 1), ("announce", 1), ("trained", 0)]
"""What a trainer may die right after, and the first number of it."""
POINTS = [(what, n + first, 3) for what, first in KINDS for n in range(ITERATIONS)]
POINTS += [(what, n, every) for every in (1, 2) for what, n in (("record", 4), ("announce", 4), ("trained", 3))]


@pytest.fixture(scope="module")
def uninterrupted() -> dict[int, dict[str, Tensor]]:
    """Final weights by nothing but the cuts: filled by the first test that needs them."""
    return {}


@pytest.mark.parametrize(("what", "number", "checkpoint_every"), POINTS)
def test_a_kill_anywhere_changes_no_bit(
    world: World,
    make_config: Callable[..., Config],
    make_batch: Callable[..., Batch],
    uninterrupted: dict[int, dict[str, Tensor]],
    tmp_path: Path,
    what: str,
    number: int,
    checkpoint_every: int,
) -> None:
    """Invariants 3 and 12: replayed cuts give the recorded weights, no second record, and no older version."""
    config = make_config(
        iterations=ITERATIONS,
        train__num_mini_batches=2,
        train__warmup_steps=4,
        train__checkpoint_every=checkpoint_every,
    )
    if not uninterrupted:
        whole = World(make_batch)
        run(whole, config, tmp_path / "whole")
        uninterrupted[0] = whole.final
    world.kill_at = (what, number)
    with pytest.raises(Killed):
        run(world, config, tmp_path / "run")
    world.kill_at = None
    shown = max(version for version in world.slots if version in dict(world.recorded))
    assert run(world, config, tmp_path / "run")
    assert all(torch.equal(world.final[name], tensor) for name, tensor in uninterrupted[0].items())
    assert [version for version, _ in world.recorded] == [Version(0, n) for n in range(ITERATIONS + 1)]
    assert min(world.slots[world.slots.index(shown) + 1 :], default=shown) >= shown
    assert {report.update for report in world.reports} == set(range(ITERATIONS))


def test_a_resume_with_nothing_to_replay_publishes_the_checkpoint(world: World, config: Config, tmp_path: Path) -> None:
    run(world, config, tmp_path)
    world.slots.clear()
    assert run(world, config, tmp_path)
    assert world.slots == [Version(0, ITERATIONS)]


def test_other_weights_for_a_recorded_number_raise_the_lineage(world: World, config: Config, tmp_path: Path) -> None:
    """Protocol section 6: from there on, with a record each, and nothing older than what was seen is shown."""
    world.kill_at = ("record", 5)
    with pytest.raises(Killed):
        run(world, config, tmp_path)
    world.kill_at = None
    world.recorded = [(v, "other" if v.number == 5 else f) for v, f in world.recorded]
    world.slots.clear()
    assert run(world, config, tmp_path)
    assert [v for v, _ in world.recorded][6:] == [Version(1, 5), Version(1, 6)]
    assert world.slots == [Version(1, 5), Version(1, 6)]
    assert [report.version for report in world.reports][-2:] == [Version(1, 5), Version(1, 6)]
    assert checkpoint.read_info(tmp_path / "000006").version == Version(1, 6)


def test_a_raised_lineage_stays_hidden_below_the_highest_number(world: World, config: Config, tmp_path: Path) -> None:
    """Work was issued under version 5; a version 3 of a new lineage would be older than it."""
    world.kill_at = ("trained", 4)
    config = config.model_copy(update={"train": config.train.model_copy(update={"checkpoint_every": 100})})
    with pytest.raises(Killed):
        run(world, config, tmp_path)
    world.recorded = [(v, "other" if v.number == 3 else f) for v, f in world.recorded]
    for killed_again_at in (("record", 4), None):
        world.slots.clear()
        world.kill_at = killed_again_at
        if killed_again_at is None:
            run(world, config, tmp_path)
        else:
            with pytest.raises(Killed):
                run(world, config, tmp_path)
            assert world.slots == []
    assert world.slots == [Version(1, 5), Version(1, 6)]


def test_prefetch_asks_for_one_batch_while_one_is_trained(world: World, config: Config, tmp_path: Path) -> None:
    """Requests come in order; the next comes while its predecessor is trained, and none runs further ahead."""
    asked: list[int] = []
    next_asked = threading.Event()
    serve = world.next_batch

    def next_batch(update: int, part: int) -> Batch | None:
        asked.append(update)
        next_asked.set()
        return serve(update, part)

    def publish(version: Version, weights: Iterator[tuple[str, Tensor]], golden: Sequence[float]) -> str:
        if 0 < version.number < ITERATIONS:
            assert next_asked.wait(DEADLINE_S)
            assert asked[-1] == version.number  # u + 1 was asked for before u is published, and nothing beyond
        next_asked.clear()
        world.slots.append(version)
        return str(version)

    world.next_batch, world.publish = next_batch, publish  # type: ignore[method-assign]
    assert run(world, config, tmp_path)
    assert asked == list(range(ITERATIONS))


def test_prompts_that_end_end_the_run_with_a_checkpoint(
    make_batch: Callable[..., Batch], make_config: Callable[..., Config], tmp_path: Path
) -> None:
    """Fault 9: the data ends first."""
    world = World(make_batch, num_cuts=3)
    assert run(world, make_config(iterations=None, data__epochs=1), tmp_path)
    assert checkpoint_folder.newest(tmp_path) == tmp_path / "000003"


def test_stop_while_waiting(world: World, config: Config, tmp_path: Path) -> None:
    """Fault 10: a batch that never comes does not hold a stop up."""
    stop, asked, release = threading.Event(), threading.Event(), threading.Event()
    results: list[bool] = []

    def next_batch(update: int, part: int) -> Batch | None:
        asked.set()
        release.wait(DEADLINE_S)
        return None

    world.next_batch = next_batch  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: results.append(run(world, config, tmp_path, stop=stop)))
    thread.start()
    assert asked.wait(DEADLINE_S)
    stop.set()
    thread.join(DEADLINE_S)
    release.set()
    assert results == [False]
    assert checkpoint_folder.newest(tmp_path) is None


def test_stop_between_iterations(world: World, config: Config, tmp_path: Path) -> None:
    stop = threading.Event()
    assert not run(world, config, tmp_path, stop=stop, on_iteration=lambda report: stop.set())
    assert len(world.reports) == 1
    assert run(world, config, tmp_path)


def test_an_empty_cut_publishes_the_same_weights(
    make_batch: Callable[..., Batch], config: Config, tmp_path: Path
) -> None:
    world = World(lambda update: make_batch(update, groups=()))
    assert run(world, config, tmp_path)
    assert len({fingerprint for _, fingerprint in world.recorded}) == 1
    assert len(world.recorded) == ITERATIONS + 1


def test_a_failed_request_reaches_the_caller(world: World, config: Config, tmp_path: Path) -> None:
    """Fault 2: what went wrong in the background is raised, not waited for."""

    def next_batch(update: int, part: int) -> Batch | None:
        raise ConnectionError("the store is gone")

    world.next_batch = next_batch  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="the store is gone"):
        run(world, config, tmp_path)


def test_a_batch_out_of_order_is_refused(world: World, config: Config, tmp_path: Path) -> None:
    world.next_batch = lambda update, part: world.make_batch(update + 1)  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="batch 1"):
        run(world, config, tmp_path)


# ---------------------------------------------------------------- batches in parts


@pytest.fixture
def in_parts(world: World) -> World:
    """Every batch comes in two parts of two groups; the requests are in the log."""
    serve = world.make_batch

    def next_batch(update: int, part: int) -> Batch | None:
        world.log.append(("ask", (update, part)))
        if update >= world.num_cuts:
            return None
        batch = serve(2 * update + part, groups=(3, 2), first_group=2 * part, version=Version(0, update))
        return dataclasses.replace(batch, update=update, part=part, num_parts=2)

    world.next_batch = next_batch  # type: ignore[method-assign]
    return world


@pytest.fixture
def stream(make_config: Callable[..., Config]) -> Config:
    return make_config(schedule="stream", iterations=3, train__num_mini_batches=2, train__checkpoint_every=2)


def test_a_batch_in_parts_is_one_iteration(in_parts: World, stream: Config, tmp_path: Path) -> None:
    """Schedule `stream`: parts in order, each asked for while the one before is trained; one version, one report."""
    assert run(in_parts, stream, tmp_path)
    asked = [about for what, about in in_parts.log if what == "ask"]
    assert asked == [(u, part) for u in range(3) for part in (0, 1)]
    assert [about for what, about in in_parts.log if what == "publish"] == [0, 1, 2, 3]
    assert [report.update for report in in_parts.reports] == [0, 1, 2]
    assert {"loss", "lr", "reward_mean", "trainer_wait_s", "train_s", "publish_stall_s"} <= set(
        in_parts.reports[0].statistics
    )
    assert checkpoint_folder.newest(tmp_path) == tmp_path / "000003"


def test_a_kill_between_parts_trains_the_whole_batch_again(
    in_parts: World, make_batch: Callable[..., Batch], stream: Config, tmp_path: Path
) -> None:
    """Invariant 12: what was learned from the first part is not in any version, and comes out again."""
    serve = in_parts.next_batch
    killed = []

    def next_batch(update: int, part: int) -> Batch | None:
        if (update, part) == (1, 1) and not killed:
            killed.append(part)
            raise Killed
        return serve(update, part)

    assert run(in_parts, stream, tmp_path / "whole")
    whole, recorded = in_parts.final, list(in_parts.recorded)
    in_parts.recorded.clear()
    in_parts.next_batch = next_batch  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run(in_parts, stream, tmp_path / "run")
    assert [version.number for version, _ in in_parts.recorded] == [0, 1]
    assert run(in_parts, stream, tmp_path / "run")
    assert in_parts.recorded == recorded
    assert all(torch.equal(in_parts.final[name], tensor) for name, tensor in whole.items())


def test_a_last_part_may_be_empty(in_parts: World, stream: Config, tmp_path: Path) -> None:
    """Fault 13: the prompts ended after the first part; what that taught is published."""
    serve = in_parts.next_batch

    def next_batch(update: int, part: int) -> Batch | None:
        if (update, part) == (1, 1):
            return dataclasses.replace(in_parts.make_batch(update, groups=()), part=1, num_parts=2)
        return serve(update, part) if update < 2 else None

    in_parts.next_batch = next_batch  # type: ignore[method-assign]
    assert run(in_parts, stream, tmp_path)
    assert [version.number for version, _ in in_parts.recorded] == [0, 1, 2]
    assert len({fingerprint for _, fingerprint in in_parts.recorded}) == 3
    assert in_parts.reports[-1].statistics["reward_mean"] is not None


ROWS: list[tuple[int, Statistics]] = [
    (6, {"loss": 1.0, "lr": 0.1, "train_s": 2.0, "skipped_steps": 1.0, "logprob_gap_max": 0.3, "kl_ref": None}),
    (2, {"loss": 3.0, "lr": 0.2, "train_s": 1.0, "skipped_steps": 0.0, "logprob_gap_max": 0.1, "kl_ref": None}),
]


def test_statistics_of_parts_make_one_row() -> None:
    """Means are weighted by samples; times and counts add up; of `lr` the last is told."""
    merged = merge_statistics(ROWS)
    assert merged == {
        "loss": 1.5,
        "lr": 0.2,
        "train_s": 3.0,
        "skipped_steps": 1.0,
        "logprob_gap_max": 0.3,
        "kl_ref": None,
    }
    assert merge_statistics(ROWS[:1]) == ROWS[0][1]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(4, 1.0), (4, None)], 1.0),
        ([(4, None), (4, 2.0)], 2.0),
        ([(4, 1.0), (0, None)], 1.0),
        ([(0, 1.0), (0, 2.0)], None),
    ],
)
def test_a_part_in_which_nothing_was_measured_weighs_nothing(
    parts: list[tuple[int, float | None]], expected: float | None
) -> None:
    assert merge_statistics([(size, {"entropy": value}) for size, value in parts]) == {"entropy": expected}
