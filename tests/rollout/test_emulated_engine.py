"""What the emulated engine adds to the contract of engines: the lengths, times and room of a profile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from laminar.config import RolloutConfig
from laminar.errors import VersionGone
from laminar.rollout.emulated_engine import EmulatedEngine
from laminar.rollout.engine import Progress, Request
from laminar.timing import load_profile
from laminar.types import Load, SampleId, Sampling, SlotRef, Version

DEADLINE_S = 30.0
TOY = load_profile("toy")
EVEN = replace(TOY, step_s_per_sequence=0.0, step_s_per_kv_token=0.0, prefill_tokens_per_s=1e12, load_weights_s=0.0)
"""A hundred tokens a second for each sequence, whatever else runs."""


@dataclass
class Clock:
    """Real seconds, moved by hand."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Shelf:
    """Versions without bytes."""

    def __init__(self) -> None:
        self.gone: set[Version] = set()

    @contextmanager
    def lease(self, ref: SlotRef) -> Iterator[SimpleNamespace]:
        if ref.version in self.gone:
            raise VersionGone(f"version {ref.version}")
        yield SimpleNamespace(golden=(0.0,) * 63)


def ref(number: int) -> SlotRef:
    return SlotRef("slot", Version(0, number), str(number), "fp32")


def make(clock: Clock | None = None, *, time_scale: float = 1.0, **rollout: int) -> EmulatedEngine:
    config = RolloutConfig(**{"max_num_seqs": 8} | rollout)
    clocks = {} if clock is None else {"clock": clock}
    engine = EmulatedEngine(EVEN.faster(time_scale), config, 0, Shelf(), **clocks)
    engine.load_weights(ref(0))
    return engine


def ask(group: int, index: int = 0, *, attempt: int = 0, done: int = 0, max_new_tokens: int = 200) -> Request:
    ids = np.zeros(10, np.int32), np.zeros(done, np.int32)
    return Request(SampleId(group, index), attempt, *ids, Sampling(max_new_tokens=max_new_tokens))


def length(group: int, index: int = 0) -> int:
    return EVEN.response_length(0, group, index)


def summary(progress: list[Progress]) -> dict[int, tuple[int, str | None]]:
    return {p.sample.group: (len(p.tokens), p.finish_reason) for p in progress}


def test_lengths_are_those_of_the_profile() -> None:
    clock = Clock()
    engine = make(clock)
    for group in range(6):
        engine.add(ask(group))
    clock.now += 3
    assert summary(engine.poll(0.0)) == {group: (length(group), "stop") for group in range(6)}


def test_a_response_is_cut_at_max_new_tokens() -> None:
    clock = Clock()
    engine = make(clock)
    engine.add(ask(0, max_new_tokens=length(0) - 1))
    engine.add(ask(1, max_new_tokens=length(1)))
    clock.now += 3
    assert summary(engine.poll(0.0)) == {0: (length(0) - 1, "length"), 1: (length(1), "length")}


def test_time_runs_faster_by_the_scale() -> None:
    clock = Clock()
    engine = make(clock, time_scale=50)
    engine.add(ask(0))
    clock.now += (length(0) - 1) * 0.01 / 50
    assert summary(engine.poll(0.0)) == {0: (length(0) - 1, None)}
    clock.now += 0.011 / 50
    assert summary(engine.poll(0.0)) == {0: (1, "stop")}


def test_tokens_depend_on_the_key_and_the_attempt() -> None:
    """Invariant 9: wherever a look divides it, a response is the same; a restart is another one."""
    clock = Clock()
    looks: list[list[int]] = []
    for times, attempt in (((5.0,), 0), ((0.03, 0.07, 0.11, 5.0), 0), ((5.0,), 1)):
        engine, tokens = make(clock), []
        engine.add(ask(3, 4, attempt=attempt))
        for step in times:
            clock.now += step
            tokens += [token for p in engine.poll(0.0) for token in p.tokens.tolist()]
        looks.append(tokens)
    assert looks[0] == looks[1] and len(looks[0]) == len(looks[2]) == length(3, 4)
    assert looks[0] != looks[2]


def test_the_youngest_gives_way_and_comes_back() -> None:
    """Keys and values are bounded; nobody loses a token, and the load says who waits."""
    clock, most = Clock(), 0
    engine = make(clock, kv_tokens=300, max_num_seqs=8)
    for group in range(8):
        engine.add(ask(group))
    made, waited = dict.fromkeys(range(8), 0), 0
    ended: set[int] = set()
    for _ in range(200):
        clock.now += 0.05
        for p in engine.poll(0.0):
            made[p.sample.group] += len(p.tokens)
            ended |= {p.sample.group} if p.finish_reason else set()
        load = engine.load()
        most, waited = max(most, load.kv_used), max(waited, load.num_waiting)
    assert ended == set(range(8))
    assert made == {group: length(group) for group in range(8)}
    assert 200 < most <= 300 and waited > 0
    assert engine.load() == Load(0, 300, 0, 0)


def test_release_after_a_look_leaves_nothing_behind() -> None:
    """The new owner goes on where the store's prefix ends, and pays the prefill only."""
    clock = Clock()
    source, destination = make(clock), make(clock)
    source.add(ask(0))
    clock.now += 0.055
    (flushed,) = source.poll(0.0)
    source.release([SampleId(0, 0)])
    assert len(flushed.tokens) == 5 and source.load() == Load(0, 1000, 0, 0)
    destination.add(ask(0, done=5))
    assert destination.load().kv_used == 15
    clock.now += (length(0) - 5) * 0.01 + 1e-6
    (rest,) = destination.poll(0.0)
    assert (len(rest.tokens), rest.finish_reason) == (length(0) - 5, "stop")


def test_an_end_is_given_out_alone_and_the_others_once_in_a_time_out() -> None:
    clock = Clock()
    engine = make(clock)
    short, long = sorted((0, 1), key=length)
    timeout_s = 0.005 * (length(short) + length(long))
    for group in (short, long):
        engine.add(ask(group))
    clock.now += length(short) * 0.01 + 1e-6
    assert summary(engine.poll(timeout_s)) == {short: (length(short), "stop")}
    clock.now += timeout_s - length(short) * 0.01
    assert summary(engine.poll(timeout_s)) == {long: (int(timeout_s / 0.01), None)}


def in_thread(engine: EmulatedEngine) -> tuple[threading.Thread, list[Progress]]:
    """A thread that polls, to wait for as long as a test may take."""
    found: list[Progress] = []
    thread = threading.Thread(target=lambda: found.extend(engine.poll(10 * DEADLINE_S)), daemon=True)
    thread.start()
    return thread, found


@pytest.mark.parametrize("first", ["poll", "interrupt"])
def test_an_interrupt_ends_the_wait(first: str) -> None:
    engine = make(time_scale=1e-3)
    engine.add(ask(0))
    if first == "interrupt":
        engine.interrupt()
    thread, found = in_thread(engine)
    if first == "poll":
        engine.interrupt()
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and found == []


def test_a_request_wakes_a_poll_that_waits() -> None:
    engine = make(time_scale=100.0)
    thread, found = in_thread(engine)
    engine.add(ask(0))
    thread.join(DEADLINE_S)
    assert summary(found) == {0: (length(0), "stop")}


def test_a_version_that_is_gone_leaves_the_weights() -> None:
    shelf = Shelf()
    engine = EmulatedEngine(EVEN, RolloutConfig(), 0, shelf)
    engine.load_weights(ref(0))
    shelf.gone.add(Version(0, 1))
    with pytest.raises(VersionGone):
        engine.load_weights(ref(1))
    assert engine.loaded == ref(0)
