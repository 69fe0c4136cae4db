"""The documents say what the code does: lifecycles, metric keys, config keys, and the numbers that tests cite."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from laminar.config import Config
from laminar.config_help import leaves
from laminar.control.commands import Issue
from laminar.data.prompts import Drawn
from laminar.data.samplers import fifo
from laminar.data.store import DataStore
from laminar.errors import FAILURES
from laminar.trainer.loop import TrainerLoop
from laminar.trainer.torch_backend import TorchBackend
from laminar.types import Chunk, Finish, GroupScore, MemberScore, ReplicaReport, ScoreReport, Version
from tests.data.driving import apply

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- made by scripts


def test_lifecycles_are_those_of_the_tables() -> None:
    page = (DOCS / "architecture.md").read_text()
    assert script("state_diagrams").render(page) == page, "run: python scripts/state_diagrams.py"


def test_config_reference_is_that_of_the_models() -> None:
    assert script("config_reference").render() == (DOCS / "config.md").read_text(), (
        "run: python scripts/config_reference.py"
    )


def test_a_diagram_starts_at_the_first_state_and_ends_where_nothing_leads_on() -> None:
    table = {("new", "go"): "on", ("on", "go"): "on", ("on", "stop"): "off", ("on", "fail"): "off"}
    assert script("state_diagrams").diagram(table).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> new",
        "    new --> on: go",
        "    on --> on: go",
        "    on --> off: stop, fail",
        "    off --> [*]",
    ]


# ---------------------------------------------------------------- numbers that tests cite


def test_cited_invariants_exist() -> None:
    listed = set(re.findall(r"^(\d+)\. \*\*", (DOCS / "architecture.md").read_text(), re.MULTILINE))
    assert listed == {str(n) for n in range(1, 13)}
    assert cited("invariants?") <= listed


def test_every_fault_has_a_test_that_cites_it() -> None:
    listed = set(re.findall(r"^\| (\d+) \|", (DOCS / "faults.md").read_text(), re.MULTILINE))
    assert cited("faults?") == listed


def cited(word: str) -> set[str]:
    """Numbers after `word` in the tests, as in "Invariants 4, 5 and 6"."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path != Path(__file__).resolve():
            for numbers in re.findall(rf"\b{word} (\d+(?:(?:, | and |, and )\d+)*)", path.read_text(), re.IGNORECASE):
                found.update(re.findall(r"\d+", numbers))
    return found


# ---------------------------------------------------------------- failures


def test_the_table_of_failures_is_that_of_the_code() -> None:
    """Boundary, policy, key with its default, counter and reasons; no reason that protocol.md does not have."""
    _, _, rest = (DOCS / "faults.md").read_text().partition("\n## What fails at which boundary\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rest.splitlines() if line.startswith("| ")]
    known = leaves(Config)
    expected = [
        [
            boundary,
            kind.policy,
            "–" if kind.key is None else f"`{kind.key} = {json.dumps(known[kind.key].default)}`",
            f"`failures/{boundary}`" if kind.reasons else "–",
            ", ".join(f"`{reason}`" for reason in kind.reasons) or "–",
        ]
        for boundary, kind in FAILURES.items()
    ]
    assert rows[2 : 2 + len(FAILURES)] == expected
    drops = (DOCS / "protocol.md").read_text().partition("\n## Drops\n")[2].partition("\n**Evaluation**")[0]
    assert {f"`{reason}`" for kind in FAILURES.values() for reason in kind.reasons} <= set(
        re.findall("`[a-z_]+`", drops)
    )


# ---------------------------------------------------------------- names


def test_pages_name_keys_that_exist() -> None:
    """`section.key` in any page is a key of ours, but for files, and the pages that have the names of others."""
    known = leaves(Config)
    sections = "|".join(sorted({key.partition(".")[0] for key in known if "." in key}))
    for page in [ROOT / "README.md", *sorted({*DOCS.glob("*.md")} - {DOCS / "coming_from.md", DOCS / "config.md"})]:
        named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)(?: =[^`]*)?`", page.read_text()))
        files = {name for name in named if name.endswith((".jsonl", ".parquet", ".sqlite", ".py"))}
        assert named - files <= known.keys(), page.name


def test_our_names_beside_those_of_others_are_keys() -> None:
    table = (DOCS / "coming_from.md").read_text().partition("| --- |")[2].partition("\n\n")[0]
    ours = [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in table.splitlines()[1:]]
    assert len(ours) > 20 and all(ours)
    assert {key for keys in ours for key in keys} <= leaves(Config).keys()


# ---------------------------------------------------------------- metrics

B, GROUP_SIZE, EVAL_ROWS = 2, 2, 1
SAMPLE_LENGTH = 3
V0 = Version(0, 0)


class Prompts:
    """A pool that never ends; each prompt is two tokens."""

    def __len__(self) -> int:
        return 8

    def exhausted(self, cursor: int) -> bool:
        return False

    def draw(self, cursor: int) -> Drawn:
        return self.take(cursor)

    def take(self, row_index: int, epoch: int = 0) -> Drawn:
        row = {"prompt": f"row {row_index}"}
        return Drawn(row_index, epoch, row, json.dumps(row), np.array([1, 2], np.int32))


class Shelf:
    """Publisher and manager of a trainer, without readers."""

    def records(self) -> list[tuple[Version, str]]:
        return []

    def digest(self, weights: Iterator[tuple[str, Tensor]]) -> str:
        return str(sum(float(tensor.double().sum()) for _, tensor in weights))

    def append_record(self, version: Version, fingerprint: str) -> None: ...

    def publish(self, version: Version, weights: Iterator[tuple[str, Tensor]], golden: Sequence[float]) -> str:
        return self.digest(weights)

    def published(self, version: Version, checkpoint: int) -> None: ...


@pytest.fixture
def config(tmp_path: Path) -> Config:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=16, **shape)).save_pretrained(tmp_path / "model")
    sections: dict[str, Any] = {
        "iterations": 1,
        "model": {"path": tmp_path / "model"},
        "data": {"train": "rows.jsonl", "eval": "held-out.jsonl"},
        "reward": {"functions": ["reward.py:right", "reward.py:short"]},
        "train": {"groups_per_batch": B, "group_size": GROUP_SIZE},
    }
    return Config(**sections)


