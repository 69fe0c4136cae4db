"""Does the simulator foretell the runtime? Runs the same configs in both and compares what came out.

With one replica and fixed times every group must have the same version and be in the same batch. With eight replicas
milliseconds decide which of two groups is issued first, and more than one history may come of that. So the simulator is
told how late each replica was there, and draws how long messages take, 20 times: in one of these histories throughput
must agree within 10 %, and the histograms of staleness within 0.05 in total variation. Exits with 1 if not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

from laminar import config as configs
from laminar.config import Config
from laminar.control.events import ReplicaBeat, Tick, TrainerBeat
from laminar.data import schema
from laminar.plot import Point
from laminar.reports import records
from laminar.run_folder import RunFolder, read_jsonl
from laminar.runtime import launch
from laminar.sim.plan import Plan
from laminar.sim.simulate import plan_of
from laminar.sim.world import World

CONFIGS = {1: "one_replica.toml", 8: "eight_replicas.toml"}
"""By number of replicas."""
SCHEDULES = {"sync": 4, "one_step": 5, "stream": 5, "partial": 15, "laminar": 15}
"""With the iterations of eight replicas: as many as take about half a minute."""
DRAWS = 20
"""Histories that the simulator gives of a run of many replicas; two of them may be 0.15 apart."""
MAX_RATIO_ERROR = 0.1
MAX_VARIATION = 0.05
"""From the nearest of them"""
WARM_UP = 2
"""Iterations that are not timed."""

Batches = dict[int, tuple[int, int]]
"""Trained group -> version that it was issued under, batch that it was in."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What is compared of a run that has completed."""

    batches: Batches
    tok_s: float
    """Prompt and response tokens of the batches after the warm-up, over the time that they took."""
    use: Counter[int]
    """Samples by staleness at use"""
    generation: Counter[int]
    """Samples by staleness when they were generated"""
    trained: list[Point]
    """Seconds and tokens trained since the first iteration; a point an iteration."""


