"""What the manager wants done. Plain data, carried in replies, each with the reason why."""

from __future__ import annotations

from dataclasses import dataclass

from laminar.types import SampleId, Version

# ---------------------------------------------------------------- to a replica


@dataclass(frozen=True, slots=True)
class Pull:
    """Load this version from the relay of your machine, once you hold nothing."""

    replica: str
    incarnation: int
    version: Version
    reason: str
    interrupt: bool = False
    """Do not wait until you are empty: go on with what you hold under the new version (schedule `partial`)."""


# ---------------------------------------------------------------- to the data store


@dataclass(frozen=True, slots=True)
class Issue:
    """Give the replica up to `num_groups` new groups: an upper bound, the data store asks the rule again."""

    replica: str
    incarnation: int
    version: Version
    num_groups: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Begin these orphans anew at the replica."""

    replica: str
    incarnation: int
    version: Version
    samples: tuple[SampleId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """Let the replica go on with these orphans, from their stored tokens."""

    replica: str
    incarnation: int
    version: Version
    samples: tuple[SampleId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """Take everything unfinished from the source, which flushes first, and give it to the destination."""

    source: str
    source_incarnation: int
    destination: str
    destination_incarnation: int
    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class CancelMove:
    """What the source has not released yet stays with it."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Orphan:
    """This incarnation of the replica is dead: nobody owns its work, and whatever it still says is refused."""

    replica: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUpEval:
    """The evaluation of this version can't be finished: nobody holds its weights any more."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUpCut:
    """The trainer has died twice on this batch: drop its groups and cut it again."""

    update: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoteDeaths:
    """For the metrics: how often processes of each role have died since the run was last started, all of it."""

    deaths: tuple[tuple[str, int], ...]
    """(role, number), sorted"""


@dataclass(frozen=True, slots=True)
class Complete:
    """The run is over as planned: account for what is left."""

    reason: str


# ---------------------------------------------------------------- to a relay


@dataclass(frozen=True, slots=True)
class Keep:
    """The whole set of versions worth keeping beside the newest."""

    relay: str
    versions: tuple[Version, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Links:
    """Who feeds the relay and whom it feeds, absolute; words of a lower chain epoch are refused."""

    relay: str
    upstream: str | None
    downstream: str | None
    epoch: int


# ---------------------------------------------------------------- to anybody


@dataclass(frozen=True, slots=True)
class Stop:
    """Return from `run`. To one process of a role, or (id "*") all of it."""

    role: str
    id: str
    reason: str


# ---------------------------------------------------------------- to the driver


@dataclass(frozen=True, slots=True)
class Replace:
    """Make sure that this incarnation is gone, then start the next one."""

    role: str
    id: str
    incarnation: int
    """of the new process"""
    reason: str


@dataclass(frozen=True, slots=True)
class Remove:
    """This process has nothing left to do and is not wanted any more."""

    role: str
    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """`outcome`: `completed`, `failed` or `interrupted`; `message` is for the user."""

    outcome: str
    message: str


Command = (
    Pull
    | Issue
    | Restart
    | Adopt
    | Move
    | CancelMove
    | Orphan
    | GiveUpEval
    | GiveUpCut
    | NoteDeaths
    | Complete
    | Keep
    | Links
    | Replace
    | Remove
    | Stop
    | EndRun
)


@dataclass(frozen=True, slots=True)
class Numbered:
    """A command on its way. Repeated in every reply until a request acknowledges `number`."""

    term: int
    """of the manager"""
    number: int
    command: Command


def address(command: Command) -> tuple[str, str]:
    """(role, id) of the process that a command is for."""
    match command:
        case Pull():
            return "replica", command.replica
        case Issue() | Restart() | Adopt() | Move() | CancelMove() | Orphan():
            return "datastore", "datastore"
        case GiveUpEval() | GiveUpCut() | NoteDeaths() | Complete():
            return "datastore", "datastore"
        case Keep() | Links():
            return "relay", command.relay
        case Stop():
            return command.role, command.id
        case Replace() | Remove() | EndRun():
            return "driver", "driver"
