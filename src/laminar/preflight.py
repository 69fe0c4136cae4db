"""What can be known of a run before anything slow starts: the model folder, the data, the reward functions.

Imports no torch, no transformers and no Ray, and loads no weights; it does import the user's own modules.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from laminar.config import Config, InvalidConfig
from laminar.data.prompts import check_prompt
from laminar.data.rewards import check_function, load_functions
from laminar.data.rows import first_row
from laminar.data.samplers import SAMPLERS
from laminar.data.verl import is_verl_row
from laminar.errors import ConfigError, DataError, RewardError, UserError
from laminar.model_folder import has_chat_template, model_problems
from laminar.user_code import load_function


def check(config: Config) -> None:
    """Raises InvalidConfig with everything that `find_problems` finds."""
    if problems := find_problems(config):
        raise InvalidConfig(problems)


def find_problems(config: Config) -> list[UserError]:
    """All that would keep a run from starting, as far as files and functions can tell."""
    others = [*_user_code_problems(config), *_tracker_problems(config)]
    if config.emulated:
        return [*_emulation_problems(config), *others]
    return [*model_problems(config), *_data_problems(config), *others]


def _user_code_problems(config: Config) -> Iterator[UserError]:
    named = {
        "data.sampler": None if config.data.sampler in SAMPLERS else config.data.sampler,
        "train.advantage": config.train.advantage,
        "train.loss": config.train.loss,
    }
    for key, spec in named.items():
        if spec is not None:
            try:
                load_function(spec, key)
            except UserError as error:
                yield error


def _tracker_problems(config: Config) -> Iterator[UserError]:
    for name in config.report_to:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            yield ConfigError(
                f"the package `{name}` is not installed", where="report_to", fix=f"pip install 'laminar-rl[{name}]'"
            )


def _emulation_problems(config: Config) -> Iterator[UserError]:
    if config.simulation.colocated:
        yield ConfigError(
            "real processes can't share their GPUs",
            where="simulation.colocated",
            got="true",
            fix="use `laminar simulate`, or remove the key",
        )


def _data_problems(config: Config) -> Iterator[UserError]:
    """Datasets and reward functions: the first row must have what the functions ask for."""
    rows: dict[str, dict[str, Any]] = {}
    for key, spec in (("data.train", config.train_data), ("data.eval", config.data.eval)):
        if spec is not None:
            try:
                rows[key] = first_row(spec, Path.cwd())
                _check_first_prompt(config, rows[key], key)
            except UserError as error:
                yield error
    if config.reward.functions is None:
        yield _no_reward(any(map(is_verl_row, rows.values())))
        return
    try:
        functions = load_functions(config.reward_functions, Path.cwd())
    except UserError as error:
        yield error
        return
    for row in rows.values():
        for name, function in functions.items():
            try:
                check_function(name, function, row, config.reward.kwargs.keys(), config.data.prompt_column)
            except UserError as error:
                yield error


def _no_reward(is_verl: bool) -> RewardError:
    what = "missing: only emulated runs do without"
    fix = 'write one, as in functions = ["reward.py:exact_match"] under [reward]'
    if is_verl:
        what = "missing: these are rows of verl, but verl's built-in scorers are not included"
        fix = 'copy the scorer that you use, as in functions = ["reward.py:compute_score"] under [reward]'
    return RewardError(what, where="reward.functions", expected="a list of functions that score responses", fix=fix)


def _check_first_prompt(config: Config, row: Mapping[str, Any], key: str) -> None:
    prompt = check_prompt(dict(row), config.data.prompt_column, f"first row of {key}")
    folder = config.model_path
    has_template = not (folder / "tokenizer_config.json").is_file() or has_chat_template(folder)
    what = "chat messages" if not isinstance(prompt, str) else "text beside data.system_prompt"
    if not has_template and (not isinstance(prompt, str) or config.data.system_prompt is not None):
        raise DataError(
            f"the prompt is {what}, but the model's tokenizer has no chat template",
            where=f"first row of {key}",
            fix="use the model of a chat, or give prompts as text without a system prompt",
        )
