"""Step-3.5-Flash, and the text of Step-3.7-Flash: layers of two kinds with heads and rotations of their own, a gate on
each head's result, norms of 1 + w; clamped activations in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tandem.architectures.family import Family
from tandem.architectures.gguf.step35 import STEP35
from tandem.architectures.limits import clamped, limits, of_layers, up_to
from tandem.architectures.names import Names, Renames
from tandem.architectures.shared import (
    FULL,
    WINDOW,
    assembled,
    epsilon,
    gqa,
    layer_count,
    moe,
    sigmoid_router,
    text_part,
)
from tandem.errors import ConfigError
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Moe
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import pre_norm
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm

NAMES = Names(shared="mlp.shared_experts")

RENAMES = Renames(
    {
        ".moe.gate.": ".mlp.gate.", ".moe.router_bias": ".mlp.gate.e_score_correction_bias",
        ".share_expert.": ".mlp.shared_experts.", ".moe.gate_proj.": ".mlp.experts.gate_proj.",
        ".moe.up_proj.": ".mlp.experts.up_proj.", ".moe.down_proj.": ".mlp.experts.down_proj.",
    },
    signs=(".share_expert.",),
)  # fmt: skip

SAME = {
    "num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k", "share_expert_dim": "share_expert_dims",
    "routed_scaling_factor": "moe_router_scaling_factor",
}  # fmt: skip
"""Transformers' words, and the hub's."""

DESCRIBED = {
    "norm_expert_weight": True, "moe_router_activation": "sigmoid", "use_moe_router_bias": True, "use_moe": True,
    "use_qk_norm": True, "use_head_wise_attn_gate": True, "zero_centered": True, "moe_layer_offset": 0,
    "moe_every_n_layer": 1, "use_mfa": False, "mlp_bias": False, "use_bidirectional_attention": False,
    "attention_bias": False, "hidden_act": "silu", "att_impl_type": "GQA", "sink": False,
}  # fmt: skip
"""Keys of the hub's file with the same value in every model of the family."""

UNUSED = ("need_fp32_gate", "fp32_gate", "max_seq_len", "yarn_only_types", "mtp_layer_types", "mtp_mlp_layer_types",
          "rope_scaling", "query_pre_attn_scalar", "per_layer_config")  # fmt: skip


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys = _as_transformers(text_part(keys))
    keys.only("query_pre_attn_scalar", keys.optional("head_dim", 128), "scores are divided by the root of head_dim")
    norm, count = Norm(epsilon(keys), plus_one=True), layer_count(keys)
    kinds = of_layers(keys, "layer_types", FULL)
    routed, shared = (limits(keys, f"swiglu_limits{of}") for of in ("", "_shared"))
    sparse = _sparse(keys, count)
    experts = _experts(keys, any(routed + shared))
    dense = Dense(keys.size("intermediate_size", 11264))
    layers = tuple(
        pre_norm(
            _attention(keys, kinds[i], i),
            clamped(experts, routed[i], shared[i]) if i in sparse else replace(dense, activation=up_to(shared[i])),
            norm,
        )
        for i in range(count)
    )
    return assembled(keys, generation, layers, norm)


def _as_transformers(keys: JsonKeys) -> JsonKeys:
    """The hub's own keys, in Transformers' words."""
    for key, value in DESCRIBED.items():
        keys.only(key, value, "as in every Step model")
    for key in UNUSED:
        keys.get(key)
    if not all(keys.get("use_rope_layers") or ()):
        raise ConfigError(f"{keys.where}: use_rope_layers: layers that do not turn are not supported")
    overlay: dict[str, Any] = {"rms_norm_eps": keys.optional("rms_norm_eps", 1e-5)}
    overlay |= {ours: keys.get(theirs) for ours, theirs in SAME.items() if keys.get(theirs) is not None}
    other = keys.mapping("attention_other_setting")
    groups = other.get("num_attention_groups", keys.get("num_attention_groups"))
    if groups != keys.get("num_attention_groups"):
        raise ConfigError(f"{keys.where}: attention_other_setting.num_attention_groups {groups!r} is not supported")
    if "num_attention_heads" in other:
        overlay["num_sliding_attention_heads"] = other["num_attention_heads"]
    return keys.overlaid(overlay)


def _sparse(keys: JsonKeys, count: int) -> set[int]:
    """`mlp_layer_types`, or `moe_layers_enum` of the hub; all but the first three where both are absent."""
    named, kinds = keys.get("moe_layers_enum"), of_layers(keys, "mlp_layer_types", "")
    if any(kinds):
        return {i for i, kind in enumerate(kinds) if kind == "sparse"}
    if named is None:
        return set(range(3, count))
    each = named.split(",") if isinstance(named, str) else named
    if not isinstance(each, list) or not all(str(one).strip().isdecimal() for one in each):
        raise ConfigError(f"{keys.where}: moe_layers_enum is {named!r}, not numbers of layers; try '3,4'")
    return {int(one) for one in each if int(one) < count}


def _experts(keys: JsonKeys, clamped: bool) -> Moe:
    """Scores are divided by their sum alone."""
    router = replace(sigmoid_router(keys), epsilon=0.0, float32_logits=False)
    experts = moe(router, keys.size("moe_intermediate_size", 1280), keys.count("share_expert_dim", 1280))
    return replace(experts, separate_shared=clamped)


def _attention(keys: JsonKeys, kind: str, layer: int) -> Gqa:
    if kind not in (FULL, WINDOW):
        raise ConfigError(f"{keys.where}: layer type {kind!r} is not supported; {WINDOW} and {FULL} are")
    windowed, heads = kind == WINDOW, keys.size("num_attention_heads", 64)
    if windowed:
        heads = keys.optional("num_sliding_attention_heads", heads)
    own = keys.overlaid({"num_attention_heads": heads, "rope_parameters": _rope(keys, kind, layer)})
    attention = gqa(own, qk_norm="head", rotary_share=1.0, plus_one=True)
    return replace(
        attention, window=keys.size("sliding_window", 512) if windowed else 0, own_gate="sigmoid"
    )


def _rope(keys: JsonKeys, kind: str, layer: int) -> dict[str, Any]:
    """`rope_parameters` of a kind; else what the hub's keys say of a layer."""
    own = keys.mapping("rope_parameters").get(kind)
    if isinstance(own, Mapping):
        return {"partial_rotary_factor": 1.0} | dict(own)
    theta = keys.get("rope_theta", 10000.0)
    every = of_layers(keys, "rope_theta", theta) if isinstance(theta, list) else [theta] * layer_count(keys)
    share = of_layers(keys, "partial_rotary_factors", 1.0)[layer]
    scaling = keys.mapping("rope_scaling") if kind == FULL else {}
    return {"rope_type": "default"} | scaling | {"rope_theta": every[layer], "partial_rotary_factor": share}


FAMILY = Family(("step3p5", "step3p7"), config, (NAMES,), STEP35, renames=RENAMES)
