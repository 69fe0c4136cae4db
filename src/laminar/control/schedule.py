"""Schedules: when a replica pulls and when it is granted work. The staleness rule binds them all.

A schedule only chooses moments. It looks at the state and says what each replica should do now; it is asked after every
event and keeps nothing of its own, so that a new manager decides like the old one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from laminar.control import ledger
from laminar.control.commands import Command, GiveUpEval, Issue, Pull
from laminar.control.failover import restart_orphans
from laminar.control.state import Evaluation, Replica, State
from laminar.types import Settings, Version


class Schedule(Protocol):
    def plan(self, state: State) -> Iterator[Command]:
        """Commands for the replicas that can do something new. The state reflects each before the next is asked for."""


def make(settings: Settings) -> Schedule:
    schedules: dict[str, type[Laminar] | type[Waves] | type[Partial]] = {
        "laminar": Laminar,
        "partial": Partial,
        "sync": Waves,
        "one_step": Waves,
        "stream": Waves,
    }
    return schedules[settings.schedule]()


class Laminar:
    """Every replica for itself: a batch of whole groups, then the newest weights, then the next batch.

    With admission `fresh` a replica that holds the newest version takes new groups as others end.
    """

    def plan(self, state: State) -> Iterator[Command]:
        for replica in state.waiting():
            if command := _first_weights(state, replica) or _evaluate(state, replica) or _newer_weights(state, replica):
                yield command
            elif replica.version is not None:
                if command := restart_orphans(state, replica, state.settings.groups_in_flight):
                    yield command
                elif count := min(state.room(replica.version), state.settings.groups_in_flight):
                    yield _grant(replica, count, "idle, and the staleness rule has room")
        if state.settings.admission == "fresh":
            yield from _top_up(state)


class Partial:
    """Replicas are kept full, and interrupted by every new version: they go on with what they hold under it."""

    def plan(self, state: State) -> Iterator[Command]:
        for replica in state.waiting():
            if (
                command := _first_weights(state, replica) or _evaluate(state, replica) or _newer_weights(state, replica)
            ) or (command := restart_orphans(state, replica, state.settings.groups_in_flight)):
                yield command
            elif replica.version is not None and (
                count := min(state.room(replica.version), state.settings.groups_in_flight)
            ):
                yield _grant(replica, count, "idle, and the staleness rule has room")
        for replica in state.alive():
            newest = state.newest(replica)
            behind = newest is not None and replica.version is not None and newest > replica.version
            if replica.activity == "generating" and behind and not replica.bound and not _evaluates(state, replica):
                assert newest is not None
                yield _pull(replica, newest, "a newer version is here", interrupt=True)
        yield from _top_up(state)


class Waves:
    """All replicas generate one batch; the next wave opens when it is done and everybody holds the weights it needs.

    `sync` needs the newest weights (k = 0), `one_step` and `stream` those of the batch before (k = 1).
    Which wave is open follows from the number of groups that stand (live or cut): a multiple of B means that all
    waves so far are fully issued; anything else is a wave with places left, which refills join.
    """

    def plan(self, state: State) -> Iterator[Command]:
        settings, batch = state.settings, state.settings.groups_per_batch
        for replica in state.waiting():
            if command := _first_weights(state, replica):
                yield command
        standing = len(state.live) + state.granted + state.cut_groups
        alive = [r for r in state.alive() if not r.draining]
        issued = standing % batch == 0 or state.exhausted  # the last wave has no places left, whatever its size
        between = issued and not state.num_unfinished and not state.granted
        if between:
            for replica in state.waiting():
                if command := _evaluate(state, replica) or _newer_weights(state, replica):
                    yield command
        idle = [r for r in alive if r.activity == "idle" and not r.bound]
        for replica in idle:
            if command := restart_orphans(state, replica, -(-batch // max(1, len(alive)))):
                yield command
        if not alive or state.orphans:
            return
        if standing % batch == 0:
            wave = standing // batch
            oldest = wave - (settings.max_staleness or 0)
            ready = all(r.version is not None and r.version.number >= oldest for r in alive)
            still = [r for r in alive if r.activity == "idle" and not r.bound]
            if not between or len(still) < state.num_replicas or not ready:
                return
            yield from self._share(state, alive, batch, f"wave {wave} opens")
        else:
            order = sorted(alive, key=lambda r: (len(r.unfinished), r.id))
            free = [r for r in order if r.activity in ("idle", "generating") and not r.bound]
            # one that came late to the wave may hold weights that are too old for what is left of it
            able = [r for r in free if r.version is not None and state.room(r.version)]
            yield from self._share(state, able[:1], batch - standing % batch, "refill of the open wave")

    @staticmethod
    def _share(state: State, replicas: list[Replica], groups: int, reason: str) -> Iterator[Command]:
        for position, replica in enumerate(replicas):
            assert replica.version is not None
            share = groups // len(replicas) + (position < groups % len(replicas))
            if count := min(share, state.room(replica.version)):
                yield _grant(replica, count, reason)


def due_evaluations(state: State) -> list[Version]:
    """Versions whose evaluation is wanted, has been published, and is not done; oldest first."""
    return sorted(v for v, e in state.evaluations.items() if not e.done)


def note_published(state: State, version: Version, final: bool) -> None:
    """A version was published: remember it if it is to be evaluated."""
    s = state.settings
    if not s.eval_groups or version in state.evaluations:
        return
    periodic = s.eval_every is not None and version.number > 0 and version.number % s.eval_every == 0
    if periodic or (version.number == 0 and s.eval_before_train) or (final and s.eval_after_train):
        state.evaluations[version] = Evaluation()


def note_final(state: State) -> None:
    """All is trained: the last version is to be evaluated, if that is wanted."""
    if (version := _last_version(state)) is not None:
        note_published(state, version, final=True)


def all_evaluated(state: State) -> bool:
    """All is trained, no evaluation is due, and none will be."""
    wanted = state.settings.eval_groups and state.settings.eval_after_train
    return not due_evaluations(state) and (not wanted or _last_version(state) in state.evaluations)


def _last_version(state: State) -> Version | None:
    """The one after all batches. A manager that began when the trainer had ended learns it from the relays."""
    if state.trainer.version is not None:
        return state.trainer.version
    newest = max((v for relay in state.relays.values() for v in relay.whole), default=None)
    return newest if newest is not None and newest.number == state.trained else None


def _top_up(state: State) -> Iterator[Command]:
    """New groups for replicas that hold the newest version and have ended some of their old ones."""
    size, target = state.settings.group_size, state.settings.groups_in_flight
    for replica in state.alive():
        free = target - -(-len(replica.unfinished) // size)
        ready = replica.activity == "generating" and not replica.bound and not replica.draining
        if ready and free > 0 and replica.load.num_waiting == 0 and replica.version == state.newest(replica):
            assert replica.version is not None
            if not due_evaluations(state) and (count := min(free, state.room(replica.version))):
                yield _grant(replica, count, "it holds the newest version and has room")


def _evaluates(state: State, replica: Replica) -> bool:
    """Whether the replica may hold evaluation samples, which have one version."""
    return any(v == replica.version for v in due_evaluations(state))


def _pull(replica: Replica, version: Version, reason: str, interrupt: bool = False) -> Command:
    replica.move("pull")
    replica.pulling = version
    return Pull(replica.id, replica.incarnation, version, reason, interrupt)


def _first_weights(state: State, replica: Replica) -> Command | None:
    newest = state.newest(replica)
    if replica.version is None and newest is not None:
        return _pull(replica, newest, "first weights")
    return None


def _newer_weights(state: State, replica: Replica) -> Command | None:
    newest = state.newest(replica)
    if newest is not None and replica.version is not None and newest > replica.version:
        return _pull(replica, newest, "empty, and a newer version is here")
    return None


def _evaluate(state: State, replica: Replica) -> Command | None:
    """Rows of a due evaluation for a replica that holds its version, or the pull that makes it hold it."""
    for version in due_evaluations(state):
        evaluation = state.evaluations[version]
        left = state.settings.eval_groups - evaluation.issued - sum(evaluation.granted.values())
        if left <= 0:
            continue
        if replica.version == version:
            count = min(left, -(-state.settings.eval_groups // max(1, len(state.alive()))))
            evaluation.granted[replica.id] = count
            replica.move("grant")
            return Issue(replica.id, replica.incarnation, version, count, "eval", f"evaluation of version {version}")
        if state.has_version(replica.node, version):
            return _pull(replica, version, f"evaluation of version {version}")
        present = [r for i, r in state.replicas.items() if state.processes["replica", i].state not in ledger.ENDED]
        held = any(version in (r.version, r.pulling) for r in present) or not state.all_heard
        if not held and _passed(state, version):
            evaluation.done = True
            return GiveUpEval(version, "no relay and no replica holds it any more")
    return None


def _passed(state: State, version: Version) -> bool:
    """Every relay has gone on to newer versions, so that `version` will not come any more."""
    return bool(state.relays) and all(r.whole and max(r.whole) > version for r in state.relays.values())


def _grant(replica: Replica, count: int, reason: str) -> Command:
    assert replica.version is not None
    replica.move("grant")
    replica.granted = count
    return Issue(replica.id, replica.incarnation, replica.version, count, "train", reason)
