"""The config: pydantic models two levels deep, frozen.

One key, one meaning, one default; the docs page is generated from the descriptions below. `None` means
"no value"; in a TOML file and in an override it is written `none`. Numbers that follow from others are
properties, never keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from laminar import config_emulated
from laminar.config_help import accepts_none, explain, shown, unsupported
from laminar.config_source import parse_override, read_toml, set_key, with_absolute_paths
from laminar.errors import ConfigError, UserError
from laminar.timing import Profile, load_profile
from laminar.types import TRAINER_SLOTS, Settings

Dtype = Literal["fp32", "bf16"]


class InvalidConfig(ConfigError):
    """All problems of one config, and of what it names."""

    def __init__(self, problems: Sequence[UserError]) -> None:
        self.problems = tuple(problems)
        head = [] if len(problems) == 1 else [f"{len(problems)} problems in the config"]
        super().__init__("\n".join(head + [str(problem) for problem in problems]))


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _none_is_no_value(cls, value: object, info: ValidationInfo) -> object:
        optional = info.field_name is not None and accepts_none(cls.model_fields[info.field_name])
        return None if optional and value == "none" else value


class ModelConfig(_Section):
    path: Path | None = Field(
        strict=False,
        description="Folder with a Hugging Face causal language model and its tokenizer. `none` in emulated runs only.",
    )
    allow_pickle: bool = Field(
        False, description="Load weights from `pytorch_model*.bin` too. Loading a pickle can run code that is in it."
    )


class DataConfig(_Section):
    train: str | None = Field(
        description="Training prompts: a `.jsonl` or `.parquet` file; `folder` or `folder:split` that `save_to_disk` "
        "of a Hugging Face dataset has written; `owner/name[:split]` or `owner/name/config[:split]` on the hub "
        "(`train` if no split is named); or `path/to/file.py:name` / `module:name` of a list or of a callable that "
        "returns an iterable of rows. `none` in emulated runs only."
    )
    eval: str | None = Field(None, description="Evaluation prompts, in the same forms. Needed by `[eval]`.")
    epochs: int | None = Field(None, ge=1, description="Passes over the training prompts; `none` wraps for ever.")
    prompt_column: str = Field("prompt", description="Column with the prompt: text, or chat messages.")
    system_prompt: str | None = Field(
        None,
        description="Put before each chat prompt that has no system message. A prompt that is text becomes the user's "
        "message after it.",
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Passed on to the chat template.")
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Longer prompts go by `overlong_prompt`; `none` = what fits the model beside `max_new_tokens`.",
    )
    overlong_prompt: Literal["drop", "truncate", "fail"] = Field(
        "drop", description="A prompt over the limit is dropped with a reason, cut from the left, or stops the run."
    )
    sampler: str = Field(
        "fifo",
        description="Order in which buffered groups are offered to a batch: `fifo`, or a function of yours as "
        "`path/to/file.py:function` or `module:function`.",
    )
    last_batch: Literal["train", "drop"] = Field(
        "train", description="What happens to the groups that are left, fewer than a batch, when the prompts end."
    )


class RewardConfig(_Section):
    functions: list[str] | None = Field(
        None,
        min_length=1,
        description="Reward functions in TRL's or verl's form, `path/to/file.py:function` or `module:function`. `none` "
        "in emulated runs only, where every reward is 1.",
    )
    weights: list[float] | None = Field(None, description="One weight a function; `none` = all 1.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for every function.")
    timeout_s: float = Field(
        30.0, gt=0, description="Limit for one sample; a group's call gets this times its members."
    )
    on_failure: Literal["drop", "fail"] | float = Field(
        "drop",
        description="What becomes of a sample on which a function fails or is too slow even alone: dropped with a "
        "reason, the end of the run, or this reward (counted in `num_reward_failures`).",
    )
    max_failures: int = Field(
        10, ge=1, description="Groups in a row, with no success between them, that fail as a whole and stop the run."
    )


class RolloutConfig(_Section):
    engine: Literal["torch", "emulated"] = Field(
        "torch",
        description="What generates. `torch` is embedded and runs everywhere; `emulated` has no model, and the lengths "
        "and times of `simulation.profile`.",
    )
    gpus: int | None = Field(
        None, ge=1, description="GPUs of all replicas, in emulated runs; `none` = those that `replicas` need."
    )
    replicas: int = Field(1, ge=1, le=4096, description="Copies of the model that generate.")
    threads: int = Field(1, ge=1, description="Compute threads of a replica on CPU.")
    max_num_seqs: int = Field(32, ge=1, description="Sequences a replica decodes at once.")
    kv_tokens: int | None = Field(
        None, ge=1, description="KV cache of a replica in tokens; `none` = enough for `max_num_seqs` full sequences."
    )
    dtype: Dtype = Field("fp32", description="Precision of the weights that are published and generated with.")
    max_new_tokens: int = Field(256, ge=1, description="Longest response in tokens.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the trainer divides by the same.")
    top_p: float = Field(1.0, gt=0, le=1, description="Must be 1 for training: a cut distribution biases the loss.")
    top_k: int = Field(0, ge=-1, description="Must be 0 or -1 (off) for training.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a response.")
    exact: bool | None = Field(
        None,
        description="Samples do not depend, bit for bit, on what else is in the batch; `none` = on CPU yes, else no.",
    )
    golden_tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest difference between trainer and engine log-probs on the golden prompt after a pull; "
        "`none` = 1e-4 in fp32, 1.0 in bf16.",
    )
    admission: Literal["batch", "fresh"] = Field(
        "batch",
        description="How a replica takes work. `batch`: whole groups up to `max_in_flight`, then newer weights. "
        "`fresh`: new groups as old ones end, as long as it holds the newest weights.",
    )
    repack: bool = Field(
        True, description="Move the last unfinished samples of several replicas onto few; with `laminar` only."
    )
    repack_interval_s: float = Field(5.0, gt=0, description="How often repack looks; it also does at each new version.")
    max_outstanding_batches: int | None = Field(
        None,
        ge=1,
        description="Bound on groups issued but not yet cut, in batches; `none` = max_staleness + 1, or 3.",
    )
    max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Samples a replica takes at a time, at most; `none` = what `batches_in_flight` gives it.",
    )
    batches_in_flight: float | None = Field(
        None,
        gt=0,
        description="Samples that all replicas take at a time, in batches, shared evenly in whole groups; `none` = no "
        "bound but `max_in_flight`, or 1 without one.",
    )
    stream_interval_s: float = Field(1.0, gt=0, description="How often a replica streams new tokens to the data store.")
    engine_retries: int = Field(
        2, ge=0, description="How often a sample begins anew after an engine error, before the next one drops it."
    )


class TrainConfig(_Section):
    algorithm: Literal["grpo"] = Field("grpo", description="How advantages and loss are made.")
    advantage: str | None = Field(
        None, description="A function of yours that makes the advantages, `path/to/file.py:function`; `none` = GRPO's."
    )
    loss: str | None = Field(
        None, description="A function of yours that makes the loss of each token; `none` = decoupled PPO."
    )
    backend: Literal["torch", "emulated"] = Field(
        "torch",
        description="What trains. `emulated` goes with the emulated engine: no model, times of the profile.",
    )
    gpus: int | None = Field(None, ge=1, description="GPUs of the trainer, in emulated runs; `none` = the other half.")
    threads: int = Field(1, ge=1, description="Compute threads of the trainer on CPU.")
    groups_per_batch: int = Field(8, ge=1, description="Groups in a global batch: one iteration, one new version.")
    group_size: int = Field(8, ge=1, description="Samples for each prompt.")
    min_group_size: int | None = Field(
        None, ge=1, description="Scored members a group needs when others were lost; `none` = min(2, group_size)."
    )
    num_mini_batches: int = Field(1, ge=1, description="Optimizer steps an iteration; divides groups_per_batch.")
    micro_batch_tokens: int = Field(8192, ge=1, description="Tokens in one forward and backward pass.")
    dtype: Dtype = Field("fp32", description="Autocast precision; master weights and optimizer state stay fp32.")
    lr: float = Field(1e-6, ge=0, description="AdamW learning rate after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps over which lr rises linearly from 0.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="After the warm-up lr stays, or falls to 0 at the end of `iterations`."
    )
    weight_decay: float = Field(0.01, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient clipping by global norm.")
    clip_ratio_low: float = Field(0.2, ge=0, description="Lower clip of the ratio is 1 - this.")
    clip_ratio_high: float = Field(0.28, ge=0, description="Upper clip of the ratio is 1 + this.")
    is_cap: float = Field(2.0, gt=0, description="Cap on the importance weight between trainer and behaviour policy.")
    kl_loss_coef: float = Field(0.0, ge=0, description="Weight of the KL to the reference model; 0 loads none.")
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = Field(
        "token-mean", description="How token losses become one number."
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group",
        description='Divide advantages by the standard deviation of the group, of the batch, or ("none") not at all.',
    )
    drop_zero_variance: bool = Field(False, description="Drop groups whose rewards are all equal and issue new ones.")
    mask_truncated: bool = Field(False, description="Truncated samples leave the loss but stay in the baseline.")
    checkpoint_every: int = Field(10, ge=1, description="Iterations between checkpoints of the trainer's state.")


class EvalConfig(_Section):
    every: int | None = Field(None, ge=1, description="Evaluate each N versions; `none` = not while training.")
    before_train: bool = Field(True, description="Evaluate version 0.")
    after_train: bool = Field(True, description="Evaluate the last version.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    samples_per_prompt: int = Field(1, ge=1, description="Responses for each evaluation prompt.")


class RelayConfig(_Section):
    spare_slots: int | None = Field(
        None,
        ge=0,
        description="Older versions kept while samples need them; `none` = min(max_staleness, 2), or 1 for no bound.",
    )


class FaultsConfig(_Section):
    heartbeat_s: float = Field(0.5, gt=0, description="How often each process reports to the manager.")
    suspect_after_s: float = Field(2.0, gt=0, description="Silence after which a process is suspect.")
    dead_after_s: float = Field(
        5.0, gt=0, description="Silence, or a stuck engine, after which a process counts as dead, and is replaced."
    )
    start_timeout_s: float = Field(
        300.0, gt=0, description="The same for a process that starts: imports, its model, its first weights."
    )
    max_restarts: int = Field(
        3, ge=0, description="How often each process is replaced after a death; 0 = the first death ends the run."
    )
    drain_timeout_s: float = Field(
        30.0,
        gt=0,
        description="How long a replica that is to leave (`laminar drain`, `laminar scale`, SIGTERM) may end or hand "
        "over its samples; then it goes, and they go on elsewhere.",
    )
    move_timeout_s: float = Field(10.0, gt=0, description="A move of samples that takes longer is called off.")
    adopt_timeout_s: float = Field(
        30.0, gt=0, description="How long samples without an owner wait for one before they begin anew."
    )
    stall_timeout_s: float = Field(
        600.0, gt=0, description="After this long with nothing finished the run stops and says what it waits for."
    )


class SimulationConfig(_Section):
    profile: str = Field(
        "32b",
        description="Lengths and times of emulated runs: `7b`, `32b`, `72b`, `toy`, or a `.toml` file.",
    )
    time_scale: float = Field(1.0, gt=0, description="Seconds of the profile that pass in one second.")
    splits: dict[str, list[list[int]]] = Field(
        default_factory=dict,
        description="By schedule, pairs of all GPUs and those of them that train, for what `gpus` alone leaves open: "
        "the nearest pair counts, or its share. All of them is `colocated`.",
    )
    colocated: bool = Field(
        False,
        description="Only for `laminar simulate`, with schedule `sync`: trainer and replicas share all GPUs, and each "
        "iteration pays for the switch between them.",
    )


class Config(_Section):
    """A whole run."""

    schedule: Literal["laminar", "sync", "one_step", "stream", "partial"] = Field(
        "laminar",
        description="How asynchronous the run is. `sync`: all generate a batch, then all wait for the trainer. "
        "`one_step`: they generate the next batch while this one is trained. `stream`: the same, and each mini-batch "
        "is trained as soon as it is there. `partial`: a new version interrupts all, which go on under it. "
        "`laminar`: nobody waits for anybody.",
    )
    max_staleness: int | None = Field(
        4,
        ge=0,
        description="Bound on a trajectory's age in versions when it is trained; `none` = no bound (the paper).",
    )
    iterations: int | None = Field(
        None, ge=0, description="Training iterations, 0 to evaluate only; this or `data.epochs` must be set."
    )
    seed: int = Field(0, ge=0, description="Seeds the order of prompts, sampling and mini-batches.")
    gpus: int | None = Field(
        None, ge=1, description="All GPUs of an emulated run; `none` = `rollout.gpus` + `train.gpus`."
    )
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list,
        description="Trackers that get a copy of the metrics; one may be given by its name alone. Their own "
        "environment variables hold, as WANDB_MODE=offline does.",
    )
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = Field(default_factory=RewardConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    relay: RelayConfig = Field(default_factory=RelayConfig)
    faults: FaultsConfig = Field(default_factory=FaultsConfig)
    simulation: SimulationConfig = Field(default_factory=SimulationConfig)

    @model_validator(mode="before")
    @classmethod
    def _fill_emulated(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        try:
            return config_emulated.with_defaults(raw, SimulationConfig().profile)
        except ConfigError as problem:
            raise InvalidConfig([problem]) from None

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_tracker_is_a_list_of_one(cls, value: object) -> object:
        return {"none": []}.get(value, [value]) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if problems := list(_broken_rules(self)):
            raise InvalidConfig(problems)
        return self

    @property
    def emulated(self) -> bool:
        """No model, dataset or reward function: a profile stands for them."""
        return self.rollout.engine == "emulated"

    @property
    def profile(self) -> Profile:
        """Only of emulated runs, like the next one: `simulation.profile`, in seconds of the run."""
        return load_profile(self.simulation.profile).faster(self.simulation.time_scale)

    @property
    def train_gpus(self) -> int:
        assert self.train.gpus is not None
        return self.train.gpus

    @property
    def model_path(self) -> Path:
        """Only of runs that are not emulated, like the next two."""
        assert self.model.path is not None
        return self.model.path

    @property
    def train_data(self) -> str:
        assert self.data.train is not None
        return self.data.train

    @property
    def reward_functions(self) -> list[str]:
        """Refused by `laminar check` if there are none."""
        assert self.reward.functions is not None
        return self.reward.functions

    @property
    def staleness_bound(self) -> int | None:
        """k of the admission rule: what the schedule sets, else `max_staleness`."""
        return {"sync": 0, "one_step": 1, "stream": 1}.get(self.schedule, self.max_staleness)

    @property
    def max_outstanding_groups(self) -> int:
        k = self.staleness_bound
        batches = self.rollout.max_outstanding_batches or (3 if k is None else k + 1)
        return batches * self.train.groups_per_batch

    @property
    def groups_in_flight(self) -> int:
        """Whole groups a replica takes at a time."""
        each, together = self.rollout.max_in_flight, self.rollout.batches_in_flight
        bounds = [] if each is None else [max(1, each // self.train.group_size)]
        if together is not None or each is None:
            bounds.append(ceil((together or 1) * self.train.groups_per_batch / self.rollout.replicas))
        return min(bounds)

    @property
    def min_group_size(self) -> int:
        return self.train.min_group_size or min(2, self.train.group_size)

    @property
    def spare_slots(self) -> int:
        if self.relay.spare_slots is not None:
            return self.relay.spare_slots
        k = self.staleness_bound
        return 1 if k is None else min(k, 2)

    @property
    def num_slots(self) -> int:
        """Weight slots a relay holds: publishing never blocks on a reader with this many."""
        return TRAINER_SLOTS + self.rollout.replicas + self.spare_slots

    @property
    def exact(self) -> bool:
        return True if self.rollout.exact is None else self.rollout.exact

    def settings(self, eval_groups: int = 0) -> Settings:
        """What decisions depend on, for `control`; `eval_groups` = rows of the evaluation set."""
        return Settings(
            schedule=self.schedule,
            max_staleness=self.staleness_bound,
            iterations=self.iterations,
            groups_per_batch=self.train.groups_per_batch,
            group_size=self.train.group_size,
            min_group_size=self.min_group_size,
            num_mini_batches=self.train.num_mini_batches,
            max_outstanding_groups=self.max_outstanding_groups,
            groups_in_flight=self.groups_in_flight,
            last_batch=self.data.last_batch,
            drop_zero_variance=self.train.drop_zero_variance,
            engine_retries=self.rollout.engine_retries,
            admission=self.rollout.admission,
            repack=self.rollout.repack,
            repack_interval_s=self.rollout.repack_interval_s,
            move_timeout_s=self.faults.move_timeout_s,
            adopt_timeout_s=self.faults.adopt_timeout_s,
            eval_groups=eval_groups,
            eval_every=self.eval.every,
            eval_before_train=self.eval.before_train,
            eval_after_train=self.eval.after_train,
            eval_group_size=self.eval.samples_per_prompt,
            suspect_after_s=self.faults.suspect_after_s,
            dead_after_s=self.faults.dead_after_s,
            start_timeout_s=self.faults.start_timeout_s,
            drain_timeout_s=self.faults.drain_timeout_s,
            max_restarts=self.faults.max_restarts,
            stall_timeout_s=self.faults.stall_timeout_s,
        )

    @property
    def golden_tolerance(self) -> float:
        if self.rollout.golden_tolerance is not None:
            return self.rollout.golden_tolerance
        return 1e-4 if self.rollout.dtype == "fp32" and self.train.dtype == "fp32" else 1.0


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `a.b=value` overrides, make all paths absolute, check everything but the file system.

    Raises InvalidConfig with every problem that was found.
    """
    path = Path(path)
    return parse(read_toml(path), source=str(path), folder=path.parent, overrides=overrides)


