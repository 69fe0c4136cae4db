"""Reward functions in TRL's or verl's form: find them, check them, call them, believe them only if they make sense.

A function in TRL's form is called by keyword, once a finished group, and returns one number or None a completion; one
in verl's is called through an adapter (`data.verl`). The reward of a member is the weighted sum over the functions that
gave a number. Whatever a function does wrong becomes a `FunctionFailed`, never a reward.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import numbers
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from laminar.data import verl
from laminar.errors import RewardError
from laminar.types import GroupScore, MemberScore, UnscoredGroup
from laminar.user_code import resolve

RewardFunction = Callable[..., Any]
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Keywords that every function may ask for, beside the columns of the rows."""


class FunctionFailed(RewardError):
    """A reward function raised, or returned something that is not a reward a completion."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a function may know of the run."""

    global_step: int
    """Version of the weights that generated the completions."""
    max_steps: int
    """Iterations of the run; -1 if only the data ends it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One member of a group, as a function sees it."""

    index: int
    attempt: int
    version: int
    text: str
    """Without special tokens, cut at the first stop string."""
    ids: list[int]
    """As sampled, EOS included."""


@dataclass(frozen=True, slots=True)
class ScorableGroup:
    """A finished group with its text decoded."""

    group: int
    row: dict[str, Any]
    prompt_text: str
    completions: tuple[Completion, ...]


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


# ---------------------------------------------------------------- find and check


def function_names(specs: Sequence[str]) -> list[str]:
    """Short names for metrics, all different: what follows the colon, with the file or module if it is not unique."""
    short = [spec.rpartition(":")[2] for spec in specs]
    counts = Counter(short)
    names = [
        name if counts[name] == 1 else f"{Path(spec.rpartition(':')[0]).stem}.{name}"
        for spec, name in zip(specs, short, strict=True)
    ]
    return names if len(set(names)) == len(names) else list(specs)


def load_functions(specs: Sequence[str], base_folder: Path) -> dict[str, RewardFunction]:
    """The functions by their short names. Raises RewardError: not found, not callable, or listed twice."""
    if len(set(specs)) != len(specs):
        raise RewardError("a reward function is listed twice", where="reward.functions", got=", ".join(specs))
    functions: dict[str, RewardFunction] = {}
    for name, spec in zip(function_names(specs), specs, strict=True):
        found = resolve(spec, base_folder, error=RewardError)
        if isinstance(found, str) or not callable(found):
            raise RewardError(
                "not a reward function (the name of a reward model can't be used)",
                where=f"`{spec}`",
                expected="a callable",
                got=f"{found!r}" if isinstance(found, str) else type(found).__name__,
            )
        functions[name] = found
    return functions


def check_function(
    name: str,
    function: RewardFunction,
    row: Mapping[str, Any],
    kwargs: Collection[str] = (),
    prompt_column: str = "prompt",
) -> None:
    """Says, without calling it, whether a function can be called on rows like this one.

    `kwargs` are the keys of `reward.kwargs`. Raises RewardError that lists the columns found.
    """
    where = f"reward function `{name}`"
    parameters = _parameters(function)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind not in variadic]
    for parameter in needed:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(f"parameter `{parameter.name}` can't be passed by keyword", where=where)
    is_verl = verl.is_verl_function(parameters)
    if is_verl:
        given = verl.given(row)
        expected = "a keyword of verl's form, or a key of `reward.kwargs`"
        fix = "verl's rows have `data_source` and `reward_model` with `ground_truth`; for others take TRL's form"
    else:
        given = {*GIVEN, *(column for column in row if column != prompt_column)}
        expected = f"a column, one of {', '.join(GIVEN)}, or a key of `reward.kwargs`"
        fix = "add the column to the dataset, or give the parameter a default"
    if missing := [p.name for p in needed if p.name not in given and p.name not in kwargs]:
        raise RewardError(
            f"needs {', '.join(f'`{parameter}`' for parameter in missing)}, which the rows don't have",
            where=where,
            expected=expected,
            got=f"columns {', '.join(sorted(row)) or '(none)'}",
            fix="ask for `prompts`" if prompt_column in missing and not is_verl else fix,
        )


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions written in C have no signature: pass them everything
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def check_weights(num_functions: int, weights: Sequence[float] | None) -> None:
    """Raises RewardError unless there is one weight a function (or none at all)."""
    if weights is not None and len(weights) != num_functions:
        raise RewardError(
            "not one weight a function",
            where="reward.weights",
            expected=f"{num_functions} numbers",
            got=f"{len(weights)}",
        )


