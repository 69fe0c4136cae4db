"""What follows from a death: replace the process, and find an owner for what it held.

Orphans, earliest deadline first, go to a live replica that holds their version; else the next empty replica loads that
version, if a relay has it; else, or after `adopt_timeout_s`, they begin anew under the newest version, never an older
one. Waiting without end is not a policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from laminar.control import ledger
from laminar.control.accounts import FIRST_EVAL
from laminar.control.commands import Adopt, Command, EndRun, GiveUpCut, Orphan, Pull, Replace, Restart
from laminar.control.events import ProcessEnded, ProcessSeen, Recovered
from laminar.control.state import Estate, Process, Replica, State
from laminar.types import SampleId, Settings, Version

ORPHANS = "orphans"
"""Mark in `Replica.receives` while the data store has not confirmed an adoption."""


def died(state: State, process: Process, cause: str, is_final: bool = False) -> Iterator[Command]:
    """Commands after the death of a process; a death that can't be mended sets `state.fatal`."""
    key, settings = (process.role, process.id), state.settings
    process.state = ledger.step(ledger.PROCESS, process.state, "death", key)
    deaths = state.deaths.setdefault(key, [])
    deaths.append(state.trained)
    state.died_at.setdefault(key, state.now)
    line = f"{process.name} died: {cause}"
    if settings.max_restarts == 0 or is_final:
        state.fatal = state.fatal or line
        return
    held = ""
    if process.role == "replica" and (replica := state.replicas.get(process.id)):
        held = f"; it held {len(replica.unfinished)} unfinished samples"
        yield disown(state, replica, cause)
    if process.role == "trainer" and (command := _give_up_cut(state)):
        yield command
    unwanted = process.role == "replica" and process.id in state.unwanted
    if len(deaths) <= settings.max_restarts and not unwanted:
        process.state = ledger.step(ledger.PROCESS, process.state, "replace", key)
        process.incarnation += 1
        state.notes.append(f"{line}{held}; restarting it")
        yield Replace(process.role, process.id, process.incarnation, cause)
        return
    process.state = ledger.step(ledger.PROCESS, process.state, "give up", key)
    why = "it was being drained" if unwanted else f"given up after {settings.max_restarts} restarts"
    state.notes.append(f"{line}{held}; {why}")
    if process.role != "replica" or not state.staying():
        state.fatal = state.fatal or f"{line}, {settings.max_restarts} restarts did not help"


def disown(state: State, replica: Replica, reason: str) -> Command:
    """What this replica holds is to go on elsewhere: it is gone, or will be now."""
    forget_plans(state, replica)
    if replica.unfinished:
        state.estates.setdefault(replica.id, Estate(state.now))
    return Orphan(replica.id, replica.incarnation, reason)


def orphan_unknown(state: State, event: Recovered) -> Iterator[Command]:
    """What is owned by those who are gone: the word of the manager that saw it may not have reached the data store."""
    for replica_id, incarnation, _ in event.owned:
        process = state.processes["replica", replica_id]
        if process.incarnation != incarnation or process.state in ledger.ENDED:
            yield Orphan(replica_id, incarnation, "it was gone before this manager began")


def without_manager(
    settings: Settings, seen: Iterable[ProcessSeen], ended: Sequence[ProcessEnded]
) -> tuple[list[Command], tuple[ProcessSeen, ...], list[str]]:
    """What the driver does when there is nobody to ask: who of the manager and the data store is started anew.

    `seen` is what the last manager told of the processes, `ended` who of the two has ended since. The rule is the same
    as for everybody else. Returns the commands, what there is to tell the next manager, and lines for the user.
    """
    state = State(settings)
    state.take_over(0.0, seen)
    commands: list[Command] = []
    for event in ended:
        process = state.processes[event.role, event.id]
        if process.incarnation == event.incarnation:
            commands += died(state, process, event.cause or "ended before the run did", event.is_final)
    if state.fatal is not None:
        commands = [EndRun("failed", state.fatal)]
    return commands, state.seen(), state.notes


def _give_up_cut(state: State) -> Command | None:
    """A batch on which the trainer dies twice is the batch's fault."""
    update = state.trained
    deaths = state.deaths["trainer", "trainer"].count(update)
    newest = state.trainer.version
    published = newest is not None and newest.number > update
    if deaths == 2 and update < state.update and not published:
        return GiveUpCut(update, "the trainer died on it twice")
    return None


