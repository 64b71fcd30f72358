"""Gemma 4 in GGUF files: heads and rotations of two kinds of layers under two sets of keys; what turns is a tensor."""

from __future__ import annotations

from typing import Any

from tandem.architectures.family import Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER

STILL = 1e9  # a frequency divided by more stands still

STEMS = GGUF_DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.{expert}.gate_proj",
    "ffn_up_exps": "experts.{expert}.up_proj",
    "ffn_down_exps": "experts.{expert}.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "layer_output_scale": "layer_scalar",
}


def config(keys: GgufKeys) -> dict[str, Any]:
    count, width = keys.depth, keys.need("attention.key_length_swa")
    windowed = keys.flags("attention.sliding_window_pattern")
    if len(windowed) != count:
        raise keys.refuse("attention.sliding_window_pattern", f"has {len(windowed)} values for {count} layers")
    heads = keys.layers("attention.head_count_kv", count)
    full = {"head_dim": keys.need("attention.key_length")}
    full_layers = [layer for layer in range(count) if not windowed[layer]]
    experts = keys.optional("expert_count", 0)
    return _rope(keys, width) | {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "sliding_window": keys.need("attention.sliding_window"),
        "head_dim": width,
        "num_key_value_heads": next((h for h, each in zip(heads, windowed, strict=True) if each), heads[0]),
        "per_layer_config": {str(layer): full | {"num_key_value_heads": heads[layer]} for layer in full_layers},
        "attention_k_eq_v": any(not keys.has_tensor(f"blk.{layer}.attn_v.weight") for layer in full_layers),
        "attention_bias": keys.has_bias,
        "num_kv_shared_layers": keys.optional("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": keys.optional("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0),
    } | (_experts(keys, experts) if experts else {})


def _experts(keys: GgufKeys, count: int) -> dict[str, Any]:
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.expert_width,
    }


def _rope(keys: GgufKeys, width: int) -> dict[str, Any]:
    """Where a layer sees everything, each frequency is divided by a number of `rope_freqs`: by 1, or by so much that it
    stands still."""
    if keys.optional("rope.dimension_count_swa", width) != width:
        raise keys.refuse("rope.dimension_count_swa", f"is not {width}: all channels turn")
    divisors = keys.vector("rope_freqs.weight")
    turning = [divisor for divisor in divisors if divisor < STILL]
    if set(turning) - {1.0}:
        raise keys.refuse("rope.freq_base", "is for rope_freqs.weight of ones, and of numbers above 1e9")
    share = len(turning) / len(divisors) if divisors else 1.0
    theta = {"rope_type": "proportional", "rope_theta": keys.number("rope.freq_base", 1e6)}
    near = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 1e4)}
    return {
        "rope_parameters": {
            "full_attention": theta | {"partial_rotary_factor": share},
            "sliding_attention": near,
        }
    }


GEMMA4 = Gguf("gemma4", config, STEMS)
