from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from laminar.rollout.families import is_fast, supports

RUNS = [
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    {"model_type": "qwen3", "layer_types": ["full_attention", "full_attention"]},
    {"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4096},
    {"model_type": "phi", "architectures": ["PhiForCausalLM"]},
]
DOES_NOT_RUN = [
    ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    ({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}, "recurrent"),
    ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "hybrid"),
    ({"model_type": "recurrent_gemma", "lru_width": 2560}, "hybrid"),
    ({"model_type": "jamba", "attn_layer_period": 8, "mamba_d_state": 16}, "hybrid"),
    ({"model_type": "qwen2_vl", "vision_config": {"depth": 32}}, "image"),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "not a causal language model"),
    ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantised"),
]


@pytest.mark.parametrize("config", RUNS, ids=lambda config: config["model_type"])
def test_decoders_with_attention_run(config: dict[str, Any]) -> None:
    assert supports(config) is None


@pytest.mark.parametrize(("config", "kind"), DOES_NOT_RUN, ids=lambda value: str(value)[:30])
def test_a_refusal_names_the_kind_and_the_way_out(config: dict[str, Any], kind: str) -> None:
    reason = supports(config)
    assert reason is not None
    assert kind in reason
    assert 'engine = "vllm"' in reason


@pytest.mark.parametrize(
    ("config", "fast"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, True),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, True),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic"}}, False),
        ({"model_type": "llama", "hidden_act": "gelu"}, False),
        ({"model_type": "qwen2", "use_sliding_window": True}, False),
        ({"model_type": "gpt2", "activation_function": "relu"}, False),
        ({"model_type": "mistral"}, False),
    ],
)
def test_the_fast_path_takes_only_what_it_computes(config: dict[str, Any], fast: bool) -> None:
    assert is_fast(config) is fast


def test_the_check_imports_no_torch() -> None:
    code = "import sys, laminar.rollout.families; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
