"""A replica between a scripted engine, store and manager: what it reports, forgets, refuses, and how it ends."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from laminar.config import load
from laminar.control.commands import Command, Issue, Numbered, Pull, Stop
from laminar.control.events import ReplicaBeat
from laminar.control.mailbox import Inbox
from laminar.errors import ProtocolError, VersionGone, WeightsError
from laminar.rollout.engine import Progress
from laminar.rollout.replica import Replica
from laminar.types import ReplicaReply, ReplicaReport, SampleId, SlotRef, Version, Work
from tests.rollout.scripted import Boom, ScriptedEngine

WITHIN_S = 20.0
"""Deadline of every wait here."""
V0, V1 = Version(0, 0), Version(0, 1)


class Store:
    """Answers with what the test has put in; keeps what was reported, in order."""

    def __init__(self) -> None:
        self.news = threading.Condition()
        self.reports: list[ReplicaReport] = []
        self.work: list[Work] = []
        self.cancel: list[tuple[SampleId, int]] = []
        self.release: dict[tuple[SampleId, int], None] = {}
        """Asked for in every reply until it is reported."""
        self.error: Exception | None = None
        self.stored: dict[SampleId, list[int]] = {}
        """Tokens of earlier owners."""

    def exchange(self, report: ReplicaReport) -> ReplicaReply:
        with self.news:
            if self.error is not None:
                raise self.error
            self.reports.append(report)
            accepted = {(sample, epoch) for sample, epoch in report.accepted}
            self.work = [w for w in self.work if (w.sample, w.owner_epoch) not in accepted]
            for released in (*report.released, *((f.sample, f.owner_epoch) for f in report.finished)):
                self.release.pop(released, None)
            if not (self.work or self.cancel or self.release):
                self.news.notify_all()
                self.news.wait(min(report.wait_s, 0.01))
            cancel, self.cancel = tuple(self.cancel), []
            self.news.notify_all()
            return ReplicaReply(report.sequence, tuple(self.work), tuple(self.release), cancel)

    def give(self, *work: Work) -> None:
        with self.news:
            self.work += work
            self.news.notify_all()

    def call_off(self, *work: Work) -> None:
        with self.news:
            self.cancel += [(w.sample, w.owner_epoch) for w in work]
            self.news.notify_all()

    def take_from(self, *work: Work) -> None:
        with self.news:
            self.release.update({(w.sample, w.owner_epoch): None for w in work})
            self.news.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(condition, WITHIN_S)

    def finished(self) -> list[SampleId]:
        return [f.sample for r in self.reports for f in r.finished]

    def tokens(self, sample: SampleId) -> list[int]:
        """What was stored, checked to be without gap or overlap, and which follows what was there before."""
        found = list(self.stored.get(sample, []))
        for chunk in (c for r in self.reports for c in r.chunks if c.sample == sample):
            assert chunk.start == len(found)
            assert len(chunk.tokens) == len(chunk.logprobs) == 4 * len(chunk.mask)
            found += np.frombuffer(chunk.tokens, np.int32).tolist()
        return found


class Manager:
    """Hands out commands, and repeats them until they are acknowledged."""

    def __init__(self) -> None:
        self.news = threading.Condition()
        self.commands: list[Numbered] = []
        self.beats: queue.SimpleQueue[ReplicaBeat] = queue.SimpleQueue()
        self.error: Exception | None = None

    def beat(self, beat: ReplicaBeat, acked: Inbox, wait_s: float) -> Sequence[Numbered]:
        self.beats.put(beat)
        with self.news:
            if self.error is not None:
                raise self.error
            self.news.wait_for(lambda: any(n.number > acked.number for n in self.commands), min(wait_s, 0.05))
            return [n for n in self.commands if n.number > acked.number]

    def tell(self, command: Command) -> None:
        with self.news:
            self.commands.append(Numbered(1, len(self.commands) + 1, command))
            self.news.notify_all()

    def beat_that(self, condition: Callable[[ReplicaBeat], bool]) -> ReplicaBeat:
        """The next beat of this kind."""
        while True:
            beat = self.beats.get(timeout=WITHIN_S)
            if condition(beat):
                return beat


class Shelf:
    """Versions that the relay shows."""

    def __init__(self, *versions: Version) -> None:
        self.versions = set(versions)

    def find(self, version: Version) -> SlotRef | None:
        return SlotRef("slot", version, "f", "fp32") if version in self.versions else None


class Scene:
    """A replica that runs in a thread of its own."""

    def __init__(self, config: Path, *overrides: str) -> None:
        self.engine, self.store, self.manager, self.shelf = ScriptedEngine(), Store(), Manager(), Shelf(V0, V1)
        resolved = load(config, ["faults.heartbeat_s=0.05", "rollout.stream_interval_s=0.02", *overrides])
        self.replica = Replica("r0", 1, "n", self.engine, self.shelf, self.store, self.manager, resolved)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.replica.run()
        except Exception as error:  # any: the test looks at it
            self.error = error

    def pull(self, version: Version) -> None:
        self.manager.tell(Pull("r0", 1, version, ""))

    def ready(self) -> None:
        self.pull(V0)
        self.manager.beat_that(lambda b: b.version == V0 and b.state == "idle")

    def stop(self) -> None:
        self.manager.tell(Stop("replica", "*", ""))
        self.ended()

    def ended(self) -> BaseException | None:
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()
        return self.error


@pytest.fixture
def scene(project: Path) -> Iterator[Scene]:
    scene = Scene(project / "config.toml")
    yield scene
    scene.stop()


def work(group: int, index: int = 0, epoch: int = 0, version: Version = V0) -> Work:
    return Work(SampleId(group, index), 0, epoch, version, "train", np.array([1, 2], np.int32).tobytes())


# ---------------------------------------------------------------- work


def test_tokens_arrive_without_gaps_and_the_finish_with_the_last(scene: Scene) -> None:
    scene.ready()
    items = [work(0), work(1), work(2)]
    scene.engine.lengths = {w.sample: n for w, n in zip(items, (1, 5, 300), strict=True)}
    scene.store.give(*items)
    scene.store.until(lambda: len(scene.store.finished()) == 3)
    assert sorted(scene.store.finished()) == [w.sample for w in items], "each once"
    for w in items:
        assert scene.store.tokens(w.sample) == list(range(1, scene.engine.lengths[w.sample] + 1))
    for report in scene.store.reports:
        for end in report.finished:
            assert (end.reason, end.length) == ("stop", scene.engine.lengths[end.sample])
    assert [r.sequence for r in scene.store.reports] == list(range(1, len(scene.store.reports) + 1))
    scene.manager.beat_that(lambda b: b.state == "idle" and b.step > 0)


def test_work_that_is_sent_again_is_begun_once(scene: Scene) -> None:
    """An answer may be lost with the acceptance in it: the store repeats what it has not heard of."""
    scene.ready()
    item = work(0)
    scene.store.give(item, item)
    scene.store.until(lambda: bool(scene.store.tokens(item.sample)))
    assert list(scene.engine.held) == [item.sample]
    scene.engine.lengths[item.sample] = 0
    scene.store.until(lambda: bool(scene.store.finished()))
    assert scene.store.finished() == [item.sample]


def test_an_engine_that_refuses_is_a_failure_and_not_a_reward(scene: Scene) -> None:
    """Invariant 3; fault 16: the sample is reported as failed, with the engine's words; the others go on."""
    scene.ready()
    bad, good = work(0), work(1)
    scene.engine.refuses, scene.engine.lengths = {bad.sample}, {good.sample: 2}
    scene.store.give(bad, good)
    scene.store.until(lambda: bool(scene.store.finished()) and any(r.failed for r in scene.store.reports))
    (failure,) = [f for r in scene.store.reports for f in r.failed]
    assert (failure.sample, failure.reason, failure.message) == (bad.sample, "engine_error", "it can never fit")
    assert scene.store.finished() == [good.sample] and scene.store.tokens(bad.sample) == []


