"""Simulated time: what happens first, and what does not happen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.errors import ProtocolError
from laminar.sim.kernel import MESSAGE, TICK, Kernel


def run(kernel: Kernel) -> None:
    while kernel.step():
        pass


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([MESSAGE, TICK])), max_size=30))
def test_actions_run_by_time_then_priority_then_order_of_setting(times: list[tuple[int, int]]) -> None:
    kernel, seen = Kernel(), []
    for number, (time, priority) in enumerate(times):
        kernel.at(time, lambda key=(time, priority, number): seen.append((kernel.now, key)), priority)  # type: ignore[misc]
    run(kernel)
    assert [key for _, key in seen] == sorted((t, p, n) for n, (t, p) in enumerate(times))
    assert all(now == key[0] for now, key in seen)
    assert kernel.num_events == len(times)


def test_what_an_action_sets_for_the_same_instant_comes_after_what_was_there() -> None:
    kernel, seen = Kernel(), []
    kernel.at(1, lambda: kernel.after(0, lambda: seen.append("later")))
    kernel.at(1, lambda: seen.append("first"))
    run(kernel)
    assert seen == ["first", "later"] and kernel.now == 1


def test_a_cancelled_timer_does_not_run_and_one_that_has_run_can_be_cancelled() -> None:
    kernel, seen = Kernel(), []
    ran, cancelled = kernel.at(1, lambda: seen.append(1)), kernel.at(2, lambda: seen.append(2))
    kernel.cancel(cancelled)
    kernel.cancel(None)
    run(kernel)
    kernel.cancel(ran)
    assert seen == [1] and kernel.now == 1


def test_the_past_is_refused_and_the_future_can_be_cleared() -> None:
    kernel = Kernel()
    kernel.at(1, lambda: None)
    assert kernel.step()
    with pytest.raises(ProtocolError):
        kernel.at(0.5, lambda: None)
    kernel.at(2, lambda: None)
    kernel.clear()
    assert not kernel.step() and kernel.now == 1
