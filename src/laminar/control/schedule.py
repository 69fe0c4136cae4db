"""Schedules: when a replica pulls and when it is granted work. The staleness rule binds them all.

A schedule only chooses moments. It looks at the state and says what each replica should do now; it is asked after every
event and keeps nothing of its own, so that a new manager decides like the old one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from laminar.control.commands import Command, GiveUpEval, Issue, Pull, Restart
from laminar.control.state import Evaluation, Replica, State
from laminar.types import SampleId, Settings, Version


class Schedule(Protocol):
    def plan(self, state: State) -> Iterator[Command]:
        """Commands for the replicas that can do something new. The state reflects each before the next is asked for."""


def make(settings: Settings) -> Schedule:
    schedules: dict[str, type[Laminar] | type[Waves]] = {"laminar": Laminar, "sync": Waves}
    return schedules[settings.schedule]()


class Laminar:
    """Every replica for itself: a batch of whole groups, then the newest weights, then the next batch."""

    def plan(self, state: State) -> Iterator[Command]:
        for replica in _waiting(state):
            if command := _first_weights(state, replica) or _evaluate(state, replica) or _newer_weights(state, replica):
                yield command
            elif replica.version is not None:
                if command := _restart(state, replica, state.settings.groups_in_flight):
                    yield command
                elif count := min(state.room(replica.version), state.settings.groups_in_flight):
                    yield _grant(replica, count, "idle, and the staleness rule has room")


class Waves:
    """All replicas generate one batch; the next wave opens when it is done and everybody holds the weights it needs.

    Which wave is open follows from the number of groups that stand (live or cut): a multiple of B means that all
    waves so far are fully issued; anything else is a wave with places left, which refills join.
    """

    def plan(self, state: State) -> Iterator[Command]:
        settings, batch = state.settings, state.settings.groups_per_batch
        for replica in _waiting(state):
            if command := _first_weights(state, replica):
                yield command
        standing = len(state.live) + state.granted + state.cut_groups
        alive = state.alive()
        issued = standing % batch == 0 or state.exhausted  # the last wave has no places left, whatever its size
        between = issued and not state.num_unfinished and not state.granted
        if between:
            for replica in _waiting(state):
                if command := _evaluate(state, replica) or _newer_weights(state, replica):
                    yield command
        idle = _idle(state)
        for replica in idle:
            if command := _restart(state, replica, -(-batch // max(1, len(alive)))):
                yield command
        if not alive or state.orphans:
            return
        if standing % batch == 0:
            wave = standing // batch
            oldest = wave - (settings.max_staleness or 0)
            ready = all(r.version is not None and r.version.number >= oldest for r in alive)
            if not between or len(_idle(state)) < state.num_replicas or not ready:
                return
            yield from self._share(state, alive, batch, f"wave {wave} opens")
        else:
            order = sorted(alive, key=lambda r: (len(r.unfinished), r.id))
            able = [r for r in order if r.activity in ("idle", "generating")]
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


def _waiting(state: State) -> list[Replica]:
    """Replicas with nothing to do, those without weights included."""
    return [
        r
        for i, r in sorted(state.replicas.items())
        if r.activity in ("idle", "starting") and state.processes["replica", i].state == "alive"
    ]


def _idle(state: State) -> list[Replica]:
    return [r for r in state.alive() if r.activity == "idle"]


def _pull(replica: Replica, version: Version, reason: str) -> Command:
    replica.move("pull")
    replica.pulling = version
    return Pull(replica.id, replica.incarnation, version, reason)


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
        if not any(r.version == version or r.pulling == version for r in state.replicas.values()) and _passed(
            state, version
        ):
            evaluation.done = True
            return GiveUpEval(version, "no relay and no replica holds it any more")
    return None


def _passed(state: State, version: Version) -> bool:
    """Every relay has gone on to newer versions, so that `version` will not come any more."""
    return bool(state.relays) and all(r.whole and max(r.whole) > version for r in state.relays.values())


def _restart(state: State, replica: Replica, max_groups: int) -> Command | None:
    """Orphans begin anew under a version not older than theirs, whole groups together."""
    if replica.version is None:
        return None
    chosen: list[SampleId] = []
    groups: dict[int, None] = {}
    for sample, version in sorted(state.orphans.items()):
        if version.number > replica.version.number:
            continue
        if sample.group not in groups and len(groups) == max_groups:
            break
        groups[sample.group] = None
        chosen.append(sample)
    if not chosen:
        return None
    for sample in chosen:
        del state.orphans[sample]
    replica.move("grant")
    return Restart(replica.id, replica.incarnation, replica.version, tuple(chosen), "their owner is gone")


def _grant(replica: Replica, count: int, reason: str) -> Command:
    assert replica.version is not None
    replica.move("grant")
    replica.granted = count
    return Issue(replica.id, replica.incarnation, replica.version, count, "train", reason)
