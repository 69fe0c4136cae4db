"""A manager that takes over from one that died: what it is told, what it asks for, and what it leaves alone.

Protocol, "Truth, terms, events".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from laminar.control.accounts import Accounts
from laminar.control.commands import Complete, EndRun, Issue, Links, Orphan, Pull, Replace
from laminar.control.events import (
    MoveEnded,
    ProcessEnded,
    ProcessSeen,
    Recovered,
    RelayBeat,
    ReplicaBeat,
    Tick,
)
from laminar.control.failover import without_manager
from laminar.control.manager import Manager
from laminar.control.state import EPOCHS_A_TERM
from laminar.types import Settings
from tests.control.plans import make_settings
from tests.control.scene import Scene, kinds, samples, v

RULES: dict[str, Any] = {"max_restarts": 2, "suspect_after_s": 2.0, "dead_after_s": 30.0, "groups_in_flight": 2}
LIVE = ((0, "issued"),)


def seen(*changes: ProcessSeen) -> tuple[ProcessSeen, ...]:
    """Everybody is there, but for `changes`."""
    ids = [("trainer", "trainer"), ("relay", "relay"), ("replica", "r0"), ("replica", "r1")]
    alone = [ProcessSeen(role, role, 1, "starting") for role in ("manager", "datastore", "scorer")]
    found = {p.id: p for p in (*alone, *(ProcessSeen(role, id_, 1, "alive") for role, id_ in ids))}
    return tuple((found | {p.id: p for p in changes}).values())


def second(recovered: Recovered, **changes: Any) -> Scene:
    """A manager of term 2."""
    scene = Scene(0, **(RULES | changes))
    scene.manager = Manager(scene.manager.settings)
    scene.state = scene.manager.state
    scene.records = []
    scene.handle(recovered)
    return scene


def took_over(*owned: tuple[str, int, tuple[Any, ...]], **changes: Any) -> Scene:
    return second(Recovered(2, LIVE, owned=owned, processes=seen()), **changes)


# ---------------------------------------------------------------- the first words


def test_nothing_is_given_to_those_who_have_not_spoken() -> None:
    scene = took_over(("r0", 1, samples([0])))
    assert scene.relay(0) == [] and scene.trainer(0) == []
    assert scene.state.num_unfinished == 2 and not scene.state.alive()
    (issue,) = scene.handle(ReplicaBeat("r1", 1, "idle", v(0), 9, node="n"))
    assert isinstance(issue, Issue) and issue.replica == "r1"
    commands = scene.handle(ReplicaBeat("r0", 1, "generating", v(0), 9, node="n"))
    assert kinds(commands) == ["Keep"], "it goes on with what it has"
    assert scene.state.replicas["r0"].activity == "generating"


def test_a_pull_that_the_last_manager_ordered_is_known() -> None:
    scene = took_over()
    scene.relay(0, 1)
    assert scene.handle(ReplicaBeat("r0", 1, "loading", v(0), 3, node="n", failed_pulls=2, pulling=v(1))) == []
    assert scene.state.replicas["r0"].pulling == v(1)
    (issue,) = scene.handle(ReplicaBeat("r0", 1, "idle", v(1), 3, node="n", failed_pulls=2))
    assert isinstance(issue, Issue) and issue.version == v(1)


def test_a_pull_that_fails_under_the_next_manager_fails() -> None:
    scene = took_over()
    scene.handle(ReplicaBeat("r0", 1, "loading", v(0), 3, node="n", failed_pulls=2, pulling=v(1)))
    (issue,) = scene.handle(ReplicaBeat("r0", 1, "idle", v(0), 3, node="n", failed_pulls=3))
    assert isinstance(issue, Issue) and issue.version == v(0)


def test_what_an_incarnation_that_is_gone_owns_is_orphaned() -> None:
    """The order of the last manager may have been lost with it."""
    gone = ProcessSeen("replica", "r0", 2, "starting", (0,)), ProcessSeen("replica", "r1", 1, "given up", (0,) * 3)
    owned = ("r0", 1, samples([0])), ("r1", 1, samples([1]))
    scene = second(Recovered(2, LIVE, owned=owned, processes=seen(*gone)))
    (record,) = scene.records
    assert [(c.replica, c.incarnation) for c in record.commands if isinstance(c, Orphan)] == [("r0", 1), ("r1", 1)]


def test_who_does_not_speak_is_replaced_in_time() -> None:
    scene = took_over(("r0", 1, samples([0])))
    scene.handle(ReplicaBeat("r1", 1, "idle", v(0), 0, node="n"))
    commands = [c for _ in range(70) for c in scene.tick(0.5, ReplicaBeat("r1", 1, "idle", v(0), 0, node="n"))]
    assert (
        Orphan("r0", 1, "silent for 30.5 s") in commands
        and Replace("replica", "r0", 2, "silent for 30.5 s") in commands
    )
    assert not any(isinstance(c, Replace) and c.id == "r1" for c in commands)


def test_a_manager_that_is_paused_before_its_first_tick_forgives() -> None:
    """Its beginning counts as a tick: nobody could be heard meanwhile."""
    scene = took_over()
    scene.handle(ReplicaBeat("r0", 1, "idle", v(0), 0, node="n"))
    scene.now += 100.0
    assert not any(isinstance(c, Replace) for c in scene.handle(Tick()))


def test_work_that_is_only_to_be_reported_is_no_stuck_engine() -> None:
    """The data store may be away for longer than an engine may stand still."""
    scene = Scene(1, **RULES)
    (issue,) = scene.ready()
    scene.issued(issue)
    held = ReplicaBeat("r0", 1, "reporting", v(0), 5, node="n")
    said = [c for _ in range(80) for c in scene.tick(0.5, held)]
    assert not any(isinstance(c, Replace) and c.id == "r0" for c in said)
    stuck = replace(held, state="generating")
    assert any(isinstance(c, Replace) and c.id == "r0" for _ in range(80) for c in scene.tick(0.5, stuck))


def test_relays_follow_the_new_chain() -> None:
    """Its epochs are above those of the last one, which relays would listen to no more."""
    scene = took_over()
    scene.relay(0)
    links = scene.handle(RelayBeat("relay-2", 1, "m", (), 1))
    assert [c.epoch > 2 * EPOCHS_A_TERM for c in links if isinstance(c, Links)] == [True, True]


def test_a_replica_that_is_to_leave_still_is() -> None:
    leaving = ProcessSeen("replica", "r0", 1, "alive", (), unwanted=True)
    scene = second(Recovered(2, LIVE, processes=seen(leaving)))
    scene.relay(0)
    commands = scene.handle(ReplicaBeat("r0", 1, "idle", v(0), 0, node="n"))
    assert not any(isinstance(c, Issue | Pull) for c in commands)
    assert ProcessSeen("replica", "r0", 1, "stopped", (), unwanted=True) in scene.state.seen()


def test_deaths_count_across_managers() -> None:
    scene = second(Recovered(2, LIVE, processes=seen(ProcessSeen("replica", "r0", 3, "alive", (0, 0)))))
    assert not any(isinstance(c, Replace) for c in scene.handle(ProcessEnded("replica", "r0", 3, "boom")))
    assert scene.state.processes["replica", "r0"].state == "given up"


# ---------------------------------------------------------------- evaluations and the end


def test_an_evaluation_that_has_begun_is_ended() -> None:
    rules = {"eval_groups": 3, "eval_every": 1, "max_outstanding_groups": 1}
    scene = second(Recovered(2, LIVE, evals_open=((v(1), 2),), processes=seen()), **rules)
    scene.relay(1)
    (issue,) = scene.handle(ReplicaBeat("r0", 1, "idle", v(1), 0, node="n"))
    assert isinstance(issue, Issue) and (issue.kind, issue.num_groups) == ("eval", 1)


def test_the_run_completes_though_the_trainer_was_never_heard() -> None:
    """It had ended before this manager began; the relay shows what is to be evaluated last."""
    ended = ProcessSeen("trainer", "trainer", 1, "stopped")
    recovered = Recovered(2, cut_groups=6, update=3, trained=3, processes=seen(ended))
    assert second(recovered).records[0].commands == (Complete("all batches are trained"),)
    scene = second(recovered, eval_groups=1, eval_after_train=True)
    assert scene.records[0].commands == (), "which version is the last, nobody has said yet"
    scene.relay(3)
    (issue,) = scene.handle(ReplicaBeat("r0", 1, "idle", v(3), 0, node="n"))
    assert isinstance(issue, Issue) and issue.kind == "eval"


# ---------------------------------------------------------------- without a manager


def replaced(
    ended: Sequence[str], settings: Settings, *changes: ProcessSeen
) -> tuple[list[Any], tuple[ProcessSeen, ...]]:
    endings = [ProcessEnded(role, role, 1, "boom") for role in ended]
    commands, known, _ = without_manager(settings, seen(*changes), endings)
    return commands, known


def test_the_driver_replaces_the_manager_by_the_rule_for_all() -> None:
    commands, known = replaced(["manager"], make_settings(**RULES))
    assert commands == [Replace("manager", "manager", 2, "boom")]
    assert ProcessSeen("manager", "manager", 2, "starting", (0,)) in known
    assert without_manager(make_settings(**RULES), known, [ProcessEnded("manager", "manager", 1, "boom")])[0] == []


def test_and_the_data_store_if_that_has_died_too() -> None:
    commands, _ = replaced(["datastore", "manager"], make_settings(**RULES))
    assert [c.id for c in commands] == ["datastore", "manager"]


@pytest.mark.parametrize("deaths", [(), (0, 0)])
def test_a_manager_that_dies_too_often_ends_the_run(deaths: tuple[int, ...]) -> None:
    settings = make_settings(**(RULES | {"max_restarts": 2 if deaths else 0}))
    commands, _ = replaced(["manager"], settings, ProcessSeen("manager", "manager", 1, "starting", deaths))
    (end,) = commands
    assert isinstance(end, EndRun) and end.outcome == "failed" and end.message.startswith("manager died: boom")


# ---------------------------------------------------------------- the data store's side


def test_moves_end_with_the_term_and_what_was_not_let_go_of_stays() -> None:
    accounts = Accounts(make_settings())
    group = accounts.issue("r0", 1, v(0))
    accounts.move("r0", 1, "r1", 1, v(0))
    accounts.release(group.samples[0].id, 0)
    accounts.drain_events()
    accounts.begin_term(2)
    assert accounts.events == [MoveEnded("r0", "r1")]
    told = accounts.recovered((), 7)
    assert (told.term, told.outbox) == (2, 7)
    assert told.owned == (("r0", 1, (group.samples[1].id,)), ("r1", 1, (group.samples[0].id,)))
