"""Log-probs against the model's own forward, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from laminar.errors import ModelError
from laminar.golden import golden_ids
from laminar.trainer import packing, policy
from laminar.trainer.packing import Lines, make_layout, make_rows, unpack
from laminar.types import Batch


def plain_logprobs(model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[torch.arange(len(response)), response]


@pytest.mark.parametrize("chunk_logits", [policy.CHUNK_LOGITS, 5 * 32, 1])
@pytest.mark.parametrize(
    ("packed", "share_prompts", "line_price"),
    [(True, True, 10**6), (True, True, -(10**6)), (True, False, 0), (False, False, 0)],
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_their_gradient(
    model: PreTrainedModel,
    make_batch: Callable[..., Batch],
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    packed: bool,
    share_prompts: bool,
    line_price: int,
    chunk_logits: int,
) -> None:
    """Padding, packing, shared prompts, attention by masks or lines and chunks of the head change neither log-probs
    nor gradients."""
    monkeypatch.setattr(policy, "CHUNK_LOGITS", chunk_logits)
    monkeypatch.setattr(packing, "LINE_PRICE", line_price)
    model.double()
    assert policy.can_pack(model)
    samples = unpack(make_batch())
    layout = make_layout(samples, make_rows(samples, range(len(samples.groups)), share_prompts), packed)
    assert any(isinstance(row.attention, Lines) for row in layout.rows) == (line_price < 0)
    logprobs, entropy = policy.token_logprobs(model, layout, temperature)
    assert not entropy.requires_grad
    logprobs.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()

    expected = torch.cat(
        [
            plain_logprobs(model, prompt.tolist(), response.tolist(), temperature)
            for prompt, response in zip(samples.prompts, samples.responses, strict=True)
        ]
    )
    expected.sum().backward()
    assert layout.tokens.tolist() == list(range(len(expected)))
    torch.testing.assert_close(logprobs, expected, atol=1e-12, rtol=0)
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=2e-5, rtol=1e-5)  # norms are fp32 inside


def test_entropy_of_a_known_distribution(make_batch: Callable[..., Batch], model: PreTrainedModel) -> None:
    samples = unpack(make_batch(groups=(1,)))
    layout = make_layout(samples, [(0,)], packed=True)
    with torch.no_grad():
        _, entropy = policy.token_logprobs(model, layout, 1e6)
    torch.testing.assert_close(entropy, torch.full_like(entropy, 32.0).log(), atol=1e-4, rtol=0)


def test_rows_are_not_packed_behind_a_sliding_window() -> None:
    config = AutoConfig.for_model("mistral", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    config.num_attention_heads = config.num_key_value_heads = 2
    config.sliding_window = 4
    assert not policy.can_pack(AutoModelForCausalLM.from_config(config))


def test_named_weights_are_what_save_pretrained_writes(model: PreTrainedModel, tmp_path: Path) -> None:
    """Fault 25: tied tensors once, by their own name, every value compared."""
    model.save_pretrained(tmp_path)
    weights = dict(policy.named_weights(model))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(weights)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in weights.items())
    assert [name for name, _ in policy.named_weights(model)] == list(weights)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 0.5)])
def test_golden(model: PreTrainedModel, dtype: policy.Dtype, tolerance: float) -> None:
    """Fault 23: the numbers an engine has to find, in its own precision."""
    ids = golden_ids(32)
    values = policy.golden(model, dtype)
    rounded = model.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(rounded(torch.tensor([ids])).logits[0].float(), -1)
    expected = logprobs[torch.arange(len(ids) - 1), ids[1:]]
    assert len(values) == 63
    torch.testing.assert_close(torch.tensor(values), expected, atol=tolerance, rtol=0)


def test_load_keeps_fp32_and_turns_dropout_off(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5)
    config.bos_token_id = config.eos_token_id = 0
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    model = policy.load_model(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())


def test_soft_capped_logits_are_understood(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "gemma2", vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy.load_model(tmp_path)


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't be loaded") as caught:
        policy.load_model(tmp_path)
    assert caught.value.where == str(tmp_path)


def test_a_head_the_trainer_does_not_know_is_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = policy._logits
    monkeypatch.setattr(policy, "_logits", lambda model, hidden: original(model, hidden) * 2)
    with pytest.raises(ModelError, match="logits"):
        policy.load_model(model_folder)