@pytest.mark.parametrize("state", ["queued", "decoding", "finished", "unknown"])
def test_a_cancel_in_every_state(scene: Scene, state: str) -> None:
    """Fault 15: what is called off is forgotten, the rest goes on, and nothing more is reported of it."""
    scene.ready()
    store, engine = scene.store, scene.engine
    gone, stays = work(0), work(1)
    if state == "finished":
        engine.lengths[gone.sample] = 1
    if state == "queued":  # the work and its end in one answer
        with store.news:
            store.work += [gone, stays]
            store.cancel.append((gone.sample, 0))
    else:
        store.give(stays, *([] if state == "unknown" else [gone]))
        if state == "decoding":
            store.until(lambda: bool(store.tokens(gone.sample)))
        if state == "finished":
            store.until(lambda: gone.sample in store.finished())
        store.call_off(gone)
    store.until(lambda: not store.cancel and bool(store.tokens(stays.sample)))
    told = len(store.reports)
    store.until(lambda: len(store.reports) > told + 3)
    assert gone.sample not in engine.held and stays.sample in engine.held
    assert not [c for r in store.reports[told + 2 :] for c in r.chunks if c.sample == gone.sample]
    assert (gone.sample in engine.made) == (state in ("decoding", "finished")), "what is called off is not begun"
    assert (gone.sample in store.finished()) == (state == "finished")
    engine.lengths[stays.sample] = 0
    store.until(lambda: stays.sample in store.finished())


