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


CONFIGS = {
    "qwen3-30b-a3b": _qwen3(2048, 48, 32, 4, 128, 8, 768),
    "qwen3-235b-a22b": _qwen3(4096, 94, 64, 4, 128, 8, 1536),
    "glm-4.5-air": _glm(4096, 46, 1, 128, 1408, 10944, False, 1.0),
    "glm-4.6": _glm(5120, 92, 3, 160, 1536, 12288, True, 2.5),
    "qwen3-512e": _qwen3(2048, 48, 32, 4, 512, 10, 512),
}


NAMES = ", ".join(CONFIGS)


def named_config(name: str, layers: int | None) -> ModelConfig:
    """The architecture, with its first `layers` layers only."""
    if name not in CONFIGS:
        raise ConfigError(f"--config {name!r} is not known; these are: {NAMES}")
    keys = CONFIGS[name] | ({} if layers is None else {"num_hidden_layers": layers})
    return ModelConfig.from_dict(keys)
