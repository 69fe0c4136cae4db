"""A run in simulated time: the real manager and the real accounts, and a model of everything around them.

Owns: all processes of the run, what survives their deaths, and the marks that a report is made of.
Consumes: a plan. One random source, seeded by it, is for what has no key of its own (times of messages, lost answers);
what a sample turns into is drawn by its key, so two schedules can be compared.
Invariants: nothing here decides; messages of one sender to one receiver keep their order; one plan gives one run,
whatever the hash seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from laminar.control.commands import EndRun, Remove, Replace
from laminar.control.events import ProcessEnded, ProcessStarted
from laminar.control.manager import Record, waiting_for
from laminar.errors import ProtocolError, RunFailed
from laminar.sim.kernel import Kernel
from laminar.sim.links import Link
from laminar.sim.manager import ManagerProcess
from laminar.sim.plan import Plan
from laminar.sim.process import Process
from laminar.sim.relay import Relay
from laminar.sim.replica import Replica
from laminar.sim.scorer import Scorer
from laminar.sim.store import Store
from laminar.sim.trainer import Trainer
from laminar.types import Version

AnyProcess = Process[Any]


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

    def __init__(self, plan: Plan, record: bool = False) -> None:
        self.plan, self.settings = plan, plan.settings
        self.kernel, self.random = Kernel(), Random(plan.seed)
        self.records: list[Record] | None = [] if record else None
        self.after_commit: list[Callable[[], None]] = []
        self.marks: list[Mark] = []
        """A publish each, in order; a replay publishes nothing."""
        self.end: EndRun | None = None
        self.term = 0
        self.checkpoint = self.highest = 0
        """Newest durable checkpoint, and the highest number that was published."""
        self.published: Version | None = None
        """Newest version that the trainer has written since everything was started."""
        self.trainer_busy_s = 0.0
        """Seconds of training, publishing apart."""
        self.replicas: dict[str, Replica] = {}
        self.relays: dict[str, Relay] = {}
        """By machine"""
        self._retired: list[Replica] = []
        self.store = Store(self)
        self._begin(plan.restarts)

    # ------------------------------------------------------------ run

    def run(self, until: float = float("inf")) -> EndRun:
        """To the end of the run, until the data store has heard of it.

        Raises RunFailed, with what the run waits for, if it has no end before second `until`.
        """
        while self.end is None or not self.store.stopped:
            self.kernel.step()
            if self.kernel.now > until:
                raise RunFailed("\n".join([f"not over after {until:g} s", *waiting_for(self.manager.manager.state)]))
        return self.end

    def _begin(self, restarts: tuple[float, ...]) -> None:
        """Start everything, or start it again: of what was there before, only what is durable is left.

        `restarts`: when it is going to happen again.
        """
        self.kernel.clear()
        self.term += 1
        for number, at in enumerate(restarts):
            self.kernel.at(at, lambda later=restarts[number + 1 :]: self._begin(later))  # type: ignore[misc]
        plan, term = self.plan, self.term
        self._retired += self.replicas.values()
        self.replicas, self.relays, self.published = {}, {}, None
        self.scorer = Scorer(self, term)
        self.store.begin()
        self.manager = ManagerProcess(self, self.store.recovered(term))
        self.manager.handle(ProcessStarted("scorer", "scorer", term))
        self._start("trainer", "trainer", term)
        self._start("relay", "relay-0", term)
        for i in range(plan.replicas):
            self._start("replica", f"replica-{i}", term)

    # ------------------------------------------------------------ who is there

    def processes(self) -> list[AnyProcess]:
        """Everybody who reports to the manager and is alive."""
        everybody: list[AnyProcess] = [self.trainer, *self.relays.values(), *self.replicas.values()]
        return [process for process in everybody if process.alive]

    def process(self, role: str, id_: str, incarnation: int | None = None) -> AnyProcess | None:
        """A living process; with `incarnation`, only that one."""
        for process in self.processes():
            if (process.role, process.id) == (role, id_) and incarnation in (None, process.incarnation):
                return process
        return None

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
        self.manager.look()
        if not self.marks or version.number > self.highest:
            self.marks.append(self._mark(version.number))
        self.highest, self.published = version.number, version
        for relay in self.relays.values():
            relay.from_trainer.send(lambda r=relay: r.receive(version))  # type: ignore[misc]

    def _mark(self, version: int) -> Mark:
        replicas = [*self._retired, *self.replicas.values()]
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

    # ------------------------------------------------------------ the driver

    def kill(self, role: str, id_: str, cause: str = "killed") -> None:
        """A process dies; the driver sees it and tells the manager."""
        if role == "scorer":
            if not self.scorer.alive:
                return
            self.scorer.alive, incarnation = False, self.scorer.incarnation
        elif process := self.process(role, id_):
            process.kill()
            incarnation = process.incarnation
        else:
            return
        self.kernel.after(self.plan.notice_s, lambda: self.ended(role, id_, incarnation, cause))

    def ended(self, role: str, id_: str, incarnation: int, cause: str | None) -> None:
        """The driver tells the manager that a process has ended; without a cause, in order."""
        self.manager.handle(ProcessEnded(role, id_, incarnation, cause))

    def obey(self, command: Replace | Remove) -> None:
        """Start a process, once its last incarnation is gone for certain; or let one go."""
        process = self.process(command.role, command.id)
        if process is not None:
            process.kill()
        match command:
            case Replace(role=role, id=id_, incarnation=incarnation):
                self.kernel.after(self.plan.start_s, lambda: self._start(role, id_, incarnation))
            case Remove():
                self.ended(command.role, command.id, process.incarnation if process else 0, None)

    def _start(self, role: str, id_: str, incarnation: int) -> None:
        self.manager.handle(ProcessStarted(role, id_, incarnation))
        number = int(id_.rpartition("-")[2]) if role in ("replica", "relay") else 0
        match role:
            case "replica":
                node = self.plan.node(number)
                if node not in self.relays:
                    self._start("relay", node.replace("node", "relay"), self.term)
                if id_ in self.replicas:
                    self._retired.append(self.replicas[id_])
                self.replicas[id_] = Replica(self, id_, incarnation, node)
            case "relay":
                broadcast_s = 0.0 if self.plan.colocated else self.plan.profile.broadcast_s(number + 1)
                node = f"node-{number}"
                slots = self.relays[node].whole if node in self.relays else ()
                relay = self.relays[node] = Relay(self, id_, incarnation, node, broadcast_s, slots)
                if newest := self.published:  # it may have missed what the chain has had, or the trainer has written
                    relay.from_trainer.send(lambda: relay.receive(newest))
            case "trainer":
                self.trainer = Trainer(self, incarnation, self.checkpoint)
            case "scorer":
                self.scorer = Scorer(self, incarnation)
                self.store.hand_all()
            case other:
                raise ProtocolError(f"{other} can't be replaced")
