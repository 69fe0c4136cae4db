"""The data store: repeats, owners, cuts, and what is there after a crash at any transaction."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.control.accounts import FIRST_EVAL
from laminar.control.commands import Adopt, Complete, GiveUpEval, NoteDeaths, Restart
from laminar.control.events import (
    Buffered,
    CutMade,
    CutTrained,
    Dropped,
    EvalDone,
    Exhausted,
    Fatal,
    Finished,
    Issued,
)
from laminar.data import store as stores
from laminar.data.store import DataStore
from laminar.errors import DataError, ProtocolError, StorageError
from laminar.run_folder import RunFolder, read_jsonl
from laminar.types import (
    Failure,
    Finish,
    GroupScore,
    MemberScore,
    ScoreReport,
    Settings,
    Trained,
    Version,
)
from tests.control.plans import make_settings
from tests.data.driving import V0, Hand, Prompts, apply, chunk, open_store, reasons, states, stored, tokens_of

V1 = Version(0, 1)


@pytest.fixture
def settings() -> Settings:
    """Two groups of two a batch, staleness at most 1, three iterations."""
    return make_settings()


@pytest.fixture
def store(tmp_path: Path, settings: Settings) -> DataStore:
    return open_store(tmp_path, settings)


@pytest.fixture
def hand(store: DataStore) -> Hand:
    return Hand(store)


# ---------------------------------------------------------------- exchange


def test_work_is_sent_until_it_is_accepted(hand: Hand) -> None:
    apply(hand.store, [])
    first = hand.issue(1)
    assert [w.sample for w in first] == [(0, 0), (0, 1)]
    assert np.frombuffer(first[0].prompt, np.int32).tolist() == [0, 1]
    assert hand.exchange().work == ()

    apply(hand.store, [])
    other = Hand(hand.store, "r1")
    assert other.exchange().work == ()
    again = Hand(hand.store, "r0", incarnation=2)
    assert again.exchange().work == (), "another start of the replica has no part in it"


def test_a_repeated_report_changes_nothing(hand: Hand) -> None:
    work = hand.issue(1)
    report = {
        "chunks": tuple(chunk(w, 3) for w in work),
        "finished": tuple(Finish(w.sample, w.owner_epoch, 3, "stop") for w in work),
        "accepted": tuple((w.sample, w.owner_epoch) for w in work),
    }
    hand.exchange(**report)
    before = list(hand.store.db.iterdump())
    for _ in range(2):
        assert hand.exchange(**report).cancel == ()
    assert list(hand.store.db.iterdump()) == before
    assert hand.store.refused == 0


def test_a_gap_is_an_error_and_stops_the_store(hand: Hand, tmp_path: Path, settings: Settings) -> None:
    """A correct replica leaves no gap; after one, what is in memory is not what is on disk."""
    work = hand.issue(1)
    hand.exchange(chunks=(chunk(work[0], 2),))
    before = list(hand.store.db.iterdump())
    with pytest.raises(ProtocolError, match="start at 3, 2 are stored"):
        hand.exchange(chunks=(chunk(work[1], 1), chunk(work[0], 1, start=3)))
    with pytest.raises(StorageError, match="start at 3, 2 are stored"):
        hand.exchange(chunks=(chunk(work[1], 1),))
    assert list(hand.store.db.iterdump()) == before, "nothing of the report is kept"
    hand.store.close()
    assert open_store(tmp_path, settings).accounts.num_live == 1


@pytest.mark.parametrize("length", [2, 4])
def test_a_finish_without_all_tokens_is_an_error(hand: Hand, length: int) -> None:
    work = hand.issue(1)
    with pytest.raises(ProtocolError, match=f"ends at {length}, 3 tokens are stored"):
        hand.exchange(chunks=(chunk(work[0], 3),), finished=(Finish(work[0].sample, 0, length, "stop"),))


def test_an_earlier_owner_is_refused_and_told_to_forget(hand: Hand) -> None:
    """Invariant 3, and the zombie of protocol.md §4: nothing that it says counts, whatever it says."""
    work = hand.issue(1)
    hand.exchange(chunks=(chunk(work[0], 2),))
    store = hand.store
    for w in work:
        store.accounts.orphan(store.accounts.sample(w.sample))  # type: ignore[arg-type]
    apply(store, [Restart("r1", 1, V0, tuple(w.sample for w in work), "")])
    owner = Hand(store, "r1")
    mine = owner.take()
    assert [(w.attempt, w.owner_epoch > 0) for w in mine] == [(1, True)] * 2

    owner.exchange(chunks=(chunk(mine[0], 2),))
    reply = hand.exchange(
        chunks=(chunk(work[0], 2, start=2), chunk(work[1], 1)),
        finished=(Finish(work[0].sample, 0, 4, "stop"),),
        failed=(Failure(work[1].sample, 0, "engine_error", ""),),
    )
    assert set(reply.cancel) == {(w.sample, 0) for w in work}
    assert store.refused == 2
    assert hand.exchange().cancel == ()
    assert stored(store, work[0].sample).tolist() == tokens_of(mine[0], 2).tolist()
    owner.exchange(chunks=(chunk(mine[0], 1, 2), chunk(mine[1], 3)))
    ends = tuple(Finish(w.sample, w.owner_epoch, 3, "stop") for w in mine)
    owner.exchange(finished=ends)
    assert states(store) == {0: "finished"} and not reasons(store)


@given(
    steps=st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["new", "repeat", "far"])), max_size=25),
    handover=st.integers(0, 12),
)
def test_two_owners_interleaved(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str]], handover: int
) -> None:
    """Protocol §4: whatever is resent, and whoever speaks when, what is stored is a prefix of one owner's tokens."""
    store = open_store(tmp_path_factory.mktemp("run"), make_settings(group_size=1, min_group_size=1))
    owners = [Hand(store, "r0"), Hand(store, "r1")]
    work = [owners[0].issue(1)[0]]
    sent = [0, 0]
    for number, (who, what) in enumerate(steps):
        if number == handover:
            sample = store.accounts.sample(work[0].sample)
            assert sample is not None
            store.accounts.orphan(sample)
            apply(store, [Restart("r1", 1, V0, (sample.id,), "")])
            work += owners[1].take()
        if who >= len(work):
            continue
        current = who == len(work) - 1
        start = max(0, sent[who] - 2) if what == "repeat" else sent[who]
        length = 2 if what != "far" else 4
        if what == "repeat" and start + length != sent[who]:
            continue
        owners[who].exchange(chunks=(chunk(work[who], length, start),))
        if what != "repeat":
            sent[who] += length
        text = stored(store, work[-1].sample)
        assert text.tolist() == tokens_of(work[-1], len(text)).tolist()
        if current:
            assert len(text) == sent[who]
    store.close()


