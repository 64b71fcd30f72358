"""OLMoE: norms over all heads at once, clipped q, k and v."""

from __future__ import annotations

from typing import Any

from tandem.architectures.family import Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER
from tandem.architectures.shared import gqa, layer_count, model, moe, softmax_router
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    bias = keys.optional("attention_bias", False)
    clip = keys.optional("clip_qkv", 0.0)
    attention = gqa(keys, qkv_bias=bias, out_bias=bias, qk_norm="width", clip=clip)
    router = softmax_router(keys, "num_experts", keys.optional("norm_topk_prob", False), "num_local_experts")
    experts = moe(router, keys.size("intermediate_size", 1024))
    return model(keys, generation, lambda _: attention, experts, range(layer_count(keys)))


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    return {
        "model_type": "olmoe",
        "attention_bias": keys.has_bias,
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "intermediate_size": keys.expert_width,
        "clip_qkv": keys.number("attention.clamp_kqv", 0.0),
    }


FAMILY = Family(("olmoe",), config, gguf=Gguf("olmoe", gguf_config, GGUF_DECODER))
