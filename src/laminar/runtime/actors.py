"""One thin class a role: it builds the tested object from the config and lets it run.

Constructors do little, so that a failure of the body comes back through `run` with its own traceback.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.config import Config
from laminar.control.commands import Numbered, Stop
from laminar.control.events import Beat, DriverEvent, Recovered, ScorerBeat, StoreEvents
from laminar.control.mailbox import Inbox
from laminar.run_folder import NODE, SHOW_STACKS, RunFolder
from laminar.runtime.handles import ManagerHandle, RelayManagerHandle, ScoreHandle, StoreHandle
from laminar.runtime.services import EVENTS_WITHIN_S, ManagerService, StoreService
from laminar.timing import together_s
from laminar.types import Batch, ReplicaReply, ReplicaReport, ScoreReport, Settings, Trained, UnscoredGroup

if TYPE_CHECKING:
    from laminar.rollout.engine import Engine
    from laminar.trainer.loop import Backend
    from laminar.weights.publisher import LocalVersions


class Actor:
    """What all have: an identity, a log file that takes everything they print, a pid."""

    is_async = False
    needs: tuple[str, ...] = ()
    """Modules that take long to import: each process does so while the others start."""

    def __init__(self, role: str, id_: str, folder: Path, threads: int = 1) -> None:
        self.role, self.id, self.folder = role, id_, RunFolder(folder)
        self.threads = threads
        log = os.open(self.folder.logs / f"{id_}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        faulthandler.enable()
        faulthandler.register(SHOW_STACKS)
        logging.basicConfig(
            stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s", level=logging.INFO, force=True
        )

        for module in self.needs:
            importlib.import_module(module)

    def pid(self) -> int:
        return os.getpid()

    def leave(self) -> None:
        """Exit at once: Ray's own way takes a second. Nobody hears an answer."""
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)

    def limit_threads(self) -> None:
        """As many compute threads as configured: more than there are cores stall each other."""
        import torch
        from transformers.utils.logging import disable_progress_bar

        torch.set_num_threads(self.threads)
        torch.set_num_interop_threads(1)
        disable_progress_bar()


def run_clock(origin: float) -> Callable[[], float]:
    """Run seconds, the same in every process of this machine: time since the monotonic instant `origin`."""
    return lambda: time.monotonic() - origin


class ManagerActor(Actor):
    is_async = True

    def __init__(self, role: str, id_: str, folder: Path) -> None:
        super().__init__(role, id_, folder)
        self._begun = asyncio.Event()

    async def run(self, incarnation: int, settings: Settings, origin: float, recovered: Recovered) -> None:
        self._service = ManagerService(settings, self.folder.events, recovered, run_clock(origin))
        self._begun.set()
        await self._service.run()

    async def service(self) -> ManagerService:
        """Who calls before it has begun waits for that."""
        await self._begun.wait()
        return self._service

    async def beat(self, beat: Beat, acked: Inbox, wait_s: float) -> list[Numbered]:
        return await (await self.service()).beat(beat, acked, wait_s)

    async def store_poll(self, incarnation: int, events: StoreEvents, acked: Inbox, wait_s: float) -> list[Numbered]:
        return await (await self.service()).store_poll(incarnation, events, acked, wait_s)

    async def driver_poll(self, events: tuple[DriverEvent, ...], acked: Inbox, wait_s: float) -> Any:
        return await (await self.service()).driver_poll(events, acked, wait_s)


class StoreActor(Actor):
    is_async = True

    def __init__(self, role: str, id_: str, folder: Path) -> None:
        super().__init__(role, id_, folder)
        self._opened = asyncio.Event()

    async def open(self, config: Config, settings: Settings, origin: float, anew: bool = True) -> Recovered:
        from laminar.data.open import open_store

        store = open_store(self.folder, config, settings, run_clock(origin), anew)
        self._service = StoreService(store, together_s(config.rollout.replicas, EVENTS_WITHIN_S))
        self._opened.set()
        return store.recovered()

    async def service(self) -> StoreService:
        """Who calls before it is open waits for that."""
        await self._opened.wait()
        return self._service

    async def run(
        self, incarnation: int, config: Config, settings: Settings, origin: float, manager: ManagerHandle
    ) -> None:
        """Work for the manager; a store that replaces another one opens itself."""
        if not self._opened.is_set():
            await self.open(config, settings, origin, anew=False)
        await (await self.service()).run(incarnation, manager.store_poll)

    async def begin_term(self) -> Recovered:
        return (await self.service()).store.begin_term()

    async def close(self) -> None:
        (await self.service()).store.close()

    async def exchange(self, report: ReplicaReport) -> ReplicaReply:
        return await (await self.service()).exchange(report)

    async def exchange_scores(self, report: ScoreReport, wait_s: float) -> tuple[list[UnscoredGroup], bool]:
        return await (await self.service()).exchange_scores(report, wait_s)

    async def next_batch(self, update: int, part: int, wait_s: float) -> tuple[Batch | None, bool]:
        return await (await self.service()).next_batch(update, part, wait_s)

    async def trained(self, report: Trained) -> None:
        await (await self.service()).trained(report)


class RelayActor(Actor):
    needs = ("laminar.weights.relay",)

    def run(self, incarnation: int, config: Config, manager: ManagerHandle) -> None:
        from laminar.weights.relay import Relay, RelaySettings
        from laminar.weights.versions import VersionLog

        settings = RelaySettings(self.id, incarnation, config.faults.heartbeat_s)
        relay = Relay(self.folder.slots(NODE), VersionLog(self.folder.versions), settings)
        relay.run(threading.Event(), RelayManagerHandle(manager, NODE))


