"""The language model as the trainer sees it: log-probs of given tokens, and its weights by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from laminar.errors import ModelError
from laminar.golden import GOLDEN_LENGTH, golden_ids
from laminar.trainer.packing import Layout, Lines, Row

Dtype = Literal["fp32", "bf16"]

CHUNK_TOKENS = 1024
"""Tokens that the head is applied to at once: with a small vocabulary, their logits stay in the cache of a CPU."""
CHUNK_LOGITS = 2**25
"""Logits held at once, which a large vocabulary would make too many."""


def load_model(path: Path, allow_pickle: bool = False) -> PreTrainedModel:
    """Load a causal language model in fp32, with dropout off. `allow_pickle`: if need be, from pickles.

    Raises:
        ModelError: the folder holds no such model, not all of its weights, or one whose logits are not a function of
            its head that we know
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, use_safetensors=None if allow_pickle else True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            "the model can't be loaded",
            where=str(path),
            expected="a Hugging Face causal language model",
            got=str(error),
        ) from error
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        raise ModelError(
            "the weights are not all there, and the rest would be random",
            where=str(path),
            got=f"no {', '.join(missing[:3])}{f' and {len(missing) - 3} more' if missing[3:] else ''}",
        )
    model.train(False)  # no dropout; gradients flow all the same
    ids = _golden_input(model)
    with torch.no_grad():
        own = model(ids, use_cache=False).logits[0].float()
        ours = _logits(model, model.base_model(ids, use_cache=False).last_hidden_state[0])
    if not torch.allclose(own, ours, atol=1e-4, rtol=1e-4):
        raise ModelError(
            f"{type(model).__name__} does something to its logits that the trainer does not know",
            where=str(path),
            expected="logits = head(hidden states), with soft-capping or scaling at most",
            fix="use a plain decoder",
        )
    return model


def can_pack(model: PreTrainedModel) -> bool:
    """Whether rows may lie one behind the other in a sequence: the model has to leave attention to us."""
    config = model.config
    full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    plain = full and getattr(config, "sliding_window", None) is None
    return model._supports_attention_backend and config._attn_implementation == "sdpa" and plain


def autocast(dtype: Dtype, device: str = "cpu") -> torch.autocast:
    return torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bf16")


