"""The manager: one event in, commands out. It composes; each decision lives in its own module.

`handle` is a function of the settings and the events so far, with time as an argument: the event log, fed to a fresh
manager, gives the same commands (`replay`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from laminar.control import chain, failover, ledger, liveness, moves, schedule
from laminar.control.commands import Command, Complete, EndRun, Keep, Links, NoteDeaths, Stop
from laminar.control.events import (
    Beat,
    DrainRequested,
    Event,
    ProcessEnded,
    ProcessStarted,
    Recovered,
    RelayBeat,
    ReplicaBeat,
    ScaleRequested,
    ScorerBeat,
    StopRequested,
    StoreBeat,
    StoreEvents,
    Tick,
    TrainerBeat,
    sender_of,
)
from laminar.control.state import Process, State
from laminar.types import Settings

STOP_ROLES = ("replica", "trainer", "relay", "datastore")
"""Who is told to stop by a command; the scorer hears it from the data store, the driver ends last."""


class Manager:
    """Decides everything, holds no tokens and no weights."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = State(settings)
        self.schedule = schedule.make(settings)
        self.ended: EndRun | None = None
        self.interrupted: str | None = None
        self.completing = False
        self.last_tick = 0.0
        """When the manager was last there: a tick, or its beginning."""
        self.last_repack = 0.0
        self.repack_due = False
        self.deaths_told: tuple[tuple[str, int], ...] = ()

    def handle(self, now: float, event: Event) -> list[Command]:
        """Take in one event at run time `now` (seconds, never decreasing) and say what follows from it."""
        self.state.now = now
        commands = list(self._apply(now, event))
        if self.ended is not None:
            return []
        if isinstance(event, Tick):
            commands += self._judge(now)
        commands += self._end_if_over()
        if self.ended is not None or self.completing:
            return commands
        commands += self._note_deaths()
        commands += failover.adopt_orphans(self.state)
        commands += self.schedule.plan(self.state)
        commands += self._move(now)
        commands += self._keep()
        if isinstance(event, RelayBeat | ProcessEnded | Tick):
            commands += self._link()
        return commands

    def take_notes(self) -> list[str]:
        """Lines for the user since the last call: who is suspect, who died and who took over, what was refused."""
        notes, self.state.notes = self.state.notes, []
        return notes

    # ------------------------------------------------------------ taking in

    def _apply(self, now: float, event: Event) -> Iterator[Command]:
        state = self.state
        match event:
            case ReplicaBeat() | RelayBeat() | TrainerBeat() | StoreBeat() | ScorerBeat():
                yield from self._beat(now, event)
            case Tick():
                lost = liveness.lost_time(now - self.last_tick)
                liveness.forgive(now, state.processes.values(), lost)
                state.progress_at = min(now, state.progress_at + lost)
                self.last_tick = now
                for beat in event.beats:
                    yield from self._beat(now, beat)
            case StoreEvents():
                # rows are numbered without gaps; a resend may begin with rows that have been seen
                unseen = max(0, event.last - state.outbox)
                for store_event in event.events[-unseen:] if unseen else ():
                    state.store_event(now, store_event)
                state.outbox = max(state.outbox, event.last)
            case Recovered():
                state.recover(now, event)
                self.last_tick = now
                yield from failover.orphan_unknown(state, event)
            case ProcessStarted():
                known = state.processes.get((event.role, event.id))
                if known is None or known.incarnation < event.incarnation:
                    process = Process(event.role, event.id, event.incarnation, heard=now, moved=now)
                    state.processes[event.role, event.id] = process
            case ProcessEnded():
                yield from self._process_ended(event)
            case DrainRequested():
                moves.ask_to_leave(state, event.replica)
            case ScaleRequested():
                yield from moves.scale(state, event.replicas)
            case StopRequested():
                self.interrupted = self.interrupted or event.reason

    def _beat(self, now: float, beat: Beat) -> Iterator[Command]:
        match beat:
            case ReplicaBeat():
                self.state.replica_beat(now, beat)
                if beat.leaving:
                    yield from moves.leave(self.state, beat.replica)
            case StoreBeat() | ScorerBeat():
                role, id_ = sender_of(beat)
                if self.state.heard(now, role, id_, beat.incarnation) is not None:
                    self.state.back(role, id_)
            case RelayBeat():
                self.state.relay_beat(now, beat)
                self.state.notes += beat.problems
                for version in beat.whole:
                    schedule.note_published(self.state, version, final=False)
            case TrainerBeat():
                self.repack_due = self.repack_due or beat.version != self.state.trainer.version
                self.state.trainer_beat(now, beat)
                if beat.version is not None:
                    schedule.note_published(self.state, beat.version, final=beat.state == "done")

    def _process_ended(self, event: ProcessEnded) -> Iterator[Command]:
        process = self.state.processes.get((event.role, event.id))
        if process is None or process.incarnation != event.incarnation or process.state in ledger.ENDED:
            return
        if event.cause is not None:
            yield from failover.died(self.state, process, event.cause, event.is_final)
            return
        process.state = ledger.step(ledger.PROCESS, process.state, "stop", process.name)
        if event.role == "trainer":
            self.state.trainer_ended()
        else:
            self.state.fatal = self.state.fatal or f"{process.name} ended before the run did"

    # ------------------------------------------------------------ the end

    def _judge(self, now: float) -> Iterator[Command]:
        """Who is silent, and whether the run goes on at all. Only in a tick: it knows how long the manager was away."""
        state = self.state
        for verdict in liveness.judge(now, state.processes.values(), self.settings):
            line = f"{verdict.process.name} is {verdict.state}: {verdict.reason}"
            state.notes.append(line)
            if verdict.state == "dead":
                yield from failover.died(state, verdict.process, verdict.reason)
        stalled_s = now - state.progress_at
        if state.trainer.state != "starting" and stalled_s > self.settings.stall_timeout_s:
            waits = "\n".join(f"  {line}" for line in waiting_for(state))
            state.fatal = state.fatal or f"nothing has finished for {stalled_s:.0f} s:\n{waits}"

    def _end_if_over(self) -> Iterator[Command]:
        state = self.state
        if self.interrupted is not None:
            yield from self._finish("interrupted", self.interrupted)
        elif state.fatal is not None:
            yield from self._finish("failed", state.fatal)
        elif state.completed:
            yield from self._finish("completed", "all batches are trained")
        elif state.trainer.state == "done" and not self.completing:
            schedule.note_final(state)
            if schedule.all_evaluated(state):
                self.completing = True
                yield Complete("all batches are trained")

    def _finish(self, outcome: str, message: str) -> Iterator[Command]:
        self.ended = EndRun(outcome, message)
        yield self.ended
        for role in STOP_ROLES:
            yield Stop(role, "*", message)

    # ------------------------------------------------------------ moves

    def _move(self, now: float) -> Iterator[Command]:
        """Drain and repack: at every look (`repack_interval_s`) and when a version is published."""
        state, settings = self.state, self.settings
        yield from moves.drain(state)
        yield from moves.cancel_late(state)
        if not settings.repack or settings.schedule != "laminar":
            return
        if self.repack_due or now - self.last_repack >= settings.repack_interval_s:
            self.last_repack, self.repack_due = now, False
            yield from moves.repack(state)

    # ------------------------------------------------------------ relays

    def _link(self) -> Iterator[Command]:
        """Tell relays whose neighbours have changed. Those that are there are in the chain, the trainer's first."""
        state = self.state
        present = [
            i for i in sorted(state.relays) if state.processes["relay", i].state in ("starting", "alive", "suspect")
        ]
        for relay in [r for r in state.chain.order if r not in present and r != state.chain.master]:
            state.chain = chain.leave(state.chain, relay)
        for relay in [r for r in present if r not in state.chain.order]:
            state.chain = chain.join(state.chain, relay)
        if len(state.chain.order) < 2:
            return
        for link in chain.links(state.chain):
            known = state.links.get(link.relay)
            if known is None or (known.upstream, known.downstream) != (link.upstream, link.downstream):
                state.links[link.relay] = link
                yield Links(link.relay, link.upstream, link.downstream, link.epoch)

    def _note_deaths(self) -> Iterator[Command]:
        """Tell the data store how many have died, when that has changed; a new manager says it once more."""
        deaths = Counter[str]()
        for (role, _), batches in self.state.deaths.items():
            deaths[role] += len(batches)
        told = tuple(sorted(deaths.items()))
        if told != self.deaths_told:
            self.deaths_told = told
            yield NoteDeaths(told)

    def _keep(self) -> Iterator[Command]:
        """Old versions worth a slot: those that trajectories or evaluations still live under."""
        state = self.state
        versions = {r.version for r in state.replicas.values() if r.unfinished and r.version is not None}
        versions.update(o.version for o in state.orphans.values())
        versions.update(schedule.due_evaluations(state))
        keep = tuple(sorted(versions))
        for relay in sorted((r for r in state.relays.values() if r.keep != keep), key=lambda r: r.id):
            relay.keep = keep
            yield Keep(relay.id, keep, "trajectories or evaluations live under them")


