"""Qwen3-MoE, and the text of Qwen3-VL and Qwen3-Omni: norms on q and k heads, softmax router, no shared expert."""

from __future__ import annotations

from typing import Any

from tandem.architectures.family import Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER
from tandem.architectures.qwen2_moe import gguf_experts
from tandem.architectures.shared import gqa, model, moe, softmax_router, sparse_step_layers, text_part
from tandem.architectures.vision import with_tower
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    bias = keys.optional("attention_bias", False)
    slides, window = keys.optional("use_sliding_window", False), keys.optional("sliding_window", 0)
    attention = gqa(keys, qkv_bias=bias, out_bias=bias, qk_norm="head", window=window if slides else 0)
    router = softmax_router(keys, "num_experts", keys.optional("norm_topk_prob", False), "num_local_experts")
    experts = moe(router, keys.size("moe_intermediate_size", 768))
    return model(keys, generation, lambda _: attention, experts, sparse_step_layers(keys))


def vision(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    """A token of text has one position in all three directions, so it turns as in Qwen3. Scores are normalised."""
    text = text_part(keys)
    text.only("norm_topk_prob", True, "scores are normalised")
    base = config(text.overlaid({"norm_topk_prob": True}), generation)
    return with_tower(keys, text, base, (24, 20, 20), deep=(8, 16, 24))


def omni(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    """Model configuration of the thinker; the talker is not read."""
    thinker = text_part(keys, "thinker_config")
    text = text_part(thinker)
    return with_tower(thinker, text, config(text, generation), (24, 20, 20), deep=(8, 16, 24))


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "attention_bias": keys.has_bias,
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "moe_intermediate_size": keys.expert_width,
    } | gguf_experts(keys)


FAMILIES = (
    Family(("qwen3_moe",), config, gguf=Gguf("qwen3moe", gguf_config, GGUF_DECODER)),
    Family(("qwen3_vl_moe",), vision, gguf=Gguf("qwen3vlmoe", gguf_config, GGUF_DECODER)),
    Family(("qwen3_omni_moe", "qwen3_omni_moe_thinker"), omni),
)
