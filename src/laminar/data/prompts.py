"""Prompts: the order in which dataset rows are drawn, and their token ids.

Nothing here imports transformers, or torch with it, except `load_tokenizer`, so that a config can be checked quickly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from laminar.config import DataConfig
from laminar.data.rows import Row, row_to_json
from laminar.errors import ConfigError, DataError, ModelError

Messages = list[dict[str, Any]]
Ids = npt.NDArray[np.int32]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    bos_token_id: int | None
    chat_template: Any

    @property
    def all_special_tokens(self) -> list[str]: ...
    @property
    def added_tokens_decoder(self) -> dict[int, Any]: ...
    def __call__(self, text: str, **kwargs: Any) -> Any: ...
    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


# ---------------------------------------------------------------- token ids


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The tokenizer of a model folder, without the network. Raises ModelError."""
    if not model_path.is_dir():
        raise ModelError("the model folder is not there", where=str(model_path), expected="a Hugging Face model folder")
    try:
        tokenizer: Tokenizer = _tokenizer_class(model_path).from_pretrained(str(model_path), local_files_only=True)
    except (OSError, ValueError, KeyError) as cause:
        raise ModelError(
            "the model folder has no usable tokenizer",
            where=str(model_path),
            expected="the files that `tokenizer.save_pretrained` writes",
            got=str(cause).splitlines()[0] if str(cause) else type(cause).__name__,
        ) from cause
    return tokenizer


def _tokenizer_class(model_path: Path) -> Any:
    """What transformers would choose. Where the folder names the plain class, without the import of torch.

    That import is three quarters of the time and memory that a tokenizer takes.
    """
    try:
        named = json.loads((model_path / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        named = {}
    if named.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in named:
        from transformers import TokenizersBackend

        return TokenizersBackend
    from transformers import AutoTokenizer

    return AutoTokenizer


def check_prompt(row: Row, column: str, where: str) -> str | Messages:
    """The prompt of a row: text, or chat messages. Raises DataError with the columns or the type found."""
    if column not in row:
        raise DataError(
            f"there is no column `{column}`",
            where=where,
            got=f"columns {', '.join(sorted(row)) or '(none)'}",
            fix="set `data.prompt_column`",
        )
    prompt = row[column]
    if isinstance(prompt, str):
        if not prompt:
            raise DataError("the prompt is empty", where=where)
        _check_text(prompt, where)
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise DataError(
            "not a prompt", where=where, expected="text, or a list of chat messages", got=type(prompt).__name__
        )
    if not prompt:
        raise DataError("the prompt is empty", where=where, expected="at least one chat message")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(
                "not a chat message", where=where, expected='{"role": ..., "content": ...}', got=repr(message)[:200]
            )
        if isinstance(message["content"], str):
            _check_text(message["content"], where)
    return [dict(message) for message in prompt]


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise DataError("the prompt is not UTF-8", where=where, got=str(cause)) from cause


class PromptEncoder:
    """From the prompt of a row to the ids a model is given."""

    def __init__(self, tokenizer: Tokenizer, config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        bos = tokenizer.bos_token_id
        self._bos = bos if bos is not None and _encode(tokenizer, "a", add_special_tokens=True)[:1] == [bos] else None
        self._specials = _special_tokens(tokenizer)

    def encode(self, row: Row, where: str) -> list[int]:
        """Ids of the row's prompt, at least one. Raises DataError, with `where` in it."""
        prompt = check_prompt(row, self._config.prompt_column, where)
        if isinstance(prompt, str) and self._config.system_prompt is not None:
            prompt = [{"role": "user", "content": prompt}]
        ids = self._encode_text(prompt) if isinstance(prompt, str) else self._encode_chat(prompt, where)
        if not ids:
            raise DataError("the prompt has no tokens", where=where, got=repr(prompt)[:200])
        return ids

    def rendered(self, row: Row, where: str) -> str:
        """The row's prompt as the model sees it. Raises as `encode`."""
        return str(self._tokenizer.decode(self.encode(row, where)))

    def truncate(self, ids: list[int], limit: int) -> list[int]:
        """The last `limit` ids; a BOS that the tokenizer put in front stays."""
        if self._bos is not None and ids[0] == self._bos and limit > 1:
            return [self._bos, *ids[len(ids) - limit + 1 :]]
        return ids[len(ids) - limit :]

    def _encode_text(self, text: str) -> list[int]:
        ids = _encode(self._tokenizer, text)
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]

    def _encode_chat(self, messages: Messages, where: str) -> list[int]:
        if self._config.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._config.system_prompt}, *messages]
        escape = _Escape(self._specials)
        rendered = self._render(escape.hide(messages), where)
        ids: list[int] = []
        for piece, literal in escape.pieces(rendered):
            ids += _encode(self._tokenizer, piece, **({"split_special_tokens": True} if literal else {}))
        return ids

    def _render(self, messages: Any, where: str) -> str:
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise DataError(
                "the prompt is chat messages, but the tokenizer has no chat template",
                where=where,
                fix="use the tokenizer of a chat model, or give prompts as text",
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False, **self._config.chat_template_kwargs
                )
            )
        except (TemplateError, TypeError) as cause:  # TypeError: a template that joins text with a null
            raise DataError("the chat template refuses the messages", where=where, got=str(cause)) from cause


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False, **kwargs: Any) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, **kwargs).input_ids
    return ids


_MARK_EDGE = "\U000f5a17"
"""A private-use character, which stands for nothing in any script."""


