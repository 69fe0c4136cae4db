"""A search for the fastest way to use a number of GPUs: split, schedule, quota, samples in flight, admission.

Coarse to fine. What a trainer and a fleet of replicas could do at best is known without a simulation, and the split at
which both could do the same is where the search begins; around it short runs are simulated, then variants of the best
of them, and the finalists once more for longer. Everything is decided on simulated figures, and the same seed finds
the same plan.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from laminar.config import Config, load
from laminar.errors import ConfigError
from laminar.sim.plan import Plan
from laminar.sim.report import Report
from laminar.sim.simulate import plan_of, simulate
from laminar.timing import Profile, quantile

SHORT, MIDDLE, LONG = 4, 6, 12
"""Iterations of a run that finds the split, that compares variants, and that decides; half of them are measured."""
MORE_REPLICAS = {"laminar": (0.7, 0.85, 1.0, 1.2, 1.5), "stream": (1.0, 1.5, 2.2), "one_step": (1.5,)}
"""Times the replicas at which trainer and replicas could do the same at best; a wave waits for its last response."""
IN_FLIGHT = (0.75, 1.0, 2.0)
QUOTAS = (2, 4)
"""Batches"""
AS_FAST = 0.03
"""Within this share of the fastest, the least stale is taken."""
MAY_BE_STALER = 1.6
"""A split that is so many times as stale as is wanted may be fresh enough with a quota, or with fewer in flight."""
FINALS = 3
"""Tries to find a plan that is as fresh in a long simulation as it was in a short one."""
PROBABILITIES = [(i + 0.5) / 1000 for i in range(1000)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to use the GPUs."""

    schedule: str
    train_gpus: int
    replicas: int
    gpus_per_replica: int
    quota: int | None = None
    """`rollout.max_outstanding_batches`; None: as in the config"""
    in_flight: float | None = None
    """`rollout.batches_in_flight`; None: as in the config"""
    admission: str = "batch"

    @property
    def colocated(self) -> bool:
        return self.schedule == "sync"

    @property
    def overrides(self) -> list[str]:
        """What it changes in the config that is planned for."""
        ours = self.replicas * self.gpus_per_replica
        quota, in_flight = (() if value is None else (value,) for value in (self.quota, self.in_flight))
        return [
            f"gpus={ours if self.colocated else ours + self.train_gpus}",
            f"train.gpus={self.train_gpus}",
            f"rollout.gpus={ours}",
            f"rollout.replicas={self.replicas}",
            f"schedule={self.schedule}",
            f"simulation.colocated={'true' if self.colocated else 'false'}",
            f"rollout.admission={self.admission}",
            *(f"rollout.max_outstanding_batches={batches}" for batches in quota),
            *(f"rollout.batches_in_flight={batches:g}" for batches in in_flight),
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    candidate: Candidate
    report: Report
    iterations: int
    """That were simulated: the more, the surer."""


@dataclass(frozen=True, slots=True)
class Found:
    best: Outcome
    outcomes: tuple[Outcome, ...]
    """Everything that was tried, the fastest first; of each candidate its longest run."""


def search(
    path: Path,
    overrides: Sequence[str],
    gpus: int,
    staleness: float | None = None,
    workers: int = 2,
    say: Callable[[str], None] = lambda line: None,
) -> Found:
    """The best way that was found to use `gpus` for the emulated config at `path` with these overrides.

    Args:
        staleness: largest mean staleness at use of the plan that is chosen; None = any
        workers: processes that simulate
        say: is given a line when a round is over

    Raises ConfigError: not emulated, too few GPUs, or nothing is as fresh as is wanted.
    """
    config = load(path, overrides)
    first = first_round(config, plan_of(config).profile, gpus)
    if workers == 1:
        return _search(_Simulator(path, overrides, _Limits(staleness), map), first, gpus, say)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return _search(_Simulator(path, overrides, _Limits(staleness), pool.map), first, gpus, say)


def _search(simulator: _Simulator, first: Sequence[Candidate], gpus: int, say: Callable[[str], None]) -> Found:
    simulator.run(first, SHORT)
    say(f"splits: {len(simulator.outcomes)} runs, the best {_line(simulator.best())}")
    changed = variants(simulator.best("laminar", staler=MAY_BE_STALER).candidate, simulator.profile, gpus)
    base = simulator.run(changed, MIDDLE)[0]
    say(f"variants: {len(simulator.outcomes)} runs, the best {_line(simulator.best())}")
    better = [o.candidate for o in simulator.ranked(MIDDLE) if simulator.prefers(o, base)]
    simulator.run(combined(base.candidate, better[:2]), MIDDLE)
    for _ in range(FINALS):
        finalists = [*simulator.ranked()[:2], simulator.best()]
        simulator.run(list(dict.fromkeys(outcome.candidate for outcome in finalists)), LONG)
        best = simulator.best(iterations=LONG)
        if simulator.limits.allow(best):
            break
    if not simulator.limits.allow(best):
        raise ConfigError(
            "no plan is as fresh as that",
            where="--staleness",
            expected=f"at least {min(o.report.staleness_use.mean for o in simulator.outcomes.values()):.2f}",
            got=f"{simulator.limits.staleness:g}",
        )
    return Found(best, tuple(simulator.ranked()))


# ---------------------------------------------------------------- candidates


def first_round(config: Config, profile: Profile, gpus: int) -> list[Candidate]:
    """Splits around the balanced one under each schedule, and `sync` on shared GPUs.

    Raises ConfigError if there are not enough GPUs for a trainer and a replica.
    """
    splits = _splits(profile, gpus)
    if not splits:
        raise ConfigError(
            "too few GPUs for a trainer and a replica",
            where="--gpus",
            expected=f"at least {profile.train_gpus_multiple + profile.gpus_per_replica} with profile {profile.name}",
            got=str(gpus),
        )
    balanced = max(
        splits,
        key=lambda split: min(best_training(config, profile, split[0]), split[1] * best_replica(config, profile)),
    )
    found = []
    for schedule, factors in MORE_REPLICAS.items():
        wanted = [min(splits, key=lambda s, f=f: abs(s[1] - f * balanced[1])) for f in factors]  # type: ignore[misc]
        found += [Candidate(schedule, *split, profile.gpus_per_replica) for split in dict.fromkeys(wanted)]
    replicas = gpus // profile.gpus_per_replica
    shared = replicas * profile.gpus_per_replica
    return [*found, Candidate("sync", shared, replicas, profile.gpus_per_replica)]


def variants(base: Candidate, profile: Profile, gpus: int) -> list[Candidate]:
    """`base`, and with one thing changed: the split a little, the quota, what is in flight, the admission."""
    splits = _splits(profile, gpus)
    at = splits.index((base.train_gpus, base.replicas))
    step = max(1, round(base.replicas * 0.08 * profile.gpus_per_replica / profile.train_gpus_multiple))
    near = [splits[i] for i in (at - step, at + step) if 0 <= i < len(splits)]
    return [
        base,
        *(replace(base, train_gpus=train_gpus, replicas=replicas) for train_gpus, replicas in near),
        *(replace(base, quota=quota) for quota in QUOTAS),
        *(replace(base, in_flight=batches) for batches in IN_FLIGHT),
        replace(base, admission="fresh"),
    ]


def combined(base: Candidate, better: Sequence[Candidate]) -> list[Candidate]:
    """`base` with the changes of two, and of all, of `better`; of two that change the same, the first counts."""
    merged = [_merge(base, pair) for pair in combinations(better, 2)]
    return list(dict.fromkeys([*merged, _merge(base, better)]))


def _merge(base: Candidate, others: Sequence[Candidate]) -> Candidate:
    changes: dict[str, Any] = {}
    for other in others:
        for name in ("quota", "in_flight", "admission"):
            if getattr(other, name) != getattr(base, name):
                changes.setdefault(name, getattr(other, name))
        if other.train_gpus != base.train_gpus and "train_gpus" not in changes:
            changes |= {"train_gpus": other.train_gpus, "replicas": other.replicas}
    return replace(base, **changes)


def _splits(profile: Profile, gpus: int) -> list[tuple[int, int]]:
    """(GPUs that train, replicas) that use all GPUs, or all but a part of a replica; most replicas first."""
    step, each = profile.train_gpus_multiple, profile.gpus_per_replica
    return [(train, (gpus - train) // each) for train in range(step, gpus - each + 1, step)]


def best_training(config: Config, profile: Profile, train_gpus: int) -> float:
    """Samples a second of a trainer that never waits."""
    samples = config.train.groups_per_batch * config.train.group_size
    tokens = round(samples * (profile.prompt_tokens + _mean_length(profile)))
    seconds = profile.train_step_s(tokens, config.train.num_mini_batches, train_gpus) + profile.publish_s()
    return samples / seconds


def best_replica(config: Config, profile: Profile) -> float:
    """Samples a second of a replica that always has as many sequences as are best for it, and prefills nothing."""
    lengths = [quantile(profile.response_quantiles, p) for p in PROBABILITIES]
    mean = _mean_length(profile)
    held = profile.prompt_tokens + sum(length * length for length in lengths) / (2 * sum(lengths))
    most = min(config.rollout.max_num_seqs, round((config.rollout.kv_tokens or profile.kv_tokens) / held))
    return max(n / (mean * profile.decode_step_s(n, n * held)) for n in range(1, max(2, most + 1)))


def _mean_length(profile: Profile) -> float:
    return sum(quantile(profile.response_quantiles, p) for p in PROBABILITIES) / len(PROBABILITIES)


# ---------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True)
class _Limits:
    staleness: float | None

    def allow(self, outcome: Outcome, staler: float = 1.0) -> bool:
        return self.staleness is None or outcome.report.staleness_use.mean <= staler * self.staleness


class _Simulator:
    """What has been tried so far."""

    def __init__(self, path: Path, overrides: Sequence[str], limits: _Limits, map_: Callable[..., Any]) -> None:
        self._path, self._overrides, self.limits, self._map = path, list(overrides), limits, map_
        self.profile = load(path, overrides).profile
        self.outcomes: dict[Candidate, Outcome] = {}
        self._plans: dict[Plan, Candidate] = {}
        """What each comes to: a quota beyond what the staleness bound allows, for example, changes nothing."""

    def run(self, candidates: Sequence[Candidate], iterations: int) -> list[Outcome]:
        """Outcomes of those that are not the same as another, of at least so many iterations."""
        distinct = [c for c in candidates if self._plans.setdefault(self._plan(c), c) == c]
        new = [c for c in distinct if c not in self.outcomes or self.outcomes[c].iterations < iterations]
        tasks = [(self._path, self._changes(c, iterations)) for c in new]
        reports: list[Report] = list(self._map(_simulate, tasks))
        for candidate, report in zip(new, reports, strict=True):
            self.outcomes[candidate] = Outcome(candidate, report, iterations)
        return [self.outcomes[c] for c in distinct]

    def _plan(self, candidate: Candidate) -> Plan:
        return plan_of(load(self._path, self._changes(candidate, SHORT)))

    def _changes(self, candidate: Candidate, iterations: int) -> list[str]:
        return [*self._overrides, *candidate.overrides, f"iterations={iterations}"]

    def ranked(self, iterations: int = SHORT) -> list[Outcome]:
        """Those that ran so long, the fastest first, those that are too stale last."""
        ran = [o for o in self.outcomes.values() if o.iterations >= iterations]
        return sorted(ran, key=lambda o: (not self.limits.allow(o), -o.report.throughput_tok_s))

    def prefers(self, one: Outcome, other: Outcome) -> bool:
        """`one` is less stale where that is wanted, else faster."""
        if self.limits.allow(other):
            return self.limits.allow(one) and one.report.throughput_tok_s > other.report.throughput_tok_s
        return one.report.staleness_use.mean < other.report.staleness_use.mean

    def best(self, schedule: str | None = None, iterations: int = SHORT, staler: float = 1.0) -> Outcome:
        """Of those of a schedule, or of all, that ran so long: the least stale of those that are about the fastest.

        `staler`: times the wanted staleness that is still good enough.
        """
        able = [o for o in self.ranked(iterations) if schedule in (None, o.candidate.schedule)]
        fresh = [o for o in able if self.limits.allow(o, staler)]
        enough = (1 - AS_FAST) * max((o.report.throughput_tok_s for o in fresh), default=0.0)
        fast = [o for o in fresh if o.report.throughput_tok_s >= enough]
        return min(fast, key=lambda o: o.report.staleness_use.mean, default=able[0])


def _simulate(task: tuple[Path, list[str]]) -> Report:
    return simulate(load(*task))


def _line(outcome: Outcome) -> str:
    c, r = outcome.candidate, outcome.report
    return f"{c.schedule} with {c.train_gpus} GPUs that train, {r.throughput_tok_s:,.0f} tokens/s"
