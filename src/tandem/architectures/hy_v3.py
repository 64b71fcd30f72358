"""Hy3: norms on q and k heads, sigmoid router with a selection bias, first layers dense."""

from __future__ import annotations

from typing import Any

from tandem.architectures.family import SIGMOID, Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, Names
from tandem.architectures.shared import gqa, layers_after_dense, model, moe, sigmoid_router
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

NAMES = Names(router="mlp.router.gate", router_bias="mlp.expert_bias", shared="mlp.shared_mlp")
IN_MEMORY = Names(router_bias="mlp.e_score_correction_bias", shared="mlp.shared_experts")
"""As Transformers 5 holds it."""


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("mlp_bias", False, "feed-forwards have no biases")
    keys.get("enable_moe_fp32_combine")  # a last rounding
    bias = keys.optional("attention_bias", False)
    attention = gqa(keys, qkv_bias=bias, out_bias=bias, qk_norm="head")
    scale = keys.optional("router_scaling_factor", 2.826)
    router = sigmoid_router(keys.overlaid({"routed_scaling_factor": scale}), experts="num_experts")
    width = keys.size("moe_intermediate_size", 1536)
    experts = moe(router, width, width * keys.count("num_shared_experts", 1))
    return model(keys, generation, lambda _: attention, experts, layers_after_dense(keys, 1))


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    layers = range(keys.depth)
    sparse = [keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in layers]
    return {
        "model_type": "hy_v3",
        "attention_bias": keys.has_bias,
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "num_shared_experts": keys.rows("ffn_gate_shexp.weight") // keys.expert_width,
        "moe_intermediate_size": keys.expert_width,
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "router_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


STEMS = GGUF_DECODER | {
    "exp_probs_b": IN_MEMORY.router_bias,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

FAMILY = Family(("hy_v3",), config, (NAMES, IN_MEMORY), Gguf("hy_v3", gguf_config, STEMS))
