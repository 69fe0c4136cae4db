"""One iteration: what it learns, what it skips, what it measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from laminar.config import Config
from laminar.trainer import policy, step
from laminar.trainer.packing import make_layout, unpack
from laminar.trainer.policy import token_logprobs
from laminar.trainer.step import TrainState, learning_rate, train_batch
from laminar.types import Batch, BatchChunk, Version

MakeBatch = Callable[..., Batch]
MakeConfig = Callable[..., Config]


def plain_descent(model: PreTrainedModel) -> TrainState:
    """A state whose step is the gradient itself, so that gradients can be compared."""
    return TrainState(model.double(), torch.optim.SGD(model.parameters(), lr=1.0))


def weights_of(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in state.model.named_parameters()}


def with_own_logprobs(batch: Batch, state: TrainState, temperature: float = 1.0, noise: float = 0.0) -> Batch:
    """The batch as an engine with the state's weights would have sampled it, with every token unmasked."""
    samples = unpack(batch)
    layout = make_layout(samples, [(i,) for i in range(len(samples.groups))], packed=False)
    with torch.no_grad():
        logprobs = token_logprobs(state.model, layout, temperature)[0].numpy()
    logprobs = logprobs + np.random.default_rng(0).normal(0, noise, len(logprobs)) if noise else logprobs
    return replace(batch, logprobs=logprobs.astype("<f4").tobytes(), mask=bytes([1] * len(logprobs)))


PACKINGS = [  # tokens of a micro-batch, packed, logits of a chunk
    (8192, True, 2**25),
    (8192, True, 5 * 32),
    (8192, False, 2**25),
    (40, True, 3 * 32),
    (40, False, 2**25),
    (1, True, 1),
    (1, False, 2**25),
]


@pytest.mark.parametrize("num_mini_batches", [1, 3])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_packing_changes_nothing(
    model: PreTrainedModel,
    make_batch: MakeBatch,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    num_mini_batches: int,
) -> None:
    """Micro-batch size, padding, packing, shared prompts and chunks of the head leave weights and statistics alone."""
    start = {name: tensor.double().clone() for name, tensor in model.state_dict().items()}
    results = []
    for micro_batch_tokens, packed, chunk_logits in PACKINGS:
        monkeypatch.setattr(policy, "CHUNK_LOGITS", chunk_logits)
        monkeypatch.setattr(step, "can_pack", lambda _, packed=packed: packed)
        state = plain_descent(model)
        model.load_state_dict(start)
        state.reference = model if num_mini_batches == 1 else None
        config = make_config(
            train__loss_agg_mode=mode,
            train__micro_batch_tokens=micro_batch_tokens,
            train__num_mini_batches=num_mini_batches,
            train__groups_per_batch=6,
            train__lr=0.05,
            train__max_grad_norm=1e6,
            train__kl_loss_coef=0.1 if num_mini_batches == 1 else 0.0,
        )
        statistics = train_batch(state, make_batch(groups=(3, 1, 4, 2, 3)), config)
        results.append((weights_of(state), statistics))
    weights, statistics = results[0]
    assert any(not torch.equal(weights[name], start[name]) for name in weights)
    for other_weights, other_statistics in results[1:]:
        for name, tensor in weights.items():
            torch.testing.assert_close(other_weights[name], tensor, atol=1e-6, rtol=0)
        assert other_statistics == pytest.approx(statistics, abs=1e-6)


def test_two_mini_batches_are_two_steps_against_one_old_policy(
    model: PreTrainedModel, make_batch: MakeBatch, make_config: MakeConfig
) -> None:
    """With one mini-batch the ratio is exactly 1; with two the second step moves away from the old policy."""
    kl_old = {}
    for num in (1, 2):
        state = plain_descent(model)
        config = make_config(train__num_mini_batches=num, train__lr=0.1)
        kl_old[num] = train_batch(state, make_batch(), config)["kl_old"]
        assert state.optimizer_steps == num
    assert kl_old[1] == 0
    assert kl_old[2] is not None and kl_old[2] > 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_weights_are_one(
    model: PreTrainedModel, make_batch: MakeBatch, make_config: MakeConfig, temperature: float
) -> None:
    """Fault 35: the same weights give the same log-probs, at any temperature."""
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0))
    batch = with_own_logprobs(make_batch(), state, temperature)
    config = make_config(train__lr=0.0, train__num_mini_batches=2, rollout__temperature=temperature)
    statistics = train_batch(state, batch, config)
    assert statistics["logprob_gap_max"] == pytest.approx(0, abs=1e-5)
    assert statistics["is_weight_mean"] == pytest.approx(1, abs=1e-5)
    assert statistics["kl_old"] == statistics["clip_fraction"] == statistics["is_capped_fraction"] == 0
    assert statistics["kl_rollout"] == pytest.approx(0, abs=1e-9)