def test_a_cancel_of_an_earlier_epoch_is_not_one_of_this(scene: Scene) -> None:
    scene.ready()
    store = scene.store
    store.give(work(0, epoch=3))
    store.until(lambda: bool(store.tokens(SampleId(0, 0))))
    store.call_off(work(0, epoch=2))
    store.until(lambda: not store.cancel)
    told = len(store.reports)
    store.until(lambda: len(store.reports) > told + 3)
    assert SampleId(0, 0) in scene.engine.held


# ---------------------------------------------------------------- release and adoption


def released(scene: Scene) -> list[tuple[SampleId, int]]:
    return [r for report in scene.store.reports for r in report.released]


def test_what_is_let_go_of_is_flushed_first_and_never_spoken_of_again(scene: Scene) -> None:
    """Protocol §5: all that it made is in the report that says so, or before it; the rest goes on."""
    scene.ready()
    gone, stays = work(0), work(1)
    scene.store.give(gone, stays)
    scene.store.until(lambda: bool(scene.store.tokens(gone.sample)) and bool(scene.store.tokens(stays.sample)))
    scene.store.take_from(gone)
    scene.store.until(lambda: bool(released(scene)))
    assert released(scene) == [(gone.sample, 0)]
    made = scene.engine.made[gone.sample]
    assert scene.store.tokens(gone.sample) == list(range(1, made + 1)), "to the last token"
    told = len(scene.store.reports)
    scene.store.until(lambda: len(scene.store.reports) > told + 3)
    assert scene.engine.made[gone.sample] == made and gone.sample not in scene.engine.held
    assert released(scene) == [(gone.sample, 0)] and scene.store.finished() == []
    scene.engine.lengths[stays.sample] = 0
    scene.store.until(lambda: scene.store.finished() == [stays.sample])
    scene.pull(V1)
    scene.manager.beat_that(lambda b: b.version == V1)


def test_what_has_ended_is_finished_and_not_let_go_of(scene: Scene) -> None:
    """The finish wins, whichever of the two is seen first."""
    scene.ready()
    item = work(0)
    scene.store.give(item)
    scene.store.until(lambda: bool(scene.store.tokens(item.sample)))
    with scene.store.news:
        scene.engine.lengths[item.sample] = 0
        scene.store.release[item.sample, 0] = None
        scene.store.news.notify_all()
    scene.store.until(lambda: bool(scene.store.finished()))
    told = len(scene.store.reports)
    scene.store.until(lambda: len(scene.store.reports) > told + 2)
    assert scene.store.finished() == [item.sample] and released(scene) == []


@pytest.mark.parametrize("epoch", [1, 5])
def test_a_release_of_another_epoch_is_not_one_of_this(scene: Scene, epoch: int) -> None:
    scene.ready()
    item = work(0, epoch=3)
    scene.store.give(item)
    scene.store.until(lambda: bool(scene.store.tokens(item.sample)))
    scene.store.take_from(work(0, epoch=epoch))
    told = len(scene.store.reports)
    scene.store.until(lambda: len(scene.store.reports) > told + 3)
    assert released(scene) == [] and item.sample in scene.engine.held