@dataclass(frozen=True, slots=True)
class Parity:
    """One config in both."""

    schedule: str
    replicas: int
    real_tok_s: float
    simulated_tok_s: float
    ratio: float
    """Simulated over real."""
    variation_use: float
    """Total variation between two histograms: the share of samples that would have to change place."""
    variation_generation: float
    other_batches: int
    """Groups with another version or in another batch."""

    @property
    def holds(self) -> bool:
        """Only one replica leaves no room for chance; only many make a rate that means something."""
        if self.replicas == 1:
            return self.other_batches == 0
        variation = max(self.variation_use, self.variation_generation)
        return abs(self.ratio - 1) <= MAX_RATIO_ERROR and variation <= MAX_VARIATION


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", metavar="schedule", help=f"{', '.join(SCHEDULES)}; all unless given")
    parser.add_argument("--replicas", type=int, nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    arguments = parser.parse_args()
    if unknown := set(arguments.schedules) - SCHEDULES.keys():
        parser.error(f"no such schedule: {', '.join(sorted(unknown))}")
    table = sys.stderr if arguments.json else sys.stdout
    tag, rows = f"parity-{os.getpid()}", []
    print(HEADER, file=table)
    # in memory, since a disk that others use takes seconds for what the simulator has no time for
    with tempfile.TemporaryDirectory(prefix=f"laminar-{tag}-", dir="/dev/shm") as name:
        folder = Path(name)
        with launch.local_ray(tag, [folder]):
            for schedule, replicas in itertools.product(arguments.schedules or SCHEDULES, arguments.replicas):
                rows.append(compare(config_of(schedule, replicas), folder / f"{schedule}-{replicas}"))
                print(as_text(rows[-1]), file=table, flush=True)
    if arguments.json:
        print(json.dumps({"parity": [asdict(row) | {"holds": row.holds} for row in rows]}))
    return int(not all(row.holds for row in rows))


HEADER = "schedule  replicas  real tok/s  simulated  ratio  variation: use  generation  other batches"


def as_text(p: Parity) -> str:
    numbers = f"{p.real_tok_s:10.0f} {p.simulated_tok_s:10.0f} {p.ratio:6.3f} {p.variation_use:15.3f}"
    line = f"{p.schedule:9} {p.replicas:8} {numbers} {p.variation_generation:11.3f} {p.other_batches:14}"
    return line if p.holds else f"{line}  out of bounds"


def config_of(schedule: str, replicas: int) -> Config:
    overrides = [f"schedule={schedule}"]
    if replicas > 1:
        overrides.append(f"iterations={SCHEDULES[schedule]}")
    return configs.load(Path(__file__).with_name("configs") / CONFIGS[replicas], overrides)


def compare(config: Config, run_dir: Path) -> Parity:
    """Run a config in the Ray that is up, and in simulated time."""
    real = observe(config, run_dir)
    foretold = min(histories(config, RunFolder(run_dir)), key=lambda history: _variation(real, history))
    groups = real.batches.keys() | foretold.batches.keys()
    return Parity(
        schedule=config.schedule,
        replicas=config.rollout.replicas,
        real_tok_s=real.tok_s,
        simulated_tok_s=foretold.tok_s,
        ratio=foretold.tok_s / real.tok_s,
        variation_use=total_variation(real.use, foretold.use),
        variation_generation=total_variation(real.generation, foretold.generation),
        other_batches=sum(real.batches.get(group) != foretold.batches.get(group) for group in groups),
    )


def _variation(a: Observed, b: Observed) -> float:
    return max(total_variation(a.use, b.use), total_variation(a.generation, b.generation))


def total_variation(a: Counter[int], b: Counter[int]) -> float:
    return sum(abs(a[age] / a.total() - b[age] / b.total()) for age in a | b) / 2


def _tok_s(tokens: Sequence[int], ends: Sequence[float]) -> float:
    return sum(tokens[WARM_UP:]) / (ends[-1] - ends[WARM_UP - 1])


def _trained(tokens: Sequence[int], ends: Sequence[float]) -> list[Point]:
    return list(zip((end - ends[0] for end in ends), itertools.accumulate([0, *tokens[1:]]), strict=True))


# ---------------------------------------------------------------- the runtime


def observe(config: Config, run_dir: Path) -> Observed:
    folder = launch.prepare(config, run_dir, resume=False)
    launch.run_in(folder, config, time.monotonic(), threading.Event(), lambda line: None)
    rows = list(read_jsonl(folder.metrics))
    tokens, ends = [row["num_tokens"] for row in rows], [row["time_s"] for row in rows]
    ages = _query(
        folder,
        "SELECT g.batch - s.version, s.staleness_generation FROM samples s JOIN groups g ON g.id = s.group_id "
        "WHERE s.state = 'trained'",
    )
    return Observed(
        batches_of(folder),
        _tok_s(tokens, ends),
        Counter(use for use, _ in ages),
        Counter(generation for _, generation in ages),
        _trained(tokens, ends),
    )


def batches_of(folder: RunFolder) -> Batches:
    rows = _query(folder, "SELECT id, version, batch FROM groups WHERE state = 'trained'")
    return {group: (version, batch) for group, version, batch in rows}


def _query(folder: RunFolder, text: str) -> list[tuple[int, ...]]:
    db = schema.connect_read_only(folder.database)
    rows = [tuple(row) for row in db.execute(text)]
    db.close()
    return rows


# ---------------------------------------------------------------- the simulator


def histories(config: Config, run: RunFolder) -> list[Observed]:
    """What may have come of a run: one history, or with many replicas as many as are drawn."""
    plan = one_machine(config)
    if plan.replicas == 1:
        return [foretell(config)]
    delays = replace(plan.delays, jitter=True)
    plan = replace(plan, delays=delays, late_s=lateness(run, plan.replicas))
    return [_observed(_run(World(plan, random=Random(draw)))) for draw in range(DRAWS)]


def lateness(run: RunFolder, replicas: int) -> tuple[float, ...]:
    """By replica: seconds from the first weights to its first word."""
    first: dict[str, float] = {}
    for record in records(run):
        for beat in record.event.beats if isinstance(record.event, Tick) else (record.event,):
            if isinstance(beat, ReplicaBeat):
                first.setdefault(beat.replica, record.now)
            elif isinstance(beat, TrainerBeat) and beat.version is not None:
                first.setdefault("trainer", record.now)
    return tuple(max(0.0, first[f"replica-{i}"] - first["trainer"]) for i in range(replicas))


def foretell(config: Config) -> Observed:
    return _observed(simulated(config))


def _observed(world: World) -> Observed:
    iterations = world.store.iterations
    tokens, ends = [i.tokens for i in iterations], [mark.time for mark in world.marks[1:]]
    return Observed(
        batches_of_simulation(world),
        _tok_s(tokens, ends),
        sum((i.staleness_use for i in iterations), Counter[int]()),
        sum((i.staleness_generation for i in iterations), Counter[int]()),
        _trained(tokens, ends),
    )


def simulated(config: Config, later_s: float = 0.0) -> World:
    """A whole run; each iteration of training ends so much later."""
    plan = one_machine(config)
    profile = replace(plan.profile, train_s_per_iteration=plan.profile.train_s_per_iteration + later_s)
    return _run(World(replace(plan, profile=profile)))


def one_machine(config: Config) -> Plan:
    """Which is where the runtime runs."""
    return replace(plan_of(config), one_machine=True)


def _run(world: World) -> World:
    world.run()
    return world


def batches_of_simulation(world: World) -> Batches:
    trained = (group for group in world.store.groups.values() if group.state == "trained")
    return {group.id: (group.version.number, group.update) for group in trained if group.update is not None}


if __name__ == "__main__":
    raise SystemExit(main())
