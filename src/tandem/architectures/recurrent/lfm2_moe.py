"""LFM2: short gated convolutions in most layers, attention in the others; sigmoid router with a selection bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.family import SIGMOID, Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, ExpertNames, Names, Renames
from tandem.architectures.shared import FULL, gqa, layer_count, layer_kinds, model, moe, sigmoid_router
from tandem.errors import ConfigError
from tandem.mechanisms.short_conv.shape import ShortConv
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import Mixer
from tandem.spec.model_config import ModelConfig

CONV = "conv"
NAMES = Names(
    norms=("operator_norm", "ffn_norm"), recurrent="conv", dense="feed_forward", router="feed_forward.gate",
    router_bias="feed_forward.expert_bias",
    experts=ExpertNames(
        "feed_forward.experts.{expert}.{matrix}", ("w1", "w3", "w2"), "feed_forward.experts.gate_up_proj",
        "feed_forward.experts.down_proj",
    ),
)  # fmt: skip
RENAMES = Renames(
    {
        "model.embedding_norm.": "model.norm.", ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".self_attn.q_layernorm.": ".self_attn.q_norm.", ".self_attn.k_layernorm.": ".self_attn.k_norm.",
        ".feed_forward.w1.": ".feed_forward.gate_proj.", ".feed_forward.w2.": ".feed_forward.down_proj.",
        ".feed_forward.w3.": ".feed_forward.up_proj.",
    },
    signs=(".operator_norm.",),
)  # fmt: skip


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    overlay = {
        "rms_norm_eps": keys.optional("norm_eps", 1e-5),
        "tie_word_embeddings": keys.optional("tie_embedding", keys.optional("tie_word_embeddings", True)),
    }
    if keys.get("rope_parameters") is None:
        overlay["rope_theta"] = keys.optional("rope_theta", 1e6)
    keys = keys.overlaid(overlay)
    mixers, first = _mixers(keys), keys.count("num_dense_layers", 2)
    router = replace(
        sigmoid_router(keys, "num_experts"), epsilon=1e-6, float32_logits=False,
        has_bias=keys.optional("use_expert_bias", True),
    )  # fmt: skip
    experts = moe(router, keys.size("moe_intermediate_size", 1792))
    return model(keys, generation, mixers.__getitem__, experts, range(first, layer_count(keys)))


def _mixers(keys: JsonKeys) -> list[Mixer]:
    kinds = layer_kinds(keys, lambda i: FULL)
    if unknown := sorted(set(kinds) - {CONV, FULL}):
        raise ConfigError(f"{keys.where}: layer type {unknown[0]!r} is not supported; {CONV} and {FULL} are")
    if FULL not in kinds:
        raise ConfigError(f"{keys.where}: layer_types has no {FULL}")
    taps = keys.size("conv_L_cache", 3)
    if not 2 <= taps <= 8:
        raise ConfigError(f"{keys.where}: conv_L_cache is {taps}, and must be 2 to 8; try 3")
    attention = gqa(keys, qk_norm="head")
    conv = ShortConv(keys.size("hidden_size", 2048), taps, keys.optional("conv_bias", False))
    return [attention if kind == FULL else conv for kind in kinds]


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """Layers without key heads are convolutions."""
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    count, dense = keys.depth, keys.optional("leading_dense_block_count", 0)
    heads = keys.layers("attention.head_count_kv", count)
    return {
        "model_type": "lfm2_moe",
        "layer_types": [FULL if each else CONV for each in heads],
        "num_key_value_heads": max(heads),
        "conv_L_cache": keys.need("shortconv.l_cache"),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-5),
        "num_dense_layers": dense,
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.expert_width,
        "use_expert_bias": keys.has_tensor(f"blk.{dense}.exp_probs_b.bias"),
    }


STEMS = GGUF_DECODER | {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": NAMES.router,
    "exp_probs_b": NAMES.router_bias,
    "ffn_gate_exps": "feed_forward.experts.{expert}.w1",
    "ffn_up_exps": "feed_forward.experts.{expert}.w3",
    "ffn_down_exps": "feed_forward.experts.{expert}.w2",
}

FAMILY = Family(("lfm2_moe",), config, (NAMES,), Gguf("lfm2moe", gguf_config, STEMS), renames=RENAMES)
