"""The embedded engine: continuous batching in this process, on CPU or one GPU.

Owns: requests, their tokens and their KV. Consumes: weights, through leases. Waits for: nothing; each `poll`
is one step of work. One thread calls it.
Invariants:
* A token's draw is keyed by (seed, group, index, attempt, position): scheduling does not change samples.
* In exact mode log-probs do not depend on scheduling either, bit for bit: every row's arithmetic is the same
  alone or in a batch, decoded or prefilled again (`kernels`, `kv_cache`).
* KV never outlives the weights it was made with: weights change only when no request is here.
* After a failed load nothing can be generated until a load succeeds.
"""

from __future__ import annotations

import json
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig

from laminar.config import RolloutConfig
from laminar.errors import EngineError, ModelError, WeightsError
from laminar.golden import golden_ids
from laminar.rollout import native
from laminar.rollout.decoder import Gpt2Decoder, LlamaDecoder
from laminar.rollout.engine import FloatArray, Progress, Request, WeightSource
from laminar.rollout.families import is_fast, supports
from laminar.rollout.native import Native
from laminar.rollout.runner import Runner
from laminar.rollout.sampling import keyed_uniform, sample
from laminar.rollout.stopping import StopRules
from laminar.types import Load, SampleId, SlotRef

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STORED_DTYPES = {"fp32": "F32", "bf16": "BF16"}
_ADMISSION_HEADROOM = 16
"""Tokens that each running sequence must still be able to grow by when another is admitted."""


@dataclass(slots=True)
class _Job:
    request: Request
    arrival: int
    response: list[int] = field(default_factory=list)
    sequence: Any = None
    """The runner's record while the job runs."""

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.response)


