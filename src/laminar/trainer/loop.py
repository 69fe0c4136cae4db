"""The trainer's process: take a batch, train, publish, checkpoint, say so.

Owns: the backend (model and optimizer, or what stands for them), the checkpoints, and the numbering of versions.
Consumes: `BatchSource` (the data store), `Publisher` (weight slots and versions.jsonl), `Announcer` (the manager).
Waits for: the next batch, and nothing else. One request is outstanding while the batch before it is trained; it
    is made in a thread of its own, so that a stop is seen at once while the answer is still to come.
Unblocked by: a batch, None (the run is over), or `stop`.
Invariants:
    - a version is in a slot and on record before its batch counts as trained;
    - a batch counts as trained before a checkpoint holds it: what is counted twice is counted once, but what a
      checkpoint holds is never asked for again;
    - after a restart, no version is published below the highest number on record, so that nobody sees weights
      older than those that work was issued under; the batches up to there are trained again from the checkpoint.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from laminar.config import Config
from laminar.errors import ProtocolError
from laminar.trainer import checkpoint_folder
from laminar.trainer.lineage import Records
from laminar.types import Batch, Statistics, Trained, Version

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.05

NamedWeights = Iterator[tuple[str, Any]]
"""Unfused Hugging Face names, each with a tensor, or with an array in the published form."""


class Backend(Protocol):
    """What is trained: the weights of one version, and how they become those of the next."""

    version: Version
    """Set by the loop, which alone numbers versions."""

    def train(self, batch: Batch) -> dict[str, float | None]:
        """One iteration in place. Returns the statistics that docs/metrics.md names; an empty batch changes nothing."""

    def weights(self) -> NamedWeights:
        """As they are: to be copied before the next iteration."""

    def golden(self) -> Sequence[float]:
        """Log-probs on the golden prompt (`laminar.golden`)."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint of everything, durable on return, into the folder of all checkpoints."""

    def restore(self, path: Path) -> None:
        """Become what a whole checkpoint holds, its version included."""

    def export(self, out: Path) -> None:
        """Write the model for others to use."""


class BatchSource(Protocol):
    """The data store. Both calls may be repeated: the same part of an update is answered with the same batch."""

    def next_batch(self, update: int, part: int) -> Batch | None:
        """Block until this part of batch `update` is cut. None: there will be none, the run is over."""

    def trained(self, report: Trained) -> None: ...


class Publisher(Protocol):
    """Weight slots of this machine and the record of versions."""

    def records(self) -> Iterable[tuple[Version, str]]:
        """Versions ever recorded, with their fingerprints."""

    def digest(self, weights: NamedWeights) -> str:
        """Fingerprint that these weights have once published (in the published dtype)."""

    def append_record(self, version: Version, fingerprint: str) -> None:
        """Durable on return."""

    def publish(self, version: Version, weights: NamedWeights, golden: Sequence[float]) -> str:
        """Copy the weights into a slot; waits for no reader. Returns the fingerprint."""


class Announcer(Protocol):
    """Who is told at once that a version is there."""

    def published(self, version: Version, checkpoint: int) -> None: ...


class Stop(Protocol):
    """A `threading.Event`, or what looks like one."""

    def is_set(self) -> bool: ...


