"""One function per model family: its `config.json` keys → `ModelConfig`.

Sizes must be present. Flags that are absent take the value the family's Transformers class has for them,
since that is what the checkpoint was saved against. What we do not compute is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from tandem.config.json_keys import JsonKeys
from tandem.config.latent import latent_config, latent_rope
from tandem.config.model_config import DENSE, AttentionConfig, ModelConfig, MoEConfig, RouterConfig
from tandem.errors import ConfigError

QkNorm = Literal["none", "head", "width"]


def qwen2_moe(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    attention = _attention(keys, qkv_bias=keys.optional("qkv_bias", True), windows=_qwen2_windows(keys))
    moe = _moe(keys, _softmax_router(keys, "num_experts", keys.optional("norm_topk_prob", False)),
               layers=_sparse_step_layers(keys), width=keys.size("moe_intermediate_size", 1408),
               shared_width=keys.size("shared_expert_intermediate_size", 5632), shared_gate=True)  # fmt: skip
    return _model(keys, generation, attention, moe)


def qwen3_moe(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    bias = keys.optional("attention_bias", False)
    window = keys.optional("sliding_window", 0) if keys.optional("use_sliding_window", False) else 0
    attention = _attention(
        keys, qkv_bias=bias, out_bias=bias, qk_norm="head", windows=_same_window(keys, window)
    )
    router = _softmax_router(keys, "num_experts", keys.optional("norm_topk_prob", False), "num_local_experts")
    moe = _moe(keys, router, layers=_sparse_step_layers(keys), width=keys.size("moe_intermediate_size", 768))
    return _model(keys, generation, attention, moe)


def glm4_moe(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    qk_norm: QkNorm = "head" if keys.optional("use_qk_norm", False) else "none"
    attention = _attention(
        keys, qkv_bias=keys.optional("attention_bias", False), qk_norm=qk_norm, rotary_share=0.5
    )
    router = RouterConfig(
        num_experts=keys.size("n_routed_experts", 128, "num_local_experts"),
        top_k=keys.size("num_experts_per_tok", 8),
        score="sigmoid",
        normalize=keys.optional("norm_topk_prob", True),
        scale=keys.optional("routed_scaling_factor", 1.0),
        num_groups=keys.optional("n_group", 1),
        top_groups=keys.optional("topk_group", 1),
        has_bias=True,
        float32_logits=True,
        epsilon=1e-20,
    )
    width = keys.size("moe_intermediate_size", 1408)
    dense_layers = keys.optional("first_k_dense_replace", 1)
    moe = _moe(keys, router, layers=tuple(range(dense_layers, _layers(keys))), width=width,
               shared_width=width * keys.optional("n_shared_experts", 1))  # fmt: skip
    return _model(keys, generation, attention, moe)


def mixtral(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    attention = _attention(keys, windows=_same_window(keys, keys.optional("sliding_window", 0)))
    router = _softmax_router(keys, "num_local_experts", True, "num_experts")
    width = keys.size("intermediate_size", 14336)
    moe = _moe(keys, router, layers=tuple(range(_layers(keys))), width=width)
    return _model(keys, generation, attention, moe)


def olmoe(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    bias = keys.optional("attention_bias", False)
    attention = _attention(
        keys, qkv_bias=bias, out_bias=bias, qk_norm="width", clip=keys.optional("clip_qkv", 0.0)
    )
    router = _softmax_router(keys, "num_experts", keys.optional("norm_topk_prob", False), "num_local_experts")
    moe = _moe(keys, router, layers=tuple(range(_layers(keys))),
               width=keys.size("intermediate_size", 1024))  # fmt: skip
    return _model(keys, generation, attention, moe)


def llama(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    bias = keys.optional("attention_bias", False)
    keys.only("mlp_bias", False, "feed-forward matrices have no bias")
    return _model(keys, generation, _attention(keys, qkv_bias=bias, out_bias=bias), DENSE)


def deepseek_v2(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("norm_topk_prob", False, "DeepSeek-V2 does not normalise")
    keys.only("scoring_func", "softmax", "DeepSeek-V2's")
    method = keys.optional("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"config.json: topk_method {method!r} is not DeepSeek-V2's; try 'group_limited_greedy'"
        )
    grouped = method == "group_limited_greedy"
    router = replace(
        _deepseek_router(keys, grouped), score="softmax", normalize=False, group_score="max", has_bias=False,
        scale=keys.optional("routed_scaling_factor", 1.0),
    )  # fmt: skip
    return _deepseek(keys, generation, router, dense_layers=0, shared=2)


def deepseek_v3(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("scoring_func", "sigmoid", "DeepSeek-V3's")
    keys.only("topk_method", "noaux_tc", "DeepSeek-V3's")
    keys.only("rope_interleave", True, "rotary channels are pairs of neighbours")
    return _deepseek(keys, generation, _deepseek_router(keys, True), dense_layers=3, shared=1)


def kimi_k2(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    return deepseek_v3(keys, generation)


FAMILIES: Mapping[str, Callable[[JsonKeys, JsonKeys], ModelConfig]] = {
    family.__name__: family
    for family in (qwen2_moe, qwen3_moe, glm4_moe, mixtral, olmoe, llama, deepseek_v2, deepseek_v3, kimi_k2)
}


# -- pieces that families share ---


def _layers(keys: JsonKeys) -> int:
    return keys.size("num_hidden_layers", 24, most=10_000)


def _model(keys: JsonKeys, generation: JsonKeys, attention: AttentionConfig, moe: MoEConfig) -> ModelConfig:
    keys.only("hidden_act", "silu", "experts are SwiGLU")
    return ModelConfig(
        model_type=keys["model_type"],
        hidden=keys.size("hidden_size", 2048),
        layers=_layers(keys),
        vocab=keys.size("vocab_size", 151936),
        rms_eps=keys.need("rms_norm_eps", 1e-6),
        dense_width=keys.size("intermediate_size", 5632),
        tied_embeddings=keys.optional("tie_word_embeddings", False),
        max_positions=keys.size("max_position_embeddings", 32768),
        attention=attention,
        moe=moe,
        eos_ids=generation.integers("eos_token_id") or keys.integers("eos_token_id"),
        unread_keys=keys.unread,
    )


def _attention(
    keys: JsonKeys,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: QkNorm = "none",
    windows: tuple[int, ...] = (),
    clip: float = 0.0,
    rotary_share: float = 1.0,
) -> AttentionConfig:
    heads = keys.size("num_attention_heads", 16)
    kv_heads = keys.optional("num_key_value_heads", heads)
    head_dim = keys.optional("head_dim", keys.size("hidden_size", 2048) // heads)
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"config.json: num_key_value_heads {kv_heads} does not divide {heads} heads")
    theta, rotary_dim = _rope(keys, head_dim, rotary_share)
    windows = windows or (0,) * _layers(keys)
    return AttentionConfig(
        heads, kv_heads, head_dim, rotary_dim, theta, qkv_bias, out_bias, qk_norm, windows, clip
    )


def _rope(keys: JsonKeys, head_dim: int, default_share: float) -> tuple[float, int]:
    """(theta, rotary_dim) from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    rope = keys.mapping("rope_parameters") or keys.mapping("rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; 'default' is")
    merged = keys.overlaid(rope)
    theta = merged.need("rope_theta", 10000.0)
    share = merged.optional("partial_rotary_factor", default_share)
    if share != 1.0 and default_share == 1.0:
        raise ConfigError(f"config.json: partial_rotary_factor {share} is not part of this family; 1.0 is")
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(f"config.json: {rotary_dim} rotary channels of {head_dim} must be even")
    return theta, rotary_dim


