from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from laminar.errors import ModelError
from laminar.rollout.stopping import StopRules
from tests.rollout.conftest import Bench, generate, random_prompt, request

WORDS = ["<eos>", *"abcdef", "ab", "stop", "!"]


def _save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


@pytest.mark.parametrize(
    ("generation_config", "tokenizer", "expected"),
    [
        ({"eos_token_id": 5}, False, {5}),
        ({"eos_token_id": [5, 6]}, True, {0, 5, 6}),
        ({"temperature": 0.1, "top_k": 3}, True, {0}),
        (None, True, {0, 9}),
        (None, False, {9}),
    ],
)
def test_end_ids_come_from_generation_config_and_tokenizer(
    tmp_path: Path, generation_config: dict | None, tokenizer: bool, expected: set[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 9}))
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    if tokenizer:
        _save_tokenizer(tmp_path)
    assert StopRules.of_model(tmp_path).eos_ids == expected


@pytest.mark.parametrize(
    ("words", "stop", "expected"),
    [
        (["a", "<eos>"], (), "stop"),
        (["<eos>", "a"], (), None),
        (["a", "b"], ("ab",), "stop"),
        (["c", "ab", "c"], ("abc",), "stop"),
        (["stop", "!"], ("p!",), "stop"),
        (["a", "b", "c"], ("xyz", "bc"), "stop"),
        (["a"] * 30 + ["stop"], ("stop",), "stop"),
        (["a", "b"], ("ba",), None),
        (["a"] * 40, (), "length"),
        (["a"] * 39 + ["<eos>"], (), "stop"),
        ([], ("a",), None),
    ],
)
def test_rules(words: Sequence[str], stop: tuple[str, ...], expected: str | None) -> None:
    rules = StopRules(frozenset({0}), lambda ids: "".join(WORDS[i] for i in ids))
    assert rules.check([WORDS.index(word) for word in words], stop, 40) == expected


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        StopRules(frozenset(), None).check([1], ("a",), 5)


def test_the_end_belongs_to_the_response(make_bench: Callable[[str], Bench]) -> None:
    """The ids of the end token and of a stop string are kept; where a response ends changes nothing before."""
    bench = make_bench("llama tied grouped")
    one = request(0, 0, random_prompt(0, 5), max_new_tokens=30)
    whole = generate(bench.engine(), [one])[one.sample]
    assert whole.finish_reason == "length"
    end = whole.tokens[11]
    first = whole.tokens.index(end)
    (bench.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "temperature": 0.01}))
    cut = generate(bench.engine(), [one])[one.sample]
    assert (cut.tokens, cut.finish_reason) == (whole.tokens[: first + 1], "stop")
    assert cut.logprobs == whole.logprobs[: first + 1]
