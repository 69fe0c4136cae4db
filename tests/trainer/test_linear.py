"""Linear layers by oneDNN: the same results as torch's own, wherever they stand in."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from laminar.trainer import linear
from laminar.trainer.linear import OneDnnLinear, with_one_dnn


@pytest.fixture(autouse=True)
def _every_product_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "PAYS_FROM", 0)


def results(layer: nn.Module, input: Tensor, towards: Tensor) -> list[Tensor]:
    """Its output, and the gradients of what has one."""
    given = input.detach().clone().requires_grad_(input.requires_grad)
    output = layer(given)
    torch.autograd.backward(output, towards)
    gradients = [given.grad, *(parameter.grad for parameter in layer.parameters())]
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (1, 7), (2, 3, 4)])
@pytest.mark.parametrize("frozen", [(), ("input",), ("weight",)])
def test_output_and_gradients_are_those_of_the_plain_layer(
    bias: bool, shape: tuple[int, ...], frozen: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    plain.weight.requires_grad_("weight" not in frozen)
    input = torch.randn(*shape, 24, requires_grad="input" not in frozen)
    ours = with_one_dnn(nn.Sequential(deepcopy(plain)))
    assert type(ours[0]) is OneDnnLinear
    towards = torch.randn(*shape, 40)
    expected, found = results(plain, input, towards), results(ours, input, towards)
    assert len(expected) == len(found) == 4 - (not bias) - len(frozen)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_a_product_of_columns_and_of_no_rows() -> None:
    """Views come from transposed states, and a micro-batch may hold nothing that predicts."""
    plain = nn.Linear(24, 40)
    ours = with_one_dnn(nn.Sequential(deepcopy(plain)))
    for input in (torch.randn(24, 6).t(), torch.randn(0, 24)):
        torch.testing.assert_close(ours(input), plain(input))


def test_autocast_and_other_dtypes_are_torch_s_own() -> None:
    plain = nn.Linear(24, 40)
    ours, input = with_one_dnn(nn.Sequential(deepcopy(plain))), torch.randn(3, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(input), plain(input)) and ours(input).dtype == torch.bfloat16
    assert torch.equal(ours.double()(input.double()), plain.double()(input.double()))


def test_small_products_are_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Linear(24, 40)
    ours, input = with_one_dnn(nn.Sequential(deepcopy(plain))), torch.randn(3, 24, requires_grad=True)
    for bound, node in ((3 * 24 * 40, "_LinearBackward"), (3 * 24 * 40 + 1, "AddmmBackward0")):
        monkeypatch.setattr(linear, "PAYS_FROM", bound)
        assert ours(input).grad_fn.name() == node


def test_a_model_keeps_its_weights_and_its_ties(model: PreTrainedModel) -> None:
    plain, ours = model, with_one_dnn(deepcopy(model))
    kinds = {type(module) for module in ours.modules()}
    assert OneDnnLinear in kinds and nn.Linear not in kinds
    assert ours.state_dict().keys() == plain.state_dict().keys()
    tied = [m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in (plain, ours)]
    assert tied[0] == tied[1]
    ids = torch.arange(10)[None]
    torch.testing.assert_close(ours(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)