def _special_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches what may not be taken from a message as it is: special tokens, and the edge of a mark."""
    texts = {_MARK_EDGE, *tokenizer.all_special_tokens}
    texts |= {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special}
    # Longest first: of two special tokens that begin alike, the longer is the one the tokenizer takes.
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)))


class _Escape:
    """Keeps special tokens that stand in a message's text from becoming special ids.

    Each is replaced by a private-use mark before the template is rendered; the rendered text is cut at the
    marks, and what they stand for is tokenised as plain text. Without such a token nothing is changed.
    """

    def __init__(self, specials: re.Pattern[str]) -> None:
        self._specials = specials
        self._hidden: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._specials.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def _mark(self, match: re.Match[str]) -> str:
        mark = f"{_MARK_EDGE}{len(self._hidden)}{_MARK_EDGE}"
        self._hidden[mark] = match.group()
        return mark

    def pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """(text, whether it is to be read as plain text) in order, none empty."""
        if not self._hidden:
            yield rendered, False
            return
        for piece in re.split(f"({_MARK_EDGE}[0-9]+{_MARK_EDGE})", rendered):
            if piece:
                yield self._hidden.get(piece, piece), piece in self._hidden


# ---------------------------------------------------------------- drawing


@dataclass(frozen=True, slots=True)
class Drawn:
    """One prompt taken from the pool."""

    row_index: int
    epoch: int
    row: Row
    row_json: str
    prompt_ids: Ids | None
    """int32 [P]; None when the prompt is over the limit and `overlong_prompt` is `drop`."""

    @property
    def overlong(self) -> bool:
        """The prompt can't be used: it counts as drawn and is dropped."""
        return self.prompt_ids is None


class PromptSource:
    """The prompt pool: what the n-th draw of a run is, a pure function of (rows, config, seed, n).

    `max_prompt_tokens` is the limit in force (`prompt_limit`), `name` what messages call the dataset. Each epoch holds
    each row exactly once.
    Raises DataError for the first row without a usable prompt.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        config: DataConfig,
        max_prompt_tokens: int | None,
        seed: int,
        name: str = "the dataset",
    ) -> None:
        self._rows = rows
        self._name = name
        self._encoder = PromptEncoder(tokenizer, config)
        self._config = config
        self._limit = max_prompt_tokens
        self._seed = seed
        self._order: tuple[int, npt.NDArray[np.intp]] | None = None
        for row_index in range(len(rows)):
            check_prompt(rows[row_index], config.prompt_column, self._where(row_index))

    def first_rendered(self) -> str:
        """The first prompt that is drawn as the model sees it, special tokens and all."""
        row_index = int(self._epoch_order(0)[0])
        return self._encoder.rendered(self._rows[row_index], self._where(row_index))

    def __len__(self) -> int:
        return len(self._rows)

    def exhausted(self, cursor: int) -> bool:
        """Whether `data.epochs` passes end before this draw."""
        return self._config.epochs is not None and cursor >= self._config.epochs * len(self._rows)

    def draw(self, cursor: int) -> Drawn:
        """Draw number `cursor`, from 0. Raises DataError for a row that can't be used."""
        epoch, place = divmod(cursor, len(self._rows))
        return self.take(int(self._epoch_order(epoch)[place]), epoch)

    def take(self, row_index: int, epoch: int = 0) -> Drawn:
        """Row `row_index` of the dataset as a drawn prompt. Raises DataError for a row that can't be used."""
        row = self._rows[row_index]
        where = self._where(row_index)
        ids: list[int] | None = self._encoder.encode(row, where)
        if self._limit is not None and ids is not None and len(ids) > self._limit:
            ids = self._overlong(ids, self._limit, where)
        prompt_ids = None if ids is None else np.asarray(ids, dtype=np.int32)
        return Drawn(row_index, epoch, row, row_to_json(row, where), prompt_ids)

    def _where(self, row_index: int) -> str:
        return f"{self._name}, row {row_index + 1} of {len(self._rows)}"

    def _overlong(self, ids: list[int], limit: int, where: str) -> list[int] | None:
        if self._config.overlong_prompt == "drop":
            return None
        if self._config.overlong_prompt == "truncate":
            return self._encoder.truncate(ids, limit)
        raise DataError(
            "the prompt is too long",
            where=where,
            expected=f"at most {limit} tokens",
            got=f"{len(ids)} tokens",
            fix='raise `data.max_prompt_tokens`, or set `data.overlong_prompt` to "drop" or "truncate"',
        )

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.intp]:
        if self._order is None or self._order[0] != epoch:
            # Raw words of a counter-based generator: numpy promises that these never change, unlike `permutation`.
            words = np.random.Philox(key=[self._seed % 2**64, epoch]).random_raw(len(self._rows))
            self._order = epoch, np.argsort(words, kind="stable")
        return self._order[1]


def context_tokens(model_config: Mapping[str, Any]) -> int | None:
    """Longest sequence of a model, as its config.json names it; None if it does not say."""
    keys = ("max_position_embeddings", "n_positions")
    return next((model_config[key] for key in keys if isinstance(model_config.get(key), int)), None)


def prompt_limit(config: DataConfig, context_tokens: int | None, max_new_tokens: int) -> int | None:
    """Longest usable prompt: `data.max_prompt_tokens`, and what the model's context leaves beside a response.

    None = no limit. Raises ConfigError when a response leaves no room for any prompt.
    """
    limits = [config.max_prompt_tokens, None if context_tokens is None else context_tokens - max_new_tokens]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is not None and limit < 1:
        raise ConfigError(
            "a response of this length leaves no room for a prompt",
            where="rollout.max_new_tokens",
            expected=f"less than the model's context of {context_tokens} tokens",
            got=str(max_new_tokens),
        )
    return limit
