"""A run in simulated time: the real manager and the real accounts, and a model of everything around them.

Owns: all processes of the run, what survives their deaths, and the marks that a report is made of. The driver starts
and ends them.
Consumes: a plan. One random source, seeded by it, is for what has no key of its own (times of messages, lost answers);
what a sample turns into is drawn by its key, so two schedules can be compared.
Invariants: nothing here decides; messages of one sender to one receiver keep their order; one plan gives one run,
whatever the hash seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from laminar.control.commands import EndRun
from laminar.control.manager import Record, waiting_for
from laminar.errors import RunFailed
from laminar.sim.driver import Driver
from laminar.sim.kernel import Kernel
from laminar.sim.links import Link
from laminar.sim.manager import ManagerProcess
from laminar.sim.plan import Plan
from laminar.sim.process import AnyProcess, Life
from laminar.sim.relay import Relay
from laminar.sim.replica import Replica
from laminar.sim.scorer import Scorer
from laminar.sim.store import Store
from laminar.sim.trainer import Trainer
from laminar.types import Version


@dataclass(frozen=True, slots=True)
class Mark:
    """Totals at the moment of a publish."""

    version: int
    time: float
    decoded_tokens: float
    kv_token_s: float
    rollout_busy_s: float
    trainer_busy_s: float
    reprefilled_s: float
    """Prefill of tokens that another replica had made."""
    num_moves: int


class World:
    """One run. `records` are the manager's, if wanted; `after_commit` is called after each transaction of the store."""

    def __init__(self, plan: Plan, record: bool = False, random: Random | None = None) -> None:
        """`random`: for what is drawn of messages, which does not go by key; None: from the seed of the plan."""
        self.plan, self.settings = plan, plan.settings
        self.kernel, self.random = Kernel(), random or Random(plan.seed)
        self.records: list[Record] | None = [] if record else None
        self.after_commit: list[Callable[[], None]] = []
        self.marks: list[Mark] = []
        """A publish each, in order; a replay publishes nothing."""
        self.end: EndRun | None = None
        self.checkpoint = self.highest = 0
        """Newest durable checkpoint, and the highest number that was published."""
        self.published: Version | None = None
        """Newest version that the trainer has written since everything was started."""
        self.trainer_busy_s = 0.0
        """Seconds of training, publishing apart."""
        self.replicas: dict[str, Replica] = {}
        self.relays: dict[str, Relay] = {}
        """By machine"""
        self.manager: ManagerProcess
        self.trainer: Trainer
        self.scorer: Scorer
        self.retired: list[Replica] = []
        """Former incarnations."""
        self.store = Store(self)
        self._begin(plan.restarts)

    # ------------------------------------------------------------ run

    def run(self, until: float = float("inf")) -> EndRun:
        """To the end of the run, until the data store has heard of it.

        Raises RunFailed, with what the run waits for, if it has no end before second `until`.
        """
        while not self.over:
            self.kernel.step()
            if self.kernel.now > until:
                raise RunFailed("\n".join([f"not over after {until:g} s", *waiting_for(self.manager.manager.state)]))
        assert self.end is not None
        return self.end

    @property
    def over(self) -> bool:
        """The run has ended, and the data store has heard of it, if it is there."""
        return self.end is not None and (self.store.told_to_stop or not self.store.alive)

    def _begin(self, restarts: tuple[float, ...]) -> None:
        """Start everything, or start it again: of what was there before, only what is durable is left.

        `restarts`: when it is going to happen again.
        """
        self.kernel.clear()
        for number, at in enumerate(restarts):
            self.kernel.at(at, lambda later=restarts[number + 1 :]: self._begin(later))  # type: ignore[misc]
        self.retired += self.replicas.values()
        self.replicas, self.relays, self.published = {}, {}, None
        self.driver = Driver(self)
        self.driver.start_all()

    # ------------------------------------------------------------ who is there

    @property
    def term(self) -> int:
        return self.store.accounts.inbox.term

    def processes(self) -> list[AnyProcess]:
        """Everybody who reports to the manager and is alive."""
        everybody: list[AnyProcess] = [self.trainer, *self.relays.values(), *self.replicas.values()]
        return [process for process in everybody if process.alive]

    def lives(self) -> list[Life]:
        """Everybody who is alive, the driver apart."""
        others: list[Life] = [self.manager, self.store, self.scorer]
        return [*self.processes(), *(life for life in others if life.alive)]

    def life(self, role: str, id_: str) -> Life | None:
        return next((life for life in self.lives() if (life.role, life.id) == (role, id_)), None)

    def replica(self, id_: str, incarnation: int) -> Replica | None:
        """A living replica of this incarnation."""
        replica = self.replicas.get(id_)
        return replica if replica is not None and replica.alive and replica.incarnation == incarnation else None

    def relay_of(self, node: str) -> Relay:
        return self.relays[node]

    def link(self, seconds: float) -> Link:
        """A new link whose messages take so long at most."""
        return Link(self.kernel, self.random, self.plan.delays, seconds)

    # ------------------------------------------------------------ times

    @property
    def publish_s(self) -> float:
        """Publishing, broadcasting and loading are part of the switch where GPUs are shared."""
        return 0.0 if self.plan.colocated else self.plan.profile.publish_s()

    @property
    def load_s(self) -> float:
        return 0.0 if self.plan.colocated else self.plan.profile.load_s()

    # ------------------------------------------------------------ what happens

    def publish(self, version: Version) -> None:
        """The trainer has written a version: it goes down the chain of relays."""
        for replica in self.replicas.values():
            replica.look()
        if not self.marks or version.number > self.highest:
            self.marks.append(self.mark(version.number))
        self.highest, self.published = version.number, version
        for relay in self.relays.values():
            relay.from_trainer.send(lambda r=relay: r.offer(version))  # type: ignore[misc]

    def mark(self, version: int) -> Mark:
        """The totals at this moment; those of a replica are as old as the last event or look at it."""
        replicas = [*self.retired, *self.replicas.values()]
        return Mark(
            version,
            self.kernel.now,
            sum(r.decoder.decoded_tokens for r in replicas),
            sum(r.decoder.kv_token_s for r in replicas),
            sum(r.decoder.busy_s for r in replicas),
            self.trainer_busy_s,
            sum(r.reprefilled_s for r in replicas),
            self.manager.manager.state.num_moves,
        )
