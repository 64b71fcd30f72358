"""Laguna: layers of two kinds, with heads and rotations of their own; a gate on each head's result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tandem.architectures.family import Family
from tandem.architectures.names import Names
from tandem.architectures.shared import (
    FULL,
    WINDOW,
    gqa,
    layer_count,
    layer_kinds,
    layers_after_dense,
    model,
    moe,
    softmax_router,
)
from tandem.config.json_keys import JsonKeys
from tandem.config.layers import Gqa
from tandem.config.model_config import ModelConfig
from tandem.errors import ConfigError

NAMES = Names(router_bias="mlp.experts.e_score_correction_bias", shared="mlp.shared_expert")
IN_MEMORY = Names(shared="mlp.shared_experts")
"""As Transformers 5 holds it."""

ROPE: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    WINDOW: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
"""Where config.json says nothing."""


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("moe_apply_router_weight_on_input", False, "experts' results are weighed")
    keys.only("moe_router_logit_softcapping", 0.0, "the router's logits are not capped")
    if keys.get("gating") not in (None, True, "per-head"):
        raise ConfigError(f"{keys.where}: gating = {keys['gating']!r} is not supported; 'per-head' is")
    kinds = layer_kinds(keys, lambda i: FULL)
    heads = keys.integers("num_attention_heads_per_layer") or (keys.size("num_attention_heads", 48),) * len(kinds)
    if len(heads) != len(kinds):
        raise ConfigError(
            f"{keys.where}: num_attention_heads_per_layer must be a list of {layer_count(keys)}; or remove it"
        )
    mixers = [_attention(keys, kind, count) for kind, count in zip(kinds, heads, strict=True)]
    router = softmax_router(keys, "num_experts", True, "num_local_experts")
    scale = keys.optional("moe_routed_scaling_factor", 1.0)
    width, shared = keys.size("moe_intermediate_size", 512), keys.count("shared_expert_intermediate_size", 512)
    experts = moe(replace(router, score="sigmoid", has_bias=True, scale=scale), width, shared)
    return model(keys, generation, mixers.__getitem__, experts, layers_after_dense(keys, 1))


def _attention(keys: JsonKeys, kind: str, heads: int) -> Gqa:
    if kind not in ROPE:
        raise ConfigError(f"{keys.where}: layer type {kind!r} is not supported; {WINDOW} and {FULL} are")
    bias, window = keys.optional("attention_bias", False), keys.optional("sliding_window", 512)
    turning = keys.mapping("rope_parameters") or ROPE
    own = turning.get(kind, turning)
    if not isinstance(own, Mapping):
        raise ConfigError(f"{keys.where}: rope_parameters.{kind} is {own!r}, not an object")
    of_kind = keys.overlaid(
        {"partial_rotary_factor": 1.0, "rope_parameters": dict(own), "num_attention_heads": heads}
    )  # each kind says for itself what turns
    attention = gqa(of_kind, qkv_bias=bias, out_bias=bias, qk_norm="head", rotary_share=1.0)
    return replace(attention, window=window if kind == WINDOW else 0, head_gate="softplus")


FAMILY = Family(("laguna",), config, (NAMES, IN_MEMORY))