def waiting_for(state: State) -> list[str]:
    """Who waits for whom, with ids, in words: what a stalled run has to say."""
    s = state.settings
    lines = [f"trainer: {state.trainer.state}; batch {state.update} needs {s.groups_per_batch} buffered groups"]
    unbuffered = sorted(g for g, word in state.live.items() if word != "buffered")
    lines.append(f"  {len(state.live) - len(unbuffered)} are buffered, these are not finished: {_some(unbuffered)}")
    if due := schedule.due_evaluations(state):
        lines.append(f"evaluations that are not done: of version {_some(due)}")
    for replica in sorted(state.replicas.values(), key=lambda r: r.id):
        text = f"replica {replica.id}: {replica.activity}, version {replica.version}"
        if replica.pulling is not None:
            text += f", pulling {replica.pulling}"
        if replica.unfinished:
            text += f", has {len(replica.unfinished)} unfinished: {_some([f'{g}/{i}' for g, i in replica.unfinished])}"
        elif replica.version is not None:
            text += f", room for {state.room(replica.version)} groups under its version"
        lines.append(text)
    if state.orphans:
        lines.append(f"without an owner: {_some([f'{g}/{i}' for g, i in sorted(state.orphans)])}")
    if not state.relays or not any(r.whole for r in state.relays.values()):
        lines.append("no relay has whole weights yet")
    return lines