def token_logprobs(model: PreTrainedModel, layout: Layout, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens of a forward pass: log_softmax(fp32 logits / temperature).

    Returns:
        Log-probs [T] with gradient if enabled, entropies [T] in nats without.
    """
    hidden = predicting_states(model, layout)
    targets = torch.from_numpy(layout.targets).to(model.device)
    size = chunk_tokens(model)
    pieces = zip(hidden.split(size), targets.split(size), strict=True)
    logprobs, entropies = zip(*(head_logprobs(model, h, t, temperature) for h, t in pieces), strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def predicting_states(model: PreTrainedModel, layout: Layout) -> Tensor:
    """[T, D]: what goes into the head at the positions that predict a response token."""
    predictors = torch.from_numpy(layout.predictors).to(model.device)
    return _hidden(model, layout).flatten(0, 1).index_select(0, predictors)


def chunk_tokens(model: PreTrainedModel) -> int:
    """How many tokens the head is applied to at once."""
    return max(1, min(CHUNK_TOKENS, CHUNK_LOGITS // int(model.config.vocab_size)))


def head_logprobs(model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """As `token_logprobs`, from states [T, D] and targets [T]. T is at most `chunk_tokens`."""
    logits = _logits(model, hidden)
    if temperature != 1:
        logits = logits / temperature  # by this name, so that the others are freed: they are as large
    apply: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _TokenLogprobs.apply
    return apply(logits, targets)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probs of `targets` [T] and entropies [T], from logits [T, V]; the gradient needs the chances only."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(logits, dim=-1)
        found = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        chances = logprobs.exp()
        entropy = -torch.linalg.vecdot(chances, logprobs.clamp_(min=torch.finfo(logprobs.dtype).min))  # 0 * -inf
        ctx.save_for_backward(chances, targets)
        ctx.mark_non_differentiable(entropy)
        return found, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None]:
        chances, targets = ctx.saved_tensors
        to_logits = chances.mul_(-gradient.unsqueeze(-1))  # of one use: the gradient may take its place
        return to_logits.scatter_add_(-1, targets.unsqueeze(-1), gradient.unsqueeze(-1)), None


def _hidden(model: PreTrainedModel, layout: Layout) -> Tensor:
    """[B, L, D]: what goes into the head."""
    input_ids = torch.from_numpy(layout.input_ids).to(model.device)
    if layout.positions is None:
        plain: Tensor = model.base_model(input_ids, use_cache=False).last_hidden_state
        return plain
    positions = torch.from_numpy(layout.positions).to(model.device)
    with _attention_by_rows(model, layout.rows):
        packed: Tensor = model.base_model(input_ids, position_ids=positions, use_cache=False).last_hidden_state
    return packed


@contextmanager
def _attention_by_rows(model: PreTrainedModel, rows: Sequence[Row]) -> Iterator[None]:
    """Forward passes in the block are of a packed sequence: each row sees itself only."""
    token = _rows.set([(row.stop - row.start, _way(row, model.device)) for row in rows])
    model.config._attn_implementation = _BY_ROWS
    try:
        yield
    finally:
        model.config._attn_implementation = "sdpa"
        _rows.reset(token)


def _attend_by_rows(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """[1, L, heads, head size] of query, key, value [1, heads, L, head size], in the form that transformers calls."""
    lengths, ways = zip(*_rows.get(), strict=True)
    parts = []
    for q, k, v, way in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), ways, strict=True):
        if isinstance(way, tuple):
            places, origins = way
            q, k, v = (_lines(x, places) for x in (q, k, v))
            lines = sdpa_attention_forward(module, q, k, v, None, **options)[0]
            parts.append(lines.flatten(0, 1).index_select(0, origins)[None])
        else:
            parts.append(sdpa_attention_forward(module, q, k, v, way, **options)[0])
    return torch.cat(parts, dim=1), None


def _lines(x: Tensor, places: Tensor) -> Tensor:
    """[S, heads, M, head size] of a row [1, heads, L, head size]."""
    by_token = x[0].transpose(0, 1).index_select(0, places.flatten())
    return by_token.view(*places.shape, *by_token.shape[1:]).transpose(1, 2)


def _way(row: Row, device: torch.device) -> Tensor | tuple[Tensor, Tensor] | None:
    """Its mask [1, 1, L, L], or what makes its lines, or None."""
    match row.attention:
        case None:
            return None
        case Lines(places, origins):
            return torch.from_numpy(places).to(device), torch.from_numpy(origins).to(device)
        case visible:
            return torch.from_numpy(visible).to(device)[None, None]


# Not every model hands keywords down to its attention.
_rows: ContextVar[list[tuple[int, Tensor | tuple[Tensor, Tensor] | None]]] = ContextVar("rows")
"""Length of each row and how it is attended to."""
_BY_ROWS = "laminar_rows"
AttentionInterface.register(_BY_ROWS, _attend_by_rows)


def _logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits of hidden states in at least fp32, as the model's own `forward` ends."""
    config = model.config
    logits: Tensor = model.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    return logits


def golden(model: PreTrainedModel, dtype: Dtype) -> list[float]:
    """Log-probs of the golden ids but the first, each given those before, at temperature 1.

    In bf16 the master weights are rounded by autocast, matrix by matrix, just as publishing rounds them; the
    rounding of embeddings, norms and activations differs from an engine's and is left to the tolerance.

    Args:
        model: with fp32 master weights
        dtype: precision in which weights are published and engines compute
    """
    ids = _golden_input(model)
    with torch.no_grad(), autocast(dtype, model.device.type):
        logits = _logits(model, model.base_model(ids, use_cache=False).last_hidden_state[0, :-1])
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:].unsqueeze(-1))
    return [float(value) for value in logprobs.flatten()]


def _golden_input(model: PreTrainedModel) -> Tensor:
    """[1, G]: the golden ids."""
    longest = getattr(model.config, "max_position_embeddings", None) or GOLDEN_LENGTH
    return torch.tensor([golden_ids(model.config.vocab_size, longest)], device=model.device)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Weights under the model's own (unfused Hugging Face) names, in its own order, each tied tensor once.

    The tensors are views of the live weights: copy them before the next optimizer step.
    """
    tied = model.all_tied_weights_keys
    for name, tensor in model.state_dict().items():
        if name not in tied:
            yield name, tensor