def parse(data: Mapping[str, Any], *, source: str, folder: str | Path, overrides: Sequence[str] = ()) -> Config:
    """As `load`, of data that is at hand. `source` names it in messages; paths in it count from `folder`."""
    raw = with_absolute_paths(data, Path(folder))
    changed: set[str] = set()
    for override in overrides:
        key, value = parse_override(override)
        set_key(raw, key, value, override)
        changed.add(key)

    def located(problem: UserError) -> ConfigError:
        key = problem.where or ""
        origin = "override" if any(key == c or c.startswith(f"{key}.") for c in changed) else source
        return ConfigError(
            problem.what, where=f"{origin}: {key}", expected=problem.expected, got=problem.got, fix=problem.fix
        )

    problems: list[UserError] = list(unsupported(raw))
    refused = {problem.where for problem in problems}
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        problems += [problem for problem in explain(error, Config) if problem.where not in refused]
    except InvalidConfig as error:
        problems += error.problems
    if problems:
        raise InvalidConfig([located(problem) for problem in problems])
    return config


def dump(config: Config) -> str:
    """The resolved config as TOML; `load` of it gives an equal config."""
    return tomli_w.dumps(_toml(config.model_dump()))


def _toml(value: Any) -> Any:
    """Plain TOML values: no value is written `none`."""
    if isinstance(value, dict):
        return {key: _toml(inner) for key, inner in value.items()}
    return "none" if value is None else str(value) if isinstance(value, Path) else value


