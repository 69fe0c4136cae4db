"""A replica: a fluid decoder, and what it tells the data store and the manager."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laminar.control.commands import Command, Pull, Stop
from laminar.control.events import ReplicaBeat
from laminar.decoding import FluidDecoder
from laminar.errors import ProtocolError
from laminar.sim.kernel import Action, Kernel, Timer
from laminar.sim.links import Link
from laminar.sim.process import Client, Process
from laminar.timing import keyed_uniform
from laminar.types import Load, SampleId, Version

if TYPE_CHECKING:
    from laminar.sim.world import World

Owned = tuple[SampleId, int]
"""A sample and its owner epoch."""


@dataclass(frozen=True, slots=True)
class Work:
    """One trajectory to generate, or to go on with after `done` response tokens."""

    sample: SampleId
    epoch: int
    version: Version
    done: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one trajectory, from response offset `start`."""

    sample: SampleId
    epoch: int
    start: int
    length: int
    version: Version


@dataclass(slots=True)
class Report:
    """One exchange with the data store."""

    replica: str
    incarnation: int
    accepted: list[Owned] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)
    ended: list[Owned] = field(default_factory=list)
    failed: list[Owned] = field(default_factory=list)
    released: list[Owned] = field(default_factory=list)


@dataclass(slots=True)
class Held:
    work: Work
    length: int
    """Response tokens when it ends."""
    done: int
    """Response tokens when the decoder last took it."""
    reported: int
    """Response tokens that have been told to the data store."""
    ended: bool = False
    """Nothing more is made of it here; it is held until the data store has been told."""


