"""Work that changes hands in the data store: released, adopted, moved back; the new owner has all tokens as stored."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from laminar.control.commands import Adopt, CancelMove, Move, Orphan
from laminar.control.events import Adopted, Finished, MoveEnded, Orphaned
from laminar.data.store import DataStore
from laminar.types import BatchChunk, Finish, ScoreReport, Settings, Version
from tests.control.plans import make_settings
from tests.data.driving import V0, Hand, apply, chunk, open_store, states, stored, tokens_of

V1 = Version(0, 1)


@pytest.fixture
def settings() -> Settings:
    return make_settings()


@pytest.fixture
def hand(tmp_path: Path, settings: Settings) -> Hand:
    """Replica r0 of a store in `tmp_path`."""
    store: DataStore = open_store(tmp_path, settings)
    return Hand(store)


def test_moved_work_carries_the_stored_prefix(hand: Hand) -> None:
    """Protocol §5: flush, release, adopt: the new owner gets prompt and tokens as stored, and goes on from them."""
    store, other = hand.store, Hand(hand.store, "r1", incarnation=4)
    first, second = hand.issue(1)
    hand.exchange(chunks=(chunk(first, 2), chunk(second, 1)))
    apply(store, [Move("r0", 1, "r1", 4, V0, "")])
    reply = hand.exchange()
    assert reply.release == ((first.sample, 0), (second.sample, 0)) and reply.work == ()
    assert other.exchange().work == ()
    reply = hand.exchange(chunks=(chunk(first, 3, start=2),), released=((first.sample, 0),))
    assert reply.release == ((second.sample, 0),)
    (moved,) = other.take()
    assert (moved.sample, moved.attempt, moved.owner_epoch, moved.prompt) == (first.sample, 0, 1, first.prompt)
    assert moved.response == tokens_of(first, 5).tobytes()
    assert moved.logprobs == (-np.ones(5, np.float32)).tobytes()
    hand.exchange(finished=(Finish(second.sample, 0, 1, "stop"),), released=((second.sample, 0),))
    assert store.events(0).events[1:] == (
        Adopted("r1", 4, V0, (first.sample,)),
        Finished((second.sample,)),
        MoveEnded("r0", "r1"),
    )
    other.exchange(chunks=(chunk(moved, 1, start=5),), finished=(Finish(moved.sample, 1, 6, "stop"),))
    assert stored(store, first.sample).tolist() == [*tokens_of(first, 5), *tokens_of(moved, 1, start=5)]
    assert states(store) == {0: "finished"}


def test_a_report_that_is_repeated_releases_once(hand: Hand) -> None:
    store, other = hand.store, Hand(hand.store, "r1")
    work = hand.issue(1)
    apply(store, [Move("r0", 1, "r1", 1, V0, "")])
    report = {"chunks": tuple(chunk(w, 2) for w in work), "released": tuple((w.sample, 0) for w in work)}
    hand.exchange(**report)
    moved = other.take()
    before = list(store.db.iterdump())
    reply = hand.exchange(**report)
    assert set(reply.cancel) == {(w.sample, 0) for w in work}, "it owns them no longer"
    assert list(store.db.iterdump()) == before and other.exchange().work == ()
    assert [w.response for w in moved] == [tokens_of(w, 2).tobytes() for w in work]


def test_a_move_that_is_called_off_asks_for_nothing_more(hand: Hand) -> None:
    store = hand.store
    work = hand.issue(1)
    apply(store, [Move("r0", 1, "r1", 1, V0, ""), CancelMove("r0", "")])
    assert hand.exchange().release == ()
    hand.exchange(released=((work[0].sample, 0),))
    late = store.accounts.sample(work[0].sample)
    assert late is not None and (late.owner, late.state) == (None, "orphan"), "nobody generates it any more"


@pytest.mark.parametrize("dead", ["source", "destination"])
def test_a_death_during_a_move(hand: Hand, dead: str) -> None:
    """What the dead one had is adopted by a third, with all tokens that it ever streamed."""
    store = hand.store
    destination, third = Hand(store, "r1"), Hand(store, "r2")
    first, second = hand.issue(1)
    hand.exchange(chunks=(chunk(first, 2), chunk(second, 3)))
    apply(store, [Move("r0", 1, "r1", 1, V0, "")])
    hand.exchange(released=((first.sample, 0),))
    (moved,) = destination.take()
    apply(store, [Orphan("r0" if dead == "source" else "r1", 1, "killed")])
    lost = second if dead == "source" else moved
    assert store.events(0).events[-1] == Orphaned((lost.sample,), V0, 1)
    apply(store, [Adopt("r2", 1, V0, (first.sample, second.sample), "")])
    (adopted,) = third.take()
    assert adopted.sample == lost.sample and adopted.owner_epoch == lost.owner_epoch + 2
    assert adopted.response == stored(store, lost.sample).tobytes()
    zombie = hand if dead == "source" else destination
    reply = zombie.exchange(chunks=(chunk(lost, 1, start=len(stored(store, lost.sample))),))
    assert reply.cancel == ((lost.sample, lost.owner_epoch),) and store.refused == 1


def test_a_resume_adopts_with_all_that_was_streamed(hand: Hand, tmp_path: Path, settings: Settings) -> None:
    """Invariant 12: a restarted store has the tokens, and a replica that holds the version goes on from them."""
    first, second = hand.issue(1)
    hand.exchange(chunks=(chunk(first, 3),))
    again = open_store(tmp_path, settings)
    orphans = again.recovered().orphans
    assert orphans == ((first.sample, V0, 1), (second.sample, V0, 1))
    apply(again, [Adopt("r0", 2, V0, tuple(sample for sample, _, _ in orphans), "")])
    heir = Hand(again, incarnation=2)
    work = heir.take()
    assert [(w.sample, w.attempt, len(w.response) // 4) for w in work] == [(first.sample, 0, 3), (second.sample, 0, 0)]
    assert work[0].response == tokens_of(first, 3).tobytes()
    heir.exchange(
        chunks=(chunk(work[0], 1, start=3), chunk(work[1], 2)),
        finished=(
            Finish(first.sample, work[0].owner_epoch, 4, "stop"),
            Finish(second.sample, work[1].owner_epoch, 2, "stop"),
        ),
    )
    assert states(again) == {0: "finished"}
    (group,) = again.exchange_scores(ScoreReport(1, want=1))
    assert np.frombuffer(group.members[0].tokens, np.int32).tolist() == [
        *tokens_of(first, 3),
        *tokens_of(work[0], 1, start=3),
    ]


def test_a_batch_tells_which_tokens_are_of_which_version(tmp_path: Path) -> None:
    """Schedule `partial`: a trajectory is of the version of its issue, its chunks of their own."""
    hand = Hand(open_store(tmp_path, make_settings(schedule="partial", max_staleness=2)))
    work = hand.issue(2)
    for w in work:
        later = dataclasses.replace(chunk(w, 3, start=2), version=V1)
        hand.exchange(chunks=(chunk(w, 2), later), finished=(Finish(w.sample, 0, 5, "stop"),))
    hand.score()
    batch = hand.train(0)
    assert batch.versions == (V0,) * 4
    assert batch.chunks == ((BatchChunk(V0, 2), BatchChunk(V1, 3)),) * 4
