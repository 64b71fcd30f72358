"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose tokens look only at those that an indexer chooses; from GLM-5.2 on, most
layers take the choice of one before them.

DeepSeek's own code turns the indexer's queries and keys with a Hadamard matrix before it rounds them to fp8. The matrix
is orthogonal, so scores are the same without it; it only spreads what rounding costs. Here nothing is rounded so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from tandem.architectures.deepseek import GGUF_STEMS, NAMES, latent
from tandem.architectures.deepseek import gguf_config as deepseek_gguf
from tandem.architectures.family import SIGMOID, Family, Gguf, GgufKeys
from tandem.architectures.shared import (
    layer_count,
    layers_after_dense,
    model,
    moe,
    sigmoid_router,
    with_drafts,
)
from tandem.errors import ConfigError
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.token_index.shape import Index
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

Pairs = Literal["halves", "neighbours"]
KINDS = "indexed_attention", "deepseek_sparse_attention"
LONG_CONTEXT = 1 << 20
SHARING = {"index_topk_freq": 4, "index_skip_topk_offset": 3}  # config.json of GLM-5.2 and 5.3
_PATTERN = {"F": "full", "S": "shared"}


def deepseek_v32(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    return with_drafts(keys, _model(keys, generation, "halves", groups=8, top_groups=4))


def glm_moe_dsa(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("moe_router_dtype", "float32", "the router's logits are float32")
    keys.get("index_share_for_mtp_iteration")  # of draft layers
    return _model(keys, generation, "neighbours", groups=1, top_groups=1)


def _model(keys: JsonKeys, generation: JsonKeys, pairs: Pairs, *, groups: int, top_groups: int) -> ModelConfig:
    """pairs: of the indexer's rotary channels, where config.json does not say; groups, top_groups: likewise, of
    experts."""
    keys.only("scoring_func", "sigmoid", "DeepSeek-V3's")
    keys.only("topk_method", "noaux_tc", "DeepSeek-V3's")
    keys.only("rope_interleave", True, "rotary channels are pairs of neighbours")
    keys.only("moe_layer_freq", 1, "all layers after the dense ones are MoE")
    keys.only("mlp_bias", False, "feed-forwards have no biases")
    _check_kinds(keys)
    router = sigmoid_router(keys, scale=2.5, groups=groups, top_groups=top_groups)
    width = keys.size("moe_intermediate_size", 2048)
    experts = moe(router, width, width * keys.count("n_shared_experts", 1))
    return model(keys, generation, _mixers(keys, pairs).__getitem__, experts, layers_after_dense(keys, 3))


def _check_kinds(keys: JsonKeys) -> None:
    """Transformers up to 5.17 or so writes the second name."""
    kinds = keys.get("layer_types")
    if kinds is not None and kinds not in [[name] * layer_count(keys) for name in KINDS]:
        raise ConfigError(f"{keys.where}: layer_types = {kinds!r} is not supported; every layer is {KINDS[0]}")


def _mixers(keys: JsonKeys, pairs: Pairs) -> list[Latent]:
    """Attention with an indexer, one for each layer. Raises ConfigError where `q_lora_rank` is null."""
    attention, index = latent(keys), _index(keys, pairs)
    if not attention.q_rank:
        raise ConfigError(
            "config.json: q_lora_rank is null, and the indexer's queries are made from it; try 1536"
        )
    return [_mixer(attention, index, i, source) for i, source in enumerate(_sources(keys))]


def _mixer(attention: Latent, index: Index, layer: int, source: int) -> Latent:
    return replace(attention, index=replace(index, reuse=None if source == layer else source))


def _index(keys: JsonKeys, pairs: Pairs) -> Index:
    rope, dim = latent(keys).rope, keys.size("index_head_dim", 128)
    if dim < rope.dims:
        raise ConfigError(
            f"config.json: index_head_dim {dim} is less than qk_rope_head_dim {rope.dims}; try 128"
        )
    neighbours = keys.optional("indexer_rope_interleave", pairs == "neighbours")
    rope = replace(rope, pairs="neighbours" if neighbours else "halves")
    return Index(keys.size("index_n_heads", 64), dim, keys.size("index_topk", 2048), rope)


def _sources(keys: JsonKeys) -> list[int]:
    """Whose choice counts in each layer."""
    kinds, sources = _kinds(keys), list[int]()
    if len(kinds) != layer_count(keys) or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise ConfigError(
            f"config.json: indexer_types must say 'full' or 'shared' for each of {layer_count(keys)} layers, and "
            "'full' for the first; remove it, and every layer chooses"
        )
    for layer, kind in enumerate(kinds):
        sources.append(layer if kind == "full" else sources[-1])
    return sources


def _kinds(keys: JsonKeys) -> list[str]:
    """Kind of each layer's indexer, "full" or "shared": as listed, as letters, or by frequency from an offset on."""
    listed, pattern = keys.get("indexer_types"), keys.get("index_topk_pattern")
    every, offset = keys.count("index_topk_freq", 1), keys.count("index_skip_topk_offset", 2)
    listed = listed or (pattern if isinstance(pattern, list) else None)
    if isinstance(listed, list):
        return [str(kind) for kind in listed]
    if isinstance(pattern, str):
        return [_PATTERN.get(letter, letter) for letter in pattern]
    layers = range(layer_count(keys))
    return ["shared" if max(i - offset + 1, 0) % max(every, 1) else "full" for i in layers]


def gguf_glm(keys: GgufKeys) -> dict[str, Any]:
    return gguf_config(keys) | _gguf_choosers(keys) | {"model_type": "glm_moe_dsa"}


def gguf_deepseek(keys: GgufKeys) -> dict[str, Any]:
    return gguf_config(keys) | {"model_type": "deepseek_v32"}


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """As DeepSeek-V3's, and the indexer."""
    if keys.optional("expert_gating_func", 0) != SIGMOID:
        raise keys.refuse("expert_gating_func", f"is not {SIGMOID} (sigmoid)")
    return deepseek_gguf(keys) | {
        "index_n_heads": keys.need("attention.indexer.head_count"),
        "index_head_dim": keys.need("attention.indexer.key_length"),
        "index_topk": keys.need("attention.indexer.top_k"),
    }  # fmt: skip


def _gguf_choosers(keys: GgufKeys) -> dict[str, Any]:
    """Which layers choose. Files of GLM-5.2 and 5.3 without the key have an indexer in every layer, also in those that
    did not learn one; a context of 1 M tells them from GLM-5, as in llama.cpp. Else layers without one share."""
    layers, listed = keys.depth, keys.flags("attention.indexer.types")
    own = listed or [keys.has_tensor(f"blk.{i}.indexer.attn_k.weight") for i in range(layers)]
    if listed and len(listed) not in (layers, keys.need("block_count")):
        raise keys.refuse("attention.indexer.types", f"has {len(listed)} values for {layers} layers")
    if not listed and all(own) and keys.need("context_length") >= LONG_CONTEXT:
        return SHARING
    return {"indexer_types": ["full" if chooses else "shared" for chooses in own[:layers]]}


STEMS = GGUF_STEMS | {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}

FAMILIES = (
    Family(("deepseek_v32",), deepseek_v32, (NAMES,), Gguf("deepseek32", gguf_deepseek, STEMS)),
    Family(("glm_moe_dsa",), glm_moe_dsa, (NAMES,), Gguf("glm-dsa", gguf_glm, STEMS)),
)
