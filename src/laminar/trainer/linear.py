"""Linear layers on a CPU in fp32: each of the three matrix products by the library that is the faster one for it.

torch leaves products in fp32 to MKL, which is slow on processors of other makers than its own; oneDNN, which torch has
too, is not. docs/performance.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

Model = TypeVar("Model", bound=nn.Module)

PAYS_FROM = 10**8
"""Multiplications of a product. For each new number of rows oneDNN makes code, which takes up to a millisecond."""


class OneDnnLinear(nn.Linear):
    """The same layer, with the same result but for rounding. Small products and other dtypes are left to torch."""

    def forward(self, input: Tensor) -> Tensor:
        pays = input.numel() * self.out_features >= PAYS_FROM
        if not pays or torch.is_autocast_enabled("cpu") or not _takes(input) or not _takes(self.weight):
            return functional.linear(input, self.weight, self.bias)
        apply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _Linear.apply
        return apply(input, self.weight, self.bias)


def with_one_dnn(model: Model) -> Model:
    """The model, each plain linear layer of it now one of these, if torch has been built with oneDNN."""
    if torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDnnLinear
    return model


def _takes(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


class _Linear(torch.autograd.Function):
    """input [..., D], weight [E, D], bias [E] or None -> [..., E]"""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return (
            _product(gradient, weight.t()) if ctx.needs_input_grad[0] else None,
            rows.t() @ input.flatten(0, -2) if ctx.needs_input_grad[1] else None,  # MKL is the faster one here
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias"""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return output
