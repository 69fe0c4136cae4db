"""Messages that take time: in order from one sender to one receiver, and sometimes only the second time."""

from __future__ import annotations

from random import Random

from laminar.sim.kernel import Action, Kernel
from laminar.sim.plan import Delays


class Link:
    """One direction between two processes. What is sent arrives once, in the order of sending."""

    def __init__(self, kernel: Kernel, random: Random, delays: Delays, longest_s: float) -> None:
        self._kernel, self._random, self._delays, self._longest_s = kernel, random, delays, longest_s
        self._last = self._held_until = 0.0
        self._waiting: list[Action] = []
        """What would have arrived while the link was held."""

    def send(self, action: Action) -> None:
        """Run `action` when the message arrives."""
        self._last = max(self._last, self._kernel.now + self._seconds())
        self._kernel.at(self._last, lambda: self._arrive(action))

    @property
    def held(self) -> bool:
        return self._kernel.now < self._held_until

    def hold(self, until: float) -> None:
        """Let nothing arrive before `until`: the receiver is stopped, or all attempts until then are lost."""
        if until > self._held_until:
            self._held_until = until
            self._kernel.at(until, self._release)

    def _arrive(self, action: Action) -> None:
        if self.held or self._waiting:
            self._waiting.append(action)
        else:
            action()

    def _release(self) -> None:
        while self._waiting and not self.held:
            self._waiting.pop(0)()

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
