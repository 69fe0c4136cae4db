"""The account of samples: owners and epochs, moves that are crossed by finishes and deaths, parts of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.control.accounts import Accounts, Group
from laminar.control.events import Adopted, CutMade, EvalDone, Finished, Issued, MoveEnded, Orphaned, StoreEvent
from laminar.errors import ProtocolError
from laminar.types import SampleId, Settings, Version
from tests.control.plans import make_settings
from tests.control.scene import samples, v

V0, V1, V2 = v(0), v(1), v(2)
A, B = samples([0])


def account(groups: int = 1, settings: Settings | None = None, **changes: object) -> Accounts:
    """Whole groups of two are with r0, which has accepted them and streamed 3 tokens of each sample."""
    accounts = Accounts(settings or make_settings(**changes))
    for _ in range(groups):
        for s in accounts.issue("r0", 1, V0).samples:
            accounts.accept(s.id, 0)
            assert accounts.append(s.id, 0, 0, 3)
    accounts.drain_events()
    return accounts


def owner(accounts: Accounts, sample: SampleId) -> tuple[str | None, int, int]:
    """Owner, incarnation, epoch."""
    s = accounts.sample(sample)
    assert s is not None
    return s.owner, s.incarnation, s.owner_epoch


def told(accounts: Accounts, *kinds: type) -> list[StoreEvent]:
    return [e for e in accounts.drain_events() if isinstance(e, kinds)]


# ---------------------------------------------------------------- moves


def test_a_move_changes_the_owner_once_for_each_sample() -> None:
    """Protocol §5: released at the source, owned by the destination in the same step, ended with the last of them."""
    accounts = account()
    accounts.move("r0", 1, "r1", 4, V0)
    assert accounts.to_release("r0", 1) == [(A, 0), (B, 0)]
    assert accounts.to_release("r0", 2) == [], "another start has nothing to let go of"
    accounts.append(A, 0, 3, 2)
    moved = accounts.release(A, 0)
    assert moved is not None and (moved.length, moved.state, moved.attempt) == (5, "issued", 0)
    assert owner(accounts, A) == ("r1", 4, 1) and owner(accounts, B) == ("r0", 1, 0)
    assert accounts.release(A, 0) is None, "a repeat"
    assert accounts.to_release("r0", 1) == [(B, 0)] and "r0" in accounts.moves
    accounts.release(B, 0)
    assert accounts.drain_events() == [Adopted("r1", 4, V0, (A, B)), MoveEnded("r0", "r1")] and not accounts.moves
    assert accounts.append(A, 0, 5, 1) is None, "what the source still says is refused"
    assert accounts.append(A, 1, 5, 1) is True


def test_a_sample_that_ends_during_a_move_stays_ended() -> None:
    accounts = account()
    accounts.move("r0", 1, "r1", 1, V0)
    assert accounts.finish(A, 0, 3, "stop")
    assert accounts.to_release("r0", 1) == [(B, 0)]
    assert accounts.drop(B, "engine_error", 0)
    assert "r0" not in accounts.moves
    assert accounts.release(A, 0) is None and accounts.release(B, 0) is None
    assert told(accounts, Adopted, MoveEnded) == [MoveEnded("r0", "r1")]


def test_a_move_of_nothing_has_ended() -> None:
    accounts = account(groups=0)
    accounts.move("r0", 1, "r1", 1, V0)
    assert accounts.drain_events() == [MoveEnded("r0", "r1")]


def test_a_move_that_is_called_off_leaves_the_rest_where_it_is() -> None:
    accounts = account()
    accounts.move("r0", 1, "r1", 1, V0)
    accounts.release(A, 0)
    accounts.cancel_move("r0")
    assert told(accounts, MoveEnded) == [MoveEnded("r0", "r1")]
    assert accounts.to_release("r0", 1) == []
    assert owner(accounts, A)[0] == "r1" and owner(accounts, B) == ("r0", 1, 0)
    accounts.cancel_move("r0")
    assert accounts.drain_events() == [], "a repeat"


def test_what_is_let_go_of_after_the_move_was_called_off_is_an_orphan() -> None:
    """The source has flushed and forgotten it, and the destination is no longer bound: somebody else goes on."""
    accounts = account()
    accounts.move("r0", 1, "r1", 1, V0)
    accounts.cancel_move("r0")
    accounts.drain_events()
    assert accounts.release(A, 0) is None and accounts.release(A, 0) is None
    assert told(accounts, Orphaned) == [Orphaned((A,), V0, 1)], "once"
    assert owner(accounts, B) == ("r0", 1, 0)


@pytest.mark.parametrize(("dead", "orphans"), [(("r0", 1), [B]), (("r1", 4), [A]), (("r1", 3), []), (("r2", 1), [])])
def test_a_death_on_either_side_ends_the_move(dead: tuple[str, int], orphans: list[SampleId]) -> None:
    """Each sample is an orphan of the side that has it; the other side keeps what it has. Protocol §5."""
    accounts = account()
    accounts.move("r0", 1, "r1", 4, V0)
    accounts.release(A, 0)
    accounts.drain_events()
    accounts.orphan_all(*dead)
    assert [s.id for s in accounts.unfinished() if s.state == "orphan"] == orphans
    assert told(accounts, Orphaned) == ([Orphaned(tuple(orphans), V0, 1)] if orphans else [])
    assert bool(accounts.moves) == (dead not in (("r0", 1), ("r1", 4)))


def test_an_orphaned_owner_is_refused_whatever_it_says() -> None:
    """Protocol §4: stopped, declared dead, continued: a zombie changes nothing."""
    accounts = account()
    accounts.orphan_all("r0", 1)
    assert accounts.append(A, 0, 3, 2) is None
    assert not accounts.finish(A, 0, 3, "stop") and not accounts.drop(A, "engine_error", 0)
    assert accounts.release(A, 0) is None
    accounts.accept(A, 0)
    s = accounts.sample(A)
    assert s is not None and (s.state, s.owner, s.owner_epoch, s.length) == ("orphan", None, 1, 3)


# ---------------------------------------------------------------- failures of an engine


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_sample_that_its_engine_fails_begins_anew_and_is_dropped_in_the_end(retries: int) -> None:
    """Fault 4: `1 + engine_retries` attempts, each as an orphan without tokens; each failure is counted."""
    accounts = account(engine_retries=retries, min_group_size=1)
    for attempt in range(retries):
        epoch = owner(accounts, A)[2]
        assert accounts.fail(A, epoch, "engine_error")
        assert not accounts.fail(A, epoch, "engine_error"), "a repeat of the report"
        s = accounts.sample(A)
        assert s is not None and (s.state, s.owner, s.attempt, s.length) == ("orphan", None, attempt + 1, 0)
        assert told(accounts, Orphaned) == [Orphaned((A,), V0, 1)]
        assert [s.id for s in accounts.adopt("r1", 1, V0, [A])] == [A]
        assert accounts.append(A, owner(accounts, A)[2], 0, 2)
    assert not accounts.fail(A, owner(accounts, A)[2], "engine_error")
    s = accounts.sample(A)
    assert s is not None and (s.state, s.reason) == ("dropped", "engine_error")
    assert accounts.groups[0].state == "issued", "its sibling goes on"
    assert accounts.failures["engine"] == retries + 1 and accounts.num_retried == retries
    assert accounts.dropped == {"engine_error": 1}


def test_a_failure_in_a_move_ends_the_move() -> None:
    """The source has nothing more of it to let go of."""
    accounts = account(engine_retries=1)
    accounts.move("r0", 1, "r1", 1, V0)
    accounts.release(A, 0)
    assert accounts.fail(B, 0, "engine_error")
    assert not accounts.moves and accounts.release(B, 0) is None
    assert owner(accounts, A)[0] == "r1" and owner(accounts, B)[0] is None


def test_what_has_ended_does_not_fail_any_more() -> None:
    """Fault 14: and what was called off neither."""
    accounts = account(engine_retries=1, min_group_size=1)
    assert accounts.finish(A, 0, 3, "stop") and accounts.drop(B, "interrupted")
    assert not accounts.fail(A, 0, "engine_error") and not accounts.fail(B, 0, "engine_error")
    assert accounts.failures["engine"] == 0


def test_each_reason_is_counted_at_its_boundary() -> None:
    """A reward that a policy set in place of a failure counts too; what follows from a failure does not."""
    accounts = account(2, min_group_size=1)
    for sample in (A, B):
        accounts.finish(sample, 0, 3, "stop")
    accounts.score(A, 0, -1.0, "reward_error")
    accounts.score(B, 0, None, "reward_timeout")
    accounts.drop_group(accounts.groups[1], "prompt_overlong")
    assert accounts.failures == dict.fromkeys(accounts.failures, 0) | {"reward": 2, "prompt": 2}


# ---------------------------------------------------------------- adoption and restart


def test_adoption_goes_on_from_the_stored_tokens_in_the_same_attempt() -> None:
    accounts = account()
    accounts.orphan_all("r0", 1)
    accounts.drain_events()
    assert [s.id for s in accounts.adopt("r1", 2, V0, (A, B))] == [A, B]
    assert accounts.drain_events() == [Adopted("r1", 2, V0, (A, B))]
    s = accounts.sample(A)
    assert s is not None and (s.state, s.attempt, s.length, s.owner_epoch) == ("issued", 0, 3, 2)
    assert accounts.append(A, 2, 3, 1) is True
    assert accounts.adopt("r2", 1, V0, (A,)) == [], "it has an owner"


def test_only_who_holds_the_version_adopts() -> None:
    """Invariant 1. The answer is told even if it is empty: the manager waits for it."""
    accounts = account()
    accounts.orphan_all("r0", 1)
    accounts.drain_events()
    assert accounts.adopt("r1", 1, V1, (A, B)) == []
    assert accounts.drain_events() == [Adopted("r1", 1, V1, ())]


def test_under_partial_anybody_not_older_than_the_last_token_adopts() -> None:
    accounts = account(schedule="partial", max_staleness=2)
    accounts.append(A, 0, 3, 1, V1)
    accounts.orphan_all("r0", 1)
    assert told(accounts, Orphaned) == [Orphaned((A,), V1, 2), Orphaned((B,), V0, 2)]
    assert [s.id for s in accounts.adopt("r1", 1, V0, (A, B))] == [B]
    assert [s.id for s in accounts.adopt("r2", 1, V2, (A,))] == [A]


def test_a_restart_is_never_under_an_older_version() -> None:
    """Protocol §5; the group keeps its deadline, the sample begins at 0 as another attempt."""
    accounts = account()
    late = accounts.issue("r0", 1, V2)
    accounts.orphan_all("r0", 1)
    accounts.drain_events()
    restarted = accounts.restart("r1", 1, V1, (A, late.samples[0].id, B))
    assert [(s.id, s.attempt, s.length, s.version) for s in restarted] == [(A, 1, 0, V1), (B, 1, 0, V1)]
    assert accounts.groups[0].deadline == 1
    assert accounts.drain_events() == [Issued("r1", 1, V1, "train", (), (A, B), restarted=True)]


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("speak"), st.integers(0, 3), st.sampled_from(["new", "repeat", "finish", "let go"])),
            st.tuples(st.sampled_from(["move", "cancel", "die", "adopt", "restart"]), st.integers(0, 3), st.just("")),
        ),
        max_size=60,
    )
)
def test_whoever_speaks_when_one_owner_is_believed(steps: list[tuple[str, int, str]]) -> None:
    """Protocol §4: every replica that ever had the sample goes on talking with the epoch it had. What is stored grows
    by the owner's tokens alone, epochs never repeat, and a finished sample stays finished."""
    accounts = Accounts(make_settings(group_size=1, min_group_size=1))
    (s,) = accounts.issue("0", 1, V0).samples
    made = {0: (0, 0)}
    """epoch -> (first token, tokens) as that owner counts"""
    epochs = [0]
    for what, who, how in steps:
        before = (s.length, s.attempt, s.state)
        if what == "speak":
            epoch = epochs[who % len(epochs)]
            start, count = made[epoch]
            current = s.owner is not None and epoch == s.owner_epoch and s.state in ("issued", "running")
            ended = s.state == "finished" and epoch == s.owner_epoch
            if how in ("new", "repeat") and not ended:
                at = start + count - (2 if how == "repeat" and count >= 2 else 0)
                stored = accounts.append(s.id, epoch, at, 2)
                made[epoch] = start, at + 2 - start
                assert stored == ((at == before[0]) if current else None)
            elif how == "finish" and (not current or start + count == s.length):
                assert accounts.finish(s.id, epoch, start + count, "stop") == current
            elif how == "let go":
                moves = current and s.owner in accounts.moves
                assert (accounts.release(s.id, epoch) is not None) == moves
            if not current:
                assert (s.length, s.attempt, s.state) == before
        elif what == "move" and s.owner is not None and s.owner not in accounts.moves and str(who) != s.owner:
            accounts.move(s.owner, 1, str(who), 1, V0)
        elif what == "cancel" and s.owner is not None:
            accounts.cancel_move(s.owner)
        elif what == "die":
            accounts.orphan_all(str(who), 1)
        elif what == "adopt":
            accounts.adopt(str(who), 1, V0, (s.id,))
        elif what == "restart":
            accounts.restart(str(who), 1, V0, (s.id,))
        if s.owner_epoch not in made:
            assert s.owner_epoch > max(made)
            made[s.owner_epoch] = s.length, 0
            epochs.append(s.owner_epoch)
        if before[2] == "finished":
            assert (s.length, s.attempt, s.state) == before


