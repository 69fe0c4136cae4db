"""The scorer against a scripted store: real worker processes, no Ray, no model."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from laminar.config import Config
from laminar.data.rewards import Completion, ScorableGroup
from laminar.data.scorer import Scorer, score_group
from laminar.data.worker import CallFailed
from laminar.errors import StorageError
from laminar.types import GroupScore, MemberScore, ScoreReport, UnscoredGroup, UnscoredMember

FUNCTIONS = '''
import os, re, signal, subprocess, time, ctypes

def length(completions):
    """Number of letters."""
    return [float(len(text)) for text in completions]

def steps(completions, trainer_state, level, scale):
    return [trainer_state.global_step + trainer_state.max_steps + level[0] * scale for _ in completions]

def by_text(completions):
    """Does what a completion tells it to do."""
    for text in completions:
        if "s" in text:
            time.sleep(600)
        if "r" in text:
            re.match(r"(a+)+$", "a" * 200 + "b")
        if "e" in text:
            os._exit(7)
        if "k" in text:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "v" in text:
            raise ValueError("no good: " + text)
        if "n" in text:
            return [float("nan")] * len(completions)
        if "c" in text:
            subprocess.run(["sleep", "600"])
    return [1.0] * len(completions)

def talks(completions):
    print("the function says", completions)
    return [1.0] * len(completions)
'''


class Letters:
    """Decodes 0, 1, 2 ... as a, b, c."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token) for token in token_ids)