# ---------------------------------------------------------------- decode


def decode_group(group: UnscoredGroup, decoder: Decoder, stop: Sequence[str], prompt_column: str) -> ScorableGroup:
    """The group's text. A text prompt is shown as it was written, a chat as the model saw it."""
    row: dict[str, Any] = json.loads(group.row)
    prompt = row.get(prompt_column)
    completions = []
    for member in group.members:
        ids = memoryview(member.tokens).cast("i").tolist()
        text = cut_at_stop(decoder.decode(ids, skip_special_tokens=True), stop)
        completions.append(Completion(member.index, member.attempt, member.version, text, ids))
    prompt_text = prompt if isinstance(prompt, str) else decoder.decode(memoryview(group.prompt).cast("i").tolist())
    return ScorableGroup(group.group, row, prompt_text, tuple(completions))


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]


# ---------------------------------------------------------------- call


class RewardFunctions:
    """The functions of a run, ready to score groups. Lives in one thread: it owns an event loop.

    `on_call(names)` is told, just before, which functions are about to run.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        *,
        weights: Sequence[float] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        prompt_column: str = "prompt",
        max_steps: int | None = None,
        on_call: Callable[[str], None] = lambda names: None,
    ) -> None:
        check_weights(len(functions), weights)
        self._kwargs = dict(kwargs or {})
        self._functions = {name: _in_trl_form(function, self._kwargs) for name, function in functions.items()}
        self._weights = dict(zip(functions, weights or [1.0] * len(functions), strict=True))
        self._prompt_column = prompt_column
        self._max_steps = -1 if max_steps is None else max_steps
        self._on_call = on_call
        self._wanted = {name: _wanted_keywords(function) for name, function in self._functions.items()}
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Ends the event loop of asynchronous functions."""
        self._runner.close()

    def score(self, group: ScorableGroup) -> GroupScore:
        """Calls every function on the whole group. Raises FunctionFailed."""
        metrics: dict[str, list[float]] = {}
        extras: dict[str, list[Any]] = {}
        keywords = self._keywords(group, metrics, extras)
        returned = {name: self._start(name, keywords) for name in self._functions}
        self._finish_awaitables(returned)
        count = len(group.completions)
        rewards = {name: check_rewards(name, value, count) for name, value in returned.items()}
        for column, values in extras.items():
            print(json.dumps({"group": group.group, "column": column, "values": values}, default=str))
        members = tuple(
            self._member(completion, {name: values[place] for name, values in rewards.items()})
            for place, completion in enumerate(group.completions)
        )
        means = {name: math.fsum(values) / len(values) for name, values in metrics.items()}
        return GroupScore(group.group, members, group.prompt_text, means)

    def _member(self, completion: Completion, rewards: dict[str, float | None]) -> MemberScore:
        weighted = [self._weights[name] * value for name, value in rewards.items() if value is not None]
        reward = math.fsum(weighted) if weighted else None
        return MemberScore(completion.index, completion.attempt, reward, rewards, completion.text)

    def _keywords(
        self, group: ScorableGroup, metrics: dict[str, list[float]], extras: dict[str, list[Any]]
    ) -> dict[str, Any]:
        count = len(group.completions)
        prompt = group.row[self._prompt_column]
        texts = [completion.text for completion in group.completions]
        is_chat = not isinstance(prompt, str)
        columns = {name: [value] * count for name, value in group.row.items() if name != self._prompt_column}
        version = max((completion.version for completion in group.completions), default=0)

        def log_metric(name: str, value: float) -> None:
            if math.isfinite(value):
                metrics.setdefault(name, []).append(float(value))

        def log_extra(column: str, values: Iterable[Any]) -> None:
            extras.setdefault(column, []).extend(values)

        return {
            **columns,
            **self._kwargs,
            "prompts": [prompt] * count,
            "completions": [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
            "completion_ids": [completion.ids for completion in group.completions],
            "trainer_state": TrainerState(version, self._max_steps),
            "log_extra": log_extra,
            "log_metric": log_metric,
        }

    def _start(self, name: str, keywords: Mapping[str, Any]) -> Any:
        """What the function returns; an asynchronous one is only begun."""
        wanted = self._wanted[name]
        passed = keywords if wanted is None else {key: keywords[key] for key in wanted if key in keywords}
        self._on_call(name)
        try:
            return self._functions[name](**passed)
        except (Exception, SystemExit) as cause:  # user code: whatever it raises is its failure
            raise _raised(name, cause) from cause

    def _finish_awaitables(self, returned: dict[str, Any]) -> None:
        """Runs what asynchronous functions began, side by side, and puts their results in place."""
        waiting = {name: value for name, value in returned.items() if inspect.isawaitable(value)}
        if not waiting:
            return
        self._on_call(", ".join(waiting))
        results = self._runner.run(_gather(list(waiting.values())))
        for name, result in zip(waiting, results, strict=True):
            if isinstance(result, BaseException):
                raise _raised(name, result) from result
            returned[name] = result


async def _gather(awaitables: list[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


def _in_trl_form(function: RewardFunction, kwargs: Mapping[str, Any]) -> RewardFunction:
    parameters = _parameters(function)
    return verl.VerlFunction(function, parameters, kwargs) if verl.is_verl_function(parameters) else function


def _wanted_keywords(function: RewardFunction) -> list[str] | None:
    """The keywords the function asks for; None if it takes all."""
    parameters = _parameters(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def _raised(name: str, cause: BaseException) -> FunctionFailed:
    frames = cause.__traceback__
    ours = (__file__, verl.__file__)
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next  # the user's own frames are the ones to show
    text = "".join(traceback.format_exception(type(cause), cause, frames)).rstrip()
    return FunctionFailed(f"raised {type(cause).__name__}: {cause}\n{text}", where=f"reward function `{name}`")


def check_rewards(name: str, returned: Any, count: int) -> list[float | None]:
    """What a function returned as one finite number or None a completion.

    Takes any iterable, 1-D arrays and tensors included. Raises FunctionFailed with expected and got.
    """
    expected = f"{count} numbers or None, one a completion"
    if _is_array(returned, 0) or _is_array(returned, 1):
        returned = returned.tolist()
    if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Iterable):
        raise _unbelievable(name, expected, f"{type(returned).__name__} {_short(returned)}")
    try:
        values = list(returned)
    except Exception as cause:  # a generator runs the user's code only now
        raise _raised(name, cause) from cause
    if len(values) != count:
        raise _unbelievable(name, expected, f"{len(values)} values: {_short(values)}")
    return [_number(name, value, place) for place, value in enumerate(values)]


def _number(name: str, value: Any, place: int) -> float | None:
    if value is None:
        return None
    plain = value.item() if _is_array(value, 0) else value
    if isinstance(plain, bool) or not isinstance(plain, numbers.Real) or not math.isfinite(plain):
        raise _unbelievable(
            name, "finite numbers or None", f"{type(value).__name__} {_short(value)} for completion {place}"
        )
    return float(plain)


def _is_array(value: object, ndim: int) -> bool:
    """Whether it is a numpy array or a tensor of this many dimensions (neither library need be installed)."""
    return getattr(value, "ndim", None) == ndim and hasattr(value, "tolist") and hasattr(value, "item")


def _unbelievable(name: str, expected: str, got: str) -> FunctionFailed:
    return FunctionFailed(
        "returned something that is not a reward", where=f"reward function `{name}`", expected=expected, got=got
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."
