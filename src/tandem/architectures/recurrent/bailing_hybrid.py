"""Ling 3: Kimi-Linear's layers, whose decays have a floor and whose gates are of full rank; a gate on latent attention,
which turns; Ling 2.0's router. A draft layer is attention and experts, as DeepSeek-V3's.

Published files limit activations of their last layers (`expert_swiglu_limit_list`): vLLM and llama.cpp apply it, while
Transformers' modules do not know it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.deepseek import GGUF_STEMS, latent
from tandem.architectures.deepseek import gguf_config as deepseek_gguf
from tandem.architectures.family import SIGMOID, DerivedTensor, Family, Gguf, GgufKeys
from tandem.architectures.limits import clamped, draft_limit, limits
from tandem.architectures.names import DraftNames, Names, Renames
from tandem.architectures.recurrent.granite import taps_of
from tandem.architectures.recurrent.kimi_linear import RECURRENT, floor_of
from tandem.architectures.recurrent.kimi_linear import STEMS as KIMI_STEMS
from tandem.architectures.shared import (
    FULL,
    check_convolutions,
    epsilon,
    layer_count,
    layer_kinds,
    layers_after_dense,
    model,
    moe,
    sigmoid_router,
    with_drafts,
)
from tandem.errors import ConfigError
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.experts.shape import Moe
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import Block, Layer, Mixer
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm

LIMITS = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"
SAME = {
    "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts",
}  # fmt: skip
"""Transformers' words in memory, and in files."""

DESCRIBED = {
    "no_kda_lora": True, "use_kda_lora": False, "gated_attention_proj_granularity_type": "head_wise",
    "linear_attention": "kda", "num_kv_heads_for_linear_attn": 0, "use_mla_nope": False, "rope_interleave": True,
    "use_rmsnorm": True, "use_bias": False, "use_qkv_bias": False, "norm_head": False, "norm_softmax": False,
    "use_nGPT": False, "value_norm": False, "scale_router_input": False, "multi_gate": False, "mtp_use_kda": False,
    "moe_router_enable_expert_bias": True, "score_function": "sigmoid", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "routing_group_score_top_k": 2,
}  # fmt: skip
UNUSED = (
    "embedding_dropout", "output_dropout", "router_dtype", "rotary_dim", "partial_rotary_factor", "linear_silu",
    "group_norm_size", "use_qk_norm", "mtp_loss_scaling_factor", "max_window_layers",
)  # fmt: skip
OLDER = "BailingMoeV2"
"""How architectures of Ling 2.6 begin, whose files name the same model_type."""


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys = _as_transformers(keys)
    check_convolutions(keys)
    mixers = _mixers(keys)
    width = keys.size("moe_intermediate_size", 768)
    shared = keys.count("n_shared_experts", 1)
    keys.only("moe_shared_expert_intermediate_size", width * shared or None, "as wide as so many routed experts")
    router = sigmoid_router(keys, "num_experts", scale=2.5, groups=8, top_groups=4)
    ling = model(
        keys, generation, mixers.__getitem__, moe(router, width, width * shared), layers_after_dense(keys, 2)
    )
    routed_limits, shared_limits = (limits(keys, key) for key in LIMITS)
    ling = with_drafts(keys, ling)
    if not any(routed_limits + shared_limits):
        return ling
    layers = zip(ling.layers, routed_limits, shared_limits, strict=True)
    limited, drafts = tuple(_with_limits(*layer) for layer in layers), ling.drafts
    if drafts is not None:
        own = [draft_limit(keys, key) for key in LIMITS]
        drafts = replace(drafts, layer=_with_limits(drafts.layer, *own))
    return replace(ling, layers=limited, drafts=drafts)


def _as_transformers(keys: JsonKeys) -> JsonKeys:
    """The hub's own keys, in Transformers' words."""
    named = keys.get("architectures")
    if isinstance(named, list) and any(str(each).startswith(OLDER) for each in named):
        raise ConfigError(
            f"{keys.where}: architectures = {named!r} is not supported (Ling 2.6, gated linear attention); "
            "BailingMoeV3ForCausalLM (Ling 3) is"
        )
    for key, value in DESCRIBED.items():
        keys.only(key, value, "as in every Ling 3")
    for key in UNUSED:
        keys.get(key)
    overlay: dict[str, Any] = {ours: keys.get(theirs) for ours, theirs in SAME.items() if keys.get(theirs) is not None}
    return keys.overlaid({"rope_theta": keys.optional("rope_theta", 6e6)} | overlay)


