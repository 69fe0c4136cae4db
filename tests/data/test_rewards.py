"""Reward functions in TRL's form: what they are given, what is believed, what is a failure."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laminar.data.rewards import (
    Completion,
    FunctionFailed,
    RewardFunctions,
    ScorableGroup,
    check_function,
    cut_at_stop,
    decode_group,
    function_names,
    load_functions,
)
from laminar.errors import RewardError
from laminar.types import GroupScore, UnscoredGroup, UnscoredMember

CHAT = [{"role": "user", "content": "1+1?"}]


def make_group(count: int = 2, prompt: object = "1+1?", **columns: Any) -> ScorableGroup:
    completions = tuple(Completion(i, 0, 3 + i, f"text {i}", [i, 9]) for i in range(count))
    return ScorableGroup(5, {"prompt": prompt, **columns}, "shown", completions)


def score(*functions: Callable[..., Any], group: ScorableGroup | None = None, **settings: Any) -> GroupScore:
    named = {f"f{place}": function for place, function in enumerate(functions)}
    rewards = RewardFunctions(named, **settings)
    try:
        return rewards.score(group or make_group())
    finally:
        rewards.close()


def values(score: GroupScore) -> list[float | None]:
    return [member.reward for member in score.members]


class Remember:
    """A callable object that takes everything, and keeps it."""

    def __call__(self, **kwargs: Any) -> list[float]:
        self.seen = kwargs
        return [0.0] * len(kwargs["completions"])


# ---------------------------------------------------------------- what a function is given


def test_a_function_with_kwargs_is_given_everything() -> None:
    remember = Remember()
    group = make_group(answer="2", level=3)
    score(remember, group=group, kwargs={"strict": True}, max_steps=20)
    seen = remember.seen
    assert seen["prompts"] == ["1+1?", "1+1?"]
    assert seen["completions"] == ["text 0", "text 1"]
    assert seen["completion_ids"] == [[0, 9], [1, 9]]
    assert (seen["answer"], seen["level"], seen["strict"]) == (["2", "2"], [3, 3], True)
    assert (seen["trainer_state"].global_step, seen["trainer_state"].max_steps) == (4, 20)
    assert set(seen) == {
        *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
        *("answer", "level", "strict"),
    }


def test_chat_prompts_give_chat_completions() -> None:
    remember = Remember()
    score(remember, group=make_group(prompt=CHAT))
    assert remember.seen["prompts"] == [CHAT, CHAT]
    assert remember.seen["completions"][1] == [{"role": "assistant", "content": "text 1"}]


def test_another_prompt_column_is_no_column_for_the_reward() -> None:
    remember = Remember()
    group = ScorableGroup(5, {"question": "q", "prompt": "a column"}, "", make_group().completions)
    score(remember, group=group, prompt_column="question")
    assert remember.seen["prompts"] == ["q", "q"]
    assert "question" not in remember.seen
    assert remember.seen["prompt"] == ["a column", "a column"]


def plain(completions: list[str], answer: list[str]) -> list[float]:
    return [float(a) for a in answer]


def scaled(completions: list[str], answer: list[str], by: float = 1.0) -> list[float]:
    return [by * float(a) for a in answer]


async def asynchronous(completions: list[str], answer: list[str]) -> list[float]:
    return [float(a) for a in answer]


class AsyncObject:
    async def __call__(self, answer: list[str], **kwargs: Any) -> list[float]:
        return [float(a) for a in answer]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, 2.0),
        (functools.partial(scaled, by=3.0), 6.0),
        (lambda completions, answer: [float(a) for a in answer], 2.0),
        (asynchronous, 2.0),
        (AsyncObject(), 2.0),
        (functools.partial(asynchronous), 2.0),
        (functools.partial(AsyncObject()), 2.0),
    ],
    ids=["function", "partial", "lambda", "async", "async object", "async partial", "async object partial"],
)
def test_every_kind_of_callable(function: Callable[..., Any], expected: float) -> None:
    assert values(score(function, group=make_group(answer="2"))) == [expected, expected]


def test_asynchronous_functions_run_side_by_side_and_keep_their_loop() -> None:
    import asyncio

    here: list[asyncio.AbstractEventLoop] = []

    def meeting(mine: str, theirs: str, arrived: set[str]) -> Callable[..., Any]:
        async def function(completions: list[str]) -> list[float]:
            here.append(asyncio.get_running_loop())
            arrived.add(mine)
            while theirs not in arrived:
                await asyncio.sleep(0)
            return [1.0] * len(completions)

        return function

    first, second = set[str](), set[str]()
    rewards = RewardFunctions({"a": meeting("a", "b", first), "b": meeting("b", "a", first)})
    rewards.score(make_group())
    assert first == {"a", "b"} and second == set()
    rewards.score(make_group())
    rewards.close()
    assert len(set(here)) == 1


def test_metrics_are_means_and_extras_go_to_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    def function(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        for value in (1.0, 2.0, float("nan")):
            log_metric("tries", value)
        log_extra("parsed", ["x", None])
        return [0.0, 1.0]

    assert score(function).metrics == {"tries": 1.5}
    assert json.loads(capsys.readouterr().out) == {"group": 5, "column": "parsed", "values": ["x", None]}


# ---------------------------------------------------------------- what it returns


def generator() -> Iterator[float]:
    yield from (0.5, 1.0)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([0.5, 1], [0.5, 1.0]),
        ((0.5, 1.0), [0.5, 1.0]),
        (generator, [0.5, 1.0]),
        (np.array([0.5, 1.0], dtype=np.float32), [0.5, 1.0]),
        (np.array([0, 1]), [0.0, 1.0]),
        ([np.float32(0.5), np.int64(1)], [0.5, 1.0]),
        (torch.tensor([0.5, 1.0]), [0.5, 1.0]),
        ([torch.tensor(0.5), torch.tensor(1)], [0.5, 1.0]),
        ([None, 1.0], [None, 1.0]),
        ([None, None], [None, None]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_shapes_that_are_believed(returned: Any, expected: list[float | None]) -> None:
    """Fault 20: None and numpy numbers are fine."""
    result = score(lambda completions: returned() if callable(returned) else returned)
    assert values(result) == expected
    assert all(type(value) in (float, type(None)) for value in values(result))
    assert [member.rewards for member in result.members] == [{"f0": value} for value in expected]


def raising_generator() -> Iterator[float]:
    yield 1.0
    raise KeyError("late")


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1.0], ["2 numbers or None, one a completion", "1 values: [1.0]"]),
        ([1.0, 2.0, 3.0], ["2 numbers or None", "3 values: [1.0, 2.0, 3.0]"]),
        ([], ["2 numbers or None", "0 values: []"]),
        (1.0, ["2 numbers or None", "float 1.0"]),
        (None, ["2 numbers or None", "NoneType None"]),
        ("ok", ["2 numbers or None", "str 'ok'"]),
        ({"score": 1.0, "other": 2}, ["2 numbers or None", "dict"]),
        (np.float64(1.0), ["2 numbers or None", "float 1.0"]),
        (torch.tensor(1.0), ["2 numbers or None", "float 1.0"]),
        (np.ones((2, 1)), ["finite numbers or None", "for completion 0"]),
        ([0.0, float("nan")], ["finite numbers or None", "float nan for completion 1"]),
        ([float("inf"), 0.0], ["finite numbers or None", "float inf for completion 0"]),
        ([True, 0.0], ["finite numbers or None", "bool True for completion 0"]),
        ([0.0, np.bool_(True)], ["finite numbers or None", "for completion 1"]),
        (np.array([True, False]), ["finite numbers or None", "bool True"]),
        (["1.0", 0.0], ["finite numbers or None", "str '1.0' for completion 0"]),
        ([[1.0], 0.0], ["finite numbers or None", "list [1.0] for completion 0"]),
        (raising_generator, ["raised KeyError: 'late'", "in raising_generator"]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_shapes_that_are_failures(returned: Any, expected: list[str]) -> None:
    """Fault 20: the error names the function, what was expected and what came."""
    with pytest.raises(FunctionFailed) as failure:
        score(lambda completions: returned() if callable(returned) else returned)
    for text in ["reward function `f0`", *expected]:
        assert text in str(failure.value)


def test_what_a_function_raises_is_shown_with_its_own_traceback() -> None:
    def function(completions: list[str]) -> list[float]:
        raise RuntimeError("no judge today")

    async def later(completions: list[str]) -> list[float]:
        raise RuntimeError("no judge today")

    for broken in (function, later):
        with pytest.raises(FunctionFailed, match=r"`f0`: raised RuntimeError: no judge today\nTraceback") as failure:
            score(broken)
        assert "test_rewards.py" in str(failure.value)
        assert "laminar/data/rewards.py" not in str(failure.value) or broken is later


def test_exit_is_a_failure_and_not_the_end() -> None:
    def function(completions: list[str]) -> list[float]:
        raise SystemExit(3)

    with pytest.raises(FunctionFailed, match="SystemExit"):
        score(function)


# ---------------------------------------------------------------- weighted sum


@pytest.mark.parametrize(
    ("returned", "weights", "expected"),
    [
        ([[1.0, 0.0], [0.5, 0.5]], None, [1.5, 0.5]),
        ([[1.0, 0.0], [0.5, 0.5]], [2.0, 0.1], [2.05, 0.05]),
        ([[1.0, None], [None, None]], [2.0, 1.0], [2.0, None]),
        ([[0.0, 0.0], [1.0, 1.0]], [1.0, 0.0], [0.0, 0.0]),
    ],
)
def test_reward_is_the_weighted_sum_over_those_that_gave_a_number(
    returned: list[list[float | None]], weights: list[float] | None, expected: list[float | None]
) -> None:
    functions = [lambda completions, values=one: values for one in returned]
    assert values(score(*functions, weights=weights)) == pytest.approx(expected)


def test_one_weight_a_function() -> None:
    with pytest.raises(RewardError, match=r"reward.weights: not one weight a function\n  expected: 1 num"):
        score(plain, weights=[1.0, 2.0])


# ---------------------------------------------------------------- checked without a call


def positional_only(completions: list[str], /) -> list[float]:
    return []


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        (lambda completions: [], [], None),
        (lambda completions, answer: [], [], None),
        (lambda completions, answer, **rest: [], [], None),
        (lambda completions, missing=None: [], [], None),
        (lambda *, completions, strict: [], ["strict"], None),
        (Remember(), [], None),
        (functools.partial(scaled, by=2.0), [], None),
        (functools.partial(lambda completions, judge: [], judge=1), [], None),
        (dict, [], None),
        (lambda completions, solution: [], [], ["needs `solution`", "got: columns answer, prompt"]),
        (lambda completions, a, answer, b, **rest: [], [], ["needs `a`, `b`"]),
        (lambda completions, prompt: [], [], ["needs `prompt`", "fix: ask for `prompts`"]),
        (positional_only, [], ["`completions` can't be passed by keyword"]),
    ],
)
def test_columns_are_checked_before_anything_is_called(
    function: Callable[..., Any], kwargs: list[str], expected: list[str] | None
) -> None:
    """Fault 21: what the rows lack is found at once, and the message lists what they have."""
    columns = {"prompt": "x", "answer": "y"}
    if expected is None:
        check_function("judge", function, columns, kwargs)
        return
    with pytest.raises(RewardError) as failure:
        check_function("judge", function, columns, kwargs)
    for text in ["reward function `judge`", *expected]:
        assert text in str(failure.value)


def test_load_functions(tmp_path: Path) -> None:
    (tmp_path / "fns.py").write_text("def f(completions): return []\nNAME = 'Qwen/RM'\nNUMBER = 3\n")
    assert list(load_functions(["fns.py:f"], tmp_path)) == ["f"]
    for spec, expected in [("fns.py:NAME", "'Qwen/RM'"), ("fns.py:NUMBER", "int")]:
        with pytest.raises(RewardError, match="not a reward function") as failure:
            load_functions([spec], tmp_path)
        assert expected in str(failure.value)
    with pytest.raises(RewardError, match="listed twice"):
        load_functions(["fns.py:f", "fns.py:f"], tmp_path)


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["a.py:f", "m.n:g"], ["f", "g"]),
        (["x/a.py:f", "b.py:f", "c.py:g"], ["a.f", "b.f", "g"]),
        (["x/a.py:f", "y/a.py:f"], ["x/a.py:f", "y/a.py:f"]),
    ],
)
def test_function_names_are_short_and_all_different(specs: list[str], names: list[str]) -> None:
    assert function_names(specs) == names


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("a\n\nb", ["\n\n"], "a"),
        ("abc", ["x"], "abc"),
        ("abc", [], "abc"),
        ("a STOP b END", ["END", "STOP"], "a "),
        ("END", ["END"], ""),
    ],
)
def test_cut_at_the_first_stop_string(text: str, stop: list[str], expected: str) -> None:
    assert cut_at_stop(text, stop) == expected


class Letters:
    """Decodes 0, 1, 2 ... as a, b, c; 99 is a special token."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) if i != 99 else "" if skip_special_tokens else "<eos>" for i in token_ids)


def ids(*tokens: int) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


@pytest.mark.parametrize(("prompt", "shown"), [("ab", "ab"), (CHAT, "ab<eos>")])
def test_decode_group(prompt: object, shown: str) -> None:
    member = UnscoredMember(index=1, attempt=2, version=7, finish_reason="stop", tokens=ids(2, 3, 4, 99))
    unscored = UnscoredGroup(5, "train", json.dumps({"q": prompt}), ids(0, 1, 99), (member,))
    group = decode_group(unscored, Letters(), ["e"], "q")
    assert group == ScorableGroup(5, {"q": prompt}, shown, (Completion(1, 2, 7, "cd", [2, 3, 4, 99]),))
