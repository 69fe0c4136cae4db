"""A run in memory: the real manager and the real accounts, with make-believe replicas, relay, scorer and trainer.

Nothing sleeps: `World.run` takes the next message off a heap. Messages of one sender keep their order, all others
overtake each other; answers get lost and what they answered is sent again. Everything is drawn from one seed, but what
a sample turns into is drawn from its own key, so that two schedules can be compared.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from laminar.control.accounts import Accounts, Cut, Group
from laminar.control.commands import Adopt, Command, Complete, EndRun, GiveUpEval, Issue, Keep, Pull, Restart, address
from laminar.control.events import (
    Beat,
    EvalDone,
    Event,
    ProcessEnded,
    ProcessStarted,
    Recovered,
    RelayBeat,
    ReplicaBeat,
    StoreEvent,
    StoreEvents,
    Tick,
    TrainerBeat,
)
from laminar.control.ledger import TERMINAL
from laminar.control.manager import Manager, Record, is_news
from laminar.types import SampleId, Settings, Version

LOST = 0.15
"""Share of answers that never arrive."""


@dataclass(frozen=True)
class Plan:
    """What happens in a world. Rates are probabilities of a sample or a group."""

    settings: Settings
    seed: int = 0
    replicas: int = 2
    prompts: int | None = None
    """Draws after which the pool has ended."""
    engine_errors: float = 0.0
    reward_errors: float = 0.0
    zero_variance: float = 0.0
    overlong: float = 0.0
    prefetch: bool = True
    checkpoint_every: int = 2
    restarts: tuple[float, ...] = ()
    """When everything is killed and begun again, in simulated seconds."""


@dataclass
class FakeReplica:
    id: str
    version: Version | None = None
    state: str = "idle"
    step: int = 0
    failed_pulls: int = 0
    held: dict[SampleId, tuple[int, float]] = field(default_factory=dict)
    """Owner epoch, and when the sample is finished."""
    pull: Version | None = None


class World:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.settings, self.rng = plan, plan.settings, Random(plan.seed)
        self.now, self.term = 0.0, 0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.accounts = Accounts(self.settings)
        self.outbox: list[StoreEvent] = []
        self.groups: dict[int, Group] = {}
        """Every group ever, as last committed."""
        self.cuts: dict[int, Cut] = {}
        self.evals_done: list[Version] = []
        self.records: list[Record] = []
        self.trained: list[int] = []
        self.max_staleness = 0
        self.checkpoint = self.highest = 0
        self.end: EndRun | None = None
        for at in plan.restarts:
            heapq.heappush(self._heap, (at, next(self._count), -1, self._start))
        self._start()

    def run(self, until: float = 3000.0) -> EndRun:
        """To the end of the run. Raises AssertionError if it has none before simulated second `until`."""
        while self.end is None or self.end.outcome == "failed":
            assert self.end is None, self.end.message
            self.now, _, term, action = heapq.heappop(self._heap)
            assert self.now < until, "the run does not end"
            if term in (-1, self.term):
                action()
        while self._heap:  # the store still obeys what it was told before the end
            self.now, _, _, action = heapq.heappop(self._heap)
            if action == self._listen_store:
                self._obey_store(lossless=True)
                break
        return self.end

    def batches(self) -> list[list[int]]:
        """Draws of the prompt pool in each cut, sorted."""
        return [sorted(self.groups[g].cursor for g in self.cuts[u].groups) for u in sorted(self.cuts)]

    # ------------------------------------------------------------ time

    def _after(self, longest: float, action: Callable[[], None]) -> None:
        at = self.now + self.rng.uniform(0.001, longest)
        heapq.heappush(self._heap, (at, next(self._count), self.term, action))

    def _lost(self) -> bool:
        return self.rng.random() < LOST

    def _start(self) -> None:
        """Begin, or begin again after a kill of everything: only the accounts and the checkpoint are left."""
        self.term += 1
        accounts = self.accounts
        for group in list(accounts.groups.values()):
            if group.kind == "eval":
                accounts.drop_group(group, "interrupted")
        for sample in list(accounts.unfinished()):
            if sample.state != "orphan":
                accounts.orphan(sample)
        accounts.eval_rounds.clear()
        self._commit()
        self._told = len(self.outbox)
        self.manager = Manager(self.settings)
        self._boxes: dict[tuple[str, str], list[Command]] = {}
        self._last: dict[str, Beat] = {}
        self._quiet: dict[str, Beat] = {}
        self._scoring: set[int] = set()
        self._cancelled: set[tuple[SampleId, int]] = set()
        self.replicas = {f"r{i}": FakeReplica(f"r{i}") for i in range(self.plan.replicas)}
        self.whole: tuple[Version, ...] = ()
        self._keep: tuple[Version, ...] = ()
        self.version, self._state, self._training = self.checkpoint, "starting", False
        live = tuple((g.id, g.state) for g in accounts.live())
        orphans = tuple((s.id, s.version, accounts.groups[s.id.group].deadline) for s in accounts.unfinished())
        counts = accounts.cut_groups, accounts.update, accounts.trained_version
        self._tell(Recovered(self.term, live, *counts, orphans, accounts.exhausted, tuple(self.evals_done), self._told))
        for role, id_ in [("trainer", "trainer"), ("relay", "relay"), *(("replica", r) for r in self.replicas)]:
            self._tell(ProcessStarted(role, id_, self.term))
        for replica in self.replicas.values():
            self._after(1.0, lambda r=replica: self._replica_beats(r))
            self._after(1.0, lambda r=replica: self._exchange(r))
        for loop in (self._tick, self._listen_store, self._tell_store, self._score, self._train, self._trainer_loop):
            self._after(1.0, loop)
        self._after(1.0, self._relay_beats)
        self._after(1.0, self._publish)

    # ------------------------------------------------------------ manager

    def _tell(self, event: Event) -> None:
        commands = tuple(self.manager.handle(self.now, event))
        self.records.append(Record(self.now, event, commands))
        for command in commands:
            self._boxes.setdefault(address(command), []).append(command)
            if isinstance(command, EndRun):
                self.end = command

    def _beat(self, sender: str, beat: Beat) -> list[Command]:
        if is_news(self._last.get(sender), beat):
            self._quiet.pop(sender, None)
            self._tell(beat)
        else:
            self._quiet[sender] = beat
        self._last[sender] = beat
        role = sender if sender in ("relay", "trainer") else "replica"
        return [] if self._lost() else self._boxes.pop((role, sender), [])

    def _tick(self) -> None:
        beats, self._quiet = tuple(self._quiet[s] for s in sorted(self._quiet)), {}
        self._tell(Tick(beats))
        self._after(1.0, self._tick)

    # ------------------------------------------------------------ data store

    def _commit(self) -> None:
        """End of a transaction: events go out, and the ledger closes (invariant 2 of docs/architecture.md)."""
        accounts = self.accounts
        for event in (events := accounts.drain_events()):
            if isinstance(event, EvalDone):
                self.evals_done.append(event.version)
        self.outbox += events
        if accounts.cancelled:
            self._cancelled |= {(sample, epoch) for _, _, sample, epoch in accounts.cancelled}
            accounts.cancelled.clear()
        for group_id in accounts.touched:
            self.groups[group_id] = accounts.groups[group_id]
        accounts.forget_terminal()
        train = [g for g in self.groups.values() if g.kind == "train"]
        assert len(train) == accounts.cursor
        assert {g.id for g in self.groups.values() if g.state not in TERMINAL} == set(accounts.groups)

    def _tell_store(self) -> None:
        if len(self.outbox) > self._told:
            self._tell(StoreEvents(len(self.outbox), tuple(self.outbox[self._told :])))
            if not self._lost():
                self._told = len(self.outbox)
        self._after(0.2, self._tell_store)

    def _listen_store(self) -> None:
        self._obey_store(lossless=False)
        self._after(0.3, self._listen_store)

    def _obey_store(self, lossless: bool) -> None:
        commands = self._boxes.pop(("datastore", "datastore"), []) if lossless or not self._lost() else []
        for command in commands:
            match command:
                case Issue(kind="eval", replica=r, incarnation=i, version=v, num_groups=n):
                    self.accounts.report_issued(r, i, v, self.accounts.issue_eval(r, i, v, n), "eval")
                case Issue():
                    self._issue(command)
                case Restart(replica=r, incarnation=i, version=v, samples=samples):
                    self.accounts.restart(r, i, v, samples)
                case Adopt(replica=r, incarnation=i, version=v, samples=samples):
                    self.accounts.adopt(r, i, v, samples)
                case GiveUpEval(version=v):
                    for group in [g for g in self.accounts.groups.values() if g.kind == "eval" and g.version == v]:
                        self.accounts.drop_group(group, "version_gone")
                case Complete():
                    self.accounts.complete()
            self._commit()

    def _issue(self, command: Issue) -> None:
        groups: list[Group] = []
        while len(groups) < command.num_groups and self.accounts.room(command.version):
            if self.plan.prompts is not None and self.accounts.cursor >= self.plan.prompts:
                self.accounts.exhaust()
                break
            group = self.accounts.issue(command.replica, command.incarnation, command.version)
            if Random(f"{self.plan.seed}/{group.cursor}").random() < self.plan.overlong:
                self.accounts.drop_group(group, "prompt_overlong")
            else:
                groups.append(group)
        self.accounts.report_issued(command.replica, command.incarnation, command.version, groups, "train")

    def next_batch(self, update: int) -> Cut | None:
        if update not in self.cuts and update == self.accounts.update:
            cut = self.accounts.cut_next(self._order)
            if cut is not None:
                self.cuts[update] = cut
            self._commit()
        return self.cuts.get(update)

    def _order(self, groups: Sequence[Group]) -> list[Group]:
        """A sampler that offers the oldest first, or (the harder case) the newest."""
        return sorted(groups, key=lambda g: g.buffered_order or 0, reverse=self.plan.seed % 2 == 1)

    # ------------------------------------------------------------ replicas and the relay

    def _replica_beats(self, replica: FakeReplica) -> None:
        replica.step += bool(replica.held)
        state = replica.state if replica.state == "loading" or not replica.held else "generating"
        beat = ReplicaBeat(
            replica.id, self.term, state, replica.version, replica.step, node="n", failed_pulls=replica.failed_pulls
        )
        for command in self._beat(replica.id, beat):
            if isinstance(command, Pull):
                replica.pull = command.version
        if replica.pull is not None and not replica.held:
            self._after(3.0, lambda v=replica.pull: self._pulled(replica, v))
            replica.state, replica.pull = "loading", None
        self._after(0.5, lambda: self._replica_beats(replica))

    def _pulled(self, replica: FakeReplica, version: Version) -> None:
        replica.state = "idle"
        if version in self.whole:
            replica.version = version
        else:
            replica.failed_pulls += 1

    def _exchange(self, replica: FakeReplica) -> None:
        for sample, (epoch, done_at) in list(replica.held.items()):
            self.accounts.append(sample, epoch, 0, 3)
            if done_at > self.now:
                continue
            if self._outcome(sample).random() < self.plan.engine_errors:
                self.accounts.drop(sample, "engine_error", epoch)
            else:
                self.accounts.finish(sample, epoch, 3, "stop")
            if not self._lost():
                del replica.held[sample]
        for sample, epoch in list(self._cancelled):
            if replica.held.get(sample, (None,))[0] == epoch:
                del replica.held[sample]
        for s in self.accounts.owned(replica.id, self.term, "issued"):
            assert s.version == replica.version and replica.state != "loading", "invariant 1"
            tail = 4.0 if self._outcome(s.id).random() < 0.1 else 0.5
            replica.held[s.id] = s.owner_epoch, self.now + self.rng.uniform(0.05, tail)
            if not self._lost():
                self.accounts.accept(s.id, s.owner_epoch)
        self._commit()
        self._after(0.3, lambda: self._exchange(replica))

    def _outcome(self, sample: SampleId) -> Random:
        group = self.groups[sample.group]
        return Random(f"{self.plan.seed}/{group.kind}/{group.cursor}/{sample.index}")

    def _relay_beats(self) -> None:
        for command in self._beat("relay", RelayBeat("relay", self.term, "n", self.whole, 1)):
            if isinstance(command, Keep):
                self._keep = command.versions
        self._after(0.5, self._relay_beats)

    def _shows(self, version: Version) -> None:
        newest = max((version, *self.whole))
        self.whole = tuple(sorted({*(v for v in self.whole if v in self._keep), newest}))

    # ------------------------------------------------------------ scorer

    def _score(self) -> None:
        for group in list(self.accounts.unscored()):
            if group.id not in self._scoring:
                self._scoring.add(group.id)
                self._after(0.5, lambda g=group: self._scored(g))
        self._after(0.3, self._score)

    def _scored(self, group: Group) -> None:
        flat = Random(f"{self.plan.seed}/{group.kind}/{group.cursor}").random() < self.plan.zero_variance
        for s in list(group.members("finished")):
            failed = self._outcome(s.id).random() > 1 - self.plan.reward_errors
            reward = 1.0 if flat else float(s.id.index)
            self.accounts.score(s.id, s.attempt, None if failed else reward, "reward_error" if failed else None)
            self.accounts.score(s.id, s.attempt, -1.0, None)  # the first score wins
        self._commit()

    # ------------------------------------------------------------ trainer

    def _publish(self) -> None:
        """The weights of `self.version` go out, unless newer ones once did."""
        self._state = "training"
        if self.version >= self.highest:
            self.highest = self.version
            self._after(0.5, lambda v=Version(0, self.version): self._shows(v))
        self._trainer_beats()

    def _trainer_loop(self) -> None:
        if self._state != "done":
            self._trainer_beats()
            self._after(0.5, self._trainer_loop)

    def _trainer_beats(self) -> None:
        shown = self._state != "starting" and self.version >= self.highest
        version = Version(0, self.version) if shown else None
        self._beat("trainer", TrainerBeat(self.term, version, self.checkpoint, self._state))

    def _train(self) -> None:
        """Look for batches; begin to train when there is one."""
        if self._state != "starting":
            updates: Sequence[int] = range(self.version, self.version + 1 + self.plan.prefetch)
            for update in updates:
                cut = self.next_batch(update) if update != self.settings.iterations else None
                if cut is not None and update == self.version and not self._training:
                    self._training = True
                    self._after(2.0, self._stepped)
            over = self.version >= self.accounts.update and self.accounts.over
            if over and not self._training:
                self._state = "done"
                self._trainer_beats()
                self._tell(ProcessEnded("trainer", "trainer", self.term, None))
                return
        self._after(0.2, self._train)

    def _stepped(self) -> None:
        self.version += 1
        self._publish()
        self._after(0.2, self._report_trained)

    def _report_trained(self) -> None:
        update = self.version - 1
        for group in self.accounts.train(update) or ():
            self.trained.append(group.id)
            for s in group.members("trained"):
                self.max_staleness = max(self.max_staleness, update - s.version.number)
        self._commit()
        assert self.accounts.train(update) is None, "a repeat changes nothing"
        self._after(0.2, self._save)

    def _save(self) -> None:
        if self.version % self.plan.checkpoint_every == 0:
            self.checkpoint = self.version
        self._training = False


def dropped(world: World) -> Counter[str]:
    """Training samples dropped, by reason."""
    samples = (s for g in world.groups.values() if g.kind == "train" for s in g.samples)
    return Counter(str(s.reason) for s in samples if s.state == "dropped")
