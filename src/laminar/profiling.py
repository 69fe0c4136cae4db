"""A profile of a run that has been: what `laminar simulate` and `laminar plan` need to foretell others like it.

Everything is read from the run folder. When a replica has been given a batch of samples at once, each end of one of
them is an observation: so many decode steps, of so many tokens, have taken so long since. The trainer says itself how
long it trained on how many tokens. Times that one machine can't show (a broadcast, colocated GPUs) are 0.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from heapq import heappop, heappush
from statistics import NormalDist, fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.config import Config, EvalConfig, load
from laminar.control.commands import Pull
from laminar.control.events import (
    Adopted,
    Buffered,
    Dropped,
    Finished,
    Issued,
    Orphaned,
    ReplicaBeat,
    StoreEvents,
    Tick,
)
from laminar.control.manager import Record
from laminar.data import schema
from laminar.errors import ConfigError
from laminar.reports import records
from laminar.run_folder import RunFolder, read_jsonl
from laminar.timing import Profile, Quantiles
from laminar.types import SampleId, Version

PROBABILITIES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
WARM_UP = 1
"""Iterations that are left out: in them things are loaded and compiled."""
MIN_OBSERVATIONS = 20
FREE = 1e9
"""Tokens a second of what took no time that could be seen."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    profile: Profile
    sources: dict[str, str]
    """By field: where the number is from."""
    iterations: int
    throughput_tok_s: float
    """Of the run, its first iteration left out: what a simulation with the profile should give."""


@dataclass(slots=True)
class _Stint:
    """Samples that a replica was given at once, when it held nothing."""

    began: float
    samples: tuple[SampleId, ...]
    ends: list[tuple[float, SampleId]] = field(default_factory=list)


def measure(folder: RunFolder) -> Measured:
    """Raises ConfigError if the run has too little to measure."""
    config = load(folder.config)
    rows = [row for row in read_jsonl(folder.metrics)][WARM_UP:]
    if len(rows) < 2:
        raise ConfigError(
            "too short a run to measure",
            where=str(folder.path),
            expected=f"at least {WARM_UP + 2} iterations",
            got=f"{len(rows) + WARM_UP}",
        )
    with closing(schema.connect_read_only(folder.database)) as db:
        lengths, prompt_tokens = _lengths(db), _prompt_tokens(db)
    log = _Log(records(folder))
    step_s, per_sequence, per_kv_token, prefill = _decoding(
        log.stints, lengths, prompt_tokens, config.rollout.max_num_seqs
    )
    rate, per_mini_batch = _training(rows, config.train.num_mini_batches)
    rest = fmean(max(0.0, r["iteration_s"] - r["trainer_wait_s"] - r["train_s"] - r["publish_stall_s"]) for r in rows)
    known = config.profile if config.emulated else None
    profile = Profile(
        name=folder.path.name,
        gpus_per_replica=known.gpus_per_replica if known else 1,
        step_s=step_s,
        step_s_per_sequence=per_sequence,
        step_s_per_kv_token=per_kv_token,
        prefill_tokens_per_s=prefill,
        kv_tokens=config.rollout.kv_tokens
        or config.rollout.max_num_seqs * (round(prompt_tokens) + config.rollout.max_new_tokens),
        max_num_seqs=config.rollout.max_num_seqs,
        prompt_tokens=max(1, round(prompt_tokens)),
        max_response_tokens=config.rollout.max_new_tokens,
        response_quantiles=_quantiles(lengths.values()),
        correlation=_correlation(lengths),
        reward_s=log.reward_s,
        train_tokens_per_s_per_gpu=rate / (config.train.gpus or 1),
        train_s_per_mini_batch=per_mini_batch,
        train_s_per_iteration=rest,
        weight_bytes=known.weight_bytes if known else _weight_bytes(config),
        publish_stall_s=fmean(r["publish_stall_s"] for r in rows),
        broadcast_s_per_gb=0.0,
        broadcast_s_per_gb_per_doubling=0.0,
        load_weights_s=log.load_s,
        switch_s=0.0,
    )
    return Measured(
        profile,
        _sources(len(log.stints), len(rows), len(lengths)),
        iterations=len(rows) + WARM_UP,
        throughput_tok_s=sum(r["num_tokens"] for r in rows) / sum(r["iteration_s"] for r in rows),
    )


def as_toml(measured: Measured, run: RunFolder) -> str:
    """A file that `simulation.profile` may name."""
    lines = [
        f"# Measured in {run.path} by `laminar profile`; GPUs are replicas and the trainer's process if it had none."
    ]
    for f in fields(Profile):
        value = getattr(measured.profile, f.name)
        if f.name == "name" or value == () or f.name in ("tool_calls", "train_gpus_multiple"):
            continue
        text = (
            str([list(row) for row in value])
            if isinstance(value, tuple)
            else f"{value:.6g}"
            if isinstance(value, float)
            else str(value)
        )
        source = measured.sources.get(f.name)
        lines.append(f"{f.name} = {text}" + (f"  # {source}" if source else ""))
    return "\n".join(lines) + "\n"


