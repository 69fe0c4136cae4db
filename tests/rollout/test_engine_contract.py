"""What every engine promises through the Protocol alone (docs/engines.md), checked for each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from laminar.config import RolloutConfig
from laminar.errors import EngineError, VersionGone
from laminar.rollout.emulated_engine import EmulatedEngine
from laminar.rollout.engine import Engine, Request
from laminar.timing import load_profile
from laminar.types import Load, SampleId, SlotRef, Version
from tests.rollout.conftest import Bench, generate, published, random_prompt, request

KV_TOKENS = 200
LONGEST = 24


@dataclass
class GoldenOnly:
    """A lease on weights that nobody reads."""

    golden: Sequence[float] = (0.0,) * 63


class Shelf:
    """Versions without bytes; those that are gone are refused, as the slots do."""

    def __init__(self) -> None:
        self.gone: set[Version] = set()

    @contextmanager
    def lease(self, ref: SlotRef) -> Iterator[GoldenOnly]:
        if ref.version in self.gone:
            raise VersionGone(f"version {ref.version}")
        yield GoldenOnly()


@dataclass
class Subject:
    """An engine without weights, and versions for it."""

    engine: Engine
    ref: Callable[[int], SlotRef]

    def loaded(self) -> Engine:
        self.engine.load_weights(self.ref(0))
        return self.engine


@pytest.fixture(params=["torch", "emulated"])
def subject(request: pytest.FixtureRequest, make_bench: Callable[[str], Bench]) -> Subject:
    config = RolloutConfig(kv_tokens=KV_TOKENS, max_num_seqs=3)
    if request.param == "torch":
        bench = make_bench("llama tied grouped")
        engine = bench.engine(load=False, kv_tokens=KV_TOKENS, max_num_seqs=3)
        return Subject(engine, lambda number: bench.source.write(number, published(bench.model)))
    emulated = EmulatedEngine(load_profile("toy").faster(1e5), config, 0, Shelf())
    return Subject(emulated, lambda number: SlotRef("slot", Version(0, number), f"{number}", "fp32"))


def ask(group: int, index: int = 0, *, done: Sequence[int] = (), prompt: int = 5) -> Request:
    return request(group, index, random_prompt(group, prompt), response=done, max_new_tokens=LONGEST)


def test_nothing_works_before_weights_are_loaded(subject: Subject) -> None:
    engine = subject.engine
    assert engine.loaded is None
    with pytest.raises(EngineError, match="no weights"):
        engine.add(ask(0))
    with pytest.raises(EngineError, match="no weights"):
        engine.golden()
    engine.load_weights(subject.ref(3))
    assert engine.loaded is not None and engine.loaded.version == Version(0, 3)
    golden = engine.golden()
    assert golden.dtype == np.float32 and golden.shape == (63,)


def test_a_response_is_one_run_of_tokens_with_an_end(subject: Subject) -> None:
    responses = generate(subject.loaded(), [ask(group) for group in range(5)])
    for response in responses.values():
        assert 1 <= len(response.tokens) == len(response.logprobs) <= LONGEST
        assert response.finish_reason == ("length" if len(response.tokens) == LONGEST else "stop")
    assert len({tuple(response.tokens) for response in responses.values()}) == 5
    load = subject.engine.load()
    assert (load.kv_used, load.num_running, load.num_waiting) == (0, 0, 0)
    assert subject.engine.poll(0.0) == []


def test_scheduling_does_not_change_samples(subject: Subject) -> None:
    """Invariant 9: alone, among others, with few places and little room for keys and values."""
    engine = subject.loaded()
    together = generate(engine, [ask(group, index, prompt=30) for group in range(3) for index in range(3)])
    for sample, response in together.items():
        assert generate(engine, [ask(*sample, prompt=30)])[sample].tokens == response.tokens


@pytest.mark.parametrize("done", [1, 7])
def test_a_response_that_was_begun_elsewhere_goes_on(subject: Subject, done: int) -> None:
    """Invariant 9: the prefix is not made again, what follows is what would have followed."""
    engine, sample = subject.loaded(), SampleId(1, 2)
    whole = generate(engine, [ask(1, 2)])[sample]
    rest = generate(engine, [ask(1, 2, done=whole.tokens[:done])])[sample]
    assert rest.tokens == whole.tokens[done:]
    assert rest.finish_reason == whole.finish_reason


def test_a_response_that_was_complete_ends_at_once(subject: Subject) -> None:
    engine, sample = subject.loaded(), SampleId(1, 2)
    whole = generate(engine, [ask(1, 2)])[sample]
    again = generate(engine, [ask(1, 2, done=whole.tokens)], max_steps=1)[sample]
    assert (again.tokens, again.finish_reason) == ([], whole.finish_reason)


def test_release_in_any_state(subject: Subject) -> None:
    """Running, waiting, unknown: the others go on as if nothing had been there."""
    engine = subject.loaded()
    expected = generate(engine, [ask(0)])[SampleId(0, 0)]
    for group in range(5):
        engine.add(ask(group))
    engine.release([SampleId(1, 0), SampleId(4, 0), SampleId(99, 0)])
    assert engine.load().num_running + engine.load().num_waiting <= 3
    engine.release([SampleId(group, 0) for group in range(5)])
    assert engine.load() == Load(0, KV_TOKENS, 0, 0)
    assert engine.poll(0.0) == []
    assert generate(engine, [ask(0)])[SampleId(0, 0)].tokens == expected.tokens


def test_requests_that_can_not_be_served_are_refused(subject: Subject) -> None:
    engine = subject.loaded()
    with pytest.raises(EngineError, match="the prompt is empty"):
        engine.add(request(0, 0, []))
    with pytest.raises(EngineError, match="KV cache holds 200"):
        engine.add(request(0, 0, random_prompt(0, 30), max_new_tokens=180))
    engine.add(ask(0))
    with pytest.raises(EngineError, match="is already here"):
        engine.add(ask(0))


def test_weights_stay_while_requests_are_here(subject: Subject) -> None:
    """Invariant 1."""
    engine = subject.loaded()
    engine.add(ask(0))
    with pytest.raises(EngineError, match="while requests are here"):
        engine.load_weights(subject.ref(1))
    assert engine.loaded is not None and engine.loaded.version == Version(0, 0)
    engine.release([SampleId(0, 0)])
    engine.load_weights(subject.ref(1))
    assert engine.loaded.version == Version(0, 1)
