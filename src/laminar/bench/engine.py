"""`laminar bench engine`: tokens a second of the embedded engine, where its time goes, and what transformers does.

Both sides get the same weights and the same prompts, draw from the full softmax, give the log-probs of what they drew,
and are run in turn in this process, so that ratios hold on a machine that others use too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from laminar.bench.machine import Machine
from laminar.config import Dtype, RolloutConfig
from laminar.errors import ModelError
from laminar.rollout import torch_engine
from laminar.rollout.attention import TorchAttention
from laminar.rollout.engine import Request
from laminar.rollout.kernels import Linear
from laminar.rollout.native import Native
from laminar.rollout.sampling import sample
from laminar.rollout.torch_engine import DTYPES, TorchEngine
from laminar.trainer.policy import load_model, named_weights
from laminar.types import SampleId, Sampling, SlotRef, Version

RUNS = 3
"""Counted rounds of each side, after one that is not."""
RANDOM_LLAMA: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
"""5 million parameters."""
_NO_TOKENS = torch.zeros(0, dtype=torch.int32).numpy()


@dataclass(frozen=True, slots=True)
class Settings:
    """What is generated, and how."""

    model: Path | None
    """None = a random Llama of 5M parameters."""
    slots: int
    """Sequences decoded at once."""
    prompt_tokens: int
    group_size: int
    """Neighbours with the same prompt."""
    new_tokens: int
    """Of every sequence: nothing ends early."""
    dtype: Dtype
    threads: int


@dataclass(frozen=True, slots=True)
class Part:
    seconds: float
    """Of one round."""
    roofline: float | None
    """Share of it that the machine's peak rates explain; None where nothing is computed that has such a bound."""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Medians of `RUNS` rounds: of processor time with one thread, of time on the wall with more."""

    model: str
    parameters: int
    slots: int
    prompt_tokens: int
    group_size: int
    new_tokens: int
    dtype: str
    threads: int
    tokens: int
    """New ones of one round."""
    tokens_per_s: float
    decode_tokens_per_s: float
    """Without the prefill and the first tokens, which come with it."""
    parts: dict[str, Part]
    """Of one round more, with a clock in it."""
    machine: Machine
    against: Peer | None
    ratio: float | None
    """`tokens_per_s` over that of `against`."""


@dataclass(frozen=True, slots=True)
class _Round:
    tokens: int
    seconds: float
    prefill_s: float = 0.0


def measure(settings: Settings, against_transformers: bool, say: Callable[[str], None]) -> EngineTime:
    """Load, warm up, run in turn.

    Raises:
        ModelError: the folder has no model that the engine runs, or one that is too short for so many tokens.
    """
    torch.set_num_threads(settings.threads)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        say("loading the model")
        model = _model(settings, Path(name))
        engine = _engine(settings, model, Path(name))
        linear_elements, parameters = _linear_elements(model), sum(tensor.numel() for _, tensor in named_weights(model))
        prompts = _prompts(settings, model.config.vocab_size)
        ours: list[_Round] = []
        theirs: list[_Round] = []
        if against_transformers:
            torch.nn.Module.to(model, DTYPES[settings.dtype])
        for number in range(RUNS + 1):
            ours.append(engine_round(engine, prompts, settings, number))
            say(_progress("laminar", ours[-1], number))
            if against_transformers:
                theirs.append(transformers_round(model, prompts, settings))
                say(_progress("transformers", theirs[-1], number))
        say("one more round with a clock in it, and the machine's peak rates")
        seconds = _timed_round(engine, prompts, settings)
        machine = Machine.measure(DTYPES[settings.dtype], _clock(settings))
        bounds = _bounds(settings, model.config, linear_elements, machine)
    rate = median(one.tokens / one.seconds for one in ours[1:])
    decoded = median((one.tokens - settings.slots) / (one.seconds - one.prefill_s) for one in ours[1:])
    peer = Peer("transformers", median(one.tokens / one.seconds for one in theirs[1:])) if theirs else None
    fields = asdict(settings) | {"model": "random Llama" if settings.model is None else str(settings.model)}
    return EngineTime(
        **fields,
        parameters=parameters,
        tokens=ours[-1].tokens,
        tokens_per_s=rate,
        decode_tokens_per_s=decoded,
        parts={name: Part(s, bounds[name] / s if name in bounds else None) for name, s in seconds.items()},
        machine=machine,
        against=peer,
        ratio=None if peer is None else rate / peer.tokens_per_s,
    )


def _progress(side: str, done: _Round, number: int) -> str:
    return f"{side:12} {f'round {number}' if number else 'warm-up'}: {done.tokens / done.seconds:,.0f} tokens/s"


# ---------------------------------------------------------------- what is measured


def _model(settings: Settings, scratch: Path) -> PreTrainedModel:
    """In fp32, and without tokens that end a text."""
    if settings.model is not None and not (settings.model / "config.json").is_file():
        raise ModelError(
            "no model is there",
            where="--model",
            expected="a folder with config.json and safetensors (nothing is downloaded)",
            got=str(settings.model),
            fix="correct the path, or leave --model out to measure a random Llama of 5M parameters",
        )
    path = settings.model
    if path is None:
        path = scratch / "random"
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**RANDOM_LLAMA)).save_pretrained(path)
    model = load_model(path)
    longest, needed = model.config.max_position_embeddings, settings.prompt_tokens + settings.new_tokens
    if needed > longest:
        raise ModelError(
            f"prompts and new tokens need {needed} tokens",
            where=str(path),
            expected=f"at most the model's context of {longest}",
            fix="lower --prompt-tokens or --new-tokens",
        )
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = None
    return model


