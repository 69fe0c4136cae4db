"""When a response ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from laminar.errors import ModelError


class StopRules:
    """End-of-sequence ids, stop strings and the length limit of one model."""

    _SLACK_TOKENS = 4
    """The first tokens of a decoded tail may read differently than in the whole text."""

    def __init__(self, eos_ids: frozenset[int], decode: Callable[[list[int]], str] | None) -> None:
        """decode: token ids to text, special tokens included; None if the model has no tokenizer."""
        self.eos_ids = eos_ids
        self._decode = decode

    @classmethod
    def of_model(cls, folder: Path) -> StopRules:
        """The `eos_token_id`s of `generation_config.json` (`config.json` if there is none) and of the tokenizer."""
        source = folder / "generation_config.json"
        if not source.is_file():
            source = folder / "config.json"
        declared = json.loads(source.read_text()).get("eos_token_id")
        ids = set(declared if isinstance(declared, list) else [] if declared is None else [declared])
        if not (folder / "tokenizer_config.json").is_file():
            return cls(frozenset(ids), None)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if tokenizer.eos_token_id is not None:
            ids.add(tokenizer.eos_token_id)
        return cls(frozenset(ids), lambda tail: str(tokenizer.decode(tail)))

    def check(self, response: Sequence[int], stop: Sequence[str], max_new_tokens: int) -> str | None:
        """`stop`, `length` or None for a response whose last token is new.

        Raises:
            ModelError: there are stop strings but no tokenizer to find them with.
        """
        if not response:
            return None
        if response[-1] in self.eos_ids or (stop and self._ends_with(response, stop)):
            return "stop"
        return "length" if len(response) >= max_new_tokens else None

    def _ends_with(self, response: Sequence[int], stop: Sequence[str]) -> bool:
        if self._decode is None:
            raise ModelError("stop strings need a tokenizer, and the model folder has none", fix="unset rollout.stop")
        length = max(len(text.encode()) for text in stop) + self._SLACK_TOKENS
        tail = self._decode(list(response[-length:]))
        return any(text in tail for text in stop)
