"""A model folder that can't be used is found by its files alone, in one message (fault 39)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from laminar.errors import ModelError
from laminar.trainer.policy import load_model
from tests.conftest import PROJECT_MODEL, write_safetensors
from tests.test_preflight import only_problem, problems


def model_folder(project: Path) -> Path:
    return project / "build" / "model"


def test_a_missing_model_folder_names_the_script_that_makes_it(project: Path) -> None:
    message = only_problem(project, f"model.path={project}/build/other")
    assert "the model folder is not there" in message and f"got: {project}/build/other" in message
    assert "fix: correct the path" in message

    (project / "prepare.py").touch()
    message = only_problem(project, f"model.path={project}/build/other")
    assert f"fix: run `python {project}/prepare.py`" in message


def test_shared_memory_that_is_too_small(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message before the start, with what would help."""
    assert problems(project) == []
    write_safetensors(model_folder(project) / "model.safetensors", {"model.norm.weight": [1000]})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    message = only_problem(project, "rollout.replicas=3")
    assert message.startswith("/dev/shm: there is no room for the weight slots in shared memory\n  expected: ")
    assert "(9 slots of 0.000 GB)\n  got: 0.000 GB free\n  fix: lower rollout.replicas or relay.spare" in message


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "can't read config.json"),
        ("model.safetensors", "has no weights\n  expected: model.safetensors or model.safetensors.index.json in"),
        ("tokenizer.json", "has no tokenizer\n  expected: one of tokenizer.json, tokenizer.model, "),
    ],
)
def test_a_model_folder_that_lacks_something(project: Path, file: str, message: str) -> None:
    (project / "build" / "model" / file).unlink()
    assert message in only_problem(project)


def test_files_that_can_not_be_read(project: Path) -> None:
    (project / "build" / "model" / "tokenizer.json").write_text("not JSON")
    assert "tokenizer.json is not valid JSON" in only_problem(project)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json holds no JSON object"),
        (json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}), 'use engine = "vllm"'),
        (json.dumps({"model_type": "bert", "architectures": ["BertModel"]}), "not a causal language model"),
    ],
)
def test_a_model_that_can_not_be_used(project: Path, text: str, message: str) -> None:
    (project / "build" / "model" / "config.json").write_text(text)
    assert message in only_problem(project)


@pytest.mark.parametrize(
    ("max_new_tokens", "max_prompt_tokens", "fits"),
    [(63, "none", True), (64, "none", False), (32, "32", True), (32, "33", False)],
)
def test_sequences_must_fit_the_model(project: Path, max_new_tokens: int, max_prompt_tokens: str, fits: bool) -> None:
    overrides = (f"rollout.max_new_tokens={max_new_tokens}", f"data.max_prompt_tokens={max_prompt_tokens}")
    found = problems(project, *overrides)
    assert found == [] if fits else "the model's 64 tokens" in found[0]


# ---------------------------------------------------------------- weights

SIZES = {
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
}
SHAPES = {
    "model.embed_tokens.weight": [10, 4],
    "model.layers.0.self_attn.q_proj.weight": [4, 4],
    "model.layers.0.self_attn.k_proj.weight": [2, 4],
    "model.layers.1.mlp.gate_proj.weight": [6, 4],
}


def write_model(project: Path, **changed: int) -> None:
    write_safetensors(model_folder(project) / "model.safetensors", SHAPES)
    (model_folder(project) / "config.json").write_text(json.dumps(PROJECT_MODEL | SIZES | changed))


@pytest.mark.parametrize(
    ("key", "value", "expected", "got"),
    [
        ("hidden_size", 8, "8 hidden size, 8 query size, 4 key size", "4 hidden size, 4 query size, 2 key size"),
        ("intermediate_size", 7, "7 intermediate size", "6 intermediate size"),
        ("num_hidden_layers", 3, "3 layers", "2 layers"),
        ("num_hidden_layers", 1, "1 layers", "2 layers"),
        ("num_key_value_heads", 2, "4 key size", "2 key size"),
        ("vocab_size", 11, "11 tokens", "10 tokens"),
    ],
)
def test_a_config_that_does_not_fit_the_weights(project: Path, key: str, value: int, expected: str, got: str) -> None:
    write_model(project)
    assert problems(project) == []
    write_model(project, **{key: value})
    message = only_problem(project)
    assert f"config.json does not fit the weights\n  expected: {expected}\n  got: {got}\n" in message


def test_weights_in_several_files(project: Path) -> None:
    write_model(project, num_hidden_layers=3)
    folder = model_folder(project)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    write_safetensors(folder / "b.safetensors", {"model.layers.2.mlp.gate_proj.weight": [6, 4]})
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problems(project) == []
    (folder / "b.safetensors").unlink()
    assert "a file of the weights is not there" in only_problem(project)


def test_weights_that_were_not_copied_to_the_end(project: Path) -> None:
    write_safetensors(model_folder(project) / "model.safetensors", SHAPES, missing_bytes=3)
    assert "the weights can't be read\n  expected: a whole safetensors file" in only_problem(project)
    (model_folder(project) / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "the weights can't be read" in only_problem(project)


def test_pickles_are_refused_unless_allowed(project: Path) -> None:
    (model_folder(project) / "model.safetensors").unlink()
    (model_folder(project) / "pytorch_model.bin").touch()
    message = only_problem(project)
    assert "the weights are pickles, and loading a pickle can run code" in message
    assert "model.allow_pickle = true" in message.partition("fix: ")[2]
    assert problems(project, "model.allow_pickle=true") == []


@pytest.mark.parametrize(
    "vocabulary", [{f"t{i}": i for i in range(11)}, [[f"t{i}", 0.0] for i in range(11)]], ids=["BPE", "unigram"]
)
def test_a_tokenizer_of_another_model(project: Path, vocabulary: object) -> None:
    write_model(project)
    (model_folder(project) / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    message = only_problem(project)
    assert "the tokenizer does not fit the model\n  expected: at most 10 tokens\n  got: 11 tokens" in message


# ---------------------------------------------------------------- what only loading can find


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A folder with a model of two layers."""
    shape = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=10, **shape)).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **keys: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def test_missing_weights_are_not_made_up(real: Path) -> None:
    change(real, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"the weights are not all there.*\n  got: no model\.layers\.2\..* and 6 more"):
        load_model(real)


def test_weights_of_other_shapes_are_a_message(real: Path) -> None:
    change(real, vocab_size=12)
    with pytest.raises(ModelError, match="the model can't be loaded"):
        load_model(real)


def test_a_pickle_is_loaded_only_if_allowed(real: Path) -> None:
    torch.save(load_model(real).state_dict(), real / "pytorch_model.bin")
    (real / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="the model can't be loaded"):
        load_model(real)
    assert load_model(real, allow_pickle=True).num_parameters() > 0
