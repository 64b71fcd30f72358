"""dots.llm1: norms on q and k heads, sigmoid router with a selection bias, first layers dense."""

from __future__ import annotations

from typing import Any

from tandem.architectures import glm4_moe
from tandem.architectures.family import Family, Gguf, GgufKeys
from tandem.architectures.names import Names
from tandem.architectures.shared import (
    gqa,
    layers_after_dense,
    model,
    moe,
    sigmoid_router,
    windowed,
)
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("scoring_func", "sigmoid", "dots.llm1's")
    keys.only("topk_method", "noaux_tc", "dots.llm1's")
    bias = keys.optional("attention_bias", False)
    most = keys.optional("max_window_layers", 62)
    mixers = windowed(
        keys, gqa(keys, qkv_bias=bias, out_bias=bias, qk_norm="head"), 4096, lambda i: i >= most
    )
    width = keys.size("moe_intermediate_size", 1408)
    experts = moe(sigmoid_router(keys, normalize=False), width, width * keys.count("n_shared_experts", 0))
    return model(keys, generation, mixers.__getitem__, experts, layers_after_dense(keys, 0))


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """Files have no windows; no model of the family has one."""
    entries = glm4_moe.gguf_config(keys) | {"model_type": "dots1", "sliding_window": 0}
    del entries["use_qk_norm"], entries["partial_rotary_factor"]
    return entries | {"norm_topk_prob": keys.flag("expert_weights_norm", False)}


STEMS = glm4_moe.STEMS | {"ffn_norm": "post_attention_layernorm"}

FAMILY = Family(("dots1",), config, (Names(shared="mlp.shared_experts"),), Gguf("dots1", gguf_config, STEMS))
