"""A sampler, an advantage and a loss of one's own. In a config, or after it on the command line:

data.sampler=examples/own_parts/parts.py:youngest_first
train.advantage=examples/own_parts/parts.py:leave_one_out
train.loss=examples/own_parts/parts.py:truncated_reinforce
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laminar.data.samplers import BufferedGroup
from laminar.trainer.loss import LossSettings


def youngest_first(groups: Sequence[BufferedGroup]) -> Sequence[BufferedGroup]:
    """Groups of the newest weights first; those whose last chance it is are taken before all others anyway."""
    return sorted(groups, key=lambda group: -group.version)


def leave_one_out(rewards: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """RLOO: each reward against the mean of the others of its group. [N] from [N]."""
    advantages = np.zeros_like(rewards)
    for group in np.unique(groups):
        members = groups == group
        own, count = rewards[members], members.sum()
        if count > 1:
            advantages[members] = own - (own.sum() - own) / (count - 1)
    return advantages


def truncated_reinforce(
    new: Tensor, old: Tensor, behaviour: Tensor, advantage: Tensor, settings: LossSettings
) -> Tensor:
    """REINFORCE with a truncated importance weight instead of a clip, as CISPO has it. [T] from [T]."""
    weight = torch.exp(new.detach() - behaviour).clamp(max=settings.is_cap)
    return -weight * advantage * new
