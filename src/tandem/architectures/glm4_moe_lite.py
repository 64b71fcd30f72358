"""GLM-4.7-Flash: GLM-4.5's experts behind DeepSeek's latent attention."""

from __future__ import annotations

from tandem.architectures.deepseek import NAMES, latent
from tandem.architectures.family import Family
from tandem.architectures.shared import layers_after_dense, model, moe, sigmoid_router, with_drafts
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("topk_method", "noaux_tc", "GLM's")
    keys.only("rope_interleave", True, "rotary channels are pairs of neighbours")
    keys.only("partial_rotary_factor", 1.0, "qk_rope_head_dim says which channels turn")
    width = keys.size("moe_intermediate_size", 1536)
    experts = moe(sigmoid_router(keys, scale=1.8), width, width * keys.count("n_shared_experts", 1))
    attention = latent(keys)
    base = model(keys, generation, lambda _: attention, experts, layers_after_dense(keys, 1))
    return with_drafts(keys, base)


FAMILY = Family(("glm4_moe_lite",), config, (NAMES,))
"""GGUF files of it say `deepseek2`."""