def test_a_gap_by_the_owner_is_an_error() -> None:
    accounts = account()
    with pytest.raises(ProtocolError, match="start at 5, 3 are stored"):
        accounts.append(A, 0, 5, 1)


# ---------------------------------------------------------------- parts


def oldest_first(groups: object) -> list[Group]:
    return sorted(groups, key=lambda g: g.buffered_order or 0)  # type: ignore[call-overload, no-any-return]


def buffered(accounts: Accounts, *groups: int) -> None:
    for group in groups:
        for s in accounts.groups[group].samples:
            accounts.finish(s.id, 0, 3, "stop")
            accounts.score(s.id, 0, float(s.id.index), None)


@pytest.fixture
def stream() -> Callable[..., Accounts]:
    """Batches of four groups in two parts; five groups are with r0."""

    def make(**changes: object) -> Accounts:
        rules = {"schedule": "stream", "groups_per_batch": 4, "num_mini_batches": 2, "max_outstanding_groups": 8}
        return account(5, **(rules | changes))

    return make


def test_a_part_is_cut_as_soon_as_it_is_there(stream: Callable[..., Accounts]) -> None:
    accounts = stream()
    buffered(accounts, 3)
    assert accounts.cut_next(oldest_first) is None
    buffered(accounts, 1)
    cut = accounts.cut_next(oldest_first)
    assert cut is not None and (cut.update, cut.part, cut.num_parts, cut.groups) == (0, 0, 2, (3, 1))
    assert (accounts.update, accounts.part, accounts.cut_groups) == (0, 1, 2)
    assert accounts.cut_next(oldest_first) is None
    buffered(accounts, 0, 4)
    cut = accounts.cut_next(oldest_first)
    assert cut is not None and (cut.part, cut.groups, accounts.update, accounts.part) == (1, (0, 4), 1, 0)
    assert told(accounts, CutMade) == [CutMade(0, 0, (3, 1), last=False), CutMade(0, 1, (0, 4), last=True)]
    trained = accounts.train(0)
    assert trained is not None and [g.id for g in trained] == [3, 1, 0, 4], "in the order in which they were trained"
    assert accounts.train(0) is None and not accounts.cuts


