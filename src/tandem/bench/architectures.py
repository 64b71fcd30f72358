"""Dimensions of real models by name, for measurements with made-up weights. qwen3-512e is none: Qwen3-MoE with the
expert shape of Qwen3-Next."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from tandem.architectures.load import config_from_dict
from tandem.errors import ConfigError
from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import StoredFormats


def _qwen3(
    hidden: int, layers: int, heads: int, kv_heads: int, experts: int, top_k: int, width: int
) -> dict[str, object]:
    return {
        "model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "num_experts": experts, "num_experts_per_tok": top_k,
        "moe_intermediate_size": width, "intermediate_size": 3 * hidden, "norm_topk_prob": True, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    }  # fmt: skip


def _without(config: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in config.items() if name != key}


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
        "rope_theta": 1e6, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1,
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


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _mixtral(
    hidden: int, layers: int, heads: int, width: int, vocab: int, positions: int
) -> dict[str, object]:
    return {
        "model_type": "mixtral", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": width,
        "vocab_size": vocab, "max_position_embeddings": positions, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, object]:
    return {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": layers, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4,
        "intermediate_size": 2880, "sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": True,
        "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip


CONFIGS = {
    "qwen3-30b-a3b": _qwen3(2048, 48, 32, 4, 128, 8, 768),
    "qwen3-235b-a22b": _qwen3(4096, 94, 64, 4, 128, 8, 1536),
    "qwen3-coder-480b-a35b": _qwen3(6144, 62, 96, 8, 160, 8, 2560),
    "glm-4.5-air": _glm(4096, 46, 1, 128, 1408, 10944, False, 1.0),
    "glm-4.6": _glm(5120, 92, 3, 160, 1536, 12288, True, 2.5),
    "deepseek-v4-flash": {
        "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "o_groups": 8,
        "o_lora_rank": 1024, "sliding_window": 128, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "index_topk": 512,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "num_hash_layers": 3, "hc_mult": 4, "hc_sinkhorn_iters": 20, "vocab_size": 129280, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1048576, "expert_dtype": "fp4", "rope_scaling": {
            "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536, "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    },
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "mixtral-8x7b": _mixtral(4096, 32, 32, 14336, 32000, 32768),
    "mixtral-8x22b": _mixtral(6144, 56, 48, 16384, 32768, 65536),
    "olmoe-1b-7b": {
        "model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 1024,
        "vocab_size": 50304, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    },
    "qwen2-57b-a14b": {
        "model_type": "qwen2_moe", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480, "intermediate_size": 18944, "vocab_size": 151936,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    },
    "qwen3-next-80b": _qwen3(2048, 48, 16, 2, 512, 10, 512) | {
        "model_type": "qwen3_next", "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "shared_expert_intermediate_size": 512,
        "intermediate_size": 5120, "max_position_embeddings": 262144, "rope_theta": 1e7,
    },
    "qwen3.5-35b-a3b": _without(_qwen3(2048, 40, 16, 2, 256, 8, 512), "norm_topk_prob") | {
        "model_type": "qwen3_5_moe_text", "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144,
        "vocab_size": 248320, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        },
    },
    "qwen3-512e": _qwen3(2048, 48, 32, 4, 512, 10, 512),
    "deepseek-v3": _latent(
        7168, 61, 3, 128, 1536, 256, 8, 2048, model_type="deepseek_v3", n_shared_experts=1, intermediate_size=18432,
        num_nextn_predict_layers=1,
        n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5, vocab_size=129280,
        max_position_embeddings=163840, rope_theta=1e4, rope_scaling=_yarn(40.0, 32.0), quantization_config=_FP8,
    ),
    "deepseek-v32": _latent(
        7168, 61, 3, 128, 1536, 256, 8, 2048, model_type="deepseek_v32", n_shared_experts=1, intermediate_size=18432,
        num_nextn_predict_layers=1,
        n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5, vocab_size=129280,
        max_position_embeddings=163840, rope_theta=1e4, rope_scaling=_yarn(40.0, 32.0), index_n_heads=64,
        index_head_dim=128, index_topk=2048, quantization_config=_FP8,
    ),
    "glm-5": _latent(
        6144, 78, 3, 64, 2048, 256, 8, 2048, model_type="glm_moe_dsa", n_shared_experts=1, intermediate_size=12288,
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, vocab_size=154880, v_head_dim=256,
        qk_nope_head_dim=192, max_position_embeddings=202752, rms_norm_eps=1e-5, index_n_heads=32, index_head_dim=128,
        index_topk=2048, indexer_rope_interleave=True, quantization_config=_FP8,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    ),
    "kimi-k2": _latent(
        7168, 61, 1, 64, 1536, 384, 8, 2048, model_type="kimi_k2", n_shared_experts=1, intermediate_size=18432,
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827, vocab_size=163840,
        max_position_embeddings=131072, rope_theta=5e4, rope_scaling=_yarn(32.0, 1.0), quantization_config=_FP8,
    ),
    "ling-3.0-flash": {
        "model_type": "bailing_hybrid", "hidden_size": 2560, "num_hidden_layers": 42, "num_attention_heads": 32,
        "num_key_value_heads": 32, "layer_group_size": 6, "head_dim": 128, "short_conv_kernel_size": 4,
        "kda_safe_gate": True, "kda_lower_bound": -5.0, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 512,
        "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 768, "intermediate_size": 6144,
        "first_k_dense_replace": 2, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "vocab_size": 157184, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "rope_theta": 6e6, "num_nextn_predict_layers": 1,
    },
    "glm-5.3-flash": {
        "model_type": "glm5_next", "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_kpool": 4, "linear_attn_config": {
            "num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        },
        "n_routed_experts": 288, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "intermediate_size": 12288, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "vocab_size": 154880, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 1,
    },
    "qwen3.8-flash-next": {
        "model_type": "qwen4_exp", "hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 24,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640,
        "output_gate_type": "sigmoid", "hc_count": 4, "hc_lowrank": 320, "indexer_n_heads": 4, "indexer_kv_heads": 1,
        "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4, "full_attention_interval": 4,
        "ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128, "eos_token_id": 248044,
        "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "mtp_num_hidden_layers": 1, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
    },
    "deepseek-v2-lite": _latent(
        2048, 27, 1, 16, None, 64, 6, 1408, model_type="deepseek_v2", n_shared_experts=2, intermediate_size=10944,
        topk_method="greedy", vocab_size=102400, max_position_embeddings=163840, rope_theta=1e4,
    ),
}  # fmt: skip


CONFIGS["deepseek-v4-flash-0731"] = CONFIGS["deepseek-v4-flash"] | {
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0], "dspark_block_size": 5, "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42], "dspark_markov_rank": 256,
}  # fmt: skip

_CHANNEL_FP8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    }},
}  # fmt: skip
for _name in (
    "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-coder-480b-a35b", "qwen3-next-80b", "qwen3.5-35b-a3b", "glm-5.3-flash",
):  # fmt: skip
    CONFIGS[f"{_name}-fp8"] = CONFIGS[_name] | {"quantization_config": _FP8}
for _name in ("glm-4.5-air", "glm-4.6"):
    CONFIGS[f"{_name}-fp8"] = CONFIGS[_name] | {"quantization_config": _CHANNEL_FP8}
NAMES = ", ".join(CONFIGS)


def named_like(model: str) -> str | None:
    """The name whose sizes a model of the hub has: `qwen3-30b-a3b-fp8` for `Qwen/Qwen3-30B-A3B-Instruct-2507-FP8`."""
    words = _words(model.rpartition("/")[2])
    fp8 = "fp8" in words
    matches = [name for name in CONFIGS if words[: len(_words(name))] == _words(name)]
    name = max(matches, key=len, default=None)
    return f"{name}-fp8" if fp8 and f"{name}-fp8" in CONFIGS else name


def _words(name: str) -> list[str]:
    return re.split("[-:@]", name.lower().replace(".", ""))


def named_config(name: str, layers: int | None) -> ModelConfig:
    """The architecture, with its first `layers` layers only, dense and MoE ones in the order that it has them in."""
    return config_from_dict(named_keys(name, layers))


def named_keys(name: str, layers: int | None) -> dict[str, object]:
    """As `named_config`, as its config.json has it. A draft that reads last layers reads the last of those."""
    full_name = name if name in CONFIGS else named_like(name)
    if full_name is None:
        raise ConfigError(f"--config {name!r} is not known; these are: {NAMES}")
    keys = CONFIGS[full_name]
    if layers is None:
        return keys
    ids = keys.get("dspark_target_layer_ids")
    last = {"dspark_target_layer_ids": list(range(layers))[-len(ids) :]} if isinstance(ids, list) else {}
    return keys | last | {"num_hidden_layers": layers}


def named_subject(name: str) -> tuple[ModelConfig, StoredFormats]:
    """The architecture, and how its published checkpoint stores it. Raises ConfigError."""
    keys = named_keys(name, None)
    model = config_from_dict(keys)
    if "quantization_config" not in keys:
        return model, StoredFormats()
    from tandem.checkpoint.metadata.from_names import (
        formats_from_names,  # torch: names alone must not load it
    )

    with tempfile.TemporaryDirectory(prefix="tandem-plan-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(keys))
        return model, formats_from_names(Path(folder), model)
