"""Kimi-Linear: delta nets whose channels decay apart, and latent attention that does not turn; DeepSeek-V3's router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.deepseek import GGUF_STEMS, latent
from tandem.architectures.family import SIGMOID, DerivedTensor, Family, Gguf, GgufKeys
from tandem.architectures.mixtral import NAMES as MIXTRAL
from tandem.architectures.names import Names, Renames
from tandem.architectures.recurrent.granite import taps_of
from tandem.architectures.shared import (
    FULL,
    check_convolutions,
    epsilon,
    layer_count,
    layers_after_dense,
    model,
    moe,
    sigmoid_router,
)
from tandem.errors import ConfigError
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import Mixer
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.rope import still

RECURRENT = "linear_attention"
NAMES = replace(
    MIXTRAL, recurrent="self_attn", router_bias="block_sparse_moe.gate.e_score_correction_bias",
    shared="block_sparse_moe.shared_experts",
)  # fmt: skip
IN_MEMORY = Names(recurrent="self_attn", shared="mlp.shared_experts")
"""As Transformers 5 holds it."""

RENAMES = Renames(
    {f".block_sparse_moe.{matrix}_proj.": f".mlp.{matrix}_proj." for matrix in ("gate", "up", "down")},
    signs=(".block_sparse_moe.shared_experts.",),
)
"""Names of dense layers, as Transformers saves them."""

SAME = {
    "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts",
}  # fmt: skip
"""Words of other families, and the hub's."""

DESCRIBED = {
    "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "mla_use_nope": True, "moe_layer_freq": 1,
    "attention_bias": False, "num_nextn_predict_layers": 0, "rope_scaling": None,
}  # fmt: skip


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    for key, value in DESCRIBED.items():
        keys.only(key, value, "as in every Kimi-Linear")
    keys.get("head_dim"), keys.get("rope_parameters")
    overlay: dict[str, Any] = {ours: keys.get(theirs) for ours, theirs in SAME.items() if keys.get(theirs) is not None}
    keys = keys.overlaid(overlay | _delta_keys(keys) | {"rope_theta": keys.optional("rope_theta", 1e4)})
    check_convolutions(keys)
    mixers = _mixers(keys)
    width = keys.size("moe_intermediate_size", 1024)
    router = sigmoid_router(keys, "num_experts", scale=2.446)
    experts = moe(router, width, width * keys.count("n_shared_experts", 1))
    return model(keys, generation, mixers.__getitem__, experts, layers_after_dense(keys, 1))


def _delta_keys(keys: JsonKeys) -> dict[str, Any]:
    """Delta attention's keys, which the hub's file has in an object of its own, in Transformers' words.

    That object counts layers from 1.
    """
    inner = keys.mapping("linear_attn_config")
    names = {
        "linear_head_dim": "head_dim", "linear_num_heads": "num_heads",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }  # fmt: skip
    overlay = {ours: inner[theirs] for ours, theirs in names.items() if theirs in inner}
    if isinstance(full := inner.get("full_attn_layers"), list) and keys.get("layer_types") is None:
        overlay["layer_types"] = [FULL if i + 1 in full else RECURRENT for i in range(layer_count(keys))]
    return overlay


def _mixers(keys: JsonKeys) -> list[Mixer]:
    count, kinds = layer_count(keys), keys.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != count or not {FULL} <= set(map(str, kinds)) <= {FULL, RECURRENT}:
        raise ConfigError(f"{keys.where}: layer_types must say {RECURRENT} or {FULL} for each of {count} layers")
    attention = latent(keys)
    attention = replace(attention, rope=replace(still(attention.rope_dim), pairs="neighbours"), softmax_factor=1.0)
    delta = ChannelDelta(
        keys.size("linear_num_heads", 32), keys.size("linear_head_dim", 128), taps_of(keys, "linear_conv_kernel_dim"),
        Norm(epsilon(keys)),
    )  # fmt: skip
    return [attention if kind == FULL else delta for kind in kinds]


def floor_of(keys: JsonKeys, key: str, floor: float) -> float:
    """Lower bound of decays' logarithms, checked: `floor`, named `key`. Raises ConfigError where it is not below 0."""
    if floor >= 0:
        raise ConfigError(f"{keys.where}: {key} is {floor}, and must be below 0; try -5.0")
    return floor


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """Layers without key heads are delta nets, of as many heads as attention has."""
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    count, rope_dim = keys.depth, keys.need("rope.dimension_count")
    key_heads = keys.layers("attention.head_count_kv", count)
    return {
        "model_type": "kimi_linear",
        "layer_types": [FULL if each else RECURRENT for each in key_heads],
        "num_key_value_heads": keys.need("attention.head_count"),
        "linear_head_dim": keys.need("kda.head_dim"),
        "linear_num_heads": keys.need("attention.head_count"),
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "q_lora_rank": keys.optional("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_nope_head_dim": keys.need("attention.key_length_mla") - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": keys.need("attention.value_length_mla"),
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "n_shared_experts": keys.optional("expert_shared_count", 1),
        "moe_intermediate_size": keys.expert_width,
        "first_k_dense_replace": keys.optional("leading_dense_block_count", 1),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def parts(_: GgufKeys) -> dict[str, DerivedTensor]:
    return {"self_attn.A_log": DerivedTensor("self_attn.A_log", numbers="log(-x)")}


STEMS = GGUF_STEMS | {
    "ffn_norm": "post_attention_layernorm",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}

GGUF = Gguf("kimi-linear", gguf_config, STEMS, parts)
FAMILY = Family(("kimi_linear",), config, (NAMES, IN_MEMORY), GGUF, renames=RENAMES)