def test_a_part_leaves_room_for_what_the_batch_must_take(stream: Callable[..., Accounts]) -> None:
    """Invariant 7: with k = 0 all four of version 0 are in batch 0, so the fifth, of version 1, is in neither part."""
    accounts = stream(max_staleness=0)
    assert accounts.groups[4].deadline == 0
    accounts.drop_group(accounts.groups[4], "filter")
    newer = accounts.issue("r1", 1, V1)
    for s in newer.samples:
        accounts.append(s.id, 0, 0, 3)
    buffered(accounts, newer.id, 0, 1)
    first = accounts.cut_next(oldest_first)
    assert first is not None and first.groups == (0, 1)
    buffered(accounts, 3)
    assert accounts.cut_next(oldest_first) is None, "group 2 is waited for"
    buffered(accounts, 2)
    second = accounts.cut_next(oldest_first)
    assert second is not None and set(second.groups) == {2, 3}


@pytest.mark.parametrize("left", [1, 2, 3])
def test_prompts_that_end_in_the_middle_of_a_batch(stream: Callable[..., Accounts], left: int) -> None:
    """Fault 13: what is left is one more part, the last of the batch, however large."""
    accounts = stream(iterations=None)
    buffered(accounts, 0, 1)
    assert accounts.cut_next(oldest_first) is not None
    for group in range(2 + left, 5):
        accounts.drop_group(accounts.groups[group], "filter")
    accounts.exhaust()
    assert not accounts.over
    buffered(accounts, *range(2, 2 + left))
    parts = []
    while (cut := accounts.cut_next(oldest_first)) is not None:
        parts.append((cut.update, cut.part, cut.num_parts, cut.groups))
    if left == 1:
        assert parts == [(0, 1, 2, (2,))]
    else:
        assert parts[0] == (0, 1, 2, (2, 3)) and parts[1:] == [(1, 0, 1, (4,))] * (left - 2)
    assert accounts.over