class TrainerLoop:
    """One trainer from its start (version 0 or the newest checkpoint) to the end of the run."""

    def __init__(
        self,
        config: Config,
        backend: Backend,
        store: BatchSource,
        publisher: Publisher,
        manager: Announcer,
        folder: Path,
        stop: Stop | None = None,
        on_iteration: Callable[[Trained], None] | None = None,
    ) -> None:
        """
        Args:
            config: of the run
            backend: fresh, of version 0; set to the newest checkpoint if there is one
            store, publisher, manager: see the protocols
            folder: of the checkpoints
            stop: looked at between iterations and while waiting for a batch
            on_iteration: called after each iteration with what the store was told
        """
        self._config, self._backend, self._store = config, backend, store
        self._publisher, self._manager = publisher, manager
        self._folder, self._stop, self._on_iteration = folder, stop or threading.Event(), on_iteration
        self._records = Records(publisher.records())
        self._publish_from = self._records.highest_number or 0
        self._checkpoint = 0
        self._parts: list[tuple[int, Statistics]] = []
        """(samples, statistics) of the parts of the batch that is being trained."""
        if (path := checkpoint_folder.newest(folder)) is not None:
            backend.restore(path)
            self._checkpoint = backend.version.number

    @property
    def version(self) -> Version:
        """Of the weights as they are."""
        return self._backend.version

    def run(self) -> bool:
        """Train until the run is over. False: it was stopped before that, and goes on from a checkpoint."""
        self._name_weights(self._backend.version.number)
        batches = _Prefetch(self._store.next_batch, self._stop)
        self._request(batches, self._backend.version.number, 0)
        while not self._stop.is_set() and not self._is_last():
            waited = time.monotonic()
            batch = batches.take()
            if batch is None:
                break
            wait_s = time.monotonic() - waited
            if batch.part + 1 < batch.num_parts:
                self._request(batches, batch.update, batch.part + 1)
            else:
                self._request(batches, batch.update + 1, 0)
            self._train(batch, wait_s)
            if batch.part + 1 == batch.num_parts:
                self._end_iteration(batch.update)
        batches.close()
        if self._stop.is_set():
            return False
        self._save_if(self._checkpoint != self._backend.version.number)
        return True

    def _request(self, batches: _Prefetch, update: int, part: int) -> None:
        if update != self._config.iterations:
            batches.request(update, part)

    def _train(self, batch: Batch, wait_s: float) -> None:
        if batch.update != self._backend.version.number:
            raise ProtocolError(f"batch {batch.update} came while the weights are version {self._backend.version}")
        started = time.monotonic()
        statistics = self._backend.train(batch)
        statistics |= {"trainer_wait_s": wait_s, "train_s": time.monotonic() - started}
        self._parts.append((len(batch.ids), statistics))

    def _end_iteration(self, update: int) -> None:
        """Publish, tell the data store, save if it is time."""
        statistics, self._parts = merge_statistics(self._parts), []
        trained = time.monotonic()
        self._name_weights(update + 1)
        statistics["publish_stall_s"] = time.monotonic() - trained
        number = self._backend.version.number
        report = Trained(update, self._backend.version, self._checkpoint, statistics)
        self._store.trained(report)
        self._save_if(number % self._config.train.checkpoint_every == 0 or self._is_last())
        if self._on_iteration is not None:
            self._on_iteration(report)

    def _name_weights(self, number: int) -> None:
        """Decide which version the weights are, record it if it is new, publish it if nobody has seen a later one.

        New weights are copied first: the copy tells their fingerprint, and nobody is shown a version without a record.
        """
        publish = number >= self._publish_from
        version = self._records.next_version(number)
        if version is not None:
            fingerprint, is_new = self._publish(version), True
        else:
            fingerprint = self._publisher.digest(self._backend.weights())
            version, is_new = self._records.identify(number, fingerprint)
            if is_new and version.lineage > self._backend.version.lineage:
                logger.warning("the weights of version %d are not those on record: now %s", number, version)
            if publish:
                self._publish(version)
        self._backend.version = version
        if is_new:
            self._publisher.append_record(version, fingerprint)
            self._records.add(version, fingerprint)
        if publish:
            self._manager.published(version, self._checkpoint)

    def _publish(self, version: Version) -> str:
        return self._publisher.publish(version, self._backend.weights(), self._backend.golden())

    def _is_last(self) -> bool:
        return self._backend.version.number == self._config.iterations

    def _save_if(self, due: bool) -> None:
        if due:
            self._backend.save(self._folder)
            self._checkpoint = self._backend.version.number


SUMS = ("trainer_wait_s", "train_s", "skipped_steps")
MAXIMA = ("logprob_gap_max",)
NEWEST = ("lr",)


def merge_statistics(parts: Sequence[tuple[int, Statistics]]) -> Statistics:
    """One row for a batch that was trained in parts: means weighted by samples, but for sums, maxima and `lr`."""
    if len(parts) == 1:
        return parts[0][1]
    merged: Statistics = {}
    for name in parts[-1][1]:
        known = [(size, value) for size, row in parts if (value := row.get(name)) is not None]
        if not known:
            merged[name] = None
        elif name in SUMS:
            merged[name] = sum(value for _, value in known)
        elif name in MAXIMA:
            merged[name] = max(value for _, value in known)
        elif name in NEWEST:
            merged[name] = known[-1][1]
        else:
            weight = sum(size for size, _ in known)
            merged[name] = sum(size * value for size, value in known) / weight if weight else None
    return merged


class _Prefetch:
    """At most one request for a batch at a time, made in a thread that ends with the process."""

    def __init__(self, fetch: Callable[[int, int], Batch | None], stop: Stop) -> None:
        self._fetch, self._stop = fetch, stop
        self._wanted: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._fetched: queue.SimpleQueue[Batch | Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="prefetch", daemon=True).start()

    def request(self, update: int, part: int) -> None:
        self._wanted.put((update, part))

    def take(self) -> Batch | None:
        """The answer to the oldest request; None also if stopped. Raises what fetching raised."""
        while not self._stop.is_set():
            try:
                answer = self._fetched.get(timeout=STOP_POLL_S)
            except queue.Empty:
                continue
            if isinstance(answer, Exception):
                raise answer
            return answer
        return None

    def close(self) -> None:
        """End the thread once it has its answer; nobody waits for that."""
        self._wanted.put(None)

    def _serve(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            try:
                answer: Batch | Exception | None = self._fetch(*wanted)
            except Exception as error:  # any: it is raised again where the answer is taken
                answer = error
            self._fetched.put(answer)