def _mixers(keys: JsonKeys) -> list[Mixer]:
    kinds = layer_kinds(keys, _usual_kind(keys))
    if unknown := sorted(set(kinds) - {RECURRENT, FULL}):
        raise ConfigError(f"{keys.where}: layer type {unknown[0]!r} is not supported; {RECURRENT} and {FULL} are")
    if FULL not in kinds:
        raise ConfigError(f"{keys.where}: layer_types has no {FULL}; every sixth layer is, or remove it")
    attention = replace(latent(keys), gate="head")
    taps = taps_of(keys, "linear_conv_kernel_dim" if "linear_conv_kernel_dim" in keys else "short_conv_kernel_size")
    keys.get("short_conv_kernel_size"), keys.get("head_dim")
    delta = ChannelDelta(
        keys.optional("linear_num_heads", keys.size("num_attention_heads", 32)),
        keys.size("linear_head_dim", 128, "head_dim"), taps, Norm(epsilon(keys)), _floor(keys), full_rank=True,
    )  # fmt: skip
    return [attention if kind == FULL else delta for kind in kinds]


def _usual_kind(keys: JsonKeys) -> Any:
    """The kinds of layers where `layer_types` is absent, as the vendor's code has it: the last of each group is
    attention, and all of a group that is not whole. Transformers writes `layer_types`."""
    size, count = keys.optional("layer_group_size", 6), layer_count(keys)
    if size < 1:
        raise ConfigError(f"{keys.where}: layer_group_size is {size}, and must be at least 1; try 6")
    return lambda i: FULL if (i + 1) % size == 0 or i >= count // size * size else RECURRENT


def _floor(keys: JsonKeys) -> float:
    bounded, floor = keys.optional("kda_safe_gate", True), keys.optional("kda_lower_bound", -5.0)
    return floor_of(keys, "kda_lower_bound", floor) if bounded else 0.0


def _with_limits(layer: Layer, routed: float, shared: float) -> Layer:
    return replace(layer, blocks=tuple(_limited(block, routed, shared) for block in layer.blocks))


def _limited(block: Block, routed: float, shared: float) -> Block:
    """Dense layers have none. Shared experts stay apart in all layers, since limits differ in some."""
    if not isinstance(block.body, Moe):
        return block
    return replace(block, body=replace(clamped(block.body, routed, shared), separate_shared=True))


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """Layers without key heads are delta nets, of as many heads as attention has."""
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    if not keys.flag("kda.safe_gate", True):
        raise keys.refuse("kda.safe_gate", "is false, which is not supported")
    count = keys.depth
    gguf = deepseek_gguf(keys)
    experts = gguf.pop("n_routed_experts")
    key_heads = keys.layers("attention.head_count_kv", count)
    return gguf | {
        "model_type": "bailing_hybrid",
        "layer_types": [FULL if each else RECURRENT for each in key_heads],
        "num_key_value_heads": keys.need("attention.head_count"),
        "num_experts": experts,
        "linear_head_dim": keys.need("kda.head_dim"),
        "linear_num_heads": keys.need("attention.head_count"),
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "kda_lower_bound": keys.number("kda.gate_lower_bound", -5.0),
        LIMITS[0]: keys.numbers("swiglu_clamp_exp")[:count],
        LIMITS[1]: keys.numbers("swiglu_clamp_shexp")[:count],
    }


def parts(_: GgufKeys) -> dict[str, DerivedTensor]:
    return {"self_attn.A_log": DerivedTensor("self_attn.A_log", numbers="log(x)")}


STEMS = GGUF_STEMS | KIMI_STEMS | {
    "ssm_f_a": "self_attn.f_proj", "ssm_g_a": "self_attn.g_proj", "attn_gate": "self_attn.g_proj",
}  # fmt: skip

RENAMES = Renames(
    {
        "model.word_embeddings.": "model.embed_tokens.", ".attention.dense.": ".self_attn.o_proj.",
        ".attention.": ".self_attn.", ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
    },
    signs=(".attention.f_proj.",),
)  # fmt: skip
"""Names in the hub's files, and ours."""

NAMES = Names(recurrent="self_attn", shared="mlp.shared_experts")
GGUF = Gguf("bailingmoe3", gguf_config, STEMS, parts)
DRAFTS = DraftNames(norm="model.layers.{layer}.final_layernorm")
FAMILY = Family(("bailing_hybrid",), config, (NAMES,), GGUF, DRAFTS, renames=RENAMES)
