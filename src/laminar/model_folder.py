"""What can be known of a model folder from its files, without loading a model.

The shapes of tensors are read from the headers of safetensors files, so that a config that does not fit its weights is
found before any of them is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from laminar.config import Config
from laminar.data.prompts import context_tokens
from laminar.errors import ModelError, StorageError, UserError
from laminar.rollout.families import supports
from laminar.run_folder import SHARED_MEMORY
from laminar.weights.manifest import Layout
from laminar.weights.store import check_room

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")

Shape = list[int]


def model_problems(config: Config) -> Iterator[UserError]:
    """All that would keep the model from being loaded, trained and generated with, as far as files tell."""
    folder = config.model_path
    if not folder.is_dir():
        yield ModelError(
            "the model folder is not there",
            where="model.path",
            expected="a folder with a Hugging Face causal language model (nothing is downloaded)",
            got=str(folder),
            fix=_maker(folder) or "correct the path, or download the model into a folder first",
        )
        return
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield ModelError(
            "the model folder has no tokenizer",
            where="model.path",
            expected=f"one of {', '.join(TOKENIZER_FILES)} in {folder}",
            fix=_maker(folder / "config.json") or "put the files there that `tokenizer.save_pretrained` writes",
        )
    shapes = None
    try:
        shapes = _tensor_shapes(folder, config.model.allow_pickle)
    except ModelError as error:
        yield error
    try:
        model = _read_object(folder / "config.json")
        base_vocabulary = _base_vocabulary(folder)
    except ModelError as error:
        yield error
        return
    if reason := supports(model):
        yield ModelError(reason, where="model.path", got=str(folder))
    else:
        yield from _misfits(model, shapes or {}, base_vocabulary)
    yield from _length_problems(config, model)
    yield from _memory_problems(config, shapes or {})


def _memory_problems(config: Config, shapes: Mapping[str, Shape]) -> Iterator[UserError]:
    try:
        check_room(SHARED_MEMORY, Layout(config.rollout.dtype, shapes.items()), config.num_slots)
    except StorageError as error:
        yield error


def has_chat_template(folder: Path) -> bool:
    """Whether the folder's tokenizer comes with a chat template. Raises ModelError for an unreadable file."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool(_read_object(folder / "tokenizer_config.json").get("chat_template"))


# ---------------------------------------------------------------- weights


def _tensor_shapes(folder: Path, allow_pickle: bool) -> dict[str, Shape] | None:
    """Shape of each tensor in the files that would be loaded, None if they don't say. Raises ModelError."""
    if (folder / WEIGHTS).is_file():
        names = {WEIGHTS}
    elif (folder / INDEX).is_file():
        names = set(_read_object(folder / INDEX).get("weight_map", {}).values())
    else:
        _expect_pickle(folder, allow_pickle)
        return None
    shapes: dict[str, Shape] = {}
    for name in sorted(names):
        shapes |= _header(folder / name)
    return shapes


def _expect_pickle(folder: Path, allow_pickle: bool) -> None:
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if not pickles:
        raise ModelError(
            "the model folder has no weights",
            where="model.path",
            expected=f"{WEIGHTS} or {INDEX} in {folder}",
            fix=_maker(folder / "config.json"),
        )
    if not allow_pickle:
        raise ModelError(
            "the weights are pickles, and loading a pickle can run code that is in it",
            where="model.path",
            expected=f"{WEIGHTS} in {folder}",
            got=", ".join(pickles),
            fix="convert them with `save_pretrained`, or set model.allow_pickle = true if you trust who made them",
        )


