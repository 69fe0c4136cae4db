"""What does the framework itself take, when an engine and a trainer cost nothing?

Runs `configs/free.toml` twice: as it is, which shows how many samples a second go through issue, stream, finish, score,
group and cut; and with small batches and a trainer that works for a tenth of a second, which shows what an iteration
takes beyond its work. Exits with 1 if that is less than 2,000 samples a second, or more than 20 ms.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import Command
from laminar.run_folder import RunFolder, read_jsonl

FREE = Path(__file__).with_name("configs") / "free.toml"
PROFILE = Path(__file__).with_name("profiles") / "free.toml"
WARM_UP = 0.25
"""Share of the iterations that is not timed."""
WORK_S = 0.1
"""Of an iteration of the second run."""
SMALL_BATCHES = ("train.groups_per_batch=8", "train.group_size=4", "rollout.max_in_flight=64")
MIN_SAMPLES_PER_S = 2000
MAX_OVERHEAD_S = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for both runs, such as iterations=20")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the lines on stderr")
    arguments = parser.parse_args()
    lines = sys.stderr if arguments.json else sys.stdout
    with tempfile.TemporaryDirectory(prefix="overhead-", dir="/dev/shm") as name:
        folder = Path(name)
        rows = run(folder / "free", *arguments.overrides)
        samples_per_s = sum(r["num_samples"] for r in rows[1:]) / (rows[-1]["time_s"] - rows[0]["time_s"])
        print(f"{samples_per_s:,.0f} samples a second", file=lines, flush=True)
        profile = working_trainer(folder)
        rows = run(folder / "working", *SMALL_BATCHES, f"simulation.profile={profile}", *arguments.overrides)
        overhead_s = median(r["iteration_s"] for r in rows) - WORK_S
        print(f"{overhead_s * 1000:.1f} ms an iteration beyond its work", file=lines)
    problems = []
    if samples_per_s < MIN_SAMPLES_PER_S:
        problems.append(f"{samples_per_s:,.0f} samples a second, the bound is {MIN_SAMPLES_PER_S:,}")
    if overhead_s > MAX_OVERHEAD_S:
        problems.append(f"{overhead_s * 1000:.1f} ms an iteration, the bound is {MAX_OVERHEAD_S * 1000:.0f}")
    print("\n".join(problems), file=lines)
    if arguments.json:
        print(json.dumps({"samples_per_s": samples_per_s, "overhead_s": overhead_s, "problems": problems}))
    return int(bool(problems))


def run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Metrics rows after the warm-up."""
    command = Command(RunFolder(folder / "run"))
    try:
        command.start(FREE, *overrides, "--run-dir", command.folder.path)
        assert command.process is not None
        if command.process.wait():
            raise SystemExit(command.output.read_text(encoding="utf-8"))
        rows = list(read_jsonl(command.folder.metrics))
    finally:
        command.end()
    return rows[int(WARM_UP * len(rows)) :]


def working_trainer(folder: Path) -> Path:
    """The profile with a trainer that takes `WORK_S` an iteration."""
    text = PROFILE.read_text(encoding="utf-8")
    path = folder / "working_trainer.toml"
    path.write_text(text.replace("train_s_per_iteration = 0", f"train_s_per_iteration = {WORK_S}"), encoding="utf-8")
    return path


if __name__ == "__main__":
    raise SystemExit(main())