def _deepseek(
    keys: JsonKeys, generation: JsonKeys, router: RouterConfig, *, dense_layers: int, shared: int
) -> ModelConfig:
    """`dense_layers` and `shared`: what absent first_k_dense_replace and n_shared_experts mean."""
    keys.only("moe_layer_freq", 1, "all layers after the dense ones are MoE")
    first, width = (
        keys.optional("first_k_dense_replace", dense_layers),
        keys.size("moe_intermediate_size", 2048),
    )
    moe = _moe(keys, router, layers=tuple(range(first, _layers(keys))), width=width,
               shared_width=width * keys.optional("n_shared_experts", shared))  # fmt: skip
    return _model(keys, generation, _latent_attention(keys), moe)


def _latent_attention(keys: JsonKeys) -> AttentionConfig:
    heads, bias = keys.size("num_attention_heads", 128), keys.optional("attention_bias", False)
    keys.get("num_key_value_heads")  # as many as heads, all made from one latent
    latent, (theta, yarn) = latent_config(keys), latent_rope(keys)
    return AttentionConfig(
        heads, 1, latent.rope_dim + latent.kv_rank, latent.rope_dim, theta, bias, bias, "none",
        windows=(0,) * _layers(keys), latent=latent, yarn=yarn,
    )  # fmt: skip


