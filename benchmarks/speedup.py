"""What does it bring to wait for nobody? One config under three schedules, and with repack off, in real processes.

Prints trained tokens a second, how many times that of each schedule `laminar` has, and what the simulator says of it.
Exits with 1 if `laminar` has less than twice the rate of `sync` or 1.5 times that of `one_step`, or if what repack
brings differs from the simulator's word by more than 5 points.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.parity import foretell, observe
from laminar import config as configs
from laminar.plot import Line, Panel, chart
from laminar.runtime import launch

R08 = Path(__file__).parents[1] / "configs" / "emulated" / "r08.toml"
VARIANTS = {
    "laminar": ("schedule=laminar", "iterations=40"),
    "laminar, no repack": ("schedule=laminar", "rollout.repack=false", "iterations=40"),
    "one_step": ("schedule=one_step", "iterations=8"),
    "sync": ("schedule=sync", "iterations=6"),
}
"""With as many iterations as make the rate of `laminar` steady: with 14 a seed moves what repack brings by 5 points."""
AT_LEAST = {"sync": 2.0, "one_step": 1.5}
"""How many times its rate `laminar` has to have."""
MAX_REPACK_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    variant: str
    real_tok_s: float
    simulated_tok_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=R08, help="an emulated one; configs/emulated/r08.toml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the tokens trained against time")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    arguments = parser.parse_args()
    table = sys.stderr if arguments.json else sys.stdout
    print("                        real tok/s  laminar has  simulated  laminar has", file=table)
    rows: dict[str, Row] = {}
    lines: list[Line] = []
    tag = f"speedup-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory(prefix=f"laminar-{tag}-", dir="/dev/shm") as name,
        launch.local_ray(tag, [Path(name)]),
    ):
        for number, (variant, overrides) in enumerate(VARIANTS.items()):
            config = configs.load(arguments.config, [*overrides, *arguments.overrides])
            real = observe(config, Path(name) / str(number))
            foretold = foretell(config)
            rows[variant] = Row(variant, real.tok_s, foretold.tok_s)
            lines.append(Line(real.trained, variant, colour=number))
            lines.append(Line(foretold.trained, dashed=True, colour=number))
            print(as_text(rows[variant], rows["laminar"]), file=table, flush=True)
    if arguments.plot:
        panel = Panel("tokens trained", lines, "seconds; dashed: simulated")
        arguments.plot.write_text(chart([panel], width=720, height=320), encoding="utf-8")
    problems = broken(rows)
    print("\n".join(problems), file=table)
    if arguments.json:
        print(json.dumps({"speedup": [asdict(row) for row in rows.values()], "problems": problems}))
    return int(bool(problems))


def as_text(row: Row, laminar: Row) -> str:
    real, simulated = laminar.real_tok_s / row.real_tok_s, laminar.simulated_tok_s / row.simulated_tok_s
    return f"{row.variant:22} {row.real_tok_s:11.0f} {real:10.2f} x {row.simulated_tok_s:10.0f} {simulated:10.2f} x"


def broken(rows: dict[str, Row]) -> list[str]:
    laminar, without = rows["laminar"], rows["laminar, no repack"]
    ratios = {name: laminar.real_tok_s / rows[name].real_tok_s for name in AT_LEAST}
    problems = [
        f"{name}: {ratios[name]:.2f} x is below {least:g} x" for name, least in AT_LEAST.items() if ratios[name] < least
    ]
    gain = laminar.real_tok_s / without.real_tok_s - laminar.simulated_tok_s / without.simulated_tok_s
    if abs(gain) > MAX_REPACK_ERROR:
        problems.append(f"repack brings {100 * gain:+.1f} points more than in the simulator")
    return problems


if __name__ == "__main__":
    raise SystemExit(main())