class Replica(Process[ReplicaBeat], Client):
    """See the module."""

    role = "replica"

    def __init__(self, world: World, id_: str, incarnation: int, node: str) -> None:
        super().__init__(world, id_, incarnation)
        self.node = node
        self.version: Version | None = None
        self.decoder = FluidDecoder(world.plan.profile, world.plan.kv_tokens, world.plan.max_num_seqs)
        self.held: dict[SampleId, Held] = {}
        self.reprefilled_s = 0.0
        """Prefill of tokens that another replica had made."""
        delays = world.plan.delays
        self.from_store, self.to_store = world.link(delays.exchange_s), world.link(delays.exchange_s)
        self._pull: Pull | None = None
        self._loading: Version | None = None
        self._failed_pulls = self._step = 0
        self._timer: Timer | None = None
        self._next = Report(id_, incarnation)
        """What the next exchange will say."""
        self._exchanging = False
        self._news: list[Action] = []
        """What the data store's next answer will say."""
        self._answered_at = self.kernel.now
        self.decoder.advance(self.kernel.now)
        self.speak()
        if delays.stream_s is not None:
            self.after(delays.stream_s, self._stream)

    def kill(self) -> None:
        self._advance()
        super().kill()
        Kernel.cancel(self._timer)

    def inboxes(self) -> tuple[Link, ...]:
        return (*super().inboxes(), self.from_store)

    def links_with(self, peer: str) -> Sequence[Link]:
        return (self.from_store, self.to_store) if peer == "datastore" else super().links_with(peer)

    def stall(self, seconds: float) -> None:
        """Stop. The engine goes on later from where it is, which here costs it a prefill."""
        self._advance()
        for held in self._running():
            self._put_down(held)
        self._set_timer()
        super().stall(seconds)

    def _continue(self) -> None:
        if not self.alive or self.stopped or self._loading is not None:
            return
        self._advance()
        for held in self.held.values():
            if not held.ended and held.work.sample not in self.decoder:
                self._take_up(held)
        self._set_timer()

    # ------------------------------------------------------------ manager

    def beat(self) -> ReplicaBeat:
        self.look()
        d = self.decoder
        self._step += d.num_running > 0
        state = "loading" if self._loading is not None else "generating" if self._generates() else "idle"
        if state == "idle" and self.held:
            state = "reporting"
        load = Load(d.kv_used, d.kv_capacity, d.num_running, d.num_waiting)
        pulling = self._pull.version if self._pull is not None else self._loading
        return ReplicaBeat(
            self.id, self.incarnation, state, self.version, self._step, load, self.node, self._failed_pulls, pulling
        )

    def _generates(self) -> bool:
        return any(not held.ended for held in self.held.values())

    def obey(self, command: Command) -> None:
        match command:
            case Pull() if self.held:
                self.after(
                    self._until_next(self.world.plan.delays.command_s, self._spoke_at), lambda: self._told(command)
                )
            case Pull():
                self._told(command)
            case Stop():
                self.kill()
            case other:
                raise ProtocolError(f"{self.id} can't do {other}")

    def speak(self) -> None:
        self._spoke_at = self.kernel.now
        super().speak()

    def _until_next(self, interval_s: float, last: float) -> float:
        """Seconds to the next of the moments, so far apart, at which it asks what is new while it generates."""
        return interval_s - (self.kernel.now - last) % interval_s if interval_s else 0.0

    # ------------------------------------------------------------ weights

    def _told(self, pull: Pull) -> None:
        self._pull = pull
        self._load_if_free()

    def _load_if_free(self) -> None:
        """Begin to load what was pulled, once nothing is held, or (`interrupt`) at once."""
        pull = self._pull
        if pull is None or self._loading is not None or (self.held and not pull.interrupt):
            return
        self._pull, self._loading = None, pull.version
        for held in self._running():
            self._put_down(held)
        self.after(self.world.load_s, lambda: self._loaded(pull.version))

    def _loaded(self, version: Version) -> None:
        self._loading = None
        if version in self.world.relay_of(self.node).whole:
            self.version = version
        else:
            self._failed_pulls += 1
        self._advance()
        for held in self.held.values():
            if not held.ended:
                self._take_up(held)
        self._set_timer()
        self.speak()

    # ------------------------------------------------------------ work

    def receive(self, work: Sequence[Work]) -> None:
        """New work, once or more."""
        self._hear(lambda: self._receive(work))

    def release(self, samples: Collection[Owned]) -> None:
        """Flush these and let go of them: they go on elsewhere."""
        self._hear(lambda: self._release(samples))

    def forget(self, sample: SampleId, epoch: int) -> None:
        """The data store has dropped it, or given it to somebody else."""
        self._hear(lambda: self._forget(sample, epoch))

    def _hear(self, news: Action) -> None:
        """At once if it has nothing else to do, else with the answer to its next report."""
        self._news.append(news)
        if self.held:
            self.after(self._until_next(self.world.plan.delays.news_s, self._answered_at), self._take_news)
        else:
            self._take_news()

    def _take_news(self) -> None:
        news, self._news = self._news, []
        for item in news:
            item()

    def _receive(self, work: Sequence[Work]) -> None:
        if not self.alive:
            return
        self._advance()
        for item in work:
            held = self.held.get(item.sample)
            if held is not None and held.work.epoch >= item.epoch:
                continue
            if self.world.settings.schedule != "partial" and (
                item.version != self.version or self._loading is not None
            ):
                if self.world.store.has_given_up(item):
                    continue  # that is on its way here too
                raise ProtocolError(f"{self.id} holds {self.version} and was given {item}")
            if held is not None:
                self._drop(item.sample)
            held = self.held[item.sample] = Held(
                item, self.world.plan.response_length(*item.sample), item.done, item.done
            )
            self._next.accepted.append((item.sample, item.epoch))
            self.reprefilled_s += self.world.plan.profile.prefill_s(item.done)
            if self._loading is None:
                self._take_up(held)
        self._set_timer()
        self._exchange_if_due()

    def _release(self, samples: Collection[Owned]) -> None:
        if not self.alive:
            return
        self._advance()
        for sample, epoch in samples:
            held = self.held.get(sample)
            if held is not None and held.work.epoch == epoch and not held.ended:
                self._put_down(held)
                self._next.released.append((sample, epoch))
                held.ended = True
        self._after_loss()

    def _forget(self, sample: SampleId, epoch: int) -> None:
        held = self.held.get(sample)
        if self.alive and held is not None and held.work.epoch <= epoch:
            self._advance()
            self._drop(sample)
            self._after_loss()

    def _drop(self, sample: SampleId) -> None:
        if sample in self.decoder:
            self.decoder.remove(sample)
        del self.held[sample]

    def _take_up(self, held: Held) -> None:
        """Hand a trajectory to the decoder; one that has all its tokens ends at once."""
        if held.done < held.length:
            self.decoder.add(held.work.sample, self.world.plan.profile.prompt_tokens, held.done, held.length)
        else:
            self._end(held)

    def _put_down(self, held: Held) -> None:
        """Take it from the decoder, and flush what it has made."""
        sample = held.work.sample
        if sample in self.decoder:
            held.done = self.decoder.made(sample)
            self.decoder.remove(sample)
        self._flush(held, held.done)

    def _flush(self, held: Held, made: int) -> None:
        if made > held.reported:
            version = self.version or held.work.version
            tokens = Tokens(held.work.sample, held.work.epoch, held.reported, made - held.reported, version)
            self._next.tokens.append(tokens)
            held.reported = made

    def _end(self, held: Held) -> None:
        held.ended = True
        self._flush(held, held.length)
        plan, end = self.world.plan, (held.work.sample, held.work.epoch)
        rate = plan.chances.engine_error
        failed = rate > 0 and keyed_uniform("engine", plan.seed, *held.work.sample, held.work.epoch) < rate
        (self._next.failed if failed else self._next.ended).append(end)

    def _running(self) -> list[Held]:
        return [held for held in self.held.values() if held.work.sample in self.decoder]

    # ------------------------------------------------------------ time

    def _advance(self) -> None:
        """Bring the decoder to this moment."""
        for sample in self.decoder.advance(self.kernel.now):
            self._end(self.held[sample])

    def look(self) -> None:
        """Bring it to this moment, and report what has ended."""
        if self.alive:
            self._advance()
            self._exchange_if_due()
            self._set_timer()

    def _set_timer(self) -> None:
        """Look again when something has ended, and others had time to end too."""
        at = self.decoder.next_event()
        if at is not None and self.decoder.num_running > 1:
            at += self.world.plan.delays.coalesce_s
        if self._timer is not None and self._timer.action is not None:
            if self._timer.time == at:
                return
            Kernel.cancel(self._timer)
        self._timer = None if at is None else self.kernel.at(max(at, self.kernel.now), self.look)

    def _stream(self) -> None:
        """Every so often: what unfinished trajectories have made."""
        self._advance()
        for held in self._running():
            self._flush(held, self.decoder.made(held.work.sample))
        self._exchange_if_due()
        self._set_timer()
        self.after(self.world.plan.delays.stream_s or 0.0, self._stream)

    # ------------------------------------------------------------ exchange

    def _exchange_if_due(self) -> None:
        """Report what is new unless a report is on its way."""
        new = self._next
        if not self._exchanging and (new.tokens or new.ended or new.failed or new.released or new.accepted):
            self._next, self._exchanging = Report(self.id, self.incarnation), True
            self.ask(lambda: self._exchange(new))

    def _exchange(self, report: Report) -> None:
        """The report reaches the data store; its answer may get lost, and then it is sent again."""
        self.world.store.exchange(report)
        if self.to_store.lost():
            self.ask_again(lambda: self._exchange(report))
        else:
            self.when_running(lambda: self._answered(report))

    def _answered(self, report: Report) -> None:
        self._exchanging, self._answered_at = False, self.kernel.now
        for sample, epoch in (*report.ended, *report.failed, *report.released):
            held = self.held.get(sample)
            if held is not None and held.work.epoch == epoch:
                del self.held[sample]
        self._take_news()
        self._after_loss()

    def _after_loss(self) -> None:
        """Fewer trajectories are held than before."""
        self._exchange_if_due()
        self._set_timer()
        self._load_if_free()
