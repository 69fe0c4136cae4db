"""What stands for a dataset and for reward functions in a run without a model."""

from __future__ import annotations

import threading

from laminar.data.emulated import ConstantScorer, EmulatedPrompts
from laminar.types import GroupScore, ScoreReport, UnscoredGroup, UnscoredMember


class Store:
    """Hands out groups once, then says stop."""

    def __init__(self, groups: list[list[UnscoredGroup]], stop: threading.Event) -> None:
        self.groups, self.stop = groups, stop
        self.scores: list[GroupScore] = []

    def exchange_scores(self, report: ScoreReport) -> list[UnscoredGroup]:
        assert report.incarnation == 3 and report.want > 0
        self.scores += report.scores
        if not self.groups:
            self.stop.set()
            return []
        return self.groups.pop(0)


def unscored(group: int, *attempts: int) -> UnscoredGroup:
    members = tuple(UnscoredMember(i, attempt, 0, "stop", b"") for i, attempt in enumerate(attempts))
    return UnscoredGroup(group, "train", "{}", b"", members)


def test_every_member_gets_a_reward_of_one() -> None:
    stop = threading.Event()
    store = Store([[unscored(0, 0, 2)], [unscored(1), unscored(5, 1)], []], stop)
    ConstantScorer(store, incarnation=3, reward_s=0.0).run(stop)
    assert [(s.group, [(m.index, m.attempt, m.reward) for m in s.members]) for s in store.scores] == [
        (0, [(0, 0, 1.0), (1, 2, 1.0)]),
        (1, []),
        (5, [(0, 1, 1.0)]),
    ]


def test_prompts_have_one_length_and_no_end() -> None:
    prompts = EmulatedPrompts(7)
    drawn = prompts.draw(10**9)
    assert drawn.prompt_ids is not None and len(drawn.prompt_ids) == 7 and not drawn.overlong
    assert not prompts.exhausted(10**9)
