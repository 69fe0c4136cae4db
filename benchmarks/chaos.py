"""Does a real run survive what may happen to it? Kills, stops, continues, drains and scales processes, by dice.

The seed chooses the faults; when they hit, the machine decides. After the given time the run is interrupted, in order
or by SIGKILL of its driver or of everything, and resumed, with faults, to its end. It must end by itself, with a closed
ledger, events that replay to the same commands, no staleness bound broken, and no process, socket or shared memory
left. Exits with 1 and the seed if not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.command import Command
from laminar import config as configs
from laminar import reports
from laminar.control.events import DrainRequested, ScaleRequested
from laminar.errors import ConfigError, StorageError
from laminar.requests import send
from laminar.run_folder import NODE, RunFolder, is_running, read_json, read_jsonl
from laminar.runtime import guard

ROOT = Path(__file__).parents[1]
CONFIGS = {
    "emulated": (
        ROOT / "configs" / "emulated" / "toy.toml",
        *("rollout.replicas=3", "simulation.time_scale=5", "train.checkpoint_every=3", "faults.dead_after_s=4"),
    ),
    "sort": (
        ROOT / "examples" / "sort" / "config.toml",
        *("rollout.replicas=2", "train.groups_per_batch=4", "train.group_size=4", "train.checkpoint_every=3"),
        *("data.eval=none", "eval.temperature=0.0", "faults.dead_after_s=8"),
    ),
}
"""Config and overrides, by name."""
FOR_ALL = ("faults.max_restarts=1000", "faults.start_timeout_s=60", "faults.drain_timeout_s=5")
ROLES = ("replica", "replica", "replica", "trainer", "relay", "manager", "datastore", "scorer")
"""Whom a fault hits, replicas more often than others."""
KINDS = ("kill", "kill", "kill", "stop", "stop", "drain", "scale", "terminate", "burst")
MAX_REPLICAS = 4
MORE_ITERATIONS = 5
"""Iterations that a resumed run has to make before it is complete."""
ENDS_WITHIN_S = 300.0
"""After the last fault. Restarts of several processes included, on a machine that others use too."""
KEPT_BY_TORCH = "torchinductor_"
"""A cache of the user's, which is meant to stay."""
GONE_WITHIN_S = 15.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long faults come before the interruption")
    parser.add_argument("--config", default="emulated", help=f"{', '.join(CONFIGS)}, or a .toml file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    path, *overrides = CONFIGS.get(arguments.config, (Path(arguments.config),))
    # short, since sockets are made in it; the run's own temporary files too, so that leftovers are seen
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    chaos = Chaos(RunFolder(folder / "run"), Random(arguments.seed), folder / "t")
    chaos.temporary.mkdir()
    try:
        problems = chaos.run(path, [*map(str, overrides), *FOR_ALL, *arguments.overrides], 60 * arguments.minutes)
    finally:
        chaos.end()
    counts = ", ".join(f"{count} {what}" for what, count in sorted(chaos.counts.items()))
    print(f"seed {arguments.seed}: {chaos.num_rows} iterations; {counts}")
    if problems:
        print(f"seed {arguments.seed} FAILED, run folder {chaos.folder.path}")
        print("\n".join(f"  {problem}" for problem in problems))
        return 1
    shutil.rmtree(folder)
    return 0


@dataclass
class Chaos(Command):
    """One run and what happens to it."""

    dice: Random
    temporary: Path
    counts: Counter[str] = field(default_factory=Counter)
    stopped: dict[int, float] = field(default_factory=dict)
    """Processes to be continued, and when."""

    def run(self, config: Path, overrides: list[str], seconds: float) -> list[str]:
        """Everything. Returns what did not hold."""
        environment = {"TMPDIR": str(self.temporary)}
        self.start(config, *overrides, "iterations=1000000", "--run-dir", self.folder.path, **environment)
        self.wait(lambda: self.num_rows > 0 or not self.goes_on, ENDS_WITHIN_S)
        began = time.monotonic()
        while time.monotonic() < began + seconds and self.goes_on:
            self.fault()
            self.pause(self.dice.choice([0.2, 1.0, 2.0, 4.0]))
        if not self.goes_on:
            return ["the run ended under faults", *self.last_lines()]
        problems = list(self.interrupt())
        more = f"iterations={self.num_rows + MORE_ITERATIONS}"
        self.start("--resume", self.folder.path, more, **environment)
        started = time.monotonic()
        while self.goes_on and time.monotonic() < started + seconds / 2:
            self.pause(self.dice.choice([1.0, 4.0, 8.0]))
            self.fault()
        self.calm()
        if not self.wait(lambda: not self.goes_on, ENDS_WITHIN_S):
            return [*problems, "the run has not ended by itself", *self.last_lines()]
        if self.process is None or self.process.returncode != 0:
            problems += [f"exit code {self.process and self.process.returncode}", *self.last_lines()]
        return [*problems, *self.left_over(), *self.account(completed=True)]

    # ------------------------------------------------------------ its end

    def last_lines(self) -> list[str]:
        return self.output.read_text(errors="replace").splitlines()[-25:]

    def interrupt(self) -> Iterator[str]:
        """The run is ended from outside in one of three ways. Yields what did not hold."""
        assert self.process is not None
        how = self.dice.choice(["signal", "driver", "everything"])
        self.say(how, "interrupts the run")
        if how == "signal":
            self.process.send_signal(self.dice.choice([signal.SIGINT, signal.SIGTERM]))
        else:
            for pid in [self.process.pid, *(guard.marked(self.folder.tag) if how == "everything" else ())]:
                _signal(pid, signal.SIGKILL)
        if not self.wait(lambda: not self.goes_on, GONE_WITHIN_S):
            yield f"the run has not ended {GONE_WITHIN_S:g} s after it was interrupted"
            self.end()
        if how == "signal" and self.process.returncode != 130:
            yield f"interrupted, it ended with {self.process.returncode}"
        self.calm()
        yield from self.left_over()
        yield from self.account(completed=False)

    def end(self) -> None:
        self.calm()
        super().end()

    # ------------------------------------------------------------ faults

    def fault(self) -> None:
        kind = self.dice.choice(KINDS)
        for _ in range(self.dice.randint(2, 4) if kind == "burst" else 1):
            self.hit(self.dice.choice(["kill", "stop"]) if kind == "burst" else kind)

    def hit(self, kind: str) -> None:
        role = "replica" if kind in ("drain", "terminate") else self.dice.choice(ROLES)
        number, seconds, which = self.dice.randint(1, MAX_REPLICAS), self.dice.uniform(0.2, 8.0), self.dice.random()
        rows = read_json(self.folder.processes, {"processes": []})["processes"]
        there = [row for row in rows if row["role"] == role and row["pid"] and is_running(row["pid"])]
        if not there:
            return
        row = there[int(which * len(there))]
        if kind == "scale":
            self.ask(kind, f"to {number} replicas", ScaleRequested(number))
        elif kind == "drain":
            self.ask(kind, row["id"], DrainRequested(row["id"]))
        elif kind == "terminate":
            self.say(kind, row["id"])
            _signal(row["pid"], signal.SIGTERM)
        elif kind == "kill":
            self.say(kind, row["id"])
            _signal(row["pid"], signal.SIGKILL)
        else:
            self.say(kind, f"{row['id']} for {seconds:.1f} s")
            _signal(row["pid"], signal.SIGSTOP)
            self.stopped[row["pid"]] = time.monotonic() + seconds

    def ask(self, kind: str, what: str, request: DrainRequested | ScaleRequested) -> None:
        try:
            send(self.folder, request)
            self.say(kind, what)
        except (ConfigError, StorageError) as refused:
            self.say(f"refused {kind}", f"{what}: {refused}")

    def say(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        text = f"{time.strftime('%H:%M:%S')}  chaos: {kind} {what}\n"
        with self.output.open("a") as output:
            output.write(text)

    def pause(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Until this holds, at most so long; meanwhile those whose time has come are continued."""
        deadline = time.monotonic() + seconds
        while not (holds := condition()) and time.monotonic() < deadline:
            for pid in [pid for pid, until in self.stopped.items() if until < time.monotonic()]:
                del self.stopped[pid]
                _signal(pid, signal.SIGCONT)
            time.sleep(0.05)
        return holds

    def calm(self) -> None:
        """Continue everybody."""
        for pid in self.stopped:
            _signal(pid, signal.SIGCONT)
        self.stopped.clear()

    # ------------------------------------------------------------ what must hold

    def left_over(self) -> Iterator[str]:
        """Processes, sockets and shared memory of a run that has ended."""
        self.wait(lambda: not guard.marked(self.folder.tag) and not self.files(), GONE_WITHIN_S)
        for pid in guard.marked(self.folder.tag):
            yield f"process {pid} is left: {Path(f'/proc/{pid}/cmdline').read_text()[:80]!r}"
        yield from (f"{path} is left" for path in self.files())

    def files(self) -> list[Path]:
        slots = self.folder.slots(NODE)
        temporary = (path for path in self.temporary.iterdir() if not path.name.startswith(KEPT_BY_TORCH))
        return [*temporary, *([slots] if slots.exists() else [])]

    def account(self, completed: bool) -> Iterator[str]:
        account = reports.ledger(self.folder)
        yield from account["violations"]
        if not account["closed"]:
            yield "the ledger is not closed"
        if completed and account["samples"]["in_flight"]:
            yield f"{account['samples']['in_flight']} samples are in flight after the end"
        if unexpected := account["samples"]["dropped"].keys() - {"run_ended", "trainer_error", "group_incomplete"}:
            yield f"samples were dropped as {', '.join(sorted(unexpected))}"
        yield from reports.replay(self.folder)["details"]
        bound = configs.load(self.folder.config).staleness_bound
        ages = [row["staleness_use_max"] or 0 for row in read_jsonl(self.folder.metrics)]
        if bound is not None and max(ages, default=0) > bound:
            yield f"a batch has staleness {max(ages):g}, the bound is {bound}"
        if "Traceback" in "\n".join(self.last_lines()):
            yield "the user saw a traceback"


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    raise SystemExit(main())
