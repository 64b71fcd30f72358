"""gpt-oss: every second layer sees a window, sinks in every softmax, biases everywhere, experts in MXFP4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.family import Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, ExpertNames, Names
from tandem.architectures.shared import assembled, epsilon, gqa, layer_kinds, moe
from tandem.errors import ConfigError
from tandem.mechanisms.experts.shape import Experts, Moe
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.router.shape import Router
from tandem.spec.activation import Activation
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import pre_norm
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm

KINDS = ("sliding_attention", "full_attention")
ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Where config.json says nothing."""

TRAINING = ("experts_per_token", "initial_context_length")
"""The same as other keys that are read."""


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("hidden_act", "silu", "its experts have a SwiGLU of their own")
    for key in TRAINING:
        keys.get(key)
    if not (keys.mapping("rope_parameters") or keys.mapping("rope_scaling")):
        keys = keys.overlaid({"rope_parameters": ROPE})
    norm, experts = Norm(epsilon(keys), wide=True), experts_of(keys)
    kinds = layer_kinds(keys, lambda i: KINDS[i % 2])
    layers = tuple(pre_norm(attention(keys, kind), experts, norm) for kind in kinds)
    return assembled(keys, generation, layers, norm)


def attention(keys: JsonKeys, kind: str) -> Gqa:
    if kind not in KINDS:
        raise ConfigError(f"{keys.where}: layer type {kind!r} is not supported; {' and '.join(KINDS)} are")
    bias, window = keys.optional("attention_bias", True), keys.size("sliding_window", 128)
    span = window if kind == KINDS[0] else 0
    return replace(gqa(keys, qkv_bias=bias, out_bias=bias, window=span), sinks=True)


def experts_of(keys: JsonKeys) -> Moe:
    """The softmax over the chosen experts' logits is that over all of them, divided by its sum there."""
    router = Router(
        keys.size("num_local_experts", 128, "num_experts"), keys.size("num_experts_per_tok", 4), logits_bias=True
    )
    width = keys.size("intermediate_size", 2880)
    swiglu = Activation("swiglu_oai", keys.optional("swiglu_alpha", 1.702), keys.optional("swiglu_limit", 7.0))
    shape = Experts(router.num_experts, width, swiglu, biases=True, copied=True)
    return replace(moe(router, width), experts=shape)


NAMES = Names(router="mlp.router", experts=ExpertNames(interleaved=True, transposed=True))


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "intermediate_size": keys.expert_width,
        "sliding_window": keys.optional("attention.sliding_window", 128),
        "attention_bias": keys.has_bias,
        "rope_parameters": keys.rope() | {"truncate": False},
    }


STEMS = GGUF_DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}

FAMILY = Family(("gpt_oss",), config, (NAMES,), Gguf("gpt-oss", gguf_config, STEMS))
