"""Who is there: silence, stuck engines, and a manager that was away itself."""

from __future__ import annotations

import pytest

from laminar.control.commands import Replace
from laminar.control.events import Beat, ProcessEnded, RelayBeat, ReplicaBeat, TrainerBeat
from laminar.control.liveness import forgive, judge, lost_time
from laminar.control.state import Process
from tests.control.plans import make_settings
from tests.control.scene import Scene, v

SETTINGS = make_settings(suspect_after_s=2.0, dead_after_s=30.0)


@pytest.mark.parametrize(
    ("role", "before", "heard", "moved", "after", "verdict"),
    [
        ("replica", "alive", 99.0, 99.0, "alive", None),
        ("replica", "alive", 98.0, 99.0, "alive", None),
        ("replica", "alive", 97.5, 97.5, "suspect", "suspect: silent for 2.5 s"),
        ("replica", "suspect", 97.5, 97.5, "suspect", None),
        ("replica", "suspect", 69.0, 69.0, "suspect", "dead: silent for 31.0 s"),
        ("replica", "alive", 99.5, 69.0, "alive", "dead: its engine has not moved for 31.0 s though it has work"),
        ("relay", "alive", 99.5, 0.0, "alive", None),
        ("trainer", "alive", 60.0, 60.0, "alive", "dead: silent for 40.0 s"),
        ("replica", "starting", 0.0, 0.0, "starting", None),
        ("replica", "dead", 0.0, 0.0, "dead", None),
        ("replica", "stopped", 0.0, 0.0, "stopped", None),
    ],
)
def test_verdicts_at_100_s(role: str, before: str, heard: float, moved: float, after: str, verdict: str | None) -> None:
    process = Process(role, "p", 1, before, heard, moved)
    said = [f"{v.state}: {v.reason}" for v in judge(100.0, [process], SETTINGS)]
    assert said == ([] if verdict is None else [verdict])
    assert process.state == after


@pytest.mark.parametrize(("gap", "lost"), [(0.5, 0.0), (1.0, 0.0), (1.5, 0.5), (61.0, 60.0)])
def test_only_a_gap_that_is_too_long_is_lost(gap: float, lost: float) -> None:
    assert lost_time(gap) == lost


def test_a_manager_that_was_away_forgives() -> None:
    """Protocol §8: nobody could be heard meanwhile; who spoke since is not thought to speak in the future."""
    silent = Process("replica", "r0", 1, "alive", heard=10.0, moved=9.0)
    spoke = Process("replica", "r1", 1, "alive", heard=99.8, moved=99.8)
    forgive(100.0, [silent, spoke], 89.0)
    assert (silent.heard, silent.moved) == (99.0, 98.0)
    assert (spoke.heard, spoke.moved) == (100.0, 100.0)
    assert judge(100.0, [silent, spoke], SETTINGS) == []


def test_a_late_word_of_a_replica_that_was_given_up_is_ignored() -> None:
    """Fault 4: it was only stopped, and is continued when nobody counts on it any more."""
    scene = Scene(replicas=2, max_restarts=1)
    scene.ready()
    for incarnation in (1, 2):
        scene.handle(ProcessEnded("replica", "r0", incarnation, "killed"))
    scene.beat("r0", 0)
    scene.handle(ReplicaBeat("r0", 2, "idle", v(0), 0))
    assert scene.state.processes["replica", "r0"].state == "given up"


@pytest.mark.parametrize(("role", "beat"), [("trainer", "starting"), ("replica", "loading")])
def test_who_loads_what_it_begins_with_may_be_silent_for_longer(role: str, beat: str) -> None:
    """Fault 2: an import or a model that keeps all threads from speaking is no death; not to come up at all is one."""
    scene = Scene(1, dead_after_s=5.0, start_timeout_s=60.0, max_restarts=1)
    if role == "trainer":
        scene.trainer(None, beat)
    else:
        scene.beat("r0", None, beat)
    dead: list[str] = []
    while not dead:
        others = (RelayBeat("relay", 1, "n", (), 1), *scene_beats(role))
        dead = [c.role for c in scene.tick(0.5, *others) if isinstance(c, Replace)]
        assert scene.now < 62
    assert dead == [role] and scene.now > 60


def scene_beats(silent: str) -> tuple[Beat, ...]:
    """Of the others."""
    return (ReplicaBeat("r0", 1, "idle", None, 0),) if silent == "trainer" else (TrainerBeat(1, None, 0, "starting"),)
