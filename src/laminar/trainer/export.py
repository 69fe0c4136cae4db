"""A trained model as a folder that transformers loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from laminar.errors import ModelError, StorageError
from laminar.trainer.checkpoint import CONFIG, MODEL
from laminar.trainer.checkpoint_folder import is_whole


def export_model(source: PreTrainedModel | Path, start_folder: Path, out: Path) -> None:
    """Write a model in fp32 with the tokenizer and generation settings of the model it was trained from.

    `AutoModelForCausalLM.from_pretrained(out)` and `AutoTokenizer.from_pretrained(out)` load it. What was in
    `out` before is replaced at once, when the new folder is complete.

    Args:
        source: the model, or the folder of a checkpoint, which is enough by itself
        start_folder: the folder of `model.path`
        out: folder to make

    Raises:
        ModelError: the checkpoint, or the tokenizer's folder, can't be used
        StorageError: `out` can't be written
    """
    model = _from_checkpoint(source) if isinstance(source, Path) else source
    try:
        tokenizer = AutoTokenizer.from_pretrained(start_folder)
    except (OSError, ValueError) as error:
        raise ModelError("the tokenizer can't be loaded", where=str(start_folder), got=str(error)) from error
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        _save(model, temporary)
        tokenizer.save_pretrained(temporary)
        if (settings := start_folder / "generation_config.json").is_file():
            shutil.copyfile(settings, temporary / settings.name)
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    except (OSError, SafetensorError) as error:
        raise StorageError("the model can't be written", where=str(out), got=str(error)) from error


def _save(model: PreTrainedModel, folder: Path) -> None:
    """`save_pretrained` refuses some generation settings that models ship with, so those are copied as they are."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = own
    (folder / "generation_config.json").unlink(missing_ok=True)


def _from_checkpoint(path: Path) -> PreTrainedModel:
    if not is_whole(path):
        raise ModelError(
            "this is no whole checkpoint", where=str(path), expected=f"a folder with {CONFIG} and {MODEL} as written"
        )
    config = AutoConfig.from_pretrained(path)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(load_file(path / MODEL), strict=False)  # tied weights are not in the file
    model.tie_weights()
    return model
