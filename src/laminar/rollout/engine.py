"""What a replica needs of an engine, and what an engine needs of the weights.

An engine knows samples by id, holds one version of the weights at a time, and gives every new token out
exactly once, through `poll`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from laminar.types import Load, SampleId, Sampling, SlotRef

if TYPE_CHECKING:
    import torch

TokenArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to generate, or to go on with."""

    sample: SampleId
    attempt: int
    """Restarts from the prompt so far; part of the sampling key."""
    prompt: TokenArray
    """int32 [P], P >= 1"""
    response: TokenArray
    """int32 [R]: tokens already generated; R may be 0."""
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Progress:
    """New tokens of one sample since the last `poll`."""

    sample: SampleId
    tokens: TokenArray
    """int32 [T]"""
    logprobs: FloatArray
    """float32 [T], of the sampled tokens under the full softmax at the request's temperature"""
    finish_reason: str | None
    """`stop` or `length`; None while the sample goes on. After a reason the engine has forgotten the sample."""


class Lease(Protocol):
    """Weights of one version that can't be overwritten while the lease is held."""

    @property
    def golden(self) -> Sequence[float]:
        """The trainer's log-probs on the golden prompt; empty when the version has none."""

    def copy_into(self, destination: Mapping[str, torch.Tensor]) -> None:
        """Copy every tensor, by name, and check the fingerprint.

        Raises:
            WeightsError: the bytes do not have the fingerprint of the version. `destination` is then spoilt.
        """


class WeightSource(Protocol):
    """Where an engine gets weights from."""

    def lease(self, ref: SlotRef) -> AbstractContextManager[Lease]:
        """Hold `ref` for the time of a copy.

        Raises:
            WeightsError: the slot does not hold that version any more.
        """


class Engine(Protocol):
    """Generates trajectories. Not thread-safe: one thread calls it, `interrupt` apart."""

    @property
    def loaded(self) -> SlotRef | None:
        """The weights that are in use; None before the first load and after a failed one."""

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            EngineError: no weights are loaded, the sample is already here, or it can never fit.
        """

    def release(self, samples: Collection[SampleId]) -> None:
        """Forget samples in any state and free their KV; unknown ids are ignored.

        Every token made so far was already returned by `poll`.
        """

    def poll(self, timeout_s: float) -> list[Progress]:
        """New tokens. An embedded engine does one step; one with its own thread waits up to `timeout_s`."""

    def interrupt(self) -> None:
        """Let a `poll` that waits return now. Any thread may call it; an engine whose polls are short ignores it."""

    def load(self) -> Load:
        """Requests and KV tokens held at this moment."""

    def load_weights(self, ref: SlotRef) -> None:
        """Replace the weights by those of `ref` and reset every cache. Only when nothing is running.

        Raises:
            EngineError: requests are running or waiting; the weights stay.
            WeightsError: the weights are not what `ref` says, or not this model's. No weights are loaded then.
        """

    def golden(self) -> FloatArray:
        """float32 [63]: log-probs on the golden prompt (`laminar.golden`) under the loaded weights."""
