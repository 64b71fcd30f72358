"""DeepSeek-V4 in GGUF files, as llama.cpp's `deepseek4` has it: other names, and tables of experts as int32."""

from __future__ import annotations

from typing import Any

from tandem.architectures.family import Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER

SQRT_SOFTPLUS = 4  # of expert_gating_func

STEMS = GGUF_DECODER | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_norm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv": "self_attn.kv_proj",
    "attn_kv_a_norm": "self_attn.kv_norm",
    "attn_output_a": "self_attn.o_a_proj",
    "attn_output_b": "self_attn.o_b_proj",
    "attn_sinks": "self_attn.sinks",
    "attn_compressor_kv": "self_attn.compressor.kv_proj",
    "attn_compressor_gate": "self_attn.compressor.gate_proj",
    "attn_compressor_ape": "self_attn.compressor.position_bias",
    "attn_compressor_norm": "self_attn.compressor.kv_norm",
    "indexer.attn_q_b": "self_attn.compressor.indexer.q_b_proj",
    "indexer.proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "indexer_compressor_kv": "self_attn.compressor.indexer.kv_proj",
    "indexer_compressor_gate": "self_attn.compressor.indexer.gate_proj",
    "indexer_compressor_ape": "self_attn.compressor.indexer.position_bias",
    "indexer_compressor_norm": "self_attn.compressor.indexer.kv_norm",
    "ffn_gate_tid2eid": "mlp.gate.tid2eid",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
} | {
    f"hc_{block}_{part}": f"{block}_hc.{part}" for block in ("attn", "ffn") for part in ("fn", "base", "scale")
}  # fmt: skip


def config(keys: GgufKeys) -> dict[str, Any]:
    keys.only("expert_gating_func", SQRT_SOFTPLUS, "sqrtsoftplus")
    return _attention(keys) | {
        "model_type": "deepseek_v4",
        "num_hidden_layers": keys.depth,
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "n_shared_experts": keys.optional("expert_shared_count", 1),
        "moe_intermediate_size": keys.expert_width,
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.5),
        "num_hash_layers": keys.need("hash_layer_count"),
        "swiglu_limit": limit_of(keys),
        "hc_mult": keys.need("hyper_connection.count"),
        "hc_sinkhorn_iters": keys.need("hyper_connection.sinkhorn_iterations"),
        "hc_eps": keys.number("hyper_connection.epsilon", 1e-6),
    }


def _attention(keys: GgufKeys) -> dict[str, Any]:
    rope = keys.rope()
    usual = {"beta_fast": 32.0, "beta_slow": 1.0}
    betas = {name: keys.number(f"rope.scaling.yarn_{name}", value) for name, value in usual.items()}
    return {
        "num_key_value_heads": 1,
        "q_lora_rank": keys.need("attention.q_lora_rank"),
        "qk_rope_head_dim": keys.need("rope.dimension_count"),
        "o_groups": keys.need("attention.output_group_count"),
        "o_lora_rank": keys.need("attention.output_lora_rank"),
        "sliding_window": keys.need("attention.sliding_window"),
        "compress_ratios": [int(ratio) for ratio in keys.numbers("attention.compress_ratios")],
        "rope_theta": rope["rope_theta"],
        "compress_rope_theta": keys.number("attention.compress_rope_freq_base", 160000.0),
        "rope_parameters": rope | betas,
        "index_n_heads": keys.need("attention.indexer.head_count"),
        "index_head_dim": keys.need("attention.indexer.key_length"),
        "index_topk": keys.need("attention.indexer.top_k"),
    }


def limit_of(keys: GgufKeys) -> float:
    limits = keys.numbers("swiglu_clamp_exp")
    if not limits:
        raise keys.refuse("swiglu_clamp_exp", "is missing: convert the model again with today's llama.cpp")
    if len(set(limits)) != 1:
        raise keys.refuse("swiglu_clamp_exp", "is not one number for all layers")
    if keys.numbers("swiglu_clamp_shexp") not in ([], limits):
        raise keys.refuse("swiglu_clamp_shexp", "is not that of the experts")
    return limits[0]


DEEPSEEK_V4 = Gguf("deepseek4", config, STEMS)
