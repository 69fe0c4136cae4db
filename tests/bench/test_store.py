"""`laminar bench store` in small: it publishes, pulls, stops and kills, and says what came of it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from laminar.bench.store import parse_size
from laminar.cli import app
from laminar.errors import ConfigError

OPERATIONS = {"publish", "pull"}
CIRCUMSTANCES = ("slow_reader", "killed_reader")


def test_json_has_all_ratios_and_nothing_grows() -> None:
    result = CliRunner().invoke(
        app, ["bench", "store", "--size", "1MB", "--readers", "2", "--versions", "10", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0
    row = json.loads(result.stdout)
    assert row["bytes"] == pytest.approx(1e6, rel=0.2)
    assert (row["readers"], row["slots"], row["versions"]) == (2, 7, 10)
    names = OPERATIONS | {f"{name}_{when}" for name in OPERATIONS for when in CIRCUMSTANCES}
    assert set(row["ratios"]) == names | {"publish_cast", "prepack"}
    assert all(0 < ratio["median"] <= ratio["worst"] and ratio["cpu"] > 0 for ratio in row["ratios"].values())
    assert (row["growth"]["shared_bytes"], row["growth"]["files"]) == (0, 0)


def test_bad_usage() -> None:
    assert CliRunner().invoke(app, ["bench", "store", "--readers", "0"]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "size"), [("1.2GB", 1_200_000_000), ("600 mb", 600_000_000), ("4kB", 4_000), ("512", 512)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "0", "-1MB", "1..2GB", "1 TB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(text)
