"""Reward functions in verl's form, made callable in TRL's.

verl calls `compute_score(data_source, solution_str, ground_truth, extra_info)` for each response or, in the batch form,
`compute_score(data_sources, solution_strs, ground_truths, extra_infos)` for all of them at once. Either gives a number
for a response, or a dict with `score` and more to log; either may be asynchronous.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def is_verl_row(row: Mapping[str, Any]) -> bool:
    """Whether a row has the columns that verl's preprocessing writes."""
    return "data_source" in row and _has_ground_truth(row)


def is_verl_function(parameters: Iterable[inspect.Parameter]) -> bool:
    """Whether a function has one of verl's forms: in TRL's, no parameter has these names."""
    return any(parameter.name in (SINGLE[1], BATCH[1]) for parameter in parameters)


def given(row: Mapping[str, Any]) -> set[str]:
    """The keywords of verl's forms that rows like this one have a value for."""
    there = ("data_source" in row, True, _has_ground_truth(row), True)
    return {name for names in (SINGLE, BATCH) for name, found in zip(names, there, strict=True) if found}


def _has_ground_truth(row: Mapping[str, Any]) -> bool:
    reward_model = row.get("reward_model")
    return isinstance(reward_model, Mapping) and "ground_truth" in reward_model


class VerlFunction:
    """A function in one of verl's forms as one in TRL's. `kwargs` are given to it beside verl's own keywords."""

    def __init__(
        self, function: Callable[..., Any], parameters: Sequence[inspect.Parameter], kwargs: Mapping[str, Any]
    ) -> None:
        self._function = function
        self._kwargs = kwargs
        names = {parameter.name for parameter in parameters}
        self._is_batch = BATCH[1] in names
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._wanted = None if takes_all else names

    def __call__(self, completions: Sequence[Any], log_metric: Any, log_extra: Any, **columns: Any) -> Any:
        """A number for each completion, as the function gave it; what else it gave is logged."""
        values = _values(completions, columns)
        if self._is_batch:
            returned = self._call(BATCH, values)
        else:
            returned = [self._call(SINGLE, one) for one in zip(*values, strict=True)]
        if inspect.isawaitable(returned):
            return _awaited(returned, log_metric, log_extra)
        if isinstance(returned, list) and any(inspect.isawaitable(one) for one in returned):
            return _awaited(_gathered(returned), log_metric, log_extra)
        return _scores(returned, log_metric, log_extra)

    def _call(self, names: Sequence[str], values: Iterable[Any]) -> Any:
        keywords = {**dict(zip(names, values, strict=True)), **self._kwargs}
        return self._function(
            **{name: value for name, value in keywords.items() if self._wanted is None or name in self._wanted}
        )


def _values(completions: Sequence[Any], columns: Mapping[str, Any]) -> tuple[list[Any], ...]:
    """In the order of the keywords, one a completion. Nulls and columns that are not there become {} and None."""
    nothing = [None] * len(completions)
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    truths = [(model or {}).get("ground_truth") for model in columns.get("reward_model", nothing)]
    extras = [dict(info or {}) for info in columns.get("extra_info", nothing)]
    return list(columns.get("data_source", nothing)), texts, truths, extras


async def _awaited(returned: Awaitable[Any], log_metric: Any, log_extra: Any) -> Any:
    return _scores(await returned, log_metric, log_extra)


async def _gathered(calls: list[Awaitable[Any]]) -> list[Any]:
    """All results. Raises the first failure, once nothing runs any more."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _scores(returned: Any, log_metric: Any, log_extra: Any) -> Any:
    """`score` of each dict, everything else as it is; the rest of the dicts is logged."""
    if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Iterable):
        return returned
    results = list(returned)
    dicts = [result for result in results if isinstance(result, Mapping) and "score" in result]
    for name in dict.fromkeys(name for result in dicts for name in result if name != "score"):
        values = [result.get(name) for result in dicts]
        for value in values:
            if isinstance(value, numbers.Real):
                log_metric(name, float(value))
        if not all(isinstance(value, numbers.Real) for value in values):
            log_extra(name, values)
    return [result["score"] if isinstance(result, Mapping) and "score" in result else result for result in results]
