"""What the torch engine needs of a model: parameters to fill, and a forward pass with a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch

S = TypeVar("S")
"""The runner's own record of a sequence in its cache."""


class Runner(Protocol, Generic[S]):
    """A decoder with weights and a KV cache."""

    vocab_size: int
    max_length: int
    """Longest context in tokens."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Every weight under its Hugging Face name, to be written in place; tied ones once."""

    def refresh(self) -> None:
        """Rebuild all that is derived from `parameters`. Call after they were written."""

    def open(self) -> S:
        """A new, empty sequence."""

    def fork(self, source: S) -> S:
        """A new sequence with the tokens of another."""

    def close(self, sequence: S) -> None:
        """Free a sequence's memory."""

    def forward(self, sequences: Sequence[S], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append tokens to each sequence; [S, V] logits after the last token of each, fp32 or the weights' dtype."""

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, V] logits after each of `tokens`, in a sequence of their own; dtype as in `forward`."""
