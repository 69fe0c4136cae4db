"""The scorer: takes finished groups from the data store, has them scored, gives the scores back.

Owns: a pool of killable workers, one thread for each; the groups it holds; the count of failures in a row.
Consumes: unscored groups (long poll in the thread of `run`). Gives back: scores (a second thread, at once).
Waits for: room in the pool, then groups from the store; a worker, never longer than its limit; `close`.
Invariants: a failure never becomes a reward (invariant 3). A hanging call holds up its own worker alone.
What it holds when it dies is handed out again by the store, whose first score of an attempt wins.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from laminar.config import Config
from laminar.data.rewards import Completion, Decoder, ScorableGroup, decode_group
from laminar.data.worker import CallFailed, RewardWorker, WorkerClosed, WorkerSetup
from laminar.errors import RewardError
from laminar.timing import together_s
from laminar.types import GroupScore, MemberScore, ScoreReport, UnscoredGroup

_GROUPS_PER_WORKER = 8
_COALESCE_S = 0.02
_STOP_CHECK_S = 0.2


class ScoreSink(Protocol):
    """The data store's side. Called from two threads at once."""

    def exchange_scores(self, report: ScoreReport) -> list[UnscoredGroup]:
        """Records the scores; answers up to `want` groups. With no scores to record and something wanted it
        may wait for a group, but not without end."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """A scored group, for the store and for the failure policy."""

    score: GroupScore
    failure: str | None
    """Why no member could be scored; None if any was."""


class Scorer:
    """Scores groups until told to stop. The workers start with it; `close` ends them within 2 s.

    `base_folder` is where relative reward functions are looked for, `log_path` the file that receives what
    they print (its folder exists), `incarnation` tells this process from its predecessors.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Decoder,
        store: ScoreSink,
        *,
        base_folder: Path,
        log_path: Path,
        incarnation: int,
        num_workers: int | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._store = store
        self._incarnation = incarnation
        self._failures_in_a_row = 0
        self._held: set[int] = set()
        self._room = threading.Condition()
        self._todo: queue.SimpleQueue[ScorableGroup | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
        weights = config.reward.weights
        setup = WorkerSetup(
            functions=tuple(config.reward_functions),
            base_folder=base_folder,
            weights=None if weights is None else tuple(weights),
            kwargs=config.reward.kwargs,
            prompt_column=config.data.prompt_column,
            max_steps=config.iterations,
            module_path=tuple(sys.path),
        )
        # At least two, so that a call that hangs does not hold up the others.
        count = num_workers or max(2, min(8, (os.cpu_count() or 1) // 2))
        self._workers = [RewardWorker(setup, log_path) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="reward")
        for worker in self._workers:
            self._threads.submit(self._drive, worker).add_done_callback(self._driver_ended)

    def run(self, stop: threading.Event) -> None:
        """Scores groups until `stop` is set, or until the failure policy has stopped the run.

        Raises what the store raises.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="scores") as threads:
            submitting = threads.submit(self._submit_scores)
            try:
                while not stop.is_set() and not submitting.done():
                    if self._take_groups():
                        stop.wait(together_s(self._config.rollout.replicas, 0.0))
            finally:
                self._outbox.put(None)
            submitting.result()

    def close(self) -> None:
        """Kills the workers and ends their threads. What they were doing is not scored."""
        for worker in self._workers:
            worker.close()
            self._todo.put(None)
        self._threads.shutdown()

    # -------------------------------------------------------- thread of `run`

    def _take_groups(self) -> bool:
        """Whether there were any, and no more than it has taken."""
        with self._room:
            room = self._room.wait_for(self._free, timeout=_STOP_CHECK_S)
        if room == 0:
            return False
        groups = self._store.exchange_scores(ScoreReport(self._incarnation, want=room))
        for unscored in groups:
            with self._room:
                if unscored.group in self._held:  # handed out again after a lost reply
                    continue
                self._held.add(unscored.group)
            prompt_column, stop = self._config.data.prompt_column, self._config.rollout.stop
            self._todo.put(decode_group(unscored, self._tokenizer, stop, prompt_column))
        return 0 < len(groups) < room

    def _free(self) -> int:
        return max(0, _GROUPS_PER_WORKER * len(self._workers) - len(self._held))

    # -------------------------------------------------------- thread of a worker

    def _drive(self, worker: RewardWorker) -> None:
        try:
            worker.start()
            while (group := self._todo.get()) is not None:
                self._outbox.put(score_group(worker.call, group, self._config.reward.timeout_s))
        except WorkerClosed:
            return

    def _driver_ended(self, future: Future[None]) -> None:
        if (error := future.exception()) is not None:
            self._outbox.put(error)

    # -------------------------------------------------------- thread that submits

    def _submit_scores(self) -> None:
        while (outcomes := self._next_outcomes()) is not None:
            fatal = self._fatal(outcomes)
            on_failure = self._config.reward.on_failure
            scores = tuple(_by_policy(o.score, on_failure) for o in outcomes if isinstance(o, Outcome))
            self._store.exchange_scores(ScoreReport(self._incarnation, scores, fatal=fatal))
            with self._room:
                self._held.difference_update(score.group for score in scores)
                self._room.notify()
            if fatal is not None:
                return

    def _next_outcomes(self) -> list[Outcome | BaseException] | None:
        """What is finished: waits for the first, and a moment for others. None: stop."""
        outcomes: list[Outcome | BaseException] = []
        item = self._outbox.get()
        deadline = time.monotonic() + _COALESCE_S
        while item is not None:
            outcomes.append(item)
            if len(outcomes) >= len(self._held):
                return outcomes
            try:
                item = self._outbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return outcomes
        if outcomes:
            self._outbox.put(None)
        return outcomes or None

    def _fatal(self, outcomes: list[Outcome | BaseException]) -> str | None:
        """The message that stops the run, if these outcomes are reason to. Raises a worker thread's own fault."""
        for outcome in outcomes:
            if isinstance(outcome, RewardError):
                return str(outcome)
            if isinstance(outcome, BaseException):
                raise outcome
            self._failures_in_a_row = 0 if outcome.failure is None else self._failures_in_a_row + 1
            if self._failures_in_a_row >= self._config.reward.max_failures:
                return (
                    f"{self._failures_in_a_row} groups in a row could not be scored (`reward.max_failures`). "
                    f"The last one: {outcome.failure}"
                )
            failed = [member.message for member in outcome.score.members if member.failure is not None]
            if failed and self._config.reward.on_failure == "fail":
                return f'a sample could not be scored, and `reward.on_failure` is "fail": {failed[0]}'
        return None


def score_group(call: Callable[[ScorableGroup, float], GroupScore], group: ScorableGroup, timeout_s: float) -> Outcome:
    """Scores a group in one call of up to `timeout_s` x members; if that fails, each member alone.

    A member that fails alone carries the reason and has no reward. Metrics of a call that failed are lost.
    """
    if not group.completions:
        return Outcome(GroupScore(group.group, (), group.prompt_text), None)
    try:
        return Outcome(call(group, timeout_s * len(group.completions)), None)
    except CallFailed as failure:
        if len(group.completions) == 1:
            member = _failed(group.completions[0], failure)
            return Outcome(GroupScore(group.group, (member,), group.prompt_text), str(failure))
    alone = [score_group(call, replace(group, completions=(one,)), timeout_s) for one in group.completions]
    members = tuple(member for outcome in alone for member in outcome.score.members)
    failures = [outcome.failure for outcome in alone]
    return Outcome(GroupScore(group.group, members, group.prompt_text), None if None in failures else failures[-1])


def _by_policy(score: GroupScore, on_failure: str | float) -> GroupScore:
    """With the reward that the user wants failed members to have, if it is one. That they failed is kept."""
    if isinstance(on_failure, str):
        return score
    members = (m if m.failure is None else replace(m, reward=float(on_failure)) for m in score.members)
    return replace(score, members=tuple(members))


def _failed(completion: Completion, failure: CallFailed) -> MemberScore:
    return MemberScore(
        completion.index,
        completion.attempt,
        reward=None,
        completion=completion.text,
        failure=failure.reason,
        message=str(failure),
    )
