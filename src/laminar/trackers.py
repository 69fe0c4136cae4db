"""Copies the rows of a run's metrics to the trackers that `report_to` names: tensorboard, wandb, trackio.

Owns: one thread of the driver while a run goes on, and `reported.json`, which says how far the trackers have been told.
Consumes: metrics.jsonl and eval.jsonl, which the data store alone writes. Waits for: new rows; nobody waits for it.
Invariants: steps never go back and no row is told twice, over resumes too. A tracker that fails is left alone after one
message; the run does not notice. A package is imported only if its tracker is asked for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from laminar.config import Config
from laminar.run_folder import NewRows, RunFolder, read_json, write_json
from laminar.view import Follower

PROJECT = "laminar"


class Tracker(Protocol):
    """Takes numbers by name; `step` never goes back."""

    where: str
    """Where the user can look at them."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Reporter:
    """Tells the trackers of `report_to` what is new, while the `with` block lasts. `say` shows a line to the user."""

    def __init__(self, folder: RunFolder, config: Config, say: Callable[[str], None]) -> None:
        self._folder, self._config, self._say = folder, config, say
        self._trackers: dict[str, Tracker] = {}
        told = self._told = read_json(folder.reported, {"metrics": 0, "evals": 0, "step": 0})
        self._metrics, self._evals = NewRows(folder.metrics, told["metrics"]), NewRows(folder.evals, told["evals"])
        self._follower = Follower(self._look)

    def __enter__(self) -> Self:
        """Opens the trackers: before the run starts, so that processes of theirs are not taken for its own."""
        if self._config.report_to:
            self._folder.create()
        for name in self._config.report_to:
            with self._excused(name):
                self._trackers[name] = TRACKERS[name](self._folder, self._config)
                self._say(f"{name}: {self._trackers[name].where}")
        if self._trackers:
            self._follower.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._follower.stop()
        for name in list(self._trackers):
            with self._excused(name):
                self._trackers[name].close()

    def _look(self) -> None:
        told, metrics, evals = self._told, self._metrics.take(), self._evals.take()
        if not metrics and not evals:
            return
        for step, values in points(metrics, evals, told["step"]):
            for name in list(self._trackers):
                with self._excused(name):
                    self._trackers[name].log(step, values)
            told["step"] = step
        told["metrics"] += len(metrics)
        told["evals"] += len(evals)
        write_json(self._folder.reported, told)

    @contextlib.contextmanager
    def _excused(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # an outside service: whatever happens there is not the run's business
            self._trackers.pop(name, None)
            self._say(f"{name}: {type(error).__name__}: {error}; nothing more is reported there")


def points(
    metrics: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], step: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Steps and numbers of these rows, no step below `step`.

    The step of an iteration is its version. An evaluation runs beside the training of later versions and is told when
    it is there, so its own version goes with it as `eval_version`.
    """
    rows = [(row["version"], 0, row) for row in metrics] + [(row["version"], 1, row) for row in evals]
    for version, is_eval, row in sorted(rows, key=lambda item: item[:2]):
        step = max(step, version)
        names = {"version": "eval_version", "num_samples": "eval_num_samples"} if is_eval else {}
        values = {names.get(name, name): value for name, value in row.items() if not (is_eval and name == "time_s")}
        yield step, {name: float(value) for name, value in values.items() if value is not None}


# ---------------------------------------------------------------- the trackers


class TensorBoard:
    def __init__(self, folder: RunFolder, config: Config) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.where = f"tensorboard --logdir {folder.path / 'tensorboard'}"
        self._writer = EventFileWriter(str(folder.path / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases. Its own variables hold: WANDB_MODE=offline needs no network and no account."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.path.name,
            id=folder.tag,
            resume="allow",
            dir=str(folder.path),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )
        later = f"wandb sync {folder.path / 'wandb'}/offline-run-*"
        self.where = f"offline; later: {later}" if self._run.offline else str(self._run.url)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()


class Trackio:
    """A local database, or a space of the hub as its own variables say. It talks on stdout, which belongs to others."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        import trackio

        self._trackio = trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self.where = f"trackio show --project {project}"
        with contextlib.redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=project,
                name=folder.path.name,
                resume="allow",
                config=config.model_dump(mode="json"),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()  # type: ignore[no-untyped-call]


TRACKERS: dict[str, Callable[[RunFolder, Config], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}
