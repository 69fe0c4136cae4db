"""The fast path: Llama, Qwen2, Qwen3 (dense) and GPT-2 on kernels of our own.

The families differ in norm, positions, biases and MLP, and share the rest. Shapes as in `kv_cache`; M hidden
size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from laminar.rollout.attention import Attention, HeadNorm, LayerAttention, Step, TorchAttention
from laminar.rollout.kernels import MIN_LINEAR_ROWS, LayerNorm, Linear, Norm, RmsNorm, Rotary
from laminar.rollout.kv_cache import KvCache, KvSequence
from laminar.rollout.native import Native, supports
from laminar.rollout.native_attention import NativeAttention

Rowwise = Callable[[torch.Tensor], torch.Tensor]
"""[N, a] -> [N, b], each row by itself"""

_PREFILL_TOKENS = 512
"""Tokens of one pass: bounds the memory for scores."""


@dataclass(frozen=True, slots=True)
class Layer:
    norm_attention: Norm
    qkv: Linear
    """Columns: queries, keys, values."""
    attention: LayerAttention[Any]
    out: Linear
    norm_mlp: Norm
    mlp: Rowwise


class Decoder(ABC):
    """A `Runner` over `KvCache`; the families fill in parameters, layers and embedding."""

    def __init__(
        self,
        config: Any,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        native: Native | None,
    ) -> None:
        """config: the model's transformers config. native: kernels to use where they fit the model."""
        self.vocab_size: int = config.vocab_size
        self.max_length: int = config.max_position_embeddings
        self._config, self._dtype, self._device = config, dtype, device
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._parameters: dict[str, torch.Tensor] = {}
        self._layers: list[Layer] = []
        self._final_norm: Norm
        self._head: Linear
        self._native = native if supports(head_dim) else None
        self._cache = KvCache(config.num_hidden_layers, num_kv_heads, head_dim, dtype, device)
        self._attention = self._make_attention()
        self._allocate()
        if not config.tie_word_embeddings:
            self._new("lm_head.weight", self.vocab_size, config.hidden_size)

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._parameters

    @torch.inference_mode()
    def refresh(self) -> None:
        self._layers = [self._layer(i) for i in range(self._config.num_hidden_layers)]
        self._final_norm = self._output_norm()
        name = self._embedding_name if self._config.tie_word_embeddings else "lm_head.weight"
        self._head = Linear(self._parameters[name])

    def open(self) -> KvSequence:
        return KvSequence()

    @torch.inference_mode()
    def fork(self, source: KvSequence) -> KvSequence:
        return self._cache.fork(source)

    @torch.inference_mode()
    def close(self, sequence: KvSequence) -> None:
        self._cache.free(sequence)

    @torch.inference_mode()
    def forward(self, sequences: Sequence[KvSequence], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        passes = list(_passes([len(ids) for ids in tokens]))
        ends: list[torch.Tensor] = []
        for part in passes:
            step, hidden = self._hidden([sequences[i] for i, _, _ in part], [tokens[i][a:b] for i, a, b in part])
            last = hidden.index_select(0, step.last)
            whole = [row for row, (i, _, stop) in enumerate(part) if stop == len(tokens[i])]
            ends.append(last if len(whole) == len(part) else last[whole])
        return self._logits(ends[0] if len(ends) == 1 else torch.cat(ends))

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        sequence = self.open()
        _, hidden = self._hidden([sequence], [tokens])
        self.close(sequence)
        return self._logits(hidden)

    # ------------------------------------------------------------ one pass

    def _hidden(self, sequences: Sequence[KvSequence], tokens: Sequence[Sequence[int]]) -> tuple[Step, torch.Tensor]:
        """Append tokens; the last layer's output for each of them, [N, M]."""
        step = self._attention.advance(sequences, [len(ids) for ids in tokens])
        ids = torch.tensor(list(chain.from_iterable(tokens)), device=self._device)
        num_tokens = len(ids)
        hidden = _at_least(self._embed(ids, step.positions), MIN_LINEAR_ROWS)
        delta: torch.Tensor | None = None
        for layer in self._layers:
            hidden, normed = layer.norm_attention(hidden, delta)
            attended = layer.attention(step, layer.qkv(normed)[:num_tokens])
            hidden, normed = layer.norm_mlp(hidden, layer.out(_at_least(attended, MIN_LINEAR_ROWS)))
            delta = layer.mlp(normed)
        hidden = hidden if delta is None else hidden + delta
        return step, hidden[:num_tokens]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, M] -> [N, V]"""
        padded = _at_least(hidden, MIN_LINEAR_ROWS)
        return self._head(self._final_norm(padded, None)[1])[: len(hidden)]

    # ------------------------------------------------------------ what a family fills in

    _embedding_name: str

    @abstractmethod
    def _allocate(self) -> None:
        """Make `_parameters`, the output layer excepted."""

    @abstractmethod
    def _layer(self, i: int) -> Layer:
        """Layer `i` from the parameters."""

    @abstractmethod
    def _output_norm(self) -> Norm:
        """The norm before the output layer."""

    @abstractmethod
    def _embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [N] each -> [N, M]"""

    def _rotary(self) -> Rotary | None:
        """Rotary position embedding of queries and keys, if the family has it."""
        return None

    def _make_attention(self) -> Attention[Any]:
        rotary = self._rotary()
        if self._native is None:
            return TorchAttention(self._cache, self._num_heads, rotary)
        return NativeAttention(self._cache, self._num_heads, rotary, self._native)

    def _new(self, name: str, *shape: int) -> torch.Tensor:
        self._parameters[name] = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return self._parameters[name]


