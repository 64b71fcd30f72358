"""MiniMax-M2: norms over all heads of q and k at once, partial rotation, sigmoid router with a selection bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.family import SIGMOID, Family, Gguf, GgufKeys
from tandem.architectures.mixtral import NAMES as MIXTRAL
from tandem.architectures.mixtral import STEMS as MIXTRAL_STEMS
from tandem.architectures.names import Names
from tandem.architectures.shared import gqa, layer_count, model, moe, softmax_router
from tandem.errors import ConfigError
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

NAMES = replace(MIXTRAL, router_bias="block_sparse_moe.e_score_correction_bias")
IN_MEMORY = Names(router_bias="mlp.e_score_correction_bias")
"""As Transformers 5 holds it."""


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("scoring_func", "sigmoid", "MiniMax-M2's")
    keys.only("use_routing_bias", True, "experts are chosen with a bias")
    keys.only("use_qk_norm", True, "q and k are normed")
    keys.only("qk_norm_type", "per_layer", "over all heads at once")
    keys.only("shared_intermediate_size", 0, "there is no shared expert")
    if set(keys.integers("attn_type_list")) - {1}:
        raise ConfigError(f"{keys.where}: attn_type_list has layers that are not 1, full attention")
    head = keys.size("head_dim", 128)
    attention = gqa(keys, qk_norm="width", rotary_share=keys.optional("rotary_dim", head) / head)
    router = softmax_router(keys, "num_local_experts", True, "num_experts")
    router = replace(router, score="sigmoid", has_bias=True, float32_logits=True)
    experts = moe(router, keys.size("intermediate_size", 1536))
    return model(keys, generation, lambda _: attention, experts, range(layer_count(keys)))


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    return {
        "model_type": "minimax_m2",
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "intermediate_size": keys.expert_width,
        "rotary_dim": keys.optional("rope.dimension_count", keys.need("attention.key_length")),
    }


STEMS = MIXTRAL_STEMS | {"exp_probs_b": NAMES.router_bias}

FAMILY = Family(("minimax_m2",), config, (NAMES, IN_MEMORY), Gguf("minimax-m2", gguf_config, STEMS))