def test_the_gradient_is_that_of_the_advantage(
    model: PreTrainedModel, make_batch: MakeBatch, make_config: MakeConfig
) -> None:
    """On policy one step is the plain policy gradient: minus the mean of A times log-prob, by hand."""
    state = plain_descent(model)
    batch = replace(with_own_logprobs(make_batch(groups=(2, 2)), state), rewards=(0.0, 1.0, 5.0, 5.0))
    samples = unpack(batch)
    total = 0.0
    for i, advantage in ((0, -(0.5**0.5)), (1, 0.5**0.5)):
        layout = make_layout(samples, [(i,)], packed=False)
        scale = 0.5**0.5 / (0.5**0.5 + 1e-4)
        total = total - token_logprobs(model, layout, 1.0)[0].sum() * advantage * scale
    (total / len(samples.mask)).backward()  # type: ignore[union-attr]
    expected = {name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    train_batch(state, batch, make_config(train__lr=0.1, train__max_grad_norm=1e6))
    for name, tensor in expected.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), tensor, atol=1e-6, rtol=0)


def test_prompt_tokens_and_masked_tokens_teach_nothing(
    model: PreTrainedModel, make_batch: MakeBatch, make_config: MakeConfig
) -> None:
    """Fault 32: log-probs of masked tokens may be anything."""
    results = []
    for junk in (0.0, float("nan"), -1e4):
        state = plain_descent(model)
        batch = make_batch()
        logprobs = np.frombuffer(batch.logprobs, "<f4").copy()
        logprobs[np.frombuffer(batch.mask, np.uint8) == 0] = junk
        config = make_config(train__lr=0.0)
        results.append(train_batch(state, replace(batch, logprobs=logprobs.tobytes()), config))
    assert results[0] == results[1] == results[2]


def test_all_masked_is_skipped_and_counted(
    model: PreTrainedModel, make_batch: MakeBatch, make_config: MakeConfig
) -> None:
    """Fault 33."""
    state = plain_descent(model)
    before = weights_of(state)
    batch = make_batch()
    batch = replace(batch, mask=bytes(len(batch.mask)))
    statistics = train_batch(state, batch, make_config(train__num_mini_batches=2))
    assert (statistics["loss"], statistics["skipped_steps"], statistics["grad_norm"]) == (0.0, 2.0, None)
    assert (state.optimizer_steps, state.skipped_steps) == (0, 2)
    assert statistics["entropy"] is None
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(state).items())


def test_truncated_samples_leave_the_loss_but_not_the_baseline(
    model: PreTrainedModel, make_batch: MakeBatch, make_config: MakeConfig
) -> None:
    batch = replace(make_batch(groups=(3,)), truncated=(False, True, False), rewards=(1.0, 4.0, 1.0))
    lengths = batch.response_lengths
    by_hand = bytearray(batch.mask)
    by_hand[lengths[0] : lengths[0] + lengths[1]] = bytes(lengths[1])
    start = {name: tensor.double().clone() for name, tensor in model.state_dict().items()}
    results = []
    for b, mask_truncated in ((batch, True), (replace(batch, mask=bytes(by_hand)), False)):
        state = plain_descent(model)
        model.load_state_dict(start)
        statistics = train_batch(state, b, make_config(train__mask_truncated=mask_truncated))
        assert statistics["truncated_fraction"] == pytest.approx(1 / 3)
        assert statistics["reward_mean"] == 2
        results.append((statistics, weights_of(state)))
    assert results[0][0] == results[1][0]
    assert results[0][0]["grad_norm"] != 0
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_a_step_that_is_not_finite_is_skipped_and_counted(
    model: PreTrainedModel, make_batch: MakeBatch, make_config: MakeConfig
) -> None:
    state = plain_descent(model)
    before = weights_of(state)
    batch = make_batch()
    logprobs = np.full(len(batch.mask), np.nan, dtype="<f4")
    statistics = train_batch(state, replace(batch, logprobs=logprobs.tobytes()), make_config())
    assert (state.optimizer_steps, state.skipped_steps, statistics["skipped_steps"]) == (0, 1, 1.0)
    assert statistics["loss"] is None
    assert statistics["is_weight_mean"] is None
    assert statistics["logprob_gap_max"] is None
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(state).items())


def test_equal_rewards_are_a_step_with_a_zero_gradient(
    model: PreTrainedModel, make_batch: MakeBatch, make_config: MakeConfig
) -> None:
    """Fault 36: no advantage, no gradient; the optimizer's momentum and decay go on all the same."""
    config = make_config(train__lr=0.01)
    state = TrainState(model, step.make_optimizer(model, config))
    train_batch(state, make_batch(), config)
    moments = {id(p): {k: v.clone() for k, v in s.items()} for p, s in state.optimizer.state.items()}
    before = weights_of(state)
    batch = make_batch(1)
    statistics = train_batch(state, replace(batch, rewards=(1.0,) * len(batch.rewards)), config)
    assert (statistics["loss"], statistics["grad_norm"], statistics["zero_variance_fraction"]) == (0, 0, 1)
    assert statistics["entropy"] is not None
    assert statistics["skipped_steps"] == 0
    for name, parameter in model.named_parameters():
        old = moments[id(parameter)]
        mean = 0.9 * old["exp_avg"] / (1 - 0.9**2)
        square = 0.999 * old["exp_avg_sq"] / (1 - 0.999**2)
        expected = before[name] * (1 - 0.01 * 0.01) - 0.01 * mean / (square.sqrt() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-6, rtol=1e-4)


