"""`GRPOConfig` and `GRPOTrainer` with TRL's names and defaults: a script written for TRL changes its import only.

What a name of TRL's means here is in one table; one that means nothing here is refused with a reason, never passed
over in silence. What TRL has no name for (`max_staleness`, `rollout.replicas`, ...) goes into `laminar={...}`.
"""

from __future__ import annotations

import difflib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from laminar.api import Dataset, RewardFunction, Trainer
from laminar.config import InvalidConfig
from laminar.config_source import set_key
from laminar.errors import ConfigError, UserError

Nested = dict[str, Any]


def _same(value: Any) -> Any:
    return value


def _one_of(values: Mapping[Any, Any]) -> Callable[[Any], Any]:
    def translate(value: Any) -> Any:
        if value not in values:
            names = ", ".join(repr(name) for name in values)
            raise ConfigError("this version does not have it", expected=f"one of {names}", got=repr(value))
        return values[value]

    return translate


def _number_or_none(value: Any) -> Any:
    return 0 if value is None else value


NAMES: Mapping[str, tuple[str, Any, Callable[[Any], Any]]] = {
    "learning_rate": ("train.lr", 1e-6, _same),
    "lr_scheduler_type": (
        "train.lr_schedule",
        "linear",
        _one_of({"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}),
    ),
    "warmup_steps": ("train.warmup_steps", 0, _same),
    "weight_decay": ("train.weight_decay", 0.0, _same),
    "max_grad_norm": ("train.max_grad_norm", 1.0, _same),
    "num_generations": ("train.group_size", 8, _same),
    "epsilon": ("train.clip_ratio_low", 0.2, _same),
    "beta": ("train.kl_loss_coef", 0.0, _same),
    "loss_type": (
        "train.loss_agg_mode",
        "dapo",
        _one_of({"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}),
    ),
    "scale_rewards": (
        "train.scale_rewards",
        "group",
        _one_of({"group": "group", True: "group", "batch": "batch", "none": "none", False: "none"}),
    ),
    "mask_truncated_completions": ("train.mask_truncated", False, _same),
    "vllm_importance_sampling_cap": ("train.is_cap", 2.0, _same),
    "bf16": ("train.dtype", False, _one_of({False: "fp32", None: "fp32", True: "bf16"})),
    "save_steps": ("train.checkpoint_every", 500, _same),
    "max_completion_length": ("rollout.max_new_tokens", 256, _same),
    "temperature": ("rollout.temperature", 1.0, _same),
    "top_p": ("rollout.top_p", 1.0, _same),
    "top_k": ("rollout.top_k", 0, _number_or_none),
    "max_prompt_length": ("data.max_prompt_tokens", None, _same),
    "chat_template_kwargs": ("data.chat_template_kwargs", None, lambda value: value or {}),
    "reward_weights": ("reward.weights", None, _same),
    "eval_on_start": ("eval.before_train", False, _same),
    "report_to": ("report_to", "none", _same),
    "seed": ("seed", 42, _same),
}
"""Name -> the key here, TRL's default, and how a value is said here."""

COMBINED: Mapping[str, Any] = {
    "epsilon_high": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "num_generations_eval": None,
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "eval_strategy": "no",
    "eval_steps": None,
}
"""Names that make keys together with others, with TRL's defaults."""

FIXED: Mapping[str, tuple[Any, ...]] = {
    "num_iterations": (1,),
    "importance_sampling_level": ("token",),
    "sync_ref_model": (False,),
    "push_to_hub": (False,),
    "adam_beta1": (0.9,),
    "adam_beta2": (0.999,),
    "adam_epsilon": (1e-8,),
    "optim": ("adamw_torch", "adamw_torch_fused"),
    "shuffle_dataset": (True, None),
    "disable_dropout": (True, False),
    "fp16": (False, None),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
}
"""Names with the only values that there are here."""

WITHOUT_EFFECT = frozenset(
    """
    cache_implementation dataloader_drop_last dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory ddp_find_unused_parameters disable_tqdm do_eval do_train ds3_gather_for_generation
    gradient_checkpointing gradient_checkpointing_kwargs log_completions log_level logging_dir logging_first_step
    logging_steps logging_strategy no_cuda num_completions_to_print overwrite_output_dir per_device_eval_batch_size
    remove_unused_columns run_name save_only_model save_strategy save_total_limit tf32 torch_compile use_cpu
    use_liger_kernel use_transformers_paged use_vllm vllm_enable_sleep_mode vllm_gpu_memory_utilization
    vllm_importance_sampling_correction vllm_max_model_length vllm_mode vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_tensor_parallel_size wandb_log_unique_prompts
    """.split()  # noqa: SIM905
)
"""Names of how TRL runs, shows and stores things, which do not change what is learned."""


class GRPOConfig:
    """TRL's arguments, with TRL's defaults.

    Args:
        output_dir: runs are kept in it, a folder each; `save_model` writes the model into it.
        laminar: keys of the config file, as nested dictionaries, that TRL has no name for.
        values: names of TRL's `GRPOConfig`.

    Raises:
        UserError: a name or value that this version has nothing for, all of them at once.
    """

    def __init__(
        self, output_dir: str | Path = "trainer_output", laminar: Mapping[str, Any] | None = None, **values: Any
    ) -> None:
        if problems := list(_problems(values)):
            raise InvalidConfig(problems)
        self.output_dir, self.laminar = Path(output_dir), laminar or {}
        defaults = {name: default for name, (_, default, _) in NAMES.items()}
        self.values: dict[str, Any] = {**defaults, **COMBINED, **values}

    def __getattr__(self, name: str) -> Any:
        if name != "values" and name in self.values:
            return self.values[name]
        raise AttributeError(name)

    def keys(self, num_rows: int | None) -> Nested:
        """The same in the words of the config file.

        Args:
            num_rows: rows of the training set; None if it does not know its length.
        """
        values = {key: translate(self.values[name]) for name, (key, _, translate) in NAMES.items()}
        samples, steps = self._batch()
        groups = samples // self.num_generations
        mini_batches = steps // self.gradient_accumulation_steps
        values |= {
            "train.groups_per_batch": groups,
            "train.num_mini_batches": mini_batches,
            "train.clip_ratio_high": self.epsilon if self.epsilon_high is None else self.epsilon_high,
            "data.overlong_prompt": "truncate",
        }
        if self.max_steps > 0:
            values["iterations"] = -(-self.max_steps // mini_batches)
        elif num_rows is not None:
            values["iterations"] = max(1, int(self.num_train_epochs * num_rows) // groups)
        else:
            raise ConfigError(
                "the training set does not know its length", where="max_steps", fix="say after how many steps to end"
            )
        if self.eval_strategy == "no":
            del values["eval.before_train"]
        else:
            by_epoch = self.eval_strategy == "epoch"
            every = (num_rows or 0) // groups if by_epoch else (self.eval_steps or 500) // mini_batches
            values |= {
                "eval.every": max(1, every),
                "eval.temperature": self.temperature,
                "eval.samples_per_prompt": self.num_generations_eval or self.num_generations,
            }
        keys: Nested = {}
        for key, value in values.items():
            set_key(keys, key, value, key)
        return _merged(keys, self.laminar)

    def _batch(self) -> tuple[int, int]:
        """Samples a batch, and forward passes of `per_device_train_batch_size` that they are."""
        steps = self.steps_per_generation
        if steps is None and self.generation_batch_size is not None:
            steps = self.generation_batch_size // self.per_device_train_batch_size
        steps = steps or self.gradient_accumulation_steps
        samples = self.generation_batch_size or self.per_device_train_batch_size * steps
        if samples % self.num_generations:
            raise ConfigError(
                "a batch is not made of whole groups",
                where="num_generations",
                expected=f"a divisor of per_device_train_batch_size x steps_per_generation, {samples}",
                got=str(self.num_generations),
            )
        if steps % self.gradient_accumulation_steps:
            raise ConfigError(
                "a batch is not made of whole optimizer steps",
                where="gradient_accumulation_steps",
                expected=f"a divisor of steps_per_generation, {steps}",
                got=str(self.gradient_accumulation_steps),
            )
        return samples, steps


class GRPOTrainer:
    """TRL's trainer: the same arguments, `train()` and `save_model()`.

    Args:
        model: a model folder.
        reward_funcs: one or several functions.
        args: None for all defaults.
        train_dataset: rows with a `prompt` column, as for `laminar.Trainer`.
        eval_dataset: used if `eval_strategy` says so, as in TRL.
        others: what TRL takes besides; refused unless it is None.

    Raises:
        UserError: what is wrong with any of it, before anything slow starts.
    """

    def __init__(
        self,
        model: str | Path,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        args: GRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if value is not None and value != (None, None):
                raise ConfigError(
                    "this version does not take it",
                    where=name,
                    fix=_OTHERS.get(name, "leave it out"),
                    got=type(value).__name__,
                )
        if not isinstance(model, str | Path):
            raise ConfigError(
                "not a model folder", where="model", got=type(model).__name__, fix="save it and give the folder"
            )
        if train_dataset is None:
            raise ConfigError("missing", where="train_dataset", expected="rows with a `prompt` column")
        self.args = args or GRPOConfig()
        evaluates = eval_dataset is not None and self.args.eval_strategy != "no"
        named = isinstance(train_dataset, str)
        num_rows = len(train_dataset) if isinstance(train_dataset, Sized) and not named else None
        self._trainer = Trainer(
            model,
            reward_funcs,
            train_dataset,
            eval_dataset if evaluates else None,
            config=self.args.keys(num_rows),
            run_dir=self.args.output_dir / time.strftime("run-%Y%m%d-%H%M%S"),
        )

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Path:
        """Train to the end. Returns the folder of the trained model. Raises RunFailed, or KeyboardInterrupt."""
        if resume_from_checkpoint:
            raise ConfigError(
                "a run is resumed by its folder", where="resume_from_checkpoint", fix="laminar train --resume RUN"
            )
        return self._trainer.train()

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the trained model, once it is there."""
        shutil.copytree(self._trainer.folder.export, output_dir or self.args.output_dir, dirs_exist_ok=True)


_OTHERS = {
    "processing_class": "save the tokenizer into the model folder",
    "peft_config": "train the whole model",
    "callbacks": "read the metrics: see report_to",
    "optimizers": "it is AdamW",
}


def _problems(values: Mapping[str, Any]) -> Iterator[UserError]:
    known = NAMES.keys() | COMBINED.keys() | FIXED.keys() | WITHOUT_EFFECT
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            yield ConfigError(
                "means nothing here" if not near else "is not a name of GRPOConfig",
                where=name,
                fix=f"did you mean {near[0]}?"
                if near
                else "leave it out, or say it in laminar={...} if there is a key for it",
            )
        elif name in FIXED and value not in FIXED[name]:
            yield ConfigError(
                "this version has one value for it", where=name, expected=repr(FIXED[name][0]), got=repr(value)
            )
        elif name in NAMES:
            try:
                NAMES[name][2](value)
            except ConfigError as problem:
                yield ConfigError(problem.what, where=name, expected=problem.expected, got=problem.got)


def _merged(keys: Nested, more: Mapping[str, Any]) -> Nested:
    """`more` wins."""
    both = dict(keys)
    for key, value in more.items():
        both[key] = _merged(keys.get(key, {}), value) if isinstance(value, Mapping) else value
    return both
