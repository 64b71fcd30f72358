"""MiMo-V2-Flash: most layers see a window, with sinks and key heads of their own; values are narrower than keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tandem.architectures.family import Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, Renames
from tandem.architectures.shared import (
    FULL,
    WINDOW,
    gqa,
    layer_count,
    layer_kinds,
    layers_after_dense,
    model,
    moe,
    sigmoid_router,
)
from tandem.errors import ConfigError
from tandem.mechanisms.grouped_query.shape import Gqa, Values
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

SHARE = 0.334  # of a head's channels turn
THETAS = {FULL: 5_000_000.0, WINDOW: 10_000.0}
"""Where config.json says nothing."""

RENAMES = Renames({".self_attn.attention_sink_bias": ".self_attn.sinks"}, signs=(".self_attn.attention_sink_bias",))

DESCRIBED = ("attention_chunk_size", "hybrid_block_size", "attention_projection_layout")
"""Keys of the hub's file that say again what others say."""


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys = _as_transformers(keys)
    mixers = [_attention(keys, kind) for kind in layer_kinds(keys, _kind)]
    router = sigmoid_router(keys)
    experts = moe(router, keys.size("moe_intermediate_size", 2048))
    return model(keys, generation, mixers.__getitem__, experts, layers_after_dense(keys, 1))


def _kind(layer: int) -> str:
    return FULL if layer == 0 or (layer + 1) % 6 == 0 else WINDOW


def _as_transformers(keys: JsonKeys) -> JsonKeys:
    """The hub's own keys, in Transformers' words."""
    keys.only("scoring_func", "sigmoid", "the router's scores are sigmoids")
    keys.only("topk_method", "noaux_tc", "experts are chosen with a bias")
    if keys.count("n_shared_experts", 0):
        raise ConfigError(f"{keys.where}: n_shared_experts must be 0; this family has none")
    for same in ("head_dim", "v_head_dim", "num_attention_heads"):
        keys.only(f"swa_{same}", keys.get(same), "layers of both kinds have heads alike")
    for key in DESCRIBED:
        keys.get(key)
    overlay: dict[str, Any] = {"rms_norm_eps": keys.optional("layernorm_epsilon", 1e-5)}
    overlay |= {"rms_norm_eps": keys["rms_norm_eps"]} if keys.get("rms_norm_eps") is not None else {}
    if (before := keys.count("sliding_window_size", 0, most=1 << 31)) > 0:
        overlay["sliding_window"] = before + 1  # so many before the token itself
    overlay |= _pattern(keys, "hybrid_layer_pattern", "layer_types", (FULL, WINDOW))
    overlay |= _pattern(keys, "moe_layer_freq", "mlp_layer_types", ("dense", "sparse"))
    return keys.overlaid(overlay)


def _pattern(keys: JsonKeys, key: str, meaning: str, words: tuple[str, str]) -> dict[str, Any]:
    """A list of 0 and 1, one for each layer, as a list of words."""
    numbers = keys.integers(key)
    if not numbers or keys.get(meaning) is not None:
        return {}
    if len(numbers) != layer_count(keys) or set(numbers) - {0, 1}:
        raise ConfigError(f"{keys.where}: {key} must be a list of {layer_count(keys)} times 0 or 1; or remove it")
    return {meaning: [words[number] for number in numbers]}


def _attention(keys: JsonKeys, kind: str) -> Gqa:
    if kind not in THETAS:
        raise ConfigError(f"{keys.where}: layer type {kind!r} is not supported; {WINDOW} and {FULL} are")
    windowed = kind == WINDOW
    heads, own = keys.optional("num_key_value_heads", 4), _rope(keys, kind)
    if windowed:
        heads = keys.optional("swa_num_key_value_heads", 2 * heads)
    sinks = keys.optional(f"add_{'swa' if windowed else 'full'}_attention_sink_bias", windowed)
    attention = gqa(
        keys.overlaid({"num_key_value_heads": heads, "rope_parameters": own}),
        qkv_bias=keys.optional("attention_bias", False), rotary_share=SHARE,
    )  # fmt: skip
    absent = 1.0 if "attention_value_scale" in keys else 0.707
    values = Values(keys.optional("v_head_dim", 128), keys.optional("attention_value_scale", absent))
    window = keys.size("sliding_window", 129) if windowed else 0
    return replace(attention, window=window, sinks=sinks, values=values)


def _rope(keys: JsonKeys, kind: str) -> dict[str, Any]:
    """`rope_parameters` of a kind; else what the hub's keys say."""
    own = keys.mapping("rope_parameters").get(kind)
    if isinstance(own, Mapping):
        return dict(own)
    theta = keys.optional("swa_rope_theta" if kind == WINDOW else "rope_theta", THETAS[kind])
    scaling = keys.mapping("rope_scaling") if kind == FULL else {}
    share = keys.optional("partial_rotary_factor", SHARE)
    return {"rope_type": "default"} | scaling | {"partial_rotary_factor": share, "rope_theta": theta}


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """Draft layers at the end are counted with the others. Files from before there was a key for it do not say what
    values are multiplied with."""
    count = keys.depth
    windowed = keys.layers("attention.sliding_window_pattern", count)
    heads = keys.layers("attention.head_count_kv", count)
    of = {kind: next((h for h, w in zip(heads, windowed, strict=True) if bool(w) == kind), heads[0]) for kind in (0, 1)}
    sinks = {w: keys.has_tensor(f"blk.{i}.attn_sinks.weight") for i, w in enumerate(windowed)}
    head = keys.size("attention.key_length")
    return {
        "model_type": "mimo_v2_flash",
        "hybrid_layer_pattern": windowed,
        "moe_layer_freq": [int(keys.has_tensor(f"blk.{i}.ffn_gate_inp.weight")) for i in range(count)],
        "num_key_value_heads": of[0],
        "swa_num_key_value_heads": of[1],
        "add_full_attention_sink_bias": sinks.get(0, False),
        "add_swa_attention_sink_bias": sinks.get(1, True),
        "attention_bias": keys.has_bias,
        "v_head_dim": keys.need("attention.value_length"),
        "attention_value_scale": keys.number("attention.value_scale", 0.707),
        "sliding_window_size": keys.need("attention.sliding_window"),  # the hub's: so many before the token itself
        "rope_parameters": {
            kind: _gguf_rope(keys, base, keys.optional("rope.dimension_count", head) / head)
            for kind, base in ((FULL, "rope.freq_base"), (WINDOW, "rope.freq_base_swa"))
        },
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.expert_width,
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.optional("expert_group_count", 1),
        "topk_group": keys.optional("expert_group_used_count", 1),
    }


def _gguf_rope(keys: GgufKeys, base: str, share: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": keys.number(base, 1e4), "partial_rotary_factor": share}


STEMS = GGUF_DECODER | {
    "attn_qkv": "self_attn.qkv_proj",  # of MiMo-V2.5
    "attn_sinks": "self_attn.sinks",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}

FAMILY = Family(("mimo_v2_flash",), config, gguf=Gguf("mimo2", gguf_config, STEMS), renames=RENAMES)