def test_work_that_is_wanted_back_before_it_was_begun(scene: Scene) -> None:
    """The work and the word to let go of it come in one reply, and again until they are answered."""
    scene.ready()
    item = work(0)
    with scene.store.news:
        scene.store.work.append(item)
        scene.store.release[item.sample, 0] = None
    scene.store.until(lambda: bool(released(scene)))
    assert released(scene) == [(item.sample, 0)]
    assert scene.store.tokens(item.sample) == list(range(1, scene.engine.made[item.sample] + 1))


def test_adopted_work_goes_on_from_its_prefix(scene: Scene) -> None:
    """Invariant 9: what is stored is not made again, and what follows is reported from its end on."""
    scene.ready()
    prefix = np.arange(1, 8, dtype=np.int32)
    item = work(0, epoch=2)
    item = dataclasses.replace(item, response=prefix.tobytes(), logprobs=np.zeros(7, np.float32).tobytes())
    scene.store.stored[item.sample] = prefix.tolist()
    scene.engine.lengths[item.sample] = 12
    scene.store.give(item)
    scene.store.until(lambda: bool(scene.store.finished()))
    assert scene.store.tokens(item.sample) == list(range(1, 13))
    (end,) = [f for r in scene.store.reports for f in r.finished]
    assert (end.length, end.owner_epoch) == (12, 2)
    assert all(c.owner_epoch == 2 for r in scene.store.reports for c in r.chunks)


def test_work_that_comes_back_is_begun_with_what_another_made(scene: Scene) -> None:
    """Moved away and back: the second time it is another owner of the same sample."""
    scene.ready()
    item = work(0)
    scene.store.give(item)
    scene.store.until(lambda: bool(scene.store.tokens(item.sample)))
    scene.store.take_from(item)
    scene.store.until(lambda: bool(released(scene)))
    longer = np.arange(1, len(scene.store.tokens(item.sample)) + 6, dtype=np.int32)
    scene.store.stored[item.sample] = longer.tolist()
    with scene.store.news:
        scene.store.reports.clear()
    scene.store.give(dataclasses.replace(item, owner_epoch=2, response=longer.tobytes()))
    scene.store.until(lambda: len(scene.store.tokens(item.sample)) > len(longer))
    scene.engine.lengths[item.sample] = 0
    scene.store.until(lambda: bool(scene.store.finished()))
    assert scene.store.tokens(item.sample) == list(range(1, scene.engine.made[item.sample] + 1))


# ---------------------------------------------------------------- interruption


@pytest.fixture
def partial(project: Path) -> Iterator[Scene]:
    scene = Scene(project / "config.toml", "schedule=partial")
    yield scene
    scene.stop()


def versions_of(scene: Scene, sample: SampleId) -> list[Version]:
    found = [c.version for r in scene.store.reports for c in r.chunks if c.sample == sample]
    return sorted(set(found))


def test_an_interrupted_response_goes_on_under_the_new_version(partial: Scene) -> None:
    """Schedule `partial`: same attempt, same owner, no token lost or doubled, each chunk with the version it is of."""
    partial.ready()
    items = [work(0), work(1)]
    partial.store.give(*items)
    partial.store.until(lambda: all(partial.store.tokens(w.sample) for w in items))
    partial.manager.tell(Pull("r0", 1, V1, "", interrupt=True))
    partial.store.until(lambda: all(versions_of(partial, w.sample) == [V0, V1] for w in items))
    for w in items:
        partial.engine.lengths[w.sample] = 0
    partial.store.until(lambda: len(partial.store.finished()) == 2)
    assert partial.engine.loads == [V0, V1]
    for w in items:
        chunks = [c for r in partial.store.reports for c in r.chunks if c.sample == w.sample]
        assert [c.version for c in chunks] == sorted(c.version for c in chunks)
        assert {c.owner_epoch for c in chunks} == {0}
        assert partial.store.tokens(w.sample) == list(range(1, partial.engine.made[w.sample] + 1))


