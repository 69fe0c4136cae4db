"""The data store: the accounts that the real one keeps in its transactions, without a database.

What the real store has in its file survives every death here: the account with the number of the last command, every
group and cut, what was trained and evaluated, and the outbox. What is on its way, who has been handed what, and who
waits for a batch is forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
    NoteDeaths,
    Numbered,
    Orphan,
    Restart,
    Stop,
)
from laminar.control.events import CutTrained, EvalDone, Recovered, StoreBeat, StoreEvent, StoreEvents
from laminar.errors import ProtocolError
from laminar.sim.kernel import Action
from laminar.sim.links import Link
from laminar.sim.process import Client, Life, new_commands, nothing
from laminar.sim.replica import Replica, Report, Work
from laminar.timing import keyed_uniform
from laminar.types import SampleId, Version

if TYPE_CHECKING:
    from laminar.sim.manager import ManagerProcess
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
    latencies_s: list[float] = field(default_factory=list)
    """A sample each: from its issue to its end."""


class Store(Life):
    """See the module. `start` begins a life: `anew` with all other processes, or alone."""

    role = "datastore"

    def __init__(self, world: World) -> None:
        super().__init__(world, "datastore", 0)
        self.settings = world.settings
        self.accounts = Accounts(world.settings)
        self.groups: dict[int, Group] = {}
        """Every group ever."""
        self.cuts: dict[tuple[int, int], Cut] = {}
        """Every part of every batch: (update, part)."""
        self.iterations: list[Iteration] = []
        """In the order of training."""
        self.evals_done: list[Version] = []
        self.told_to_stop = False
        self._issued_at: dict[int, float] = {}
        """By group, until it is trained."""
        self._latencies_s: dict[int, list[float]] = {}
        """Of the samples that have ended, by group, until it is trained."""
        self._rows: list[StoreEvent] = []
        """Outbox rows that the manager has not acknowledged."""
        self._acknowledged = 0
        """Number of the last outbox row that is gone."""

    def start(self, incarnation: int, anew: bool) -> None:
        self.incarnation, self.alive, self._stopped_until, self._calls = incarnation, True, 0.0, []
        delays = self.world.plan.delays
        self.from_manager, self.to_manager = self.world.link(delays.beat_s), self.world.link(delays.poll_s)
        self._handed: set[int] = set()
        """Groups that the scorer has."""
        self._wanted: tuple[int, int, Trainer] | None = None
        """The part of a batch that is waited for, and by whom."""
        self._telling = False
        if anew:
            self.accounts.abandon()
        else:
            self._post_all()
            self._poll()
        self.hand_all()

    def kill(self) -> None:
        super().kill()
        if self._wanted is not None:
            update, part, trainer = self._wanted
            trainer.request_again(update, part)

    def links_with(self, peer: str) -> Sequence[Link]:
        """With the manager, or with all who call it."""
        if peer == "manager":
            return (self.from_manager, self.to_manager)
        clients = [life for life in self.world.lives() if isinstance(life, Client)]
        return [link for client in clients for link in client.links_with("datastore")]

    def begin_term(self) -> Recovered:
        """Another manager: from here on it alone is obeyed, and this is what it begins with."""
        self.accounts.begin_term(self.accounts.inbox.term + 1)
        self._write()
        return self.accounts.recovered(tuple(self.evals_done), self._acknowledged + len(self._rows))

    def hand_all(self) -> None:
        """A new scorer, or a new store that does not know what the scorer has: everything is handed out again."""
        self._handed.clear()
        for group in self.accounts.unscored():
            self._hand(group)

    def _post_all(self) -> None:
        """Work that nobody has accepted, and orders to let go, are sent again by a store that has died."""
        owners: dict[tuple[str, int], list[Sample]] = {}
        for s in self.accounts.unfinished():
            if s.owner is not None and s.state == "issued":
                owners.setdefault((s.owner, s.incarnation), []).append(s)
        for owner, samples in owners.items():
            self._post(*owner, samples)
        for source in self.accounts.moves:
            for replica in [r for r in self.world.replicas.values() if r.id == source]:
                self._release(replica)

    def _to(self, receiver: Client, message: Action, failed: Action = nothing) -> None:
        """Send an answer; one that has not arrived when the store dies never does."""
        incarnation = self.incarnation
        receiver.from_store.send(lambda: message() if self.alive and self.incarnation == incarnation else failed())

    # ------------------------------------------------------------ transactions

    def _commit(self) -> None:
        """End of a transaction: what follows from it is sent."""
        if self._write():
            self._poll()
            self._cut()
        for look in self.world.after_commit:
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
            if replica := self.world.replica(replica_id, incarnation):
                self._to(replica, lambda r=replica, s=sample, e=epoch: r.forget(s, e))  # type: ignore[misc]
        accounts.cancelled.clear()
        accounts.forget_terminal()
        return bool(events)

    # ------------------------------------------------------------ manager

    def _poll(self) -> None:
        """Say what is new, unless that is on its way already."""
        if not self._telling:
            self._telling, manager, incarnation = True, self.world.manager, self.incarnation
            self.to_manager.send(lambda: manager.take(lambda: self._tell(manager, incarnation), self._tell_later))

    def quiet_beat(self) -> StoreBeat | None:
        """That it is there; None while something is on its way, or it can't speak."""
        silent = not self.alive or self.stopped or self._telling or self.to_manager.held
        return None if silent else StoreBeat(self.incarnation)

    def _tell_later(self) -> None:
        self.after(self.world.plan.delays.retry_s, self._poll_again)

    def _poll_again(self) -> None:
        self._telling = False
        self._poll()

    def _tell(self, manager: ManagerProcess, incarnation: int) -> None:
        """Rows reach the manager; those whose answer gets lost are sent again."""
        if not self.alive or self.incarnation != incarnation:
            return
        last, rows = self._acknowledged + len(self._rows), tuple(self._rows)
        if rows:
            manager.handle(StoreEvents(last, rows))
        manager.handle(StoreBeat(self.incarnation))
        manager.polled(self.accounts.inbox)
        if self.to_manager.lost():
            self._tell_later()
        else:
            self._telling = False
            self._acknowledged, self._rows = last, []

    def hear(self, sent: Sequence[Numbered]) -> None:
        """Commands, some of which may have come before, or be of a manager that is no more."""
        for command in new_commands(self.accounts.inbox, sent):
            self.obey(command)

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
                if replica := self.world.replica(s, i):
                    self._release(replica)
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
            case NoteDeaths(deaths=deaths):
                accounts.note_deaths(deaths)
            case Complete():
                self.cuts = {key: cut for key, cut in self.cuts.items() if key not in accounts.cuts}
                accounts.complete()
            case Stop():
                self.told_to_stop = True
            case other:
                raise ProtocolError(f"the data store can't do {other}")
        self._commit()

    def _issue(self, command: Issue) -> None:
        accounts, plan = self.accounts, self.world.plan
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
                self._issued_at[group.id] = self.kernel.now
        accounts.report_issued(command.replica, command.incarnation, command.version, groups, "train")
        self._post(command.replica, command.incarnation, [s for g in groups for s in g.samples])

    def _post(self, replica_id: str, incarnation: int, samples: Sequence[Sample]) -> None:
        """Work for a replica; sent again until it is accepted, if answers can get lost."""
        replica = self.world.replica(replica_id, incarnation)
        if not samples or replica is None:
            return
        work = [Work(s.id, s.owner_epoch, s.version, s.length) for s in samples]
        self._to(replica, lambda: replica.receive(work))
        if self.world.plan.delays.loss:
            self.after(2 * self.world.plan.delays.retry_s, lambda: self._post_again(replica, work))

    def _post_again(self, replica: Replica, work: Sequence[Work]) -> None:
        """Repeats travel in answers, and a replica asks once at a time: none is older than what it said last."""
        if replica.alive and self._waiting(work):
            self._to(replica, lambda: replica.receive(self._waiting(work)))
            self.after(2 * self.world.plan.delays.retry_s, lambda: self._post_again(replica, work))

    def _release(self, replica: Replica) -> None:
        if released := self.accounts.to_release(replica.id, replica.incarnation):
            self._to(replica, lambda: replica.release(released))

    def _waiting(self, work: Sequence[Work]) -> list[Work]:
        """What has not been accepted, of work that its owner still has."""
        samples = [(w, self.accounts.sample(w.sample)) for w in work]
        return [w for w, s in samples if s is not None and s.owner_epoch == w.epoch and s.state == "issued"]

    def has_given_up(self, work: Work) -> bool:
        """It has been dropped, or given to somebody else."""
        sample = self.accounts.sample(work.sample)
        return sample is None or sample.owner_epoch != work.epoch or sample.state == "dropped"

    def _happens(self, what: str, rate: float, *key: int) -> bool:
        return rate > 0 and keyed_uniform(what, self.world.plan.seed, *key) < rate

    # ------------------------------------------------------------ replicas

    def exchange(self, report: Report) -> None:
        accounts = self.accounts
        for sample, epoch in report.accepted:
            accounts.accept(sample, epoch)
        for t in report.tokens:
            taken = accounts.append(t.sample, t.epoch, t.start, t.length, t.version)
            if taken is None:
                accounts.cancelled.append((report.replica, report.incarnation, t.sample, t.epoch))
            elif taken and not self._owns(report, t.sample):
                raise ProtocolError(f"{report.replica} made tokens of {t.sample}, which it does not own")
        for sample, epoch in report.ended:
            if (s := accounts.sample(sample)) is not None:
                accounts.finish(sample, epoch, s.length, "stop")
                if (issued := self._issued_at.get(sample.group)) is not None:
                    self._latencies_s.setdefault(sample.group, []).append(self.kernel.now - issued)
        for sample, epoch in report.failed:
            accounts.fail(sample, epoch, "engine_error")
        moved = [s for sample, epoch in report.released if (s := accounts.release(sample, epoch)) is not None]
        for owner in dict.fromkeys((s.owner, s.incarnation) for s in moved):
            assert owner[0] is not None
            self._post(owner[0], owner[1], [s for s in moved if (s.owner, s.incarnation) == owner])
        self._commit()

    def _owns(self, report: Report, sample_id: SampleId) -> bool:
        sample = self.accounts.sample(sample_id)
        return sample is not None and (sample.owner, sample.incarnation) == (report.replica, report.incarnation)

    # ------------------------------------------------------------ scorer

    def _hand(self, group: Group) -> None:
        if group.id not in self._handed:
            self._handed.add(group.id)
            scorer = self.world.scorer
            self._to(scorer, lambda: scorer.receive(group))

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
            self._to(trainer, lambda: trainer.receive(cut), lambda: trainer.request_again(update, part))
        if accounts.events:
            self._commit()

    def _order(self, groups: Sequence[Group]) -> list[Group]:
        return sorted(groups, key=lambda g: g.buffered_order or 0, reverse=self.world.plan.newest_first)

    def num_tokens(self, cut: Cut) -> int:
        """Prompts and responses of a part of a batch."""
        prompt = self.world.plan.profile.prompt_tokens
        return sum(prompt + s.length for g in cut.groups for s in self.groups[g].members("scored", "trained"))

    def trained(self, update: int) -> None:
        """Cut `update` is in the weights. A repeat changes nothing."""
        groups = self.accounts.train(update)
        if groups is not None:
            self.iterations.append(self._iteration(update, groups))
            self.accounts.events.append(CutTrained(update))
        self._commit()

    def _iteration(self, update: int, groups: Sequence[Group]) -> Iteration:
        row, prompt = Iteration(update), self.world.plan.profile.prompt_tokens
        for s in (s for g in groups for s in g.members("trained")):
            row.num_samples += 1
            row.tokens += prompt + s.length
            row.staleness_use[update - s.version.number] += 1
            row.staleness_generation[s.staleness_generation or 0] += 1
        for g in groups:
            row.latencies_s += self._latencies_s.pop(g.id, ())
            self._issued_at.pop(g.id, None)
        return row
