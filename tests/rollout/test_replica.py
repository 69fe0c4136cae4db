"""A replica between a scripted engine, store and manager: what it reports, forgets, refuses, and how it ends."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from laminar.config import load
from laminar.control.commands import Command, Issue, Numbered, Pull, Stop
from laminar.control.events import ReplicaBeat
from laminar.control.mailbox import Inbox
from laminar.errors import EngineError, ProtocolError, VersionGone, WeightsError
from laminar.rollout.engine import Progress, Request
from laminar.rollout.replica import Replica
from laminar.types import Load, ReplicaReply, ReplicaReport, SampleId, SlotRef, Version, Work

WITHIN_S = 20.0
"""Deadline of every wait here."""
V0, V1 = Version(0, 0), Version(0, 1)


class Boom(Exception):
    """A fault of the test's own making."""


@dataclass
class Engine:
    """Makes a token a poll for every request that has been let go on; ends it when its script says so."""

    loaded: SlotRef | None = None
    held: dict[SampleId, Request] = field(default_factory=dict)
    made: dict[SampleId, int] = field(default_factory=dict)
    lengths: dict[SampleId, int] = field(default_factory=dict)
    """Tokens after which a sample ends; without an entry it goes on for ever; with a 0 it ends now."""
    refuses: set[SampleId] = field(default_factory=set)
    released: list[SampleId] = field(default_factory=list)
    load_results: list[Exception | None] = field(default_factory=list)
    """What the next loads come to."""
    loads: list[Version] = field(default_factory=list)
    poll_error: Exception | None = None
    meanwhile: Callable[[], object] = lambda: None
    """Done in each poll before anything is made."""

    def add(self, request: Request) -> None:
        if request.sample in self.refuses:
            raise EngineError("it can never fit")
        self.held[request.sample], self.made[request.sample] = request, len(request.response)

    def release(self, samples: Collection[SampleId]) -> None:
        self.released += samples
        for sample in samples:
            self.held.pop(sample, None)

    def poll(self, timeout_s: float) -> list[Progress]:
        if self.poll_error is not None:
            raise self.poll_error
        self.meanwhile()
        progress = []
        for sample in list(self.held):
            self.made[sample] += 1
            token = np.array([self.made[sample]], np.int32)
            ended = self.made[sample] >= self.lengths.get(sample, 10**9)
            progress.append(Progress(sample, token, -token.astype(np.float32), "stop" if ended else None))
            if ended:
                del self.held[sample]
        return progress

    def interrupt(self) -> None:
        return

    def load(self) -> Load:
        return Load(num_running=len(self.held))

    def load_weights(self, ref: SlotRef) -> None:
        assert not self.held
        self.loads.append(ref.version)
        result = self.load_results.pop(0) if self.load_results else None
        if result is not None:
            raise result
        self.loaded = ref

    def golden(self) -> np.ndarray:
        return np.zeros(63, np.float32)


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
        self.engine, self.store, self.manager, self.shelf = Engine(), Store(), Manager(), Shelf(V0, V1)
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
        scene.engine.poll_error = Boom("engine")
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


# ---------------------------------------------------------------- signs of life


@pytest.mark.parametrize("how", ["waits", "computes", "computes for too long"])
def test_a_step_that_computes_is_slow_and_one_that_does_not_is_stuck(project: Path, how: str) -> None:
    """The beats go on in any case, so they say whether the engine does: a long prefill is no death."""
    short = ("faults.suspect_after_s=0.1", "faults.dead_after_s=0.2", "faults.start_timeout_s=0.4")
    scene = Scene(project / "config.toml", *(short if how == "computes for too long" else ()))
    entered, go_on = threading.Event(), threading.Event()

    def one_step() -> None:
        entered.set()
        while not go_on.is_set():
            if how == "waits":
                go_on.wait()

    scene.ready()
    scene.engine.meanwhile = one_step
    scene.store.give(work(0))
    assert entered.wait(WITHIN_S)
    first = scene.manager.beat_that(lambda beat: beat.state == "generating")
    if how == "computes":
        scene.manager.beat_that(lambda beat: beat.step >= first.step + 3)
    else:
        began = scene.replica.clock()
        scene.manager.beat_that(lambda _: scene.replica.clock() - began > 0.5)
        still = [scene.manager.beat_that(lambda _: True).step for _ in range(8)]
        assert len(set(still)) == 1
    go_on.set()
    scene.stop()
