"""An engine without a model: lengths and times of a profile, in real time, for runs of the whole system on few CPUs.

Owns: a fluid decoder and what of each sample it has not given out. Consumes: versions, of which it reads the manifest.
Waits for: in `poll`, the end of a sample, the time-out, or `interrupt`; in `load_weights`, the time a load takes.
Methods may be called from any thread; `add` and `release` wake a `poll` that waits.
Invariants:
* A sample's length and tokens depend on its key alone, so neither scheduling nor a change of replica alters them.
* `poll` gives out what ended, as soon as it ends; of samples that go on, all that is new, once in `timeout_s` and
  whenever it is interrupted or does not wait. `poll(0)` before a `release` leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from laminar.config import RolloutConfig
from laminar.decoding import FluidDecoder
from laminar.errors import EngineError
from laminar.rollout.engine import FloatArray, Progress, Request, TokenArray, WeightSource
from laminar.timing import Profile, keyed_uniform
from laminar.types import Load, SampleId, SlotRef

VOCABULARY = 32_000
_TEXT_TOKENS = 2**16
_RESOLUTION_S = 0.01
"""Ends that are closer together than this are given out together."""


@dataclass(slots=True)
class _Job:
    place: int
    """Of its first response token in the text that all samples are read from."""
    given: int
    """Response tokens that `poll` has given out, or that it came with."""
    length: int
    reason: str


class EmulatedEngine:
    """An `Engine` without a model. See `laminar.rollout.engine.Engine` for the methods' contracts."""

    def __init__(
        self,
        profile: Profile,
        config: RolloutConfig,
        seed: int,
        source: WeightSource,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            profile: of the hardware and the model
            config: `kv_tokens` (else the profile's) and `max_num_seqs`
            seed: of the run
            source: of the versions
            clock: real seconds
        """
        self._profile, self._seed, self._source = profile, seed, source
        self._clock, self._origin = clock, clock()
        self._decoder = FluidDecoder(profile, config.kv_tokens, config.max_num_seqs)
        self._jobs: dict[SampleId, _Job] = {}
        self._ended: list[Progress] = []
        self._given_out_at = self._origin
        self._interrupted = False
        self._loaded: SlotRef | None = None
        self._golden: FloatArray | None = None
        self._news = threading.Condition()
        """Guards everything above."""
        text = np.random.Philox(key=seed % 2**64).random_raw(_TEXT_TOKENS) % VOCABULARY
        self._text = np.concatenate((text, text)).astype(np.int32)
        self._zeros = np.zeros(_TEXT_TOKENS, np.float32)
        self._text.flags.writeable = self._zeros.flags.writeable = False

    @property
    def loaded(self) -> SlotRef | None:
        return self._loaded

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        with self._news:
            self._check(request)
            self._advance()
            sample, attempt, done = request.sample, request.attempt, len(request.response)
            limit = request.sampling.max_new_tokens
            length = self._profile.response_length(self._seed, *sample)
            reason = "stop" if length < limit else "length"
            place = int(keyed_uniform("text", self._seed, *sample, attempt) * _TEXT_TOKENS)
            if not self._jobs:
                self._given_out_at = self._clock()
            job = _Job(place, done, min(length, limit), reason)
            if job.length > done:
                self._jobs[sample] = job
                self._decoder.add(sample, len(request.prompt), done, job.length)
            else:
                self._ended.append(self._progress(sample, job, done, reason))
            self._news.notify_all()

    def release(self, samples: Collection[SampleId]) -> None:
        with self._news:
            self._advance()
            for sample in samples:
                if self._jobs.pop(sample, None) is not None:
                    self._decoder.remove(sample)
            gone = set(samples)
            self._ended = [progress for progress in self._ended if progress.sample not in gone]
            self._news.notify_all()

    def load(self) -> Load:
        with self._news:
            self._advance()
            decoder = self._decoder
            return Load(decoder.kv_used, decoder.kv_capacity, decoder.num_running, decoder.num_waiting)

    def _check(self, request: Request) -> None:
        if self._loaded is None:
            raise EngineError(f"sample {request.sample}: no weights are loaded")
        if request.sample in self._jobs:
            raise EngineError(f"sample {request.sample} is already here")
        if len(request.prompt) == 0:
            raise EngineError(f"sample {request.sample}: the prompt is empty")
        needed = len(request.prompt) + request.sampling.max_new_tokens
        if needed > self._decoder.kv_capacity or request.sampling.max_new_tokens > _TEXT_TOKENS:
            raise EngineError(
                f"sample {request.sample}: prompt and max_new_tokens need {needed} tokens; the KV cache holds "
                f"{self._decoder.kv_capacity} and a response at most {_TEXT_TOKENS}"
            )

    # ------------------------------------------------------------ time

    def poll(self, timeout_s: float) -> list[Progress]:
        with self._news:
            due = min(self._clock(), self._given_out_at) + timeout_s
            while True:
                self._advance()
                now = self._clock()
                if self._interrupted or now >= due:
                    return self._everything(now)
                if self._ended:
                    ended, self._ended = self._ended, []
                    return ended
                self._news.wait(min(due - now, max(_RESOLUTION_S, self._next_event_s(now))))

    def interrupt(self) -> None:
        """Make the `poll` that waits, or else the next one, return at once with everything that is new."""
        with self._news:
            self._interrupted = True
            self._news.notify_all()

    def _advance(self) -> None:
        """Bring the decoder to this moment."""
        for sample in self._decoder.advance(self._clock() - self._origin):
            job = self._jobs.pop(sample)
            self._ended.append(self._progress(sample, job, job.length, job.reason))

    def _next_event_s(self, now: float) -> float:
        """Real seconds until the decoder has to be looked at; without end if nothing runs."""
        at = self._decoder.next_event()
        return float("inf") if at is None else self._origin + at - now

    def _everything(self, now: float) -> list[Progress]:
        self._interrupted, self._given_out_at = False, now
        progress, self._ended = self._ended, []
        for sample, job in self._jobs.items():
            made = self._decoder.made(sample)
            if made > job.given:
                progress.append(self._progress(sample, job, made, None))
        return progress

    def _progress(self, sample: SampleId, job: _Job, made: int, reason: str | None) -> Progress:
        """The response tokens from those given out to number `made`."""
        start, count = (job.place + job.given) % _TEXT_TOKENS, made - job.given
        job.given = made
        tokens: TokenArray = self._text[start : start + count]
        return Progress(sample, tokens, self._zeros[:count], reason)

    # ------------------------------------------------------------ weights

    def load_weights(self, ref: SlotRef) -> None:
        if self._jobs or self._ended:
            raise EngineError(f"version {ref.version} can't be loaded while requests are here")
        with self._source.lease(ref) as lease:
            self._loaded = None
            golden = np.array(lease.golden, dtype=np.float32)
            time.sleep(self._profile.load_s())
        self._golden, self._loaded = golden, ref

    def golden(self) -> FloatArray:
        if self._loaded is None or self._golden is None:
            raise EngineError("no weights are loaded")
        return self._golden