class LlamaDecoder(Decoder):
    """Llama, Qwen2 and Qwen3: RMS norm, rotary positions, gated MLP. Fused matrices, seen by their parts' names."""

    _embedding_name = "model.embed_tokens.weight"

    def __init__(self, config: Any, dtype: torch.dtype, device: str, native: Native | None) -> None:
        family = config.model_type
        self._has_head_norm = family == "qwen3"
        self._qkv_bias = family == "qwen2" or getattr(config, "attention_bias", False)
        self._out_bias = family != "qwen2" and getattr(config, "attention_bias", False)
        self._mlp_bias = getattr(config, "mlp_bias", False)
        self._fused: dict[str, torch.Tensor] = {}
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        super().__init__(config, config.num_key_value_heads, head_dim, dtype, device, native)

    def _allocate(self) -> None:
        config, hidden, inner = self._config, self._config.hidden_size, self._config.intermediate_size
        size, kv_size = self._num_heads * self._head_dim, self._num_kv_heads * self._head_dim
        self._new(self._embedding_name, self.vocab_size, hidden)
        self._new("model.norm.weight", hidden)
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}"
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            qkv = {f"{attention}.q_proj": size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
            self._new_fused(f"{attention}.qkv", qkv, hidden, self._qkv_bias)
            self._new_fused(f"{attention}.o_proj", {f"{attention}.o_proj": hidden}, size, self._out_bias)
            gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
            self._new_fused(f"{mlp}.gate_up", gate_up, hidden, self._mlp_bias)
            self._new_fused(f"{mlp}.down_proj", {f"{mlp}.down_proj": hidden}, inner, self._mlp_bias)
            self._new(f"{layer}.input_layernorm.weight", hidden)
            self._new(f"{layer}.post_attention_layernorm.weight", hidden)
            if self._has_head_norm:
                self._new(f"{attention}.q_norm.weight", self._head_dim)
                self._new(f"{attention}.k_norm.weight", self._head_dim)

    def _new_fused(self, name: str, parts: Mapping[str, int], in_features: int, bias: bool) -> None:
        """One matrix whose rows are the parts', each part a parameter of its own."""
        for kind, shape in (("weight", (in_features,)), ("bias", ())):
            if kind == "bias" and not bias:
                continue
            fused = torch.zeros((sum(parts.values()), *shape), dtype=self._dtype, device=self._device)
            self._fused[f"{name}.{kind}"] = fused
            views = fused.split(list(parts.values()))
            self._parameters.update((f"{part}.{kind}", view) for part, view in zip(parts, views, strict=True))

    def _layer(self, i: int) -> Layer:
        layer = f"model.layers.{i}"
        gate_up, down = self._linear(f"{layer}.mlp.gate_up"), self._linear(f"{layer}.mlp.down_proj")
        inner = self._config.intermediate_size

        def mlp(x: torch.Tensor) -> torch.Tensor:
            both = gate_up(x)
            if self._native is not None:
                return down(self._native.gated(both))
            return down(F.silu(both[:, :inner]).mul_(both[:, inner:]))

        return Layer(
            norm_attention=self._norm(f"{layer}.input_layernorm.weight"),
            qkv=self._linear(f"{layer}.self_attn.qkv"),
            attention=self._attention.layer(i, self._head_dim**-0.5, self._head_norm(f"{layer}.self_attn")),
            out=self._linear(f"{layer}.self_attn.o_proj"),
            norm_mlp=self._norm(f"{layer}.post_attention_layernorm.weight"),
            mlp=mlp,
        )

    def _linear(self, name: str) -> Linear:
        return Linear(self._fused[f"{name}.weight"], self._fused.get(f"{name}.bias"))

    def _norm(self, name: str) -> Norm:
        return RmsNorm(self._parameters[name], self._config.rms_norm_eps, self._native)

    def _head_norm(self, attention: str) -> HeadNorm | None:
        if not self._has_head_norm:
            return None
        q, k = self._parameters[f"{attention}.q_norm.weight"], self._parameters[f"{attention}.k_norm.weight"]
        return HeadNorm(q, k, self._config.rms_norm_eps)

    def _output_norm(self) -> Norm:
        return self._norm("model.norm.weight")

    def _embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._parameters[self._embedding_name])

    def _rotary(self) -> Rotary:
        rope = self._config.rope_parameters
        if rope["rope_type"] == "default":
            share = torch.arange(0, self._head_dim, 2, dtype=torch.float32) / self._head_dim
            frequencies, scaling = 1.0 / rope["rope_theta"] ** share, 1.0
        else:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self._config)
        return Rotary(frequencies.to(self._device), scaling, self._dtype)


