"""Every call between processes: `.remote()`, `ray.get` and `ray.wait` stand in this file only.

A handle has the methods that its user declares in a Protocol; nobody outside `runtime` knows that Ray carries them.
"""

from __future__ import annotations

import threading
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


class ManagerHandle:
    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def beat(self, beat: Beat, acked: Inbox, wait_s: float) -> Sequence[Numbered]:
        reply: list[Numbered] = ray.get(self.actor.beat.remote(beat, acked, wait_s))
        return reply

    async def store_poll(self, events: StoreEvents, acked: Inbox, wait_s: float) -> list[Numbered]:
        reply: list[Numbered] = await self.actor.store_poll.remote(events, acked, wait_s)
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


class StoreHandle:
    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def open(self, config: Config, settings: Settings, origin: float) -> Any:
        """Reference to the counts of the store (`Recovered`), done when it is open."""
        return self.actor.open.remote(config, settings, origin)

    def exchange(self, report: ReplicaReport) -> ReplicaReply:
        reply: ReplicaReply = ray.get(self.actor.exchange.remote(report))
        return reply

    def next_batch(self, update: int, part: int) -> Batch | None:
        while True:
            batch, over = ray.get(self.actor.next_batch.remote(update, part, WAIT_S))
            if batch is not None or over:
                result: Batch | None = batch
                return result

    def trained(self, report: Trained) -> None:
        ray.get(self.actor.trained.remote(report))


class ScoreHandle:
    """The data store as the scorer sees it: the answer also says when to stop."""

    def __init__(self, actor: Any, stop: threading.Event) -> None:
        self.actor, self.stop = actor, stop

    def exchange_scores(self, report: ScoreReport) -> list[UnscoredGroup]:
        groups: list[UnscoredGroup]
        groups, stopping = ray.get(self.actor.exchange_scores.remote(report, WAIT_S))
        if stopping:
            self.stop.set()
        return groups


def create(kind: type, role: str, id_: str, *args: object) -> Any:
    """A new actor of this class, which Ray neither restarts nor retries: that is decided elsewhere.

    The driver makes all of them, because an actor's death takes the actors that it made.
    """
    options = {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 1000 if _is_async(kind) else 2,
    }
    return ray.remote(kind).options(**options).remote(role, id_, *args)


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


def end(actor: Any) -> None:
    """Ask the process to exit in order. To be followed by a look whether it did."""
    actor.__ray_terminate__.remote()


def wait_for(reference: Any, interrupted: threading.Event) -> Any:
    """What a reference holds once it is done. Raises what it failed with, or KeyboardInterrupt."""
    while not wait_for_any([reference], timeout_s=0.1):
        if interrupted.is_set():
            raise KeyboardInterrupt
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, LaminarError):
            raise error.cause from None
        raise


def wait_for_any(references: Sequence[Any], timeout_s: float) -> list[Any]:
    """Those that are done, as soon as one is."""
    done: list[Any]
    done, _ = ray.wait(list(references), num_returns=1, timeout=timeout_s)
    return done


def answer_of(poll: Any) -> Any:
    """The answer to a poll of the manager; None if the manager is gone, which its body tells too."""
    try:
        return ray.get(poll)
    except RayActorError:
        return None


def result_of(reference: Any) -> Any:
    """What a finished reference holds; raises what it failed with."""
    return ray.get(reference)
