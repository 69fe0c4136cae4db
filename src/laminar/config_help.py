"""What to say about a config that can't be used: expected values, names of other frameworks, capabilities."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from laminar.errors import ConfigError

PEER_NAMES: dict[str, str] = {
    "model_name_or_path": "model.path",
    "hf_checkpoint": "model.path",
    "pretrain": "model.path",
    "train_files": "data.train",
    "train_dataset": "data.train",
    "prompt_data": "data.train",
    "val_files": "data.eval",
    "eval_dataset": "data.eval",
    "num_train_epochs": "data.epochs",
    "total_epochs": "data.epochs",
    "num_epochs": "data.epochs",
    "prompt_key": "data.prompt_column",
    "input_key": "data.prompt_column",
    "max_prompt_length": "data.max_prompt_tokens",
    "reward_funcs": "reward.functions",
    "reward_function": "reward.functions",
    "custom_reward_function": "reward.functions",
    "reward_weights": "reward.weights",
    "reward_kwargs": "reward.kwargs",
    "max_completion_length": "rollout.max_new_tokens",
    "response_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "gpu_memory_utilization": "rollout.kv_tokens",
    "num_engines": "rollout.replicas",
    "num_generations": "train.group_size",
    "n": "train.group_size",
    "n_samples_per_prompt": "train.group_size",
    "rollouts_per_example": "train.group_size",
    "train_batch_size": "train.groups_per_batch",
    "rollout_batch_size": "train.groups_per_batch",
    "global_batch_size": "train.groups_per_batch",
    "batch_size": "train.groups_per_batch",
    "ppo_mini_batch_size": "train.num_mini_batches",
    "mini_batch_size": "train.num_mini_batches",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "per_device_train_batch_size": "train.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "train.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "train.micro_batch_tokens",
    "learning_rate": "train.lr",
    "lr_warmup_steps": "train.warmup_steps",
    "lr_scheduler_type": "train.lr_schedule",
    "lr_decay_style": "train.lr_schedule",
    "num_warmup_steps": "train.warmup_steps",
    "grad_clip": "train.max_grad_norm",
    "epsilon": "train.clip_ratio_low",
    "clip_ratio": "train.clip_ratio_low",
    "eps_clip": "train.clip_ratio_low",
    "epsilon_high": "train.clip_ratio_high",
    "eps_clip_high": "train.clip_ratio_high",
    "beta": "train.kl_loss_coef",
    "kl_coef": "train.kl_loss_coef",
    "tis_imp_ratio_cap": "train.is_cap",
    "vllm_importance_sampling_cap": "train.is_cap",
    "adv_estimator": "train.algorithm",
    "loss_type": "train.loss_agg_mode",
    "filter_groups": "train.drop_zero_variance",
    "dynamic_sampling": "train.drop_zero_variance",
    "mask_truncated_completions": "train.mask_truncated",
    "save_freq": "train.checkpoint_every",
    "save_steps": "train.checkpoint_every",
    "save_interval": "train.checkpoint_every",
    "test_freq": "eval.every",
    "eval_steps": "eval.every",
    "eval_interval": "eval.every",
    "val_before_train": "eval.before_train",
    "max_steps": "iterations",
    "total_training_steps": "iterations",
    "max_off_policy_steps": "max_staleness",
    "max_async_level": "max_staleness",
    "max_head_offpolicyness": "max_staleness",
    "staleness_threshold": "max_staleness",
    "random_seed": "seed",
    "logger": "report_to",
}
"""Names in TRL, verl, OpenRLHF, AReaL, slime and prime-rl, and what the same thing is called here."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A test of a key's value, with its words for the docs."""

    words: str
    holds: Callable[[object], bool]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A row of the capability table: a key with a value that this version can't serve."""

    key: str
    value: Condition
    why: str
    remedy: str


def _is(*values: str) -> Condition:
    return Condition(", ".join(f'"{value}"' for value in values), lambda value: value in values)


