from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from laminar.errors import EngineError, ModelError, WeightsError
from laminar.golden import golden_ids
from laminar.types import Load, SampleId
from tests.rollout.conftest import (
    FAST,
    MODELS,
    VOCAB,
    Bench,
    generate,
    make_model,
    published,
    random_prompt,
    reference_logprobs,
    request,
)

LLAMA = "llama tied grouped"
MakeBench = Callable[[str], Bench]


# ---------------------------------------------------------------- agreement with transformers


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_transformers(make_bench: MakeBench, name: str) -> None:
    """Fault 23. Prompts and contexts on both sides of a KV block's 64 tokens."""
    bench = make_bench(name)
    requests = [
        request(i, 0, random_prompt(i, length), temperature=0.0, max_new_tokens=24)
        for i, length in enumerate((1, 3, 50, 64, 70))
    ]
    responses = generate(bench.engine(max_num_seqs=4), requests)
    for one in requests:
        prompt = torch.from_numpy(one.prompt).long()[None]
        expected = bench.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24
        )[0, len(one.prompt) :].tolist()
        response = responses[one.sample]
        assert (response.tokens, response.finish_reason) == (expected, "length")
        gap = response.logprobs - reference_logprobs(bench.model, one.prompt.tolist(), expected)
        assert np.abs(gap).max() < 1e-4