def _engine(settings: Settings, model: PreTrainedModel, scratch: Path) -> TorchEngine:
    """The engine with the model's weights in the wanted dtype."""
    folder = scratch / "engine"
    model.config.save_pretrained(folder)
    file = str(folder / "weights.safetensors")
    tensors = {name: tensor.to(DTYPES[settings.dtype]).contiguous() for name, tensor in named_weights(model)}
    save_file(tensors, file)
    config = RolloutConfig(max_num_seqs=settings.slots, dtype=settings.dtype)
    engine = TorchEngine(folder, config, seed=0, source=_Tensors(tensors))
    engine.load_weights(SlotRef(file, Version(0, 0), "", settings.dtype))
    return engine


class _Tensors:
    """A `WeightSource` and `Lease` of weights at hand."""

    golden = ()

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @contextmanager
    def lease(self, ref: SlotRef) -> Iterator[_Tensors]:
        yield self

    def copy_into(self, destination: Any) -> None:
        for name, tensor in self._tensors.items():
            destination[name].copy_(tensor)
        self._tensors = {}


def _prompts(settings: Settings, vocab_size: int) -> torch.Tensor:
    """int64 [slots, prompt_tokens]"""
    num_groups = -(-settings.slots // settings.group_size)
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randint(0, vocab_size, (num_groups, settings.prompt_tokens), generator=generator)
    return distinct.repeat_interleave(settings.group_size, 0)[: settings.slots]


# ---------------------------------------------------------------- rounds


def engine_round(engine: TorchEngine, prompts: torch.Tensor, settings: Settings, number: int) -> _Round:
    """All sequences from prompt to end; `number` is part of the sampling key."""
    for row, prompt in enumerate(prompts):
        sample = SampleId(*divmod(row, settings.group_size))
        sampling = Sampling(max_new_tokens=settings.new_tokens)
        engine.add(Request(sample, number, prompt.int().numpy(), _NO_TOKENS, sampling))
    clock = _clock(settings)
    start = clock()
    tokens = sum(len(progress.tokens) for progress in engine.poll(0.0))
    prefill_s = clock() - start
    while engine.load().num_running:
        tokens += sum(len(progress.tokens) for progress in engine.poll(0.0))
    return _Round(tokens, clock() - start, prefill_s)


@torch.inference_mode()
def transformers_round(model: PreTrainedModel, prompts: torch.Tensor, settings: Settings) -> _Round:
    """The same with `generate`; the log-probs come from its own logits, which is the cheapest way."""
    clock = _clock(settings)
    start = clock()
    generation: Any = model
    output = generation.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=settings.new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[:, prompts.shape[1] :]
    logprobs = torch.stack(
        [
            torch.log_softmax(logits.float(), -1).gather(1, drawn[:, None])[:, 0]
            for logits, drawn in zip(output.logits, tokens.unbind(1), strict=True)
        ],
        1,
    )
    return _Round(logprobs.numel(), clock() - start)


def _clock(settings: Settings) -> Callable[[], float]:
    return time.thread_time if settings.threads == 1 else time.perf_counter


# ---------------------------------------------------------------- where the time goes


def _timed_round(engine: TorchEngine, prompts: torch.Tensor, settings: Settings) -> dict[str, float]:
    """Seconds of one round by part. Those of the prefill are all in `prefill`; `other` is what has no part.

    A model on the slow path has its attention and linear layers in `other`.
    """
    clock, spent = _clock(settings), dict.fromkeys(("attention", "linear", "sampling"), 0.0)
    in_prefill = False

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = function(*args, **kwargs)
            if not in_prefill:
                spent[part] += clock() - start
            return result

        return call

    prefill: Callable[..., Any] = TorchEngine._prefill
    prefill_s = 0.0

    def timed_prefill(*args: Any) -> Any:
        nonlocal in_prefill, prefill_s
        in_prefill, start = True, clock()
        result = prefill(*args)
        in_prefill = False
        prefill_s += clock() - start
        return result

    with (
        patch.object(TorchEngine, "_prefill", timed_prefill),
        patch.object(Native, "attend", timed("attention", Native.attend)),
        patch.object(TorchAttention, "_attend", timed("attention", TorchAttention._attend)),
        patch.object(Linear, "__call__", timed("linear", Linear.__call__)),
        patch.object(torch_engine, "sample", timed("sampling", sample)),
    ):
        total = engine_round(engine, prompts, settings, RUNS + 1).seconds
    parts = {"prefill": prefill_s, **spent}
    return {**parts, "other": total - sum(parts.values())}


def _linear_elements(model: PreTrainedModel) -> int:
    """Weights of all matrices that tokens are multiplied with, the output layer included."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, (torch.nn.Linear, Conv1D)))


def _bounds(settings: Settings, config: Any, linear_elements: int, machine: Machine) -> dict[str, float]:
    """Seconds that each part takes at the machine's peak rates, as it would be done best: operands read once."""
    size = DTYPES[settings.dtype].itemsize
    head = config.vocab_size * config.hidden_size
    steps = settings.new_tokens - 1
    num_groups = -(-settings.slots // settings.group_size)
    prefill_flops = 2 * (num_groups * settings.prompt_tokens * (linear_elements - head) + num_groups * head)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    context = settings.slots * (steps * settings.prompt_tokens + steps * (steps + 1) // 2) * config.num_hidden_layers
    return {
        "prefill": machine.bound_s(prefill_flops, linear_elements * size),
        "attention": machine.bound_s(4 * context * heads * head_dim, 2 * context * kv_heads * head_dim * size),
        "linear": steps * machine.bound_s(2 * settings.slots * linear_elements, linear_elements * size),
        "sampling": machine.bound_s(0, 4 * (steps + 1) * settings.slots * config.vocab_size),
    }
