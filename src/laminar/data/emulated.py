"""What stands for a dataset and for reward functions in a run without a model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from laminar.data.prompts import Drawn
from laminar.types import GroupScore, MemberScore, ScoreReport, UnscoredGroup

if TYPE_CHECKING:
    from laminar.data.scorer import ScoreSink

GROUPS_AT_A_TIME = 64


class EmulatedPrompts:
    """Prompts of one length without end: a `laminar.data.store.Prompts`."""

    def __init__(self, prompt_tokens: int) -> None:
        self._ids = np.zeros(prompt_tokens, np.int32)

    def __len__(self) -> int:
        return 1

    def exhausted(self, cursor: int) -> bool:
        return False

    def draw(self, cursor: int) -> Drawn:
        return self.take(cursor)

    def take(self, row_index: int, epoch: int = 0) -> Drawn:
        return Drawn(row_index, epoch, {}, "{}", self._ids)


class ConstantScorer:
    """Gives every sample a reward of 1, after the time that a reward takes.

    A group that comes while others are being scored waits for them, so it may take up to twice that time.
    """

    def __init__(self, store: ScoreSink, incarnation: int, reward_s: float) -> None:
        self._store, self._incarnation, self._reward_s = store, incarnation, reward_s

    def run(self, stop: threading.Event) -> None:
        """Scores groups until `stop` is set. Raises what the store raises."""
        scores: Sequence[GroupScore] = ()
        while not stop.is_set():
            report = ScoreReport(self._incarnation, tuple(scores), want=GROUPS_AT_A_TIME)
            groups = self._store.exchange_scores(report)
            if groups:
                stop.wait(self._reward_s)
            scores = [_score(group) for group in groups]


def _score(group: UnscoredGroup) -> GroupScore:
    return GroupScore(group.group, tuple(MemberScore(m.index, m.attempt, 1.0) for m in group.members))
