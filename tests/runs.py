"""A run folder as a run leaves it, made in a moment and without any process."""

from __future__ import annotations

from pathlib import Path

from laminar.control.events import StoreEvents
from laminar.run_folder import RunFolder
from laminar.runtime.services import ManagerService
from laminar.types import Version
from tests.control.plans import make_settings
from tests.data.driving import Clock, Hand, Prompts, open_store


def make_run(path: Path) -> RunFolder:
    """Two iterations of two groups, one group dropped, two in flight, and the manager's log of it (three records)."""
    folder = RunFolder(path)
    folder.create()
    folder.config.touch()
    settings = make_settings()
    store = open_store(folder.path, settings, Prompts(rows=8, overlong={5}))
    manager = ManagerService(settings, folder.events, store.recovered(), Clock())
    hand = Hand(store)
    for update in range(2):
        hand.make(2, Version(0, update))
        hand.train(update)
    hand.issue(2, Version(0, 1))
    told = store.events(0)
    manager.handle(StoreEvents(3, told.events[:3]))
    manager.handle(told)
    manager.log.close()
    store.close()
    return folder
