"""What this machine can do at best, measured in the process that is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from laminar.rollout.kernels import Linear

_RUNS = 7
_ROWS, _FEATURES = 512, 2048
_COPY_BYTES = 1 << 28
"""Beyond every cache."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Peak rates with the threads that torch has at the moment."""

    matmul_flops_per_s: float
    """Of a linear layer of 2,048 x 2,048 on 512 rows."""
    memory_bytes_per_s: float
    """Of a copy, read and written bytes together."""

    @classmethod
    @torch.inference_mode()
    def measure(cls, dtype: torch.dtype, clock: Callable[[], float]) -> Machine:
        """dtype: of the matrices. clock: what the times to be compared were taken with, in seconds."""
        linear = Linear(torch.randn(_FEATURES, _FEATURES).to(dtype))
        x = torch.randn(_ROWS, _FEATURES).to(dtype)
        matmul_s = _best(lambda: linear(x), clock)
        source = torch.ones(_COPY_BYTES // 4)
        target = torch.empty_like(source)
        copy_s = _best(lambda: target.copy_(source), clock)
        return cls(2 * _ROWS * _FEATURES**2 / matmul_s, 2 * _COPY_BYTES / copy_s)

    def bound_s(self, flops: float, num_bytes: float) -> float:
        """The least time for so much arithmetic on so many bytes."""
        return max(flops / self.matmul_flops_per_s, num_bytes / self.memory_bytes_per_s)


def _best(function: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the quickest of some runs, the first left out: a peak is what was possible."""
    seconds = []
    for _ in range(_RUNS + 1):
        start = clock()
        function()
        seconds.append(clock() - start)
    return min(seconds[1:])
