"""A data store from a config: dataset, tokenizer, sampler, database."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

from laminar.config import Config
from laminar.data.emulated import EmulatedPrompts
from laminar.data.prompts import PromptSource, context_tokens, load_tokenizer, prompt_limit
from laminar.data.rows import load_rows
from laminar.data.samplers import make_order
from laminar.data.store import DataStore
from laminar.errors import StorageError
from laminar.run_folder import RunFolder, write_atomic, writing
from laminar.types import Settings


def open_store(
    folder: RunFolder, config: Config, settings: Settings, clock: Callable[[], float], anew: bool = True
) -> DataStore:
    """Open the run's store for writing and hold the run's lock for the life of this process.

    Raises StorageError if another process has it, DataError or ModelError for what the config names.
    """
    _lock(folder.lock)
    order = make_order(config.data.sampler)
    if config.emulated:
        prompts = EmulatedPrompts(config.profile.prompt_tokens)
        return DataStore(folder.path, settings, prompts, None, order, clock, anew)
    tokenizer = load_tokenizer(config.model_path)
    model_config = json.loads((config.model_path / "config.json").read_text(encoding="utf-8"))
    limit = prompt_limit(config.data, context_tokens(model_config), config.rollout.max_new_tokens)

    def source(spec: str) -> PromptSource:
        return PromptSource(load_rows(spec, folder.path), tokenizer, config.data, limit, config.seed, spec)

    training = source(config.train_data)
    evaluation = source(config.data.eval) if config.data.eval is not None else None
    write_atomic(folder.first_prompt, training.first_rendered())
    return DataStore(folder.path, settings, training, evaluation, order, clock, anew)


def _lock(path: Path) -> None:
    with writing(path):
        file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise StorageError(
            "another process is using this run", where=str(path.parent), fix="wait until it ends, or stop it"
        ) from None
    _held_locks.append(file)


_held_locks: list[object] = []
