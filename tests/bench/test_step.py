"""`laminar bench step` in small: both sides learn the same, and the product puts fewer tokens through the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laminar.bench.step import Settings, make_batch, measure
from laminar.cli import app
from laminar.errors import ModelError
from laminar.trainer.packing import unpack
from tests.trainer.conftest import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(folder)
    return folder


def test_both_sides_agree(model: Path) -> None:
    shape = ["--groups", "3", "--group-size", "2", "--prompt-tokens", "4", "--longest", "40"]
    options = ["--model", str(model), *shape, "--micro-batch-tokens", "64", "--json"]
    result = CliRunner().invoke(app, ["bench", "step", *options], catch_exceptions=False)
    assert result.exit_code == 0
    row = json.loads(result.stdout)
    assert row["agrees"] and row["difference"] < 1e-4
    assert row["laminar"]["loss"] != 0 and row["laminar"]["grad_norm"] > 0
    assert row["samples"] == 6 and row["tokens"] <= row["padded_tokens"]
    assert row["speedup"] > 0 and row["memory_ratio"] > 0


def test_the_batch_has_a_long_tail_and_is_the_same_every_time(model: Path) -> None:
    settings = Settings(model, 32, 8, 4, 64, 8192, "fp32", seed=1)
    batch = make_batch(settings)
    assert batch == make_batch(settings)
    lengths = sorted(len(response) for response in unpack(batch).responses)
    assert lengths[-1] == 64 and lengths[len(lengths) // 2] < 12


def test_an_error_of_a_side_is_raised_here(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ModelError, match="can't be loaded"):
        measure(Settings(tmp_path, 2, 2, 4, 8, 64, "fp32", seed=0))
