"""Invariant 9 of docs/architecture.md: tokens and log-probs have the same bits however samples are scheduled."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from laminar.rollout.engine import Request
from tests.rollout.conftest import (
    FALLBACK,
    FAST,
    Bench,
    Response,
    check_exact,
    check_resumed,
    generate,
    random_prompt,
    request,
)

DTYPES = ["fp32", "bf16"]


def _requests(max_new_tokens: int = 50) -> list[Request]:
    """Groups of two; contexts on both sides of a KV block's 64 tokens."""
    prompts = [random_prompt(group, 1 + 21 * group) for group in range(4)]
    return [
        request(group, index, prompt, max_new_tokens=max_new_tokens + group)
        for group, prompt in enumerate(prompts)
        for index in range(2)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAST)
def test_a_sample_is_the_same_however_it_is_scheduled(
    make_bench: Callable[[str], Bench], name: str, dtype: str
) -> None:
    check_exact(make_bench(name), _requests(), random.Random(name), kv_tokens=200, dtype=dtype)


@pytest.mark.parametrize("name", ["llama tied grouped", "qwen3 own head size"])
def test_without_compiled_kernels_too(
    make_bench: Callable[[str], Bench], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laminar.rollout.native.load", lambda: None)
    check_exact(make_bench(name), _requests(max_new_tokens=20), random.Random(name), kv_tokens=200, dtype="bf16")


@pytest.mark.parametrize("name", FALLBACK)
def test_the_fallback_is_exact_too(make_bench: Callable[[str], Bench], name: str) -> None:
    bench, requests = make_bench(name), _requests(max_new_tokens=12)[:6]
    full = generate(bench.engine(), requests)
    assert generate(bench.engine(max_num_seqs=1), requests[3:4])[requests[3].sample] == full[requests[3].sample]
    check_resumed(bench, requests, full, random.Random(0), "fp32")


def test_samples_depend_on_every_part_of_their_key(make_bench: Callable[[str], Bench]) -> None:
    bench, prompt = make_bench("llama tied grouped"), random_prompt(0, 5)
    engine = bench.engine()

    def tokens(group: int, index: int, attempt: int) -> tuple[int, ...]:
        one = request(group, index, prompt, attempt=attempt, max_new_tokens=12)
        response: Response = generate(engine, [one])[one.sample]
        return tuple(response.tokens)

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    seen = [tokens(*key) for key in keys]
    assert len(set(seen)) == len(keys)
    assert tokens(0, 0, 0) == seen[0]
    engine = bench.engine(seed=1)
    assert tokens(0, 0, 0) != seen[0]
