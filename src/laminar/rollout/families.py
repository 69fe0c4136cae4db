"""Which models the torch engine can run, judged by `config.json` alone. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAST_FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
"""`model_type`s with kernels of our own; all other decoders go through the model's own forward."""

_ATTENTION = ("full_attention", "sliding_attention", "attention", "global", "local", "sliding", "full")
_RECURRENT_FAMILIES = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "rwkv7")
_RECURRENT_KEYS = (
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "d_state",
    "mamba_d_ssm",
    "linear_num_value_heads",
    "linear_attn_config",
    "lru_width",
    "conv_L_cache",
    "hybrid_override_pattern",
    "attn_layer_period",
    "hybrid_layer_ids",
)
_OTHER_INPUT_KEYS = ("vision_config", "audio_config", "image_token_id", "image_token_index", "audio_token_id")
_ROPE_TYPES = ("default", "linear", "llama3")


def supports(config: Mapping[str, Any]) -> str | None:
    """Why the torch engine can't run a model, or None if it can.

    Args:
        config: the parsed `config.json` of the model folder.
    """
    kind = _unsupported_kind(config)
    if kind is None:
        return None
    name = config.get("model_type", "this model")
    return f'{name} is {kind}, which the torch engine does not run; use engine = "vllm"'


def is_fast(config: Mapping[str, Any]) -> bool:
    """Whether the fast path has everything this supported model needs. `config` as in `supports`."""
    family = config.get("model_type")
    if family not in FAST_FAMILIES:
        return False
    if family == "gpt2":
        plain = config.get("activation_function", "gelu_new") == "gelu_new"
        return plain and not config.get("add_cross_attention") and config.get("scale_attn_weights", True)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    sliding = config.get("use_sliding_window", False) or "sliding_attention" in (config.get("layer_types") or ())
    whole = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)) == 1.0
    return config.get("hidden_act", "silu") == "silu" and rope_type in _ROPE_TYPES and whole and not sliding


def _unsupported_kind(config: Mapping[str, Any]) -> str | None:
    architectures = config.get("architectures") or []
    if config.get("is_encoder_decoder") or any("ConditionalGeneration" in name for name in architectures):
        return "an encoder-decoder or multimodal model"
    if any(config.get(key) is not None for key in _OTHER_INPUT_KEYS):
        return "a model with image or audio input"
    if config.get("model_type") in _RECURRENT_FAMILIES:
        return "a recurrent model"
    layers = {str(kind) for kind in (config.get("layer_types") or config.get("layers_block_type") or ())}
    if layers - set(_ATTENTION) or any(config.get(key) is not None for key in _RECURRENT_KEYS):
        return "a recurrent or hybrid model"
    if config.get("quantization_config"):
        return "quantised"
    if architectures and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return f"a {architectures[0]}, not a causal language model"
    return None
