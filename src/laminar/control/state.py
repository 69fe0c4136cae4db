"""What the manager believes: ids, counts and versions, changed by events alone.

The data store owns the truth about samples; this is a view of it, as old as the last outbox event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from laminar.control import ledger, staleness
from laminar.control.chain import Chain, Link
from laminar.control.events import (
    Adopted,
    Buffered,
    Completed,
    CutGivenUp,
    CutMade,
    CutTrained,
    Dropped,
    EvalDone,
    Exhausted,
    Fatal,
    Finished,
    Issued,
    MoveEnded,
    Orphaned,
    ProcessSeen,
    Recovered,
    RelayBeat,
    ReplicaBeat,
    StoreEvent,
    TrainerBeat,
)
from laminar.types import Load, SampleId, Settings, Version

EPOCHS_A_TERM = 2**20
"""The chain of a new manager begins above all epochs of the last one."""


@dataclass(slots=True)
class Process:
    """Liveness of one process; times are the manager's."""

    role: str
    id: str
    incarnation: int
    state: str = "starting"
    heard: float = 0.0
    """When its last beat came."""
    moved: float = 0.0
    """When its step counter last changed, or it last had nothing to do."""
    step: int = 0
    loading: bool = False
    """It has said that it loads what it can't begin without: it may be silent for as long as a start takes."""

    @property
    def name(self) -> str:
        """For the user: an id mostly says its role."""
        return self.id if self.id.startswith(self.role) else f"{self.role} {self.id}"


@dataclass(slots=True)
class Replica:
    id: str
    incarnation: int
    activity: str = "starting"
    version: Version | None = None
    node: str = ""
    load: Load = field(default_factory=Load)
    unfinished: dict[SampleId, None] = field(default_factory=dict)
    """Samples issued to it and not finished, in the order of issue."""
    granted: int = 0
    """Groups the data store has been asked to issue to it and has not answered for."""
    pulling: Version | None = None
    failed_pulls: int = 0
    moving_to: str | None = None
    """It has been told to let go of its work: no grant and no pull until the move has ended."""
    receives: dict[str, None] = field(default_factory=dict)
    """Sources whose work it is to adopt: it keeps its version until those moves have ended."""
    move_began: float = 0.0
    draining: bool = False
    """It is to be removed: nothing new is given to it."""
    heard: bool = False
    """It has told this manager what it has; before, only its work is known, from the data store."""

    @property
    def bound(self) -> bool:
        """Part of a move that has not ended."""
        return self.moving_to is not None or bool(self.receives)

    def move(self, event: str) -> None:
        self.activity = ledger.step(ledger.REPLICA, self.activity, event, self.id)


@dataclass(frozen=True, slots=True)
class Orphan:
    """An unfinished sample that nobody owns."""

    version: Version
    deadline: int | None
    since: float


@dataclass(slots=True)
class Estate:
    """What a replica that is gone had in its hands."""

    since: float
    waiting: int = 0
    """Samples that nobody has gone on with yet."""
    heirs: dict[str, int] = field(default_factory=dict)
    """Who has gone on with how many."""
    anew: int = 0
    """Of these, begun anew from the prompt."""


@dataclass(slots=True)
class Relay:
    id: str
    incarnation: int
    node: str
    whole: tuple[Version, ...] = ()
    keep: tuple[Version, ...] = ()
    """What it was last told to keep."""


@dataclass(slots=True)
class Evaluation:
    issued: int = 0
    """Groups given out."""
    granted: dict[str, int] = field(default_factory=dict)
    """Groups that the data store has been asked to give to a replica."""
    done: bool = False


