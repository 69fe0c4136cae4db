"""Decoupled PPO with a truncated importance weight, as pure functions on flat token tensors.

Three policies: behaviour (the engine that sampled), old (the trainer at the start of the iteration) and new
(the trainer now). Tokens of all samples lie one after the other, without padding: T tokens, S sequences.

A loss of the user's takes the place of `decoupled_ppo` and is called as it is, by keyword.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from laminar.errors import UserCodeError
from laminar.user_code import load_function

AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

TokenLoss = Callable[..., Tensor]
"""`decoupled_ppo`, or a function of the user's with its keywords."""

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


def decoupled_ppo(new: Tensor, old: Tensor, behaviour: Tensor, advantage: Tensor, settings: LossSettings) -> Tensor:
    """Loss of each token.

    With ratio = new / old and w = stopgrad(min(old / behaviour, cap)), a token costs
    -w * min(ratio * A, clip(ratio) * A), for A < 0 never more than 3 * |A| (dual clip). Decoupled PPO is AReaL's, the
    truncated weight and dual clip are verl's, the higher upper clip is DAPO's.

    Args:
        new: [T] log-probs with gradient; all others carry none
        old, behaviour: [T] log-probs
        advantage: [T]
        settings: constants

    Returns:
        [T]. What a masked token gives is not used; its log-probs and advantage are 0.
    """
    ratio = _log_ratio(new, old).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    surrogate = torch.maximum(plain, clipped)
    bounded = torch.where(advantage < 0, surrogate.clamp(max=-DUAL_CLIP * advantage), surrogate)
    return _importance(old, behaviour, settings) * bounded


@dataclass(frozen=True, slots=True)
class UserLoss:
    """A `TokenLoss` by a function of the user's."""

    spec: str
    function: Callable[..., Any]

    @classmethod
    def load(cls, spec: str) -> UserLoss:
        """Raises UserCodeError."""
        return cls(spec, load_function(spec, "train.loss"))

    def __call__(self, new: Tensor, **keywords: Any) -> Tensor:
        """[T]. Raises UserCodeError for what can't be the loss of each token, and what the function raises."""
        losses = self.function(new=new, **keywords)
        if not isinstance(losses, Tensor) or losses.shape != new.shape:
            got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise UserCodeError(
                "returned something that is not a loss a token",
                where=f"`{self.spec}`",
                expected=f"a tensor of shape {list(new.shape)}",
                got=got,
            )
        return losses


def policy_loss(
    new: Tensor,
    old: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    advantage: Tensor,
    weight: Tensor,
    settings: LossSettings,
    reference: Tensor | None = None,
    token_loss: TokenLoss = decoupled_ppo,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of some tokens of a mini-batch, and sums over them for the metrics.

    It is the weighted sum of `token_loss`, plus the KL to the reference. What is masked is replaced before it can reach
    an exponential, and log-ratios are clamped to +-20.

    Args:
        new: [T] log-probs with gradient; all others carry none
        old, behaviour: [T] log-probs
        mask: bool [T]
        advantage: [T]
        weight: [T], from `token_weights`
        settings: constants
        reference: [T] log-probs of the reference model, needed if `settings.kl_loss_coef` > 0
        token_loss: loss of each token

    Returns:
        The scalar to add up over micro-batches and differentiate, and sums over unmasked tokens: `tokens` (their
        number), `kl_old`, `kl_rollout`, `is_weight`, `is_capped`, `clipped` (of `decoupled_ppo` only), and `kl_ref`
        with a reference.
    """
    advantage = _unmasked(advantage.to(new.dtype), mask)
    new, old, behaviour = _unmasked(new, mask), _unmasked(old, mask), _unmasked(behaviour, mask)
    losses = token_loss(new=new, old=old, behaviour=behaviour, advantage=advantage, settings=settings)
    total = _unmasked(losses, mask)
    if reference is not None:
        kl_ref = _k3(_log_ratio(_unmasked(reference, mask), new))
        total = total + settings.kl_loss_coef * kl_ref
    loss = (total * weight.to(new.dtype)).sum()

    with torch.no_grad():
        log_mismatch = _log_ratio(old, behaviour)
        importance = _importance(old, behaviour, settings)
        sums = {
            "tokens": mask.sum(),
            "kl_old": _k3(_log_ratio(new, old)).sum(),
            "kl_rollout": _k3(log_mismatch).sum(),
            "is_weight": _unmasked(importance, mask).sum(),
            "is_capped": (mask & (log_mismatch.exp() > settings.is_cap)).sum(),
        }
        if token_loss is decoupled_ppo:
            plain = importance * (-advantage * _log_ratio(new, old).exp())
            sums["clipped"] = (mask & (losses != plain)).sum()
        if reference is not None:
            sums["kl_ref"] = kl_ref.sum()
    return loss, sums


def _importance(old: Tensor, behaviour: Tensor, settings: LossSettings) -> Tensor:
    """[T], without gradient: how much likelier the token is under the old policy than under the one that sampled it."""
    return _log_ratio(old, behaviour).detach().exp().clamp(max=settings.is_cap)


def _unmasked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros_like(values))


def _log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Clamped log-ratio of log-probs that are finite where they are masked."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimator of KL(q || p) from log(p / q) of a sample of q: unbiased, never negative.

    `expm1` keeps it exact near 0, where the plain form cancels.
    """
    return torch.expm1(log_ratio) - log_ratio
