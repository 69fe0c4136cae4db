"""A profile from a run folder gives back the times and lengths by which the run was made."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from laminar import cli
from laminar.config import dump, load
from laminar.control import codec
from laminar.data import schema
from laminar.errors import ConfigError
from laminar.profiling import _begins, as_toml, fit, measure, overrides
from laminar.run_folder import RunFolder
from laminar.sim.simulate import plan_of, simulate
from laminar.sim.world import World
from laminar.timing import load_profile
from tests.runs import make_run

TOY = Path(__file__).resolve().parents[1] / "configs" / "simulated" / "toy.toml"
KEYS = ["iterations=40", "rollout.kv_tokens=100000"]
"""Long enough to measure, and nobody is preempted, which a measurement does not see."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """What a run of the toy config leaves, made in simulated time."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.create()
    config = load(TOY, KEYS)
    folder.config.write_text(dump(config))
    world = World(plan_of(config), record=True)
    world.run()
    head = {"settings": asdict(world.settings)}
    rows = [head, *(codec.encode_record(record) for record in world.records or ())]
    (folder.events / "000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with closing(schema.connect(folder.database)) as db:
        groups = list(world.store.groups.values())
        schema.save_groups(db, groups)
        schema.save_samples(db, (sample for group in groups for sample in group.samples))
        db.execute("UPDATE groups SET prompt_tokens = 10")
        db.execute("UPDATE samples SET finish_reason = 'stop' WHERE state = 'trained'")
    profile = config.profile
    with folder.metrics.open("w") as file:
        for (before, after), iteration in zip(pairwise(world.marks), world.store.iterations, strict=True):
            train_s = profile.train_step_s(iteration.tokens, 2, config.train_gpus) - profile.train_s_per_iteration
            row = {
                "iteration_s": after.time - before.time,
                "train_s": train_s,
                "publish_stall_s": profile.publish_stall_s,
                "num_tokens": iteration.tokens,
            }
            beside = row["publish_stall_s"] + train_s + profile.train_s_per_iteration
            row["trainer_wait_s"] = max(0.0, row["iteration_s"] - beside)
            file.write(json.dumps(row) + "\n")
    return folder


def test_what_the_run_was_made_by_is_found_again(folder: RunFolder) -> None:
    found, toy = measure(folder).profile, load_profile("toy")
    for name, tolerance in (
        ("step_s", 0.1),
        ("step_s_per_sequence", 0.1),
        ("train_tokens_per_s_per_gpu", 0.01),
        ("train_s_per_mini_batch", 0.01),
        ("train_s_per_iteration", 0.05),
        ("publish_stall_s", 0.01),
        ("correlation", 0.25),
    ):
        assert getattr(found, name) == pytest.approx(getattr(toy, name), rel=tolerance), name
    assert found.decode_step_s(8, 8 * 40) == pytest.approx(toy.decode_step_s(8, 8 * 40), rel=0.05)
    assert found.load_weights_s == pytest.approx(toy.load_weights_s, abs=0.1)
    assert found.reward_s == pytest.approx(toy.reward_s, abs=0.1)
    quantiles = dict(found.response_quantiles)
    assert quantiles[0.5] == pytest.approx(50, rel=0.1) and quantiles[1.0] <= 200


def test_a_simulation_with_the_profile_is_as_fast_as_the_run(folder: RunFolder, tmp_path: Path) -> None:
    measured, path = measure(folder), tmp_path / "mine.toml"
    path.write_text(as_toml(measured, folder))
    config = load(folder.config, overrides(load(folder.config), str(path), measured.iterations))
    assert config.profile.step_s == pytest.approx(measured.profile.step_s)
    assert simulate(config).throughput_tok_s == pytest.approx(measured.throughput_tok_s, rel=0.1)


def test_the_command_says_what_comes_next(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def laminar(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["laminar", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0)

    path = tmp_path / "mine.toml"
    assert laminar("profile", folder.path, "-o", path) == 0
    (last,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next")]
    assert laminar(*last.split()[2:]) == 0
    assert laminar("plan", *last.split()[3:], "--gpus", 4) == 0
    capsys.readouterr()
    assert laminar("profile", tmp_path, "-o", path) == 2 and "not the folder of a run" in capsys.readouterr().err
    assert laminar("profile", folder.path, "-o", tmp_path / "gone" / "x.toml") == 2
    assert "fix: mkdir -p" in capsys.readouterr().err


def test_a_run_that_is_too_short(project: Path, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.config.write_text(dump(load(project / "config.toml")))
    with pytest.raises(ConfigError, match="too short a run to measure\n  expected: at least 3 iterations\n  got: 2"):
        measure(folder)


def test_a_run_with_a_model_becomes_one_that_can_be_simulated(project: Path, tmp_path: Path) -> None:
    evaluated = [f"data.eval={project}/build/rows.jsonl", "eval.every=5", "eval.before_train=false"]
    config = load(project / "config.toml", ["iterations=none", "data.epochs=2", *evaluated])
    path = tmp_path / "mine.toml"
    toy = Path(cli.__file__).parent / "profiles" / "toy.toml"
    path.write_text(toy.read_text())
    (tmp_path / "config.toml").write_text(dump(config))
    planned = load(tmp_path / "config.toml", overrides(config, str(path), 7))
    assert planned.emulated and (planned.iterations, planned.train_gpus) == (7, 1)
    plan_of(planned)


# ---------------------------------------------------------------- fits


def test_a_fit_has_no_negative_coefficients() -> None:
    table = np.random.default_rng(0).uniform(1, 5, (40, 3))
    assert fit(table, table @ [2.0, 0.5, 3.0]) == pytest.approx([2.0, 0.5, 3.0])
    two, none, three = fit(table, table @ [2.0, -0.5, 3.0])
    assert none == 0.0 and two > 0 and three > 0
    assert fit(table, -table[:, 0]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("lengths", "places", "begins"),
    [([3, 1, 2], 3, [0, 0, 0]), ([3, 1, 2], 2, [0, 0, 1]), ([3, 1, 2, 9], 2, [0, 0, 1, 3]), ([2, 2], 1, [0, 2])],
)
def test_sequences_begin_as_places_become_free(lengths: list[int], places: int, begins: list[int]) -> None:
    assert _begins(lengths, places) == begins
