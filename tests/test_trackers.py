"""What trackers are told: every row once, in steps that never go back (fault 38)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from laminar import trackers
from laminar.config import Config
from laminar.run_folder import RunFolder
from laminar.trackers import Reporter, points

ROOT = Path(__file__).resolve().parent.parent
METRICS = [{"version": v, "time_s": v / 2, "reward_mean": v / 10, "kl_ref": None} for v in range(1, 5)]
EVALS = [{"version": v, "time_s": 0.0, "num_samples": 8, "eval_reward_mean": v / 100} for v in (0, 2)]


class Recorder:
    """A tracker that keeps what it is told, and fails at one step."""

    where = "here"

    def __init__(self, fails_at: int | None = None) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self._fails_at = fails_at

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise ConnectionError("no network")
        self.told.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def write(folder: RunFolder, metrics: int, evals: int) -> None:
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in METRICS[:metrics]))
    folder.evals.write_text("".join(json.dumps(row) + "\n" for row in EVALS[:evals]))


def report(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, said: list[str] | None = None, **recorders: Recorder
) -> None:
    """One start of a run that reports to these."""
    for name, recorder in recorders.items():
        monkeypatch.setitem(trackers.TRACKERS, name, lambda folder, config, found=recorder: found)
    config = emulated(report_to=list(recorders))
    with Reporter(folder, config, (said if said is not None else []).append):
        pass


def emulated(**keys: object) -> Config:
    sections = {"rollout": {"engine": "emulated"}, "train": {"backend": "emulated"}}
    return Config.model_validate({"iterations": 4, **sections, **keys})


def test_rows_become_steps_and_numbers() -> None:
    assert list(points(METRICS[:1], EVALS[:1], 0)) == [
        (0, {"eval_version": 0.0, "eval_num_samples": 8.0, "eval_reward_mean": 0.0}),
        (1, {"version": 1.0, "time_s": 0.5, "reward_mean": 0.1}),
    ]


def test_an_evaluation_that_is_late_takes_the_step_it_comes_at() -> None:
    """Fault 38."""
    ((step, values),) = points([], EVALS[1:], step=4)
    assert (step, values["eval_version"]) == (4, 2.0)


def test_every_row_is_told_once_over_a_resume(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 38."""
    first, second, third = Recorder(), Recorder(), Recorder()
    write(folder, metrics=3, evals=1)
    report(folder, monkeypatch, wandb=first)
    report(folder, monkeypatch, wandb=second)
    write(folder, metrics=4, evals=2)
    report(folder, monkeypatch, wandb=third)
    assert [step for step, _ in first.told] == [0, 1, 2, 3]
    assert second.told == []
    assert [(step, values.get("eval_version")) for step, values in third.told] == [(3, 2.0), (4, None)]
    assert (first.closed, second.closed, third.closed) == (1, 1, 1)


def test_a_tracker_that_fails_is_left_alone_and_the_others_go_on(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    broken, whole = Recorder(fails_at=2), Recorder()
    write(folder, metrics=3, evals=0)
    report(folder, monkeypatch, said, wandb=broken, tensorboard=whole)
    assert ([step for step, _ in broken.told], [step for step, _ in whole.told]) == ([1], [1, 2, 3])
    assert said == [
        "wandb: here",
        "tensorboard: here",
        "wandb: ConnectionError: no network; nothing more is reported there",
    ]


def test_nothing_is_imported_unless_it_is_asked_for(folder: RunFolder) -> None:
    write(folder, metrics=1, evals=0)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from laminar.run_folder import RunFolder\nfrom laminar.trackers import Reporter\n"
        "from tests.test_trackers import emulated\n"
        "with Reporter(RunFolder(Path(sys.argv[1])), emulated(), print): pass\n"
        "print({'tensorboard', 'wandb', 'trackio'} & set(sys.modules))"
    )
    assert python(code, folder).stdout == "set()\n"


def python(code: str, folder: RunFolder, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    return subprocess.run(
        [sys.executable, "-c", code, str(folder.path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder.path,
        env=os.environ | {"PYTHONPATH": paths, "HOME": str(folder.path)} | environment,
    )


REPORT = """
import sys
from pathlib import Path
from laminar.run_folder import RunFolder
from laminar.trackers import Reporter
from tests.test_trackers import emulated
with Reporter(RunFolder(Path(sys.argv[1])), emulated(report_to=["{name}"]), lambda line: print(line, file=sys.stderr)):
    pass
"""


def test_tensorboard(folder: RunFolder) -> None:
    write(folder, metrics=4, evals=2)
    done = python(REPORT.format(name="tensorboard"), folder)
    assert (done.stdout, done.stderr) == ("", f"tensorboard: tensorboard --logdir {folder.path}/tensorboard\n")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("reward_mean")] == [(v, v / 10) for v in range(1, 5)]
    assert [e.step for e in events.Scalars("eval_reward_mean")] == [0, 2]


def test_wandb_without_a_network(folder: RunFolder) -> None:
    write(folder, metrics=4, evals=2)
    done = python(REPORT.format(name="wandb"), folder, WANDB_MODE="offline")
    assert done.stdout == "" and done.stderr.startswith("wandb: offline; later: wandb sync ")
    assert "nothing more is reported" not in done.stderr
    (record,) = folder.path.glob(f"wandb/offline-run-*/run-{folder.tag}.wandb")
    assert b"reward_mean" in record.read_bytes()


def test_trackio(folder: RunFolder) -> None:
    write(folder, metrics=4, evals=2)
    done = python(REPORT.format(name="trackio"), folder, TRACKIO_DIR=str(folder.path / "trackio"))
    assert done.stdout == "" and "trackio: trackio show --project laminar" in done.stderr
    read = "import trackio, sys; run = trackio.Api().runs('laminar')[0]; print(run.name)"
    assert python(read, folder, TRACKIO_DIR=str(folder.path / "trackio")).stdout.strip() == "run"
