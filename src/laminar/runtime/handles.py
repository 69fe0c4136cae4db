"""Every call between processes: `.remote()`, `ray.get` and `ray.wait` stand in this file only.

A handle has the methods that its user declares in a Protocol; nobody outside `runtime` knows that Ray carries them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from laminar.config import Config
from laminar.control import events
from laminar.control.commands import Keep, Numbered, Stop
from laminar.control.events import Beat, DriverEvent, StoreEvents
from laminar.control.mailbox import Inbox
from laminar.errors import LaminarError
from laminar.types import Batch, ReplicaReply, ReplicaReport, ScoreReport, Settings, Trained, UnscoredGroup, Version
from laminar.weights.relay import RelayBeat, RelayReply, describe

WAIT_S = 1.0
"""Longest that a long poll is held on the other side before it is asked again."""
LOOK_AGAIN_S = 0.05
"""How often the successor of a process that has died is looked for."""


class _Peer:
    """The manager or the data store as others see it: `name/0`, or the newest of those who have taken its place.

    A call to one that has died is made again, of its successor, for as long as that takes: all calls bear being
    repeated, and if there is no successor the driver ends the caller. (Ray gives the name of a dead actor to nobody
    while there are handles of it.)
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor
        self.number = 0

    def call(self, method: str, *args: object) -> Any:
        while True:
            try:
                return ray.get(getattr(self.actor, method).remote(*args))
            except RayActorError:
                time.sleep(LOOK_AGAIN_S)
                self.find()

    async def call_async(self, method: str, *args: object) -> Any:
        while True:
            try:
                return await getattr(self.actor, method).remote(*args)
            except RayActorError:
                await asyncio.sleep(LOOK_AGAIN_S)
                self.find()

    def find(self) -> None:
        """Several threads may do so at once."""
        number = self.number + 1
        with suppress(ValueError):  # there is none at this moment
            self.actor, self.number = ray.get_actor(f"{self.name}/{number}"), number


class ManagerHandle(_Peer):
    def beat(self, beat: Beat, acked: Inbox, wait_s: float) -> Sequence[Numbered]:
        reply: list[Numbered] = self.call("beat", beat, acked, wait_s)
        return reply

    async def store_poll(self, incarnation: int, events: StoreEvents, acked: Inbox, wait_s: float) -> list[Numbered]:
        reply: list[Numbered] = await self.call_async("store_poll", incarnation, events, acked, wait_s)
        return reply

    def driver_poll(self, events: Sequence[DriverEvent], acked: Inbox, wait_s: float) -> Any:
        """A reference, to be waited for among others."""
        return self.actor.driver_poll.remote(tuple(events), acked, wait_s)


class RelayManagerHandle:
    """The manager as a relay sees it: what to keep, and when to stop."""

    def __init__(self, manager: ManagerHandle, node: str) -> None:
        self.manager, self.node = manager, node
        self.inbox = Inbox()
        self.keep: tuple[Version, ...] | None = None
        """None until the manager has said it: a restarted relay keeps what it finds."""

    def beat(self, beat: RelayBeat) -> RelayReply:
        stop = False
        problems = tuple(describe(event) for event in beat.events)
        news = events.RelayBeat(beat.relay, beat.incarnation, self.node, beat.whole, beat.free_slots, problems)
        for command in self.inbox.take(self.manager.beat(news, self.inbox, 0.0)):
            match command:
                case Keep(versions=versions):
                    self.keep = versions
                case Stop():
                    stop = True
        return RelayReply(self.keep, stop)


class StoreHandle(_Peer):
    def open(self, config: Config, settings: Settings, origin: float) -> Any:
        """Reference to what the manager begins with (`Recovered`), done when the store is open."""
        return self.actor.open.remote(config, settings, origin)

    def begin_term(self) -> Any:
        """Reference to what the next manager begins with (`Recovered`)."""
        return self.actor.begin_term.remote()

    def exchange(self, report: ReplicaReport) -> ReplicaReply:
        reply: ReplicaReply = self.call("exchange", report)
        return reply

    def next_batch(self, update: int, part: int) -> Batch | None:
        while True:
            batch, over = self.call("next_batch", update, part, WAIT_S)
            if batch is not None or over:
                result: Batch | None = batch
                return result

    def trained(self, report: Trained) -> None:
        self.call("trained", report)


class ScoreHandle:
    """The data store as the scorer sees it: the answer also says when to stop."""

    def __init__(self, store: StoreHandle, stop: threading.Event) -> None:
        self.store, self.stop = store, stop

    def exchange_scores(self, report: ScoreReport) -> list[UnscoredGroup]:
        groups: list[UnscoredGroup]
        groups, stopping = self.store.call("exchange_scores", report, WAIT_S)
        if stopping:
            self.stop.set()
        return groups


def create(name: str | None, kind: type, role: str, id_: str, *args: object) -> Any:
    """A new actor of this class, which Ray neither restarts nor retries: that is decided elsewhere.

    The driver makes all of them, because an actor's death takes the actors that it made. `name`: of those whom others
    call.
    """
    options = {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 1000 if _is_async(kind) else 2,
    }
    return ray.remote(kind).options(name=name, **options).remote(role, id_, *args)


def _is_async(kind: type) -> bool:
    return bool(getattr(kind, "is_async", False))


def run(actor: Any, *args: object) -> Any:
    """Begin the body of an actor; the reference is done when it returns or dies."""
    return actor.run.remote(*args)


def pid(actor: Any) -> Any:
    """Reference to the actor's process id, done when the process is there."""
    return actor.pid.remote()


def close_store(actor: Any) -> None:
    """Let the database be closed in order; a store that does not do so soon is killed anyway."""
    with suppress(RayError):
        ray.get(actor.close.remote(), timeout=1.0)


def kill(actor: Any) -> None:
    """End an actor whose process is not known yet."""
    ray.kill(actor)


def leave(actor: Any) -> None:
    """Ask the process to exit. To be followed by a look whether it did."""
    actor.leave.remote()


def wait_for(reference: Any, interrupted: threading.Event) -> Any:
    """What a reference holds once it is done. Raises what it failed with, or KeyboardInterrupt."""
    while not wait_for_any([reference], timeout_s=0.1):
        if interrupted.is_set():
            raise KeyboardInterrupt
    return _get(reference)


def _get(reference: Any) -> Any:
    """What a finished reference holds. An error of ours is raised as it was where it came up."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, LaminarError):
            raise error.cause from None
        raise


def wait_for_any(references: Sequence[Any], timeout_s: float) -> list[Any]:
    """All that are done, as soon as one is."""
    done: list[Any]
    ray.wait(list(references), num_returns=1, timeout=timeout_s)
    done, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
    return done


def answer_of(reference: Any) -> Any:
    """The answer to a call; None if who was called is gone, which its body tells too. Raises what it failed with."""
    try:
        return _get(reference)
    except RayActorError:
        return None


def result_of(reference: Any) -> Any:
    """What a finished reference holds; raises what it failed with."""
    return ray.get(reference)
