"""What does waiting cost? One config under several schedules, the same number of samples each, one after the other.

Prints a table, and writes `compare.svg`: the reward against time and against samples. The default has response lengths
with a long tail, which is where schedules differ; any config will do:

    python examples/sort/compare.py
    python examples/sort/compare.py my.toml train.lr=1e-5 --schedules sync laminar --out runs/mine
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from laminar.plot import Line, Panel, chart
from laminar.run_folder import read_jsonl

HERE = Path(__file__).parent
LONG_TAIL = HERE / "long_tail.toml"
SMOOTHED_OVER = 10  # iterations

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """One run, by iteration: what a picture and a line of the table are made of."""

    schedule: str
    seconds: list[float]
    """Since the run began to generate."""
    samples: list[int]
    """So far."""
    rewards: list[float]
    """Means over the last iterations."""
    staleness_mean: float
    staleness_max: int
    rollout_busy: float
    trainer_waits: float
    """Shares of the time."""

    def seconds_to(self, reward: float) -> float | None:
        return next((s for s, r in zip(self.seconds, self.rewards, strict=True) if r >= reward), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=LONG_TAIL)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--schedules", nargs="+", default=["sync", "one_step", "laminar"])
    parser.add_argument("--out", type=Path, default=Path("compare"), help="folder for the runs and the picture")
    arguments = parser.parse_intermixed_args()
    if arguments.config == LONG_TAIL and not (HERE / "build" / "long_tail" / ".done").exists():
        subprocess.run([sys.executable, HERE / "prepare.py", "--long-tail"], check=True)
    curves = []
    for schedule in arguments.schedules:
        run = arguments.out / schedule
        laminar = Path(sys.executable).with_name("laminar")
        command = [laminar, "train", arguments.config, f"schedule={schedule}", *arguments.overrides, "--run-dir", run]
        subprocess.run(command, check=True)
        curves.append(curve_of(schedule, list(read_jsonl(run / "metrics.jsonl"))))
    print("\n".join(table(curves)))
    draw(curves, arguments.out / "compare.svg")
    print(f"picture   {arguments.out / 'compare.svg'}")


def curve_of(schedule: str, rows: Sequence[Row]) -> Curve:
    """From the rows of metrics.jsonl, the start of the processes left out."""
    began = rows[0]["time_s"] - rows[0]["iteration_s"]
    rewards = [row["reward_mean"] for row in rows]
    total = rows[-1]["time_s"] - began
    return Curve(
        schedule,
        [row["time_s"] - began for row in rows],
        list(accumulate(row["num_samples"] for row in rows)),
        [fmean(rewards[max(0, i + 1 - SMOOTHED_OVER) : i + 1]) for i in range(len(rows))],
        fmean(row["staleness_use_mean"] for row in rows),
        max(row["staleness_use_max"] for row in rows),
        sum(row["rollout_busy_fraction"] * row["iteration_s"] for row in rows) / total,
        sum(row["trainer_wait_s"] for row in rows) / total,
    )


def table(curves: Sequence[Curve]) -> list[str]:
    """Lines; the common goal is the lowest of the final rewards, so that each run has reached it."""
    goal = min(curve.rewards[-1] for curve in curves)
    lines = [
        "schedule   wall time   samples/s   final reward "
        f"  time to {goal:.2f}   staleness   rollout busy   trainer waits"
    ]
    for c in curves:
        to_goal = c.seconds_to(goal)
        lines.append(
            f"{c.schedule:10} {c.seconds[-1]:7.1f} s {c.samples[-1] / c.seconds[-1]:11.1f} {c.rewards[-1]:14.3f} "
            f"{'-' if to_goal is None else f'{to_goal:.1f} s':>14} {c.staleness_mean:6.2f} (max {c.staleness_max:.0f}) "
            f"{c.rollout_busy:10.0%} {c.trainer_waits:15.0%}"
        )
    return lines


def draw(curves: Sequence[Curve], path: Path) -> None:
    by_time = [Line(list(zip(c.seconds, c.rewards, strict=True)), c.schedule) for c in curves]
    by_samples = [Line(list(zip(c.samples, c.rewards, strict=True)), c.schedule) for c in curves]
    over = f"rewards are means of {SMOOTHED_OVER} iterations"
    panels = [Panel("reward", by_time, f"seconds; {over}"), Panel("reward", by_samples, f"samples; {over}")]
    path.write_text(chart(panels, columns=2))


if __name__ == "__main__":
    main()
