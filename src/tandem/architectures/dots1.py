"""dots.llm1: norms on q and k heads, sigmoid router with a selection bias, first layers dense."""

from __future__ import annotations

from tandem.architectures.family import Family
from tandem.architectures.names import Names
from tandem.architectures.shared import (
    gqa,
    layers_after_dense,
    model,
    moe,
    sigmoid_router,
    windowed,
)
from tandem.config.json_keys import JsonKeys
from tandem.config.model_config import ModelConfig


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


FAMILY = Family(("dots1",), config, (Names(shared="mlp.shared_experts"),))