_SET = Condition("any", lambda value: value not in (None, "none", False, [], {}))
_BELOW_ONE = Condition("< 1", lambda value: isinstance(value, int | float) and 0 < value < 1)
_POSITIVE = Condition("> 0", lambda value: isinstance(value, int) and value > 0)

_LATER = "this version does not have it"
_BIASED = "training on a cut distribution is biased: the trainer's log-probs are of the full one"
_WHOLE_MODEL = "this version trains the whole model, no adapters"
_GRPO = 'use algorithm = "grpo"'

CAPABILITIES: tuple[Unsupported, ...] = (
    Unsupported("rollout.engine", _is("vllm", "sglang"), _LATER, 'use engine = "torch"'),
    Unsupported("rollout.top_p", _BELOW_ONE, _BIASED, "use top_p = 1, and temperature to sharpen the distribution"),
    Unsupported("rollout.top_k", _POSITIVE, _BIASED, "use top_k = 0, and temperature to sharpen the distribution"),
    Unsupported("train.backend", _is("fsdp", "fsdp2", "megatron", "deepspeed"), _LATER, 'use backend = "torch"'),
    Unsupported(
        "train.algorithm",
        _is("dapo"),
        "DAPO is GRPO with other options",
        f"{_GRPO} with drop_zero_variance = true and clip_ratio_high = 0.28",
    ),
    Unsupported(
        "train.algorithm",
        _is("dr_grpo"),
        "Dr. GRPO is GRPO with other options",
        f'{_GRPO} with scale_rewards = "none" and loss_agg_mode = "seq-mean-token-sum-norm"',
    ),
    Unsupported("train.algorithm", _is("ppo", "gae", "rloo", "reinforce", "gspo", "cispo"), _LATER, _GRPO),
    Unsupported("train.use_peft", _SET, _WHOLE_MODEL, "remove the key"),
    Unsupported("train.lora_rank", _SET, _WHOLE_MODEL, "remove the key"),
    Unsupported("model.lora_rank", _SET, _WHOLE_MODEL, "remove the key"),
)
"""What this version does not support, why, and what to do instead. The only such list."""


