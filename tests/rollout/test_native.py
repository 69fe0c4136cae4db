"""The compiled kernels against the same in torch, and what happens where they can't be compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from laminar.rollout import native
from laminar.rollout.kernels import rms_norm
from laminar.rollout.native import Native
from laminar.rollout.sampling import sample
from laminar.types import Sampling

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def kernels() -> Native:
    found = native.load()
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


@pytest.fixture
def gaussian() -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [5, 16, 72])
def test_norm_of_a_sum(
    kernels: Native, gaussian: Callable[..., torch.Tensor], dtype: torch.dtype, features: int
) -> None:
    hidden, wide, weight = gaussian(3, features).to(dtype), gaussian(3, 2 * features).to(dtype), gaussian(features)
    delta, weight = wide[:, :features], weight.to(dtype)
    summed = hidden + delta
    normed = kernels.rms_norm(hidden, delta, weight, 1e-5)
    assert torch.equal(hidden, summed)
    torch.testing.assert_close(normed, rms_norm(summed, weight, 1e-5))
    assert torch.equal(kernels.rms_norm(hidden, None, weight, 1e-5), normed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_over_the_whole_range(kernels: Native, gaussian: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -87.0, -1.0, -1e-8, 0.0, 1e-8, 1.0, 87.0, 88.0, 200.0, 1e30]).to(dtype)
    up = gaussian(13).to(dtype)
    found = kernels.gated(torch.cat((gate, up))[None])[0]
    torch.testing.assert_close(found, F.silu(gate) * up, atol=1e-35, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 37, 128, 1000])
def test_draws_equal_those_of_torch(
    kernels: Native, gaussian: Callable[..., torch.Tensor], dtype: torch.dtype, vocab: int
) -> None:
    """Rows of every kind in one batch, in a tensor whose rows are not adjacent."""
    logits = (4 * gaussian(90, vocab + 3)).to(dtype)[:, :vocab]
    kinds = [Sampling(), Sampling(temperature=0.6), Sampling(temperature=0.0), Sampling(top_k=3), Sampling(top_p=0.5)]
    rows = [kinds[i % len(kinds)] for i in range(len(logits))]
    uniforms = np.linspace(0, 1, len(logits), endpoint=False)
    tokens, logprobs = sample(logits, uniforms, rows, kernels)
    expected_tokens, expected_logprobs = sample(logits, uniforms, rows)
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)


def test_the_ends_of_a_distribution(kernels: Native) -> None:
    """What has no weight is never drawn, not by the largest uniform either, and ties go to the first."""
    logits = torch.full((4, 300), -torch.inf)
    logits[:, 130] = logits[:, 140] = 2.0
    rows = [Sampling(), Sampling(), Sampling(), Sampling(temperature=0.0)]
    tokens, logprobs = sample(logits, [0.0, 0.499, 1 - 2.0**-53, 0.9], rows, kernels)
    assert tokens.tolist() == [130, 130, 140, 130]
    np.testing.assert_allclose(logprobs, np.log(0.5), rtol=1e-6)


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert native.load() is None


def test_a_compiler_that_fails_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ]\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: str(compiler))
    assert native.load() is None
    assert list((tmp_path / ".cache" / "laminar").iterdir()) == []
