"""Step-3.5-Flash in GGUF files: heads of each layer as lists; a norm's file has 1 + w."""

from __future__ import annotations

from typing import Any

from tandem.architectures.family import SIGMOID, DerivedTensor, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER

STEMS = GGUF_DECODER | {
    "attn_gate": "self_attn.g_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
NORMS = (
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    "model.norm.weight",
)  # fmt: skip


def config(keys: GgufKeys) -> dict[str, Any]:
    """Where a layer sees everything, half of a head's channels turn: no key says so."""
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    count = keys.depth
    windowed = keys.layers("attention.sliding_window_pattern", count)
    heads = dict(zip(windowed, keys.layers("attention.head_count", count), strict=True))
    groups = set(keys.layers("attention.head_count_kv", count))
    if len(groups) > 1:
        raise keys.refuse("attention.head_count_kv", "differs between layers, which is not supported")
    full = keys.rope() | {"partial_rotary_factor": 0.5}
    divisors = full.get("divisors", [])
    if len(divisors) == keys.need("attention.key_length") // 2:  # as if all channels turned: every second is for ours
        full["divisors"] = divisors[::2]
    near = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 1e4)}
    return {
        "model_type": "step3p5",
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "mlp_layer_types": [_kind(keys, layer) for layer in range(count)],
        "num_attention_heads": heads.get(0, max(heads.values())),
        "num_sliding_attention_heads": heads.get(1, max(heads.values())),
        "num_key_value_heads": groups.pop(),
        "sliding_window": keys.need("attention.sliding_window"),
        "rope_parameters": {"full_attention": full, "sliding_attention": near},
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.expert_width,
        "share_expert_dim": keys.rows("ffn_gate_shexp.weight"),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "moe_router_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "swiglu_limits": keys.numbers("swiglu_clamp_exp")[:count],
        "swiglu_limits_shared": keys.numbers("swiglu_clamp_shexp")[:count],
    }


def _kind(keys: GgufKeys, layer: int) -> str:
    return "sparse" if keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") else "dense"


def parts(_: GgufKeys) -> dict[str, DerivedTensor]:
    return {name: DerivedTensor(name, numbers="x - 1") for name in NORMS}


STEP35 = Gguf("step35", config, STEMS, parts)
