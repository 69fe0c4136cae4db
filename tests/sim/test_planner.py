"""The search for a plan: what is tried, what is chosen, and that it is what was promised."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from laminar import cli
from laminar.config import load
from laminar.errors import ConfigError
from laminar.sim.planner import (
    Candidate,
    Found,
    best_replica,
    best_training,
    combined,
    first_round,
    search,
    variants,
)
from laminar.sim.simulate import plan_of, simulate
from laminar.timing import load_profile

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TOY, PAPER = CONFIGS / "simulated" / "toy.toml", CONFIGS / "paper" / "72b.toml"
BASE = Candidate("laminar", 3, 5, 1)


@pytest.fixture(scope="module")
def found() -> Found:
    return search(TOY, [], 8, workers=1)


def test_the_best_is_faster_than_half_and_half_and_within_the_bound(found: Found) -> None:
    half = simulate(load(TOY, ["gpus=8", "rollout.replicas=4"]))
    best = found.best.report
    assert best.throughput_tok_s > half.throughput_tok_s
    assert best.staleness_use.max <= 2, "the bound of the config"
    assert {o.candidate.schedule for o in found.outcomes} == {"laminar", "stream", "one_step", "sync"}
    speeds = [o.report.throughput_tok_s for o in found.outcomes]
    assert speeds == sorted(speeds, reverse=True)


def test_the_best_is_a_config_that_gives_what_was_promised(found: Found) -> None:
    again = simulate(load(TOY, [*found.best.candidate.overrides, f"iterations={found.best.iterations}"]))
    assert again.throughput_tok_s == found.best.report.throughput_tok_s


def test_nothing_is_faster_than_trainer_and_replicas_could_be_at_best(found: Found) -> None:
    config = load(TOY)
    tokens = config.train.groups_per_batch * config.train.group_size
    for outcome in found.outcomes:
        c = outcome.candidate
        limits = best_training(config, config.profile, c.train_gpus), c.replicas * best_replica(config, config.profile)
        assert tokens / outcome.report.iteration_s < 1.1 * min(limits), c  # lengths of a few iterations vary


def test_no_candidate_uses_more_gpus_or_breaks_the_unit_of_the_trainer() -> None:
    config = load(PAPER)
    candidates = first_round(config, config.profile, 1024)
    for c in {*candidates, *variants(candidates[0], config.profile, 1024)}:
        plan = plan_of(load(PAPER, c.overrides))
        used = plan.replicas * 8 + (0 if c.colocated else plan.train_gpus)
        assert 1024 - 8 < used <= 1024 and plan.train_gpus % 32 == 0
        assert plan.colocated == (c.schedule == "sync")


def test_a_variant_changes_one_thing() -> None:
    for variant in variants(BASE, load_profile("toy"), 8)[1:]:
        changed = {f.name for f in fields(Candidate) if getattr(variant, f.name) != getattr(BASE, f.name)}
        assert changed in ({"quota"}, {"in_flight"}, {"admission"}, {"train_gpus", "replicas"})


def test_changes_are_combined_and_the_first_of_a_kind_counts() -> None:
    one, two = Candidate("laminar", 4, 4, 1), Candidate("laminar", 3, 5, 1, quota=2)
    assert combined(BASE, [one, two]) == [Candidate("laminar", 4, 4, 1, quota=2)]
    three = Candidate("laminar", 3, 5, 1, quota=4)
    assert combined(BASE, [two, three]) == [two]
    assert combined(BASE, []) == [BASE]


@pytest.mark.parametrize("staleness", [1.0, 1.5])
def test_a_limit_on_staleness_is_kept_and_costs_speed(found: Found, staleness: float) -> None:
    """With 1.5 there are plans that are fresh enough in short simulations only: others are looked for."""
    fresh = search(TOY, [], 8, staleness=staleness, workers=1).best.report
    assert fresh.staleness_use.mean <= staleness
    assert fresh.throughput_tok_s < found.best.report.throughput_tok_s


@pytest.mark.parametrize(
    ("config", "gpus", "message"),
    [
        (PAPER, 39, r"--gpus: too few GPUs for a trainer and a replica\n  expected: at least 40 .* 72b\n  got: 39"),
        (TOY, 1, r"--gpus: too few GPUs .*\n  expected: at least 2 with profile toy\n  got: 1"),
    ],
)
def test_too_few_gpus(config: Path, gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(config, [], gpus, workers=1)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    best = tmp_path / "best.toml"

    def laminar(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["laminar", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0)

    assert laminar("plan", TOY, "--gpus", 4, "seed=3", "-o", best, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert load(best) == load(TOY, answer["overrides"])
    assert "seed=3" in answer["overrides"] and answer["best"] in answer["tried"]
    assert laminar("simulate", best) == 0
    capsys.readouterr()
    assert laminar("plan", TOY) == 2 and "--gpus" in capsys.readouterr().err
    assert laminar("plan", "--gpus", 8) == 2 and "no config" in capsys.readouterr().err
    assert laminar("plan", TOY, "--gpus", 8, "-o", tmp_path / "gone" / "x.toml") == 2
    assert "fix: mkdir -p" in capsys.readouterr().err
