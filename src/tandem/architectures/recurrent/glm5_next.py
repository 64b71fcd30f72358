"""GLM-5.3-Flash: Kimi-Linear's delta nets with a floor, and latent attention that does not turn and looks at pools of
tokens that an indexer chooses; several streams, whose mean is taken in the end; all activations clamped.

Only its text. Its draft layer has one stream, and takes the mean of the model's: no published file has other tensors.
No published draft tokens have been compared. What is drafted is verified.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.deepseek import gguf_config as deepseek_gguf
from tandem.architectures.deepseek_v32 import STEMS as DEEPSEEK_STEMS
from tandem.architectures.family import SIGMOID, Family, Gguf, GgufKeys
from tandem.architectures.gguf.deepseek_v4 import limit_of
from tandem.architectures.names import Names, Renames
from tandem.architectures.recurrent.granite import taps_of
from tandem.architectures.recurrent.kimi_linear import RECURRENT, floor_of
from tandem.architectures.recurrent.kimi_linear import STEMS as KIMI_STEMS
from tandem.architectures.recurrent.kimi_linear import parts as decays
from tandem.architectures.shared import (
    FULL,
    activation,
    assembled,
    check_convolutions,
    epsilon,
    layer_count,
    layer_kinds,
    layers_after_dense,
    moe,
    positive,
    sigmoid_router,
    text_part,
    with_drafts,
)
from tandem.errors import ConfigError
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Moe
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.streams.shape import Hyper
from tandem.mechanisms.token_index.shape import Index
from tandem.spec.activation import Activation
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import Mixer, pre_norm
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.rope import still

SPARSE = "deepseek_sparse_attention", "indexed_attention", FULL
"""Layer kinds of the hub, of Transformers, and of older files: all mean the same."""

DESCRIBED = {
    "mla_use_nope": True, "qk_rope_head_dim": 0, "index_kpool_compress": True, "index_kpool_always_select_tail": True,
    "mhc": True, "mhc_post_mult_value": 2, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "moe_router_dtype": "float32", "mlp_bias": False, "attention_bias": False,
}  # fmt: skip
UNUSED = (
    "head_dim", "qk_head_dim", "num_key_value_heads", "rope_parameters", "rope_scaling", "indexer_rope_interleave",
    "index_share_for_mtp_iteration", "rope_interleave",
)  # fmt: skip
POOL = 4


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys = _as_transformers(text_part(keys))
    check_convolutions(keys)
    norm, count = Norm(epsilon(keys)), layer_count(keys)
    hyper = Hyper(
        positive(keys, "hc_mult", 4), positive(keys, "hc_sinkhorn_iters", 20), keys.optional("hc_eps", 1e-6), norm.eps,
        mean=True,
    )  # fmt: skip
    experts, sparse = _experts(keys), layers_after_dense(keys, min(3, count))
    if not sparse:
        raise ConfigError(f"{keys.where}: no layer is MoE, by mlp_layer_types or first_k_dense_replace")
    dense = Dense(keys.size("intermediate_size", 12288), experts.experts.activation)
    layers = tuple(
        pre_norm(mixer, experts if i in sparse else dense, norm, hyper) for i, mixer in enumerate(_mixers(keys))
    )
    return _with_draft(keys, assembled(keys, generation, layers, norm))


def _with_draft(keys: JsonKeys, base: ModelConfig) -> ModelConfig:
    drafted = with_drafts(keys, base)
    if drafted.drafts is None:
        return drafted
    blocks = tuple(replace(block, hyper=None) for block in drafted.drafts.layer.blocks)
    layer = replace(drafted.drafts.layer, blocks=blocks)
    return replace(drafted, drafts=replace(drafted.drafts, layer=layer, mean=True))


def _as_transformers(keys: JsonKeys) -> JsonKeys:
    """The hub's own keys, in Transformers' words."""
    for key, value in DESCRIBED.items():
        keys.only(key, value, "as in GLM-5.3-Flash")
    for key in UNUSED:
        keys.get(key)
    inner = keys.mapping("linear_attn_config")
    names = {
        "linear_num_heads": "num_heads", "linear_head_dim": "head_dim",
        "linear_conv_kernel_dim": "short_conv_kernel_size", "linear_lower_bound": "gate_lower_bound",
    }  # fmt: skip
    overlay: dict[str, Any] = {ours: inner[theirs] for ours, theirs in names.items() if theirs in inner}
    if inner and overlay.get("linear_lower_bound") is None and inner.get("safe_gate", True):
        overlay["linear_lower_bound"] = -5.0
    if keys.get("layer_types") is None and isinstance(full := inner.get("full_attn_layers"), list):
        overlay["layer_types"] = [SPARSE[0] if i in full else RECURRENT for i in range(layer_count(keys))]
    return keys.overlaid(overlay)


def _experts(keys: JsonKeys) -> Moe:
    activation(keys)
    width = keys.size("moe_intermediate_size", 2048)
    experts = moe(sigmoid_router(keys, scale=2.5), width, width * keys.count("n_shared_experts", 1))
    return experts.activated_by(Activation("swiglu_clamp", limit=keys.optional("swiglu_limit", 10.0)))


def _mixers(keys: JsonKeys) -> list[Mixer]:
    kinds = layer_kinds(keys, lambda i: SPARSE[0] if i % 4 == 3 else RECURRENT)
    if unknown := sorted(set(kinds) - {RECURRENT, *SPARSE}):
        raise ConfigError(f"{keys.where}: layer type {unknown[0]!r} is not supported; {RECURRENT} and {SPARSE[0]} are")
    if set(kinds) <= {RECURRENT}:
        raise ConfigError(f"{keys.where}: layer_types has no {SPARSE[0]}; every fourth layer is, or remove it")
    _check_indexers(keys, kinds)
    delta, attention = _delta(keys), _attention(keys)
    return [delta if kind == RECURRENT else attention for kind in kinds]


def _check_indexers(keys: JsonKeys, kinds: list[str]) -> None:
    """A choice does not outlive the delta nets behind it, so each layer makes its own; Transformers raises, too."""
    types, pattern, every = keys.get("indexer_types"), keys.get("index_topk_pattern"), keys.get("index_topk_freq")
    keys.get("index_skip_topk_offset")
    own = types if types is not None else pattern or ["full"] * len(kinds)
    each = [kind for kind, mixer in zip(own, kinds, strict=False) if mixer != RECURRENT]
    if every not in (None, 1) or len(own) < len(kinds) or set(each) - {"full", "F"}:
        raise ConfigError(f"{keys.where}: indexer_types: layers that share a choice are not supported; 'full' is")


def _delta(keys: JsonKeys) -> ChannelDelta:
    floor = keys.get("linear_lower_bound") if "linear_lower_bound" in keys else -5.0
    if floor is not None:
        floor = floor_of(keys, "gate_lower_bound", keys.optional("linear_lower_bound", -5.0))
    return ChannelDelta(
        keys.size("linear_num_heads", 64), keys.size("linear_head_dim", 128), taps_of(keys, "linear_conv_kernel_dim"),
        Norm(epsilon(keys)), floor or 0.0,
    )  # fmt: skip


def _attention(keys: JsonKeys) -> Latent:
    return Latent(
        heads=keys.size("num_attention_heads", 64),
        q_rank=keys.size("q_lora_rank", 1536),
        kv_rank=keys.size("kv_lora_rank", 512),
        nope_dim=keys.size("qk_nope_head_dim", 256),
        rope_dim=0,
        value_dim=keys.size("v_head_dim", 256),
        rope=still(0),
        norm=Norm(epsilon(keys)),
        index=Index(
            keys.size("index_n_heads", 32), keys.size("index_head_dim", 128), keys.size("index_topk", 2048), still(0),
            pool=keys.size("index_kpool", POOL, most=4096),
        ),
    )  # fmt: skip


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """Layers without key heads are delta nets, of as many heads as attention has."""
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    if not keys.flag("attention.indexer.kpool_select_tail", True):
        raise keys.refuse("attention.indexer.kpool_select_tail", "is false, which is not supported")
    own = keys.flags("attention.indexer.types")
    key_heads = keys.layers("attention.head_count_kv", keys.depth)
    entries = deepseek_gguf(keys)
    del entries["rope_parameters"]
    return entries | {
        "model_type": "glm5_next_text",
        "layer_types": [SPARSE[0] if each else RECURRENT for each in key_heads],
        "num_key_value_heads": keys.need("attention.head_count"),
        "linear_head_dim": keys.need("kda.head_dim"),
        "linear_num_heads": keys.need("attention.head_count"),
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_lower_bound": keys.number("kda.gate_lower_bound", 0.0) or None,
        "index_n_heads": keys.need("attention.indexer.head_count"),
        "index_head_dim": keys.need("attention.indexer.key_length"),
        "index_topk": keys.need("attention.indexer.top_k"),
        "index_kpool": keys.need("attention.indexer.kpool"),
        "indexer_types": ["full" if each else "shared" for each in own] or None,
        "swiglu_limit": limit_of(keys),
        "hc_mult": keys.need("hyper_connection.count"),
        "hc_sinkhorn_iters": keys.need("hyper_connection.sinkhorn_iterations"),
        "hc_eps": keys.number("hyper_connection.epsilon", 1e-6),
    }


STEMS = DEEPSEEK_STEMS | KIMI_STEMS | {
    f"hc_{block}_{part}": f"{block}_hc.{part}" for block in ("attn", "ffn") for part in ("fn", "base", "scale")
} | {
    "indexer_compressor_gate": "self_attn.indexer.index_kpool_compress_gate",
    "indexer_compressor_ape": "self_attn.indexer.index_kpool_compress_ape",
}  # fmt: skip

RENAMES = Renames(
    {f".hc_{block}_{part}": f".{block}_hc.{part}" for block in ("attn", "ffn") for part in ("fn", "base", "scale")},
    signs=(".self_attn.indexer.index_kpool_compress_ape",),
)
"""Names in the hub's files, and ours."""

NAMES = Names(recurrent="self_attn", shared="mlp.shared_experts")
GGUF = Gguf("glm5-next", gguf_config, STEMS, decays)
FAMILY = Family(("glm5_next", "glm5_next_text"), config, (NAMES,), GGUF, renames=RENAMES)
