"""The account of every group and sample that is not yet trained or dropped.

One body of bookkeeping for two drivers: the data store applies these operations inside the SQLite transaction that
changes the data and writes the rows of `touched` and `touched_samples`; the simulator keeps only this. States follow
the tables of `control.ledger`; an illegal step raises and changes nothing. Events for the manager collect in `events`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from laminar.control import ledger, staleness
from laminar.control.events import (
    Adopted,
    Buffered,
    Completed,
    CutGivenUp,
    CutMade,
    Dropped,
    EvalDone,
    Exhausted,
    Finished,
    Issued,
    MoveEnded,
    Orphaned,
    Recovered,
    StoreEvent,
)
from laminar.control.mailbox import Inbox
from laminar.errors import BOUNDARY, ProtocolError
from laminar.types import SampleId, Settings, Version


@dataclass(slots=True)
class Sample:
    id: SampleId
    state: str = "new"
    attempt: int = 0
    owner: str | None = None
    incarnation: int = 0
    owner_epoch: int = 0
    version: Version = Version(0, 0)
    """At the issue of this attempt."""
    last_version: Version = Version(0, 0)
    """Of the newest token; differs from `version` under `partial` only."""
    length: int = 0
    """Response tokens stored."""
    finish_reason: str | None = None
    reward: float | None = None
    reason: str | None = None
    """Why it was dropped, or what failed before its reward was set by `reward.on_failure`."""
    staleness_generation: int | None = None


@dataclass(slots=True)
class Group:
    id: int
    kind: str
    """`train` or `eval`"""
    cursor: int
    """Draw number in the prompt pool (train) or row of the evaluation set (eval)."""
    version: Version
    deadline: int | None
    samples: list[Sample] = field(default_factory=list)
    state: str = "new"
    update: int | None = None
    part: int | None = None
    reason: str | None = None
    buffered_order: int | None = None

    def members(self, *states: str) -> list[Sample]:
        return [s for s in self.samples if s.state in states]


@dataclass(slots=True)
class Cut:
    """One part of batch `update`: these groups in this order, for ever."""

    update: int
    part: int
    num_parts: int
    groups: tuple[int, ...]


@dataclass(slots=True)
class EvalRound:
    """One evaluation of one version: rows `issued` of `settings.eval_groups` have been given out."""

    version: Version
    issued: int = 0
    open_groups: int = 0
    rewards: list[list[float]] = field(default_factory=list)
    """Of a prompt each: of its responses that have a score."""


LIVE = frozenset({"issued", "finished", "buffered"})
"""States of a group that is issued, not dropped, not in a standing cut."""

_UNFINISHED = frozenset({"issued", "running", "orphan"})
"""States of a sample that has not ended."""

FIRST_EVAL = 2**40
"""Evaluation groups have ids of their own: sampling is keyed by the id, and evaluating must not change training."""


@dataclass(slots=True)
class MoveOrder:
    """Everything unfinished that `source` held goes to `destination`, as the source lets go of it."""

    source: str
    destination: str
    incarnation: int
    """of the destination"""
    version: Version
    pending: dict[SampleId, None]
    """What the source has not let go of."""


Order = Callable[[Sequence[Group]], Sequence[Group]]
"""A sampler: buffered groups in the order in which they are offered to a batch."""


class Accounts:
    """State of all live groups, the cuts, and totals of what has left. Single-threaded."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.inbox = Inbox()
        """The term of the manager that is obeyed, and how far."""
        self.groups: dict[int, Group] = {}
        """Groups that are neither trained nor dropped."""
        self.cuts: dict[tuple[int, int], Cut] = {}
        """Cuts not yet trained."""
        self.next_group = 0
        """Id of the next training group."""
        self.next_eval = FIRST_EVAL
        """Id of the next evaluation group."""
        self.cursor = 0
        """Draws from the prompt pool so far."""
        self.buffered_count = 0
        """Groups that were ever buffered."""
        self.num_live = self.num_buffered = 0
        """Training groups that are `live`, and those of them that are buffered."""
        self._waits_for: frozenset[int] = frozenset()
        self._num_missing = 0
        """No batch can be cut before so many of `_waits_for` are buffered, or a group is dropped."""
        self.update = 0
        """u: the lowest batch not fully cut."""
        self.part = 0
        """The part of batch u to be cut next."""
        self.ahead: set[int] = set()
        """Batches after u that stand already: u was given up after they were cut."""
        self.given_up: set[int] = set()
        """Batches that were given up at least once: cut again, empty if nothing is left."""
        self.trained_version = 0
        self.cut_groups = 0
        """Groups in standing cuts, trained ones included."""
        self.exhausted = False
        self.eval_rounds: dict[Version, EvalRound] = {}
        self.dropped: Counter[str] = Counter()
        """Samples of training groups dropped, by reason."""
        self.failures: dict[str, int] = dict.fromkeys(BOUNDARY.values(), 0)
        """By the boundary crossed: samples dropped, begun anew or given a reward for it, those of evaluations too."""
        self.num_retried = 0
        """Attempts that were begun because an engine had failed on the one before."""
        self.deaths: dict[str, int] = {}
        """Deaths of processes by role, those that the manager of this start knows of."""
        self.earlier_deaths: dict[str, int] = {}
        """The same, of the starts before."""
        self.num_moved = self.num_adopted = self.num_restarted = 0
        """Changes of hands so far, in samples: between live replicas, of orphans, and of orphans begun anew."""
        self.cancelled: list[tuple[str, int, SampleId, int]] = []
        """(replica, incarnation, sample, owner epoch) that have to be told to forget a sample."""
        self.moves: dict[str, MoveOrder] = {}
        """By source."""
        self.events: list[StoreEvent] = []
        self.touched: set[int] = set()
        self.touched_samples: set[SampleId] = set()
        """Groups and samples whose rows have to be written."""

    # ------------------------------------------------------------ views

    def live(self) -> Iterator[Group]:
        """Training groups issued, not dropped, not in a standing cut."""
        return (g for g in self.groups.values() if g.kind == "train" and g.state in LIVE)

    def recount(self) -> None:
        """Count what is live, after groups were put here from outside."""
        self.num_live = sum(1 for _ in self.live())
        self.num_buffered = sum(1 for g in self.live() if g.state == "buffered")

    def room(self, version: Version) -> int:
        """Groups that may be issued now under `version`."""
        return 0 if self.exhausted else staleness.room(self.settings, version.number, self.num_live, self.cut_groups)

    def sample(self, sample: SampleId) -> Sample | None:
        group = self.groups.get(sample.group)
        return group.samples[sample.index] if group else None

    def unfinished_of(self, replica: str, incarnation: int) -> list[Sample]:
        """What this incarnation of a replica owns and has not ended."""
        return [
            s
            for group in self.groups.values()
            if group.state == "issued"
            for s in group.samples
            if s.owner == replica and s.incarnation == incarnation and s.state in ("issued", "running")
        ]

    def unfinished(self) -> Iterator[Sample]:
        for group in self.groups.values():
            yield from group.members(*_UNFINISHED)

    # ------------------------------------------------------------ starts and terms

    def abandon(self) -> None:
        """Everything has been started anew: nobody owns anything, and unfinished evaluations end."""
        for group in list(self.groups.values()):
            if group.kind == "eval":
                self.drop_group(group, "interrupted")
        for sample in list(self.unfinished()):
            if sample.state != "orphan":
                self.orphan(sample)
        self.eval_rounds.clear()
        self.earlier_deaths, self.deaths = self.all_deaths(), {}

    def note_deaths(self, deaths: Iterable[tuple[str, int]]) -> None:
        """Deaths by role since this start: all of them each time, so that it may be said twice."""
        self.deaths = dict(deaths)

    def all_deaths(self) -> dict[str, int]:
        """Deaths of processes by role, of all starts of the run."""
        return dict(Counter(self.earlier_deaths) + Counter(self.deaths))

    def begin_term(self, term: int) -> None:
        """From here on the manager of `term` is obeyed. The moves of the last one end: what was not let go of stays."""
        self.inbox = Inbox(term)
        for source in list(self.moves):
            self.cancel_move(source)

    def recovered(self, evals_done: tuple[Version, ...], outbox: int) -> Recovered:
        """What the manager of this term begins with; `outbox` is the number of the last event that is part of it."""
        owned: dict[tuple[str, int], list[SampleId]] = {}
        orphans = []
        for s in self.unfinished():
            if s.owner is None:
                orphans.append((s.id, s.last_version, self.groups[s.id.group].deadline))
            else:
                owned.setdefault((s.owner, s.incarnation), []).append(s.id)
        return Recovered(
            term=self.inbox.term,
            live=tuple((g.id, g.state) for g in self.live()),
            cut_groups=self.cut_groups,
            update=self.update,
            trained=self.trained_version,
            orphans=tuple(orphans),
            exhausted=self.exhausted,
            evals_done=evals_done,
            outbox=outbox,
            owned=tuple((*owner, tuple(samples)) for owner, samples in sorted(owned.items())),
            evals_open=tuple((r.version, r.issued) for _, r in sorted(self.eval_rounds.items())),
        )

    # ------------------------------------------------------------ issue

    def issue(
        self, replica: str, incarnation: int, version: Version, kind: str = "train", cursor: int | None = None
    ) -> Group:
        """Give one whole group to a replica. The caller has asked `room` (train) in the same transaction."""
        settings = self.settings
        train = kind == "train"
        group = Group(
            id=self.next_group if train else self.next_eval,
            kind=kind,
            cursor=self.cursor if cursor is None else cursor,
            version=version,
            deadline=staleness.deadline(version.number, settings.max_staleness) if train else None,
        )
        if train:
            self.next_group += 1
            self.cursor += 1
        else:
            self.next_eval += 1
        self._group_step(group, "issue")
        for index in range(settings.group_size if train else settings.eval_group_size):
            sample = Sample(SampleId(group.id, index))
            self._sample_step(sample, "issue")
            sample.owner, sample.incarnation = replica, incarnation
            sample.version = sample.last_version = version
            group.samples.append(sample)
        self.groups[group.id] = group
        return group

    def issue_eval(self, replica: str, incarnation: int, version: Version, count: int) -> list[Group]:
        """Give up to `count` rows of the evaluation of `version` to a replica that holds it."""
        round_ = self.eval_rounds.setdefault(version, EvalRound(version))
        groups = []
        for _ in range(min(count, self.settings.eval_groups - round_.issued)):
            groups.append(self.issue(replica, incarnation, version, kind="eval", cursor=round_.issued))
            round_.issued += 1
            round_.open_groups += 1
        return groups

    def drop_group(self, group: Group, reason: str) -> None:
        """Give a whole group up, whatever its members do."""
        for s in group.samples:
            if s.state not in ledger.TERMINAL:
                self._drop_sample(s, reason)
        self._group_step(group, "drop")
        group.reason = reason
        self.events.append(Dropped((), (group.id,), reason))
        if group.kind == "eval":
            self._evaluated(group)

    def report_issued(
        self, replica: str, incarnation: int, version: Version, groups: Sequence[Group], kind: str
    ) -> None:
        """Tell the manager how a grant was used, even if by nothing."""
        samples = tuple(s.id for g in groups for s in g.samples)
        self.events.append(
            Issued(replica, incarnation, version, kind, tuple(g.id for g in groups), samples, restarted=False)
        )

    def exhaust(self) -> None:
        """The prompt pool has ended."""
        if not self.exhausted:
            self.exhausted = True
            self._num_missing = 0
            self.events.append(Exhausted())

    # ------------------------------------------------------------ generate

    def accept(self, sample_id: SampleId, owner_epoch: int) -> None:
        """The replica has the work. Late or repeated news is ignored."""
        if (s := self._current(sample_id, owner_epoch)) and s.state in ("issued", "running"):
            self._sample_step(s, "accept")

    def append(
        self, sample_id: SampleId, owner_epoch: int, start: int, length: int, version: Version | None = None
    ) -> bool | None:
        """Whether `length` new tokens at `start` are to be stored: False for a resend of stored ones, None if the
        sender does not own the sample (any more).

        Raises ProtocolError if the owner leaves a gap or overlaps.
        """
        s = self._current(sample_id, owner_epoch)
        if s is None or s.state == "dropped":
            return None
        if start + length <= s.length:
            return False
        if start != s.length or s.state not in ("issued", "running"):
            raise ProtocolError(f"tokens for {sample_id} start at {start}, {s.length} are stored")
        s.length += length
        s.last_version = version or s.version
        self.touched_samples.add(sample_id)
        return True

    def finish(self, sample_id: SampleId, owner_epoch: int, length: int, reason: str) -> bool:
        """The whole response is stored. False for a repeat. Raises ProtocolError if tokens are missing."""
        s = self._current(sample_id, owner_epoch)
        if s is None or s.state not in ("issued", "running"):
            return False
        if length != s.length:
            raise ProtocolError(f"{sample_id} ends at {length}, {s.length} tokens are stored")
        self._sample_step(s, "finish")
        s.finish_reason = reason
        s.staleness_generation = max(0, self.trained_version - s.version.number)
        self.events.append(Finished((s.id,)))
        self._not_pending(s.owner, s.id)
        self._settle(self.groups[sample_id.group])
        return True

    def drop(self, sample_id: SampleId, reason: str, owner_epoch: int | None = None) -> bool:
        """Give a sample up. With `owner_epoch`, only if that owner still has it. False if there was nothing to drop."""
        s = self.sample(sample_id) if owner_epoch is None else self._current(sample_id, owner_epoch)
        if s is None or s.state in ledger.TERMINAL:
            return False
        self._drop_sample(s, reason)
        self._settle(self.groups[sample_id.group])
        return True

    def fail(self, sample_id: SampleId, owner_epoch: int, reason: str) -> bool:
        """The owner could not finish it. Whether it begins anew; else it has been dropped, or this is old news.

        A sample has `1 + engine_retries` attempts, those that deaths have cost it included. Another attempt has other
        dice; it has no owner at first, so it goes where its version is, as after a death.
        """
        s = self._current(sample_id, owner_epoch)
        if s is None or s.state not in ("issued", "running"):
            return False
        if s.attempt >= self.settings.engine_retries:
            self.drop(sample_id, reason, owner_epoch)
            return False
        self._count_failure(reason)
        self.num_retried += 1
        self._not_pending(s.owner, s.id)
        s.attempt, s.length, s.last_version = s.attempt + 1, 0, s.version
        self.orphan(s)
        return True

    def orphan(self, sample: Sample) -> None:
        """The owner is gone: whatever it still says is refused from here on."""
        self._sample_step(sample, "orphan")
        sample.owner, sample.owner_epoch = None, sample.owner_epoch + 1
        self.events.append(Orphaned((sample.id,), sample.last_version, self.groups[sample.id.group].deadline))

    def orphan_all(self, replica: str, incarnation: int) -> None:
        """This incarnation of a replica is dead; moves from it and to it end."""
        self.cancel_move(replica)
        for order in [o for o in self.moves.values() if o.destination == replica and o.incarnation == incarnation]:
            self.cancel_move(order.source)
        for sample in self.unfinished_of(replica, incarnation):
            self.orphan(sample)

    def adopt(self, replica: str, incarnation: int, version: Version, samples: Iterable[SampleId]) -> list[Sample]:
        """Give orphans to a replica that goes on from their tokens: one that holds their version.

        Under `partial`, where a training trajectory has several versions, one that holds none older than its last.
        """
        adopted = []
        for sample_id in samples:
            s = self.sample(sample_id)
            if s is None or s.state != "orphan":
                continue
            partial = self.settings.schedule == "partial" and sample_id.group < FIRST_EVAL
            if version >= s.last_version if partial else version == s.version:
                self._give(s, "adopt", replica, incarnation)
                self.num_adopted += 1
                adopted.append(s)
        self.events.append(Adopted(replica, incarnation, version, tuple(s.id for s in adopted)))
        return adopted

    def move(self, source: str, source_incarnation: int, destination: str, incarnation: int, version: Version) -> None:
        """Order the source to let go of all that is unfinished; what ends before that stays ended."""
        pending = {s.id: None for s in self.unfinished_of(source, source_incarnation)}
        self.moves[source] = MoveOrder(source, destination, incarnation, version, pending)
        self._end_move_if_done(self.moves[source])

    def cancel_move(self, source: str) -> None:
        """What was not let go of stays where it is."""
        if order := self.moves.get(source):
            order.pending.clear()
            self._end_move_if_done(order)

    def to_release(self, source: str, incarnation: int) -> list[tuple[SampleId, int]]:
        """(sample, owner epoch) that the source is to flush and let go of."""
        order = self.moves.get(source)
        samples = [] if order is None else [s for i in order.pending if (s := self.sample(i)) is not None]
        return [(s.id, s.owner_epoch) for s in samples if s.owner == source and s.incarnation == incarnation]

    def release(self, sample_id: SampleId, owner_epoch: int) -> Sample | None:
        """The owner has flushed and let go: the destination of its move owns the sample now.

        None: old news, or the move has been cancelled meanwhile, and then nobody owns it.
        """
        s = self._current(sample_id, owner_epoch)
        if s is None or s.owner is None or s.state not in ("issued", "running"):
            return None
        order = self.moves.get(s.owner)
        if order is None or sample_id not in order.pending:
            self.orphan(s)
            return None
        self._give(s, "move", order.destination, order.incarnation)
        self.num_moved += 1
        self.events.append(Adopted(order.destination, order.incarnation, order.version, (s.id,)))
        self._not_pending(order.source, sample_id)
        return s

    def _give(self, sample: Sample, event: str, replica: str, incarnation: int) -> None:
        self._sample_step(sample, event)
        sample.owner, sample.incarnation = replica, incarnation
        sample.owner_epoch += 1

    def _not_pending(self, source: str | None, sample_id: SampleId) -> None:
        if source is not None and (order := self.moves.get(source)) and sample_id in order.pending:
            del order.pending[sample_id]
            self._end_move_if_done(order)

    def _end_move_if_done(self, order: MoveOrder) -> None:
        if not order.pending:
            del self.moves[order.source]
            self.events.append(MoveEnded(order.source, order.destination))

    def restart(self, replica: str, incarnation: int, version: Version, samples: Iterable[SampleId]) -> list[Sample]:
        """Begin orphans anew, from the prompt, under a version not older than theirs. The group keeps its deadline.

        An evaluation is of one version: what can't go on under it is dropped.
        """
        restarted = []
        for sample_id in samples:
            s = self.sample(sample_id)
            if s is None or s.state != "orphan" or version.number < s.version.number:
                continue
            if sample_id.group >= FIRST_EVAL and version != s.version:
                self.drop_group(self.groups[sample_id.group], "version_gone")
                continue
            self._sample_step(s, "restart")
            s.attempt += 1
            self.num_restarted += 1
            s.owner_epoch += 1
            s.owner, s.incarnation, s.length = replica, incarnation, 0
            s.version = s.last_version = version
            restarted.append(s)
        ids = tuple(s.id for s in restarted)
        self.events.append(Issued(replica, incarnation, version, "train", (), ids, restarted=True))
        return restarted

    # ------------------------------------------------------------ score

    def score(self, sample_id: SampleId, attempt: int, reward: float | None, failure: str | None) -> bool:
        """Record a score; the first one wins.

        `reward` None without `failure`: no function had an opinion. `failure` with a reward: the user's policy set it.
        """
        s = self.sample(sample_id)
        if s is None or s.state != "finished" or s.attempt != attempt:
            return False
        if reward is None:
            self._drop_sample(s, failure or "reward_none")
        else:
            self._sample_step(s, "score")
            s.reward, s.reason = reward, failure
            if failure is not None:
                self._count_failure(failure)
        self._settle(self.groups[sample_id.group])
        return True

    def unscored(self) -> Iterator[Group]:
        return (g for g in self.groups.values() if g.state == "finished")

    # ------------------------------------------------------------ cut and train

    @property
    def _num_parts(self) -> int:
        return self.settings.num_mini_batches if self.settings.schedule == "stream" else 1

    @property
    def might_cut(self) -> bool:
        """False: `cut_next` would have to wait, which is told without a look at the groups."""
        settings = self.settings
        if self._num_missing > 0 or (settings.iterations is not None and self.update >= settings.iterations):
            return False
        return self.exhausted or self.num_buffered >= settings.groups_per_batch // self._num_parts

    def cut_next(self, order: Order) -> Cut | None:
        """Make the next part of batch u if the rules allow it now; None = wait.

        A batch is short only when the prompts have ended; with `last_batch = "drop"` its groups go instead.
        """
        settings = self.settings
        batch = settings.groups_per_batch
        num_parts = self._num_parts
        if not self.might_cut:
            return None
        size = batch // num_parts
        empty = batch - self.part * size
        live = list(self.live())
        if self.exhausted and len(live) < empty:
            if settings.last_batch == "drop":
                for group in live:
                    self.drop_group(group, "data_exhausted")
                live = []
            size = empty = len(live)
            num_parts = self.part + 1
            if not live and self.part == 0 and self.update not in self.given_up:
                return None
        buffered = order([g for g in live if g.state == "buffered"])
        choice = staleness.choose(
            self.update, batch, empty, size, ((g.id, g.deadline) for g in live), [g.id for g in buffered], self._taken()
        )
        if choice.groups is None:
            self._waits_for = frozenset(choice.waits_for)
            self._num_missing = choice.num_missing if self._waits_for else 0
            return None
        cut = Cut(self.update, self.part, num_parts, choice.groups)
        self.cuts[cut.update, cut.part] = cut
        for group_id in cut.groups:
            group = self.groups[group_id]
            self._group_step(group, "cut")
            group.update, group.part = cut.update, cut.part
        self.cut_groups += len(cut.groups)
        self.part += 1
        last = self.part >= num_parts
        if last:
            self.update += 1
            while self.update in self.ahead:
                self.ahead.remove(self.update)
                self.update += 1
            self.part = sum(c.update == self.update for c in self.cuts.values())
        self.events.append(CutMade(cut.update, cut.part, cut.groups, last))
        return cut

    def _taken(self) -> dict[int, int]:
        """Places of batches after u that standing cuts have."""
        taken = {c.update: 0 for c in self.cuts.values() if c.update > self.update}
        for c in self.cuts.values():
            if c.update in taken:
                taken[c.update] += len(c.groups)
        return taken | dict.fromkeys(self.ahead, self.settings.groups_per_batch)

    def give_up_cut(self, update: int) -> bool:
        """The trainer can't train this cut: its groups are dropped and the batch is cut again, before any later one.

        A later cut that stands goes on standing. False if there is no such cut.
        """
        num_groups = self._withdraw_cut(update, "trainer_error")
        if num_groups is None:
            return False
        self.given_up.add(update)
        self.events.append(CutGivenUp(update, num_groups))
        return True

    def _withdraw_cut(self, update: int, reason: str) -> int | None:
        """As if it had not been made, but that its groups are dropped. How many; None if there is no such cut."""
        cuts = [c for c in self.cuts.values() if c.update == update]
        if not cuts:
            return None
        for cut in cuts:
            del self.cuts[cut.update, cut.part]
            self.cut_groups -= len(cut.groups)
            for group_id in cut.groups:
                self.drop_group(self.groups[group_id], reason)
        if update < self.update:
            self.ahead.update(range(update + 1, self.update))
            self.update = update
        self.ahead.discard(update)
        self.part = 0
        self._num_missing = 0
        return sum(len(c.groups) for c in cuts)

    @property
    def over(self) -> bool:
        """No further batch will be cut."""
        settings = self.settings
        done = settings.iterations is not None and self.update >= settings.iterations
        ended = self.exhausted and self.num_live == 0 and self.part == 0 and self.update not in self.given_up
        return done or ended

    def train(self, update: int) -> list[Group] | None:
        """Cut `update` is in the weights. The groups that were in it; None for a repeat."""
        cuts = [c for c in self.cuts.values() if c.update == update]
        if not cuts:
            return None
        groups = []
        for cut in sorted(cuts, key=lambda c: c.part):
            del self.cuts[cut.update, cut.part]
            for group_id in cut.groups:
                group = self.groups[group_id]
                self._group_step(group, "train")
                for s in group.members("scored"):
                    self._sample_step(s, "train")
                groups.append(group)
        self.trained_version = max(self.trained_version, update + 1)
        return groups

    def complete(self) -> None:
        """The run is over as planned: what is left has nothing to wait for.

        That may be a cut, of a run that was to go on for longer before it was resumed. If it is resumed once more to go
        on, that batch is cut again.
        """
        for update in sorted({update for update, _ in self.cuts}, reverse=True):
            self._withdraw_cut(update, "run_ended")
        for group in list(self.groups.values()):
            if group.state not in ledger.TERMINAL:
                self.drop_group(group, "run_ended")
        self.events.append(Completed())

    def drain_events(self) -> list[StoreEvent]:
        """Events since the last call, neighbours of one kind merged: the manager thinks in batches of ids."""
        merged: list[StoreEvent] = []
        for event in self.events:
            last = merged[-1] if merged else None
            if isinstance(event, Finished) and isinstance(last, Finished):
                merged[-1] = Finished(last.samples + event.samples)
            elif (isinstance(event, Adopted) and isinstance(last, Adopted) and _same_owner(event, last)) or (
                isinstance(event, Orphaned) and isinstance(last, Orphaned) and _same_fate(event, last)
            ):
                merged[-1] = replace(last, samples=last.samples + event.samples)
            elif isinstance(event, Dropped) and isinstance(last, Dropped) and event.reason == last.reason:
                merged[-1] = Dropped(last.samples + event.samples, last.groups + event.groups, event.reason)
            else:
                merged.append(event)
        self.events.clear()
        return merged

    def forget_terminal(self) -> None:
        """Let go of groups that have ended, once their rows are written."""
        for group_id in sorted(self.touched):
            if (g := self.groups.get(group_id)) and g.state in ledger.TERMINAL:
                del self.groups[group_id]
        self.touched.clear()
        self.touched_samples.clear()

    # ------------------------------------------------------------ steps

    def _current(self, sample_id: SampleId, owner_epoch: int) -> Sample | None:
        s = self.sample(sample_id)
        return s if s is not None and s.owner_epoch == owner_epoch and s.owner is not None else None

    def _sample_step(self, sample: Sample, event: str) -> None:
        sample.state = ledger.step(ledger.SAMPLE, sample.state, event, sample.id)
        self.touched_samples.add(sample.id)

    def _group_step(self, group: Group, event: str) -> None:
        before = group.state
        group.state = ledger.step(ledger.GROUP, before, event, f"group {group.id}")
        if group.kind == "train":
            self.num_live += (group.state in LIVE) - (before in LIVE)
            self.num_buffered += (group.state == "buffered") - (before == "buffered")
            if group.state == "dropped":
                self._num_missing = 0
            elif group.state == "buffered" and group.id in self._waits_for:
                self._num_missing -= 1
        self.touched.add(group.id)

    def _drop_sample(self, sample: Sample, reason: str) -> None:
        if sample.owner is not None and sample.state in ("issued", "running"):
            self.cancelled.append((sample.owner, sample.incarnation, sample.id, sample.owner_epoch))
            self._not_pending(sample.owner, sample.id)
        self._sample_step(sample, "drop")
        sample.reason = reason
        self._count_failure(reason)
        group = self.groups[sample.id.group]
        if group.kind == "train":
            self.dropped[reason] += 1
        self.events.append(Dropped((sample.id,), (), reason))

    def _count_failure(self, reason: str) -> None:
        if (boundary := BOUNDARY.get(reason)) is not None:
            self.failures[boundary] += 1

    def _settle(self, group: Group) -> None:
        """Move a group on after one of its members changed."""
        states = [s.state for s in group.samples]
        need = self.settings.min_group_size if group.kind == "train" else 1
        if len(states) - states.count("dropped") < need:
            if group.state not in ledger.TERMINAL:
                self.drop_group(group, "group_incomplete")
            return
        if group.state == "issued" and _UNFINISHED.isdisjoint(states):
            self._group_step(group, "finish")
        if group.state == "finished" and "finished" not in states:
            if group.kind == "eval":
                self._group_step(group, "evaluate")
                for s in group.members("scored"):
                    self._sample_step(s, "train")
                self._evaluated(group)
            elif self.settings.drop_zero_variance and self._zero_variance(group):
                self.drop_group(group, "zero_variance")
            else:
                self._group_step(group, "score")
                self.buffered_count += 1
                group.buffered_order = self.buffered_count
                self.events.append(Buffered((group.id,)))

    @staticmethod
    def _zero_variance(group: Group) -> bool:
        rewards = [s.reward for s in group.members("scored") if s.reward is not None]
        return min(rewards) == max(rewards)

    def _evaluated(self, group: Group) -> None:
        round_ = self.eval_rounds.get(group.version)
        if round_ is None:
            return
        if rewards := [s.reward for s in group.samples if s.reward is not None]:
            round_.rewards.append(rewards)
        round_.open_groups -= 1
        if round_.open_groups == 0 and round_.issued >= self.settings.eval_groups:
            self.events.append(EvalDone(group.version))


def _same_owner(a: Adopted, b: Adopted) -> bool:
    return (a.replica, a.incarnation, a.version) == (b.replica, b.incarnation, b.version)


def _same_fate(a: Orphaned, b: Orphaned) -> bool:
    return (a.version, a.deadline) == (b.version, b.deadline)