class State:
    """The manager's view of a run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.processes: dict[tuple[str, str], Process] = {}
        self.replicas: dict[str, Replica] = {}
        """By id, in order."""
        self.relays: dict[str, Relay] = {}
        self._newest: dict[str, Version | None] = {}
        """Newest version whole on each machine."""
        self.trainer = TrainerBeat(0, None, 0, "starting")
        self.live: dict[int, str] = {}
        """Training groups issued, not dropped, not cut: group -> `issued` or `buffered`."""
        self.owners: dict[SampleId, str] = {}
        self.orphans: dict[SampleId, Orphan] = {}
        self.deaths: dict[tuple[str, str], list[int]] = {}
        """Deaths of each process so far: at each, the lowest batch that was not trained."""
        self.died_at: dict[tuple[str, str], float] = {}
        """Processes that have died and are not back."""
        self.estates: dict[str, Estate] = {}
        """By replica that is gone, until all that it held goes on."""
        self.left_by: dict[SampleId, str] = {}
        """Samples of those estates that nobody has gone on with."""
        self.unwanted: dict[str, float] = {}
        """Replicas that are to be removed, or have been, and since when."""
        self.chain = Chain()
        self.links: dict[str, Link] = {}
        """What each relay was last told of its neighbours."""
        self.cut_groups = 0
        self.update = 0
        self.trained = 0
        self.exhausted = False
        self.completed = False
        self.evaluations: dict[Version, Evaluation] = {}
        self.fatal: str | None = None
        self.now = 0.0
        """Time of the event that is being handled."""
        self.notes: list[str] = []
        """Lines for the user that have not been taken."""
        self.num_moves = 0
        self.progress_at = 0.0
        """When something last finished."""
        self.outbox = 0
        """Number of the last store event seen."""

    # ------------------------------------------------------------ views

    @property
    def granted(self) -> int:
        return sum(r.granted for r in self.replicas.values())

    def alive(self) -> list[Replica]:
        """Replicas that may be given work, by id."""
        return [
            r
            for i, r in self.replicas.items()
            if r.version is not None and self.processes["replica", i].state == "alive"
        ]

    @property
    def num_replicas(self) -> int:
        """Replicas that can be given work now or soon: those that start or load their first weights included."""
        return sum(p.role == "replica" and p.state in ("starting", "alive") for p in self.processes.values())

    @property
    def all_heard(self) -> bool:
        """Every replica and relay that may be there has spoken: what none of them has, nobody has."""
        return not any(p.state == "suspect" and p.role in ("replica", "relay") for p in self.processes.values())

    def room(self, version: Version) -> int:
        """Training groups that may be granted under `version`, by this view."""
        places = staleness.room(self.settings, version.number, len(self.live), self.cut_groups)
        return 0 if self.exhausted or not places else max(0, places - self.granted)

    def newest(self, replica: Replica) -> Version | None:
        """Newest version whole on the replica's machine."""
        return self._newest.get(replica.node)

    def has_version(self, node: str, version: Version) -> bool:
        return any(version in r.whole for r in self.relays.values() if r.node == node)

    @property
    def num_unfinished(self) -> int:
        return sum(len(r.unfinished) for r in self.replicas.values()) + len(self.orphans)

    def waiting(self) -> list[Replica]:
        """Replicas with nothing to do that may be given something, those without weights included; by id."""
        return [
            r
            for i, r in self.replicas.items()
            if r.activity in ("idle", "starting")
            and not r.bound
            and not r.draining
            and self.processes["replica", i].state == "alive"
        ]

    def staying(self) -> list[str]:
        """Replicas that nobody wants to leave and that have not been given up, by number; dead ones come back."""
        there = [
            id_
            for (role, id_), p in self.processes.items()
            if role == "replica" and p.state not in ("stopped", "given up") and id_ not in self.unwanted
        ]
        return sorted(there, key=lambda id_: (replica_number(id_), id_))

    # ------------------------------------------------------------ beats

    def heard(self, now: float, role: str, id_: str, incarnation: int) -> Process | None:
        """Note a sign of life. None if it comes from an incarnation that is no longer the current one."""
        process = self.processes.get((role, id_))
        if process is None or incarnation > process.incarnation:
            process = self.processes[role, id_] = Process(role, id_, incarnation, heard=now, moved=now)
        if incarnation < process.incarnation or process.state in ledger.ENDED:
            return None
        process.state = ledger.step(ledger.PROCESS, process.state, "beat", f"{role} {id_}")
        process.heard = now
        return process

    def back(self, role: str, id_: str) -> None:
        """A process that had died can do its work again."""
        if (died := self.died_at.pop((role, id_), None)) is not None:
            self.notes.append(f"{self.processes[role, id_].name} is back after {self.now - died:.1f} s")

    def replica_beat(self, now: float, beat: ReplicaBeat) -> None:
        process = self.heard(now, "replica", beat.replica, beat.incarnation)
        if process is None:
            return
        replica = self.replicas.get(beat.replica)
        if replica is None or replica.incarnation < beat.incarnation:
            replica = self.replicas[beat.replica] = Replica(beat.replica, beat.incarnation)
            replica.draining = beat.replica in self.unwanted
            self.replicas = dict(sorted(self.replicas.items()))
        first, replica.heard = not replica.heard, True
        if first:
            replica.failed_pulls = beat.failed_pulls
        if beat.step != process.step or not replica.unfinished or beat.state != "generating":
            process.step, process.moved = beat.step, now
        process.loading = beat.state == "loading" and beat.version is None
        if beat.version is not None:
            self.back("replica", beat.replica)
        replica.node, replica.load = beat.node, beat.load
        if beat.version is not None and beat.version != replica.version:
            replica.version = beat.version
            if replica.activity in ("starting", "pulling", "idle"):
                replica.move("resumed" if replica.unfinished else "loaded")
            replica.pulling = None
            self.progress_at = now
        if first and beat.pulling is not None:
            replica.pulling = beat.pulling
            replica.move("pull")
        if beat.failed_pulls > replica.failed_pulls:
            replica.failed_pulls, replica.version = beat.failed_pulls, beat.version
            if replica.pulling is not None:
                replica.pulling = None
                replica.move("failed")
                if replica.version is not None:  # it keeps what it had
                    replica.move("loaded")
                if replica.unfinished:
                    replica.move("work")

    def relay_beat(self, now: float, beat: RelayBeat) -> None:
        if self.heard(now, "relay", beat.relay, beat.incarnation) is None:
            return
        relay = self.relays.get(beat.relay)
        is_new = relay is None or relay.incarnation < beat.incarnation
        if relay is None or is_new:
            relay = self.relays[beat.relay] = Relay(beat.relay, beat.incarnation, beat.node)
            self.back("relay", beat.relay)
        if is_new or beat.whole != relay.whole:
            relay.whole = beat.whole
            shown = [v for r in self.relays.values() if r.node == beat.node for v in r.whole]
            self._newest[beat.node] = max(shown, default=None)

    def trainer_beat(self, now: float, beat: TrainerBeat) -> None:
        process = self.heard(now, "trainer", "trainer", beat.incarnation)
        if process is None:
            return
        process.loading = beat.state == "starting"
        if not process.loading:
            self.back("trainer", "trainer")
        if (beat.version, beat.state) != (self.trainer.version, self.trainer.state):
            self.progress_at = now
        self.trainer = beat

    # ------------------------------------------------------------ store

    def store_event(self, now: float, event: StoreEvent) -> None:
        match event:
            case Issued():
                self._issued(event)
            case Adopted():
                self._inherited(event.samples, event.replica)
                self._left(event.samples)
                self._arrived(event.replica, event.incarnation, event.samples)
                if event.replica in self.replicas:
                    self.replicas[event.replica].receives.pop("orphans", None)
            case MoveEnded():
                self._move_ended(event.source, event.destination)
            case Finished():
                self._left(event.samples)
            case Buffered():
                self.live.update(dict.fromkeys(event.groups, "buffered"))
            case CutMade():
                for group in event.groups:
                    self.live.pop(group, None)
                self.cut_groups += len(event.groups)
                self.update = max(self.update, event.update + int(event.last))
            case CutGivenUp():
                self.cut_groups -= event.num_groups
            case CutTrained():
                self.trained = max(self.trained, event.update + 1)
            case Dropped():
                for group in event.groups:
                    self.live.pop(group, None)
                self._inherited(event.samples, None)
                self._left(event.samples)
            case Orphaned():
                self._bequeathed(event.samples)
                self._left(event.samples)
                self.orphans.update(dict.fromkeys(event.samples, Orphan(event.version, event.deadline, now)))
            case EvalDone():
                self.evaluations.setdefault(event.version, Evaluation()).done = True
            case Exhausted():
                self.exhausted = True
            case Completed():
                self.completed = True
            case Fatal():
                self.fatal = event.message
        if not isinstance(event, Issued):
            self.progress_at = now

    def _issued(self, event: Issued) -> None:
        if event.kind == "eval":
            evaluation = self.evaluations.setdefault(event.version, Evaluation())
            evaluation.issued += len(event.groups)
            evaluation.granted.pop(event.replica, None)
        else:
            self.live.update(dict.fromkeys(event.groups, "issued"))
        for sample in event.samples:
            self.orphans.pop(sample, None)
        if event.restarted:
            self._inherited(event.samples, event.replica, anew=True)
        self._arrived(event.replica, event.incarnation, event.samples)
        replica = self.replicas.get(event.replica)
        if replica is not None and replica.incarnation == event.incarnation:
            replica.granted = 0
            if replica.activity == "granted":
                replica.move("work" if replica.unfinished else "nothing")

    def _arrived(self, replica_id: str, incarnation: int, samples: tuple[SampleId, ...]) -> None:
        """These samples are with this replica now. If it is dead, the data store says next that they are not."""
        for sample in samples:
            self.orphans.pop(sample, None)
        replica = self.replicas.get(replica_id)
        if replica is None or replica.incarnation != incarnation:
            return
        replica.unfinished.update(dict.fromkeys(samples))
        self.owners.update(dict.fromkeys(samples, replica_id))
        if replica.unfinished and replica.activity in ("idle", "generating"):
            replica.move("work")

    def _bequeathed(self, samples: tuple[SampleId, ...]) -> None:
        """These samples have lost their owner."""
        for sample in samples:
            owner = self.owners.get(sample)
            if owner is not None and owner in self.estates:
                self.left_by[sample] = owner
                self.estates[owner].waiting += 1

    def _inherited(self, samples: tuple[SampleId, ...], heir: str | None, anew: bool = False) -> None:
        """Somebody goes on with these, or they are dropped (None). Says so when the estate is settled."""
        for sample in samples:
            owner = self.left_by.pop(sample, None)
            if owner is None:
                continue
            estate = self.estates[owner]
            estate.waiting -= 1
            if heir is not None:
                estate.heirs[heir] = estate.heirs.get(heir, 0) + 1
                estate.anew += anew
            if not estate.waiting:
                del self.estates[owner]
                if estate.heirs:
                    self.notes.append(_succession(owner, estate, self.now))

    def _move_ended(self, source: str, destination: str) -> None:
        if source in self.replicas:
            self.replicas[source].moving_to = None
        if destination in self.replicas:
            self.replicas[destination].receives.pop(source, None)

    def _left(self, samples: tuple[SampleId, ...]) -> None:
        """These samples are with no replica any more."""
        for sample in samples:
            self.orphans.pop(sample, None)
            owner = self.owners.pop(sample, None)
            replica = self.replicas.get(owner) if owner is not None else None
            if replica is None:
                continue
            replica.unfinished.pop(sample, None)
            if not replica.unfinished and replica.activity == "generating":
                replica.move("empty")

    # ------------------------------------------------------------ terms

    def recover(self, now: float, event: Recovered) -> None:
        """Begin a term. Who was alive is suspect until it speaks: that has its limit, and nothing is given to it."""
        self.live = {group: "buffered" if state == "buffered" else "issued" for group, state in event.live}
        self.cut_groups, self.update, self.trained = event.cut_groups, event.update, event.trained
        self.orphans = {sample: Orphan(version, deadline, now) for sample, version, deadline in event.orphans}
        self.exhausted, self.outbox = event.exhausted, event.outbox
        self.evaluations = {version: Evaluation(issued) for version, issued in event.evals_open}
        self.evaluations.update((version, Evaluation(done=True)) for version in event.evals_done)
        self.chain = Chain(event.term * EPOCHS_A_TERM)
        self.take_over(now, event.processes)
        for replica_id, incarnation, samples in event.owned:
            replica = self.replicas[replica_id] = Replica(replica_id, incarnation)
            replica.draining = replica_id in self.unwanted
            replica.unfinished = dict.fromkeys(samples)
            self.owners.update(dict.fromkeys(samples, replica_id))
        self.replicas = dict(sorted(self.replicas.items()))
        self.progress_at = now

    def take_over(self, now: float, processes: Iterable[ProcessSeen]) -> None:
        for p in processes:
            state = "suspect" if p.state == "alive" else p.state
            self.processes[p.role, p.id] = Process(p.role, p.id, p.incarnation, state, heard=now, moved=now)
            if p.deaths:
                self.deaths[p.role, p.id] = list(p.deaths)
            if p.unwanted:
                self.unwanted[p.id] = now
        trainer = self.processes.get(("trainer", "trainer"))
        if trainer is not None and trainer.state == "stopped":
            self.trainer_ended()

    def trainer_ended(self) -> None:
        """It has returned in order: all batches are trained, whether or not it was heard to say so."""
        if self.trainer.state != "done":
            self.trainer = replace(self.trainer, version=None, state="done")

    def seen(self) -> tuple[ProcessSeen, ...]:
        """What the next manager has to know of the processes."""
        return tuple(
            ProcessSeen(
                role, id_, p.incarnation, p.state, tuple(self.deaths.get((role, id_), ())), id_ in self.unwanted
            )
            for (role, id_), p in sorted(self.processes.items())
        )


def replica_number(replica_id: str) -> int:
    """10 of `replica-10`, which comes after replica-9; -1 if there is none."""
    number = replica_id.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def _succession(replica_id: str, estate: Estate, now: float) -> str:
    """For the user: who goes on with what a replica held, and how long that took."""
    total = sum(estate.heirs.values())
    by = ", ".join(f"{count} by {heir}" for heir, count in sorted(estate.heirs.items()))
    anew = f", {estate.anew} of them from the prompt" if estate.anew else ""
    return f"the {total} unfinished samples of {replica_id} are taken over after {now - estate.since:.1f} s: {by}{anew}"
