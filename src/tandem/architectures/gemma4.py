"""Gemma 4, text: norms before and behind every block, a dense feed-forward beside experts, values made of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tandem.architectures.family import Family
from tandem.architectures.gguf.gemma4 import GEMMA4
from tandem.architectures.names import ExpertNames, Names
from tandem.architectures.shared import (
    FULL,
    WINDOW,
    activation,
    assembled,
    epsilon,
    gqa,
    layer_kinds,
    moe,
    softmax_router,
    text_part,
)
from tandem.errors import ConfigError
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Moe, ParallelDense
from tandem.mechanisms.grouped_query.shape import Gqa, Values
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import Block, Layer
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm

NAMES = Names(
    norms=("input_layernorm", "pre_feedforward_layernorm"), router="router.proj",
    experts=ExpertNames("experts.{expert}.{matrix}", gate_up="experts.gate_up_proj", down="experts.down_proj"),
)  # fmt: skip
ROPE: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
}
"""Where config.json says nothing."""

UNUSED = ("vocab_size_per_layer_input", "use_double_wide_mlp")  # of parts that are refused


def nested(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    """The text of a model that reads images and sound, too."""
    return config(text_part(keys), generation)


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys = keys.overlaid({"hidden_act": keys.optional("hidden_activation", "gelu_pytorch_tanh")})
    _refuse_others(keys)
    norm = Norm(epsilon(keys), wide=True)
    kinds = layer_kinds(keys, lambda i: WINDOW if (i + 1) % 6 else FULL)
    kinds[-1] = FULL  # as Transformers has it
    body = _feed_forward(keys, norm)
    layers = tuple(_layer(_attention(keys, kind, i), body, norm) for i, kind in enumerate(kinds))
    cap, tied = keys.optional("final_logit_softcapping", 0.0), keys.optional("tie_word_embeddings", True)
    base = assembled(keys, generation, layers, norm)
    base = replace(base, embedding_scale=base.hidden**0.5, embedding_scale_rounded=True)
    return replace(base, tied_embeddings=tied, logit_cap=cap)


def _refuse_others(keys: JsonKeys) -> None:
    if keys.count("hidden_size_per_layer_input", 256):
        raise ConfigError(f"{keys.where}: hidden_size_per_layer_input: embeddings of layers are not supported; 0 is")
    if keys.count("num_kv_shared_layers", 0):
        raise ConfigError(
            f"{keys.where}: num_kv_shared_layers: layers that read another's keys are not supported; 0 is"
        )
    keys.only("use_bidirectional_attention", "vision", "text sees what is before it")
    for key in UNUSED:
        keys.get(key)


def _layer(attention: Gqa, body: Dense | Moe, norm: Norm) -> Layer:
    return Layer((Block(attention, norm, post=norm), Block(body, norm, post=norm)), scaled=True)


def _feed_forward(keys: JsonKeys, norm: Norm) -> Dense | Moe:
    how = activation(keys)
    dense = Dense(keys.size("intermediate_size", 2112), how)
    if not keys.optional("enable_moe_block", False):
        return dense
    keys = keys.overlaid({"num_experts_per_tok": keys.size("top_k_experts", 8)})
    router = replace(softmax_router(keys, "num_experts", True), expert_scale=True)
    experts = moe(router, keys.size("moe_intermediate_size", 704)).activated_by(how)
    return replace(experts, parallel_dense=ParallelDense(dense, norm, keys.size("hidden_size", 2816) ** -0.5))


def _attention(keys: JsonKeys, kind: str, layer: int) -> Gqa:
    """Layers that see everything have heads of their own sizes."""
    if kind not in ROPE:
        raise ConfigError(f"{keys.where}: layer type {kind!r} is not supported; {WINDOW} and {FULL} are")
    full, bias = kind == FULL, keys.optional("attention_bias", False)
    from_keys = full and keys.optional("attention_k_eq_v", False)
    sizes = _sizes(keys, layer, from_keys) if full else {"head_dim": keys.optional("head_dim", 256)}
    own = (keys.mapping("rope_parameters") or ROPE).get(kind)
    if not isinstance(own, Mapping):
        raise ConfigError(f"{keys.where}: rope_parameters.{kind} is {own!r}, not an object")
    # a share that only says which of all pairs turn is no part of a head
    turning = dict(own) if own.get("rope_type") == "proportional" else dict(own) | {"partial_rotary_factor": 1.0}
    attention = gqa(keys.overlaid(sizes | {"rope_parameters": turning}), qkv_bias=bias, out_bias=bias, qk_norm="head")
    return replace(
        attention, norm=Norm(epsilon(keys), wide=True), values=Values(norm=True, from_keys=from_keys), factor=1.0,
        window=0 if full else keys.size("sliding_window", 512),
    )  # fmt: skip


def _sizes(keys: JsonKeys, layer: int, own_heads: bool) -> dict[str, Any]:
    """Attention keys of a layer that sees everything: as Transformers writes them, or as the hub does."""
    hub = {"head_dim": keys.optional("global_head_dim", 512)}
    heads = keys.optional("num_global_key_value_heads", 0)
    if keys.get("per_layer_config") is None:
        return hub | ({"num_key_value_heads": heads} if own_heads and heads else {})
    own = keys.mapping("per_layer_config").get(str(layer), {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"{keys.where}: per_layer_config.{layer} is {own!r}, not an object")
    return {"head_dim": keys.optional("head_dim", 256)} | dict(own)


FAMILIES = (Family(("gemma4",), nested, (NAMES,)), Family(("gemma4_text",), config, (NAMES,), GEMMA4))
