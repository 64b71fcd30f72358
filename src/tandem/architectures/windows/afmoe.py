"""Trinity: a gate on each channel of attention, norms on both sides of every block, layers that see all and do not turn
between layers with a window that do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.family import SIGMOID, Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, Names
from tandem.architectures.shared import (
    FULL,
    WINDOW,
    activation,
    assembled,
    epsilon,
    gqa,
    layer_kinds,
    moe,
    sigmoid_router,
    turning_in_windows,
)
from tandem.errors import ConfigError
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Moe
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import Block, Layer
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm

EVERY = 4  # layers: the last of them sees all
NAMES = Names(
    norms=("input_layernorm", "pre_mlp_layernorm"), post_norms=("post_attention_layernorm", "post_mlp_layernorm"),
    own_gate="self_attn.gate_proj", router="mlp.router.gate", router_bias="mlp.expert_bias",
    shared="mlp.shared_experts",
)  # fmt: skip


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("score_func", "sigmoid", "the router's scores are sigmoids")
    keys.only("route_norm", True, "weights of chosen experts are divided by their sum")
    for key in ("num_expert_groups", "num_limited_groups", "n_group", "topk_group"):
        keys.only(key, 1, "experts are one group")
    every = max(1, keys.optional("global_attn_every_n_layers", EVERY))
    kinds = layer_kinds(keys, lambda i: WINDOW if (i + 1) % every else FULL)
    norm, experts = Norm(epsilon(keys), wide=True), _experts(keys)
    dense, first = Dense(keys.size("intermediate_size", 6144), activation(keys)), keys.count("num_dense_layers", 1)
    attentions = turning_in_windows(keys, _attention(keys, norm), kinds, 1024)
    layers = tuple(_layer(each, dense if i < first else experts, norm) for i, each in enumerate(attentions))
    if first >= len(layers):
        raise ConfigError(f"{keys.where}: num_dense_layers {first}: no layer is MoE; this is a dense model")
    scale = keys.size("hidden_size", 2048) ** 0.5 if keys.optional("mup_enabled", False) else 1.0
    return replace(assembled(keys, generation, layers, norm), embedding_scale=scale)


def _experts(keys: JsonKeys) -> Moe:
    scale = keys.optional("route_scale", 1.0)
    router = sigmoid_router(keys.overlaid({"routed_scaling_factor": scale}), "num_experts")
    width = keys.size("moe_intermediate_size", 1408)
    experts = moe(replace(router, float32_logits=False), width, width * keys.count("num_shared_experts", 2))
    return experts.activated_by(activation(keys))


def _attention(keys: JsonKeys, norm: Norm) -> Gqa:
    bias = keys.optional("attention_bias", False)
    attention = gqa(keys, qkv_bias=bias, out_bias=bias, qk_norm="head")
    return replace(attention, norm=norm, own_gate="sigmoid", gates_each="channel")


def _layer(attention: Gqa, body: Dense | Moe, norm: Norm) -> Layer:
    return Layer((Block(attention, norm, post=norm), Block(body, norm, post=norm)))


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """Files do not say that embedded tokens are scaled, which they are in every model; few, which layers see all."""
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    return {
        "model_type": "afmoe",
        "mup_enabled": True,
        "global_attn_every_n_layers": keys.optional("attention.sliding_window_pattern", EVERY),
        "sliding_window": keys.need("attention.sliding_window"),
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "num_shared_experts": keys.optional("expert_shared_count", 0),
        "moe_intermediate_size": keys.expert_width,
        "num_dense_layers": keys.optional("leading_dense_block_count", 0),
        "route_norm": keys.flag("expert_weights_norm", True),
        "route_scale": keys.number("expert_weights_scale", 1.0),
    }


STEMS = GGUF_DECODER | {
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

FAMILY = Family(("afmoe",), config, (NAMES,), Gguf("afmoe", gguf_config, STEMS))
