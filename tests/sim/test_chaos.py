"""Runs in which processes die, stop and are cut off, by seed: each ends by itself, and nothing breaks meanwhile."""

from __future__ import annotations

import itertools

import pytest

from laminar.sim.faults import faults_of, main, plan_of, run_chaos

SEEDS, SLOW_SEEDS = range(300), range(300, 20_000)


def check(seeds: range) -> None:
    found = [result for seed in seeds if (result := run_chaos(seed)).problems]
    assert not found, "\n".join(f"{result.command}: {'; '.join(result.problems)}" for result in found)


@pytest.mark.parametrize("seeds", [SEEDS[i : i + 25] for i in range(0, 300, 25)], ids=lambda s: f"from {s[0]}")
def test_whatever_happens_a_run_ends_and_its_books_are_right(seeds: range) -> None:
    """Invariants 1, 2, 7, 10, 11 and 12 of docs/architecture.md; faults 4, 5, 8, 11 to 15, 28, 30 of docs/faults.md."""
    check(seeds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [SLOW_SEEDS[i : i + 394] for i in range(0, len(SLOW_SEEDS), 394)], ids=lambda s: f"from {s[0]}"
)
def test_whatever_happens_in_many_more_runs(seeds: range) -> None:
    check(seeds)


def test_the_seeds_reach_every_schedule_and_every_kind_of_fault() -> None:
    plans = [plan_of(seed) for seed in SEEDS]
    faults = [fault for seed, plan in zip(SEEDS, plans, strict=True) for fault in faults_of(seed, plan)]
    assert {p.settings.schedule for p in plans} == {"sync", "one_step", "stream", "partial", "laminar"}
    assert {f.kind for f in faults} == {"kill", "stall", "partition", "slow", "drain", "scale"}
    processes = {"replica", "relay", "trainer", "manager", "datastore", "scorer"}
    reached = {(f.kind, f.role) for f in faults if f.kind not in ("drain", "scale")}
    assert reached == set(itertools.product(("kill", "stall", "partition", "slow"), processes))
    assert any(f.at is None for f in faults) and any(f.event is None for f in faults)


def test_a_seed_gives_the_same_run_again_and_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_chaos(5) == run_chaos(5) != run_chaos(6)
    assert main(5) == 0
    said = capsys.readouterr().out
    assert said.startswith("Plan(settings=Settings(") and said.splitlines()[-1].startswith("completed: ")
