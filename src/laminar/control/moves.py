"""Release and adopt between live replicas: repack and drain are this one mechanism.

A move binds both sides: the source gets no work and the destination keeps its version until the data store says that
the move has ended. Without that both could have pulled meanwhile, and nobody would hold the version of the work.
"""

from __future__ import annotations

from collections.abc import Iterator

from laminar.control import ledger
from laminar.control.commands import CancelMove, Command, Move, Remove, Replace
from laminar.control.failover import disown, forget_plans
from laminar.control.repack import RepackLimits, ReplicaLoad, plan_repack
from laminar.control.state import Process, Replica, State, replica_number
from laminar.types import Version


def repack(state: State) -> Iterator[Command]:
    """Empty replicas whose tail fits beside another's, as many as there is new work for.

    Nobody ends up with more samples than a replica takes at a time: those that have just begun hold few tokens too, and
    would all fit on one.
    """
    settings = state.settings
    newest = max((v for relay in state.relays.values() for v in relay.whole), default=None)
    if newest is None:
        return
    loads = [_load(state, r, newest) for r in state.alive() if not r.bound and not r.draining and r.pulling is None]
    limits = RepackLimits(
        kv_fraction=settings.repack_kv_fraction,
        max_requests=min(settings.repack_max_requests, settings.groups_in_flight * settings.group_size),
        prefill_tok_s=settings.prefill_tok_s,
        expected_freed_s=settings.repack_interval_s,
        max_released=-(-state.room(newest) // settings.groups_in_flight),
    )
    for move in plan_repack(loads, limits).moves:
        yield _move(state, state.replicas[move.source], state.replicas[move.destination], move.reason)


def ask_to_leave(state: State, replica_id: str) -> None:
    """Somebody wants this replica to leave: it is drained, but the last one stays.

    Whoever asks sees the run a moment late; of two who ask at once about the last two, one is refused here.
    """
    if state.staying() == [replica_id]:
        state.notes.append(f"replica {replica_id} is the last one and stays")
    else:
        begin_drain(state, replica_id)


def begin_drain(state: State, replica_id: str) -> None:
    """From here on this replica is given nothing new; it leaves when it is empty, and is not replaced if it dies.

    After `drain_timeout_s` it goes in any case.
    """
    if replica_id not in state.staying():
        return
    state.unwanted[replica_id] = state.now
    if replica := state.replicas.get(replica_id):
        replica.draining = True
    state.notes.append(f"replica {replica_id} is being drained")


def drain(state: State) -> Iterator[Command]:
    """Move the work of draining replicas away if somebody holds its version; remove those that are empty."""
    for replica in sorted((r for r in state.replicas.values() if r.draining), key=lambda r: r.id):
        process = state.processes["replica", replica.id]
        if process.state in ledger.ENDED:
            continue
        if state.now - state.unwanted[replica.id] > state.settings.drain_timeout_s:
            process.state = ledger.step(ledger.PROCESS, process.state, "stop", replica.id)
            held = f"; it held {len(replica.unfinished)} unfinished samples" if replica.unfinished else ""
            state.notes.append(
                f"replica {replica.id} has not left in {state.settings.drain_timeout_s:g} s and goes{held}"
            )
            yield disown(state, replica, "its time to leave is over")
            yield Remove("replica", replica.id, "its time to leave is over")
            continue
        there = process.state in ("alive", "suspect") and replica.heard
        if not there or replica.bound or replica.activity == "granted":
            continue
        if not replica.unfinished:
            process.state = ledger.step(ledger.PROCESS, process.state, "stop", replica.id)
            forget_plans(state, replica)
            state.notes.append(f"replica {replica.id} is drained and leaves")
            yield Remove("replica", replica.id, "drained")
            continue
        able = [
            r
            for r in state.alive()
            if r.version == replica.version and r.moving_to is None and not r.draining and r.pulling is None
        ]
        if able:
            yield _move(state, replica, min(able, key=lambda r: (r.load.kv_used, r.id)), "the source is drained")


def leave(state: State, replica_id: str) -> Iterator[Command]:
    """The machine of this replica wants it to end: it is drained, and the last one is replaced by another."""
    if replica_id in state.unwanted:
        return
    begin_drain(state, replica_id)
    if not state.staying():
        yield from scale(state, 1)


def scale(state: State, wanted: int) -> Iterator[Command]:
    """Start replicas, or drain those with the highest ids, until `wanted` are there to stay."""
    staying = state.staying()
    for replica_id in staying[wanted:]:
        begin_drain(state, replica_id)
    taken = [replica_number(id_) for role, id_ in state.processes if role == "replica"]
    first = max(taken, default=-1) + 1
    for number in range(first, first + wanted - len(staying)):
        process = Process("replica", f"replica-{number}", 1, heard=state.now, moved=state.now)
        state.processes["replica", process.id] = process
        state.notes.append(f"replica {process.id} joins")
        yield Replace("replica", process.id, process.incarnation, "scaled up")


def cancel_late(state: State) -> Iterator[Command]:
    """Moves whose source has not let go in time: what is left stays there."""
    for replica in state.replicas.values():
        if replica.moving_to is not None and state.now - replica.move_began > state.settings.move_timeout_s:
            replica.move_began = state.now
            yield CancelMove(replica.id, f"not done within {state.settings.move_timeout_s:g} s")


def _move(state: State, source: Replica, destination: Replica, reason: str) -> Command:
    assert source.version is not None
    source.moving_to, source.move_began = destination.id, state.now
    destination.receives[source.id] = None
    state.num_moves += 1
    return Move(
        source.id, source.incarnation, destination.id, destination.incarnation, source.version, reason
    )  # fmt: skip


def _load(state: State, replica: Replica, newest: Version) -> ReplicaLoad:
    assert replica.version is not None
    load, unfinished = replica.load, len(replica.unfinished)
    # Work on its way to it comes in whole groups. If fewer are missing they have ended, and the news has yet to come.
    under_way = unfinished - load.num_running >= state.settings.group_size
    fresh = state.settings.admission == "fresh" and replica.version == newest and state.room(newest) > 0
    return ReplicaLoad(
        replica=replica.id,
        version=replica.version.lineage * 2**40 + replica.version.number,
        kv_used=load.kv_used,
        kv_capacity=max(1, load.kv_capacity),
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        admitting=fresh or replica.activity == "granted" or under_way,
    )
