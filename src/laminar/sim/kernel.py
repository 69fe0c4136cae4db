"""Simulated time: a heap of (time, priority, sequence, action). Nothing sleeps, and one order holds everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from laminar.errors import ProtocolError

Action = Callable[[], None]

MESSAGE, TICK = 0, 1
"""Priorities: of what happens at one instant, messages come before the judgement that nothing has come."""


@dataclass(slots=True, eq=False)
class Timer:
    """Something that is going to happen. `action` is None once it has, or has been cancelled."""

    time: float
    action: Action | None


class Kernel:
    """The clock and what is to come. Actions of one time and priority run in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds"""
        self.num_events = 0
        """Actions that have run."""
        self._heap: list[tuple[float, int, int, Timer]] = []
        self._sequence = 0

    def at(self, time: float, action: Action, priority: int = MESSAGE) -> Timer:
        """Run `action` at `time`. Raises ProtocolError if that has passed."""
        if time < self.now:
            raise ProtocolError(f"{time} is before {self.now}")
        timer = Timer(time, action)
        self._sequence += 1
        heappush(self._heap, (time, priority, self._sequence, timer))
        return timer

    def after(self, seconds: float, action: Action, priority: int = MESSAGE) -> Timer:
        return self.at(self.now + seconds, action, priority)

    @staticmethod
    def cancel(timer: Timer | None) -> None:
        """What has run, or was never set, is no matter."""
        if timer is not None:
            timer.action = None

    def clear(self) -> None:
        """Forget everything that is to come."""
        self._heap.clear()

    def step(self) -> bool:
        """Go to the next action and run it. False: there is none."""
        while self._heap:
            time, _, _, timer = heappop(self._heap)
            if timer.action is None:
                continue
            self.now = time
            action, timer.action = timer.action, None
            self.num_events += 1
            action()
            return True
        return False
