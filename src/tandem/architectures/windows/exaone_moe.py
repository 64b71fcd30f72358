"""K-EXAONE: norms on q and k heads; layers that see all do not turn, those with a window do; DeepSeek-V3's router."""

from __future__ import annotations

from typing import Any

from tandem.architectures.family import SIGMOID, Family, Gguf, GgufKeys
from tandem.architectures.glm4_moe import STEMS as GLM_STEMS
from tandem.architectures.names import Names
from tandem.architectures.shared import (
    FULL,
    WINDOW,
    gqa,
    layer_count,
    layer_kinds,
    layers_after_dense,
    model,
    moe,
    sigmoid_router,
    turning_in_windows,
)
from tandem.errors import ConfigError
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

NAMES = Names(router_bias="mlp.e_score_correction_bias", shared="mlp.shared_experts")
IN_MEMORY = Names(shared="mlp.shared_experts")
"""As Transformers 5 holds it."""


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("scoring_func", "sigmoid", "the router's scores are sigmoids")
    keys.only("topk_method", "noaux_tc", "experts are chosen with a bias")
    kinds = layer_kinds(keys, _pattern(keys).__getitem__)
    mixers = turning_in_windows(keys, gqa(keys, qk_norm="head"), kinds, 4096, without=True)
    width = keys.size("moe_intermediate_size", 1024)
    router = sigmoid_router(keys, "num_experts", scale=2.5)
    experts = moe(router, width, width * keys.count("num_shared_experts", 1))
    return model(keys, generation, mixers.__getitem__, experts, layers_after_dense(keys, 1))


def _pattern(keys: JsonKeys) -> list[str]:
    """`sliding_window_pattern`: every so many layers one that sees all, or "LLLG", again and again."""
    pattern, count = keys.get("sliding_window_pattern"), layer_count(keys)
    if pattern is None:
        pattern = 4
    if isinstance(pattern, int) and pattern > 0:
        return [FULL if (i + 1) % pattern == 0 else WINDOW for i in range(count)]
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("LG"):
        raise ConfigError(f"{keys.where}: sliding_window_pattern {pattern!r} is not supported; try 4, or 'LLLG'")
    return [WINDOW if pattern[i % len(pattern)] == "L" else FULL for i in range(count)]


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    count = keys.depth
    windowed = keys.layers("attention.sliding_window_pattern", count)
    return {
        "model_type": "exaone_moe",
        "layer_types": [WINDOW if each else FULL for each in windowed],
        "sliding_window": keys.need("attention.sliding_window"),
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "num_shared_experts": keys.optional("expert_shared_count", 1),
        "moe_intermediate_size": keys.expert_width,
        "first_k_dense_replace": keys.optional("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.optional("expert_group_count", 1),
        "topk_group": keys.optional("expert_group_used_count", 1),
    }


STEMS = GLM_STEMS | {"ffn_norm": "post_attention_layernorm"}

FAMILY = Family(("exaone_moe",), config, (NAMES, IN_MEMORY), Gguf("exaone-moe", gguf_config, STEMS))
