"""`laminar bench engine`: that both sides do the same work, and what is printed of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from laminar.bench.machine import Machine
from laminar.cli import app
from laminar.errors import ModelError

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder; every token of its vocabulary but one ends a text, which the benchmark must not mind."""
    monkeypatch.setattr(Machine, "measure", lambda dtype, clock: Machine(1e11, 1e10))
    LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=list(range(1, 64)))).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_json_has_a_ratio_and_the_parts_of_a_round(model: Path, dtype: str) -> None:
    options = ["--model", str(model), "--slots", "3", "--group-size", "2", "--prompt-tokens", "5", "--new-tokens", "4"]
    options += ["--dtype", dtype, "--against", "transformers", "--json"]
    result = CliRunner().invoke(app, ["bench", "engine", *options])
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert (row["tokens"], row["dtype"], row["model"]) == (12, dtype, str(model))
    assert set(row["parts"]) == {"prefill", "attention", "linear", "sampling", "other"}
    assert all(part["seconds"] > 0 for part in row["parts"].values())
    assert [name for name, part in row["parts"].items() if part["roofline"] is None] == ["other"]
    assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["against"]["tokens_per_s"])


def test_a_table_without_json(model: Path) -> None:
    options = ["--model", str(model), "--slots", "2", "--prompt-tokens", "3", "--new-tokens", "2"]
    result = CliRunner().invoke(app, ["bench", "engine", *options])
    assert result.exit_code == 0, result.output
    assert "engine " in result.stdout
    assert "% of it is the roofline" in result.stdout
    assert "transformers" not in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--model", "nowhere"], "no model is there"), (["--new-tokens", "60"], "prompts and new tokens need 92 tokens")],
)
def test_a_mistake_is_said(model: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", "--model", str(model), *options])
    assert isinstance(result.exception, ModelError)
    assert message in str(result.exception)


def test_a_bound_is_the_larger_of_arithmetic_and_bytes() -> None:
    machine = Machine(matmul_flops_per_s=10.0, memory_bytes_per_s=5.0)
    assert machine.bound_s(flops=20.0, num_bytes=5.0) == 2.0
    assert machine.bound_s(flops=10.0, num_bytes=15.0) == 3.0