def _broken_rules(config: Config) -> Iterator[ConfigError]:
    """What the fields alone can't say: rules between keys."""
    rollout, train, faults = config.rollout, config.train, config.faults
    if config.iterations is None and config.data.epochs is None:
        yield ConfigError("the run has no end", where="iterations", fix="set iterations or data.epochs")
    if config.iterations is None and train.lr_schedule != "constant":
        yield ConfigError(
            "an lr that falls has to know where the run ends",
            where="train.lr_schedule",
            got=train.lr_schedule,
            fix='set iterations, or "constant"',
        )
    if train.groups_per_batch % train.num_mini_batches:
        yield ConfigError(
            "does not divide train.groups_per_batch",
            where="train.num_mini_batches",
            expected=f"a divisor of {train.groups_per_batch}",
            got=str(train.num_mini_batches),
        )
    if train.min_group_size is not None and train.min_group_size > train.group_size:
        yield ConfigError(
            "larger than the group",
            where="train.min_group_size",
            expected=f"<= train.group_size, {train.group_size}",
            got=str(train.min_group_size),
        )
    if train.drop_zero_variance and train.group_size == 1:
        yield ConfigError(
            "would drop every group: one sample has no variance",
            where="train.drop_zero_variance",
            fix="set train.group_size to 2 or more, or leave it off",
        )
    if rollout.max_in_flight is not None and rollout.max_in_flight < train.group_size:
        yield ConfigError(
            "a replica could not take one group",
            where="rollout.max_in_flight",
            expected=f">= train.group_size, {train.group_size}",
            got=str(rollout.max_in_flight),
        )
    longest = rollout.max_new_tokens + (config.data.max_prompt_tokens or 1)
    if rollout.kv_tokens is not None and rollout.kv_tokens < longest:
        yield ConfigError(
            "too small for one sequence",
            where="rollout.kv_tokens",
            expected=f">= prompt + rollout.max_new_tokens, {longest}",
            got=str(rollout.kv_tokens),
        )
    if not faults.heartbeat_s < faults.suspect_after_s < faults.dead_after_s <= faults.start_timeout_s:
        yield ConfigError(
            "out of order",
            where="faults.suspect_after_s",
            expected="heartbeat_s < suspect_after_s < dead_after_s <= start_timeout_s",
            got=f"{faults.heartbeat_s}, {faults.suspect_after_s}, {faults.dead_after_s}, {faults.start_timeout_s}",
        )
    if config.iterations == 0 and config.data.eval is None:
        yield ConfigError("nothing to train and nothing to evaluate", where="iterations", fix="set data.eval")
    elif config.data.eval is None and config.eval != EvalConfig():
        yield ConfigError(
            "set, but there is nothing to evaluate", where="eval", fix="set data.eval or remove the section [eval]"
        )
    yield from _broken_reward_rules(config)
    functions = {"data.sampler": config.data.sampler, "train.advantage": train.advantage, "train.loss": train.loss}
    for key, spec in functions.items():
        if spec not in (None, "fifo") and not _names_function(spec):
            expected = "path/to/file.py:function or module:function" + (', or "fifo"' if key == "data.sampler" else "")
            yield ConfigError("names no function", where=key, expected=expected, got=shown(spec))
    if "emulated" not in (rollout.engine, train.backend):
        for key, value in (("model.path", config.model.path), ("data.train", config.data.train)):
            if value is None:
                yield ConfigError("missing: only emulated runs do without", where=key, got="none")
    yield from config_emulated.broken_rules(config)


def _names_function(spec: str) -> bool:
    return re.fullmatch(r".+:[^\W\d][\w.]*", spec) is not None


def _broken_reward_rules(config: Config) -> Iterator[ConfigError]:
    reward = config.reward
    functions = reward.functions or []
    if reward.weights is not None and len(reward.weights) != len(functions):
        yield ConfigError(
            "not one weight for each function",
            where="reward.weights",
            expected=f"{len(functions)} numbers",
            got=f"{len(reward.weights)}",
        )
    for spec in functions:
        if not _names_function(spec):
            yield ConfigError(
                "names no function",
                where="reward.functions",
                expected="path/to/file.py:function or module:function",
                got=shown(spec),
                fix="write the function as Python; a reward model can be called from it",
            )
    for key, table in (
        ("reward.kwargs", reward.kwargs),
        ("data.chat_template_kwargs", config.data.chat_template_kwargs),
    ):
        for name, value in table.items():
            try:
                tomli_w.dumps({name: value})
            except TypeError:
                yield ConfigError(
                    "can't be written to the run's config",
                    where=f"{key}.{name}",
                    expected="strings, numbers, booleans, and lists and tables of them",
                    got=shown(value),
                )
