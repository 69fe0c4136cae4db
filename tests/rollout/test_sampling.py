from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.rollout.sampling import keyed_uniform, sample
from laminar.types import Sampling

INT64 = st.integers(-(2**63), 2**63 - 1)


def test_uniforms_are_pinned() -> None:
    """Invariant 9 of docs/architecture.md: a change of these numbers breaks the resumption of old runs."""
    values = keyed_uniform(7, [0, 0, 1], [0, 1, 0], [0, 0, 2], [0, 5, 9])
    np.testing.assert_array_equal(values, [0.04531153927147591, 0.24776413447987566, 0.03369781439166053])


@given(key=st.tuples(INT64, INT64, INT64, INT64, INT64))
def test_uniforms_lie_in_the_unit_interval(key: tuple[int, int, int, int, int]) -> None:
    assert 0.0 <= float(keyed_uniform(*key)) < 1.0


@pytest.mark.parametrize("field", range(5))
def test_every_part_of_the_key_matters(field: int) -> None:
    keys = np.zeros((5, 4096), dtype=np.int64)
    keys[field] = np.arange(4096)
    values = np.array([keyed_uniform(*key) for key in keys.T.tolist()])
    assert len(np.unique(values)) == 4096
    counts = np.histogram(values, bins=16, range=(0, 1))[0]
    chi_square = ((counts - 256) ** 2 / 256).sum()
    assert chi_square < 37.7  # 15 degrees of freedom, p = 0.001


def test_keys_are_not_interchangeable() -> None:
    assert keyed_uniform(0, 1, 2, 0, 0) != keyed_uniform(0, 2, 1, 0, 0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    num_draws, vocab_size = 20_000, 300
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * 1.5
    uniforms = keyed_uniform(3, 0, 0, 0, np.arange(num_draws))
    tokens, _ = sample(logits.expand(num_draws, -1), uniforms, [Sampling(temperature)] * num_draws)
    expected = torch.softmax(logits.double() / temperature, -1).numpy() * num_draws
    counts = np.bincount(tokens, minlength=vocab_size)
    likely = expected >= 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = likely.sum() - 1
    assert chi_square < degrees + 3.5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_logprobs_are_those_of_the_full_softmax(temperature: float) -> None:
    """Fault 35."""
    logits = torch.randn(6, 777, generator=torch.Generator().manual_seed(1)) * 4
    sampling = [Sampling(temperature), Sampling(temperature, top_p=0.5)] * 3
    tokens, logprobs = sample(logits, np.linspace(0, 0.999, 6), sampling)
    expected = torch.log_softmax(logits.double() / temperature, -1)[torch.arange(6), torch.from_numpy(tokens).long()]
    np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-6, rtol=1e-6)


def test_temperature_zero_is_greedy() -> None:
    logits = torch.randn(5, 130, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = sample(logits, np.full(5, 0.999), [Sampling(0.0)] * 5)
    best = torch.log_softmax(logits, -1).max(-1)
    np.testing.assert_array_equal(tokens, best.indices.numpy())
    np.testing.assert_allclose(logprobs, best.values.numpy(), atol=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 2, 14, 128, 129, 1000])
@given(uniform=st.floats(0, 1, exclude_max=True))
def test_only_tokens_with_probability_are_drawn(vocab_size: int, uniform: float) -> None:
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, vocab_size // 2] = 1.0
    tokens, logprobs = sample(logits, [uniform], [Sampling()])
    assert (tokens[0], logprobs[0]) == (vocab_size // 2, 0.0)


@given(uniform=st.floats(0, 1, exclude_max=True), top_k=st.integers(-1, 4), top_p=st.floats(0.01, 1.0))
def test_narrowing_keeps_the_likeliest(uniform: float, top_k: int, top_p: float) -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
    order = [1, 3, 2, 4, 0]
    tokens, _ = sample(probabilities.log()[None], [uniform], [Sampling(top_k=top_k, top_p=top_p)])
    allowed = order[: top_k if top_k > 0 else 5]
    mass = probabilities[allowed] / probabilities[allowed].sum()
    needed = int((mass.cumsum(0) - mass < top_p + 1e-6).sum())
    assert tokens[0] in allowed[:needed]


@pytest.mark.parametrize("vocab_size", [14, 101, 1000])
def test_a_row_does_not_depend_on_the_batch(vocab_size: int) -> None:
    """Invariant 9 of docs/architecture.md."""
    logits = torch.randn(33, vocab_size, generator=torch.Generator().manual_seed(4)) * 3
    uniforms = keyed_uniform(0, np.arange(33), 0, 0, 0)
    sampling = [Sampling((0.0, 0.7, 1.0)[i % 3]) for i in range(33)]
    tokens, logprobs = sample(logits, uniforms, sampling)
    for i in range(33):
        alone = sample(logits[i : i + 1], uniforms[i : i + 1], [sampling[i]])
        assert (alone[0][0], alone[1][0]) == (tokens[i], logprobs[i])
