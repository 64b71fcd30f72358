"""Hy3: norms on q and k heads, sigmoid router with a selection bias, first layers dense."""

from __future__ import annotations

from tandem.architectures.family import Family
from tandem.architectures.names import Names
from tandem.architectures.shared import gqa, layers_after_dense, model, moe, sigmoid_router
from tandem.config.json_keys import JsonKeys
from tandem.config.model_config import ModelConfig

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


FAMILY = Family(("hy_v3",), config, (NAMES, IN_MEMORY))
