"""The driver: starts processes, sees them end, tells the manager, and does what the manager orders.

Without a manager it makes the next one, and, if need be, first the data store that a manager begins from; by which
rule, `control.failover` says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from laminar.control.commands import Command, EndRun, Remove, Replace
from laminar.control.events import DriverEvent, ProcessEnded, ProcessSeen, ProcessStarted, Recovered
from laminar.control.failover import without_manager
from laminar.errors import ProtocolError
from laminar.sim.manager import ManagerProcess
from laminar.sim.process import Life
from laminar.sim.relay import Relay
from laminar.sim.replica import Replica
from laminar.sim.scorer import Scorer
from laminar.sim.trainer import Trainer

if TYPE_CHECKING:
    from laminar.sim.world import World

ALONE = ("manager", "datastore")
"""Whom the driver replaces by itself while there is no manager."""


class Driver:
    """Of one start of the run. It does not die: a run without it is a run to resume."""

    def __init__(self, world: World) -> None:
        self._world, self._plan = world, world.plan
        self._unheard: list[DriverEvent] = []
        """What no manager has taken in."""
        self._seen: tuple[ProcessSeen, ...] = ()
        """The last word of the last manager on all processes, and what has been done since."""
        self._wants_term = False
        """There is no manager, and the next one has not begun."""

    def start_all(self) -> None:
        world = self._world
        term = world.term + 1
        world.scorer = Scorer(world, term)
        world.store.start(term, anew=True)
        world.manager = ManagerProcess(world, term, world.store.begin_term())
        for role in ("manager", "datastore", "scorer"):
            self.tell(ProcessStarted(role, role, term))
        self._start("trainer", "trainer", term)
        self._start("relay", "relay-0", term)
        for i in range(self._plan.replicas):
            self._start("replica", f"replica-{i}", term, self._plan.late_s[i] if self._plan.late_s else 0.0)

    def seen(self) -> tuple[ProcessSeen, ...]:
        """What is known of all processes."""
        manager = self._world.manager
        return manager.manager.state.seen() if manager.alive else self._seen

    # ------------------------------------------------------------ ends

    def kill(self, role: str, id_: str, cause: str = "killed") -> None:
        """A process dies; the driver sees it a moment later. Who is not there is not hit."""
        if life := self._world.life(role, id_):
            life.kill()
            self._world.kernel.after(self._plan.notice_s, lambda: self._ended(life, cause))

    def returned(self, life: Life) -> None:
        """A process has ended in order."""
        if life.alive:
            life.kill()
            self._ended(life, None)

    def _ended(self, life: Life, cause: str | None) -> None:
        event = ProcessEnded(life.role, life.id, life.incarnation, cause)
        if isinstance(life, ManagerProcess):
            self._seen, self._wants_term = life.manager.state.seen(), True
            self._not_heard(event)
        else:
            self.tell(event)

    def tell(self, event: DriverEvent) -> None:
        """Tell the manager; the next one, if this one is gone."""
        manager = self._world.manager
        manager.take(lambda: manager.handle(event), lambda: self._not_heard(event))

    def _not_heard(self, event: DriverEvent) -> None:
        self._unheard.append(event)
        if self._wants_term:
            alone = [e for e in self._unheard if isinstance(e, ProcessEnded) and e.role in ALONE]
            self._unheard = [e for e in self._unheard if e not in alone]
            commands, self._seen, _ = without_manager(self._world.settings, self._seen, alone)
            for command in commands:
                self.obey(command)

    # ------------------------------------------------------------ starts

    def obey(self, command: Command) -> None:
        """Start a process, once its last incarnation is gone for certain; let one go; end the run."""
        world = self._world
        match command:
            case EndRun():
                world.end = command
                if not world.manager.alive:
                    world.store.kill()
            case Replace(role="manager", incarnation=incarnation):
                world.manager.kill()
                self._take_term(incarnation)
            case Replace(role=role, id=id_, incarnation=incarnation):
                self._make_sure(role, id_)
                world.kernel.after(self._plan.start_s, lambda: self._start(role, id_, incarnation))
            case Remove(role=role, id=id_):
                if life := self._make_sure(role, id_):
                    self._ended(life, None)
            case other:
                raise ProtocolError(f"the driver can't do {other}")

    def _make_sure(self, role: str, id_: str) -> Life | None:
        life = self._world.life(role, id_)
        if life is not None:
            life.kill()
        return life

    def _take_term(self, incarnation: int) -> None:
        """A manager begins with what the data store has: with none there, that one has to come first."""
        kernel, store = self._world.kernel, self._world.store

        def take() -> None:
            recovered, self._wants_term = store.begin_term(), False
            kernel.after(self._plan.start_s, lambda: self._begin_manager(incarnation, recovered))

        def try_again() -> None:
            kernel.after(self._plan.delays.retry_s, lambda: self._take_term(incarnation))

        store.take(take, try_again)

    def _begin_manager(self, incarnation: int, recovered: Recovered) -> None:
        world = self._world
        world.manager = ManagerProcess(world, incarnation, replace(recovered, processes=self._seen))
        unheard, self._unheard = self._unheard, []
        for event in unheard:
            self.tell(event)
        for process in world.processes():
            process.from_driver.send(lambda p=process: p.meet(world.manager))  # type: ignore[misc]

    def _start(self, role: str, id_: str, incarnation: int, late_s: float = 0.0) -> None:
        """`late_s`: how long it takes from its start to its first word."""
        self.tell(ProcessStarted(role, id_, incarnation))
        if late_s:
            self._world.kernel.after(late_s, lambda: self._create(role, id_, incarnation))
        else:
            self._create(role, id_, incarnation)

    def _create(self, role: str, id_: str, incarnation: int) -> None:
        world = self._world
        number = int(id_.rpartition("-")[2]) if role in ("replica", "relay") else 0
        match role:
            case "replica":
                node = self._plan.node(number)
                if node not in world.relays:
                    self._start("relay", node.replace("node", "relay"), world.term)
                if id_ in world.replicas:
                    world.retired.append(world.replicas[id_])
                world.replicas[id_] = Replica(world, id_, incarnation, node)
            case "relay":
                broadcast_s = 0.0 if self._plan.colocated else self._plan.profile.broadcast_s(number + 1)
                node = f"node-{number}"
                slots = world.relays[node].whole if node in world.relays else ()
                relay = world.relays[node] = Relay(world, id_, incarnation, node, broadcast_s, slots)
                if newest := world.published:  # it may have missed what the chain has had, or the trainer has written
                    relay.from_trainer.send(lambda: relay.offer(newest))
            case "trainer":
                world.trainer = Trainer(world, incarnation, world.checkpoint)
            case "scorer":
                world.scorer = Scorer(world, incarnation)
                world.store.take(world.store.hand_all)
            case "datastore":
                world.store.start(incarnation, anew=False)
            case other:
                raise ProtocolError(f"{other} can't be replaced")