def overrides(config: Config, profile: str, iterations: int) -> list[str]:
    """What makes the config of a measured run one that is simulated with its profile, for so many iterations."""
    changes = ["rollout.engine=emulated", "train.backend=emulated", f"simulation.profile={profile}"]
    changes += [f"iterations={iterations}"] * (config.iterations is None)
    if config.emulated:
        return [*changes, *["simulation.time_scale=1"] * (config.simulation.time_scale != 1)]
    set_keys = {
        "data.eval": config.data.eval,
        "data.epochs": config.data.epochs,
        "train.loss": config.train.loss,
        "train.advantage": config.train.advantage,
    }
    usual = EvalConfig()
    evaluation = {f"eval.{name}": getattr(usual, name) for name in EvalConfig.model_fields}
    return [
        *changes,
        "train.gpus=1",
        *(f"{key}=none" for key, value in set_keys.items() if value is not None),
        *(
            f"{key}={'none' if value is None else str(value).lower()}"
            for key, value in evaluation.items()
            if getattr(config.eval, key.partition(".")[2]) != value
        ),
    ]


def _sources(stints: int, rows: int, samples: int) -> dict[str, str]:
    decoding = f"fitted to the ends of the samples of {stints} batches that replicas were given"
    training = f"fitted to train_s and num_tokens of {rows} iterations"
    return {
        "gpus_per_replica": "a process counts as one",
        "step_s": decoding,
        "step_s_per_sequence": decoding,
        "step_s_per_kv_token": decoding,
        "prefill_tokens_per_s": decoding + ", what passes before the first step included",
        "kv_tokens": "of the config",
        "max_num_seqs": "of the config",
        "prompt_tokens": "mean",
        "max_response_tokens": "of the config",
        "response_quantiles": f"of {samples} samples",
        "correlation": "of lengths within a group",
        "reward_s": "median, from the last end of a group to its scores",
        "train_tokens_per_s_per_gpu": training,
        "train_s_per_mini_batch": training,
        "train_s_per_iteration": "mean of what an iteration takes beside waiting, training and publishing",
        "publish_stall_s": "mean",
        "load_weights_s": "median, from the order to pull to the word that it is done",
        "broadcast_s_per_gb": "not to be seen on one machine",
        "switch_s": "not to be seen: trainer and replicas have not shared anything",
    }


# ---------------------------------------------------------------- what the log says


class _Log:
    """Times from the manager's log."""

    def __init__(self, log: Iterable[Record]) -> None:
        self.stints: list[_Stint] = []
        """Those in which nothing else came and nothing went elsewhere."""
        self._open: dict[str, _Stint] = {}
        self._owners: dict[SampleId, str] = {}
        self._ended: dict[int, float] = {}
        """Group -> when its newest sample ended."""
        self._rewards_s: list[float] = []
        self._pulls: dict[str, tuple[float, Version]] = {}
        self._loads_s: list[float] = []
        for record in log:
            self._take(record)

    @property
    def reward_s(self) -> float:
        return median(self._rewards_s) if self._rewards_s else 0.0

    @property
    def load_s(self) -> float:
        return median(self._loads_s) if self._loads_s else 0.0

    def _take(self, record: Record) -> None:
        beats = record.event.beats if isinstance(record.event, Tick) else (record.event,)
        for beat in beats:
            if isinstance(beat, ReplicaBeat) and beat.replica in self._pulls:
                asked, version = self._pulls[beat.replica]
                if beat.version == version:
                    self._loads_s.append(record.now - asked)
                    del self._pulls[beat.replica]
        for command in record.commands:
            if isinstance(command, Pull):
                self._pulls[command.replica] = record.now, command.version
        if isinstance(record.event, StoreEvents):
            for event in record.event.events:
                match event:
                    case Issued(replica=replica, samples=samples, restarted=restarted):
                        fresh = self._open.pop(replica, None) is None and not restarted
                        if fresh and samples:
                            self._open[replica] = _Stint(record.now, samples)
                            self._owners.update(dict.fromkeys(samples, replica))
                    case Finished(samples=samples):
                        for sample in samples:
                            self._end(record.now, sample)
                    case Buffered(groups=groups):
                        self._rewards_s += [record.now - self._ended.pop(g) for g in groups if g in self._ended]
                    case Adopted(samples=samples) | Orphaned(samples=samples) | Dropped(samples=samples):
                        for sample in samples:
                            self._open.pop(self._owners.pop(sample, ""), None)

    def _end(self, now: float, sample: SampleId) -> None:
        self._ended[sample.group] = now
        replica = self._owners.pop(sample, "")
        if (stint := self._open.get(replica)) is not None:
            stint.ends.append((now, sample))
            if len(stint.ends) == len(stint.samples):
                self.stints.append(self._open.pop(replica))


# ---------------------------------------------------------------- fits


