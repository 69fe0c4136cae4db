"""Messages that take time: in order from one sender to one receiver, and sometimes only the second time."""

from __future__ import annotations

from random import Random

from laminar.sim.kernel import Action, Kernel
from laminar.sim.plan import Delays


class Link:
    """One direction between two processes. What is sent arrives once, in the order of sending."""

    def __init__(self, kernel: Kernel, random: Random, delays: Delays, longest_s: float) -> None:
        self._kernel, self._random, self._delays, self._longest_s = kernel, random, delays, longest_s
        self._last = 0.0

    def send(self, action: Action) -> None:
        """Run `action` when the message arrives."""
        self._last = max(self._last, self._kernel.now + self._seconds())
        self._kernel.at(self._last, action)

    def lost(self) -> bool:
        """Whether the answer to what has just arrived gets lost."""
        return self._delays.loss > 0 and self._random.random() < self._delays.loss

    def _seconds(self) -> float:
        seconds = self._longest_s
        if self._delays.jitter:
            seconds *= self._random.random()
        if self.lost():  # the receiver hears of it when it asks again
            seconds += self._delays.retry_s
        return seconds
