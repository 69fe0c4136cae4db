"""What `laminar simulate` says, and the configs that come with it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest

from laminar import cli
from laminar.config import InvalidConfig, load
from laminar.errors import ConfigError
from laminar.sim.report import history, report
from laminar.sim.simulate import plan_of, simulate, simulate_world
from laminar.sim.world import World
from tests.sim.plans import SIZE, B, by_hand, make_settings

FOLDER = Path(__file__).resolve().parents[2] / "configs"
CONFIGS = sorted([*FOLDER.glob("simulated/*.toml"), *FOLDER.glob("paper/*.toml")])
TOY = next(path for path in CONFIGS if path.stem == "toy")
KEYS = {
    "throughput_tok_s", "generation_tok_s", "iteration_s", "staleness_generation", "staleness_use",
    "latency_mean_s", "latency_max_s", "kv_utilization_mean", "rollout_busy_fraction", "trainer_busy_fraction",
    "repack_moves", "repack_cost_s", "wall_s", "seed",
}  # fmt: skip


def laminar(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["laminar", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("iterations", [1, 2, 6, 25])
def test_the_warm_up_is_half_of_the_run_and_ten_iterations_at_most(iterations: int) -> None:
    world = World(by_hand("sync", settings=make_settings("sync", iterations=iterations)))
    world.run()
    found = report(world, iterations, 1.5)
    measured = iterations - min(10, iterations // 2)
    assert found.staleness_use.histogram == found.staleness_generation.histogram == {"0": measured * B * SIZE}
    assert (found.wall_s, found.seed) == (1.5, 0)


def test_no_iteration_is_measured_in_which_the_run_winds_down() -> None:
    """Near its end nothing new is issued: the same iterations of a longer run take as long, and are as stale."""
    short, longer = (simulate(load(TOY, [f"iterations={n}"])) for n in (6, 12))
    assert short.iteration_s == pytest.approx(longer.iteration_s, rel=0.15)
    assert short.staleness_use.max == longer.staleness_use.max


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_makes_a_plan(path: Path) -> None:
    plan = plan_of(load(path))
    assert plan.replicas * plan.profile.gpus_per_replica + plan.train_gpus == (load(path).gpus or 0)


@pytest.mark.parametrize(
    ("overrides", "train_gpus", "replicas"),
    [
        (["gpus=1024"], 768, 32),
        (["gpus=1024", "schedule=one_step"], 256, 96),
        (["gpus=1024", "schedule=partial"], 640, 48),
        (["gpus=1024", "schedule=sync"], 1024, 128),
        (["gpus=1024", "schedule=sync", "simulation.colocated=false"], 512, 64),
        (["gpus=1024", "train.gpus=512"], 512, 64),
        (["gpus=1024", "rollout.replicas=16"], 896, 16),
        (["gpus=4096"], 3072, 128),
        (["gpus=400", "schedule=stream"], 152, 31),
    ],
)
def test_the_paper_s_splits_are_built_in(overrides: list[str], train_gpus: int, replicas: int) -> None:
    plan = plan_of(load(FOLDER / "paper" / "72b.toml", overrides))
    assert (plan.train_gpus, plan.replicas) == (train_gpus, replicas)
    assert plan.colocated == (train_gpus == 1024)
    assert plan.settings.max_staleness == {"sync": 0, "one_step": 1, "stream": 1}.get(plan.settings.schedule)


@pytest.mark.parametrize(("gpus", "samples"), [(32, 1024), (64, 1024), (128, 768), (256, 384), (512, 192)])
def test_a_replica_takes_its_share_of_one_and_a_half_batches(gpus: int, samples: int) -> None:
    settings = plan_of(load(FOLDER / "paper" / "32b.toml", [f"gpus={gpus}"])).settings
    assert settings.groups_in_flight * settings.group_size == samples


@pytest.mark.parametrize("gpus", [64, 1024])
@pytest.mark.parametrize("name", ["72b", "32b"])
def test_configs_scale_by_gpus(name: str, gpus: int) -> None:
    path = next(p for p in CONFIGS if p.stem == name)
    plan = plan_of(load(path, [f"gpus={gpus}", f"train.gpus={gpus // 4}"]))
    assert plan.train_gpus == gpus // 4
    assert plan.replicas == gpus * 3 // 4 // plan.profile.gpus_per_replica
    shared = plan_of(load(path, [f"gpus={gpus}", "schedule=sync", "simulation.colocated=true"]))
    assert (shared.train_gpus, shared.replicas) == (gpus, gpus // shared.profile.gpus_per_replica)


def test_time_runs_faster_by_the_scale_of_the_config() -> None:
    """The profile's times alone, as in a real run: what messages take, and how often repack looks, stays."""
    plain, fast = plan_of(load(TOY)), plan_of(load(TOY, ["simulation.time_scale=20"]))
    assert fast == replace(plain, profile=plain.profile.faster(20))