def test_an_interruption_for_a_version_that_is_gone_changes_nothing(partial: Scene) -> None:
    """Fault 24."""
    partial.ready()
    item = work(0)
    partial.store.give(item)
    partial.store.until(lambda: bool(partial.store.tokens(item.sample)))
    partial.shelf.versions.remove(V1)
    partial.manager.tell(Pull("r0", 1, V1, "", interrupt=True))
    beat = partial.manager.beat_that(lambda b: b.failed_pulls == 1)
    assert beat.version == V0
    partial.engine.lengths[item.sample] = 0
    partial.store.until(lambda: bool(partial.store.finished()))
    assert versions_of(partial, item.sample) == [V0]


def test_an_interruption_with_nothing_in_hand_is_a_pull(partial: Scene) -> None:
    partial.ready()
    partial.manager.tell(Pull("r0", 1, V1, "", interrupt=True))
    partial.manager.beat_that(lambda b: b.version == V1 and b.state == "idle")


def test_under_partial_work_of_an_older_version_is_begun(partial: Scene) -> None:
    """Issued under version 0, arrived after the interruption: its tokens are of version 1."""
    partial.pull(V1)
    partial.manager.beat_that(lambda b: b.version == V1)
    item = work(0)
    partial.engine.lengths[item.sample] = 3
    partial.store.give(item)
    partial.store.until(lambda: bool(partial.store.finished()))
    assert versions_of(partial, item.sample) == [V1]


# ---------------------------------------------------------------- weights


def test_a_pull_waits_until_nothing_is_held(scene: Scene) -> None:
    """Invariant 1: weights change only while no trajectory lives on them."""
    scene.ready()
    item = work(0)
    scene.store.give(item)
    scene.store.until(lambda: bool(scene.store.tokens(item.sample)))
    scene.pull(V1)
    scene.manager.beat_that(lambda b: b.step > 20)
    assert scene.engine.loads == [V0]
    scene.engine.lengths[item.sample] = 0
    scene.manager.beat_that(lambda b: b.version == V1)
    assert scene.engine.loads == [V0, V1]
    assert scene.store.finished() == [item.sample], "reported, and acknowledged, before"


@pytest.mark.parametrize("how", ["not on the shelf", "taken while it was read", "taken in the second try"])
def test_a_version_that_is_gone_is_a_failed_pull(scene: Scene, how: str) -> None:
    """Fault 24: the replica keeps what it has, says so, and is told of another."""
    scene.ready()
    if how == "not on the shelf":
        scene.shelf.versions.remove(V1)
    elif how == "taken while it was read":
        scene.engine.load_results = [VersionGone("taken")]
    else:
        scene.engine.load_results = [WeightsError("torn"), VersionGone("taken")]
    scene.pull(V1)
    beat = scene.manager.beat_that(lambda b: b.failed_pulls == 1)
    assert (beat.version, beat.state) == (V0, "idle")
    scene.shelf.versions.add(V1)
    scene.pull(V1)
    scene.manager.beat_that(lambda b: b.version == V1)


def test_weights_that_are_wrong_once_are_loaded_again(scene: Scene) -> None:
    scene.engine.load_results = [WeightsError("fingerprint")]
    scene.ready()
    assert scene.engine.loads == [V0, V0]


def test_weights_that_are_wrong_twice_end_the_replica(project: Path) -> None:
    """Fault 22: at the first sync, with the reason."""
    scene = Scene(project / "config.toml")
    scene.engine.load_results = [WeightsError("once"), WeightsError("twice")]
    scene.pull(V0)
    error = scene.ended()
    assert isinstance(error, WeightsError) and str(error) == "twice"


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("where", ["engine", "store", "manager"])
def test_the_failure_of_any_thread_ends_run_with_it(project: Path, where: str) -> None:
    """Fault 2: the original error, whichever of the three threads it came up in."""
    scene = Scene(project / "config.toml")
    scene.ready()
    if where == "engine":
        scene.engine.die_at = 1
        scene.store.give(work(0))
    elif where == "store":
        with scene.store.news:
            scene.store.error = Boom("store")
    else:
        with scene.manager.news:
            scene.manager.error = Boom("manager")
    error = scene.ended()
    assert isinstance(error, Boom) and str(error) == where


