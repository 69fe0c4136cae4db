"""The arithmetic example's questions and verifier."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM

from laminar.config import Config
from tests.rollout.conftest import Bench, FileSource, check_exact, request

Load = Callable[[str], ModuleType]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("46", 1.0),
        ("12 + 34 = 46", 1.0),
        ("The answer is 46.", 1.0),
        ("**46**", 1.0),
        ("046", 1.0),
        ("46 is what you get when you add 12 and 34", 0.0),
        ("460", 0.0),
        ("146", 0.0),
        ("-46", 0.0),
        ("46.5", 0.0),
        ("4.46", 0.0),
        ("4 6", 0.0),
        ("forty-six", 0.0),
        ("12 + 34 =", 0.0),
        ("", 0.0),
    ],
)
def test_reward_wants_the_answer_as_the_last_number(load_example: Load, reply: str, expected: float) -> None:
    message = {"role": "assistant", "content": reply}
    assert load_example("arithmetic/reward.py").reward([[message]], ["46"]) == [expected]


def test_reward_scores_each_completion_against_its_own_answer(load_example: Load) -> None:
    completions = [[{"role": "assistant", "content": "3"}], [{"role": "assistant", "content": "3"}]]
    assert load_example("arithmetic/reward.py").reward(completions, ["3", "4"]) == [1.0, 0.0]


def test_questions_are_seeded_and_their_answers_right(load_example: Load) -> None:
    make_rows = load_example("arithmetic/prepare.py").make_rows
    train, held_out = make_rows(seed=5)
    assert (train, held_out) == make_rows(seed=5)
    assert train != make_rows(seed=6)[0]
    for row in train + held_out:
        (message,) = row["prompt"]
        a, b = map(int, re.findall(r"\d+", message["content"]))
        assert message["role"] == "user"
        assert int(row["answer"]) == a + b


def test_held_out_questions_have_two_digits_and_are_never_trained(load_example: Load) -> None:
    train, held_out = load_example("arithmetic/prepare.py").make_rows(seed=0)
    asked = {frozenset(re.findall(r"\d+", row["prompt"][0]["content"])) for row in train}
    assert 50 <= len(held_out) <= 100
    for row in held_out:
        question = row["prompt"][0]["content"]
        assert re.fullmatch(r"Calculate \d\d \+ \d\d\.", question)
        assert frozenset(re.findall(r"\d+", question)) not in asked


def test_a_share_of_training_questions_has_one_digit(load_example: Load) -> None:
    prepare = load_example("arithmetic/prepare.py")
    train, _ = prepare.make_rows(seed=0)
    one_digit = [row for row in train if re.fullmatch(r"Calculate \d \+ \d\.", row["prompt"][0]["content"])]
    assert len(one_digit) / len(train) == pytest.approx(prepare.ONE_DIGIT_SHARE, abs=0.03)


def test_config_is_valid(load_example: Load) -> None:
    file = Path(load_example("arithmetic/reward.py").__file__).with_name("config.toml")
    config = Config.model_validate(tomllib.loads(file.read_text()))
    assert config.train.groups_per_batch % config.train.num_mini_batches == 0


@pytest.mark.slow
def test_its_model_is_exact(load_example: Load) -> None:
    """Invariant 9: SmolLM2 in fp32 gives the same bits alone, preempted, or resumed from prefixes in other batches."""
    folder = load_example("arithmetic/prepare.py").BUILD / "model"
    torch.set_num_threads(1)
    bench = Bench(LlamaForCausalLM.from_pretrained(folder).eval(), folder, FileSource(folder))
    dice = random.Random(0)
    requests = [
        request(group, index, [dice.randrange(49_000) for _ in range(15 + 25 * group)], max_new_tokens=48)
        for group in range(5)
        for index in range(2)
    ]
    check_exact(bench, requests, dice, kv_tokens=400)
