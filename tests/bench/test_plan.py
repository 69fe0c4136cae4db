"""`laminar bench plan`: what it prints, and that it measures the same fleet every time."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from laminar.bench.plan import fleet, measure
from laminar.cli import app


def test_json_has_the_size_the_time_and_the_moves() -> None:
    result = CliRunner().invoke(app, ["bench", "plan", "--replicas", "64", "--json"])
    assert result.exit_code == 0
    row = json.loads(result.stdout)
    assert set(row) == {"replicas", "seconds", "moves"}
    assert row["replicas"] == 64
    assert row["seconds"] >= 0
    assert 0 < row["moves"] < 64


def test_a_sentence_without_json() -> None:
    result = CliRunner().invoke(app, ["bench", "plan", "--replicas", "8"])
    assert result.exit_code == 0
    assert result.stdout.startswith("8 replicas: ")


def test_no_replicas_is_bad_usage() -> None:
    assert CliRunner().invoke(app, ["bench", "plan", "--replicas", "0"]).exit_code == 2


def test_the_same_fleet_every_time() -> None:
    assert fleet(32, seed=1) == fleet(32, seed=1) != fleet(32, seed=2)
    assert measure(32).moves == measure(32).moves