def _header(path: Path) -> dict[str, Shape]:
    """Shapes from the header of a safetensors file that is as long as it says."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 100 * 2**20)))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if path.stat().st_size != end:
            raise ValueError(f"{path.stat().st_size} bytes, of which the header speaks of {end}")
        return {name: tensor["shape"] for name, tensor in tensors.items()}
    except FileNotFoundError:
        raise ModelError("a file of the weights is not there", where="model.path", got=str(path)) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            "the weights can't be read",
            where="model.path",
            expected="a whole safetensors file",
            got=f"{path}: {error}",
            fix="copy or download it again",
        ) from None


def _misfits(model: Mapping[str, Any], shapes: Mapping[str, Shape], base_vocabulary: int) -> Iterator[UserError]:
    """Whether config.json describes these weights and this tokenizer. transformers would make up what is missing."""
    found = _facts(shapes)
    wrong = [(what, said, found[what]) for what, said in _claims(model).items() if found.get(what, said) != said]
    if wrong:
        yield ModelError(
            "config.json does not fit the weights",
            where="model.path",
            expected=", ".join(f"{said} {what}" for what, said, _ in wrong),
            got=", ".join(f"{there} {what}" for what, _, there in wrong),
            fix="take both from the same model",
        )
    vocabulary = model.get("vocab_size")
    if isinstance(vocabulary, int) and base_vocabulary > vocabulary:
        yield ModelError(
            "the tokenizer does not fit the model",
            where="model.path",
            expected=f"at most {vocabulary} tokens",
            got=f"{base_vocabulary} tokens",
            fix="take both from the same model",
        )


def _claims(model: Mapping[str, Any]) -> dict[str, int]:
    """What config.json says, in words, as far as it says it."""
    heads, hidden = model.get("num_attention_heads"), model.get("hidden_size", model.get("n_embd"))
    claims = {
        "layers": model.get("num_hidden_layers", model.get("n_layer")),
        "tokens": model.get("vocab_size"),
        "hidden size": hidden,
    }
    if model.get("model_type") in ("llama", "qwen2", "qwen3") and isinstance(heads, int) and isinstance(hidden, int):
        head = model.get("head_dim") or hidden // heads
        claims |= {
            "query size": heads * head,
            "key size": (model.get("num_key_value_heads") or heads) * head,
            "intermediate size": model.get("intermediate_size"),
        }
    return {what: said for what, said in claims.items() if isinstance(said, int)}


def _facts(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The same of the weights."""
    facts: dict[str, int] = {}
    for name, shape in shapes.items():
        if layer := re.search(r"(?:^|\.)(?:layers|h)\.(\d+)\.", name):
            facts["layers"] = max(facts.get("layers", 0), int(layer[1]) + 1)
        if len(shape) != 2:
            continue
        if name.endswith(("embed_tokens.weight", "wte.weight")):
            facts["tokens"], facts["hidden size"] = shape
        for part, what in (("q_proj", "query size"), ("k_proj", "key size"), ("gate_proj", "intermediate size")):
            if name.endswith(f".{part}.weight"):
                facts[what] = shape[0]
    return facts


# ---------------------------------------------------------------- tokenizer, lengths


def _base_vocabulary(folder: Path) -> int:
    """Tokens of tokenizer.json without those that were added; 0 if it does not say. Raises ModelError."""
    if not (folder / "tokenizer.json").is_file():
        return 0
    inner = _read_object(folder / "tokenizer.json").get("model")
    vocabulary = inner.get("vocab") if isinstance(inner, dict) else None
    if isinstance(vocabulary, dict):
        return max(vocabulary.values(), default=-1) + 1
    return len(vocabulary) if isinstance(vocabulary, list) else 0


def _length_problems(config: Config, model: Mapping[str, Any]) -> Iterator[UserError]:
    limit = context_tokens(model)
    longest = (config.data.max_prompt_tokens or 1) + config.rollout.max_new_tokens
    if limit is not None and longest > limit:
        yield ModelError(
            "the model can't take sequences this long",
            where="rollout.max_new_tokens",
            expected=f"prompt and response within the model's {limit} tokens",
            got=f"{longest} (prompt {config.data.max_prompt_tokens or 'at least 1'}, response "
            f"{config.rollout.max_new_tokens})",
            fix="lower rollout.max_new_tokens or data.max_prompt_tokens",
        )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"can't read {path.name}", where="model.path", got=str(error), fix=_maker(path)) from None
    except ValueError as error:
        raise ModelError(f"{path.name} is not valid JSON", where="model.path", got=f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} holds no JSON object", where="model.path", got=str(path))
    return value


def _maker(missing: Path) -> str | None:
    """How to make a missing file: a `prepare.py` near it."""
    for folder in missing.parents[:3]:
        if (folder / "prepare.py").is_file():
            return f"run `python {folder / 'prepare.py'}`, which makes it"
    return None
