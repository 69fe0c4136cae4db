"""Tiny random models, weights from memory, and ways to drive an engine to the end."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from laminar.config import RolloutConfig
from laminar.errors import WeightsError
from laminar.rollout.engine import Request
from laminar.rollout.torch_engine import TorchEngine
from laminar.types import SampleId, Sampling, SlotRef, Version

VOCAB = 101
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_WHOLE_VECTORS = {**_SHAPE, "hidden_size": 64}
"""Heads of 16, which the compiled kernels take; those of 12 go with torch."""
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_GPT2 |= {"bos_token_id": None, "eos_token_id": None}
FAST = {
    "llama tied grouped": ("llama", {**_WHOLE_VECTORS, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama biased llama3-rope": (
        "llama",
        {**_SHAPE, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3_ROPE},
    ),
    "qwen2 one kv head": ("qwen2", {**_WHOLE_VECTORS, "num_key_value_heads": 1}),
    "qwen3 own head size": ("qwen3", {**_SHAPE, "num_key_value_heads": 2, "head_dim": 32}),
    "gpt2": ("gpt2", _GPT2),
    "gpt2 untied": ("gpt2", {**_GPT2, "n_embd": 52, "tie_word_embeddings": False}),
}
FALLBACK = {
    "mistral sliding window": ("mistral", {**_SHAPE, "num_key_value_heads": 2, "sliding_window": 8}),
    "gpt_neox": ("gpt_neox", _SHAPE),
}
MODELS = {**FAST, **FALLBACK}


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model, far enough from uniform that mistakes show."""
    family, settings = MODELS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    return model


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass
class FileLease:
    ref: SlotRef
    golden: Sequence[float]

    def copy_into(self, destination: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in load_file(self.ref.path).items():
            destination[name].copy_(tensor)
        if _digest(destination) != self.ref.fingerprint:
            raise WeightsError(f"version {self.ref.version}: wrong fingerprint")


@dataclass
class FileSource:
    """Weight files in a folder, with what the trainer would say about them."""

    folder: Path
    golden: dict[str, Sequence[float]] = field(default_factory=dict)
    """Path to golden log-probs."""

    def write(self, number: int, tensors: Mapping[str, torch.Tensor], dtype: str = "fp32") -> SlotRef:
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        tensors = {name: tensor.detach().to(kind).clone().contiguous() for name, tensor in tensors.items()}
        path = str(self.folder / f"{number}-{dtype}.safetensors")
        save_file(tensors, path)
        return SlotRef(path, Version(0, number), _digest(tensors), dtype)

    @contextmanager
    def lease(self, ref: SlotRef) -> Iterator[FileLease]:
        yield FileLease(ref, self.golden.get(ref.path, ()))


def published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a trainer publishes: Hugging Face names, tied tensors once."""
    return {n: t for n, t in model.state_dict().items() if n not in model.all_tied_weights_keys}


@dataclass
class Bench:
    """One model's folder and engines on it."""

    model: PreTrainedModel
    folder: Path
    source: FileSource

    def engine(
        self, *, seed: int = 0, load: bool = True, golden_tolerance: float = 1e-4, **rollout: Any
    ) -> TorchEngine:
        config = RolloutConfig(**rollout)
        engine = TorchEngine(self.folder, config, seed, self.source, golden_tolerance=golden_tolerance)
        if load:
            engine.load_weights(self.source.write(0, published(self.model), config.dtype))
        return engine


@pytest.fixture
def make_bench(tmp_path: Path) -> Callable[[str], Bench]:
    def make(name: str) -> Bench:
        torch.set_num_threads(1)
        model = make_model(name)
        model.config.save_pretrained(tmp_path)
        return Bench(model, tmp_path, FileSource(tmp_path))

    return make


@dataclass
class Response:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def after(self, length: int) -> Response:
        return Response(self.tokens[length:], self.logprobs[length:], self.finish_reason)


def request(
    group: int, index: int, prompt: Sequence[int], *, response: Sequence[int] = (), attempt: int = 0, **sampling: Any
) -> Request:
    ids = np.array(prompt, dtype=np.int32), np.array(response, dtype=np.int32)
    return Request(SampleId(group, index), attempt, *ids, Sampling(**sampling))


def random_prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def generate(engine: TorchEngine, requests: Iterable[Request], max_steps: int = 2000) -> dict[SampleId, Response]:
    """Add all requests and poll until each has a finish reason."""
    responses = {}
    for one in requests:
        responses[one.sample] = Response()
        engine.add(one)
    for _ in range(max_steps):
        for progress in engine.poll(0.0):
            response = responses[progress.sample]
            assert response.finish_reason is None
            response.tokens += progress.tokens.tolist()
            response.logprobs += progress.logprobs.tolist()
            response.finish_reason = progress.finish_reason
        if all(response.finish_reason for response in responses.values()):
            return responses
    raise AssertionError(f"unfinished after {max_steps} steps: {responses}")


def reference_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> np.ndarray:
    """float32 [R] by one forward pass of transformers over the whole text."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


def check_exact(
    bench: Bench, requests: list[Request], dice: random.Random, *, kv_tokens: int, dtype: str = "fp32"
) -> None:
    """The same bits together, alone, preempted because there is room for `kv_tokens` only, and resumed."""
    full = generate(bench.engine(dtype=dtype), requests)
    alone = bench.engine(dtype=dtype)
    for one in dice.sample(requests, 2):
        assert generate(alone, [one])[one.sample] == full[one.sample]
    assert generate(bench.engine(dtype=dtype, kv_tokens=kv_tokens), requests) == full
    check_resumed(bench, requests, full, dice, dtype)


def check_resumed(
    bench: Bench, requests: list[Request], full: dict[SampleId, Response], dice: random.Random, dtype: str
) -> None:
    """Go on from random prefixes, in another order and in smaller batches."""
    cuts = {one.sample: dice.randrange(len(full[one.sample].tokens)) for one in requests}
    resumed = [
        replace(one, response=np.array(full[one.sample].tokens[: cuts[one.sample]], dtype=np.int32)) for one in requests
    ]
    dice.shuffle(resumed)
    responses = generate(bench.engine(dtype=dtype, max_num_seqs=3), resumed)
    expected = {sample: response.after(cuts[sample]) for sample, response in full.items()}
    assert responses == expected
