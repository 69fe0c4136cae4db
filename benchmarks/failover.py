"""How long does a death last? Kills the processes of an emulated run, one after the other, and looks from outside.

Replica: until all that it held runs elsewhere, and how old its last streamed tokens were. Manager: until the next one
gives commands. Data store: until the next one writes. Trainer: until the next version. Exits with 1 beyond the bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.command import Command
from laminar import reports
from laminar.data import schema
from laminar.run_folder import RunFolder, read_jsonl

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "emulated" / "toy.toml"
OVERRIDES = (
    *("rollout.replicas=4", "simulation.time_scale=2", "iterations=1000000", "train.checkpoint_every=5"),
    *("rollout.stream_interval_s=0.5", "faults.max_restarts=1000000"),
)
BOUND_S = {"replica": 2.0, "manager": 5.0, "datastore": 5.0, "trainer": 30.0}
"""By role: until work goes on. The trainer's includes its start and what it replays."""
MAX_TOKEN_AGE_S = 0.5 + 0.25
"""`rollout.stream_interval_s`, and what a report may take on a busy machine."""
PATIENCE_S = 120.0
LOOK_S = 0.01
THROUGHPUT_OVER_S = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """What came of the deaths of one role."""

    role: str
    deaths: int
    median_s: float
    max_s: float
    bound_s: float
    back_median_s: float
    """Until the successor is at work itself."""
    token_age_max_s: float | None
    """Replica: age of what it had streamed last, so at most this much is made again."""
    tok_s_before: float
    tok_s_after: float
    """Over ten seconds that begin with the death; the mean over all deaths."""

    @property
    def holds(self) -> bool:
        return self.max_s <= self.bound_s and (self.token_age_max_s or 0.0) <= MAX_TOKEN_AGE_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roles", nargs="*", metavar="role", help=f"{', '.join(BOUND_S)}; all unless given")
    parser.add_argument("--kills", type=int, default=5, help="of each role")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    arguments = parser.parse_args()
    if unknown := set(arguments.roles) - BOUND_S.keys():
        parser.error(f"no such role: {', '.join(sorted(unknown))}")
    table = sys.stderr if arguments.json else sys.stdout
    print("role       deaths   median      max    bound  successor  token age  tok/s before    after", file=table)
    rows: list[Row] = []
    folder = Path(tempfile.mkdtemp(prefix="failover-", dir="/dev/shm"))
    run = Run(RunFolder(folder / "run"))
    try:
        run.start(CONFIG, *OVERRIDES, "--run-dir", run.folder.path)
        run.wait(lambda: run.num_rows >= 3 and run.all_alive(), "the first iterations")
        for role in arguments.roles or BOUND_S:
            rows.append(run.measure(role, arguments.kills))
            print(as_text(rows[-1]), file=table, flush=True)
        problems = run.stop()
    finally:
        run.end()
        shutil.rmtree(folder, ignore_errors=True)
    for problem in problems:
        print(problem, file=table)
    if arguments.json:
        print(json.dumps({"failover": [asdict(row) | {"holds": row.holds} for row in rows], "problems": problems}))
    return int(bool(problems) or not all(row.holds for row in rows))


def as_text(row: Row) -> str:
    age = "-" if row.token_age_max_s is None else f"{row.token_age_max_s:.2f} s"
    line = (
        f"{row.role:9} {row.deaths:7} {row.median_s:6.2f} s {row.max_s:6.2f} s {row.bound_s:6.1f} s "
        f"{row.back_median_s:8.2f} s {age:>10} {row.tok_s_before:13.0f} {row.tok_s_after:8.0f}"
    )
    return line if row.holds else f"{line}  out of bounds"