def _deepseek_router(keys: JsonKeys, grouped: bool) -> RouterConfig:
    """DeepSeek-V3's: sigmoid, chosen with a bias, from the best groups."""
    groups, kept = (
        keys.optional("n_group", 8 if grouped else 1),
        keys.optional("topk_group", 4 if grouped else 1),
    )
    return RouterConfig(
        num_experts=keys.size("n_routed_experts", 256, "num_local_experts"),
        top_k=keys.size("num_experts_per_tok", 8),
        score="sigmoid",
        normalize=keys.optional("norm_topk_prob", True),
        scale=keys.optional("routed_scaling_factor", 2.5),
        num_groups=groups if grouped else 1,
        top_groups=kept if grouped else 1,
        has_bias=True,
        float32_logits=True,
        epsilon=1e-20,
    )


def _softmax_router(keys: JsonKeys, experts_key: str, normalize: bool, *aliases: str) -> RouterConfig:
    num_experts = keys.size(experts_key, 64, *aliases)
    return RouterConfig(num_experts, keys.size("num_experts_per_tok", 8), "softmax", normalize)


def _moe(
    keys: JsonKeys,
    router: RouterConfig,
    *,
    layers: tuple[int, ...],
    width: int,
    shared_width: int = 0,
    shared_gate: bool = False,
) -> MoEConfig:
    experts, top_k, groups, top_groups = (
        router.num_experts,
        router.top_k,
        router.num_groups,
        router.top_groups,
    )
    if top_k > experts:
        raise ConfigError(f"config.json: num_experts_per_tok {top_k} is more than the {experts} experts")
    if (
        groups < 1
        or experts % groups
        or not 1 <= top_groups <= groups
        or top_k > top_groups * (experts // groups)
    ):
        raise ConfigError(f"config.json: n_group {groups}, topk_group {top_groups} do not fit")
    if groups > 1 and experts // groups < 2:
        raise ConfigError(f"config.json: n_group {groups} leaves groups of one; try {experts // 2}")
    if not layers:
        raise ConfigError("config.json: no layer is MoE; this is a dense model")
    return MoEConfig(layers, width, shared_width, shared_gate and shared_width > 0, router)


def _sparse_step_layers(keys: JsonKeys) -> tuple[int, ...]:
    """Qwen: every `decoder_sparse_step`-th layer, except those of `mlp_only_layers`."""
    step = keys.optional("decoder_sparse_step", 1)
    dense = set(keys.integers("mlp_only_layers"))
    if step < 1:
        raise ConfigError(f"config.json: decoder_sparse_step is {step}, and must be at least 1")
    return tuple(i for i in range(_layers(keys)) if i not in dense and (i + 1) % step == 0)


def _same_window(keys: JsonKeys, window: int) -> tuple[int, ...]:
    return (window,) * _layers(keys)


def _qwen2_windows(keys: JsonKeys) -> tuple[int, ...]:
    """Qwen2: `layer_types` says which layers slide; without it every other one below `max_window_layers`."""
    layers = _layers(keys)
    if not keys.optional("use_sliding_window", False):
        keys.get("sliding_window"), keys.get("layer_types")
        return (0,) * layers
    window, last = keys.size("sliding_window", 4096), keys.optional("max_window_layers", 28)
    kinds = keys.get("layer_types") or [
        "sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(layers)
    ]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(
            f"config.json: layer_types must be a list of {layers}, one for each layer; or remove it"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
