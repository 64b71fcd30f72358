"""Llama, the decoder of most families, without experts; Mixtral, with experts in every layer. GGUF files call both
`llama`."""

from __future__ import annotations

from typing import Any

from tandem.architectures.family import Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, ExpertNames, Names
from tandem.architectures.shared import gqa, layer_count, model, moe, softmax_router
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

NAMES = Names(
    router="block_sparse_moe.gate",
    experts=ExpertNames("block_sparse_moe.experts.{expert}.{matrix}", ("w1", "w3", "w2")),
)


def llama(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    bias = keys.optional("attention_bias", False)
    keys.only("mlp_bias", False, "feed-forward matrices have no bias")
    attention = gqa(keys, qkv_bias=bias, out_bias=bias)
    return model(keys, generation, lambda _: attention)


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    attention = gqa(keys, window=keys.optional("sliding_window", 0))
    router = softmax_router(keys, "num_local_experts", True, "num_experts")
    experts = moe(router, keys.size("intermediate_size", 14336))
    return model(keys, generation, lambda _: attention, experts, range(layer_count(keys)))


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    if not keys.optional("expert_count", 0):
        return {"model_type": "llama", "attention_bias": keys.has_bias}
    chosen = {
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
    }
    return {"model_type": "mixtral"} | chosen


STEMS = GGUF_DECODER | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
IN_MEMORY = Names()  # as Transformers 5 holds it

FAMILIES = (
    Family(("llama",), llama),
    Family(("mixtral",), config, (NAMES, IN_MEMORY), Gguf("llama", gguf_config, STEMS, pairs=True)),
)
