"""A run, on a page: start everybody, pass news between the processes' ends and the manager, stop everybody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from laminar.config import Config
from laminar.control.commands import EndRun, Numbered
from laminar.control.events import DriverEvent, ProcessEnded, Recovered, StopRequested
from laminar.run_folder import RunFolder
from laminar.runtime import handles
from laminar.runtime.actors import ManagerActor, RelayActor, StoreActor, roles_of
from laminar.runtime.handles import ManagerHandle, StoreHandle
from laminar.runtime.supervise import Supervisor
from laminar.types import Settings


def run(
    folder: RunFolder,
    config: Config,
    settings: Settings,
    origin: float,
    interrupted: threading.Event,
    say: Callable[[str], None],
) -> tuple[EndRun, str | None]:
    """Run to the end. Returns how it ended and, if a process failed by something unforeseen, the traceback.

    `origin`: the monotonic instant of run second 0. `interrupted`: set when the user wants to stop. `say`: shows a
    line.
    """
    supervisor, roles = Supervisor(folder), roles_of(config)
    store_process = supervisor.create(StoreActor, "datastore", "datastore")
    relay = supervisor.create(RelayActor, "relay", "relay-0")
    trainer = supervisor.create(roles.trainer, "trainer", "trainer", config.train.threads)
    replicas = [
        supervisor.create(roles.replica, "replica", f"replica-{i}", config.rollout.threads)
        for i in range(config.rollout.replicas)
    ]
    scorer = supervisor.create(roles.scorer, "scorer", "scorer")
    try:
        store = StoreHandle(store_process.actor)
        recovered: Recovered = handles.wait_for(store.open(config, settings, origin), interrupted)
        term = supervisor.incarnation = recovered.term
        manager_process = supervisor.create(ManagerActor, "manager", "manager", settings, recovered, origin)
        manager = ManagerHandle(manager_process.actor)
        supervisor.run(manager_process)
        supervisor.run(store_process, manager)
        supervisor.run(trainer, term, config, store, manager)
        for replica in replicas:
            supervisor.run(replica, term, config, store, manager)
        supervisor.run(relay, term, config, manager)
        supervisor.run(scorer, term, config, store)
        end = _watch(supervisor, manager, supervisor.started(interrupted), interrupted, say)
        return end, supervisor.first_traceback
    finally:
        supervisor.stop()


def _watch(
    supervisor: Supervisor,
    manager: ManagerHandle,
    events: Sequence[DriverEvent],
    interrupted: threading.Event,
    say: Callable[[str], None],
) -> EndRun:
    """Tell the manager who ended and whether the user wants to stop, until it says that the run is over."""
    told_stop = False
    poll = manager.driver_poll(events, 0, 0.0)
    news: list[DriverEvent] = []
    while True:
        done = handles.wait_for_any([poll, *supervisor.bodies()], timeout_s=0.2)
        news += supervisor.take_ended([d for d in done if d != poll])
        if any(isinstance(e, ProcessEnded) and e.role == "manager" for e in news):
            return EndRun("failed", "the manager died")
        if interrupted.is_set() and not told_stop:
            told_stop = True
            news.append(StopRequested("interrupted by the user"))
        if poll in done and (answer := handles.answer_of(poll)) is not None:
            commands, notes, states = answer
            for note in notes:
                say(note)
            supervisor.write(states)
            if end := _end(commands):
                return end
            poll, news = manager.driver_poll(news, 0, 0.5 if not news else 0.0), []


def _end(commands: Sequence[Numbered]) -> EndRun | None:
    return next((n.command for n in commands if isinstance(n.command, EndRun)), None)
