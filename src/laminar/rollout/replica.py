"""A replica: one engine and the loop that feeds it.

Owns: the engine, the trajectories it holds, what it has made and the data store has not acknowledged.
Threads: `run` generates; one exchanges with the data store (one report at a time, resent work is ignored); one beats.
Waits for: work or a command while empty; never for the store or the manager while it has tokens to make.
Invariants: weights change only while it holds nothing, so every trajectory has one version (under `partial` each token
has one); what a beat says it holds has passed the fingerprint and the golden prompt.
A failure of any of the three threads ends `run` with that failure.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from laminar.config import Config
from laminar.control.commands import Command, Numbered, Pull, Stop
from laminar.control.events import ReplicaBeat
from laminar.control.mailbox import Inbox
from laminar.errors import EngineError, ProtocolError, VersionGone, WeightsError
from laminar.rollout.engine import Engine, FloatArray, Progress, Request, TokenArray
from laminar.timing import COALESCE_S, together_s
from laminar.types import (
    Chunk,
    Failure,
    Finish,
    Load,
    ReplicaReply,
    ReplicaReport,
    SampleId,
    Sampling,
    SlotRef,
    Version,
    Work,
)


class Store(Protocol):
    def exchange(self, report: ReplicaReport) -> ReplicaReply: ...


class Manager(Protocol):
    def beat(self, beat: ReplicaBeat, acked: Inbox, wait_s: float) -> Sequence[Numbered]:
        """Commands above `acked`; with nothing to say the answer may take up to `wait_s`."""


class Versions(Protocol):
    """The relay's shelf on this machine."""

    def find(self, version: Version) -> SlotRef | None: ...


Piece = tuple[Version, TokenArray, FloatArray]
"""Tokens and log-probs generated under one version."""


@dataclass(slots=True)
class Held:
    """A trajectory in this replica's hands."""

    work: Work
    response: list[TokenArray]
    """int32 pieces: all response tokens made, of this and of earlier owners."""
    reported: int
    """Response tokens that the data store has acknowledged or that are on their way."""
    new: list[Piece] = field(default_factory=list)
    """(version, tokens, log-probs) that are in no report yet."""
    finish_reason: str | None = None
    failure: str | None = None
    released: bool = False
    """Another replica is to go on with it."""

    @property
    def length(self) -> int:
        return sum(len(piece) for piece in self.response)

    def take_new(self) -> list[Piece]:
        """What is in no report yet, one piece for each version."""
        pieces, self.new = self.new, []
        runs = [(v, list(run)) for v, run in itertools.groupby(pieces, key=lambda piece: piece[0])]
        return [(v, np.concatenate([t for _, t, _ in run]), np.concatenate([p for _, _, p in run])) for v, run in runs]

    @property
    def generates(self) -> bool:
        return self.finish_reason is None and self.failure is None and not self.released