def test_prompts_that_end_with_a_part_end_the_batch(stream: Callable[..., Accounts]) -> None:
    """Nothing is left after the first part: the second is empty, so that what was cut is trained and published."""
    accounts = stream(iterations=None)
    buffered(accounts, 0, 1)
    accounts.cut_next(oldest_first)
    for group in (2, 3, 4):
        accounts.drop_group(accounts.groups[group], "filter")
    accounts.exhaust()
    cut = accounts.cut_next(oldest_first)
    assert cut is not None and (cut.part, cut.num_parts, cut.groups) == (1, 2, ())
    assert accounts.over and accounts.update == 1


def test_what_is_left_in_the_middle_of_a_batch_can_be_dropped(stream: Callable[..., Accounts]) -> None:
    accounts = stream(iterations=None, last_batch="drop")
    buffered(accounts, 0, 1)
    accounts.cut_next(oldest_first)
    for group in (3, 4):
        accounts.drop_group(accounts.groups[group], "filter")
    accounts.exhaust()
    cut = accounts.cut_next(oldest_first)
    assert cut is not None and (cut.part, cut.num_parts, cut.groups) == (1, 2, ()), "the first part has been trained"
    assert accounts.dropped["data_exhausted"] == 2 and accounts.over


def test_neighbouring_events_are_told_as_one() -> None:
    accounts = account(2)
    accounts.move("r0", 1, "r1", 1, Version(0, 0))
    buffered(accounts, 0)
    for s in accounts.groups[1].samples:
        accounts.release(s.id, 0)
    assert told(accounts, Finished, Adopted, MoveEnded) == [
        Finished((A, B)),
        Adopted("r1", 1, V0, samples([1])),
        MoveEnded("r0", "r1"),
    ]


