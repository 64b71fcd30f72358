"""Laguna: layers of two kinds, with heads and rotations of their own; a gate on each head's result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from tandem.architectures.family import SIGMOID, Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, Names
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
from tandem.errors import ConfigError
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

NAMES = Names(router_bias="mlp.experts.e_score_correction_bias", shared="mlp.shared_expert")
IN_MEMORY = Names(shared="mlp.shared_experts")
"""As Transformers 5 holds it."""

GATES: dict[Any, Literal["head", "channel"]] = {"per-head": "head", "per-element": "channel"}
"""Gates of attention, by the words of config.json."""

ROPE: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    WINDOW: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
"""Where config.json says nothing."""


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("moe_apply_router_weight_on_input", False, "experts' results are weighed")
    keys.only("moe_router_logit_softcapping", 0.0, "the router's logits are not capped")
    if keys.get("gating") not in (None, True, *GATES):
        raise ConfigError(f"{keys.where}: gating = {keys['gating']!r} is not supported; {' and '.join(GATES)} are")
    keys.get("gating_types")  # the same for each layer
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
    span, each = window if kind == WINDOW else 0, GATES.get(keys.get("gating"), "head")
    return replace(attention, window=span, own_gate="softplus", gates_each=each)


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """Where no key says which layers see all, the first of every four does."""
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    count, window = keys.depth, keys.optional("attention.sliding_window", 0)
    heads = keys.layers("attention.head_count", count)
    each_gate = keys.rows("attn_gate.weight") == heads[0]
    return {
        "model_type": "laguna",
        "gating": "per-head" if each_gate else "per-element",
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "layer_types": _gguf_kinds(keys, count) if window else [FULL] * count,
        "sliding_window": window or 512,
        "rope_parameters": _gguf_ropes(keys),
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.expert_width,
        "shared_expert_intermediate_size": keys.rows("ffn_gate_shexp.weight"),
        "first_k_dense_replace": keys.optional("leading_dense_block_count", 0),
        "moe_routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def _gguf_kinds(keys: GgufKeys, count: int) -> list[str]:
    pattern = keys.numbers("attention.sliding_window_pattern") or [4]
    every = int(pattern[0])
    windowed = [bool(i % every) for i in range(count)] if len(pattern) == 1 else list(map(bool, pattern))
    if len(windowed) < count:
        raise keys.refuse("attention.sliding_window_pattern", f"has {len(windowed)} values for {count} layers")
    return [WINDOW if each else FULL for each in windowed[:count]]


def _gguf_ropes(keys: GgufKeys) -> dict[str, Any]:
    head, full = keys.size("attention.key_length"), keys.rope()
    dims = keys.optional("rope.dimension_count", head)
    scaling = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    for name, key in scaling.items() if full["rope_type"] == "yarn" else ():
        if keys.has(f"rope.scaling.yarn_{key}"):
            full[name] = keys.number(f"rope.scaling.yarn_{key}", 0.0)
    near = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", full["rope_theta"])}
    share = keys.optional("rope.dimension_count_swa", dims) / head
    return {FULL: full | {"partial_rotary_factor": dims / head}, WINDOW: near | {"partial_rotary_factor": share}}


STEMS = GGUF_DECODER | {
    "attn_gate": "self_attn.g_proj",
    "exp_probs_b": NAMES.router_bias,
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

FAMILY = Family(("laguna",), config, (NAMES, IN_MEMORY), Gguf("laguna", gguf_config, STEMS))