class TorchEngine:
    """An `Engine` on torch. See `laminar.rollout.engine.Engine` for the methods' contracts."""

    def __init__(
        self,
        model_path: Path,
        config: RolloutConfig,
        seed: int,
        source: WeightSource,
        *,
        device: str = "cpu",
        golden_tolerance: float = 1e-4,
    ) -> None:
        """Build the model from its folder's config, without weights: those come through `load_weights`.

        Raises:
            ModelError: a model that this engine can't run.
        """
        self._exact = config.exact if config.exact is not None else device == "cpu"
        if self._exact and device != "cpu":
            raise EngineError(f"exact mode is for CPU only, and the device is {device}")
        self._seed, self._source, self._dtype = seed, source, config.dtype
        self._golden_tolerance = golden_tolerance
        self._max_num_seqs = config.max_num_seqs
        self._native = native.load() if device == "cpu" else None
        self._runner = build_runner(model_path, DTYPES[config.dtype], device, self._exact, self._native)
        self._kv_capacity = config.kv_tokens or config.max_num_seqs * self._runner.max_length
        self._stop_rules = StopRules.of_model(model_path)
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._ended: list[Progress] = []
        self._arrivals = 0
        self._loaded: SlotRef | None = None

    @property
    def loaded(self) -> SlotRef | None:
        return self._loaded

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The weights by Hugging Face name, tied ones once. Read only."""
        return self._runner.parameters

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        if self._loaded is None:
            raise EngineError(f"sample {request.sample}: no weights are loaded")
        if any(job.request.sample == request.sample for job in (*self._running, *self._waiting)):
            raise EngineError(f"sample {request.sample} is already here")
        self._check_size(request)
        job = _Job(request, self._arrivals, [int(token) for token in request.response])
        self._arrivals += 1
        reason = self._finish_reason(job)
        if reason is None:
            self._waiting.append(job)
        else:
            self._ended.append(_progress(job, [], [], reason))

    def release(self, samples: Collection[SampleId]) -> None:
        gone = set(samples)
        self._waiting = [job for job in self._waiting if job.request.sample not in gone]
        self._ended = [progress for progress in self._ended if progress.sample not in gone]
        for job in [job for job in self._running if job.request.sample in gone]:
            self._stop(job)

    def interrupt(self) -> None:
        """A step is short enough to be waited for."""

    def load(self) -> Load:
        return Load(self._kv_used(), self._kv_capacity, len(self._running), len(self._waiting))

    def _check_size(self, request: Request) -> None:
        vocab_size, needed = self._runner.vocab_size, len(request.prompt) + request.sampling.max_new_tokens
        if len(request.prompt) == 0:
            raise EngineError(f"sample {request.sample}: the prompt is empty")
        ids = np.concatenate((request.prompt, request.response))
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise EngineError(f"sample {request.sample}: a token id is outside the vocabulary of {vocab_size}")
        limit = min(self._kv_capacity, self._runner.max_length)
        if needed > limit:
            raise EngineError(
                f"sample {request.sample}: prompt and max_new_tokens need {needed} tokens; the KV cache holds "
                f"{self._kv_capacity} and the model's context {self._runner.max_length}"
            )

    # ------------------------------------------------------------ steps

    def poll(self, timeout_s: float) -> list[Progress]:
        ended, self._ended = self._ended, []
        admitted = self._admit()
        if admitted:
            return ended + self._emit(admitted, self._prefill(admitted))
        self._preempt()
        if not self._running:
            return ended
        sequences = [job.sequence for job in self._running]
        logits = self._runner.forward(sequences, [job.response[-1:] for job in self._running])
        return ended + self._emit(list(self._running), logits)

    def _admit(self) -> list[_Job]:
        """Take waiting jobs, oldest first, while there is a slot and KV for them."""
        admitted: list[_Job] = []
        if not self._waiting:
            return admitted
        used = self._kv_used()
        while self._waiting and len(self._running) + len(admitted) < self._max_num_seqs:
            job, others = self._waiting[0], len(self._running) + len(admitted)
            if others and used + job.num_tokens + _ADMISSION_HEADROOM * (others + 1) > self._kv_capacity:
                break
            used += job.num_tokens
            admitted.append(self._waiting.pop(0))
        return admitted

    def _prefill(self, admitted: list[_Job]) -> torch.Tensor:
        """Fill the KV of new jobs; equal token sequences are computed once. Logits [len(admitted), V]."""
        twins: dict[tuple[int, ...], list[int]] = {}
        for i, job in enumerate(admitted):
            twins.setdefault((*job.request.prompt.tolist(), *job.response), []).append(i)
        sequences = [self._runner.open() for _ in twins]
        logits = self._runner.forward(sequences, [list(tokens) for tokens in twins])
        owner = [0] * len(admitted)
        for number, (sequence, members) in enumerate(zip(sequences, twins.values(), strict=True)):
            for i in members:
                owner[i] = number
                admitted[i].sequence = sequence if i == members[0] else self._runner.fork(sequence)
        # Originals first, then copies: the order of the cache's rows, which decoding can read in place.
        order = [members[0] for members in twins.values()] + [i for members in twins.values() for i in members[1:]]
        self._running += [admitted[i] for i in order]
        return logits if len(twins) == len(admitted) else logits[owner]

    def _preempt(self) -> None:
        """Send the youngest jobs back to the queue until the others can each grow by a token."""
        while len(self._running) > 1 and self._kv_used() + len(self._running) > self._kv_capacity:
            youngest = max(self._running, key=lambda job: job.arrival)
            self._stop(youngest)
            insort(self._waiting, youngest, key=lambda job: job.arrival)

    def _emit(self, jobs: list[_Job], logits: torch.Tensor) -> list[Progress]:
        """Draw one token for each job and end those that are done."""
        ids = [job.request.sample for job in jobs]
        uniforms = keyed_uniform(
            self._seed,
            [sample_id.group for sample_id in ids],
            [sample_id.index for sample_id in ids],
            [job.request.attempt for job in jobs],
            [len(job.response) for job in jobs],
        )
        tokens, logprobs = sample(logits, uniforms, [job.request.sampling for job in jobs], self._native)
        progress = []
        for job, token, logprob in zip(jobs, tokens.tolist(), logprobs, strict=True):
            job.response.append(token)
            reason = self._finish_reason(job)
            progress.append(_progress(job, [token], [logprob], reason))
            if reason is not None:
                self._stop(job)
        return progress

    def _finish_reason(self, job: _Job) -> str | None:
        sampling = job.request.sampling
        return self._stop_rules.check(job.response, sampling.stop, sampling.max_new_tokens)

    def _stop(self, job: _Job) -> None:
        """Take a job off the running ones. The last one takes its place, as in the cache."""
        self._runner.close(job.sequence)
        job.sequence = None
        place = next(i for i, other in enumerate(self._running) if other is job)
        self._running[place] = self._running[-1]
        self._running.pop()

    def _kv_used(self) -> int:
        return sum(job.num_tokens for job in self._running)

    # ------------------------------------------------------------ weights

    def load_weights(self, ref: SlotRef) -> None:
        if self._running or self._waiting or self._ended:
            raise EngineError(f"version {ref.version} can't be loaded while requests are here")
        with self._source.lease(ref) as lease:
            self._loaded = None
            self._check_layout(ref)
            lease.copy_into(self._runner.parameters)
            expected = np.array(lease.golden, dtype=np.float32)
        self._runner.refresh()
        self._check_golden(ref, expected)
        self._loaded = ref

    def golden(self) -> FloatArray:
        if self._loaded is None:
            raise EngineError("no weights are loaded")
        return self._golden()

    def _golden(self) -> FloatArray:
        ids = golden_ids(self._runner.vocab_size, self._runner.max_length)
        logprobs = torch.log_softmax(self._runner.score(ids[:-1]).float(), -1)
        return np.array([logprobs[i, token].item() for i, token in enumerate(ids[1:])], dtype=np.float32)

    def _check_golden(self, ref: SlotRef, expected: FloatArray) -> None:
        if len(expected) == 0:
            return
        found = self._golden()
        if found.shape != expected.shape:
            raise WeightsError(f"version {ref.version}: {len(expected)} golden log-probs, expected {len(found)}")
        gap = float(np.abs(found - expected).max())
        if not gap <= self._golden_tolerance:
            raise WeightsError(
                f"version {ref.version}: log-probs on the golden prompt differ from the trainer's by {gap:.3g} "
                f"(tolerance {self._golden_tolerance:.3g})"
            )

    def _check_layout(self, ref: SlotRef) -> None:
        """The file must hold this model's parameters, neither more nor fewer, in the engine's dtype."""
        with safe_open(ref.path, "pt") as file:
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in stored.items()}
        dtype = _STORED_DTYPES[self._dtype]
        wanted = {name: (tuple(tensor.shape), dtype) for name, tensor in self._runner.parameters.items()}
        wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        if wrong:
            name = wrong[0]
            raise WeightsError(
                f"version {ref.version} does not fit the model: {len(wrong)} tensors differ, the first is {name}: "
                f"expected {wanted.get(name, 'nothing')}, found {found.get(name, 'nothing')}"
            )


def build_runner(model_path: Path, dtype: torch.dtype, device: str, exact: bool, kernels: Native | None) -> Runner[Any]:
    """The fast path if it has the model's kernels, else the model's own forward.

    Raises:
        ModelError: no `config.json`, or a model that this engine can't run.
    """
    file = model_path / "config.json"
    if not file.is_file():
        raise ModelError("no config.json in the model folder", where=str(model_path))
    raw = json.loads(file.read_text())
    reason = supports(raw)
    if reason is not None:
        raise ModelError(reason, where=str(model_path))
    config = AutoConfig.from_pretrained(model_path)
    if not is_fast(raw):
        from laminar.rollout.fallback import FallbackDecoder  # with all models of transformers, which takes a second

        return FallbackDecoder(config, dtype, device, exact)
    family = Gpt2Decoder if raw["model_type"] == "gpt2" else LlamaDecoder
    return family(config, dtype, device, kernels)


def _progress(job: _Job, tokens: Sequence[int], logprobs: Sequence[float], reason: str | None) -> Progress:
    return Progress(job.request.sample, np.array(tokens, dtype=np.int32), np.array(logprobs, dtype=np.float32), reason)
