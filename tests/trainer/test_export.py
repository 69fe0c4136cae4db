"""What is exported loads with transformers and is the trained model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from laminar.config import Config
from laminar.errors import ModelError
from laminar.trainer import checkpoint
from laminar.trainer.export import export_model
from laminar.trainer.step import TrainState, train_batch
from laminar.types import Batch


@pytest.fixture
def start_folder(tmp_path: Path) -> Path:
    """A tokenizer, and generation settings that `save_pretrained` would refuse."""
    folder = tmp_path / "start"
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", chat_template="{{ messages }}").save_pretrained(
        folder
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    return folder


def check(out: Path, model: PreTrainedModel, start_folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)  # the trainer's products round otherwise
    for (name, mine), (_, theirs) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("b a")["input_ids"] == [1, 0]
    assert tokenizer.chat_template == "{{ messages }}"
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1, 2]


def test_a_model(model: PreTrainedModel, start_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "export"
    export_model(model, start_folder, out)
    check(out, model, start_folder)


def test_a_checkpoint_alone(
    start_folder: Path, tmp_path: Path, make_config: Callable[..., Config], make_batch: Callable[..., Batch]
) -> None:
    config = make_config()
    state = TrainState.create(config)
    train_batch(state, make_batch(), config)
    path = checkpoint.save(tmp_path / "checkpoints", state)
    out = tmp_path / "export"
    out.mkdir()
    (out / "stale.txt").write_text("from before")
    export_model(path, start_folder, out)
    check(out, state.model, start_folder)
    assert not (out / "stale.txt").exists()
    assert not list(tmp_path.glob(".*"))


def test_refusals(model: PreTrainedModel, start_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no whole checkpoint"):
        export_model(tmp_path / "000003", start_folder, tmp_path / "export")
    with pytest.raises(ModelError, match="tokenizer"):
        export_model(model, tmp_path / "nowhere", tmp_path / "export")
    assert not (tmp_path / "export").exists()