def unsupported(data: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Problems that the capability table finds in raw config data."""
    for row in CAPABILITIES:
        section, _, name = row.key.rpartition(".")
        table = data.get(section) if section else data
        if isinstance(table, Mapping) and name in table and row.value.holds(table[name]):
            yield ConfigError(row.why, where=row.key, got=shown(table[name]), fix=row.remedy)


def leaves(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """All keys of the config by their dotted names, in order."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        if section := section_model(field):
            found |= {f"{name}.{inner}": leaf for inner, leaf in section.model_fields.items()}
        else:
            found[name] = field
    return found


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section, else None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def accepts_none(field: FieldInfo) -> bool:
    """Whether `none` is a value of the field."""
    return NoneType in get_args(field.annotation)


def _kinds(field: FieldInfo) -> list[Any]:
    """The types of a field, that of no value apart."""
    if get_origin(field.annotation) in (UnionType, Union):
        return [kind for kind in get_args(field.annotation) if kind is not NoneType]
    return [field.annotation]


def expectation(field: FieldInfo) -> str:
    """The values a field takes, in words: `an integer >= 1, or none`."""
    if section_model(field):
        return "a section"
    text = " or ".join(map(_kind_in_words, _kinds(field)))
    for limit in field.metadata:
        match limit:
            case Ge(bound):
                text += f" >= {bound}"
            case Gt(bound):
                text += f" > {bound}"
            case Le(bound):
                text += f" and <= {bound}" if " >" in text else f" <= {bound}"
            case MinLen(least):
                text += f", at least {least}"
    return f"{text}, or none" if accepts_none(field) else text


def _kind_in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(shown(choice) for choice in get_args(kind))
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        return "a list of " + (
            {str: "strings", float: "numbers"}.get(item) or _kind_in_words(item).removeprefix("one of ")
        )
    if get_origin(kind) is dict:
        return "a table"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string", Path: "a path"}[kind]


def shown(value: object) -> str:
    """A value as a TOML file would have it, cut when long."""
    text = "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def explain(error: ValidationError, model: type[BaseModel]) -> list[ConfigError]:
    """One problem for each thing that pydantic refused. A value is refused by each of the types it might have."""
    problems = [_explain_one(details, model) for details in error.errors(include_url=False)]
    return list({str(problem): problem for problem in problems}.values())


def _explain_one(details: ErrorDetails, model: type[BaseModel]) -> ConfigError:
    parts = [str(part) for part in details["loc"]]
    known = model.model_fields | leaves(model)
    if details["type"] == "extra_forbidden":
        return _unknown_key(".".join(parts), details["input"], model)
    key = ".".join(parts[:2]) if parts[0] in known and section_model(known[parts[0]]) else parts[0]
    field = known[key]
    if details["type"] == "missing":
        section = section_model(field)
        add = f"add a section [{key}]" if section else f"add {key.rpartition('.')[2]} to [{key.rpartition('.')[0]}]"
        return ConfigError("missing", where=key, expected=expectation(field), fix=f"{add}: {_purpose(field)}")
    place = parts[key.count(".") + 1 :] if len(_kinds(field)) == 1 else []
    return ConfigError(
        f"item {place[0]} can't have this value" if place else "can't have this value",
        where=key,
        expected=expectation(field),
        got=shown(details["input"]),
        fix=_purpose(field) if section_model(field) else _closest_choice(field, details["input"]),
    )


def _purpose(field: FieldInfo) -> str:
    if section := section_model(field):
        required = [name for name, inner in section.model_fields.items() if inner.is_required()]
        return "it needs " + ", ".join(required)
    return field.description or ""


def _closest_choice(field: FieldInfo, value: object) -> str | None:
    kinds = [get_args(kind)[0] if get_origin(kind) is list else kind for kind in _kinds(field)]
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    close = difflib.get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else []
    return f"did you mean {shown(close[0])}?" if close else None


def _unknown_key(key: str, value: object, model: type[BaseModel]) -> ConfigError:
    what = "unknown section" if isinstance(value, Mapping) and "." not in key else "unknown key"
    fix = suggestion(key, model) or _suggestions_within(value) or "see docs/config.md for all keys"
    return ConfigError(what, where=key, got=shown(value), fix=fix)


def _suggestions_within(value: object) -> str | None:
    """What the keys of a peer's section, however deep, are called here."""
    names = [name for name in _leaf_names(value) if name in PEER_NAMES]
    return "; ".join(f"{name} is called {PEER_NAMES[name]} here" for name in names) or None


def _leaf_names(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaf_names(inner) if isinstance(inner, Mapping) else [str(name)]


def suggestion(key: str, model: type[BaseModel]) -> str | None:
    """What the writer of an unknown key probably meant.

    In order: our key in another section, a peer's name, a misspelt section, a misspelt key.
    """
    section, _, name = key.rpartition(".")
    known = leaves(model)
    by_name: dict[str, list[str]] = {}
    for dotted in known:
        by_name.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    if name in by_name:
        return f"it belongs elsewhere: {' or '.join(by_name[name])}"
    if name in PEER_NAMES:
        return f"it is called {PEER_NAMES[name]} here"
    sections = [top for top, field in model.model_fields.items() if section_model(field)]
    if not section and (close := difflib.get_close_matches(name, sections, n=1, cutoff=0.7)):
        return f"did you mean [{close[0]}]?"
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
        return f"did you mean {close[0]}?"
    if close := difflib.get_close_matches(name, by_name, n=1, cutoff=0.7):
        return f"did you mean {' or '.join(by_name[close[0]])}?"
    return None
