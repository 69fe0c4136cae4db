"""`laminar bench step`: one optimizer step of the trainer beside a plain one, on the same batch.

The plain one is what a trainer on transformers does: as many samples at a time as fit into `micro_batch_tokens` when
each is as long as the longest, padded to the longest of them, logits at all positions behind the prompts, log-softmax
in fp32. Each side has a process of its own, and so its own peak of memory; they take steps in turn, on one thread.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from laminar.config import Config, Dtype
from laminar.trainer import packing
from laminar.trainer.advantage import group_advantages
from laminar.trainer.policy import autocast, load_model
from laminar.trainer.step import TrainState, make_optimizer, train_batch
from laminar.types import ALLOCATOR, Batch, BatchChunk, Version

ROUNDS = 3
"""Counted steps of each side, after one that is not."""
TOLERANCE: dict[Dtype, float] = {"fp32": 1e-3, "bf16": 3e-2}
"""Relative, of loss and gradient norm."""
_START = Version(0, 0)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained on."""

    model: Path
    groups: int
    group_size: int
    prompt_tokens: int
    longest: int
    """Longest response. Lengths are log-normal, cut there, with a median of an eighth of it and sigma 1."""
    micro_batch_tokens: int
    dtype: Dtype
    seed: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimizer step took, and what came of it."""

    seconds: float
    peak_bytes: int
    """Most resident memory so far, from the end of loading on."""
    loss: float
    grad_norm: float


@dataclass(frozen=True, slots=True)
class Side:
    seconds: float
    """Median."""
    peak_bytes: int
    loss: float
    """Of the first step."""
    grad_norm: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What was measured."""

    samples: int
    tokens: int
    """Of prompts and responses."""
    padded_tokens: int
    """That the plain step puts through the model."""
    laminar: Side
    plain: Side
    speedup: float
    """Plain over laminar, of the medians."""
    memory_ratio: float
    """Laminar over plain, of the peaks."""
    difference: float
    """Largest relative one of loss and gradient norm, over all steps."""
    agrees: bool


def measure(settings: Settings) -> StepTimes:
    """Take `ROUNDS` steps of each side in turn, after a first one of each.

    Raises:
        ModelError: the model folder can't be used.
    """
    samples = packing.unpack(make_batch(settings))
    lengths = [len(prompt) + len(response) for prompt, response in zip(samples.prompts, samples.responses, strict=True)]
    padded = sum(len(part) * max(lengths[i] for i in part) for part in _plain_parts(lengths, settings))
    steps: dict[str, list[Step]] = {"laminar": [], "plain": []}
    with _worker(_laminar, settings) as ours, _worker(_plain, settings) as theirs:
        for _ in range(1 + ROUNDS):
            steps["laminar"].append(ours())
            steps["plain"].append(theirs())
    laminar, plain = (_side(steps[name]) for name in ("laminar", "plain"))
    difference = max(
        max(_difference(a.loss, b.loss), _difference(a.grad_norm, b.grad_norm))
        for a, b in zip(steps["laminar"], steps["plain"], strict=True)
    )
    return StepTimes(
        samples=len(lengths),
        tokens=sum(lengths),
        padded_tokens=padded,
        laminar=laminar,
        plain=plain,
        speedup=plain.seconds / laminar.seconds,
        memory_ratio=laminar.peak_bytes / plain.peak_bytes,
        difference=difference,
        agrees=difference <= TOLERANCE[settings.dtype],
    )


def _side(steps: list[Step]) -> Side:
    seconds = median(step.seconds for step in steps[1:])
    return Side(seconds, max(step.peak_bytes for step in steps), steps[0].loss, steps[0].grad_norm)


def _difference(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b))


def make_batch(settings: Settings) -> Batch:
    """Random tokens and rewards, the same for the same seed."""
    rng = np.random.default_rng(settings.seed)
    vocab_size = AutoConfig.from_pretrained(settings.model).vocab_size
    num_samples = settings.groups * settings.group_size
    drawn = np.exp(rng.normal(math.log(settings.longest / 8), 1.0, num_samples))
    lengths = [int(length) for length in np.clip(drawn, 1, settings.longest)]
    prompts = rng.integers(vocab_size, size=(settings.groups, settings.prompt_tokens))
    return Batch(
        update=0,
        part=0,
        num_parts=1,
        ids=tuple((group, index, 0) for group in range(settings.groups) for index in range(settings.group_size)),
        versions=(_START,) * num_samples,
        prompt_lengths=(settings.prompt_tokens,) * num_samples,
        response_lengths=tuple(lengths),
        prompt_tokens=np.repeat(prompts, settings.group_size, axis=0).astype("<i4").tobytes(),
        response_tokens=rng.integers(vocab_size, size=sum(lengths)).astype("<i4").tobytes(),
        logprobs=rng.normal(-math.log(vocab_size), 0.3, sum(lengths)).astype("<f4").tobytes(),
        mask=bytes([1]) * sum(lengths),
        chunks=tuple((BatchChunk(_START, length),) for length in lengths),
        rewards=tuple(float(reward) for reward in rng.normal(size=num_samples)),
        truncated=(False,) * num_samples,
    )