class Replica:
    """See the module's contract. `name` is its id for life, `incarnation` this start of it."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        node: str,
        engine: Engine,
        versions: Versions,
        store: Store,
        manager: Manager,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        leaving: threading.Event | None = None,
    ) -> None:
        """`leaving`: set when this replica has been asked to end soon; the manager is told, and drains it."""
        self.name, self.incarnation, self.node = name, incarnation, node
        self.engine, self.versions, self.store, self.manager = engine, versions, store, manager
        self.config, self.clock = config, clock
        self.leaving = leaving or threading.Event()
        rollout = config.rollout
        train = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens, tuple(rollout.stop))
        evaluate = Sampling(config.eval.temperature, 1.0, 0, rollout.max_new_tokens, tuple(rollout.stop))
        self.sampling = {"train": train, "eval": evaluate}

        self._partial = config.schedule == "partial"
        self._news = threading.Condition()
        """Guards everything below; notified when any of it changes."""
        self._held: dict[SampleId, Held] = {}
        self._inbox: list[Work] = []
        self._cancelled: list[tuple[SampleId, int]] = []
        self._release: list[tuple[SampleId, int]] = []
        self._accepted: list[tuple[SampleId, int]] = []
        self._sent: list[SampleId] = []
        """Ended samples in the report that is on its way."""
        self._unreported_end = False
        """A sample has ended and is not in any report."""
        self._load_seen = Load()
        self._pull: Pull | None = None
        self._loading: Version | None = None
        self._version: Version | None = None
        self._state = "idle"
        self._beat_now = False
        self._step = 0
        self._step_began = self.clock()
        self._moves = 0
        self._failed_pulls = 0
        self._busy_s = 0.0
        self._stopping = False
        self._failure: BaseException | None = None

    # ------------------------------------------------------------ generate

    def run(self) -> None:
        """Generate until told to stop. Raises what any of the threads raised."""
        self._engine_clock = time.pthread_getcpuclockid(threading.get_ident())
        threads = [
            threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            for name, body in (("exchange", self._exchange_loop), ("beat", self._beat_loop))
        ]
        for thread in threads:
            thread.start()
        self._guarded(self._generate_loop)
        for thread in threads:
            thread.join(timeout=2 * self.config.faults.heartbeat_s + 2 * self.config.rollout.stream_interval_s)
        if self._failure is not None:
            raise self._failure

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            with self._news:
                self._failure = self._failure or error
        finally:
            with self._news:
                self._stopping = True
                self._news.notify_all()

    def _generate_loop(self) -> None:
        while not self._stopping:
            with self._news:
                self._news.wait_for(self._something_to_do)
                cancelled, self._cancelled = self._cancelled, []
                work, self._inbox = self._inbox, []
                release, self._release = self._release, []
                pull = None
                if self._pull is not None and (self._pull.interrupt or not (self._held or work)):
                    pull, self._pull = self._pull, None
                    self._loading = pull.version
            self._forget(cancelled)
            self._let_go(release)
            self._begin([w for w in work if (w.sample, w.owner_epoch) not in cancelled])
            if pull is not None:
                held = self._interrupt() if pull.interrupt else []
                self._load(pull.version)
                self._resume(held)
            with self._news:
                generating = self._any_generating()
            if generating:
                self._step_began = self.clock()
                progress = self.engine.poll(self.config.rollout.stream_interval_s)
                with self._news:
                    self._busy_s += self.clock() - self._step_began
                    self._step += 1
                    self._load_seen = self.engine.load()
                    self._record(progress)

    def _something_to_do(self) -> bool:
        load = self._pull is not None and (self._pull.interrupt or not self._held)
        told = self._inbox or self._cancelled or self._release
        return bool(self._stopping or self._any_generating() or load or told)

    def _begin(self, work: Sequence[Work]) -> None:
        """Hand new work to the engine. What the engine refuses for good is reported as failed."""
        for item in work:
            if item.sample in self._held:
                self.engine.release([item.sample])
            response = np.frombuffer(item.response, np.int32)
            held = Held(item, [response], len(response))
            if item.version == self._version or self._partial:
                self._add(held)
            else:  # the data store may have dropped it while it was on its way, and the manager have sent a pull
                held.failure = f"{self.name} holds version {self._version}, not {item.version}"
            with self._news:
                self._held[item.sample] = held
                self._state = "generating"
                if held.failure is not None:
                    self._unreported_end = True
                    self._news.notify_all()

    def _add(self, held: Held) -> None:
        item = held.work
        request = Request(
            item.sample,
            item.attempt,
            np.frombuffer(item.prompt, np.int32),
            np.concatenate(held.response),
            self.sampling[item.kind],
        )
        try:
            self.engine.add(request)
        except EngineError as error:
            held.failure = str(error)

    def _let_go(self, release: Sequence[tuple[SampleId, int]]) -> None:
        """Flush samples and leave them to another replica. What has ended meanwhile stays ended."""
        if not release:
            return
        progress = self.engine.poll(0.0)
        with self._news:
            self._record(progress)
            gone = []
            for sample, epoch in release:
                held = self._held.get(sample)
                if held is not None and held.work.owner_epoch == epoch and held.generates:
                    held.released = self._unreported_end = True
                    gone.append(sample)
            self._news.notify_all()
        self.engine.release(gone)

    def _interrupt(self) -> list[Held]:
        """Take everything out of the engine, in mid-response, so that the weights can change under it."""
        progress = self.engine.poll(0.0) if self._held else []
        with self._news:
            self._record(progress)
            held = [h for h in self._held.values() if h.generates]
        self.engine.release([h.work.sample for h in held])
        return held

    def _resume(self, interrupted: Sequence[Held]) -> None:
        """Go on with what was taken out: prompt and response are prefilled again."""
        for held in interrupted:
            self._add(held)
        if interrupted:
            with self._news:
                self._state = "generating"

    def _forget(self, cancelled: Sequence[tuple[SampleId, int]]) -> None:
        with self._news:
            gone = [s for s, epoch in cancelled if s in self._held and self._held[s].work.owner_epoch <= epoch]
            for sample in gone:
                del self._held[sample]
            if gone:
                self._note_if_empty()
        self.engine.release(gone)

    def _record(self, progress: Sequence[Progress]) -> None:
        for p in progress:
            held = self._held.get(p.sample)
            if held is None or not held.generates:
                continue
            if (problem := _impossible(p)) is not None:
                held.failure = problem
                self.engine.release([p.sample])
            else:
                if len(p.tokens):
                    assert self._version is not None
                    held.response.append(p.tokens)
                    held.new.append((self._version, p.tokens, p.logprobs))
                held.finish_reason = p.finish_reason
            if not held.generates:
                self._unreported_end = True
                self._news.notify_all()

    def _load(self, version: Version) -> None:
        """Pull a version. One that the relay no longer has is told to the manager, which names another.

        Raises WeightsError if what was loaded is, twice, not what the trainer published (the engine compares
        fingerprint and golden prompt).
        """
        with self._news:
            self._state, self._beat_now = "loading", True
            self._news.notify_all()
        ref = self.versions.find(version)
        try:
            loaded = ref is not None and self._try_load(ref)
        except WeightsError:
            loaded = ref is not None and self._try_load(ref)
        with self._news:
            self._failed_pulls += not loaded
            self._version = None if self.engine.loaded is None else self.engine.loaded.version
            self._state, self._loading, self._beat_now = "idle", None, True
            self._news.notify_all()

    def _try_load(self, ref: SlotRef) -> bool:
        """False: the slot has been taken for a newer version."""
        try:
            self.engine.load_weights(ref)
        except VersionGone:
            return False
        if self.engine.loaded != ref:
            has = self.engine.loaded and f"version {self.engine.loaded.version}"
            raise WeightsError(f"the engine was told to load version {ref.version} and has {has}")
        return True

    # ------------------------------------------------------------ exchange with the data store

    def _exchange_loop(self) -> None:
        interval, sequence = self.config.rollout.stream_interval_s, 0
        coalesce_s = together_s(self.config.rollout.replicas, COALESCE_S)
        streamed = self.clock()
        reply: ReplicaReply | None = None
        while True:
            with self._news:
                if reply is not None:
                    self._take_reply(reply)
                if self._stopping:
                    return
                idle = not self._held and not self._inbox
                if not idle:
                    self._news.wait_for(self._something_to_say, timeout=max(0.0, streamed + interval - self.clock()))
                    if self._any_generating():
                        self._news.wait_for(lambda: self._stopping or not self._any_generating(), timeout=coalesce_s)
                sequence += 1
                if stream := self.clock() >= streamed + interval:
                    streamed = self.clock()
                report = self._report(sequence, interval if idle and not self._accepted else 0.0, stream)
            reply = self.store.exchange(report)

    def _something_to_say(self) -> bool:
        return bool(self._stopping or self._unreported_end or self._accepted)

    def _any_generating(self) -> bool:
        return any(h.generates for h in self._held.values())

    def _report(self, sequence: int, wait_s: float, stream: bool) -> ReplicaReport:
        """What has ended or goes elsewhere, and, if it is time to `stream`, all that is new; in the order held."""
        chunks, finished, failed, released = [], [], [], []
        for sample, held in self._held.items():
            epoch = held.work.owner_epoch
            for version, tokens, logprobs in held.take_new() if stream or not held.generates else ():
                data = tokens.tobytes(), logprobs.tobytes(), np.ones(len(tokens), np.uint8).tobytes()
                chunks.append(Chunk(sample, epoch, held.reported, version, *data))
                held.reported += len(tokens)
            if held.released:
                released.append((sample, epoch))
            if held.failure is not None:
                failed.append(Failure(sample, epoch, "engine_error", held.failure))
            elif held.finish_reason is not None:
                finished.append(Finish(sample, epoch, held.length, held.finish_reason))
        accepted, self._accepted = tuple(self._accepted), []
        self._unreported_end = False
        self._sent = [*(f.sample for f in finished), *(f.sample for f in failed), *(sample for sample, _ in released)]
        return ReplicaReport(
            self.name,
            self.incarnation,
            sequence,
            tuple(chunks),
            tuple(finished),
            tuple(failed),
            tuple(released),
            accepted,
            self._busy_s,
            wait_s,
        )

    def _take_reply(self, reply: ReplicaReply) -> None:
        """What was sent is durable: let go of the finished; take the work that is new."""
        for sample in self._sent:
            self._held.pop(sample, None)
        if self._sent:
            self._note_if_empty()
        waiting = {w.sample: w.owner_epoch for w in self._inbox}
        for work in reply.work:
            held = self._held.get(work.sample)
            known = held.work.owner_epoch if held is not None else waiting.get(work.sample, -1)
            if known < work.owner_epoch:
                self._inbox.append(work)
            self._accepted.append((work.sample, work.owner_epoch))
        self._cancelled += reply.cancel
        self._release = list(reply.release)
        if reply.work or reply.cancel or reply.release:
            self._news.notify_all()
            self.engine.interrupt()

    def _note_if_empty(self) -> None:
        if not self._held and not self._inbox:
            self._state, self._beat_now = "idle", True
            self._news.notify_all()

    # ------------------------------------------------------------ beat

    @property
    def _pulling(self) -> Version | None:
        return self._pull.version if self._pull is not None else self._loading

    def _beat_loop(self) -> None:
        period, inbox = self.config.faults.heartbeat_s, Inbox()
        while not self._stopping:
            with self._news:
                self._news.wait_for(lambda: self._stopping or self._beat_now or self._state == "idle", timeout=period)
                self._beat_now = False
                idle = self._state == "idle" and self._pull is None
                reports = self._state == "generating" and not self._inbox and not self._any_generating()
                beat = ReplicaBeat(
                    self.name, self.incarnation, "reporting" if reports else self._state, self._version, self._moved(),
                    self._load_seen, self.node, self._failed_pulls, self._pulling, self.leaving.is_set(),
                )  # fmt: skip
            for command in inbox.take(self.manager.beat(beat, inbox, period if idle else 0.0)):
                self._obey(command)

    def _moved(self) -> int:
        """Grows while the engine moves: steps that have ended, and tenths of a second that its thread has computed.

        A step of a large model on a busy machine may take longer than `dead_after_s`, which is no reason to begin all
        of its samples anew elsewhere. What has computed for `start_timeout_s` without an end is stuck, too.
        """
        if self.clock() - self._step_began < self.config.faults.start_timeout_s:
            self._moves = self._step + int(10 * time.clock_gettime(self._engine_clock))
        return self._moves

    def _obey(self, command: Command) -> None:
        with self._news:
            match command:
                case Pull():
                    self._pull = command
                case Stop():
                    self._stopping = True
                case other:
                    raise ProtocolError(f"{self.name} can't do {other}")
            self._news.notify_all()
            self.engine.interrupt()


def _impossible(p: Progress) -> str | None:
    """What is wrong with it, if it is nothing that a model can have made."""
    if len(p.tokens) != len(p.logprobs):
        return f"{len(p.tokens)} tokens with {len(p.logprobs)} log-probs"
    if not np.isfinite(p.logprobs).all():
        return "a log-prob is not finite"
    return f"token {p.tokens.min()}" if len(p.tokens) and p.tokens.min() < 0 else None
