"""Qwen3-Next, and the text part of Qwen3.5 and 3.6 MoE: three gated delta nets, then one gated attention, and so on."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tandem.architectures.family import Family
from tandem.architectures.gguf.qwen3_next import APART, QWEN3_NEXT, QWEN35
from tandem.architectures.names import DraftNames, Names
from tandem.architectures.shared import (
    check_convolutions,
    epsilon,
    gqa,
    layer_count,
    layer_kinds,
    model,
    moe,
    softmax_router,
    sparse_step_layers,
    text_part,
    with_drafts,
)
from tandem.architectures.vision import with_tower
from tandem.errors import ConfigError
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import Mixer
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm

NAMES = Names(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
DRAFTS = DraftNames("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
Layout = Literal["heads", "kinds"]
RECURRENT, FULL = "linear_attention", "full_attention"


def qwen3_next(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    normalise = keys.optional("norm_topk_prob", True)
    layout: Layout = "kinds" if keys.optional(APART, False) else "heads"
    base = _model(keys, generation, layout, normalise, sparse_step_layers(keys))
    return with_drafts(keys, base, count=1)  # config.json does not say


def qwen3_5_moe(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    """The keys of a checkpoint with a vision tower lie in `text_config`."""
    text = text_part(keys)
    text.only("mtp_use_dedicated_embeddings", False, "draft layers share the model's")
    text.only("attn_output_gate", True, "attention is gated")
    text.only("mlp_only_layers", [], "every layer has experts")
    text.get("mamba_ssm_dtype")  # states are float32 here
    base = _model(text, generation, "kinds", True, range(layer_count(text)))
    base = with_drafts(text, base, count=text.count("mtp_num_hidden_layers", 0))
    return with_tower(keys, text, base, (11, 11, 10))


def _model(
    keys: JsonKeys,
    generation: JsonKeys,
    layout: Layout,
    normalise: bool,
    moe_layers: list[int] | range,
) -> ModelConfig:
    router = softmax_router(keys, "num_experts", normalise)
    shared = keys.size("shared_expert_intermediate_size", 512)
    experts = moe(router, keys.size("moe_intermediate_size", 512), shared, shared_gate=True)
    mixers = _mixers(keys, layout)
    return model(keys, generation, mixers.__getitem__, experts, moe_layers, plus_one=True)


def _mixers(keys: JsonKeys, layout: Layout) -> list[Mixer]:
    interval = keys.optional("full_attention_interval", 4)
    if interval < 1:
        raise ConfigError(f"config.json: full_attention_interval is {interval}; try 4")
    kinds = layer_kinds(keys, lambda i: FULL if (i + 1) % interval == 0 else RECURRENT)
    if unknown := set(kinds) - {FULL, RECURRENT}:
        raise ConfigError(
            f"config.json: layer_types has {sorted(unknown)[0]!r}; {RECURRENT} and {FULL} are known"
        )
    if FULL not in kinds:
        raise ConfigError(f"config.json: layer_types has no {FULL}")
    bias = keys.optional("attention_bias", False)
    attention = gqa(keys, qkv_bias=bias, out_bias=bias, qk_norm="head", rotary_share=0.25, plus_one=True)
    attention, recurrent = replace(attention, gate=True), delta_rule(keys, layout)
    return [attention if kind == FULL else recurrent for kind in kinds]


def delta_rule(keys: JsonKeys, layout: Layout) -> DeltaRule:
    k_heads, v_heads = keys.size("linear_num_key_heads", 16), keys.size("linear_num_value_heads", 32)
    conv = keys.size("linear_conv_kernel_dim", 4)
    check_convolutions(keys)
    if v_heads % k_heads:
        raise ConfigError(
            f"config.json: linear_num_key_heads {k_heads} does not divide {v_heads} value heads"
        )
    if not 2 <= conv <= 8:
        raise ConfigError(f"config.json: linear_conv_kernel_dim is {conv}, and must be 2 to 8; try 4")
    return DeltaRule(
        k_heads, v_heads, keys.size("linear_key_head_dim", 128), keys.size("linear_value_head_dim", 128), conv,
        Norm(epsilon(keys)), layout,
    )  # fmt: skip


FAMILIES = (
    Family(("qwen3_next",), qwen3_next, (NAMES,), QWEN3_NEXT, DRAFTS),
    Family(("qwen3_5_moe", "qwen3_5_moe_text"), qwen3_5_moe, (NAMES,), QWEN35, DRAFTS),
)
