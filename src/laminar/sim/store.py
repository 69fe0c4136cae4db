"""The data store: the accounts that the real one keeps in its transactions, without a database.

What is public and not said to be volatile survives every death, as the real store's file does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laminar.control.accounts import Accounts, Cut, Group, Sample
from laminar.control.commands import (
    Adopt,
    CancelMove,
    Command,
    Complete,
    GiveUpCut,
    GiveUpEval,
    Issue,
    Move,
    Orphan,
    Restart,
    Stop,
)
from laminar.control.events import CutTrained, EvalDone, Recovered, StoreEvent, StoreEvents
from laminar.errors import ProtocolError
from laminar.sim.replica import Replica, Report, Work
from laminar.timing import keyed_uniform
from laminar.types import SampleId, Version

if TYPE_CHECKING:
    from laminar.sim.trainer import Trainer
    from laminar.sim.world import World


@dataclass(slots=True)
class Iteration:
    """One trained batch."""

    update: int
    num_samples: int = 0
    tokens: int = 0
    """Prompts and responses."""
    staleness_generation: Counter[int] = field(default_factory=Counter)
    """Samples by staleness."""
    staleness_use: Counter[int] = field(default_factory=Counter)


class Store:
    """See the module. `begin` is a start of the process."""

    def __init__(self, world: World) -> None:
        self._world, self._kernel, self.settings = world, world.kernel, world.settings
        self.accounts = Accounts(world.settings)
        self.groups: dict[int, Group] = {}
        """Every group ever."""
        self.cuts: dict[tuple[int, int], Cut] = {}
        """Every part of every batch: (update, part)."""
        self.iterations: list[Iteration] = []
        """In the order of training."""
        self.evals_done: list[Version] = []
        self.stopped = False
        self._rows: list[StoreEvent] = []
        """Outbox rows that the manager has not acknowledged."""
        self._acknowledged = 0
        """Number of the last outbox row that is gone."""

    def hand_all(self) -> None:
        """A new scorer: what the last one had is handed out again."""
        self._handed.clear()
        for group in self.accounts.unscored():
            self._hand(group)

    def begin(self) -> None:
        """Start: nobody owns anything, and nothing is on its way."""
        accounts = self.accounts
        for group in list(accounts.groups.values()):
            if group.kind == "eval":
                accounts.drop_group(group, "interrupted")
        for sample in list(accounts.unfinished()):
            if sample.state != "orphan":
                accounts.orphan(sample)
        accounts.eval_rounds.clear()
        self._handed: set[int] = set()
        """Groups that the scorer has."""
        self._wanted: tuple[int, int, Trainer] | None = None
        """The part of a batch that is waited for, and by whom."""
        self._telling = False
        self.from_manager = self._world.link(self._world.plan.delays.beat_s)
        self._to_manager = self._world.link(self._world.plan.delays.poll_s)
        self._write()
        self._acknowledged += len(self._rows)
        self._rows = []
        self.hand_all()

    def recovered(self, term: int) -> Recovered:
        """The counts with which a manager begins its term."""
        accounts = self.accounts
        orphans = [s for s in accounts.unfinished() if s.state == "orphan"]
        return Recovered(
            term,
            tuple((g.id, g.state) for g in accounts.live()),
            accounts.cut_groups,
            accounts.update,
            accounts.trained_version,
            tuple((s.id, s.version, accounts.groups[s.id.group].deadline) for s in orphans),
            accounts.exhausted,
            tuple(self.evals_done),
            self._acknowledged,
        )

    # ------------------------------------------------------------ transactions

    def _commit(self) -> None:
        """End of a transaction: what follows from it is sent."""
        if self._write():
            if not self._telling:
                self._telling = True
                self._to_manager.send(self._tell)
            self._cut()
        for look in self._world.after_commit:
            look()

    def _write(self) -> bool:
        """Bring groups and events to where they survive. Whether there was an event."""
        accounts = self.accounts
        for group_id in sorted(accounts.touched):
            group = accounts.groups[group_id]
            self.groups[group_id] = group
            if group.state == "finished":
                self._hand(group)
        events = accounts.drain_events()
        for event in events:
            if isinstance(event, EvalDone):
                accounts.eval_rounds.pop(event.version, None)
                self.evals_done.append(event.version)
        self._rows += events
        for replica_id, incarnation, sample, epoch in accounts.cancelled:
            if replica := self._world.replica(replica_id, incarnation):
                replica.from_store.send(lambda r=replica, s=sample, e=epoch: r.forget(s, e))  # type: ignore[misc]
        accounts.cancelled.clear()
        accounts.forget_terminal()
        return bool(events)

    def _tell(self) -> None:
        """Rows reach the manager; those whose answer gets lost are sent again."""
        last = self._acknowledged + len(self._rows)
        if self._rows:
            self._world.manager.handle(StoreEvents(last, tuple(self._rows)))
        if self._to_manager.lost():
            self._kernel.after(self._world.plan.delays.retry_s, self._tell)
            return
        self._telling = False
        self._acknowledged, self._rows = last, []

    # ------------------------------------------------------------ manager

    def obey(self, command: Command) -> None:
        """Carry out a command, asking the rules again, here where the truth is."""
        accounts = self.accounts
        match command:
            case Issue(replica=r, incarnation=i, version=v, num_groups=n, kind="eval"):
                groups = accounts.issue_eval(r, i, v, n)
                accounts.report_issued(r, i, v, groups, "eval")
                self._post(r, i, [s for g in groups for s in g.samples])
            case Issue():
                self._issue(command)
            case Restart(replica=r, incarnation=i, version=v, samples=ids):
                self._post(r, i, accounts.restart(r, i, v, ids))
            case Adopt(replica=r, incarnation=i, version=v, samples=ids):
                self._post(r, i, accounts.adopt(r, i, v, ids))
            case Move(source=s, source_incarnation=i):
                accounts.move(s, i, command.destination, command.destination_incarnation, command.version)
                released = accounts.to_release(s, i)
                if released and (replica := self._world.replica(s, i)):
                    replica.from_store.send(lambda: replica.release(released))
            case CancelMove(source=s):
                accounts.cancel_move(s)
            case Orphan(replica=r, incarnation=i):
                accounts.orphan_all(r, i)
            case GiveUpEval(version=v):
                for group in [g for g in accounts.groups.values() if g.kind == "eval" and g.version == v]:
                    accounts.drop_group(group, "version_gone")
            case GiveUpCut(update=u):
                if accounts.give_up_cut(u):
                    self.cuts = {key: cut for key, cut in self.cuts.items() if key[0] != u}
            case Complete():
                accounts.complete()
            case Stop():
                self.stopped = True
            case other:
                raise ProtocolError(f"the data store can't do {other}")
        self._commit()

    def _issue(self, command: Issue) -> None:
        accounts, plan = self.accounts, self._world.plan
        groups: list[Group] = []
        while len(groups) < command.num_groups and accounts.room(command.version):
            if plan.prompts is not None and accounts.cursor >= plan.prompts:
                accounts.exhaust()
                break
            group = accounts.issue(command.replica, command.incarnation, command.version)
            if self._happens("overlong", plan.chances.overlong, group.cursor):
                accounts.drop_group(group, "prompt_overlong")
            else:
                groups.append(group)
        accounts.report_issued(command.replica, command.incarnation, command.version, groups, "train")
        self._post(command.replica, command.incarnation, [s for g in groups for s in g.samples])

    def _post(self, replica_id: str, incarnation: int, samples: Sequence[Sample]) -> None:
        """Work for a replica; sent again until it is accepted, if answers can get lost."""
        replica = self._world.replica(replica_id, incarnation)
        if not samples or replica is None:
            return
        work = [Work(s.id, s.owner_epoch, s.version, s.length) for s in samples]
        replica.from_store.send(lambda: replica.receive(work))
        if self._world.plan.delays.loss:
            self._kernel.after(2 * self._world.plan.delays.retry_s, lambda: self._post_again(replica, work))

    def _post_again(self, replica: Replica, work: Sequence[Work]) -> None:
        """Repeats travel in answers, and a replica asks once at a time: none is older than what it said last."""
        if replica.alive and self._waiting(work):
            replica.from_store.send(lambda: replica.receive(self._waiting(work)))
            self._kernel.after(2 * self._world.plan.delays.retry_s, lambda: self._post_again(replica, work))

    def _waiting(self, work: Sequence[Work]) -> list[Work]:
        """What has not been accepted, of work that its owner still has."""
        samples = [(w, self.accounts.sample(w.sample)) for w in work]
        return [w for w, s in samples if s is not None and s.owner_epoch == w.epoch and s.state == "issued"]

    def has_given_up(self, work: Work) -> bool:
        """It has been dropped, or given to somebody else."""
        sample = self.accounts.sample(work.sample)
        return sample is None or sample.owner_epoch != work.epoch or sample.state == "dropped"

    def _happens(self, what: str, rate: float, *key: int) -> bool:
        return rate > 0 and keyed_uniform(what, self._world.plan.seed, *key) < rate

    # ------------------------------------------------------------ replicas

    def exchange(self, report: Report) -> None:
        accounts = self.accounts
        for sample, epoch in report.accepted:
            accounts.accept(sample, epoch)
        for t in report.tokens:
            accounts.append(t.sample, t.epoch, t.start, t.length, t.version)
        for sample, epoch in report.ended:
            if (s := accounts.sample(sample)) is not None:
                accounts.finish(sample, epoch, s.length, "stop")
        for sample, epoch in report.failed:
            accounts.drop(sample, "engine_error", epoch)
        moved = [s for sample, epoch in report.released if (s := accounts.release(sample, epoch)) is not None]
        for owner in dict.fromkeys((s.owner, s.incarnation) for s in moved):
            assert owner[0] is not None
            self._post(owner[0], owner[1], [s for s in moved if (s.owner, s.incarnation) == owner])
        self._commit()

    # ------------------------------------------------------------ scorer

    def _hand(self, group: Group) -> None:
        if group.id not in self._handed:
            self._handed.add(group.id)
            self._world.scorer.take(group)

    def scored(self, group: Group, rewards: Sequence[tuple[SampleId, int, float | None]]) -> None:
        """(sample, attempt, reward), None for a reward that failed."""
        for sample, attempt, reward in rewards:
            self.accounts.score(sample, attempt, reward, "reward_error" if reward is None else None)
        self._handed.discard(group.id)
        self._commit()

    # ------------------------------------------------------------ trainer

    def want(self, update: int, part: int, trainer: Trainer) -> None:
        """The trainer asks for a part of a batch; it comes as soon as it is cut."""
        if trainer.alive:
            self._wanted = update, part, trainer
            self._cut()

    def _cut(self) -> None:
        """Answer the trainer if there is an answer."""
        accounts = self.accounts
        if self._wanted is None:
            return
        update, part, trainer = self._wanted
        key = update, part
        cut = self.cuts.get(key)
        if cut is None and key == (accounts.update, accounts.part):
            cut = accounts.cut_next(self._order)
            if cut is not None:
                self.cuts[key] = cut
        if cut is not None or (update >= accounts.update and accounts.over):
            self._wanted = None
            trainer.from_store.send(lambda: trainer.receive(cut))
        if accounts.events:
            self._commit()

    def _order(self, groups: Sequence[Group]) -> list[Group]:
        return sorted(groups, key=lambda g: g.buffered_order or 0, reverse=self._world.plan.newest_first)

    def num_tokens(self, cut: Cut) -> int:
        """Prompts and responses of a part of a batch."""
        prompt = self._world.plan.profile.prompt_tokens
        return sum(prompt + s.length for g in cut.groups for s in self.groups[g].members("scored", "trained"))

    def trained(self, update: int) -> None:
        """Cut `update` is in the weights. A repeat changes nothing."""
        groups = self.accounts.train(update)
        if groups is not None:
            self.iterations.append(self._iteration(update, groups))
            self.accounts.events.append(CutTrained(update))
        self._commit()

    def _iteration(self, update: int, groups: Iterable[Group]) -> Iteration:
        row, prompt = Iteration(update), self._world.plan.profile.prompt_tokens
        for s in (s for g in groups for s in g.members("trained")):
            row.num_samples += 1
            row.tokens += prompt + s.length
            row.staleness_use[update - s.version.number] += 1
            row.staleness_generation[s.staleness_generation or 0] += 1
        return row
