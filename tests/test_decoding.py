"""The fluid model of a replica: round numbers, and properties against one that goes token by token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.decoding import ADMISSION_HEADROOM, FluidDecoder
from laminar.timing import load_profile
from laminar.types import SampleId

TOY = load_profile("toy")
EVEN = replace(TOY, step_s=0.01, step_s_per_sequence=0.0, step_s_per_kv_token=0.0, prefill_tokens_per_s=1e12)
"""A hundred tokens a second for each sequence, whatever else runs."""


def sample(number: int) -> SampleId:
    return SampleId(number, 0)


def ends(decoder: FluidDecoder) -> list[tuple[int, float]]:
    """Run to the end: (group, time) of each sequence."""
    found = []
    while (at := decoder.next_event()) is not None:
        found += [(ended.group, decoder.now) for ended in decoder.advance(at)]
    return found


def test_one_sequence_gains_a_token_a_step() -> None:
    decoder = FluidDecoder(EVEN)
    decoder.add(sample(1), prompt=10, done=0, length=50)
    assert decoder.next_event() == pytest.approx(0.5)
    assert decoder.advance(0.205) == []
    assert (decoder.made(sample(1)), decoder.kv_used, decoder.num_running) == (20, 30, 1)
    assert decoder.advance(0.6) == [sample(1)]
    assert (decoder.now, decoder.kv_used, decoder.num_running, sample(1) in decoder) == (0.6, 0, 0, False)


def test_a_sequence_that_goes_on_pays_its_prefill_and_no_more() -> None:
    decoder = FluidDecoder(replace(EVEN, prefill_tokens_per_s=100))
    decoder.add(sample(1), prompt=10, done=30, length=50)
    assert decoder.next_event() == pytest.approx(0.4 + 0.2)
    decoder.advance(0.4)
    assert decoder.made(sample(1)) == 30
    assert decoder.advance(0.61) == [sample(1)]


def test_prefill_holds_up_the_others() -> None:
    decoder = FluidDecoder(replace(EVEN, prefill_tokens_per_s=100))
    decoder.add(sample(1), prompt=10, done=0, length=20)
    decoder.advance(0.2)
    decoder.add(sample(2), prompt=50, done=0, length=100)
    assert [group for group, _ in ends(decoder)] == [1, 2]
    decoder = FluidDecoder(replace(EVEN, prefill_tokens_per_s=100))
    decoder.add(sample(1), prompt=10, done=0, length=20)
    decoder.advance(0.2)
    decoder.add(sample(2), prompt=50, done=0, length=100)
    assert decoder.next_event() == pytest.approx(0.1 + 0.2 + 0.5)


def test_steps_last_longer_with_more_sequences_and_more_tokens() -> None:
    """Two sequences of 100 tokens from a prompt of 10: the sum over the steps, to the size of one."""
    decoder = FluidDecoder(replace(TOY, prefill_tokens_per_s=1e12))
    for number in (1, 2):
        decoder.add(sample(number), prompt=10, done=0, length=100)
    expected = sum(0.010 + 2 * 0.001 + 0.00001 * 2 * (10 + token) for token in range(100))
    assert [at for _, at in ends(decoder)] == pytest.approx([expected, expected], abs=0.014)


def test_the_youngest_waits_when_keys_and_values_are_full() -> None:
    decoder = FluidDecoder(EVEN, kv_tokens=200)
    for number in (1, 2):
        decoder.add(sample(number), prompt=10, done=0, length=150)
    decoder.advance(0.85)
    assert (decoder.num_running, decoder.num_waiting, decoder.num_preempted) == (2, 0, 0)
    decoder.advance(0.95)
    assert (decoder.num_running, decoder.num_waiting, decoder.num_preempted) == (1, 1, 1)
    assert (decoder.made(sample(1)), decoder.made(sample(2)), decoder.kv_used) == (95, 90, 105)
    assert ends(decoder) == [(1, pytest.approx(1.5)), (2, pytest.approx(1.5 + 0.6))]
    assert decoder.reprefilled_tokens == 100


def test_places_are_given_to_the_oldest() -> None:
    decoder = FluidDecoder(EVEN, max_num_seqs=2)
    for number, length in ((1, 30), (2, 10), (3, 10), (4, 10)):
        decoder.add(sample(number), prompt=1, done=0, length=length)
    assert (decoder.num_running, decoder.num_waiting) == (2, 2)
    assert [group for group, _ in ends(decoder)] == [2, 3, 1, 4]


def test_removed_sequences_make_room() -> None:
    decoder = FluidDecoder(EVEN, max_num_seqs=1)
    for number in (1, 2, 3):
        decoder.add(sample(number), prompt=1, done=0, length=10)
    decoder.remove(sample(2))
    decoder.remove(sample(1))
    assert (decoder.num_running, decoder.num_waiting, decoder.kv_used) == (1, 0, 1)
    assert [group for group, _ in ends(decoder)] == [3]


# ---------------------------------------------------------------- properties


@dataclass
class TokenByToken:
    """The same rules, a step at a time: slow and plain."""

    kv_tokens: int
    max_num_seqs: int
    now: float = 0.0
    running: list[list[int]] = field(default_factory=list)
    """[number, prompt, made, length], oldest first"""
    waiting: list[list[int]] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)

    def run(self) -> None:
        while self.running or self.waiting:
            while self.waiting and len(self.running) < self.max_num_seqs:
                tokens = self.waiting[0][1] + self.waiting[0][2]
                used = sum(s[1] + s[2] for s in self.running)
                if self.running and used + tokens + ADMISSION_HEADROOM * (len(self.running) + 1) > self.kv_tokens:
                    break
                self.now += tokens / TOY.prefill_tokens_per_s
                self.running = sorted([*self.running, self.waiting.pop(0)])
            used = sum(s[1] + s[2] for s in self.running)
            if len(self.running) > 1 and used + len(self.running) > self.kv_tokens:
                self.waiting = sorted([*self.waiting, self.running.pop()])
                continue
            self.now += TOY.decode_step_s(len(self.running), used)
            for sequence in self.running:
                sequence[2] += 1
                if sequence[2] == sequence[3]:
                    self.ended[sequence[0]] = self.now
            self.running = [s for s in self.running if s[2] < s[3]]


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(1, 120)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(230, 1000), st.integers(1, 12))
def test_as_token_by_token(sequences: list[tuple[int, int, int]], kv_tokens: int, max_num_seqs: int) -> None:
    """The same ends, within a few steps for each time that somebody was preempted."""
    decoder, plain = FluidDecoder(TOY, kv_tokens, max_num_seqs), TokenByToken(kv_tokens, max_num_seqs)
    for number, (prompt, done, more) in enumerate(sequences):
        decoder.add(sample(number), prompt, done, done + more)
        plain.waiting.append([number, prompt, done, done + more])
    plain.run()
    fluid = dict(ends(decoder))
    assert fluid.keys() == plain.ended.keys()
    tolerance = 0.05 + 0.1 * decoder.num_preempted
    assert max(fluid.values()) == pytest.approx(max(plain.ended.values()), rel=0.02, abs=tolerance)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(230, 600), st.integers(1, 12), st.lists(st.floats(0.001, 0.5), max_size=30), st.data())
def test_bounds_hold_and_no_token_is_lost(
    sequences: list[tuple[int, int, int]], kv_tokens: int, max_num_seqs: int, waits: list[float], data: st.DataObject
) -> None:
    """Looking at any moment changes nothing, made tokens never shrink, and the bounds hold between events too."""
    decoder, untouched = FluidDecoder(TOY, kv_tokens, max_num_seqs), FluidDecoder(TOY, kv_tokens, max_num_seqs)
    made = {}
    for number, (prompt, done, more) in enumerate(sequences):
        for one in (decoder, untouched):
            one.add(sample(number), prompt, done, done + more)
        made[number] = done
    looked_at: dict[int, float] = {}
    for wait in waits:
        looked_at |= {ended.group: decoder.now for ended in decoder.advance(decoder.now + wait)}
        assert decoder.num_running <= max_num_seqs
        assert decoder.num_running <= 1 or decoder.kv_used <= kv_tokens
        for number in made.keys() - looked_at.keys():
            now = decoder.made(sample(number))
            assert made[number] <= now <= sum(sequences[number][1:])
            made[number] = now
    rest, expected = dict(ends(decoder)), dict(ends(untouched))
    assert sorted([*looked_at, *rest]) == list(range(len(sequences)))
    assert rest == pytest.approx({group: expected[group] for group in rest}, abs=0.02)
    assert decoder.kv_used == 0 and decoder.num_waiting == 0
