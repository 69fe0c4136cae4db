"""A run, on a page: start everybody, pass news between the processes' ends and the manager, stop everybody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from laminar import requests
from laminar.config import Config
from laminar.control.commands import EndRun, Remove, Replace
from laminar.control.events import DriverEvent, ProcessEnded, Recovered, StopRequested
from laminar.control.mailbox import Inbox
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
    roles = roles_of(config)
    supervisor = Supervisor(
        folder,
        {
            "relay": (RelayActor,),
            "trainer": (roles.trainer, config.train.threads),
            "replica": (roles.replica, config.rollout.threads),
            "scorer": (roles.scorer,),
        },
    )
    store_process = supervisor.create("datastore", "datastore", StoreActor)
    replicas = [("replica", f"replica-{i}") for i in range(config.rollout.replicas)]
    for role, id_ in [("relay", "relay-0"), ("trainer", "trainer"), *replicas, ("scorer", "scorer")]:
        supervisor.create(role, id_)
    try:
        store = StoreHandle(store_process.actor)
        recovered: Recovered = handles.wait_for(store.open(config, settings, origin), interrupted)
        manager_process = supervisor.create("manager", "manager", ManagerActor, settings, recovered, origin)
        manager = ManagerHandle(manager_process.actor)
        supervisor.bodies = {
            "manager": (),
            "datastore": (manager,),
            "relay": (config, manager),
            "trainer": (config, store, manager),
            "replica": (config, store, manager),
            "scorer": (config, store),
        }
        supervisor.begin(recovered.term)
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
    """Tell the manager who started, who ended and what the user wants, and obey it, until it says that it is over."""
    told_stop = False
    inbox = Inbox()
    poll = manager.driver_poll(events, inbox, 0.0)
    news: list[DriverEvent] = []
    while True:
        done = handles.wait_for_any([poll, *supervisor.awaited()], timeout_s=0.2)
        news += supervisor.news([d for d in done if d != poll])
        supervisor.advance()
        if any(isinstance(e, ProcessEnded) and e.role == "manager" for e in news):
            return EndRun("failed", "the manager died")
        if interrupted.is_set() and not told_stop:
            told_stop = True
            news.append(StopRequested("interrupted by the user"))
        news += requests.take(supervisor.folder)
        if poll in done and (answer := handles.answer_of(poll)) is not None:
            commands, notes, states = answer
            for note in notes:
                say(note)
            supervisor.write(states)
            for command in inbox.take(commands):
                match command:
                    case EndRun():
                        return command
                    case Replace() | Remove():
                        supervisor.obey(command)
            poll, news = manager.driver_poll(news, inbox, 0.5 if not news else 0.0), []