class Gpt2Decoder(Decoder):
    """GPT-2: layer norm, learned positions, plain MLP, matrices stored [in, out]."""

    _embedding_name = "transformer.wte.weight"

    def __init__(self, config: Any, dtype: torch.dtype, device: str, native: Native | None) -> None:
        heads = config.num_attention_heads
        super().__init__(config, heads, config.hidden_size // heads, dtype, device, native)

    def _allocate(self) -> None:
        hidden = self._config.hidden_size
        inner = self._config.n_inner or 4 * hidden
        self._new(self._embedding_name, self.vocab_size, hidden)
        self._new("transformer.wpe.weight", self.max_length, hidden)
        self._new("transformer.ln_f.weight", hidden)
        self._new("transformer.ln_f.bias", hidden)
        shapes = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
        shapes |= {"mlp.c_fc": (hidden, inner), "mlp.c_proj": (inner, hidden)}
        for i in range(self._config.num_hidden_layers):
            layer = f"transformer.h.{i}"
            for name, shape in shapes.items():
                self._new(f"{layer}.{name}.weight", *shape)
                self._new(f"{layer}.{name}.bias", shape[1])
            for norm in ("ln_1", "ln_2"):
                self._new(f"{layer}.{norm}.weight", hidden)
                self._new(f"{layer}.{norm}.bias", hidden)

    def _layer(self, i: int) -> Layer:
        layer = f"transformer.h.{i}"
        up, down = self._linear(f"{layer}.mlp.c_fc"), self._linear(f"{layer}.mlp.c_proj")
        divisor = i + 1 if self._config.scale_attn_by_inverse_layer_idx else 1
        return Layer(
            norm_attention=self._norm(f"{layer}.ln_1"),
            qkv=self._linear(f"{layer}.attn.c_attn"),
            attention=self._attention.layer(i, self._head_dim**-0.5 / divisor, None),
            out=self._linear(f"{layer}.attn.c_proj"),
            norm_mlp=self._norm(f"{layer}.ln_2"),
            mlp=lambda x: down(F.gelu(up(x), approximate="tanh")),
        )

    def _linear(self, name: str) -> Linear:
        return Linear(self._parameters[f"{name}.weight"].t(), self._parameters[f"{name}.bias"])

    def _norm(self, name: str) -> Norm:
        weight, bias = self._parameters[f"{name}.weight"], self._parameters[f"{name}.bias"]
        return LayerNorm(weight, bias, self._config.layer_norm_epsilon)

    def _output_norm(self) -> Norm:
        return self._norm("transformer.ln_f")

    def _embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        words, places = self._parameters[self._embedding_name], self._parameters["transformer.wpe.weight"]
        return F.embedding(ids, words) + F.embedding(positions, places)


def _at_least(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad [N, ...] with rows of zeros."""
    return x if len(x) >= rows else torch.cat((x, x.new_zeros((rows - len(x), *x.shape[1:]))))


def _passes(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Cut a prefill into passes of (sequence, start, stop), each of at most `_PREFILL_TOKENS` padded tokens.

    Every sequence is in one pass as a whole if it fits, else in passes of its own.
    """
    part: list[tuple[int, int, int]] = []
    widest = 0
    for i, length in enumerate(lengths):
        if part and (len(part) + 1) * max(widest, length) > _PREFILL_TOKENS:
            yield part
            part, widest = [], 0
        start = 0
        while length - start > _PREFILL_TOKENS:
            yield [(i, start, start + _PREFILL_TOKENS)]
            start += _PREFILL_TOKENS
        part.append((i, start, length))
        widest = max(widest, length - start)
    if part:
        yield part