def test_an_engine_error_is_a_drop_and_not_a_reward(hand: Hand) -> None:
    """Invariant 3; faults 16 and 17: the rest of the group goes on if it is large enough, else it goes too."""
    first, second = hand.issue(2)[::2]
    hand.exchange(failed=(Failure(first.sample, first.owner_epoch, "engine_error", "no room"),))
    assert states(hand.store) == {0: "dropped", 1: "issued"}
    assert reasons(hand.store) == {"engine_error": 1, "group_incomplete": 1}
    assert ((0, 1), 0) in hand.cancelled, "its sibling is called off"
    assert hand.exchange().cancel == ()
    assert hand.store.accounts.room(V0) == 3, "there is room again"
    assert second.sample == (1, 0)


# ---------------------------------------------------------------- scores


def test_the_first_score_wins_and_a_new_scorer_is_handed_everything(hand: Hand) -> None:
    hand.finish(hand.issue(1))
    store = hand.store
    (group,) = store.exchange_scores(ScoreReport(1, want=5))
    assert store.exchange_scores(ScoreReport(1, want=5)) == []
    assert store.exchange_scores(ScoreReport(2, want=5)) == [group]
    assert json.loads(group.row) == {"prompt": 0}
    assert np.frombuffer(group.members[1].tokens, np.int32).tolist() == [10, 11, 12]

    def report(reward: float) -> ScoreReport:
        return ScoreReport(2, (GroupScore(0, tuple(MemberScore(i, 0, reward) for i in range(2))),))

    store.exchange_scores(report(1.0))
    store.exchange_scores(report(7.0))
    assert [s.reward for s in store.accounts.groups[0].samples] == [1.0, 1.0]
    assert states(store) == {0: "buffered"}