def on_sigterm() -> threading.Event:
    """What SIGTERM sets from now on, instead of ending the process.

    Ray keeps the main thread in C++, where Python runs no handler: the signal's number comes through a pipe.
    """
    asked = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        while signal.SIGTERM not in os.read(reader, 64):
            pass
        asked.set()

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
    return asked


class ReplicaActor(Actor):
    needs = ("laminar.rollout.replica", "laminar.rollout.torch_engine")

    def __init__(self, role: str, id_: str, folder: Path, threads: int = 1) -> None:
        self._leaving = on_sigterm()
        super().__init__(role, id_, folder, threads)

    def run(self, incarnation: int, config: Config, store: StoreHandle, manager: ManagerHandle) -> None:
        from laminar.rollout.replica import Replica
        from laminar.weights.publisher import LocalVersions

        versions = LocalVersions(self.folder.slots(NODE))
        engine = self.engine(config, versions)
        Replica(self.id, incarnation, NODE, engine, versions, store, manager, config, leaving=self._leaving).run()

    def engine(self, config: Config, versions: LocalVersions) -> Engine:
        from laminar.rollout.torch_engine import TorchEngine

        self.limit_threads()
        return TorchEngine(
            config.model_path, config.rollout, config.seed, versions, golden_tolerance=config.golden_tolerance
        )


class EmulatedReplicaActor(ReplicaActor):
    needs = ("laminar.rollout.replica", "laminar.rollout.emulated_engine")

    def engine(self, config: Config, versions: LocalVersions) -> Engine:
        from laminar.rollout.emulated_engine import EmulatedEngine

        return EmulatedEngine(config.profile, config.rollout, config.seed, versions)


class TrainerActor(Actor):
    needs = ("laminar.trainer.loop", "laminar.trainer.torch_backend")

    def run(self, incarnation: int, config: Config, store: StoreHandle, manager: ManagerHandle) -> None:
        from laminar.trainer.beat import TrainerVoice
        from laminar.trainer.loop import TrainerLoop
        from laminar.weights.publisher import Publisher

        voice = TrainerVoice(manager, incarnation, config.faults.heartbeat_s)
        publisher = Publisher(self.folder.slots(NODE), self.folder.versions, config.rollout.dtype, config.num_slots)
        backend = self.backend(config)
        loop = TrainerLoop(config, backend, store, publisher, voice, self.folder.checkpoints, stop=voice)
        if loop.run():
            if config.iterations != 0:
                backend.export(self.folder.export)
            voice.done(loop.version)

    def backend(self, config: Config) -> Backend:
        from laminar.trainer.torch_backend import TorchBackend

        self.limit_threads()
        return TorchBackend(config)


class EmulatedTrainerActor(TrainerActor):
    needs = ("laminar.trainer.loop", "laminar.trainer.emulated")

    def backend(self, config: Config) -> Backend:
        from laminar.trainer.emulated import EmulatedBackend

        return EmulatedBackend(config)


class ScorerActor(Actor):
    needs = ("laminar.data.scorer",)

    def run(self, incarnation: int, config: Config, store: StoreHandle, manager: ManagerHandle) -> None:
        stop = threading.Event()
        beat = threading.Thread(target=self._beat, args=(incarnation, config, manager, stop), name="beat", daemon=True)
        beat.start()
        self.score(incarnation, config, store, stop)

    @staticmethod
    def _beat(incarnation: int, config: Config, manager: ManagerHandle, stop: threading.Event) -> None:
        """Show that the process lives. When to stop the data store says, too."""
        inbox = Inbox()
        while not stop.is_set():
            told = inbox.take(manager.beat(ScorerBeat(incarnation), inbox, 0.0))
            if any(isinstance(command, Stop) for command in told):
                stop.set()
            stop.wait(config.faults.heartbeat_s)

    def score(self, incarnation: int, config: Config, store: StoreHandle, stop: threading.Event) -> None:
        from laminar.data.prompts import load_tokenizer
        from laminar.data.scorer import Scorer

        scorer = Scorer(
            config,
            load_tokenizer(config.model_path),
            ScoreHandle(store, stop),
            base_folder=self.folder.path,
            log_path=self.folder.logs / "rewards.log",
            incarnation=incarnation,
        )
        try:
            scorer.run(stop)
        finally:
            scorer.close()


class EmulatedScorerActor(ScorerActor):
    needs = ("laminar.data.emulated",)

    def score(self, incarnation: int, config: Config, store: StoreHandle, stop: threading.Event) -> None:
        from laminar.data.emulated import ConstantScorer

        ConstantScorer(ScoreHandle(store, stop), incarnation, config.profile.reward_s).run(stop)


def kinds_of(config: Config) -> dict[str, tuple[Any, ...]]:
    """By role: the class of its actors, and what the constructor takes after role, id and folder."""
    emulated = config.emulated
    return {
        "manager": (ManagerActor,),
        "datastore": (StoreActor,),
        "relay": (RelayActor,),
        "trainer": (EmulatedTrainerActor if emulated else TrainerActor, config.train.threads),
        "replica": (EmulatedReplicaActor if emulated else ReplicaActor, config.rollout.threads),
        "scorer": (EmulatedScorerActor if emulated else ScorerActor,),
    }