def test_work_of_another_version_is_refused(scene: Scene) -> None:
    """Invariant 1: it is given back, not generated; whoever dropped it meanwhile ignores that."""
    scene.ready()
    scene.store.give(work(0, version=V1))
    scene.store.until(lambda: any(report.failed for report in scene.store.reports))
    failure = next(report.failed[0] for report in scene.store.reports if report.failed)
    assert failure.sample == SampleId(0, 0) and "holds version 0, not 1" in failure.message


def test_a_command_for_somebody_else_is_refused(project: Path) -> None:
    scene = Scene(project / "config.toml")
    scene.manager.tell(Issue("r0", 1, V0, 1, "train", ""))
    assert isinstance(scene.ended(), ProtocolError)


def test_stop_ends_run_in_the_middle_of_work(project: Path) -> None:
    """Fault 10."""
    scene = Scene(project / "config.toml")
    scene.ready()
    scene.store.give(work(0))
    scene.store.until(lambda: bool(scene.store.tokens(SampleId(0, 0))))
    scene.stop()
    assert scene.error is None


# ---------------------------------------------------------------- engines that misbehave


def until_reports(scene: Scene, more: int) -> None:
    """Until the store has heard so many further reports."""
    told = len(scene.store.reports)
    scene.store.until(lambda: len(scene.store.reports) > told + more)


def test_an_engine_that_dies_leaves_what_was_streamed(project: Path) -> None:
    """Faults 2 and 5: its error ends the replica; tokens that were acknowledged before are with the store."""
    scene = Scene(project / "config.toml")
    scene.ready()
    item = work(0)
    scene.store.give(item)
    scene.store.until(lambda: len(scene.store.tokens(item.sample)) > 3)
    scene.engine.die_at = 1
    error = scene.ended()
    assert isinstance(error, Boom) and str(error) == "engine"
    kept = scene.store.tokens(item.sample)
    assert kept == list(range(1, len(kept) + 1)) and scene.store.finished() == []


def test_an_engine_that_hangs_is_seen_by_its_step(scene: Scene) -> None:
    """Fault 1: the replica beats on, with work and without a step, which is what the manager takes for a death."""
    scene.ready()
    scene.store.give(work(0))
    scene.store.until(lambda: bool(scene.store.tokens(SampleId(0, 0))))
    scene.engine.hang_at = 1
    polls = scene.engine.polls + 1
    stuck = scene.manager.beat_that(lambda b: b.step >= polls - 1 and scene.engine.polls == polls)
    for _ in range(3):
        beat = scene.manager.beat_that(lambda b: True)
        assert (beat.state, beat.version) == ("generating", V0) and beat.step <= stuck.step + 1
    scene.engine.hang_at = None
    scene.engine.let_go.set()
    scene.manager.beat_that(lambda b: b.step > polls)


def test_a_slow_engine_is_no_stuck_one(scene: Scene) -> None:
    """Its step moves on, whether or not there is a token."""
    scene.engine.slow = 10**9
    scene.ready()
    item = work(0)
    scene.engine.lengths[item.sample] = 3
    scene.store.give(item)
    first = scene.manager.beat_that(lambda b: b.step > 0)
    scene.manager.beat_that(lambda b: b.step > first.step and b.state == "generating")
    assert scene.store.tokens(item.sample) == []
    scene.engine.slow = 7
    scene.store.until(lambda: bool(scene.store.finished()))
    assert scene.store.tokens(item.sample) == [1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "logprobs", "problem"),
    [
        ([2], [float("nan")], "a log-prob is not finite"),
        ([2], [float("-inf")], "a log-prob is not finite"),
        ([-1], [-1.0], "token -1"),
        ([2, 3], [-1.0], "2 tokens with 1 log-probs"),
    ],
)
def test_garbage_is_a_failure_and_no_training_row(
    scene: Scene, tokens: list[int], logprobs: list[float], problem: str
) -> None:
    """Fault 17, invariant 3: the sample fails, none of it is stored as if it were good, and the others go on."""
    scene.ready()
    bad, good = work(0), work(1)
    scene.engine.garbage[bad.sample] = Progress(
        bad.sample, np.array(tokens, np.int32), np.array(logprobs, np.float32), "stop"
    )
    scene.engine.lengths[good.sample] = 5
    scene.store.give(bad, good)
    scene.store.until(lambda: bool(scene.store.finished()) and any(r.failed for r in scene.store.reports))
    (failure,) = [f for r in scene.store.reports for f in r.failed]
    assert (failure.sample, failure.reason) == (bad.sample, "engine_error") and problem in failure.message
    assert scene.store.tokens(bad.sample) in ([], [1]) and scene.store.finished() == [good.sample]
    assert bad.sample in scene.engine.released and bad.sample not in scene.engine.held


