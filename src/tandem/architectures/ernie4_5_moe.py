"""ERNIE 4.5: rotary pairs of neighbours, softmax router with a selection bias, ungated shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.family import Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, Names
from tandem.architectures.shared import gqa, layer_count, model, moe
from tandem.errors import ConfigError
from tandem.mechanisms.router.shape import Router
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

NAMES = Names(router_bias="mlp.moe_statics.e_score_correction_bias", shared="mlp.shared_experts")
IN_MEMORY = replace(NAMES, router_bias="mlp.gate.moe_statics.e_score_correction_bias")
"""As Transformers 5 holds it."""


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("use_bias", False, "matrices have no biases")
    keys.only("moe_use_aux_free", True, "experts are chosen with a bias")
    keys.only("moe_gate", "topk", "ERNIE's")
    keys.get("moe_capacity")  # of training
    attention = gqa(keys)
    attention = replace(attention, rope=replace(attention.rope, pairs="neighbours"))
    router = Router(
        keys.size("moe_num_experts", 64, "num_experts"), keys.size("moe_k", 6, "num_experts_per_tok"), has_bias=True,
        least_sum=keys.optional("moe_norm_min", 1e-12), float32_logits=True,
    )  # fmt: skip
    width = keys.size("moe_intermediate_size", 1536)
    experts = moe(router, width, width * keys.count("moe_num_shared_experts", 2))
    tied = {"tie_word_embeddings": keys.optional("tie_word_embeddings", True)}
    return model(keys.overlaid(tied), generation, lambda _: attention, experts, _moe_layers(keys))


def _moe_layers(keys: JsonKeys) -> list[int]:
    count = layer_count(keys)
    first, last = keys.optional("moe_layer_start_index", 1), keys.optional("moe_layer_end_index", -1)
    interval = keys.optional("moe_layer_interval", 1)
    if interval < 1:
        raise ConfigError(f"{keys.where}: moe_layer_interval is {interval}, and must be at least 1")
    last = count - 1 if last == -1 else min(last, count - 1)
    return [i for i in range(max(first, 0), last + 1) if (i + 1) % interval == 0]


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    return {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": keys.need("expert_count"),
        "moe_k": keys.need("expert_used_count"),
        "moe_num_shared_experts": keys.optional("expert_shared_count", 0),
        "moe_intermediate_size": keys.expert_width,
        "moe_layer_start_index": keys.optional("leading_dense_block_count", 0),
        "moe_layer_interval": keys.optional("interleave_moe_layer_step", 1),
    }


STEMS = GGUF_DECODER | {
    "exp_probs_b": NAMES.router_bias,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

FAMILY = Family(("ernie4_5_moe",), config, (NAMES, IN_MEMORY), Gguf("ernie4_5-moe", gguf_config, STEMS))