class Run(Command):
    """A run, and what can be seen of it."""

    def processes(self, role: str) -> dict[str, int]:
        """Pids by id, of those that are at work."""
        rows = reports.processes(self.folder)["processes"]
        return {
            row["id"]: row["pid"]
            for row in rows
            if row["role"] == role and row["state"] == "alive" and (role != "replica" or row["version"] is not None)
        }

    def all_alive(self) -> bool:
        states = [row["state"] for row in reports.processes(self.folder)["processes"]]
        return bool(states) and set(states) == {"alive"}

    def wait(self, condition: Callable[[], object], what: str) -> float:
        """The moment at which this holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline or not self.goes_on:
                raise SystemExit(f"{what} did not come\n{self.output.read_text()[-3000:]}")
            time.sleep(LOOK_S)
        return time.monotonic()

    def measure(self, role: str, kills: int) -> Row:
        looks = {
            "replica": self._until_adopted,
            "manager": self._until_commands,
            "datastore": self._until_writes,
            "trainer": self._until_version,
        }
        times, backs, ages, before, after = [], [], [], [], []
        for number in range(kills):
            self.wait(self.all_alive, "the calm before")
            before.append(self._rate())
            victims = sorted(self.processes(role).items())
            victim, pid = victims[number % len(victims)]
            killed, at_work, age = looks[role](victim, pid)
            times.append(at_work - killed)
            ages += [] if age is None else [age]
            back = self.wait(lambda: self.processes(role).get(victim, pid) != pid, "the successor")  # noqa: B023
            backs.append(back - killed)
            self.wait(lambda: time.monotonic() > killed + THROUGHPUT_OVER_S, "the time after")  # noqa: B023
            after.append(self._rate())
        return Row(
            role,
            kills,
            median(times),
            max(times),
            BOUND_S[role],
            median(backs),
            max(ages, default=None),
            sum(before) / kills,
            sum(after) / kills,
        )

    def _rate(self) -> float:
        """Trained tokens a second, over the last seconds."""
        rows = list(read_jsonl(self.folder.metrics))
        recent = [row for row in rows if row["time_s"] > rows[-1]["time_s"] - THROUGHPUT_OVER_S]
        return float(sum(row["num_tokens"] for row in recent) / max(1e-9, sum(row["iteration_s"] for row in recent)))

    # ------------------------------------------------------------ what is looked for, by role

    def _until_adopted(self, replica: str, pid: int) -> tuple[float, float, float | None]:
        """All that it held runs elsewhere, or has ended."""
        with closing(schema.connect_read_only(self.folder.database)) as db:
            query = "SELECT COUNT(*), SUM(length) FROM samples WHERE owner = ? AND state = 'running'"
            self.wait(lambda: db.execute(query, (replica,)).fetchone()[0] >= 4, "work")
            streamed, seen = time.monotonic(), db.execute(query, (replica,)).fetchone()[1]
            moment = streamed + 0.05 * (pid % 10)  # some way into an interval
            while time.monotonic() < moment:
                if (now := db.execute(query, (replica,)).fetchone()[1]) != seen:
                    streamed, seen = time.monotonic(), now
                time.sleep(LOOK_S)
            killed = _kill(pid)
            held = db.execute(
                "SELECT group_id, idx, owner_epoch FROM samples WHERE owner = ? AND state IN ('issued', 'running')",
                (replica,),
            ).fetchall()
            return killed, self.wait(lambda: all(_goes_on(db, *s) for s in held), "adoption"), killed - streamed

    def _until_commands(self, manager: str, pid: int) -> tuple[float, float, None]:
        """There is a log of a new term, and the manager has told somebody to do something."""
        old = {path.name for path in self.folder.events.iterdir()}

        def commands() -> bool:
            logs = [path for path in self.folder.events.iterdir() if path.name not in old]
            return any(row.get("commands") for path in logs for row in read_jsonl(path))

        return _kill(pid), self.wait(commands, "commands"), None

    def _until_writes(self, store: str, pid: int) -> tuple[float, float, None]:
        """What replicas have made since is stored."""
        killed = _kill(pid)
        with closing(schema.connect_read_only(self.folder.database)) as db:
            before = db.execute("SELECT SUM(length), COUNT(*) FROM samples").fetchone()
            wrote = self.wait(lambda: db.execute("SELECT SUM(length), COUNT(*) FROM samples").fetchone() != before, "")
        return killed, wrote, None

    def _until_version(self, trainer: str, pid: int) -> tuple[float, float, None]:
        rows = self.num_rows
        return _kill(pid), self.wait(lambda: self.num_rows > rows, "the next version"), None

    # ------------------------------------------------------------ the end

    def stop(self) -> list[str]:
        """Interrupt it. Returns what does not hold of the run as a whole."""
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(timeout=30)
        account = reports.ledger(self.folder)
        problems = [] if code == 130 else [f"exit code {code}"]
        problems += [f"violation: {line}" for line in account["violations"]]
        problems += [] if account["closed"] else ["the ledger is not closed"]
        return problems + [f"replay: {line}" for line in reports.replay(self.folder)["details"]]


def _kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def _goes_on(db: sqlite3.Connection, group: int, index: int, epoch: int) -> bool:
    """This sample is with another owner, who has it, or has ended."""
    row = db.execute("SELECT state, owner_epoch FROM samples WHERE group_id = ? AND idx = ?", (group, index)).fetchone()
    return row["state"] not in ("orphan", "issued", "running") or (row["state"] == "running" and row[1] > epoch)


if __name__ == "__main__":
    raise SystemExit(main())