def _decoding(
    stints: Sequence[_Stint], lengths: dict[SampleId, int], prompt: float, max_num_seqs: int
) -> tuple[float, float, float, float]:
    """Seconds a step, a sequence in it, a token of keys and values in it; tokens of prefill a second.

    Raises ConfigError if there are too few observations.
    """
    rows = [row for stint in stints for row in _observations(stint, lengths, prompt, max_num_seqs)]
    if len(rows) < MIN_OBSERVATIONS:
        raise ConfigError(
            "too few ends of samples in batches that a replica was given at once and ended alone",
            where="the event log of the run",
            expected=str(MIN_OBSERVATIONS),
            got=str(len(rows)),
            fix='measure a run with rollout.admission = "batch", not under `partial`',
        )
    table = np.array(rows)
    step_s, per_sequence, per_kv_token, prefill_s = fit(table[:, :-1], table[:, -1])
    if step_s + per_sequence == 0:
        step_s, prefill_s = fit(table[:, [0, 3]], table[:, -1])
    return step_s, per_sequence, per_kv_token, 1 / prefill_s if prefill_s > 0 else FREE


def _observations(
    stint: _Stint, lengths: dict[SampleId, int], prompt: float, max_num_seqs: int
) -> Iterator[tuple[float, ...]]:
    """(steps, tokens, tokens held summed over the steps, tokens of prefill, seconds) until each end of a sample.

    Samples begin in their order, as places become free. Ends that were told together are one observation, that of the
    last of them.
    """
    known = [s for s in stint.samples if s in lengths]
    length = np.array([lengths[s] for s in known], dtype=float)
    begins = np.array(_begins([lengths[s] for s in known], max_num_seqs), dtype=float)
    last = dict(zip(known, begins + length, strict=True))
    at: dict[float, float] = {}
    for now, sample in stint.ends:
        at[now] = max(at.get(now, 0.0), last.get(sample, 0.0))
    for now, steps in at.items():
        made = np.clip(steps - begins, 0, length)
        held = made * prompt + made**2 / 2
        yield steps, made.sum(), held.sum(), prompt * (begins < steps).sum(), now - stint.began


def _begins(lengths: Sequence[int], places: int) -> list[int]:
    """The decode step at which each sequence begins, the first come first."""
    free = [0] * places
    begins = []
    for length in lengths:
        begins.append(heappop(free))
        heappush(free, begins[-1] + length)
    return begins


def _training(rows: Sequence[dict[str, Any]], num_mini_batches: int) -> tuple[float, float]:
    """Tokens a second, and seconds a mini-batch."""
    seconds = np.array([row["train_s"] for row in rows])
    tokens = np.array([row["num_tokens"] for row in rows], dtype=float)
    per_token, per_mini_batch = fit(np.stack([tokens, np.full(len(rows), num_mini_batches)], axis=1), seconds)
    return (1 / per_token if per_token > 0 else FREE), per_mini_batch


def fit(table: Floats, seconds: Floats) -> list[float]:
    """Least squares of [n, k] and [n] with k coefficients >= 0: what would be negative is left out, the worst first."""
    used = list(range(table.shape[1]))
    while used:
        scale = np.abs(table[:, used]).max(axis=0)
        scale[scale == 0] = 1.0
        found = np.linalg.lstsq(table[:, used] / scale, seconds, rcond=1e-9)[0] / scale
        if (found >= 0).all():
            break
        used.pop(int(np.argmin(found * scale)))
    coefficients = [0.0] * table.shape[1]
    for i, value in zip(used, found if used else (), strict=True):
        coefficients[i] = float(value)
    return coefficients


# ---------------------------------------------------------------- what the database says


def _lengths(db: sqlite3.Connection) -> dict[SampleId, int]:
    """Of training samples that have ended."""
    query = (
        "SELECT group_id, idx, length FROM samples s JOIN groups g ON g.id = s.group_id "
        "WHERE g.kind = 'train' AND s.finish_reason IS NOT NULL AND s.length > 0"
    )
    return {SampleId(group, idx): length for group, idx, length in db.execute(query)}


def _prompt_tokens(db: sqlite3.Connection) -> float:
    (mean,) = db.execute("SELECT AVG(prompt_tokens) FROM groups WHERE kind = 'train'").fetchone()
    return float(mean or 1)


def _weight_bytes(config: Config) -> int:
    files = [file for pattern in ("*.safetensors", "*.bin") for file in config.model_path.glob(pattern)]
    return max(1, sum(file.stat().st_size for file in files))


def _quantiles(lengths: Iterable[int]) -> Quantiles:
    values = np.quantile(np.array(list(lengths)), PROBABILITIES)
    return tuple((p, round(float(value), 1)) for p, value in zip(PROBABILITIES, values, strict=True))


def _correlation(lengths: dict[SampleId, int]) -> float:
    """Between the normal scores of two responses to one prompt: between groups' share of the variance, 0 … 1."""
    ordered = sorted(lengths, key=lambda sample: (lengths[sample], sample))
    normal = NormalDist()
    groups: dict[int, list[float]] = {}
    for rank, sample in enumerate(ordered):
        groups.setdefault(sample.group, []).append(normal.inv_cdf((rank + 0.5) / len(ordered)))
    pairs = [(sum(g) ** 2 - sum(x * x for x in g), len(g) * (len(g) - 1)) for g in groups.values() if len(g) > 1]
    total = sum(count for _, count in pairs)
    return min(1.0, max(0.0, sum(product for product, _ in pairs) / total)) if total else 0.0