def forget_plans(state: State, replica: Replica) -> None:
    """Nothing that was planned with a replica that is gone will happen; the data store ends its moves."""
    replica.granted, replica.pulling = 0, None
    for evaluation in state.evaluations.values():
        evaluation.granted.pop(replica.id, None)


def adopt_orphans(state: State) -> Iterator[Command]:
    """Give orphans to replicas that hold their version, or have an empty one load it."""
    for (version, is_eval), samples in _by_version(state):
        holders = [r for r in state.alive() if _may_adopt(state, r, version, is_eval)]
        if holders:
            late = _is_late(state, samples[0])
            coming = 0 if late else sum(_is_coming(state, r, version) for r in state.replicas.values())
            yield from _share_out(state, holders, coming, samples)
        elif not _is_late(state, samples[0]) and not any(r.pulling == version for r in state.replicas.values()):
            for replica in state.waiting():
                if state.has_version(replica.node, version):
                    replica.move("pull")
                    replica.pulling = version
                    yield Pull(replica.id, replica.incarnation, version, "orphans of this version wait for it")
                    break


def _share_out(state: State, holders: list[Replica], coming: int, samples: list[SampleId]) -> Iterator[Command]:
    """Level the work of all who hold the version; what is meant for those who are still `coming` waits for them."""
    held = sum(len(r.unfinished) for r in holders)
    level = -(-(held + len(samples)) // (len(holders) + coming))
    for holder in sorted(holders, key=lambda r: (len(r.unfinished), r.id)):
        free = level - len(holder.unfinished)
        if free <= 0 or not samples or ORPHANS in holder.receives:
            continue
        taken, samples = tuple(samples[:free]), samples[free:]
        for sample in taken:
            del state.orphans[sample]
        holder.receives[ORPHANS] = None
        assert holder.version is not None
        yield Adopt(holder.id, holder.incarnation, holder.version, taken, "it holds their version")


def _is_coming(state: State, replica: Replica, version: Version) -> bool:
    """Whether the replica will soon hold this version: it loads it, or waits for its first weights."""
    is_there = state.processes["replica", replica.id].state in ("starting", "alive") and not replica.draining
    return is_there and (replica.pulling == version or (replica.version is None and replica.pulling is None))


def restart_orphans(state: State, replica: Replica, max_groups: int) -> Command | None:
    """Orphans that nobody can go on with begin anew, whole groups together, under a version not older than theirs."""
    if not state.orphans or replica.version is None or replica.version != state.newest(replica):
        return None
    chosen: list[SampleId] = []
    groups: dict[int, None] = {}
    for sample, orphan in sorted(state.orphans.items(), key=lambda item: (_due(item[1].deadline), item[0])):
        if orphan.version.number > replica.version.number or not _must_restart(state, sample):
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
    return Restart(replica.id, replica.incarnation, replica.version, tuple(chosen), "nobody can go on with them")


def _by_version(state: State) -> list[tuple[tuple[Version, bool], list[SampleId]]]:
    """Orphans by version, those of evaluations apart; the version with the earliest deadline first."""
    found: dict[tuple[Version, bool], list[SampleId]] = {}
    for sample, orphan in sorted(state.orphans.items(), key=lambda item: (_due(item[1].deadline), item[0])):
        found.setdefault((orphan.version, sample.group >= FIRST_EVAL), []).append(sample)
    return list(found.items())


def _may_adopt(state: State, replica: Replica, version: Version, is_eval: bool) -> bool:
    if replica.draining or replica.moving_to is not None or replica.pulling is not None or replica.version is None:
        return False
    partial = state.settings.schedule == "partial" and not is_eval
    return replica.version == version or (partial and replica.version >= version)


def _is_late(state: State, sample: SampleId) -> bool:
    return state.now - state.orphans[sample].since >= state.settings.adopt_timeout_s


def _must_restart(state: State, sample: SampleId) -> bool:
    """Nobody can hold its version or is about to, and no relay has it; or it has waited long enough."""
    version = state.orphans[sample].version
    held = any(version in (r.version, r.pulling) for r in state.alive())
    shelved = any(version in relay.whole for relay in state.relays.values())
    return _is_late(state, sample) or not (held or shelved or not state.all_heard)


def _due(deadline: int | None) -> float:
    return float("inf") if deadline is None else deadline