def _config(settings: Settings) -> Config:
    return Config.model_validate(
        {
            "model": {"path": settings.model.absolute()},
            "data": {"train": "none.jsonl"},
            "reward": {"functions": ["none.py:none"]},
            "train": {
                "groups_per_batch": settings.groups,
                "group_size": settings.group_size,
                "micro_batch_tokens": settings.micro_batch_tokens,
                "dtype": settings.dtype,
            },
            "rollout": {"max_new_tokens": settings.longest},
            "iterations": 1,
        }
    )


# ------------------------------------------------------------ the two sides, each in its process


def _laminar(settings: Settings) -> Callable[[], tuple[float, float]]:
    """A function that takes a step and returns its loss and gradient norm."""
    config, batch = _config(settings), make_batch(settings)
    state = TrainState.create(config)

    def step() -> tuple[float, float]:
        statistics = train_batch(state, batch, config)
        loss, norm = statistics["loss"], statistics["grad_norm"]
        assert loss is not None and norm is not None
        return loss, norm

    return step


def _plain(settings: Settings) -> Callable[[], tuple[float, float]]:
    """The same, without anything of ours but the model, the optimizer and the advantages."""
    config = _config(settings)
    samples = packing.unpack(make_batch(settings))
    model = load_model(settings.model)
    optimizer = make_optimizer(model, config)
    advantages = torch.from_numpy(group_advantages(samples.rewards, samples.groups, config.train.scale_rewards)).float()
    sequences = [
        torch.from_numpy(np.concatenate(pair)) for pair in zip(samples.prompts, samples.responses, strict=True)
    ]
    behaviour = torch.from_numpy(samples.behaviour.copy()).split(np.diff(samples.starts).tolist())
    parts = _plain_parts([len(sequence) for sequence in sequences], settings)
    num_tokens = len(samples.mask)

    def pad(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    def loss_of(part: range) -> torch.Tensor:
        ids = pad([sequences[i] for i in part])
        attended = pad([torch.ones_like(sequences[i]) for i in part])
        mu = pad([behaviour[i] for i in part])
        mask = pad([torch.ones_like(behaviour[i]) for i in part])
        num_answers = mask.shape[1]
        with autocast(settings.dtype):
            logits = model(ids, attention_mask=attended, use_cache=False, logits_to_keep=num_answers + 1).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        new = logprobs.gather(-1, ids[:, -num_answers:, None]).squeeze(-1)
        old = new.detach()
        ratio = torch.exp(new - old)
        weight = torch.exp(old - mu).clamp(max=config.train.is_cap)
        return -(weight * ratio * advantages[part.start : part.stop, None] * mask).sum() / num_tokens

    def step() -> tuple[float, float]:
        total = 0.0
        for part in parts:
            loss = loss_of(part)
            torch.autograd.backward(loss)
            total += float(loss.detach())
        norm = float(clip_grad_norm_(model.parameters(), config.train.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, norm

    return step


def _plain_parts(lengths: list[int], settings: Settings) -> list[range]:
    """Samples that go through the model together: in their order, equally many."""
    number = max(1, settings.micro_batch_tokens // max(lengths))
    return [range(start, min(start + number, len(lengths))) for start in range(0, len(lengths), number)]


Make = Callable[[Settings], Callable[[], tuple[float, float]]]


@contextmanager
def _worker(make: Make, settings: Settings) -> Iterator[Callable[[], Step]]:
    """A function that has one side take a step in its process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(make, settings, theirs), daemon=True)
    with patch.dict(os.environ, ALLOCATOR):
        process.start()
    theirs.close()

    def step() -> Step:
        ours.send(True)
        answer = ours.recv()
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Step)
        return answer

    try:
        yield step
    finally:
        ours.close()
        process.join()


def serve(make: Make, settings: Settings, orders: Connection) -> None:
    """Takes a step whenever it is told to, until nobody is there any more."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    try:
        step = make(settings)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        while True:
            orders.recv()
            start = time.perf_counter()
            loss, norm = step()
            orders.send(Step(time.perf_counter() - start, _peak_bytes(), loss, norm))
    except EOFError:
        return
    except Exception as error:  # the boundary of the process: the other side raises it
        orders.send(error)


def _peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])
