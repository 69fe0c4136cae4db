"""What a simulated run has to say, once its beginning is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean

from laminar.sim.world import World

MAX_WARM_UP = 10
"""Iterations that are not measured; half of them in shorter runs."""


@dataclass(frozen=True, slots=True)
class Staleness:
    mean: float
    max: int
    histogram: dict[str, int]
    """Samples by staleness."""


@dataclass(frozen=True, slots=True)
class Report:
    """Of the iterations after the warm-up, from publish to publish."""

    throughput_tok_s: float
    """Prompt and response tokens of a batch over the time between two publishes, mean over iterations."""
    generation_tok_s: float
    """Response tokens decoded a second, by all replicas."""
    iteration_s: float
    staleness_generation: Staleness
    staleness_use: Staleness
    latency_mean_s: float
    """From the issue of a trained sample to its end, its wait for a place included."""
    latency_max_s: float
    kv_utilization_mean: float
    """Over time and replicas."""
    rollout_busy_fraction: float
    trainer_busy_fraction: float
    """Publishing apart."""
    repack_moves: int
    repack_cost_s: float
    """Replica seconds of prefill, of tokens that another replica had made."""
    wall_s: float
    """Real seconds that the simulation took; all else depends on config and seed alone."""
    seed: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def report(world: World, iterations: int, wall_s: float) -> Report:
    """Of the first `iterations`, which have been trained."""
    warm_up = min(MAX_WARM_UP, iterations // 2)
    marks, measured = world.marks[warm_up : iterations + 1], world.store.iterations[warm_up:iterations]
    first, last = marks[0], marks[-1]
    elapsed = last.time - first.time
    durations = [after.time - before.time for before, after in pairwise(marks)]
    replica_s = elapsed * len(world.replicas)
    latencies = [s for i in measured for s in i.latencies_s]
    return Report(
        throughput_tok_s=fmean(i.tokens / s for i, s in zip(measured, durations, strict=True)),
        generation_tok_s=(last.decoded_tokens - first.decoded_tokens) / elapsed,
        iteration_s=fmean(durations),
        staleness_generation=_staleness(i.staleness_generation for i in measured),
        staleness_use=_staleness(i.staleness_use for i in measured),
        latency_mean_s=fmean(latencies),
        latency_max_s=max(latencies),
        kv_utilization_mean=(last.kv_token_s - first.kv_token_s) / replica_s / _kv_capacity(world),
        rollout_busy_fraction=(last.rollout_busy_s - first.rollout_busy_s) / replica_s,
        trainer_busy_fraction=(last.trainer_busy_s - first.trainer_busy_s) / elapsed,
        repack_moves=last.num_moves - first.num_moves,
        repack_cost_s=last.reprefilled_s - first.reprefilled_s,
        wall_s=wall_s,
        seed=world.plan.seed,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration, from publish to publish."""

    began_s: float
    ended_s: float
    throughput_tok_s: float
    staleness_use: float
    """Mean over samples."""
    kv_utilization: float
    """Mean over time and replicas."""


def history(world: World, iterations: int) -> list[Step]:
    """Each of the first `iterations`, the warm-up included."""
    steps = []
    for (before, after), row in zip(pairwise(world.marks), world.store.iterations[:iterations], strict=False):
        seconds = after.time - before.time
        kv_tokens = (after.kv_token_s - before.kv_token_s) / seconds / len(world.replicas)
        mean = _staleness([row.staleness_use]).mean
        steps.append(Step(before.time, after.time, row.tokens / seconds, mean, kv_tokens / _kv_capacity(world)))
    return steps


def _kv_capacity(world: World) -> int:
    return next(iter(world.replicas.values())).decoder.kv_capacity


def _staleness(counts: Iterable[Counter[int]]) -> Staleness:
    total = sum(counts, Counter[int]())
    mean = sum(age * n for age, n in total.items()) / max(1, total.total())
    return Staleness(mean, max(total, default=0), {str(age): total[age] for age in sorted(total)})
