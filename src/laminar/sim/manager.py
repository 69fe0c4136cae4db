"""The manager's process: the very `control.manager.Manager`, with its ticks and its post."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laminar.control.commands import Command, EndRun, Remove, Replace, Stop, address
from laminar.control.events import Beat, Event, Recovered, RelayBeat, ReplicaBeat, Tick
from laminar.control.manager import Manager, Record, is_news
from laminar.sim.kernel import TICK

if TYPE_CHECKING:
    from laminar.sim.world import World


class ManagerProcess:
    """One term. Commands leave when the event that they follow from has been handled."""

    def __init__(self, world: World, recovered: Recovered) -> None:
        self.manager = Manager(world.settings)
        self._world = world
        self._last: dict[tuple[str, str], Beat] = {}
        self.handle(recovered)
        world.kernel.after(world.plan.delays.tick_s, self._tick, TICK)

    def handle(self, event: Event) -> None:
        world = self._world
        commands = tuple(self.manager.handle(world.kernel.now, event))
        if world.records is not None:
            world.records.append(Record(world.kernel.now, event, commands))
        for command in commands:
            self._send(command)

    def beat(self, beat: Beat) -> None:
        """A beat has come by itself: what says nothing new is left to the next tick."""
        sender = _sender(beat)
        if is_news(self._last.get(sender), beat):
            self._last[sender] = beat
            self.handle(beat)

    def look(self) -> None:
        """A tick out of turn, so that loads are those of this moment."""
        beats = tuple(b for p in self._world.processes() if (b := p.quiet_beat()) is not None)
        self._last.update((_sender(beat), beat) for beat in beats)
        self.handle(Tick(beats))

    def _tick(self) -> None:
        self.look()
        self._world.kernel.after(self._world.plan.delays.tick_s, self._tick, TICK)

    def _send(self, command: Command) -> None:
        world = self._world
        match command:
            case EndRun():
                world.end = command
            case Replace() | Remove():
                world.obey(command)
            case Stop(role="datastore"):
                world.store.from_manager.send(lambda: world.store.obey(command))
            case Stop():
                for process in world.processes():
                    if process.role == command.role and command.id in ("*", process.id):
                        process.from_manager.send(lambda p=process: p.obey(command))  # type: ignore[misc]
            case _:
                role, id_ = address(command)
                if role == "datastore":
                    world.store.from_manager.send(lambda: world.store.obey(command))
                elif receiver := world.process(role, id_, getattr(command, "incarnation", None)):
                    receiver.from_manager.send(lambda: receiver.obey(command))


def _sender(beat: Beat) -> tuple[str, str]:
    match beat:
        case ReplicaBeat():
            return "replica", beat.replica
        case RelayBeat():
            return "relay", beat.relay
        case _:
            return "trainer", "trainer"
