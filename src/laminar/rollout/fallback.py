"""The slow path: any decoder with full or sliding-window attention, through the model's own forward.

Every sequence has a cache of its own and is fed alone. In exact mode it is fed one token at a time, so that a
token's arithmetic is the same whether it was decoded or is prefilled again.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class FallbackDecoder:
    """A `Runner` over `AutoModelForCausalLM`; its sequences are transformers caches."""

    def __init__(self, config: Any, dtype: torch.dtype, device: str, exact: bool) -> None:
        """config: the model's transformers config."""
        self._config, self._device, self._exact = config, device, exact
        self._model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
        self.vocab_size: int = self._model.get_output_embeddings().weight.shape[0]
        self.max_length: int = config.max_position_embeddings
        names = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        tied = self._model.all_tied_weights_keys
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in tied}

    def refresh(self) -> None:
        """Nothing is derived from the parameters here."""

    def open(self) -> DynamicCache:
        return DynamicCache(config=self._config)

    def fork(self, source: DynamicCache) -> DynamicCache:
        return deepcopy(source)

    def close(self, sequence: DynamicCache) -> None:
        """The memory goes with the last reference."""

    def forward(self, sequences: Sequence[DynamicCache], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        rows = [self._feed(cache, ids)[-1] for cache, ids in zip(sequences, tokens, strict=True)]
        return torch.stack(rows)

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._feed(self.open(), tokens)

    @torch.inference_mode()
    def _feed(self, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
        """Float32 [T, V]"""
        pieces = [[token] for token in tokens] if self._exact else [list(tokens)]
        logits = []
        for piece in pieces:
            ids = torch.tensor([piece], device=self._device)
            output = self._model(input_ids=ids, use_cache=True, **{self._cache_argument: cache})
            logits.append(output.logits[0].float())
        return torch.cat(logits)
