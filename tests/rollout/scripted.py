"""An engine that does what a test says, misdeeds included: what a replica must bear of any engine."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from laminar.errors import EngineError
from laminar.rollout.engine import Progress, Request
from laminar.types import Load, SampleId, SlotRef, Version

HANGS_AT_MOST_S = 60.0


class Boom(Exception):
    """A fault of the test's own making."""


@dataclass
class ScriptedEngine:
    """Makes a token a poll for every request: 1, 2, 3, ... with log-probs -1, -2, -3, ...; ends it by its script."""

    loaded: SlotRef | None = None
    held: dict[SampleId, Request] = field(default_factory=dict)
    made: dict[SampleId, int] = field(default_factory=dict)
    lengths: dict[SampleId, int] = field(default_factory=dict)
    """Tokens after which a sample ends; without an entry it goes on for ever; with a 0 it ends now."""
    refuses: set[SampleId] = field(default_factory=set)
    released: list[SampleId] = field(default_factory=list)
    load_results: list[Exception | None] = field(default_factory=list)
    """What the next loads come to."""
    loads: list[Version] = field(default_factory=list)
    polls: int = 0

    die_at: int | None = None
    """The poll of this number raises."""
    hang_at: int | None = None
    """The poll of this number does not return before `let_go` is set."""
    let_go: threading.Event = field(default_factory=threading.Event)
    busy: threading.Event | None = None
    """A poll computes until this is set."""
    slow: int = 1
    """Polls for each token."""
    garbage: dict[SampleId, Progress] = field(default_factory=dict)
    """What comes of a sample in place of its second token, once."""
    ignore_weights: bool = False
    """A load returns in order, and nothing has changed."""
    late: bool = False
    """A sample that has ended or was released gets one more token, and another end."""
    abort_raises: bool = False
    """A sample can't be taken back."""
    _gone: list[SampleId] = field(default_factory=list)
    """Of which a late word is still to come."""

    def add(self, request: Request) -> None:
        if request.sample in self.refuses:
            raise EngineError("it can never fit")
        self.held[request.sample], self.made[request.sample] = request, len(request.response)

    def release(self, samples: Collection[SampleId]) -> None:
        if self.abort_raises and samples:
            raise Boom("can't be taken back")
        self.released += samples
        for sample in samples:
            if self.held.pop(sample, None) is not None:
                self._gone.append(sample)

    def poll(self, timeout_s: float) -> list[Progress]:
        self.polls += 1
        if self.die_at is not None and self.polls >= self.die_at:
            raise Boom("engine")
        if self.hang_at is not None and self.polls >= self.hang_at:
            self.let_go.wait(HANGS_AT_MOST_S)
        while self.busy is not None and not self.busy.is_set():
            pass
        progress, self._gone = [self._word(s, True) for s in self._gone if self.late], []
        return progress if self.polls % self.slow else progress + [self._next(sample) for sample in list(self.held)]

    def _next(self, sample: SampleId) -> Progress:
        if self.made[sample] >= 1 and sample in self.garbage:
            return self.garbage.pop(sample)
        ended = self.made[sample] + 1 >= self.lengths.get(sample, 10**9)
        if ended:
            del self.held[sample]
            self._gone.append(sample)
        return self._word(sample, ended)

    def _word(self, sample: SampleId, ended: bool) -> Progress:
        self.made[sample] += 1
        token = np.array([self.made[sample]], np.int32)
        return Progress(sample, token, -token.astype(np.float32), "stop" if ended else None)

    def interrupt(self) -> None:
        return

    def load(self) -> Load:
        return Load(num_running=len(self.held))

    def load_weights(self, ref: SlotRef) -> None:
        assert not self.held
        self.loads.append(ref.version)
        result = self.load_results.pop(0) if self.load_results else None
        if result is not None:
            raise result
        if not self.ignore_weights:
            self.loaded = ref

    def golden(self) -> np.ndarray:
        return np.zeros(63, np.float32)