class ScriptedStore:
    """Hands out the groups it is given, keeps the reports, waits up to 50 ms like a long poll."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[UnscoredGroup] = queue.SimpleQueue()
        self.reports: list[ScoreReport] = []
        self.scores: dict[int, GroupScore] = {}
        self.changed = threading.Condition()
        self.broken: Exception | None = None

    def exchange_scores(self, report: ScoreReport) -> list[UnscoredGroup]:
        if self.broken is not None:
            raise self.broken
        with self.changed:
            self.reports.append(report)
            for score in report.scores:
                self.scores.setdefault(score.group, score)
            self.changed.notify_all()
        groups: list[UnscoredGroup] = []
        while len(groups) < report.want:
            try:
                groups.append(self.waiting.get(timeout=0 if groups else 0.05))
            except queue.Empty:
                break
        return groups

    def add(self, group: int, *texts: str, **columns: Any) -> None:
        members = tuple(
            UnscoredMember(index, 0, 5, "stop", np.array([ord(c) - 97 for c in text], "<i4").tobytes())
            for index, text in enumerate(texts)
        )
        row = json.dumps({"prompt": "q", **columns})
        self.waiting.put(UnscoredGroup(group, "train", row, np.array([0], "<i4").tobytes(), members))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=60), self.reports

    @property
    def fatal(self) -> list[str]:
        return [report.fatal for report in self.reports if report.fatal is not None]


class Running:
    """A scorer whose `run` is in a thread."""

    def __init__(self, folder: Path, function: str = "by_text", *, num_workers: int = 1, **reward: Any) -> None:
        (folder / "fns.py").write_text(FUNCTIONS)
        self.log = folder / "rewards.log"
        config = Config.model_validate(
            {
                "iterations": 30,
                "model": {"path": folder},
                "data": {"train": "r.jsonl"},
                "reward": {"functions": [f"fns.py:{function}"], **reward},
            }
        )
        self.store = ScriptedStore()
        self.scorer = Scorer(
            config,
            Letters(),
            self.store,
            base_folder=folder,
            log_path=self.log,
            incarnation=3,
            num_workers=num_workers,
        )
        self.stop = threading.Event()
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.scorer.run(self.stop)
        except StorageError as error:
            self.error = error

    def wait_for_scores(self, *groups: int) -> list[GroupScore]:
        self.store.wait_for(lambda: set(groups) <= set(self.store.scores))
        return [self.store.scores[group] for group in groups]

    def close(self) -> None:
        self.stop.set()
        self.scorer.close()
        self.thread.join(30)
        assert not self.thread.is_alive()


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Running] = []

    def make(*args: Any, **kwargs: Any) -> Running:
        running.append(Running(tmp_path, *args, **kwargs))
        return running[-1]

    yield make
    for one in running:
        one.close()
    assert not worker_pids()


def worker_pids(parent: int | None = None) -> set[int]:
    """Live descendants of a process that run reward functions, or were started by one."""
    found = set()
    for process in psutil.Process(parent).children(recursive=True):
        try:
            command = process.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if "laminar.data.worker" in command or command[:1] == ["sleep"]:
            found.add(process.pid)
    return found


def rewards(score: GroupScore) -> list[float | None]:
    return [member.reward for member in score.members]


def failures(score: GroupScore) -> list[str | None]:
    return [member.failure for member in score.members]


# ---------------------------------------------------------------- scoring


def test_groups_are_scored(start: Start) -> None:
    running = start("length", num_workers=2)
    for group in range(50):
        running.store.add(group, "a", "abc", "")
    scores = running.wait_for_scores(*range(50))
    assert {tuple(rewards(score)) for score in scores} == {(1.0, 3.0, 0.0)}
    assert scores[0].members[1] == MemberScore(1, 0, 3.0, {"length": 3.0}, "abc")
    assert scores[0].prompt_text == "q"
    assert {report.incarnation for report in running.store.reports} == {3}


def test_row_config_and_version_reach_the_function(start: Start) -> None:
    running = start("steps", kwargs={"scale": 1000}, weights=[2.0])
    running.store.add(1, "a", level=4)
    (score,) = running.wait_for_scores(1)
    assert score.members[0].rewards == {"steps": 5 + 30 + 4000}
    assert rewards(score) == [2.0 * 4035]


def test_a_group_that_is_handed_out_twice_is_scored_once_while_it_is_held(start: Start) -> None:
    running = start(timeout_s=1.0)
    running.store.add(1, "s")
    running.store.add(1, "s")
    running.store.add(2, "a")
    running.wait_for_scores(1, 2)
    assert sum(score.group == 1 for report in running.store.reports for score in report.scores) == 1


def test_a_group_without_members_needs_no_call(start: Start) -> None:
    running = start()
    running.store.add(1)
    assert running.wait_for_scores(1)[0].members == ()


def test_what_a_function_prints_is_in_the_log(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    running = start("talks")
    running.store.add(1, "a")
    running.wait_for_scores(1)
    assert "the function says ['a']" in running.log.read_text()
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- failures


def test_a_hanging_call_holds_up_no_other(start: Start) -> None:
    """Fault 19: other samples flow."""
    running = start(num_workers=2, timeout_s=600)
    running.store.add(0, "s")
    for group in range(1, 40):
        running.store.add(group, "a")
    running.wait_for_scores(*range(1, 40))
    assert 0 not in running.store.scores


@pytest.mark.parametrize("how", ["r", "c"], ids=["catastrophic regex", "sleeping child process"])
def test_a_hanging_call_is_killed_at_its_limit(start: Start, how: str) -> None:
    """Fault 19: the good member of the group is scored too, and so is the next group."""
    running = start(timeout_s=1.0)
    running.store.add(1, "a", how)
    running.store.add(2, "a")
    hung, after = running.wait_for_scores(1, 2)
    assert rewards(hung) == [1.0, None]
    assert failures(hung) == [None, "reward_timeout"]
    assert hung.members[1].message == "reward function `by_text` was killed after its limit of 1 s"
    assert rewards(after) == [1.0]
    assert not any(psutil.Process(pid).name() == "sleep" for pid in worker_pids())


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("e", "ended its process: exit code 7; see"),
        ("k", "ended its process: signal SIGSEGV; see"),
        ("v", "raised ValueError: no good: v\nTraceback"),
        ("n", "expected: finite numbers or None"),
    ],
    ids=["exit", "segfault", "exception", "nan"],
)
def test_the_members_of_a_failed_call_run_alone(start: Start, how: str, expected: str) -> None:
    """Fault 16: a failure is marked as one and has no reward; the others keep theirs."""
    running = start()
    running.store.add(1, "a", how, "b")
    running.store.add(2, "a")
    score, after = running.wait_for_scores(1, 2)
    assert rewards(score) == [1.0, None, 1.0]
    assert failures(score) == [None, "reward_error", None]
    assert "reward function `by_text`" in score.members[1].message and expected in score.members[1].message
    assert [member.completion for member in score.members] == ["a", how, "b"]
    assert rewards(after) == [1.0]
    assert running.store.fatal == []


def test_a_reward_that_always_fails_stops_the_run(start: Start) -> None:
    """Fault 18: the message names the function and shows its traceback."""
    running = start(max_failures=3)
    for group in range(3):
        running.store.add(group, "v", "v")
    running.store.wait_for(lambda: bool(running.store.fatal))
    running.thread.join(30)
    (message,) = running.store.fatal
    assert message.startswith("3 groups in a row could not be scored (`reward.max_failures`).")
    assert "reward function `by_text`: raised ValueError: no good: v\nTraceback" in message
    assert 'fns.py", line 23, in by_text' in message


def test_a_success_between_failures_resets_the_count(start: Start) -> None:
    """Fault 4: one prompt that always fails does not stop the others."""
    running = start(max_failures=2)
    for group in range(0, 12, 2):
        running.store.add(group, "v")
        running.store.add(group + 1, "a", "v")
    running.wait_for_scores(*range(12))
    assert running.store.fatal == []


def test_a_failure_can_have_a_reward_of_its_own_and_stays_known_as_one(start: Start) -> None:
    running = start(on_failure=-1)
    running.store.add(1, "a", "v")
    (score,) = running.wait_for_scores(1)
    assert rewards(score) == [1.0, -1.0]
    assert failures(score) == [None, "reward_error"]
    assert "no good: v" in score.members[1].message


def test_a_reward_for_failures_does_not_hide_that_all_fail(start: Start) -> None:
    """Fault 18."""
    running = start(on_failure=0.0, max_failures=2)
    running.store.add(1, "v")
    running.store.add(2, "v")
    running.store.wait_for(lambda: bool(running.store.fatal))
    assert "2 groups in a row" in running.store.fatal[0]


def test_a_failure_can_end_the_run(start: Start) -> None:
    running = start(on_failure="fail")
    running.store.add(1, "a", "v")
    running.store.wait_for(lambda: bool(running.store.fatal))
    (message,) = running.store.fatal
    assert message.startswith('a sample could not be scored, and `reward.on_failure` is "fail": reward function')
    assert "no good: v" in message


@pytest.mark.parametrize(
    ("function", "expected"),
    [("absent", "there is no `absent` in it"), ("os", "not a reward function")],
)
def test_functions_that_can_not_be_loaded_stop_the_run_at_once(start: Start, function: str, expected: str) -> None:
    running = start(function)
    running.thread.join(30)
    assert expected in running.store.fatal[0]


def test_an_import_that_ends_the_process_stops_the_run_at_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import os\nos._exit(9)\n")
    running = start("x", functions=["leaves.py:f"])
    running.thread.join(30)
    assert (
        "leaves.py:f: importing the reward functions failed: ended its process: exit code 9" in running.store.fatal[0]
    )


def test_what_the_store_raises_ends_the_run(start: Start) -> None:
    """Fault 2: a part that dies is not waited for."""
    running = start()
    running.store.broken = StorageError("disk full")
    running.thread.join(30)
    assert running.error is running.store.broken


# ---------------------------------------------------------------- the end


def test_close_in_the_middle_of_a_call(start: Start) -> None:
    running = start(num_workers=2, timeout_s=600)
    running.store.add(1, "c")
    running.store.add(2, "s")
    wait_until(lambda: any(psutil.Process(pid).name() == "sleep" for pid in worker_pids()))
    running.close()
    assert not worker_pids()
    assert running.store.scores == {}


def test_no_worker_outlives_a_killed_scorer(tmp_path: Path) -> None:
    """Fault 9: no live child, though the scorer could not say good-bye."""
    code = (
        "import sys, time; from pathlib import Path; from tests.data.test_scorer import Running;"
        "running = Running(Path(sys.argv[1]), num_workers=2, timeout_s=600); running.store.add(1, 's');"
        "running.store.wait_for(lambda: any(report.want == 15 for report in running.store.reports));"
        "print('ready', flush=True); time.sleep(600)"
    )
    scorer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=python_path())
    assert scorer.stdout is not None and scorer.stdout.readline() == b"ready\n"
    wait_until(lambda: len(worker_pids(scorer.pid)) == 2)
    workers = [psutil.Process(pid) for pid in worker_pids(scorer.pid)]
    scorer.send_signal(signal.SIGKILL)
    scorer.communicate()
    gone, alive = psutil.wait_procs(workers, timeout=30)
    assert (len(gone), alive) == (2, [])


def python_path() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.01)


# ---------------------------------------------------------------- one group, without processes


def test_limits_of_a_group_and_of_members_alone() -> None:
    calls: list[tuple[list[int], float]] = []

    def call(group: ScorableGroup, limit_s: float) -> GroupScore:
        indices = [completion.index for completion in group.completions]
        calls.append((indices, limit_s))
        if 1 in indices:
            raise CallFailed("reward_timeout", "slow")
        return GroupScore(group.group, tuple(MemberScore(index, 0, 0.5) for index in indices))

    completions = tuple(Completion(index, 0, 0, "", []) for index in range(3))
    outcome = score_group(call, ScorableGroup(1, {}, "", completions), 2.0)
    assert calls == [([0, 1, 2], 6.0), ([0], 2.0), ([1], 2.0), ([2], 2.0)]
    assert rewards(outcome.score) == [0.5, None, 0.5]
    assert outcome.failure is None

    calls.clear()
    outcome = score_group(call, ScorableGroup(1, {}, "", completions[1:2]), 2.0)
    assert calls == [([1], 2.0)], "a call of one member is not tried twice"
    assert outcome.failure == "slow"
