"""What can happen, as the manager is told it. Plain data; the event log holds these as JSON.

Processes speak through beats (`ReplicaBeat`, `RelayBeat`, `TrainerBeat`); the data store through `StoreEvent`s,
which are numbered rows of its outbox; the driver through the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.types import Load, SampleId, Version

# ---------------------------------------------------------------- beats


@dataclass(frozen=True, slots=True)
class ReplicaBeat:
    """`version` is the only statement "I hold v"."""

    replica: str
    incarnation: int
    state: str
    """`idle`, `generating`, `loading`, `reporting` (what it holds has ended, and the data store is to be told)"""
    version: Version | None
    step: int
    """Grows while the engine moves: a beat without progress is not a sign of life."""
    load: Load = field(default_factory=Load)
    node: str = ""
    failed_pulls: int = 0
    pulling: Version | None = None
    """What it loads, or is going to."""
    leaving: bool = False
    """Its machine has asked it to end soon (SIGTERM)."""


@dataclass(frozen=True, slots=True)
class RelayBeat:
    relay: str
    incarnation: int
    node: str
    whole: tuple[Version, ...]
    """Versions held whole and verified, oldest first."""
    free_slots: int
    problems: tuple[str, ...] = ()
    """What went wrong since the last beat, for the user."""


@dataclass(frozen=True, slots=True)
class TrainerBeat:
    incarnation: int
    version: Version | None
    """Newest version written to slots."""
    checkpoint: int
    state: str
    """`starting`, `replaying`, `waiting`, `training`, `done`"""


@dataclass(frozen=True, slots=True)
class StoreBeat:
    """The data store has asked for commands."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class ScorerBeat:
    """A sign of life, and no more."""

    incarnation: int


Beat = ReplicaBeat | RelayBeat | TrainerBeat | StoreBeat | ScorerBeat


def sender_of(beat: Beat) -> tuple[str, str]:
    """(role, id)"""
    match beat:
        case ReplicaBeat():
            return "replica", beat.replica
        case RelayBeat():
            return "relay", beat.relay
        case StoreBeat():
            return "datastore", "datastore"
        case ScorerBeat():
            return "scorer", "scorer"
        case TrainerBeat():
            return "trainer", "trainer"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes. Carries the beats that came since the last tick and say nothing new but "still here"."""

    beats: tuple[Beat, ...] = ()


# ---------------------------------------------------------------- data store


@dataclass(frozen=True, slots=True)
class Issued:
    """A grant was used by these groups; by none if the rule left no room."""

    replica: str
    incarnation: int
    version: Version
    kind: str
    groups: tuple[int, ...]
    samples: tuple[SampleId, ...]
    restarted: bool
    """Orphans that begin anew; their groups were issued before."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """These unfinished samples have a new owner, which goes on from their stored tokens."""

    replica: str
    incarnation: int
    version: Version
    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """The source holds nothing of what it was to release."""

    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class Finished:
    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True)
class Buffered:
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CutMade:
    update: int
    part: int
    groups: tuple[int, ...]
    last: bool = True
    """The batch is complete with this part."""


@dataclass(frozen=True, slots=True)
class CutGivenUp:
    """The trainer failed on this cut for good: its groups are dropped, and the batch is cut again."""

    update: int
    num_groups: int


@dataclass(frozen=True, slots=True)
class CutTrained:
    update: int


@dataclass(frozen=True, slots=True)
class Dropped:
    samples: tuple[SampleId, ...]
    groups: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Orphaned:
    """Unfinished samples without an owner, last under `version`; `deadline` of their groups (None = none)."""

    samples: tuple[SampleId, ...]
    version: Version
    deadline: int | None = None


@dataclass(frozen=True, slots=True)
class EvalDone:
    version: Version


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The prompt pool has ended."""


@dataclass(frozen=True, slots=True)
class Completed:
    """What was left when all was trained is accounted for."""


@dataclass(frozen=True, slots=True)
class Fatal:
    """A failure that the user's policy says must stop the run."""

    message: str


StoreEvent = (
    Issued
    | Adopted
    | MoveEnded
    | Finished
    | Buffered
    | CutMade
    | CutGivenUp
    | CutTrained
    | Dropped
    | Orphaned
    | EvalDone
    | Exhausted
    | Completed
    | Fatal
)


@dataclass(frozen=True, slots=True)
class StoreEvents:
    """Outbox rows up to number `last`, in order."""

    last: int
    events: tuple[StoreEvent, ...]


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """What a manager has told the driver of a process, which passes it on to the next one."""

    role: str
    id: str
    incarnation: int
    state: str
    deaths: tuple[int, ...] = ()
    """A batch a death: the lowest that was not trained then."""
    unwanted: bool = False
    """It is to be removed, or has been."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A manager begins its term: the data store's counts at this moment, and what the driver knows.

    What a replica or a relay has, it says in its first beat.
    """

    term: int
    live: tuple[tuple[int, str], ...] = ()
    """(group, state) of training groups that are live"""
    cut_groups: int = 0
    update: int = 0
    trained: int = 0
    """Lowest batch not trained."""
    orphans: tuple[tuple[SampleId, Version, int | None], ...] = ()
    """(sample, version, deadline of its group)"""
    exhausted: bool = False
    evals_done: tuple[Version, ...] = ()
    outbox: int = 0
    owned: tuple[tuple[str, int, tuple[SampleId, ...]], ...] = ()
    """(replica, incarnation, unfinished samples that it owns)"""
    evals_open: tuple[tuple[Version, int], ...] = ()
    """(version, groups issued) of evaluations that have begun"""
    processes: tuple[ProcessSeen, ...] = ()
    """Those that the manager takes over, if there was one before it; empty when everything has been started anew."""


# ---------------------------------------------------------------- driver


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    role: str
    id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The operating system's word. `cause` None: it returned by itself, or left as it was asked to."""

    role: str
    id: str
    incarnation: int
    cause: str | None
    is_final: bool = False
    """Another start would end in the same way: what is wrong is the user's to mend."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    reason: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Empty this replica, by moving its work if that is possible, and remove it."""

    replica: str


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """The number of replicas that are wanted."""

    replicas: int


DriverEvent = ProcessStarted | ProcessEnded | StopRequested | DrainRequested | ScaleRequested
Event = Beat | Tick | StoreEvents | Recovered | DriverEvent
