"""Tiny random models, and batches whose behaviour log-probs come from the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from laminar.config import Config
from laminar.types import Batch, BatchChunk, Version

VOCAB = 32
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0},
    "qwen3": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
    },
}


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=VOCAB, **MODELS[kind]))
    for parameter in model.parameters():
        parameter.data.mul_(3.0)  # far enough from uniform that mistakes show
    return model.eval()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Several compute threads on shared cores wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny random model of each family, dropout off."""
    return make_model(request.param)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def make_config(model_folder: Path) -> Callable[..., Config]:
    """Config by `section__key=value`; everything else by default."""

    def make(**overrides: Any) -> Config:
        sections: dict[str, Any] = {
            "model": {"path": model_folder},
            "data": {"train": "prompts.jsonl"},
            "reward": {"functions": ["reward.py:reward"]},
            "train": {"lr": 1e-3, "groups_per_batch": 4, "group_size": 3},
            "rollout": {"max_new_tokens": 8},
            "iterations": 6,
        }
        for key, value in overrides.items():
            section, _, name = key.partition("__")
            if name:
                sections.setdefault(section, {})[name] = value
            else:
                sections[section] = value
        return Config(**sections)

    return make


def build_batch(
    update: int = 0,
    *,
    groups: Sequence[int] = (3, 3, 2, 3),
    seed: int = 0,
    version: Version | None = None,
    first_group: int = 0,
    max_new_tokens: int = 8,
) -> Batch:
    """A batch of random tokens and rewards; `groups` are the sizes of its groups."""
    rng = np.random.default_rng([seed, update])
    ids = [(first_group + g, i, 0) for g, size in enumerate(groups) for i in range(size)]
    prompts = {g: rng.integers(VOCAB, size=rng.integers(1, 6)) for g, _, _ in ids}
    responses = [rng.integers(VOCAB, size=rng.integers(1, max_new_tokens + 1)) for _ in ids]
    lengths = tuple(len(response) for response in responses)
    version = Version(0, update) if version is None else version
    total = sum(lengths)
    return Batch(
        update=update,
        part=0,
        num_parts=1,
        ids=tuple(ids),
        versions=(version,) * len(ids),
        prompt_lengths=tuple(len(prompts[g]) for g, _, _ in ids),
        response_lengths=lengths,
        prompt_tokens=np.concatenate([[], *(prompts[g] for g, _, _ in ids)]).astype("<i4").tobytes(),
        response_tokens=np.concatenate([[], *responses]).astype("<i4").tobytes(),
        logprobs=rng.normal(-3.0, 0.5, size=total).astype("<f4").tobytes(),
        mask=(rng.random(total) < 0.9).astype(np.uint8).tobytes(),
        chunks=tuple((BatchChunk(version, length),) for length in lengths),
        rewards=tuple(float(r) for r in rng.integers(0, 3, size=len(ids))),
        truncated=tuple(length == max_new_tokens for length in lengths),
    )


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return build_batch