def test_an_evaluation_is_finished_under_its_version_or_dropped() -> None:
    """Protocol §5, invariant 1 for evaluations: adopted by who holds the version, never begun under another one."""
    for schedule in ("laminar", "partial"):
        accounts = account(0, schedule=schedule, eval_groups=2, max_staleness=2)
        groups = accounts.issue_eval("r0", 1, V0, 2)
        (first,), (second,) = (g.samples for g in groups)
        accounts.orphan_all("r0", 1)
        assert accounts.adopt("r1", 1, V1, (first.id, second.id)) == []
        assert [s.id for s in accounts.adopt("r1", 1, V0, (first.id,))] == [first.id]
        assert accounts.restart("r2", 1, V1, (second.id,)) == []
        assert (second.state, second.reason) == ("dropped", "version_gone")
        accounts.finish(first.id, first.owner_epoch, 0, "stop")
        accounts.score(first.id, 0, 1.0, None)
        assert told(accounts, EvalDone) == [EvalDone(V0)]


def test_a_batch_is_given_up_while_the_next_is_cut_in_part(stream: Callable[..., Accounts]) -> None:
    """Protocol §3: the trainer asks ahead, so part 0 of batch 1 stands when batch 0 is given up; it stays."""
    accounts = stream(max_staleness=1)
    accounts.issue("r0", 1, V0)
    for s in accounts.groups[5].samples:
        accounts.append(s.id, 0, 0, 3)
    buffered(accounts, 0, 1, 2, 3, 4, 5)
    cuts = [accounts.cut_next(oldest_first) for _ in range(3)]
    assert [(c.update, c.part) for c in cuts if c is not None] == [(0, 0), (0, 1), (1, 0)]
    assert accounts.give_up_cut(0) and accounts.room(V0) == 6
    for group in [accounts.issue("r0", 1, V0) for _ in range(6)]:
        for s in group.samples:
            accounts.append(s.id, 0, 0, 3)
        buffered(accounts, group.id)
    again = []
    while (cut := accounts.cut_next(oldest_first)) is not None:
        again.append((cut.update, cut.part, cut.groups))
    assert again == [(0, 0, (6, 7)), (0, 1, (8, 9)), (1, 1, (10, 11))]
    assert accounts.cuts[1, 0].groups == (4, 5) and (accounts.update, accounts.part) == (2, 0)


def test_a_part_that_stands_takes_places_of_a_later_batch(stream: Callable[..., Accounts]) -> None:
    """Invariant 7 after a batch is given up: batch 1 has two places, not four, for what is due there."""
    accounts = stream(max_staleness=1)
    accounts.issue("r0", 1, V0)
    for s in accounts.groups[5].samples:
        accounts.append(s.id, 0, 0, 3)
    buffered(accounts, 0, 1, 2, 3, 4, 5)
    for _ in range(3):
        accounts.cut_next(oldest_first)
    accounts.give_up_cut(0)
    old = [accounts.issue("r0", 1, V0) for _ in range(4)]
    young = [accounts.issue("r1", 1, V1) for _ in range(3)]
    for group in (*young, *old):
        for s in group.samples:
            accounts.append(s.id, 0, 0, 3)
        buffered(accounts, group.id)
    first = accounts.cut_next(oldest_first)
    assert first is not None and first.groups == (young[0].id, young[1].id)
    second = accounts.cut_next(oldest_first)
    assert second is not None and second.groups == (old[0].id, old[1].id)
    last = accounts.cut_next(oldest_first)
    assert last is not None and (last.update, last.groups) == (1, (old[2].id, old[3].id))