def test_a_small_run_of_a_large_profile() -> None:
    path = next(p for p in CONFIGS if p.stem == "72b")
    small = ["gpus=64", "iterations=4", "train.groups_per_batch=16", "max_staleness=4"]
    found = simulate(load(path, small))
    assert found.staleness_use.max <= 4
    assert 0 < found.latency_mean_s < found.latency_max_s
    assert 0 < found.kv_utilization_mean < 1 and 0 < found.trainer_busy_fraction <= 1


def test_shared_gpus_need_sync() -> None:
    with pytest.raises(InvalidConfig, match='schedule = "sync"'):
        load(TOY, ["simulation.colocated=true"])


def test_a_config_with_a_model_is_not_simulated(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('iterations = 1\nmodel.path = "m"\ndata.train = "d.jsonl"\nreward.functions = ["r.py:f"]\n')
    with pytest.raises(ConfigError, match="only emulated runs can be simulated"):
        simulate(load(path))


# ---------------------------------------------------------------- command


def test_json_is_one_object_with_the_keys_of_the_contract(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for _ in range(2):
        assert laminar(monkeypatch, "simulate", TOY, "--json") == 0
        out, err = capsys.readouterr()
        assert out.count("\n") == 1 and len(err.splitlines()) == 12
        said.append(json.loads(out))
        assert set(said[-1]) == KEYS
        assert set(said[-1]["staleness_use"]) == {"mean", "max", "histogram"}
        del said[-1]["wall_s"]
    assert said[0] == said[1]


def test_text_and_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert laminar(monkeypatch, "simulate", TOY, "schedule=sync", "simulation.colocated=true") == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("throughput ")
    assert laminar(monkeypatch, "simulate") == 2
    assert laminar(monkeypatch, "simulate", TOY, "simulation.profile=gone") == 2
    assert laminar(monkeypatch, "check", TOY, "schedule=sync", "simulation.colocated=true") == 2
    assert "laminar simulate" in capsys.readouterr().err


def test_a_timeline_and_a_picture_beside_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    timeline, plot = tmp_path / "toy.json", tmp_path / "toy.svg"
    assert laminar(monkeypatch, "simulate", TOY, "--timeline", timeline, "--plot", plot, "--json") == 0
    assert json.loads(capsys.readouterr().out)["repack_moves"] > 0
    assert json.loads(timeline.read_text())["traceEvents"]
    titles = [e.text for e in ElementTree.parse(plot).iter() if e.get("font-weight") == "bold"]
    assert titles == ["throughput, tokens/s", "staleness at use, versions", "KV caches, % full"]


def test_a_file_that_can_t_be_written_is_said_before_the_simulation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert laminar(monkeypatch, "simulate", TOY, "--plot", tmp_path / "gone" / "toy.svg") == 2
    out, err = capsys.readouterr()
    assert out == "" and f"fix: mkdir -p {tmp_path / 'gone'}" in err and "iteration" not in err


def test_history_is_of_every_iteration(tmp_path: Path) -> None:
    world, found = simulate_world(load(TOY))
    steps = history(world, 12)
    assert len(steps) == 12 and all(a.ended_s == b.began_s for a, b in pairwise(steps))
    assert fmean(s.throughput_tok_s for s in steps[6:]) == pytest.approx(found.throughput_tok_s)
    assert fmean(s.staleness_use for s in steps[6:]) == pytest.approx(found.staleness_use.mean)