def test_an_empty_batch_changes_nothing(model: PreTrainedModel, make_batch: MakeBatch, make_config: MakeConfig) -> None:
    state = plain_descent(model)
    before = weights_of(state)
    statistics = train_batch(state, make_batch(groups=()), make_config(train__num_mini_batches=2))
    assert {value for name, value in statistics.items() if name != "skipped_steps"} == {None}
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(state).items())


def test_the_gap_is_measured_where_nothing_was_learned_in_between(
    model: PreTrainedModel, make_batch: MakeBatch, make_config: MakeConfig
) -> None:
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0), version=Version(0, 4))
    batch = with_own_logprobs(make_batch(4, groups=(1, 1)), state, noise=0.0)
    first, second = batch.response_lengths
    logprobs = np.frombuffer(batch.logprobs, "<f4") + np.array([0.25] * first + [3.0] * second, dtype="<f4")
    batch = replace(batch, logprobs=logprobs.astype("<f4").tobytes())
    fresh, old = BatchChunk(Version(0, 4), first), BatchChunk(Version(0, 3), second)
    statistics = train_batch(state, replace(batch, chunks=((fresh,), (old,))), make_config(train__lr=0.0))
    assert statistics["logprob_gap_mean"] == pytest.approx(0.25, abs=1e-5)
    assert statistics["logprob_gap_max"] == pytest.approx(0.25, abs=1e-5)
    stale = BatchChunk(Version(0, 3), first)
    statistics = train_batch(state, replace(batch, chunks=((stale,), (old,))), make_config(train__lr=0.0))
    assert statistics["logprob_gap_mean"] is statistics["logprob_gap_max"] is None


def test_kl_to_a_reference(make_batch: MakeBatch, make_config: MakeConfig) -> None:
    config = make_config(train__kl_loss_coef=0.5, train__lr=0.05)
    state = TrainState.create(config)
    assert state.reference is not None
    first = train_batch(state, make_batch(), config)["kl_ref"]
    second = train_batch(state, make_batch(), config)["kl_ref"]
    assert first == pytest.approx(0, abs=1e-9)
    assert second is not None and second > 1e-6
    assert TrainState.create(make_config()).reference is None


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "expected"),
    [
        ("constant", 0, [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("constant", 2, [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]),
        ("constant", 1, [0.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", 0, [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]),
        ("linear", 2, [0.0, 1.0, 2.0, 1.0, 0.0, 0.0]),
        ("cosine", 2, [0.0, 1.0, 2.0, 1.0, 0.0, 0.0]),
        ("cosine", 1, [0.0, 2.0, 1.5, 0.5, 0.0, 0.0]),
    ],
)
def test_the_rate_rises_and_falls(
    make_config: MakeConfig, schedule: str, warmup_steps: int, expected: list[float]
) -> None:
    """Two iterations of two steps each; a step that was skipped and made up for at the end teaches nothing."""
    config = make_config(
        iterations=2, train__lr=2.0, train__num_mini_batches=2, train__lr_schedule=schedule,
        train__warmup_steps=warmup_steps,
    )  # fmt: skip
    assert [learning_rate(config, i) for i in range(6)] == pytest.approx(expected)


def test_bf16_trains_fp32_masters(make_batch: MakeBatch, make_config: MakeConfig) -> None:
    results: dict[str, Any] = {}
    for dtype in ("fp32", "bf16"):
        config = make_config(train__dtype=dtype)
        state = TrainState.create(config)
        results[dtype] = train_batch(state, make_batch(), config)
        assert {p.dtype for p in state.model.parameters()} == {torch.float32}
    assert results["bf16"]["entropy"] == pytest.approx(results["fp32"]["entropy"], rel=0.05)
    assert results["bf16"]["entropy"] != results["fp32"]["entropy"]


OWN = """
def above_zero(rewards, groups):
    return rewards
def imitate(new, **rest):
    return -new
"""


@pytest.mark.parametrize(
    ("key", "name", "moves"), [("advantage", "above_zero", True), ("loss", "imitate", True), (None, "", False)]
)
def test_equal_rewards_teach_what_the_user_says(
    tmp_path: Path, make_batch: MakeBatch, make_config: MakeConfig, key: str | None, name: str, moves: bool
) -> None:
    """GRPO learns nothing from them; an advantage or a loss of one's own may."""
    (tmp_path / "own.py").write_text(OWN)
    config = make_config(**({} if key is None else {f"train__{key}": f"{tmp_path}/own.py:{name}"}))
    state = TrainState.create(config)
    batch = make_batch()
    batch = with_own_logprobs(replace(batch, rewards=(1.0,) * len(batch.ids)), state)
    statistics = train_batch(state, batch, config)
    assert statistics["grad_norm"] is not None and (statistics["grad_norm"] > 0) == moves
    assert (statistics["clip_fraction"] is None) == (key == "loss")
