"""The config: one clear message for each mistake (fault 39), overrides, paths, and a file that loads back."""

from __future__ import annotations

import importlib.util
import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.config import Config, InvalidConfig, dump, load, parse
from laminar.config_help import CAPABILITIES, PEER_NAMES, expectation, leaves
from laminar.errors import ConfigError
from laminar.timing import load_profile

ROOT = Path(__file__).resolve().parent.parent

GOOD = """
iterations = 3

[model]
path = "model"

[data]
train = "rows.jsonl"

[reward]
functions = ["reward.py:score"]
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(GOOD)
    return path


def only_problem(path: Path, *overrides: str) -> str:
    with pytest.raises(InvalidConfig) as caught:
        load(path, overrides)
    assert len(caught.value.problems) == 1, str(caught.value)
    return str(caught.value)


BAD = [
    # unknown keys: misspelt, in another section, by a peer's name
    ("train.group_sise=4", r"train.group_sise: unknown key\n  got: 4\n  fix: did you mean train.group_size\?"),
    ("rolout.replicas=2", r"rolout: unknown section\n  got: .*\n  fix: did you mean \[rollout\]\?"),
    ("lr=1e-5", r"lr: unknown key\n  got: 1e-05\n  fix: it belongs elsewhere: train.lr"),
    ("train.temperature=1", r"fix: it belongs elsewhere: rollout.temperature or eval.temperature"),
    ("train.num_generations=4", r"fix: it is called train.group_size here"),
    ("rollout.n=4", r"fix: it is called train.group_size here"),
    ("max_steps=4", r"fix: it is called iterations here"),
    ("train.beta=0.1", r"fix: it is called train.kl_loss_coef here"),
    ("rollout.response_length=64", r"fix: it is called rollout.max_new_tokens here"),
    ("train.epsilon=0.2", r"fix: it is called train.clip_ratio_low here"),
    ("train.save_steps=5", r"fix: it is called train.checkpoint_every here"),
    (
        "actor_rollout_ref.rollout.n=8",
        r"actor_rollout_ref: unknown section\n.*\n  fix: n is called train.group_size here",
    ),
    ("trainer.test_freq=5", r"trainer: unknown section\n  got: .*\n  fix: did you mean \[train\]\?"),
    ("model.trust_remote_code=true", r"model.trust_remote_code: unknown key\n  got: true\n  fix: see docs/config.md"),
    ("xyzzy=1", r"xyzzy: unknown key\n  got: 1\n  fix: see docs/config.md for all keys"),
    # wrong types: nothing is converted behind the user's back
    ("train.lr=fast", r'train.lr: can\'t have this value\n  expected: a number >= 0\n  got: "fast"'),
    ('train.lr="1e-5"', r"expected: a number >= 0"),
    ("seed=1.5", r"seed: can't have this value\n  expected: an integer >= 0\n  got: 1.5"),
    ("seed=true", r"expected: an integer >= 0\n  got: true"),
    ("rollout.exact=1", r"expected: true or false, or none\n  got: 1"),
    ("rollout.stop=END", r'expected: a list of strings\n  got: "END"'),
    ("reward.weights=[1, true]", r"item 1 can't have this value\n  expected: a list of numbers, or none\n  got: true"),
    ("model=SmolLM2", r'model: can\'t have this value\n  expected: a section\n  got: "SmolLM2"\n  fix: it needs path'),
    ("train.lr=nan", r"expected: a number >= 0\n  got: NaN"),
    ("max_staleness=2.5", r"max_staleness: can't have this value\n  expected: an integer >= 0, or none\n  got: 2.5"),
    ("data=rows.jsonl", r"data: can't have this value\n  expected: a section\n.*\n  fix: it needs train"),
    ("data.chat_template_kwargs=true", r"expected: a table\n  got: true"),
    ("reward.kwargs=[1]", r"expected: a table\n  got: \[1\]"),
    ("model.path=3", r"model.path: can't have this value\n  expected: a path, or none\n  got: 3"),
    ("model.allow_pickle=yes", r'expected: true or false\n  got: "yes"'),
    ("train.scale_rewards=true", r'expected: one of "group", "batch", "none"\n  got: true'),
    ("train.lr=inf", r"expected: a number >= 0\n  got: Infinity"),
    ("train.group_size=none", r'expected: an integer >= 1\n  got: "none"'),
    (
        "report_to=wandv",
        r'report_to: item 0 .*\n  expected: a list of "tensorboard", "wandb", "trackio"\n  got: "wandv"',
    ),
    # ranges and choices
    ("train.group_size=0", r"train.group_size: can't have this value\n  expected: an integer >= 1\n  got: 0"),
    ("rollout.top_p=1.5", r"expected: a number > 0 and <= 1\n  got: 1.5"),
    ("rollout.dtype=bf61", r'expected: one of "fp32", "bf16"\n  got: "bf61"\n  fix: did you mean "bf16"\?'),
    ("reward.on_failure=skip", r'expected: one of "drop", "fail" or a number\n  got: "skip"'),
    ("reward.functions=[]", r"reward.functions: can't have this value\n  expected: a list of strings, at least 1"),
    ("max_staleness=-1", r"expected: an integer >= 0, or none\n  got: -1"),
    ("iterations=-1", r"iterations: can't have this value\n  expected: an integer >= 0, or none\n  got: -1"),
    ("iterations=0", r"iterations: nothing to train and nothing to evaluate\n  fix: set data.eval"),
    ("seed=-1", r"expected: an integer >= 0\n  got: -1"),
    ("schedule=async", r'schedule: can\'t have this value\n  expected: one of "laminar", "sync", .*\n  got: "async"'),
    ("schedule=Stream", r'fix: did you mean "stream"\?'),
    ("data.epochs=0", r"expected: an integer >= 1, or none\n  got: 0"),
    ("data.overlong_prompt=cut", r'expected: one of "drop", "truncate", "fail"\n  got: "cut"'),
    ("data.last_batch=keep", r'expected: one of "train", "drop"'),
    ("data.max_prompt_tokens=0", r"expected: an integer >= 1, or none"),
    ("reward.timeout_s=0", r"expected: a number > 0\n  got: 0"),
    ("reward.max_failures=0", r"expected: an integer >= 1"),
    ("rollout.replicas=0", r"expected: an integer >= 1 and <= 4096\n  got: 0"),
    ("rollout.replicas=5000", r"expected: an integer >= 1 and <= 4096\n  got: 5000"),
    ("rollout.temperature=0", r"rollout.temperature: can't have this value\n  expected: a number > 0\n  got: 0"),
    ("rollout.admission=eager", r'expected: one of "batch", "fresh"'),
    ("rollout.engine=tensorrt", r'expected: one of "torch", "emulated"\n  got: "tensorrt"'),
    ("train.algorithm=grop", r'fix: did you mean "grpo"\?'),
    ("train.loss_agg_mode=mean", r'expected: one of "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"'),
    ("train.is_cap=0", r"expected: a number > 0\n  got: 0"),
    ("train.weight_decay=-0.1", r"expected: a number >= 0\n  got: -0.1"),
    ("eval.temperature=-1", r"expected: a number >= 0\n  got: -1"),
    ("relay.spare_slots=-1", r"expected: an integer >= 0, or none\n  got: -1"),
    ("data.sampler=lifo", r'data.sampler: names no function\n  expected: .*, or "fifo"\n  got: "lifo"'),
    ("train.loss=ppo", r"train.loss: names no function\n  expected: path/to/file.py:function or module:function\n"),
    ("train.advantage=gae", r"train.advantage: names no function"),
    # rules between keys
    ("rollout.engine=emulated", r"train.backend: an emulated engine and an emulated trainer need each other"),
    ("gpus=4", r"gpus: this version does not place processes on GPUs.*\n  got: 4\n  fix: use train.threads"),
    ("data.train=none", r"data.train: missing: only emulated runs do without"),
    ("iterations=none", r"iterations: the run has no end\n  fix: set iterations or data.epochs"),
    ("train.num_mini_batches=3", r"train.num_mini_batches: does not divide .*\n  expected: a divisor of 8\n  got: 3"),
    ("train.min_group_size=9", r"train.min_group_size: larger than the group\n  expected: <= train.group_size, 8"),
    ("rollout.max_in_flight=7", r"rollout.max_in_flight: .*\n  expected: >= train.group_size, 8\n  got: 7"),
    ("rollout.kv_tokens=256", r"rollout.kv_tokens: too small .*\n  expected: >= .*, 257\n  got: 256"),
    ("faults.suspect_after_s=40", r"faults.suspect_after_s: out of order\n.*\n  got: 0.5, 40.0, 5.0, 300.0"),
    ("faults.heartbeat_s=2", r"faults.suspect_after_s: out of order"),
    ("reward.weights=[1, 2]", r"reward.weights: not one weight .*\n  expected: 1 numbers\n  got: 2"),
    ('reward.functions=["org/reward-model"]', r"reward.functions: names no function\n  expected: path/to/file.py:func"),
    ("eval.every=5", r"eval: set, but there is nothing to evaluate\n  fix: set data.eval"),
]


def test_the_table_of_mistakes_is_long_and_has_each_once() -> None:
    """Fault 39."""
    assert len({override for override, _ in BAD}) == len(BAD) >= 60


@pytest.mark.parametrize(("override", "message"), BAD)
def test_each_mistake_has_its_one_message(good: Path, override: str, message: str) -> None:
    """Fault 39."""
    assert re.search(message, only_problem(good, override)), only_problem(good, override)


def test_an_lr_that_falls_needs_an_end(good: Path) -> None:
    with pytest.raises(ConfigError) as problem:
        load(good, ["iterations=none", "data.epochs=2", "train.lr_schedule=linear"])
    assert str(problem.value).endswith(
        "train.lr_schedule: an lr that falls has to know where the run ends\n"
        '  got: linear\n  fix: set iterations, or "constant"'
    )


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("rollout.engine=vllm", 'engine = "torch"'),
        ("rollout.top_p=0.9", "top_p = 1"),
        ("rollout.top_k=50", "top_k = 0"),
        ("train.algorithm=dapo", "drop_zero_variance = true"),
        ("train.backend=fsdp2", 'backend = "torch"'),
    ],
)
def test_what_this_version_can_not_do_is_refused_with_a_remedy(good: Path, override: str, remedy: str) -> None:
    """Fault 39: one capability table."""
    message = only_problem(good, override)
    assert remedy in message.partition("fix: ")[2]


@pytest.mark.parametrize("override", ["rollout.top_p=1", "rollout.top_k=0", "rollout.top_k=-1"])
def test_sampling_from_the_full_distribution_is_allowed(good: Path, override: str) -> None:
    load(good, [override])


@pytest.mark.parametrize("key", ["model", "model.path", "data.train"])
def test_a_missing_key_is_named_with_what_it_is_for(good: Path, key: str) -> None:
    section, _, name = key.partition(".")
    text = good.read_text()
    good.write_text(re.sub(rf"\[{section}\]\n.*\n", f"[{section}]\n" if name else "", text))
    message = only_problem(good)
    assert f"{good}: {key}: missing" in message
    assert f"[{section}]" in message.partition("fix: ")[2]


def test_all_problems_are_told_at_once(good: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(good, ["train.backend=fsdp", "train.lr=-1", "train.learning_rate=1"])
    assert [problem.where for problem in caught.value.problems] == [
        "override: train.backend",
        "override: train.lr",
        "override: train.learning_rate",
    ]
    assert str(caught.value).startswith("3 problems in the config\n")


def test_a_problem_names_the_file_or_the_override_it_comes_from(good: Path) -> None:
    good.write_text(GOOD + "[train]\nlr = -1\n")
    assert only_problem(good).startswith(f"{good}: train.lr: ")
    assert only_problem(good, "train.lr=-2").startswith("override: train.lr: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = \n", "not valid TOML"),
        ("iterations = 3\niterations = 4\n", "not valid TOML"),
        ("[model]\npath = model\n", "strings need quotes"),
    ],
)
def test_a_file_that_is_not_toml(good: Path, text: str, message: str) -> None:
    good.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(good)
    assert "line" in str(caught.value) and str(good) in str(caught.value)


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="a folder"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe4'")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "latin.toml")


# ---------------------------------------------------------------- good values

GOOD_VALUES = {
    "schedule": ["sync"],
    "max_staleness": [0],
    "iterations": [7],
    "seed": [7],
    "report_to": [["tensorboard", "wandb", "trackio"]],
    "model.path": ["/models/smol"],
    "model.allow_pickle": [True],
    "data.train": ["/rows.parquet"],
    "data.eval": ["openai/gsm8k/main:test"],
    "data.epochs": [2],
    "data.prompt_column": ["question"],
    "data.system_prompt": ["Be brief."],
    "data.chat_template_kwargs": [{"enable_thinking": False}],
    "data.max_prompt_tokens": [512],
    "data.overlong_prompt": ["truncate", "fail"],
    "data.sampler": ["fifo", "/own.py:sampler"],
    "data.last_batch": ["drop"],
    "reward.functions": [["installed.module:score"]],
    "reward.weights": [[0.5]],
    "reward.kwargs": [{"scale": 2}],
    "reward.timeout_s": [1.5],
    "reward.on_failure": ["fail", -1.0, 0],
    "reward.max_failures": [3],
    "rollout.engine": ["torch"],
    "rollout.replicas": [4],
    "rollout.threads": [2],
    "rollout.max_num_seqs": [8],
    "rollout.kv_tokens": [4096],
    "rollout.dtype": ["bf16"],
    "rollout.max_new_tokens": [64],
    "rollout.temperature": [0.7],
    "rollout.top_p": [1.0],
    "rollout.top_k": [-1],
    "rollout.stop": [["\n\n"]],
    "rollout.exact": [False],
    "rollout.golden_tolerance": [0.01],
    "rollout.admission": ["fresh"],
    "rollout.repack": [False],
    "rollout.repack_interval_s": [0.5],
    "rollout.max_outstanding_batches": [2],
    "rollout.max_in_flight": [16],
    "rollout.batches_in_flight": [1.5],
    "rollout.stream_interval_s": [0.1],
    "rollout.engine_retries": [0],
    "train.algorithm": ["grpo"],
    "train.advantage": ["/own.py:advantage"],
    "train.loss": ["installed.module:loss"],
    "train.backend": ["torch"],
    "train.threads": [2],
    "train.groups_per_batch": [2],
    "train.group_size": [4],
    "train.min_group_size": [3],
    "train.num_mini_batches": [2],
    "train.micro_batch_tokens": [1024],
    "train.dtype": ["bf16"],
    "train.lr": [0.0, 1e-4],
    "train.warmup_steps": [5],
    "train.lr_schedule": ["constant", "linear", "cosine"],
    "train.weight_decay": [0.0],
    "train.max_grad_norm": [0.5],
    "train.clip_ratio_low": [0.1],
    "train.clip_ratio_high": [0.2],
    "train.is_cap": [5.0],
    "train.kl_loss_coef": [0.01],
    "train.loss_agg_mode": ["seq-mean-token-mean", "seq-mean-token-sum-norm"],
    "train.scale_rewards": ["batch", "none"],
    "train.drop_zero_variance": [True],
    "train.mask_truncated": [True],
    "train.checkpoint_every": [1],
    "relay.spare_slots": [0],
    "faults.heartbeat_s": [0.1],
    "faults.suspect_after_s": [3.0],
    "faults.dead_after_s": [60.0],
    "faults.start_timeout_s": [600.0],
    "faults.drain_timeout_s": [120.0],
    "faults.max_restarts": [0],
    "faults.move_timeout_s": [1.0],
    "faults.adopt_timeout_s": [1.0],
    "faults.stall_timeout_s": [60.0],
    "simulation.profile": ["7b"],
    "simulation.time_scale": [10.0],
}
WITH_EVAL = {
    "eval.every": [5],
    "eval.before_train": [False],
    "eval.after_train": [False],
    "eval.temperature": [0.6],
    "eval.samples_per_prompt": [4],
}
EMULATED_ONLY = {"gpus", "rollout.gpus", "train.gpus", "simulation.colocated", "simulation.splits"}
"""These hang together: tests/test_config_emulated.py has them."""


def test_good_values_are_of_every_key() -> None:
    assert {*GOOD_VALUES, *WITH_EVAL, *EMULATED_ONLY} == set(leaves(Config))


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, some in (GOOD_VALUES | WITH_EVAL).items() for value in some]
)
def test_a_good_value_of_each_key_is_taken_as_it_is(good: Path, key: str, value: object) -> None:
    raw = tomllib.loads(GOOD)
    if key in WITH_EVAL:
        raw["data"]["eval"] = "rows.jsonl"
    *section, name = key.split(".")
    (raw.setdefault(section[0], {}) if section else raw)[name] = value
    config = parse(raw, source="test", folder=good.parent)
    taken = getattr(getattr(config, section[0]) if section else config, name)
    assert taken == (Path(str(value)) if key == "model.path" else value)


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("train.lr=1e-5", "train", "lr", 1e-5),
        ("train.lr=1", "train", "lr", 1.0),
        ("train.lr = 2e-5", "train", "lr", 2e-5),
        ("rollout.exact=false", "rollout", "exact", False),
        ("rollout.exact=none", "rollout", "exact", None),
        ("rollout.kv_tokens=none", "rollout", "kv_tokens", None),
        ("data.system_prompt=none", "data", "system_prompt", None),
        ("data.system_prompt=Be brief.", "data", "system_prompt", "Be brief."),
        ("data.system_prompt=", "data", "system_prompt", ""),
        ('data.system_prompt="a = 1"', "data", "system_prompt", "a = 1"),
        ("data.system_prompt=1\nother=2", "data", "system_prompt", "1\nother=2"),
        ('rollout.stop=["\\n", "END"]', "rollout", "stop", ["\n", "END"]),
        ("train.scale_rewards=none", "train", "scale_rewards", "none"),
        ("reward.kwargs.scale=2", "reward", "kwargs", {"scale": 2}),
        ("reward.kwargs.deep.er=x", "reward", "kwargs", {"deep": {"er": "x"}}),
        (
            "data.chat_template_kwargs={enable_thinking = false}",
            "data",
            "chat_template_kwargs",
            {"enable_thinking": False},
        ),
    ],
)
def test_overrides(good: Path, override: str, section: str, name: str, value: object) -> None:
    assert getattr(getattr(load(good, [override]), section), name) == value


def test_none_is_not_the_default(good: Path) -> None:
    assert load(good).max_staleness == 4
    assert load(good, ["max_staleness=none"]).max_staleness is None
    good.write_text('max_staleness = "none"\n' + GOOD)
    assert load(good).max_staleness is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [("report_to=wandb", ["wandb"]), ("report_to=none", []), ('report_to=["wandb", "trackio"]', ["wandb", "trackio"])],
)
def test_one_tracker_may_be_given_by_its_name_alone(good: Path, override: str, expected: list[str]) -> None:
    assert load(good, [override]).report_to == expected


def test_the_last_override_of_a_key_wins(good: Path) -> None:
    assert load(good, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("override", ["seed", "=3", "train..lr=1", "train.lr.=1", "a b=1", "iterations.x=1"])
def test_what_is_no_override(good: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"not an override|not a section") as caught:
        load(good, [override])
    assert override in str(caught.value)


# ---------------------------------------------------------------- paths


def test_paths_count_from_the_file_and_in_overrides_from_here(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "elsewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    config = load(Path("..") / "config.toml")
    assert config.model.path == tmp_path / "model"
    assert config.data.train == str(tmp_path / "rows.jsonl")
    assert config.reward.functions == [f"{tmp_path}/reward.py:score"]

    config = load(
        Path("..") / "config.toml",
        ["model.path=other", "data.train=../more.parquet", 'reward.functions=["r.py:f", "pkg.mod:g"]'],
    )
    assert config.model.path == here / "other"
    assert config.data.train == str(tmp_path / "more.parquet")
    assert config.reward.functions == [f"{here}/r.py:f", "pkg.mod:g"]


@pytest.mark.parametrize("key", ["data.sampler", "train.advantage", "train.loss"])
def test_functions_of_ones_own_count_from_the_file_too(good: Path, key: str) -> None:
    section, name = key.split(".")
    good.write_text(
        f'{key} = "own.py:f"\n' + GOOD if section == "train" else GOOD.replace("[data]", f'[data]\n{name} = "own.py:f"')
    )
    assert getattr(getattr(load(good), section), name) == f"{good.parent}/own.py:f"


def test_modules_beside_the_config_are_found_from_anywhere(good: Path) -> None:
    (good.parent / "judges").mkdir()
    (good.parent / "reward.py").touch()
    good.write_text(GOOD.replace('"reward.py:score"', '"reward:score", "judges.strict:score", "installed.pkg:score"'))
    folder = good.parent
    assert load(good).reward.functions == [
        f"{folder}/reward.py:score",
        f"{folder}/judges.strict:score",
        "installed.pkg:score",
    ]


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("pkg.rows:make", "pkg.rows:make"),
        ("make.py:rows", "{folder}/make.py:rows"),
        ("objects.pkl:rows", "{folder}/objects.pkl:rows"),
        ("/abs/rows.jsonl", "/abs/rows.jsonl"),
        ("saved", "{folder}/saved"),
        ("saved:test", "{folder}/saved:test"),
        ("some/rows.jsonl", "{folder}/some/rows.jsonl"),
        ("openai/gsm8k", "openai/gsm8k"),
        ("openai/gsm8k/main:test", "openai/gsm8k/main:test"),
        ("~/rows.jsonl", os.path.expanduser("~/rows.jsonl")),
    ],
)
def test_kinds_of_dataset_names(good: Path, train: str, expected: str) -> None:
    (good.parent / "saved").mkdir()
    good.write_text(GOOD.replace("rows.jsonl", train))
    assert load(good).data.train == expected.format(folder=good.parent)


# ---------------------------------------------------------------- writing


def test_the_resolved_config_loads_back_equal_from_anywhere(good: Path, tmp_path: Path) -> None:
    config = load(
        good,
        ["max_staleness=none", "rollout.exact=true", 'reward.kwargs={a = "none", b = [1, {c = true}]}', "train.lr=1"],
    )
    copy = tmp_path / "deep" / "er" / "config.toml"
    copy.parent.mkdir(parents=True)
    copy.write_text(dump(config))
    assert load(copy) == config
    assert dump(load(copy)) == dump(config)


@given(
    text=st.text(),
    number=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    stop=st.lists(st.text()),
    kwargs=st.dictionaries(st.text(), st.integers(-(2**63), 2**63 - 1) | st.text() | st.lists(st.booleans())),
    bound=st.none() | st.integers(0, 10**6),
)
def test_whatever_is_in_it_the_config_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    text: str,
    number: float,
    stop: list[str],
    kwargs: dict[str, object],
    bound: int | None,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    data = {
        "iterations": 1,
        "max_staleness": bound,
        "model": {"path": "m"},
        "data": {"train": "rows.jsonl", "system_prompt": text},
        "reward": {"functions": ["r.py:f"], "kwargs": kwargs},
        "rollout": {"stop": stop},
        "train": {"lr": number},
    }
    config = parse(data, source="test", folder=folder)
    (folder / "round.toml").write_text(dump(config), encoding="utf-8")
    assert load(folder / "round.toml") == config


def test_a_value_that_toml_can_not_hold_is_refused_when_it_is_given() -> None:
    data = {
        "iterations": 1,
        "model": {"path": "m"},
        "data": {"train": "rows.jsonl"},
        "reward": {"functions": ["r.py:f"], "kwargs": {"judge": object()}},
    }
    with pytest.raises(InvalidConfig, match=r"Trainer: reward\.kwargs\.judge: can't be written"):
        parse(data, source="Trainer", folder=".")


# ---------------------------------------------------------------- the repository keeps its word


def config_files() -> list[Path]:
    """Every TOML file that is a config: all but the project's own and the profiles."""
    profiles = ROOT / "benchmarks" / "profiles"
    others = {ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.toml"), *profiles.glob("*.toml")}
    skipped = {".venv", "build", "runs"}
    return sorted(p for p in ROOT.rglob("*.toml") if p not in others and not skipped & set(p.relative_to(ROOT).parts))


@pytest.mark.parametrize("path", config_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_in_the_repository_loads(path: Path) -> None:
    load(path)


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.toml")), ids=lambda path: path.stem)
def test_every_profile_in_the_repository_loads(path: Path) -> None:
    assert load_profile(str(path)).name == path.stem


def configs_in_pages() -> list[tuple[str, str]]:
    """Whole configs that the pages show, with the page's name."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [(page.name, text) for page in pages for text in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S)]
    return [(page, text) for page, text in found if "[model]" in text]


@pytest.mark.parametrize(("page", "text"), configs_in_pages())
def test_every_config_in_the_pages_loads(tmp_path: Path, page: str, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    load(tmp_path / "config.toml")


def test_the_reference_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "scripts" / "config_reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert reference.PAGE.read_text(encoding="utf-8") == reference.render(), "run scripts/config_reference.py"


def test_every_key_has_a_meaning_and_words_for_its_values() -> None:
    for key, field in leaves(Config).items():
        assert field.description, key
        assert expectation(field), key


def test_names_of_other_frameworks_lead_to_keys_that_exist() -> None:
    known = leaves(Config)
    assert set(PEER_NAMES.values()) <= set(known)
    assert not set(PEER_NAMES) & {key.rpartition(".")[2] for key in known}


def test_capabilities_refuse_no_default(good: Path) -> None:
    defaults = dump(load(good))
    for row in CAPABILITIES:
        name = row.key.rpartition(".")[2]
        if match := re.search(rf'^{name} = "?([^"\n]*)"?$', defaults, re.MULTILINE):
            assert not row.value.holds(match[1]), row