def test_failed_and_missing_rewards_are_drops(tmp_path: Path) -> None:
    """Invariant 3: a reward that failed, or said nothing, trains nothing. Fault 16."""
    store = open_store(tmp_path, make_settings(group_size=4))
    hand = Hand(store)
    hand.finish(hand.issue(1))
    store.exchange_scores(ScoreReport(1, want=1))
    members = (
        MemberScore(0, 0, None, failure="reward_error", message="division by zero"),
        MemberScore(1, 0, None),
        MemberScore(2, 0, 0.0),
        MemberScore(3, 0, 1.0),
    )
    store.exchange_scores(ScoreReport(1, (GroupScore(0, members),)))
    assert states(store) == {0: "buffered"}
    assert reasons(store) == {"reward_error": 1, "reward_none": 1}
    hand.finish(hand.issue(1))
    hand.score()
    batch = hand.train(0)
    assert [(g, i) for g, i, _ in batch.ids] == [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert batch.rewards == (0.0, 1.0, 0.0, 1.0, 2.0, 3.0)


def test_rewards_that_the_policy_set_are_trained_and_counted(hand: Hand, tmp_path: Path) -> None:
    """Invariant 3: `reward.on_failure = VALUE`, the user's choice."""
    hand.finish(hand.issue(1))
    hand.store.exchange_scores(ScoreReport(1, want=1))
    members = (MemberScore(0, 0, -1.0, failure="reward_timeout", message="too slow"), MemberScore(1, 0, 1.0))
    hand.store.exchange_scores(ScoreReport(1, (GroupScore(0, members),)))
    hand.make(1)
    assert hand.train(0).rewards == (-1.0, 1.0, 0.0, 1.0)
    assert reasons(hand.store) == {}
    assert [row["num_reward_failures"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1]


def test_zero_variance_groups_are_dropped_if_asked(tmp_path: Path) -> None:
    hand = Hand(open_store(tmp_path, make_settings(drop_zero_variance=True)))
    hand.finish(hand.issue(2))
    hand.score(lambda group, index: float(group * index))
    assert states(hand.store) == {0: "dropped", 1: "buffered"}
    assert reasons(hand.store) == {"zero_variance": 2}


def test_a_fatal_reward_reaches_the_manager(hand: Hand) -> None:
    """Fault 18."""
    hand.store.exchange_scores(ScoreReport(1, fatal="reward.py:score always raises"))
    assert hand.store.events(0).events == (Fatal("reward.py:score always raises"),)


# ---------------------------------------------------------------- cuts


def test_a_batch_is_a_cut_made_once_in_canonical_order(hand: Hand) -> None:
    """Invariant 2, protocol §3: asked again, and asked in the next life, batch u is batch u."""
    store = hand.store
    works = [hand.issue(1) for _ in range(3)]
    for work in (works[2], works[0], works[1]):
        hand.finish(work[::-1])
        hand.score()
    assert store.next_batch(0) == store.next_batch(0)
    batch = hand.train(0)
    assert batch.ids == ((0, 0, 0), (0, 1, 0), (2, 0, 0), (2, 1, 0)), "first buffered first, listed by id"
    assert batch == store.next_batch(0)
    assert batch.versions == (V0,) * 4 and batch.prompt_lengths == (2,) * 4
    assert np.frombuffer(batch.prompt_tokens, np.int32).tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert np.frombuffer(batch.response_tokens, np.int32).tolist() == [0, 1, 2, 10, 11, 12] * 2
    assert [runs[0].length for runs in batch.chunks] == [3] * 4 and batch.truncated == (False,) * 4
    assert store.next_batch(1) is None and not store.over(1)


def test_a_batch_in_parts(tmp_path: Path) -> None:
    """Schedule `stream`: each part is there as soon as it can be, for ever, and the batch counts with the last."""
    settings = make_settings(schedule="stream", groups_per_batch=4, num_mini_batches=2, max_outstanding_groups=8)
    store = open_store(tmp_path, settings)
    hand = Hand(store)
    hand.make(1)
    assert store.next_batch(0, 0) is None
    hand.make(1)
    first = store.next_batch(0, 0)
    assert first is not None and (first.part, first.num_parts, len(first.ids)) == (0, 2, 4)
    assert store.next_batch(0, 1) is None and not store.over(0)
    with pytest.raises(ProtocolError, match="batch 1 was asked for, but 0 is the next"):
        store.next_batch(1, 0)
    store.close()
    store = open_store(tmp_path, settings)
    assert store.next_batch(0, 0) == first, "in the next life too"
    hand = Hand(store, incarnation=2)
    hand.make(3)
    second = store.next_batch(0, 1)
    assert second is not None and (second.part, len(second.ids)) == (1, 4)
    assert {g for g, _, _ in first.ids}.isdisjoint(g for g, _, _ in second.ids)
    store.trained(Trained(0, V1, 0, {}))
    assert [s for s in states(store).values()] == ["trained"] * 4 + ["buffered"]
    (row,) = read_jsonl(RunFolder(tmp_path).metrics)
    assert row["num_samples"] == 8
    assert store.next_batch(0, 0) == first and store.next_batch(0, 1) == second, "until a checkpoint has it"
    store.close()


@pytest.mark.parametrize(("policy", "last"), [("train", 2), ("drop", 0)])
def test_prompts_that_end_in_the_middle_of_a_batch(tmp_path: Path, policy: str, last: int) -> None:
    """Fault 13: the trainer has begun the batch, so it is ended: with what is left, or with nothing."""
    settings = make_settings(
        schedule="stream",
        groups_per_batch=4,
        num_mini_batches=2,
        max_outstanding_groups=8,
        iterations=None,
        last_batch=policy,
    )
    store = open_store(tmp_path, settings, Prompts(rows=3, epochs=1))
    hand = Hand(store)
    hand.make(2)
    assert store.next_batch(0, 0) is not None
    hand.make(2)
    batch = store.next_batch(0, 1)
    assert batch is not None and (batch.part, batch.num_parts, len(batch.ids)) == (1, 2, last)
    assert store.over(1) and store.next_batch(1, 0) is None
    store.trained(Trained(0, V1, 0, {}))
    assert reasons(store) == ({} if last else {"data_exhausted": 2})
    assert set(states(store).values()) == ({"trained"} if last else {"trained", "dropped"})


def test_a_batch_beyond_the_cuts_is_refused(hand: Hand) -> None:
    """Protocol §3: a checkpoint that is ahead of the database belongs to another one."""
    with pytest.raises(ProtocolError, match="batch 4 was asked for, but 0 is the next"):
        hand.store.next_batch(4)


def test_trained_counts_once(hand: Hand, tmp_path: Path) -> None:
    hand.make(2)
    hand.train(0)
    hand.train(0)
    rows = list(read_jsonl(RunFolder(tmp_path).metrics))
    assert [(r["version"], r["num_samples"], r["num_tokens"], r["loss"]) for r in rows] == [(1, 4, 20, 0.5)]
    assert rows[0]["rewards/score"] == 0.5 and rows[0]["staleness_use_max"] == 0
    assert set(states(hand.store).values()) == {"trained"}


def test_rows_go_only_when_a_checkpoint_covers_them(hand: Hand) -> None:
    """Protocol §3: the tokens of cut u are there until a checkpoint of a version above u is durable."""
    store = hand.store
    for update in range(2):
        hand.make(2, Version(0, update))
        hand.train(update, checkpoint=0)
    assert store.next_batch(0) is not None
    hand.make(2, V1)
    hand.train(2, checkpoint=1)
    assert not store.free_some(), "a piece is enough"
    with pytest.raises(ProtocolError, match="batch 0 was asked for after a checkpoint"):
        store.next_batch(0)
    assert store.next_batch(1) is not None and store.next_batch(2) is not None
    held = {g for (g,) in store.db.execute("SELECT DISTINCT group_id FROM chunks")}
    assert held == {2, 3, 4, 5}
    assert store.db.execute("SELECT COUNT(*) FROM samples WHERE state = 'trained'").fetchone() == (12,)


def test_tokens_of_many_groups_are_deleted_in_pieces(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten large batches deleted at once kept the store from answering until it was taken for dead."""
    monkeypatch.setattr(stores, "FREED_AT_ONCE", 3)
    store = hand.store
    for update in range(3):
        hand.make(2, Version(0, update))
        hand.train(update, checkpoint=2 if update == 2 else 0)

    def held() -> list[int]:
        return [group for (group,) in store.db.execute("SELECT DISTINCT group_id FROM chunks ORDER BY group_id")]

    assert held() == [0, 1, 2, 3, 4, 5]
    assert store.free_some() and held() == [3, 4, 5]
    assert not store.free_some() and held() == [4, 5], "of the batch after the checkpoint"
    assert not store.free_some() and held() == [4, 5]


def test_dropped_groups_leave_no_tokens_behind(hand: Hand) -> None:
    """Fault 37: a filter that drops nearly everything does not fill the disk."""
    work = hand.issue(1)
    hand.exchange(chunks=(chunk(work[0], 3),), failed=(Failure(work[1].sample, 0, "engine_error", ""),))
    store = hand.store
    assert store.db.execute("SELECT COUNT(*) FROM chunks").fetchone() == (0,)
    assert store.db.execute("SELECT data, prompt FROM groups").fetchall() == [(None, None)]


def test_a_cut_waits_for_a_deadline_that_must_be_met(tmp_path: Path) -> None:
    """Invariant 7: buffered groups of a newer version do not push out an old one that is still generating."""
    store = open_store(tmp_path, make_settings(max_staleness=0, max_outstanding_groups=8))
    hand = Hand(store)
    slow, fast = hand.issue(1), hand.issue(1)
    assert hand.issue(1) == [], "no room under version 0"
    hand.finish(fast)
    hand.score()
    assert store.next_batch(0) is None
    hand.finish(slow)
    hand.score()
    assert store.next_batch(0) is not None


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize(("policy", "batches"), [("train", [2, 1]), ("drop", [2])])
def test_data_that_ends(tmp_path: Path, policy: str, batches: list[int]) -> None:
    """Faults 3, 9, 12, 13: what is left is a batch of its own, or dropped with its reason; then it is over."""
    settings = make_settings(iterations=None, last_batch=policy, max_outstanding_groups=8, max_staleness=None)
    store = open_store(tmp_path, settings, Prompts(rows=3, epochs=1))
    hand = Hand(store)
    hand.make(5)
    assert Exhausted() in store.events(0).events
    for update, size in enumerate(batches):
        assert len(hand.train(update).ids) == 2 * size
        assert store.over(update + 1) == (update + 1 == len(batches) and policy == "train")
    assert store.next_batch(len(batches)) is None and store.over(len(batches))
    assert reasons(store) == ({"data_exhausted": 2} if policy == "drop" else {})


def test_epochs_wrap(tmp_path: Path) -> None:
    """Fault 3."""
    store = open_store(tmp_path, make_settings(max_outstanding_groups=6, max_staleness=None), Prompts(rows=2))
    work = Hand(store).issue(5)
    assert [int(np.frombuffer(w.prompt, np.int32)[0]) for w in work[::2]] == [0, 1, 0, 1, 0]
    assert not store.accounts.exhausted


def test_an_overlong_prompt_is_drawn_and_dropped(tmp_path: Path) -> None:
    """Fault 40: it counts as dispatched, and another takes its place."""
    store = open_store(tmp_path, make_settings(), Prompts(rows=4, overlong={0, 2}))
    work = Hand(store).issue(2)
    assert [w.sample.group for w in work] == [1, 1, 3, 3]
    assert states(store) == {0: "dropped", 1: "issued", 2: "dropped", 3: "issued"}
    assert reasons(store) == {"prompt_overlong": 4}


def test_nothing_but_overlong_prompts_is_an_error(tmp_path: Path) -> None:
    store = open_store(tmp_path, make_settings(), Prompts(rows=3, overlong=range(3)))
    with pytest.raises(DataError, match="every prompt is longer"):
        Hand(store).issue(1)


# ---------------------------------------------------------------- evaluation


def evaluating(folder: Path) -> DataStore:
    return open_store(folder, make_settings(eval_groups=3, eval_every=1), None, Prompts(rows=3, overlong={1}))


def test_the_best_of_several_responses_is_pass_at_k(tmp_path: Path) -> None:
    """Two prompts of two responses: one is right in one of them, the other in none."""
    settings = make_settings(eval_groups=2, eval_every=1, eval_group_size=2)
    store = open_store(tmp_path, settings, None, Prompts(rows=2))
    hand = Hand(store)
    hand.finish(hand.issue(2, kind="eval"))
    hand.score(lambda group, index: float((group, index) == (FIRST_EVAL, 1)))
    (row,) = read_jsonl(tmp_path / "eval.jsonl")
    assert (row["num_samples"], row["eval_reward_mean"], row["eval_reward_best"]) == (4, 0.25, 0.5)


def test_an_evaluation_round(tmp_path: Path) -> None:
    """Evaluation stands outside staleness, quota and buffer, and ends in one row."""
    store = evaluating(tmp_path)
    hand, other = Hand(store), Hand(store, "r1")
    work = hand.issue(2, kind="eval") + other.issue(5, kind="eval")
    assert [w.sample for w in work] == [(FIRST_EVAL, 0), (FIRST_EVAL + 2, 0)] and {w.kind for w in work} == {"eval"}
    assert store.accounts.num_live == 0 and store.accounts.cursor == 0
    hand.finish(work[:1])
    hand.score(lambda group, index: 1.0)
    assert list(read_jsonl(tmp_path / "eval.jsonl")) == []
    other.finish(work[1:])
    hand.score(lambda group, index: 0.0)
    (row,) = read_jsonl(tmp_path / "eval.jsonl")
    assert (row["version"], row["num_samples"], row["eval_reward_mean"]) == (0, 2, 0.5)
    assert EvalDone(V0) in store.events(0).events
    assert store.db.execute("SELECT COUNT(*) FROM chunks").fetchone() == (0,)
    assert store.recovered().evals_done == (V0,)


def test_an_evaluation_that_is_given_up_or_interrupted(tmp_path: Path) -> None:
    store = evaluating(tmp_path)
    hand = Hand(store)
    hand.issue(2, kind="eval")
    apply(store, [GiveUpEval(V0, "")])
    assert reasons(store) == {"prompt_overlong": 1, "version_gone": 1}
    hand.issue(1, V1, kind="eval")
    store.close()
    again = evaluating(tmp_path)
    assert reasons(again)["interrupted"] == 1 and again.recovered().orphans == ()
    again_hand = Hand(again, incarnation=2)
    work = again_hand.issue(3, V1, kind="eval")
    again_hand.finish(work)
    again_hand.score()
    assert [row["version"] for row in read_jsonl(tmp_path / "eval.jsonl")] == [1]


# ---------------------------------------------------------------- events and restarts


def test_events_come_in_order_until_they_are_seen(hand: Hand) -> None:
    hand.make(2)
    hand.train(0)
    events = hand.store.events(0)
    kinds = [type(e) for e in events.events]
    assert kinds == [Issued, Finished, Buffered, Buffered, CutMade, CutTrained]
    assert events.last == len(kinds)
    assert hand.store.events(4).events == events.events[4:]
    assert hand.store.events(events.last).events == ()
    hand.issue(1)
    assert hand.store.events(events.last).last == events.last + 1, "numbers never come again"


def test_old_news_is_not_told_to_the_next_manager(hand: Hand, tmp_path: Path, settings: Settings) -> None:
    """Protocol §8: a manager begins with the store's counts; events in them must not count a second time."""
    hand.make(2)
    hand.store.next_batch(0)
    last = hand.store.events(0).last
    hand.store.close()
    again = open_store(tmp_path, settings)
    recovered = again.recovered()
    assert (recovered.term, recovered.cut_groups, recovered.update, recovered.outbox) == (2, 2, 1, last)
    assert again.events(0).events == ()
    Hand(again, incarnation=2).issue(1, V1)
    told = again.events(0)
    assert (told.last, len(told.events)) == (last + 1, 1)


def test_complete_accounts_for_what_is_left(hand: Hand) -> None:
    hand.make(1)
    hand.issue(1)
    apply(hand.store, [Complete("")])
    assert reasons(hand.store) == {"run_ended": 4}
    assert set(hand.exchange().cancel) == {((1, 0), 0), ((1, 1), 0)}
    dropped = [e for e in hand.store.events(0).events if isinstance(e, Dropped)]
    assert sorted(g for e in dropped for g in e.groups) == [0, 1]


def test_a_cut_that_a_shorter_resume_leaves_is_made_again_by_a_longer_one(
    hand: Hand, tmp_path: Path, settings: Settings
) -> None:
    """Fault 10: killed with batch 1 cut, resumed to train batch 0 only, and then resumed to go on."""
    hand.make(4)
    assert hand.store.next_batch(0) is not None and hand.store.next_batch(1) is not None
    hand.train(0)
    apply(hand.store, [Complete("")])
    assert states(hand.store) == {0: "trained", 1: "trained", 2: "dropped", 3: "dropped"}
    assert hand.store.db.execute("SELECT batch FROM cuts").fetchall() == [(0,)]
    hand.store.close()
    again = Hand(open_store(tmp_path, settings), incarnation=9)
    again.make(2, V1)
    assert [group for group, _, _ in again.train(1).ids] == [4, 4, 5, 5]
    assert again.store.accounts.update == 2


def test_metric_files_are_rebuilt(hand: Hand, tmp_path: Path, settings: Settings) -> None:
    """Fault 38: a torn or short file says again what the database says, and steps go on without a gap."""
    path = tmp_path / "metrics.jsonl"
    for update in range(2):
        hand.make(2, Version(0, update))
        hand.train(update)
    hand.store.close()
    whole = path.read_text()
    for torn in (whole[:-7], whole.splitlines(keepends=True)[0], "", whole + whole[:20]):
        path.write_text(torn)
        open_store(tmp_path, settings).close()
        assert path.read_text() == whole
    path.unlink()
    again = open_store(tmp_path, settings)
    again_hand = Hand(again, incarnation=9)
    again_hand.make(2, V1)
    again_hand.train(2)
    assert [row["version"] for row in read_jsonl(path)] == [1, 2, 3]


def test_drops_are_in_one_metrics_row_each(tmp_path: Path) -> None:
    """`num_dropped` adds up to what was dropped, over restarts too."""
    settings = make_settings(max_outstanding_groups=8, max_staleness=None)
    for life in range(3):
        store = open_store(tmp_path, settings)
        hand = Hand(store, incarnation=life + 1)
        work = hand.issue(1)
        hand.exchange(failed=(Failure(work[0].sample, work[0].owner_epoch, "engine_error", ""),))
        hand.make(2)
        hand.train(life)
        store.close()
    assert [row["num_dropped"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [2, 2, 2]


def test_an_engine_error_is_another_attempt_with_other_tokens(tmp_path: Path) -> None:
    """Fault 16: what the first attempt had streamed is gone, the next one is adopted, and the second error drops it."""
    settings = make_settings(engine_retries=1, min_group_size=1, max_outstanding_groups=8, max_staleness=None)
    store = open_store(tmp_path, settings)
    hand = Hand(store)
    first, other = hand.issue(1)
    hand.exchange(chunks=(chunk(first, 3),), failed=(Failure(first.sample, 0, "engine_error", "broken"),))
    assert len(stored(store, first.sample)) == 0
    store = hand.store = open_store(tmp_path, settings, anew=False)
    apply(store, [Adopt("r0", 1, V0, (first.sample,), "")])
    (again,) = hand.take()
    assert (again.sample, again.attempt, again.response) == (first.sample, 1, b"") and again.owner_epoch > 0
    hand.exchange(chunks=(chunk(again, 2),), failed=(Failure(again.sample, again.owner_epoch, "engine_error", ""),))
    assert reasons(store) == {"engine_error": 1}
    hand.finish([other])
    hand.score()
    hand.make(1)
    assert hand.train(0).rewards == (1.0, 0.0, 1.0), "no reward stands for the one that failed"
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert (row["num_samples"], row["num_retried"], row["failures/engine"], row["failures/reward"]) == (3, 1, 2, 0)


def test_deaths_are_in_one_metrics_row_each(tmp_path: Path) -> None:
    """The manager says all of a start, also again; the starts before are remembered."""
    settings = make_settings(iterations=4, max_outstanding_groups=8, max_staleness=None)
    for life in range(2):
        store = open_store(tmp_path, settings)
        hand = Hand(store, incarnation=life + 1)
        for update, deaths in enumerate([(("replica", 2),), (("replica", 2), ("trainer", 1))]):
            apply(store, [NoteDeaths(deaths[:1]), NoteDeaths(deaths), NoteDeaths(deaths)])
            store = hand.store = open_store(tmp_path, settings, anew=False)
            hand.make(2)
            hand.train(2 * life + update)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["deaths/replica"], row["deaths/trainer"]) for row in rows] == [(2, 0), (0, 1)] * 2


def test_two_stores_of_one_run_do_not_mix(hand: Hand, tmp_path: Path, settings: Settings) -> None:
    """The term tells them apart; nobody owns anything after a start."""
    work = hand.issue(1)
    hand.exchange(chunks=(chunk(work[0], 2),))
    again = open_store(tmp_path, settings)
    assert again.term == hand.store.term + 1
    assert {s.state for s in again.accounts.unfinished()} == {"orphan"}
    assert set(again.recovered().orphans) == {((0, 0), V0, 1), ((0, 1), V0, 1)}
    late = Hand(again, "r0")
    reply = late.exchange(chunks=(chunk(work[0], 1, start=2),))
    assert reply.cancel == ((work[0].sample, 0),) and again.refused == 1


@pytest.mark.parametrize("seed", range(12))
def test_a_kill_after_any_transaction_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    """Invariants 2 and 12; faults 11, 12, 29. After random steps the store is opened again, without being closed.

    With everybody (`kill`) nobody owns anything then; alone (`replace`) it goes on as if nothing had been.
    """
    random = Random(seed)
    settings = make_settings(
        iterations=None, max_staleness=None, max_outstanding_groups=6, drop_zero_variance=bool(seed % 2)
    )
    store = open_store(tmp_path, settings, Prompts(rows=9, epochs=1))
    hand, held, trained, batches = Hand(store), [], 0, {}
    for _ in range(400):
        step = random.choice(["issue", "finish", "fail", "score", "cut", "train", "kill", "replace"])
        if step == "issue":
            held += hand.issue(random.randint(1, 2))
        elif step == "finish" and held:
            hand.finish([held.pop(random.randrange(len(held)))])
        elif step == "fail" and held and random.random() < 0.2:
            w = held.pop()
            hand.exchange(failed=(Failure(w.sample, w.owner_epoch, "engine_error", ""),))
        elif step == "score":
            hand.score(lambda group, index: float(index * (group % 3)))
        elif step == "cut" and (batch := store.next_batch(trained)) is not None:
            assert batches.setdefault(trained, batch) == batch
        elif step == "train" and trained in batches:
            assert hand.train(trained) == batches[trained]
            trained += 1
        elif step == "kill" and random.random() < 0.3:
            store = open_store(tmp_path, settings, Prompts(rows=9, epochs=1))
            hand = Hand(store, incarnation=store.term)
            orphans = tuple(sample for sample, _, _ in store.recovered().orphans)
            apply(store, [Restart("r0", store.term, V0, orphans, "")])
            held = hand.take()
            assert {w.sample for w in held} == set(orphans)
        elif step == "replace" and random.random() < 0.3:
            before = store.recovered()
            store = hand.store = open_store(tmp_path, settings, Prompts(rows=9, epochs=1), anew=False)
            assert store.recovered() == before
        for sample, epoch in hand.cancelled:
            held = [w for w in held if (w.sample, w.owner_epoch) != (sample, epoch)]
        if store.over(trained) and trained not in batches:
            break
    assert store.over(trained) and store.accounts.exhausted
    kinds = Counter(state for (state,) in store.db.execute("SELECT state FROM groups"))
    assert kinds["trained"] + kinds["dropped"] == 9 == kinds.total()
    cut = [g for (text,) in store.db.execute("SELECT groups FROM cuts") for g in json.loads(text)]
    assert len(cut) == len(set(cut)) == kinds["trained"]
    assert [row["version"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1, trained + 1))
    store.close()


def test_a_database_that_is_none(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "data.sqlite").write_text("no database, but long enough to be taken for one " * 9)
    with pytest.raises(StorageError, match=r"can't be opened"):
        open_store(tmp_path, settings)


def test_a_cut_survives_power_loss(store: DataStore, hand: Hand) -> None:
    """Protocol §3: cuts are committed with synchronous=FULL, everything else with NORMAL."""
    words: list[str] = []
    hand.make(2)
    (level,) = store.db.execute("PRAGMA synchronous").fetchone()
    assert level == 1
    store.db.set_trace_callback(lambda statement: words.append(statement.split("=")[0].split()[0]))
    store.next_batch(0)
    store.db.set_trace_callback(None)
    begin, commit = words.index("BEGIN"), words.index("COMMIT")
    assert words[begin - 1] == words[commit + 1] == "PRAGMA"


@pytest.mark.parametrize("what", ["metrics", "outbox"])
def test_a_disk_that_is_full_at_another_moment_is_one_too(hand: Hand, tmp_path: Path, what: str) -> None:
    """What was committed stays: the next start writes the file anew."""
    hand.make(2)
    store = hand.store
    if what == "metrics":
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(StorageError, match=r"metrics\.jsonl: can't be written: No space left"):
            hand.train(0)
        (tmp_path / "metrics.jsonl").unlink()
    else:
        hand.train(0)
        store.db.execute("PRAGMA query_only = ON")
        with pytest.raises(StorageError, match="the database can't be written"):
            store.events(1)
    open_store(tmp_path, store.settings).close()
    assert [row["version"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1]


def test_a_full_disk_is_a_message(store: DataStore, hand: Hand) -> None:
    store.db.execute("PRAGMA max_page_count = 1")
    work = hand.issue(1)
    with pytest.raises(StorageError, match="can't be written"):
        for start in range(0, 10_000_000, 100_000):
            hand.exchange(chunks=(chunk(work[0], 100_000, start),))
    assert isinstance(store._failure, sqlite3.OperationalError)
