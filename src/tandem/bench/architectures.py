"""Dimensions of real models by name, for measurements with made-up weights. qwen3-512e is none: Qwen3-MoE with the
expert shape of Qwen3-Next."""

from __future__ import annotations

from tandem.config import ModelConfig
from tandem.errors import ConfigError


def _qwen3(
    hidden: int, layers: int, heads: int, kv_heads: int, experts: int, top_k: int, width: int
) -> dict[str, object]:
    return {
        "model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "num_experts": experts, "num_experts_per_tok": top_k,
        "moe_intermediate_size": width, "intermediate_size": 3 * hidden, "norm_topk_prob": True, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    }  # fmt: skip


def _glm(
    hidden: int,
    layers: int,
    dense: int,
    experts: int,
    width: int,
    dense_width: int,
    qk_norm: bool,
    scale: float,
) -> dict[str, object]:
    return {
        "model_type": "glm4_moe", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": experts, "num_experts_per_tok": 8,
        "moe_intermediate_size": width, "intermediate_size": dense_width, "first_k_dense_replace": dense,
        "n_shared_experts": 1, "use_qk_norm": qk_norm, "attention_bias": True, "routed_scaling_factor": scale,
        "norm_topk_prob": True, "vocab_size": 151552, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    }  # fmt: skip


def _yarn(factor: float, beta_fast: float) -> dict[str, object]:
    return {
        "type": "yarn", "factor": factor, "original_max_position_embeddings": 4096, "beta_fast": beta_fast,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip


def _latent(
    hidden: int, layers: int, dense: int, heads: int, q_rank: int | None, experts: int, top_k: int, width: int,
    **more: object,
) -> dict[str, object]:  # fmt: skip
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "first_k_dense_replace": dense,
        "num_attention_heads": heads, "q_lora_rank": q_rank, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": experts, "num_experts_per_tok": top_k,
        "moe_intermediate_size": width, "rms_norm_eps": 1e-6,
    } | more  # fmt: skip


CONFIGS = {
    "qwen3-30b-a3b": _qwen3(2048, 48, 32, 4, 128, 8, 768),
    "qwen3-235b-a22b": _qwen3(4096, 94, 64, 4, 128, 8, 1536),
    "glm-4.5-air": _glm(4096, 46, 1, 128, 1408, 10944, False, 1.0),
    "glm-4.6": _glm(5120, 92, 3, 160, 1536, 12288, True, 2.5),
    "qwen3-512e": _qwen3(2048, 48, 32, 4, 512, 10, 512),
    "deepseek-v3": _latent(
        7168, 61, 3, 128, 1536, 256, 8, 2048, model_type="deepseek_v3", n_shared_experts=1, intermediate_size=18432,
        n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5, vocab_size=129280,
        max_position_embeddings=163840, rope_theta=1e4, rope_scaling=_yarn(40.0, 32.0),
    ),
    "kimi-k2": _latent(
        7168, 61, 1, 64, 1536, 384, 8, 2048, model_type="kimi_k2", n_shared_experts=1, intermediate_size=18432,
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827, vocab_size=163840,
        max_position_embeddings=131072, rope_theta=5e4, rope_scaling=_yarn(32.0, 1.0),
    ),
    "deepseek-v2-lite": _latent(
        2048, 27, 1, 16, None, 64, 6, 1408, model_type="deepseek_v2", n_shared_experts=2, intermediate_size=10944,
        topk_method="greedy", vocab_size=102400, max_position_embeddings=163840, rope_theta=1e4,
    ),
}  # fmt: skip


NAMES = ", ".join(CONFIGS)


def named_config(name: str, layers: int | None) -> ModelConfig:
    """The architecture, with its first `layers` layers only, dense and MoE ones in the order that it has them in."""
    if name not in CONFIGS:
        raise ConfigError(f"--config {name!r} is not known; these are: {NAMES}")
    keys = CONFIGS[name] | ({} if layers is None else {"num_hidden_layers": layers})
    return ModelConfig.from_dict(keys)
