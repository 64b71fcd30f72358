"""Ling 1 and 1.5: softmax router, ungated shared experts, q, k and v in one matrix; a head with columns of length 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.family import Family, Gguf, GgufKeys
from tandem.architectures.glm4_moe import LING_RENAMES
from tandem.architectures.names import GGUF_DECODER, Names
from tandem.architectures.shared import gqa, layer_count, model, moe, softmax_router
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

NAMES = Names(shared="mlp.shared_experts")
UNUSED = ("embedding_dropout", "output_dropout", "router_dtype")


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    for key in ("use_bias", "norm_softmax", "use_qk_norm"):
        keys.only(key, False, "as in every Ling 1")
    for key in UNUSED:
        keys.get(key)
    attention = gqa(keys, qkv_bias=keys.optional("use_qkv_bias", False))
    width, first = keys.size("moe_intermediate_size", 1408), keys.optional("first_k_dense_replace", 0)
    router = softmax_router(keys, "num_experts", keys.optional("norm_topk_prob", True))
    experts = moe(router, width, width * keys.count("num_shared_experts", 2))
    unit_head = keys.optional("norm_head", False)
    base = model(keys, generation, lambda _: attention, experts, range(first, layer_count(keys)))
    return replace(base, unit_head=unit_head)


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """A head in such a file has its columns' length already."""
    return {
        "model_type": "bailing_moe",
        "use_qkv_bias": keys.has_bias,
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "num_shared_experts": keys.optional("expert_shared_count", 0),
        "moe_intermediate_size": keys.expert_width,
        "first_k_dense_replace": keys.optional("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


STEMS = GGUF_DECODER | {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

FAMILY = Family(
    ("bailing_moe",), config, (NAMES,), Gguf("bailingmoe", gguf_config, STEMS, pairs=True), renames=LING_RENAMES
)
