"""The command line: exit codes, messages, and what it does not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import laminar.runtime
from laminar import cli, reports
from laminar.config import Config, load
from laminar.errors import RunFailed

ROOT = Path(__file__).resolve().parent.parent
SLOW_PACKAGES = ("torch", "transformers", "ray", "pandas")
SLOW_FOR_HELP = (*SLOW_PACKAGES, "numpy", "pyarrow")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `laminar ARGUMENTS` run in this process."""
    monkeypatch.setattr(sys, "argv", ["laminar", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


class Launcher:
    """Stands in for the driver: remembers what it was asked, and does what the test wants."""

    def __init__(self) -> None:
        self.calls: list[tuple[Config, Path, bool]] = []
        self.result: int | BaseException = 0

    def train(self, config: Config, run_dir: Path, resume: bool, say: Callable[[str], None]) -> int:
        self.calls.append((config, run_dir, resume))
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    launcher = Launcher()
    monkeypatch.setattr(laminar.runtime, "launch", launcher, raising=False)
    monkeypatch.setattr(reports, "summary", lambda run: f"the summary of {run.path}")
    return launcher


# ---------------------------------------------------------------- check


def test_check_of_a_good_config(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "check", project / "config.toml", "train.group_size=4") == 0
    out, err = capsys.readouterr()
    assert "is fine" in out and "8 groups x 4 samples" in out and err == ""


def test_check_as_json_prints_one_object(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "check", project / "config.toml", "max_staleness=none", "--json") == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert (answer["ok"], answer["problems"], err) == (True, [], "")
    assert answer["config"]["max_staleness"] is None
    assert answer["config"]["model"]["path"] == str(project / "build" / "model")


def test_check_tells_every_problem_and_exits_with_2(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault 39."""
    bad = ("check", project / "config.toml", "train.lr=-1", "train.learning_rate=1")
    assert run(monkeypatch, *bad) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("laminar: 2 problems") and "Traceback" not in err

    assert run(monkeypatch, *bad, "--json") == 2
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert (answer["ok"], answer["config"], err) == (False, None, "")
    assert answer["problems"][0] == {
        "what": "can't have this value",
        "where": "override: train.lr",
        "expected": "a number >= 0",
        "got": "-1",
        "fix": None,
    }
    assert answer["problems"][1]["fix"] == "it is called train.lr here"


@pytest.mark.parametrize(
    ("arguments", "slow"),
    [
        (["--help"], SLOW_FOR_HELP),
        (["train", "--help"], SLOW_FOR_HELP),
        (["check", "{project}/config.toml"], SLOW_PACKAGES),
    ],
)
def test_nothing_slow_is_imported(project: Path, arguments: list[str], slow: tuple[str, ...]) -> None:
    """Fault 39: `check` and help answer at once."""
    code = (
        "import sys\n"
        "from laminar import cli\n"
        "try: cli.main()\n"
        "finally: print(*(name for name in sys.modules if '.' not in name), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *(argument.format(project=project) for argument in arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        check=True,
    )
    assert not set(slow) & set(done.stderr.split())


# ---------------------------------------------------------------- eval


@pytest.mark.parametrize("as_json", [False, True])
def test_eval_is_a_run_without_iterations(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: Launcher,
    as_json: bool,
) -> None:
    monkeypatch.chdir(project)
    Path("run").mkdir()
    remember = launcher.train

    def train(config: Config, run_dir: Path, resume: bool, say: Callable[[str], None]) -> int:
        remember(config, run_dir, resume, say)
        (run_dir / "eval.jsonl").write_text(
            '{"version": 0, "num_samples": 8, "eval_reward_mean": 0.25, "eval_reward_best": 0.5}\n'
        )
        return 0

    monkeypatch.setattr(launcher, "train", train)
    flags = ["--json"] if as_json else []
    assert run(monkeypatch, "eval", "config.toml", "data.eval=build/rows.jsonl", "--run-dir", "run", *flags) == 0
    ((config, folder, resume),) = launcher.calls
    assert (config.iterations, config.eval.before_train, config.eval.after_train) == (0, True, False)
    assert (folder, resume) == (Path("run"), False)
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out) == {
            "eval_reward_mean": 0.25,
            "eval_reward_best": 0.5,
            "num_samples": 8,
            "run": str(project / "run"),
        }
    else:
        assert "eval      0.250, mean reward of 8 samples" in out


# ---------------------------------------------------------------- train


def test_train_starts_a_new_run(project: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> None:
    monkeypatch.chdir(project)
    assert run(monkeypatch, "train", "config.toml", "iterations=7", "--run-dir", "runs/mine") == 0
    ((config, folder, resume),) = launcher.calls
    assert (config.iterations, folder, resume) == (7, Path("runs/mine"), False)


@pytest.mark.parametrize(("config", "name"), [("config.toml", None), ("sweep.toml", "sweep")])
def test_a_run_is_named_after_its_config(
    project: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher, config: str, name: str | None
) -> None:
    monkeypatch.chdir(project)
    Path(config).write_text(Path("config.toml").read_text())
    assert run(monkeypatch, "train", config) == 0
    folder = launcher.calls[0][1]
    assert folder.parent == Path("runs") and folder.name.startswith((name or project.name) + "-")


def test_train_resumes_with_the_config_of_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    assert run(monkeypatch, "train", "--resume", project, "iterations=9") == 0
    ((config, folder, resume),) = launcher.calls
    assert (config, folder, resume) == (load(project / "config.toml", ["iterations=9"]), project, True)


def test_what_the_run_says_is_the_exit_code(project: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> None:
    for launcher.result in (0, 130):
        assert run(monkeypatch, "train", "--resume", project) == launcher.result


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RunFailed("no replica is left"), 1, "laminar: no replica is left\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("by zero"), 1, "laminar: ZeroDivisionError: by zero\n  traceback: "),
    ],
)
def test_an_error_is_one_message_without_a_traceback(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: Launcher,
    error: BaseException,
    code: int,
    message: str,
) -> None:
    launcher.result = error
    monkeypatch.setattr("tempfile.tempdir", str(project))
    assert run(monkeypatch, "train", "--resume", project) == code
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    if "traceback: " in message:
        assert "Traceback" in Path(err.rpartition("traceback: ")[2].strip()).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Usage: laminar"),
        (["trane"], "No such command 'trane'"),
        (["train"], "no config"),
        (["check"], "no config"),
        (["check", "a.toml", "b.toml"], "more than one config"),
        (["check", "nothing.toml"], "no such file"),
        (["eval"], "no config"),
        (["eval", "config.toml"], "nothing to train and nothing to evaluate"),
        (["train", "--resume", "nowhere"], "not the folder of a run"),
        (["train", "config.toml", "--run-dir", "build"], "the run folder is not empty"),
        (["train", "config.toml", "model.path=nowhere"], "the model folder is not there"),
        (["train", "config.toml", "--fast"], "No such option"),
    ],
)
def test_bad_usage_exits_with_2(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: Launcher,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(project)
    assert run(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert message in out + err and "Traceback" not in err
    assert launcher.calls == []
