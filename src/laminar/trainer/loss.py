"""Decoupled PPO with a truncated importance weight, as pure functions on flat token tensors.

Three policies: behaviour (the engine that sampled), old (the trainer at the start of the iteration) and new
(the trainer now). Tokens of all samples lie one after the other, without padding: T tokens, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

LOG_RATIO_LIMIT = 20.0
DUAL_CLIP = 3.0


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Constants of the loss; the names are those of the config."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    is_cap: float = 2.0
    kl_loss_coef: float = 0.0


def token_weights(
    mask: Tensor,
    sequence: Tensor,
    mode: AggregationMode,
    *,
    num_tokens: int,
    num_sequences: int,
    max_new_tokens: int,
) -> Tensor:
    """Factor of each token's loss in the loss of its mini-batch.

    The denominators are those of the whole mini-batch, so that the sums of its micro-batches add up to the
    same number however it is cut; only a sequence has to lie in one micro-batch whole.

    Args:
        mask: bool [T], True where the token is trained on
        sequence: int64 [T], which sequence a token belongs to, counted from 0
        mode: "token-mean": over all unmasked tokens; "seq-mean-token-mean": over the tokens of a sequence, then
            over sequences; "seq-mean-token-sum-norm": sums over `max_new_tokens`, then over sequences (Dr. GRPO)
        num_tokens: unmasked tokens of the mini-batch
        num_sequences: sequences of the mini-batch with an unmasked token
        max_new_tokens: limit on the length of a response

    Returns:
        float64 [T], 0 where masked
    """
    ones = mask.double()
    if not len(mask):
        return ones
    if mode == "token-mean":
        return ones / max(num_tokens, 1)
    if mode == "seq-mean-token-sum-norm":
        return ones / (max_new_tokens * max(num_sequences, 1))
    lengths = torch.zeros(int(sequence.max()) + 1, dtype=ones.dtype, device=ones.device).index_add(0, sequence, ones)
    return ones / (lengths[sequence].clamp(min=1) * max(num_sequences, 1))


def policy_loss(
    new: Tensor,
    old: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    advantage: Tensor,
    weight: Tensor,
    settings: LossSettings,
    reference: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of some tokens of a mini-batch, and sums over them for the metrics.

    With ratio = new / old and w = stopgrad(min(old / behaviour, cap)), a token costs
    -w * min(ratio * A, clip(ratio) * A), for A < 0 never more than 3 * |A| (dual clip), plus the KL to the
    reference. Decoupled PPO is AReaL's, the truncated weight and dual clip are verl's, the higher upper clip is
    DAPO's. What is masked is replaced before it can reach an exponential, and log-ratios are clamped to +-20.

    Args:
        new: [T] log-probs with gradient; all others carry none
        old, behaviour: [T] log-probs
        mask: bool [T]
        advantage: [T]
        weight: [T], from `token_weights`
        settings: constants
        reference: [T] log-probs of the reference model, needed if `settings.kl_loss_coef` > 0

    Returns:
        The scalar to add up over micro-batches and differentiate, and sums over unmasked tokens: `tokens` (their
        number), `kl_old`, `kl_rollout`, `is_weight`, `is_capped`, `clipped`, and `kl_ref` with a reference.
    """
    advantage = _unmasked(advantage.to(new.dtype), mask)
    log_ratio = _log_ratio(new, old, mask)
    ratio = log_ratio.exp()
    with torch.no_grad():
        log_mismatch = _log_ratio(old, behaviour, mask)
        mismatch = log_mismatch.exp()
        importance = mismatch.clamp(max=settings.is_cap)

    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    surrogate = torch.maximum(plain, clipped)
    bounded = torch.where(advantage < 0, surrogate.clamp(max=-DUAL_CLIP * advantage), surrogate)
    token_loss = importance * bounded
    if reference is not None:
        kl_ref = _k3(_log_ratio(reference, new, mask))
        token_loss = token_loss + settings.kl_loss_coef * kl_ref
    loss = (token_loss * weight.to(new.dtype)).sum()

    with torch.no_grad():
        sums = {
            "tokens": mask.sum(),
            "kl_old": _k3(log_ratio).sum(),
            "kl_rollout": _k3(log_mismatch).sum(),
            "is_weight": _unmasked(importance, mask).sum(),
            "is_capped": (mask & (mismatch > settings.is_cap)).sum(),
            "clipped": (mask & (bounded != plain)).sum(),
        }
        if reference is not None:
            sums["kl_ref"] = kl_ref.sum()
    return loss, sums


def _unmasked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros_like(values))


def _log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Finite log-ratio, 0 where masked, whatever lies there."""
    return _unmasked(numerator - denominator, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimator of KL(q || p) from log(p / q) of a sample of q: unbiased, never negative.

    `expm1` keeps it exact near 0, where the plain form cancels.
    """
    return torch.expm1(log_ratio) - log_ratio