def generate_and_score(store: DataStore) -> None:
    """Everything that has been issued to the replica is generated, accepted, and scored."""
    work = store.exchange(ReplicaReport("replica-0", 1, 1)).work
    tokens = np.arange(3, 3 + SAMPLE_LENGTH, dtype=np.int32).tobytes()
    logprobs, mask = np.full(SAMPLE_LENGTH, -2.7, np.float32).tobytes(), np.ones(SAMPLE_LENGTH, np.uint8).tobytes()
    store.exchange(
        ReplicaReport(
            "replica-0",
            1,
            2,
            chunks=tuple(Chunk(w.sample, w.owner_epoch, 0, V0, tokens, logprobs, mask) for w in work),
            finished=tuple(Finish(w.sample, w.owner_epoch, SAMPLE_LENGTH, "stop") for w in work),
            accepted=tuple((w.sample, w.owner_epoch) for w in work),
        )
    )
    groups = store.exchange_scores(ScoreReport(1, want=100))
    scores = [
        GroupScore(
            g.group,
            tuple(MemberScore(m.index, m.attempt, m.index / 2, {"right": 1.0, "short": None}) for m in g.members),
            metrics={"words": 3.0},
        )
        for g in groups
    ]
    store.exchange_scores(ScoreReport(1, tuple(scores)))


@pytest.fixture
def run_folder(config: Config, tmp_path: Path) -> Path:
    """What one evaluation and one iteration of the real data store and the real trainer write."""
    ticks = iter(range(1000))
    settings = config.settings(eval_groups=EVAL_ROWS)
    store = DataStore(tmp_path, settings, Prompts(), Prompts(), fifo, lambda: float(next(ticks)))  # type: ignore[arg-type]
    apply(store, [Issue("replica-0", 1, V0, EVAL_ROWS, "eval", "test"), Issue("replica-0", 1, V0, B, "train", "test")])
    generate_and_score(store)
    shelf = Shelf()
    assert TrainerLoop(config, TorchBackend(config), store, shelf, shelf, tmp_path / "checkpoints").run()
    store.close()
    return tmp_path


def documented_keys(heading: str) -> set[str]:
    """Keys in the first column of the tables below `## heading` of docs/metrics.md."""
    _, _, rest = (DOCS / "metrics.md").read_text().partition(f"\n## {heading}\n")
    section, _, _ = rest.partition("\n## ")
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def written_keys(path: Path) -> set[str]:
    (row,) = map(json.loads, path.read_text().splitlines())
    words = {"rewards": "function", "logged": "name", "failures": "boundary", "deaths": "role"}
    prefixes = {key: key.partition("/")[0] for key in row}
    return {f"{prefix}/<{words[prefix]}>" if prefix in words else key for key, prefix in prefixes.items()}


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl"])
def test_documented_keys_are_those_that_are_written(run_folder: Path, name: str) -> None:
    assert documented_keys(name) == written_keys(run_folder / name)


def test_numbers_of_a_row_are_those_of_its_batch(run_folder: Path) -> None:
    """The meaning that docs/metrics.md gives to the counts and means of a row."""
    (row,) = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    expected = {
        "version": 1,
        "num_samples": B * GROUP_SIZE,
        "num_tokens": B * GROUP_SIZE * (2 + SAMPLE_LENGTH),
        "response_tokens_mean": SAMPLE_LENGTH,
        "staleness_use_max": 0,
        "rewards/right": 1.0,
        "rewards/short": None,
        "logged/words": 3.0,
        "reward_mean": 0.25,
        "zero_variance_fraction": 0.0,
        "truncated_fraction": 0.0,
        "kl_ref": None,
        "kl_old": 0.0,
        "num_dropped": 0,
        "failures/engine": 0,
        "deaths/replica": 0,
    }
    assert {key: row[key] for key in expected} == expected
    assert row["samples_per_s"] == row["num_samples"] / row["iteration_s"]
