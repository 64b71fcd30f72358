"""Mistral-Small-4: latent attention whose queries grow with their position, softmax router over groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures import deepseek
from tandem.architectures.deepseek import NAMES, latent
from tandem.architectures.family import Family, Gguf, GgufKeys
from tandem.architectures.shared import layers_after_dense, model, moe, sigmoid_router, text_part
from tandem.errors import ConfigError
from tandem.mechanisms.latent.shape import Latent, QueryScale
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig
from tandem.spec.rope import rope_keys

BETA = 0.1  # of what queries grow with
ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": BETA,
}  # fmt: skip
"""Where config.json says nothing."""


def mistral4(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("rope_interleave", True, "rotary channels are pairs of neighbours")
    if not (keys.mapping("rope_parameters") or keys.mapping("rope_scaling")):
        keys = keys.overlaid({"rope_parameters": ROPE})
    router = replace(sigmoid_router(keys), score="softmax", has_bias=False, float32_logits=False)
    width = keys.size("moe_intermediate_size", 2048)
    experts = moe(router, width, width * keys.count("n_shared_experts", 1))
    attention = _attention(keys)
    return model(keys, generation, lambda _: attention, experts, layers_after_dense(keys, 0))


def mistral3(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    """The same beside a vision tower: the keys lie in `text_config`."""
    kind = keys.mapping("text_config").get("model_type")
    if kind != "mistral4":
        raise ConfigError(f"{keys.where}: text_config.model_type {kind!r} is not supported; mistral4 is")
    return mistral4(text_part(keys), generation)


def _attention(keys: JsonKeys) -> Latent:
    turning = rope_keys(keys)
    turning.get("partial_rotary_factor")  # qk_rope_head_dim says which channels turn
    beta = turning.optional("llama_4_scaling_beta", 0.0)
    if not beta:
        return latent(keys)
    every = turning.size("original_max_position_embeddings", 8192)
    return replace(latent(keys), query_scale=QueryScale(beta, every))


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """Files that do not say how queries grow mean the family's."""
    return deepseek.gguf_mistral(keys, BETA)


MISTRAL4 = Gguf("mistral4", gguf_config, deepseek.GGUF_STEMS)

FAMILIES = (Family(("mistral4",), mistral4, (NAMES,), MISTRAL4), Family(("mistral3",), mistral3, (NAMES,)))