def test_an_engine_that_ignores_new_weights_ends_the_replica(project: Path) -> None:
    """Fault 22: it acknowledges the load and keeps what it had. No beat says that it holds the new version."""
    scene = Scene(project / "config.toml")
    scene.ready()
    scene.engine.ignore_weights = True
    scene.pull(V1)
    error = scene.ended()
    assert isinstance(error, WeightsError) and "version 1" in str(error) and "version 0" in str(error)
    assert scene.engine.loads == [V0, V1, V1]
    while not scene.manager.beats.empty():
        assert scene.manager.beats.get().version != V1


def test_what_comes_after_the_end_is_not_heard(scene: Scene) -> None:
    """Fault 14: more tokens and another finish of a sample that has ended, or that another replica has now."""
    scene.ready()
    scene.engine.late = True
    ended, gone, stays = work(0), work(1), work(2)
    scene.engine.lengths[ended.sample] = 2
    scene.store.give(ended, gone, stays)
    scene.store.until(lambda: bool(scene.store.finished()) and bool(scene.store.tokens(gone.sample)))
    scene.store.take_from(gone)
    scene.store.until(lambda: bool(released(scene)))
    kept = scene.store.tokens(gone.sample)
    until_reports(scene, 3)
    assert scene.store.finished() == [ended.sample] and scene.store.tokens(ended.sample) == [1, 2]
    assert released(scene) == [(gone.sample, 0)] and scene.store.tokens(gone.sample) == kept
    assert scene.engine.made[ended.sample] == 3 and scene.engine.made[gone.sample] == len(kept) + 1, "it was said"
    scene.engine.lengths[stays.sample] = 0
    scene.store.until(lambda: stays.sample in scene.store.finished())


@pytest.mark.parametrize("how", ["called off", "moved"])
def test_an_engine_that_can_not_let_go_ends_the_replica(project: Path, how: str) -> None:
    """Fault 15: what it holds is unknown then, so it dies, and others go on with all of it."""
    scene = Scene(project / "config.toml")
    scene.ready()
    item = work(0)
    scene.store.give(item)
    scene.store.until(lambda: bool(scene.store.tokens(item.sample)))
    scene.engine.abort_raises = True
    (scene.store.call_off if how == "called off" else scene.store.take_from)(item)
    error = scene.ended()
    assert isinstance(error, Boom) and str(error) == "can't be taken back"
    assert scene.store.finished() == []


@pytest.mark.parametrize("too_long", [False, True])
def test_a_step_that_computes_is_slow_and_not_stuck(project: Path, too_long: bool) -> None:
    """A long prefill on a busy machine is no death; what computes for `start_timeout_s` is."""
    short = ("faults.suspect_after_s=0.1", "faults.dead_after_s=0.2", "faults.start_timeout_s=0.4")
    scene = Scene(project / "config.toml", *(short if too_long else ()))
    scene.ready()
    scene.engine.busy = threading.Event()
    scene.store.give(work(0))
    first = scene.manager.beat_that(lambda beat: beat.state == "generating")
    if too_long:
        began = scene.replica.clock()
        scene.manager.beat_that(lambda _: scene.replica.clock() - began > 0.5)
        assert len({scene.manager.beat_that(lambda _: True).step for _ in range(8)}) == 1
    else:
        scene.manager.beat_that(lambda beat: beat.step >= first.step + 3)
    scene.engine.busy.set()
    scene.stop()
