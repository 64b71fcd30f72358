"""DeepSeek-V2, V3, R1, Kimi-K2 and the text part of K2.5: latent attention, first layers dense, grouped routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.family import SIGMOID, Family, Gguf, GgufKeys
from tandem.architectures.glm4_moe import STEMS
from tandem.architectures.names import Names
from tandem.architectures.shared import layer_count, model, moe, sigmoid_router, text_part, with_drafts
from tandem.errors import ConfigError
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.router.shape import Router
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig
from tandem.spec.rope import read_rope, rope_keys, softmax_factor

NAMES = Names(shared="mlp.shared_experts")


def deepseek_v2(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("norm_topk_prob", False, "DeepSeek-V2 does not normalise")
    keys.only("scoring_func", "softmax", "DeepSeek-V2's")
    method = keys.optional("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"config.json: topk_method {method!r} is not DeepSeek-V2's; try 'group_limited_greedy'"
        )
    router = replace(
        sigmoid_router(keys, groups=8, top_groups=4),
        score="softmax",
        normalize=False,
        group_score="max",
        has_bias=False,
    )
    if method == "greedy":
        router = replace(router, num_groups=1, top_groups=1)
    return _model(keys, generation, router, dense_layers=0, shared=2)


def deepseek_v3(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("scoring_func", "sigmoid", "DeepSeek-V3's")
    keys.only("topk_method", "noaux_tc", "DeepSeek-V3's")
    keys.only("rope_interleave", True, "rotary channels are pairs of neighbours")
    router = sigmoid_router(keys, scale=2.5, groups=8, top_groups=4)
    return with_drafts(keys, _model(keys, generation, router, dense_layers=3, shared=1))


def kimi_k25(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    """Its text is DeepSeek-V3's; the keys lie in `text_config`, beside a vision tower's."""
    kind = keys.mapping("text_config").get("model_type", "deepseek_v3")
    if kind not in ("deepseek_v3", "kimi_k2"):
        raise ConfigError(f"{keys.where}: text_config.model_type {kind!r} is not supported; kimi_k2 is")
    return deepseek_v3(text_part(keys), generation)


def _model(
    keys: JsonKeys, generation: JsonKeys, router: Router, *, dense_layers: int, shared: int
) -> ModelConfig:
    """`dense_layers` and `shared`: what absent first_k_dense_replace and n_shared_experts mean."""
    keys.only("moe_layer_freq", 1, "all layers after the dense ones are MoE")
    first = keys.optional("first_k_dense_replace", dense_layers)
    width = keys.size("moe_intermediate_size", 2048)
    experts = moe(router, width, width * keys.count("n_shared_experts", shared))
    attention = latent(keys)
    return model(keys, generation, lambda _: attention, experts, range(first, layer_count(keys)))


def latent(keys: JsonKeys) -> Latent:
    """Raises ConfigError for sizes that do not fit."""
    rope_dim, q_rank = keys.size("qk_rope_head_dim", 64), keys.optional("q_lora_rank", 0)
    # as many kv heads as heads, all made from one latent; the others are sums of the sizes read here
    keys.get("num_key_value_heads"), keys.get("qk_head_dim"), keys.get("head_dim")
    if q_rank < 0 or rope_dim % 2:
        raise ConfigError(
            f"config.json: q_lora_rank {q_rank} must be null or positive, "
            f"qk_rope_head_dim {rope_dim} even; try 1536 and 64"
        )
    turning = rope_keys(keys)
    return Latent(
        heads=keys.size("num_attention_heads", 128),
        q_rank=q_rank,
        kv_rank=keys.size("kv_lora_rank", 512),
        nope_dim=keys.size("qk_nope_head_dim", 128),
        rope_dim=rope_dim,
        value_dim=keys.size("v_head_dim", 128),
        rope=read_rope(turning, rope_dim, "neighbours"),
        bias=keys.optional("attention_bias", False),
        softmax_factor=softmax_factor(turning),
    )


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """DeepSeek-V2 and V3, which their routers' scores tell apart. Files that do not name the scores are V2, unless
    experts are chosen with a bias: so are GLM-4.7-Flash's. V2 does not normalise scores; Mistral-Large-3 does."""
    biased = keys.has_tensor(f"blk.{keys.optional('leading_dense_block_count', 0)}.exp_probs_b.bias")
    if keys.optional("expert_gating_func", SIGMOID if biased else 1) == SIGMOID:
        return {"model_type": "deepseek_v3"} | _gguf_sizes(keys)
    if keys.flag("expert_weights_norm", False):
        return gguf_mistral(keys, 0.0)
    method = "group_limited_greedy" if keys.optional("expert_group_count", 1) > 1 else "greedy"
    return {"model_type": "deepseek_v2", "topk_method": method} | _gguf_sizes(keys)


def gguf_mistral(keys: GgufKeys, beta: float) -> dict[str, Any]:
    """Mistral's: a softmax, normalised, and queries that grow with their position. beta: what an absent key means."""
    sizes = _gguf_sizes(keys)
    rope = sizes["rope_parameters"] | {"llama_4_scaling_beta": keys.number("attention.temperature_scale", beta)}
    return sizes | {"model_type": "mistral4", "norm_topk_prob": True, "rope_parameters": rope}


def _gguf_sizes(keys: GgufKeys) -> dict[str, Any]:
    """The multi-head sizes are the plain ones in files with `kv_b` whole, and have names of their own in newer ones."""
    rope_dim = keys.need("rope.dimension_count")
    value = keys.optional("attention.value_length_mla", 0) or keys.need("attention.value_length")
    key = keys.optional("attention.key_length_mla", 0) or keys.need("attention.key_length")
    return {
        "q_lora_rank": keys.optional("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value,
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "n_shared_experts": keys.optional("expert_shared_count", 0),
        "moe_intermediate_size": keys.expert_width,
        "first_k_dense_replace": keys.optional("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.optional("expert_group_count", 1),
        "topk_group": keys.optional("expert_group_used_count", 1),
        "rope_parameters": keys.rope() | _gguf_yarn(keys),
    }


def _gguf_yarn(keys: GgufKeys) -> dict[str, Any]:
    """YaRN's further values. mscale_all_dim is stored as a tenth of it; mscale is not stored: it is the same in every
    DeepSeek model, and llama.cpp takes it to be."""
    yarn: dict[str, Any] = {}
    for name in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{name}"):
            yarn[name] = keys.number(f"rope.scaling.yarn_{name}", 0.0)
    if keys.has("rope.scaling.yarn_log_multiplier"):
        yarn["mscale"] = yarn["mscale_all_dim"] = 10 * keys.number("rope.scaling.yarn_log_multiplier", 0.1)
    return yarn


GGUF_STEMS = STEMS | {  # newer files have kv_b in two, k_b transposed per head
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}

FAMILIES = (
    Family(("deepseek_v2",), deepseek_v2, (NAMES,)),
    Family(("deepseek_v3", "kimi_k2"), deepseek_v3, (NAMES,), Gguf("deepseek2", gguf_config, GGUF_STEMS)),
    Family(("kimi_k25",), kimi_k25, (NAMES,)),
)
