"""The live view of a run in the terminal: reads files of its folder, and knows nothing else.

On a terminal one line is kept up to date; anywhere else each iteration is a plain line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from laminar.run_folder import NewRows, RunFolder, read_json

LOOK_EVERY_S = 0.25
SHOWN_CHARACTERS = 1_000
CURVE_CELLS = 16
_LEVELS = "▁▂▃▄▅▆▇█"


class Follower:
    """Calls `look` from a thread, again and again, and a last time when it is told to stop."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does nothing if it was not started."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self._look()
        self._look()


class _WithLine(Progress):
    """A line of text below the bar."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.line, style="dim", overflow="ellipsis", no_wrap=True)


class View:
    """Follows a run folder in a thread while the `with` block lasts."""

    def __init__(self, folder: RunFolder, iterations: int | None, console: Console | None = None) -> None:
        self.folder, self.iterations = folder, iterations
        self.console = console or Console(stderr=True, highlight=False)
        self._follower = Follower(self._look)
        self._metrics, self._evals = NewRows(folder.metrics), NewRows(folder.evals)
        self._evals.take()
        self._rewards = [row["reward_mean"] for row in self._metrics.take()]
        """Of all iterations, those of earlier starts included."""
        self._has_rows = False
        """Of this start."""
        self._pace: tuple[int, float] | None = None
        """Version and time of the first row of this start: start-up says nothing about the rest."""
        self._phase = ""
        self._first_prompt_shown = False
        self._progress = _WithLine(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task("starting", total=iterations, left="")

    def __enter__(self) -> Self:
        self._progress.start()
        self._follower.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._follower.stop()
        self._progress.stop()

    def say(self, line: str) -> None:
        """A line for the user, above the live one."""
        self._progress.console.print(line, markup=False, soft_wrap=True)

    def _look(self) -> None:
        processes = read_json(self.folder.processes, {"processes": []})["processes"]
        self._progress.line = activities(processes)
        if not self._first_prompt_shown and self.folder.first_prompt.exists():
            self._first_prompt_shown = True
            prompt = self.folder.first_prompt.read_text(encoding="utf-8")
            self.say(f"first prompt: {_cut(prompt)!r}")
        for row in self._evals.take():
            self.say(f"evaluation of version {row['version']}: reward {_number(row['eval_reward_mean'])}")
        rows = self._metrics.take()
        self._has_rows = self._has_rows or bool(rows)
        for row in rows:
            self._rewards.append(row["reward_mean"])
            text, left = describe(row, self.iterations), self._left(row)
            if not self.console.is_terminal:
                self.say(text + left)
        if rows:
            self._progress.update(
                self._task,
                description=f"{text}  {curve(self._rewards)}",
                completed=rows[-1]["version"],
                left=left.strip(" ,"),
            )
        if not self._has_rows:
            self._show_phase(processes)

    def _show_phase(self, rows: Sequence[dict[str, Any]]) -> None:
        """What is going on before the first iteration is done."""
        states = {row["state"] for row in rows if row["role"] != "driver"}
        phase = "starting" if not rows or "starting" in states else "generating the first batch"
        if phase != self._phase:
            self._phase = phase
            self._progress.update(self._task, description=phase)
            if not self.console.is_terminal:
                self.say(phase)

    def _left(self, row: dict[str, Any]) -> str:
        if self.iterations is None:
            return ""
        if self._pace is None:
            self._pace = row["version"], row["time_s"]
        done, spent = row["version"] - self._pace[0], row["time_s"] - self._pace[1]
        left = self.iterations - row["version"]
        return f", about {_duration(left * spent / done)} left" if done and left else ""


def activities(processes: Iterable[dict[str, Any]]) -> str:
    """What all but the driver do, in a line: replicas by number, with their unfinished samples; who is not alive by id.

    "waiting: trainer  alive: relay, scorer  suspect: replica-3  replicas: 3 generating 36, 1 pulling"
    """
    others: dict[str, list[str]] = {}
    replicas: dict[str, list[int]] = {}
    for p in processes:
        word, _, unfinished = (p.get("doing") or p["state"]).partition(" ")
        if p["state"] != "alive":
            others.setdefault(p["state"], []).append(p["id"])
        elif p["role"] == "replica":
            replicas.setdefault(word, []).append(int(unfinished or 0))
        elif p["role"] != "driver":
            others.setdefault(word, []).append(p["role"])
    parts = [f"{word}: {', '.join(names)}" for word, names in others.items()]
    if counts := [f"{len(held)} {word} {sum(held) or ''}".rstrip() for word, held in replicas.items()]:
        parts.append(f"replicas: {', '.join(counts)}")
    return "  ".join(parts)


def describe(row: dict[str, Any], iterations: int | None) -> str:
    """One metrics row in a line."""
    of = "" if iterations is None else f"/{iterations}"
    return (
        f"iteration {row['version']}{of}  reward {_number(row.get('reward_mean'))}  "
        f"{row['samples_per_s']:.0f} samples/s  {row['tokens_per_s']:.0f} tok/s  "
        f"staleness {_number(row['staleness_use_mean'], 1)} (max {_number(row['staleness_use_max'], 0)})"
    )


def curve(rewards: Sequence[float | None], cells: int = CURVE_CELLS) -> str:
    """Mean rewards of equal parts of the run so far, from the lowest to the highest of them."""
    values = [reward for reward in rewards if reward is not None]
    count = min(cells, len(values))
    means = [fmean(values[len(values) * i // count : len(values) * (i + 1) // count]) for i in range(count)]
    lowest, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(_LEVELS[round((mean - lowest) / (span or 1.0) * (len(_LEVELS) - 1))] for mean in means)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