@pytest.mark.parametrize("name", FAST)
def test_without_compiled_kernels_too(make_bench: MakeBench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs of one sample, long enough for a second KV block, and the draws of the compiled kernels."""
    bench, one = make_bench(name), request(0, 0, random_prompt(0, 50), max_new_tokens=24)
    compiled = generate(bench.engine(), [one])[one.sample]
    monkeypatch.setattr("laminar.rollout.native.load", lambda: None)
    response = generate(bench.engine(), [one])[one.sample]
    assert response.tokens == compiled.tokens
    expected = reference_logprobs(bench.model, one.prompt.tolist(), response.tokens)
    np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)
    np.testing.assert_allclose(compiled.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_equal_those_of_transformers(make_bench: MakeBench, temperature: float) -> None:
    """Fault 35."""
    bench, prompt = make_bench("qwen3 own head size"), random_prompt(0, 10)
    one = request(0, 0, prompt, temperature=temperature, max_new_tokens=60)
    response = generate(bench.engine(), [one])[one.sample]
    expected = reference_logprobs(bench.model, prompt, response.tokens, temperature)
    np.testing.assert_allclose(response.logprobs, expected, atol=1e-5)


def test_a_prompt_longer_than_one_prefill_pass(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.rollout.decoder._PREFILL_TOKENS", 48)
    bench = make_bench(LLAMA)
    requests = [request(i, 0, random_prompt(i, length), max_new_tokens=5) for i, length in enumerate((130, 20, 7, 100))]
    responses = generate(bench.engine(), requests)
    for one in requests:
        response = responses[one.sample]
        expected = reference_logprobs(bench.model, one.prompt.tolist(), response.tokens)
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)


# ---------------------------------------------------------------- requests


def test_requests_wait_for_a_slot_and_the_load_says_so(make_bench: MakeBench) -> None:
    engine = make_bench(LLAMA).engine(max_num_seqs=2, kv_tokens=100)
    for index in range(3):
        engine.add(request(0, index, random_prompt(0, 4), max_new_tokens=8))
    assert engine.load() == Load(kv_used=0, kv_capacity=100, num_running=0, num_waiting=3)
    assert len(engine.poll(0.0)) == 2
    assert engine.load() == Load(kv_used=10, kv_capacity=100, num_running=2, num_waiting=1)


def test_kv_never_exceeds_its_bound(make_bench: MakeBench) -> None:
    engine = make_bench(LLAMA).engine(kv_tokens=64)
    requests = [request(0, index, random_prompt(index, 6), max_new_tokens=40) for index in range(5)]
    for one in requests:
        engine.add(one)
    finished, preempted, running = 0, False, 0
    while finished < len(requests):
        progress = engine.poll(0.0)
        finished += sum(p.finish_reason is not None for p in progress)
        load = engine.load()
        assert load.kv_used <= load.kv_capacity
        ended = sum(p.finish_reason is not None for p in progress)
        preempted |= load.num_running + ended < running
        running = load.num_running
    assert preempted
    assert engine.load() == Load(kv_capacity=64)


@pytest.mark.parametrize("state", ["queued", "prefilled", "decoding", "unknown"])
def test_release_in_every_state(make_bench: MakeBench, state: str) -> None:
    """Fault 15: others go on undisturbed, and the sample can come back."""
    bench = make_bench(LLAMA)
    kept = [request(0, index, random_prompt(0, 9), max_new_tokens=80) for index in range(2)]
    gone = request(1, 0, random_prompt(1, 70), max_new_tokens=80)
    expected = generate(bench.engine(), [*kept, gone])
    engine = bench.engine()
    tokens: dict[SampleId, list[int]] = {one.sample: [] for one in kept}

    def poll() -> None:
        for progress in engine.poll(0.0):
            tokens.setdefault(progress.sample, []).extend(progress.tokens.tolist())

    for one in (gone, *kept):
        engine.add(one)
    for _ in range({"queued": 0, "prefilled": 1, "decoding": 5, "unknown": 2}[state]):
        poll()
    engine.release([SampleId(9, 9)] if state == "unknown" else [gone.sample])
    if state != "unknown":
        load = engine.load()
        assert load.num_running + load.num_waiting == 2
        made = tokens.pop(gone.sample, [])
        engine.add(replace(gone, response=np.array(made, dtype=np.int32)))
        tokens[gone.sample] = made
    while engine.load().num_running + engine.load().num_waiting:
        poll()
    assert tokens == {sample: response.tokens for sample, response in expected.items()}


def test_a_response_that_was_complete_ends_at_once(make_bench: MakeBench) -> None:
    engine = make_bench(LLAMA).engine()
    one = request(0, 0, [1, 2], response=[3, 4, 5], max_new_tokens=3)
    engine.add(one)
    (progress,) = engine.poll(0.0)
    assert (progress.sample, len(progress.tokens), progress.finish_reason) == (one.sample, 0, "length")
    assert engine.load() == Load(kv_capacity=engine.load().kv_capacity)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (request(0, 0, [], max_new_tokens=3), "prompt is empty"),
        (request(0, 0, [VOCAB], max_new_tokens=3), "outside the vocabulary"),
        (request(0, 0, [1], response=[-1], max_new_tokens=3), "outside the vocabulary"),
        (request(0, 0, [1] * 20, max_new_tokens=81), "need 101 tokens"),
        (request(5, 5, [1], max_new_tokens=3), "already here"),
    ],
)
def test_impossible_requests_are_refused(make_bench: MakeBench, one, message: str) -> None:
    engine = make_bench(LLAMA).engine(kv_tokens=100)
    engine.add(request(5, 5, [1, 2], max_new_tokens=3))
    with pytest.raises(EngineError, match=message):
        engine.add(one)
    assert engine.load().num_waiting == 1


# ---------------------------------------------------------------- weights


def _golden(model) -> np.ndarray:
    ids = golden_ids(VOCAB)
    return reference_logprobs(model, ids[:1], ids[1:])


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_and_logit_is_new_after_a_second_load(make_bench: MakeBench, name: str) -> None:
    """Faults 22, 23, 25 and 27: nothing of the first weights is left, tied or derived or cached."""
    bench = make_bench(name)
    engine = bench.engine()
    one = request(0, 0, random_prompt(0, 9), max_new_tokens=4)
    generate(engine, [one])
    second = make_model(name, seed=1)
    engine.load_weights(bench.source.write(1, published(second)))
    expected = published(second)
    assert engine.parameters.keys() == expected.keys()
    for parameter, tensor in expected.items():
        assert torch.equal(engine.parameters[parameter], tensor), parameter
    np.testing.assert_allclose(engine.golden(), _golden(second), atol=1e-5)
    response = generate(engine, [one])[one.sample]
    np.testing.assert_allclose(
        response.logprobs, reference_logprobs(second, one.prompt.tolist(), response.tokens), atol=1e-4
    )


def _spoil(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    name = "model.layers.0.mlp.up_proj.weight"
    match how:
        case "missing":
            tensors.pop(name)
        case "renamed":
            tensors["model.layers.0.mlp.extra.weight"] = tensors.pop(name)
        case "extra":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        case "shape":
            tensors[name] = tensors[name][:-1]
    return tensors


@pytest.mark.parametrize("how", ["missing", "renamed", "extra", "shape", "fingerprint", "dtype", "golden"])
def test_a_failed_load_leaves_an_engine_that_generates_nothing(make_bench: MakeBench, how: str) -> None:
    """Faults 22 and 24; a good load afterwards mends it."""
    bench = make_bench(LLAMA)
    engine = bench.engine()
    good = bench.source.write(1, published(bench.model))
    ref = bench.source.write(2, _spoil(published(bench.model), how), "bf16" if how == "dtype" else "fp32")
    if how == "fingerprint":
        ref = replace(ref, fingerprint="0" * 64)
    bench.source.golden[ref.path] = _golden(make_model(LLAMA, seed=1)) if how == "golden" else ()
    with pytest.raises(WeightsError, match="version 2"):
        engine.load_weights(ref)
    assert engine.loaded is None
    with pytest.raises(EngineError, match="no weights"):
        engine.add(request(0, 0, [1], max_new_tokens=2))
    with pytest.raises(EngineError, match="no weights"):
        engine.golden()
    bench.source.golden[good.path] = _golden(bench.model).tolist()
    engine.load_weights(good)
    assert engine.loaded == good
    assert len(generate(engine, [request(0, 0, [1], max_new_tokens=2)])) == 1


def test_weights_stay_while_requests_are_here(make_bench: MakeBench) -> None:
    """Fault 27: KV is never older than the weights."""
    bench = make_bench(LLAMA)
    engine = bench.engine()
    before = engine.loaded
    engine.add(request(0, 0, [1, 2], max_new_tokens=5))
    ref = bench.source.write(1, published(bench.model))
    for _ in range(2):
        with pytest.raises(EngineError, match="while requests are here"):
            engine.load_weights(ref)
        engine.poll(0.0)
    assert engine.loaded == before
    engine.release([SampleId(0, 0)])
    engine.load_weights(ref)
    assert engine.loaded == ref


def test_an_engine_starts_without_weights(make_bench: MakeBench) -> None:
    engine = make_bench(LLAMA).engine(load=False)
    assert engine.loaded is None
    with pytest.raises(EngineError, match="no weights"):
        engine.add(request(0, 0, [1], max_new_tokens=2))


@pytest.mark.parametrize("name", [*FAST])
def test_golden_logprobs_in_bf16_are_near_those_in_fp32(make_bench: MakeBench, name: str) -> None:
    bench = make_bench(name)
    gap = bench.engine(dtype="bf16").golden() - _golden(bench.model)
    assert len(gap) == 63
    assert np.abs(gap).mean() < 0.1


# ---------------------------------------------------------------- models


def test_a_model_of_another_kind_is_refused(make_bench: MakeBench) -> None:
    bench = make_bench(LLAMA)
    file = bench.folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "is_encoder_decoder": True}))
    with pytest.raises(ModelError, match="vllm"):
        bench.engine(load=False)


def test_a_folder_without_a_model_is_refused(make_bench: MakeBench) -> None:
    bench = make_bench(LLAMA)
    (bench.folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        bench.engine(load=False)
