"""A fluid model of one replica's continuous batching: what a profile says about many sequences at once.

Between two events (a sequence ends, or keys and values are full) all running sequences advance at one rate, which
falls as they grow; so the work is a few operations an event, not a token. Used with simulated and with real time:
whoever holds a `FluidDecoder` moves its clock.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from heapq import heappop, heappush
from math import floor, sqrt

from laminar.timing import Profile
from laminar.types import SampleId

ADMISSION_HEADROOM = 16
"""Tokens that each running sequence must still be able to grow by when another is admitted."""
_ROUNDING = 1e-6
"""Steps: far below one token, far above what sums of floats lose."""


@dataclass(slots=True)
class _Sequence:
    sample: SampleId
    arrival: int
    prompt: int
    done: int
    """Response tokens when it last began to wait or to run."""
    length: int
    """Response tokens when it ends."""
    running: bool = False
    began: float = 0.0
    """The decoder's step at which it began to run."""

    @property
    def ends(self) -> float:
        return self.began + self.length - self.done


class FluidDecoder:
    """Sequences of one replica, the oldest admitted first, the youngest preempted when keys and values are full.

    Prefill, of new sequences and of those that come back, holds up all others.

    Invariants: running sequences hold at most `kv_tokens` together, unless one alone does; at most `max_num_seqs` run;
    a sequence gains one token a decode step and never loses a whole one.
    """

    def __init__(self, profile: Profile, kv_tokens: int | None = None, max_num_seqs: int | None = None) -> None:
        """At time 0 and empty. `kv_tokens` and `max_num_seqs` are those of the profile unless given."""
        self.profile = profile
        self.kv_capacity = kv_tokens or profile.kv_tokens
        self.max_num_seqs = max_num_seqs or profile.max_num_seqs
        self.now = 0.0
        """Seconds"""
        self.num_preempted = 0
        self.reprefilled_tokens = 0
        """Tokens whose keys and values had to be made again after a preemption."""
        self.busy_s = 0.0
        """Seconds in which something was running."""
        self.decoded_tokens = 0.0
        self.kv_token_s = 0.0
        """Integral of the tokens held over time."""
        self._sequences: dict[SampleId, _Sequence] = {}
        self._waiting: list[_Sequence] = []
        """By arrival"""
        self._ends: list[tuple[float, int, _Sequence]] = []
        """Heap; entries of sequences that have left, or have begun anew, are passed over."""
        self._num_running = 0
        self._kv = 0.0
        self._steps = 0.0
        self._prefill_s = 0.0
        """Prefill that is still to be done before decoding goes on."""
        self._arrivals = 0
        self._next_at: float | None = None
        """When something happens next; None if that has to be worked out again."""

    def __contains__(self, sample: SampleId) -> bool:
        return sample in self._sequences

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_used(self) -> int:
        """Tokens"""
        return round(self._kv)

    def add(self, sample: SampleId, prompt: int, done: int, length: int) -> None:
        """Queue a sequence at the present time.

        Args:
            prompt: tokens
            done: response tokens that are there already; they are prefilled with the prompt
            length: response tokens at which it ends, more than `done`
        """
        sequence = _Sequence(sample, self._arrivals, prompt, done, length)
        self._arrivals += 1
        self._sequences[sample] = sequence
        self._waiting.append(sequence)
        self._admit()

    def remove(self, sample: SampleId) -> None:
        """Forget a sequence in any state, at the present time."""
        sequence = self._sequences.pop(sample)
        if sequence.running:
            self._stop(sequence)
        else:
            self._waiting.remove(sequence)
        self._admit()

    def made(self, sample: SampleId) -> int:
        """Response tokens of a sequence at the present time, those it came with included."""
        sequence = self._sequences[sample]
        if not sequence.running:
            return sequence.done
        return min(sequence.length, sequence.done + floor(self._steps - sequence.began + _ROUNDING))

    def next_event(self) -> float | None:
        """When something happens next: a sequence ends, or is preempted. None with nothing running."""
        if not self._num_running:
            return None
        if self._next_at is None:
            self._next_at = self.now + self._prefill_s + self._duration(self._next_event()[0])
        return self._next_at

    def advance(self, until: float) -> list[SampleId]:
        """Move the clock. Returns the sequences that have ended, in order; they are forgotten."""
        ended: list[SampleId] = []
        while (at := self.next_event()) is not None:
            decoding_from = self.now + self._prefill_s
            if decoding_from > until:
                self._hold(max(0.0, until - self.now))
                self._prefill_s = decoding_from - until
                break
            self._hold(self._prefill_s)
            self._prefill_s = 0.0
            if at > until:
                self._decode(self._steps_within(until - decoding_from), until - decoding_from)
                break
            steps, is_end = self._next_event()
            at = max(at, decoding_from)
            self._decode(steps, at - decoding_from)
            self.now = at
            if is_end:
                ended.append(self._end())
            else:
                self._preempt()
            self._admit()
        else:
            self._prefill_s = max(0.0, self.now + self._prefill_s - until)
        self.now = max(self.now, until)
        return ended

    # ------------------------------------------------------------ events

    def _next_event(self) -> tuple[float, bool]:
        """Steps to it, and whether it is the end of a sequence (else keys and values are full)."""
        self._drop_stale_ends()
        to_end = max(0.0, self._ends[0][0] - self._steps)
        if self._num_running > 1:
            to_full = max(0.0, self.kv_capacity - self._kv) / self._num_running
            if to_full < to_end:
                return to_full, False
        return to_end, True

    def _end(self) -> SampleId:
        at, _, sequence = heappop(self._ends)
        self._steps = at
        self._stop(sequence)
        del self._sequences[sequence.sample]
        return sequence.sample

    def _preempt(self) -> None:
        youngest = max((s for s in self._sequences.values() if s.running), key=lambda s: s.arrival)
        made = self.made(youngest.sample)
        self._stop(youngest)
        youngest.done = made
        insort(self._waiting, youngest, key=lambda s: s.arrival)
        self.num_preempted += 1
        self.reprefilled_tokens += youngest.prompt + youngest.done

    def _admit(self) -> None:
        """Let waiting sequences run, oldest first, while there is a place and room for them."""
        while self._waiting and self._num_running < self.max_num_seqs:
            first = self._waiting[0]
            tokens = first.prompt + first.done
            room = self.kv_capacity - self._kv - ADMISSION_HEADROOM * (self._num_running + 1)
            if self._num_running and tokens > room:
                return
            self._waiting.pop(0)
            first.running, first.began = True, self._steps
            self._num_running += 1
            self._next_at = None
            self._kv += tokens
            self._prefill_s += self.profile.prefill_s(tokens)
            heappush(self._ends, (first.ends, first.arrival, first))

    def _stop(self, sequence: _Sequence) -> None:
        """Take a sequence off the running ones, with its keys and values. What it gained since `began` is `made`."""
        since = self._steps - sequence.began
        held = sequence.length if since >= sequence.length - sequence.done else sequence.done + since
        sequence.running = False
        self._num_running -= 1
        self._next_at = None
        self._kv = self._kv - sequence.prompt - held if self._num_running else 0.0

    def _drop_stale_ends(self) -> None:
        while self._ends and not (self._ends[0][2].running and self._ends[0][2].ends == self._ends[0][0]):
            heappop(self._ends)

    # ------------------------------------------------------------ the rate

    def _hold(self, seconds: float) -> None:
        """Prefill: what is held stays as it is."""
        self.busy_s += seconds
        self.kv_token_s += seconds * self._kv

    def _decode(self, steps: float, seconds: float) -> None:
        tokens = steps * self._num_running
        self.busy_s += seconds
        self.kv_token_s += seconds * (self._kv + tokens / 2)
        self.decoded_tokens += tokens
        self._steps += steps
        self._kv += tokens

    def _duration(self, steps: float) -> float:
        """Seconds of so many steps with what is running now, growing."""
        first = self.profile.decode_step_s(self._num_running, self._kv)
        return steps * (first + self._growth() * steps)

    def _steps_within(self, seconds: float) -> float:
        """Inverse of `_duration`."""
        first = self.profile.decode_step_s(self._num_running, self._kv)
        return 2 * seconds / (first + sqrt(first * first + 4 * self._growth() * seconds))

    def _growth(self) -> float:
        return self.profile.step_s_per_kv_token * self._num_running / 2
