"""The sort example's rows, tokenizer and reward."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from laminar.config import Config

Load = Callable[[str], ModuleType]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("01234567", "01234567", 1.0),
        ("00000000", "01234567", 1 / 8),
        ("0123", "01234567", 4 / 8),
        ("012345670123", "01234567", 8 / 12),
        ("", "01234567", 0.0),
        ("1234567", "01234567", 0.0),
        ("=1234567", "01234567", 7 / 8),
    ],
)
def test_reward_is_right_places_over_the_longer(
    load_example: Load, completion: str, answer: str, expected: float
) -> None:
    assert load_example("sort/reward.py").reward([completion], [answer]) == [pytest.approx(expected)]


def test_reward_scores_each_completion_against_its_own_answer(load_example: Load) -> None:
    assert load_example("sort/reward.py").reward(["01", "01"], ["01", "10"]) == [1.0, 0.0]


def test_rows_are_distinct_sorted_and_seeded(load_example: Load) -> None:
    make_rows = load_example("sort/prepare.py").make_rows
    rows = make_rows(500, seed=3)
    assert rows == make_rows(500, seed=3)
    assert rows != make_rows(500, seed=4)
    assert len({row["prompt"] for row in rows}) == 500
    for row in rows:
        digits = row["prompt"].removesuffix("=")
        assert len(digits) == 8 and digits.isdigit()
        assert row["answer"] == "".join(sorted(digits))


def test_tokenizer_is_one_id_a_character_and_survives_saving(load_example: Load, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    load_example("sort/prepare.py").make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("31420675=")["input_ids"]
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids] == list("31420675=")
    assert tokenizer("0<eos>")["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "31420675="


def test_model_is_small_and_stops_at_the_tokenizers_end(load_example: Load) -> None:
    prepare = load_example("sort/prepare.py")
    model = prepare.make_model()
    assert model.num_parameters() < 1_000_000
    assert model.generation_config.eos_token_id == prepare.make_tokenizer().eos_token_id


def test_config_is_valid_and_its_counts_divide(load_example: Load) -> None:
    file = Path(load_example("sort/reward.py").__file__).with_name("config.toml")
    config = Config.model_validate(tomllib.loads(file.read_text()))
    assert config.train.groups_per_batch % config.train.num_mini_batches == 0
    assert config.rollout.max_new_tokens > load_example("sort/prepare.py").NUM_DIGITS