def _some(ids: Iterable[object], most: int = 12) -> str:
    ids = list(ids)
    text = ", ".join(str(i) for i in ids[:most]) or "none"
    return text if len(ids) <= most else f"{text} and {len(ids) - most} more"


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the event log."""

    now: float
    event: Event
    commands: tuple[Command, ...]


def is_news(last: Beat | None, beat: Beat) -> bool:
    """Whether a beat says more than "still here", so that it is handled at once instead of in the next tick."""
    match beat:
        case ReplicaBeat():
            return not isinstance(last, ReplicaBeat) or (
                (last.incarnation, last.version, last.failed_pulls, last.leaving)
                != (beat.incarnation, beat.version, beat.failed_pulls, beat.leaving)
            )
        case RelayBeat():
            return not isinstance(last, RelayBeat) or last.whole != beat.whole or bool(beat.problems)
        case TrainerBeat() | StoreBeat() | ScorerBeat():
            return last != beat


def replay(settings: Settings, records: Iterable[Record]) -> Iterator[tuple[Record, tuple[Command, ...]]]:
    """Feed recorded events to a fresh manager; yields each record whose commands differ, with what came out.

    A `Recovered` begins the term of the next manager.
    """
    manager = Manager(settings)
    for record in records:
        if isinstance(record.event, Recovered):
            manager = Manager(settings)
        commands = tuple(manager.handle(record.now, record.event))
        if commands != record.commands:
            yield record, commands
