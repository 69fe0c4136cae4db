"""What do the processes of a run cost? CPU of each, and whether its memory stays flat, seen from outside.

Exits with 1 if the manager and the data store together take more than 30 % of a core, if the memory of a process grows
by more than a tenth after the warm-up, or if there are more weight slots than the config allows. Of its memory counts
the median of each half of the time: a process that now and then holds two batches does not grow, one that leaks does.
Shared memory is left out: it has bounds of its own, and a process only comes to touch more and more of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.command import LAMINAR
from laminar import config as configs
from laminar import reports
from laminar.run_folder import NODE, RunFolder, read_jsonl

R32 = Path(__file__).parents[1] / "configs" / "emulated" / "r32.toml"
WARM_UP = 0.3
"""Share of the looks that is not counted."""
MAX_GROWTH = 1.1
MAX_CONTROL_CPU = 0.3
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """One process, look by look."""

    memory_mb: list[float] = field(default_factory=list)
    """Resident, without what it shares."""
    cpu_s: list[float] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    def look(self, pid: int) -> None:
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return
        self.memory_mb.append((_kilobytes(status, "VmRSS") - _kilobytes(status, "RssShmem")) / 1024)
        self.cpu_s.append((int(stat[11]) + int(stat[12])) / _TICKS)
        self.at.append(time.monotonic())


def _kilobytes(status: str, name: str) -> int:
    """What /proc/PID/status says; 0 of a process that has just ended."""
    return int(status.partition(f"{name}:")[2].split()[0]) if f"{name}:" in status else 0


@dataclass(frozen=True, slots=True)
class Row:
    process: str
    cpu: float
    """Share of a core after the warm-up."""
    memory_mb_begin: float
    """Median of the first half after the warm-up."""
    memory_mb_end: float
    """Median of the second half."""

    @property
    def grows(self) -> bool:
        return self.memory_mb_end > MAX_GROWTH * self.memory_mb_begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=R32, help="configs/emulated/r32.toml unless given")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    parser.add_argument("--look-every", type=float, default=1.0, metavar="SECONDS", help="1 unless given")
    arguments = parser.parse_args()
    table = sys.stderr if arguments.json else sys.stdout
    with tempfile.TemporaryDirectory(prefix="footprint-", dir="/dev/shm") as name:
        run = RunFolder(Path(name) / "run")
        seen, most_slots = watch(run, arguments.config, arguments.overrides, arguments.look_every)
        iterations = sum(1 for _ in read_jsonl(run.metrics))
    rows = [row_of(name, process) for name, process in sorted(seen.items()) if len(process.at) > 20]
    for line in (f"{iterations} iterations, at most {most_slots} weight slots", HEADER, *map(as_text, rows)):
        print(line, file=table)
    problems = broken(rows, most_slots, configs.load(arguments.config, arguments.overrides).num_slots)
    print("\n".join(problems), file=table)
    if arguments.json:
        print(json.dumps({"footprint": [asdict(row) for row in rows], "problems": problems}))
    return int(bool(problems))


def watch(run: RunFolder, config: Path, overrides: list[str], look_every_s: float) -> tuple[dict[str, Seen], int]:
    """Run it to its end. Returns what was seen of each process once there was an iteration, and the most slots."""
    seen: dict[str, Seen] = {}
    most_slots = 0
    train = [LAMINAR, "train", config, *overrides, "--run-dir", run.path]
    with subprocess.Popen(train, stdout=sys.stderr) as command:
        while command.poll() is None:
            time.sleep(look_every_s)
            if not any(read_jsonl(run.metrics)):
                continue
            for process in reports.processes(run)["processes"]:
                seen.setdefault(process["id"], Seen()).look(process["pid"])
            slots = run.slots(NODE)
            most_slots = max(most_slots, len(list(slots.glob("*.safetensors"))) if slots.exists() else 0)
        if command.returncode:
            raise SystemExit(f"the run ended with {command.returncode}")
    return seen, most_slots


def row_of(name: str, seen: Seen) -> Row:
    first = int(len(seen.at) * WARM_UP)
    memory = seen.memory_mb[first:-1]
    half = len(memory) // 2
    cpu = (seen.cpu_s[-1] - seen.cpu_s[first]) / (seen.at[-1] - seen.at[first])
    return Row(name, cpu, median(memory[:half]), median(memory[half:]))


HEADER = "process          CPU   memory, first half   second half"


def as_text(row: Row) -> str:
    line = f"{row.process:12} {row.cpu:7.1%} {row.memory_mb_begin:15.0f} MB {row.memory_mb_end:12.0f} MB"
    return f"{line}  grows" if row.grows else line


def broken(rows: list[Row], most_slots: int, allowed_slots: int) -> list[str]:
    control = sum(row.cpu for row in rows if row.process in ("manager", "datastore"))
    problems = [f"{row.process} grows" for row in rows if row.grows]
    if control > MAX_CONTROL_CPU:
        problems.append(f"manager and data store take {control:.0%} of a core, the bound is {MAX_CONTROL_CPU:.0%}")
    if most_slots > allowed_slots:
        problems.append(f"{most_slots} weight slots, the bound is {allowed_slots}")
    return problems


if __name__ == "__main__":
    raise SystemExit(main())
