"""Tiny random models of every family, as Transformers saves them: the oracle of our own model code.

Sizes are deliberately awkward: no power of two, no multiple of a panel, of a group or of a vector.
"""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

from reference_config import reference_config

BOS, EOS = 256, 257
VOCAB = 263  # 256 bytes, <bos>, <eos>, and five that no text has

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # it only knows it beside images
with suppress(ImportError):  # Transformers 5.17 has no such model
    from glm5_text import Glm5NextTextLM

    AutoModelForCausalLM.register(Glm5NextTextLM.config_class, Glm5NextTextLM, exist_ok=True)  # likewise


def settings(**keys: object) -> dict[str, object]:
    return keys


COMMON = settings(
    vocab_size=VOCAB, hidden_size=72, num_hidden_layers=3, max_position_embeddings=128, num_experts_per_tok=3,
    bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS, initializer_range=0.15,
)  # fmt: skip

STEPS = settings(time_step_min=1e-9, time_step_floor=1e-3)
"""Of state spaces: Transformers does not let those of prompts be smaller, which decoding rows' may."""

# name of the variant: (model_type, what differs from COMMON)
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2_moe": ("qwen2_moe", settings(
        num_attention_heads=6, num_key_value_heads=2, num_experts=10, moe_intermediate_size=20,
        shared_expert_intermediate_size=60, intermediate_size=44, mlp_only_layers=[1], norm_topk_prob=False,
    )),
    "qwen2_moe-window": ("qwen2_moe", settings(
        num_attention_heads=6, num_key_value_heads=2, num_experts=10, moe_intermediate_size=20,
        shared_expert_intermediate_size=50, intermediate_size=44, decoder_sparse_step=2, norm_topk_prob=True,
        use_sliding_window=True, sliding_window=9, max_window_layers=2,
    )),
    "qwen3_moe": ("qwen3_moe", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, num_experts=12, moe_intermediate_size=28,
        intermediate_size=52, norm_topk_prob=True, attention_bias=True, rope_theta=5000.0,
    )),
    "qwen3_moe-tied": ("qwen3_moe", settings(
        num_attention_heads=6, num_key_value_heads=3, head_dim=16, num_experts=7, moe_intermediate_size=36,
        intermediate_size=52, norm_topk_prob=False, tie_word_embeddings=True,
    )),
    "qwen3_moe-gpu": ("qwen3_moe", settings(
        num_attention_heads=8, num_key_value_heads=2, head_dim=32, num_experts=16, moe_intermediate_size=40,
        intermediate_size=52, norm_topk_prob=True, mlp_only_layers=[1],
    )),
    "glm4_moe": ("glm4_moe", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, n_routed_experts=12, n_shared_experts=2,
        moe_intermediate_size=28, intermediate_size=60, first_k_dense_replace=1, n_group=4, topk_group=2,
        routed_scaling_factor=1.7, use_qk_norm=True, num_mtp_layers=0,
    )),
    "glm4_moe-plain": ("glm4_moe", settings(
        num_attention_heads=3, num_key_value_heads=1, head_dim=24, n_routed_experts=9, n_shared_experts=1,
        moe_intermediate_size=20, intermediate_size=60, first_k_dense_replace=0, norm_topk_prob=False,
        attention_bias=True, num_mtp_layers=0,
        rope_parameters=settings(rope_type="default", rope_theta=3000.0, partial_rotary_factor=1.0),
    )),
    "solar_open": ("solar_open", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, n_routed_experts=12, n_shared_experts=1,
        moe_intermediate_size=28, n_group=4, topk_group=2, routed_scaling_factor=1.7, attention_bias=True,
    )),
    "deepseek_v3": ("deepseek_v3", settings(
        num_attention_heads=5, num_key_value_heads=5, q_lora_rank=38, kv_lora_rank=42, qk_nope_head_dim=18,
        qk_rope_head_dim=12, v_head_dim=22, n_routed_experts=12, n_shared_experts=2, moe_intermediate_size=28,
        intermediate_size=60, first_k_dense_replace=1, n_group=4, topk_group=2, num_mtp_layers=0,
        rope_parameters=settings(rope_type="yarn", rope_theta=3000.0, factor=4.0, mscale=1.0, mscale_all_dim=0.8,
                                 original_max_position_embeddings=32, beta_fast=32, beta_slow=1),
    )),
    "deepseek_v3-plain": ("deepseek_v3", settings(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=33, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=9, n_shared_experts=1, moe_intermediate_size=20,
        intermediate_size=60, first_k_dense_replace=0, n_group=1, topk_group=1, norm_topk_prob=False,
        attention_bias=True, num_mtp_layers=0,
        rope_parameters=settings(rope_type="default", rope_theta=3000.0),
    )),
    "deepseek_v2": ("deepseek_v2", settings(
        num_attention_heads=6, num_key_value_heads=6, q_lora_rank=40, kv_lora_rank=32, qk_nope_head_dim=20,
        qk_rope_head_dim=16, v_head_dim=12, n_routed_experts=12, n_shared_experts=2, moe_intermediate_size=24,
        intermediate_size=52, first_k_dense_replace=1, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=1.9,
        rope_parameters=settings(rope_type="yarn", rope_theta=10000.0, factor=40.0, mscale=0.707,
                                 mscale_all_dim=0.707, original_max_position_embeddings=64, beta_fast=32, beta_slow=1),
    )),
    "deepseek_v2-greedy": ("deepseek_v2", settings(
        num_attention_heads=3, num_key_value_heads=3, q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=12,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=20,
        intermediate_size=52, first_k_dense_replace=0, topk_method="greedy",
        rope_parameters=settings(rope_type="default", rope_theta=10000.0),
    )),
    "glm4_moe_lite": ("glm4_moe_lite", settings(
        num_attention_heads=5, num_key_value_heads=5, q_lora_rank=38, kv_lora_rank=42, qk_nope_head_dim=18,
        qk_rope_head_dim=12, v_head_dim=22, n_routed_experts=12, n_shared_experts=2, moe_intermediate_size=28,
        intermediate_size=60, n_group=4, topk_group=2,
        rope_parameters=settings(rope_type="default", rope_theta=3000.0),
    )),
    "glm4_moe_lite-plain": ("glm4_moe_lite", settings(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=33, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=9, n_shared_experts=1, moe_intermediate_size=20,
        intermediate_size=60, norm_topk_prob=False, attention_bias=True, mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters=settings(rope_type="default", rope_theta=3000.0),
    )),
    "dots1": ("dots1", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, n_routed_experts=12, n_shared_experts=2,
        moe_intermediate_size=28, intermediate_size=60, first_k_dense_replace=1, n_group=4, topk_group=2,
        routed_scaling_factor=1.7, norm_topk_prob=True, sliding_window=None,
    )),
    "dots1-window": ("dots1", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, n_routed_experts=9, n_shared_experts=1,
        moe_intermediate_size=20, intermediate_size=44, first_k_dense_replace=0, attention_bias=True,
        sliding_window=9, max_window_layers=2,
    )),
    "minimax_m2": ("minimax_m2", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_local_experts=10, intermediate_size=28,
        rotary_dim=8,
    )),
    "minimax_m2-whole": ("minimax_m2", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, num_local_experts=7, intermediate_size=20,
        rope_parameters=settings(rope_type="default", rope_theta=5000.0),
    )),
    "hy_v3": ("hy_v3", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_experts=12, num_shared_experts=2,
        moe_intermediate_size=28, intermediate_size=60, num_nextn_predict_layers=0,
    )),
    "hy_v3-bias": ("hy_v3", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, num_experts=7, num_shared_experts=1,
        moe_intermediate_size=20, intermediate_size=44, attention_bias=True, router_scaling_factor=1.3,
        mlp_layer_types=["sparse", "dense", "sparse"],
    )),
    "deepseek_v32": ("deepseek_v32", settings(
        num_attention_heads=5, num_key_value_heads=5, q_lora_rank=38, kv_lora_rank=42, qk_nope_head_dim=18,
        qk_rope_head_dim=12, v_head_dim=22, n_routed_experts=12, n_shared_experts=2, moe_intermediate_size=28,
        intermediate_size=60, first_k_dense_replace=1, n_group=4, topk_group=2, index_n_heads=20, index_head_dim=18,
        index_topk=9,
        rope_parameters=settings(rope_type="yarn", rope_theta=3000.0, factor=4.0, mscale=1.0, mscale_all_dim=0.8,
                                 original_max_position_embeddings=32, beta_fast=32, beta_slow=1),
    )),
    "deepseek_v32-short": ("deepseek_v32", settings(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=33, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=9, n_shared_experts=1, moe_intermediate_size=20,
        intermediate_size=60, first_k_dense_replace=0, n_group=1, topk_group=1, attention_bias=True, index_n_heads=12,
        index_head_dim=16, index_topk=64, rope_parameters=settings(rope_type="default", rope_theta=3000.0),
    )),
    "glm_moe_dsa": ("glm_moe_dsa", settings(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=30, kv_lora_rank=32,
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20, n_routed_experts=10, n_shared_experts=1,
        moe_intermediate_size=24, intermediate_size=52, mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        index_n_heads=16, index_head_dim=24, index_topk=7, indexer_types=["full", "shared", "full", "shared"],
        rms_norm_eps=1e-5, rope_parameters=settings(rope_type="default", rope_theta=5000.0),
    )),
    "glm_moe_dsa-every": ("glm_moe_dsa", settings(
        num_attention_heads=18, num_key_value_heads=18, q_lora_rank=40, kv_lora_rank=24, qk_nope_head_dim=8,
        qk_rope_head_dim=16, v_head_dim=12, n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=20,
        intermediate_size=52, first_k_dense_replace=1, index_n_heads=33, index_head_dim=16, index_topk=16,
        rope_parameters=settings(rope_type="default", rope_theta=10000.0),
    )),
    "mistral4": ("mistral4", settings(
        num_attention_heads=5, num_key_value_heads=5, q_lora_rank=38, kv_lora_rank=42, qk_nope_head_dim=18,
        qk_rope_head_dim=12, v_head_dim=22, n_routed_experts=12, n_shared_experts=2, moe_intermediate_size=28,
        intermediate_size=60, first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=1.4,
        rope_parameters=settings(rope_type="yarn", rope_theta=3000.0, factor=4.0, mscale=1.0, mscale_all_dim=0.8,
                                 original_max_position_embeddings=8, beta_fast=32, beta_slow=1,
                                 llama_4_scaling_beta=0.3),
    )),
    "mistral4-plain": ("mistral4", settings(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=33, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=9, n_shared_experts=1, moe_intermediate_size=20,
        intermediate_size=60, norm_topk_prob=False, attention_bias=True,
        rope_parameters=settings(rope_type="yarn", rope_theta=3000.0, factor=2.0, beta_fast=32, beta_slow=1,
                                 original_max_position_embeddings=512, llama_4_scaling_beta=0.1),
    )),
    "ernie4_5_moe": ("ernie4_5_moe", settings(
        num_attention_heads=6, num_key_value_heads=2, moe_num_experts=10, moe_k=3, moe_num_shared_experts=2,
        moe_intermediate_size=28, intermediate_size=60, moe_layer_start_index=1, moe_norm_min=0.4,
    )),
    "ernie4_5_moe-layers": ("ernie4_5_moe", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, moe_num_experts=7, moe_k=2, moe_layer_interval=2,
        moe_num_shared_experts=0, moe_intermediate_size=20, intermediate_size=44, moe_layer_start_index=0,
        num_hidden_layers=4, moe_layer_end_index=2, tie_word_embeddings=False,
    )),
    "laguna": ("laguna", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_experts=10, moe_intermediate_size=20,
        shared_expert_intermediate_size=40, intermediate_size=44, sliding_window=9, moe_routed_scaling_factor=1.6,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        num_attention_heads_per_layer=[4, 6, 6],
    )),
    "laguna-element": ("laguna", settings(
        num_attention_heads=6, num_key_value_heads=3, head_dim=16, num_experts=10, moe_intermediate_size=20,
        shared_expert_intermediate_size=40, intermediate_size=44, sliding_window=9, gating="per-element",
        num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], rope_parameters=settings(
            full_attention=settings(rope_type="yarn", rope_theta=5000.0, factor=4.0, partial_rotary_factor=0.5,
                                    original_max_position_embeddings=32, beta_fast=16.0, attention_factor=1.1),
            sliding_attention=settings(rope_type="default", rope_theta=3000.0, partial_rotary_factor=1.0)),
    )),
    "laguna-yarn": ("laguna", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, num_experts=7, moe_intermediate_size=28,
        shared_expert_intermediate_size=20, intermediate_size=44, sliding_window=16, attention_bias=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"], rope_parameters=settings(
            full_attention=settings(rope_type="yarn", rope_theta=5000.0, factor=4.0, partial_rotary_factor=1.0,
                                    original_max_position_embeddings=32),
            sliding_attention=settings(rope_type="default", rope_theta=3000.0, partial_rotary_factor=1.0)),
    )),
    "mimo_v2_flash": ("mimo_v2_flash", settings(
        num_attention_heads=8, num_key_value_heads=2, head_dim=24, v_head_dim=20, n_routed_experts=12,
        moe_intermediate_size=28, intermediate_size=60, sliding_window=9, n_group=4, topk_group=2,
        routed_scaling_factor=1.7, layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters=settings(
            full_attention=settings(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.334),
            sliding_attention=settings(rope_type="default", rope_theta=300.0, partial_rotary_factor=0.334)),
    )),
    "mimo_v2_flash-hub": ("mimo_v2_flash", settings(
        num_attention_heads=4, num_key_value_heads=1, head_dim=36, v_head_dim=22, n_routed_experts=7,
        moe_intermediate_size=20, intermediate_size=44, attention_bias=True, sliding_window_size=7,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"], attention_value_scale=None,
        mlp_layer_types=["sparse", "dense", "sparse"],
    )),
    "gemma4_text": ("gemma4_text", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, global_head_dim=24, num_global_key_value_heads=1,
        attention_k_eq_v=True, enable_moe_block=True, num_experts=10, top_k_experts=3, moe_intermediate_size=20,
        intermediate_size=44, hidden_size_per_layer_input=0, sliding_window=9, final_logit_softcapping=3.0,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )),
    "gemma4_text-plain": ("gemma4_text", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, global_head_dim=32, enable_moe_block=True,
        num_experts=7, top_k_experts=2, moe_intermediate_size=28, intermediate_size=60, hidden_size_per_layer_input=0,
        sliding_window=16, attention_bias=True, tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention", "full_attention"], rope_parameters=settings(
            full_attention=settings(rope_type="proportional", rope_theta=3000.0, partial_rotary_factor=0.5),
            sliding_attention=settings(rope_type="default", rope_theta=500.0)),
    )),
    "gemma4_text-dense": ("gemma4_text", settings(
        num_attention_heads=6, num_key_value_heads=3, head_dim=16, global_head_dim=16, intermediate_size=44,
        hidden_size_per_layer_input=0, sliding_window=7, attention_k_eq_v=True, num_global_key_value_heads=2,
    )),
    "afmoe": ("afmoe", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_experts=10, num_shared_experts=2,
        moe_intermediate_size=28, intermediate_size=60, num_dense_layers=1, sliding_window=9, route_scale=1.7,
        mup_enabled=True, num_hidden_layers=4,
    )),
    "afmoe-plain": ("afmoe", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, num_experts=7, num_shared_experts=1,
        moe_intermediate_size=20, intermediate_size=44, num_dense_layers=0, sliding_window=16, attention_bias=True,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    )),
    "exaone_moe": ("exaone_moe", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_experts=12, num_shared_experts=2,
        moe_intermediate_size=28, intermediate_size=60, n_group=4, topk_group=2, sliding_window=9,
        routed_scaling_factor=1.7, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )),
    "exaone_moe-plain": ("exaone_moe", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, num_experts=7, num_shared_experts=1,
        moe_intermediate_size=20, intermediate_size=44, sliding_window=16, norm_topk_prob=False, num_hidden_layers=4,
        sliding_window_pattern=2, mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
    )),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_experts=10, intermediate_size=28,
        rope_parameters=settings(rope_type="dynamic", rope_theta=5000.0, alpha=20.0, factor=1.0),
    )),
    "hunyuan_v1_moe-plain": ("hunyuan_v1_moe", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, num_experts=7,
        num_experts_per_tok=7, intermediate_size=20,
        attention_bias=True, tie_word_embeddings=True,  # all experts, so that no rounding changes who is chosen
    )),
    "granitemoe": ("granitemoe", settings(
        num_attention_heads=6, num_key_value_heads=2, num_local_experts=10, intermediate_size=28, logits_scaling=2.0,
        residual_multiplier=0.3, embedding_multiplier=3.0, attention_multiplier=0.2,
    )),
    "granitemoeshared": ("granitemoeshared", settings(
        num_attention_heads=6, num_key_value_heads=3, num_local_experts=7, intermediate_size=28, attention_bias=True,
        shared_intermediate_size=44, tie_word_embeddings=True, attention_multiplier=0.3,
    )),
    "granitemoehybrid": ("granitemoehybrid", settings(  # all experts, so that no rounding changes who is chosen
        num_attention_heads=6, num_key_value_heads=2, num_local_experts=10, num_experts_per_tok=10,
        intermediate_size=28, shared_intermediate_size=44, logits_scaling=2.0, residual_multiplier=0.3,
        embedding_multiplier=3.0,
        attention_multiplier=0.2, mamba_n_heads=9, mamba_d_head=16, mamba_d_state=20, mamba_n_groups=3,
        num_hidden_layers=4, layer_types=["mamba", "attention", "mamba", "mamba"],
    )),
    "granitemoehybrid-dense": ("granitemoehybrid", settings(
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=0, shared_intermediate_size=44,
        attention_multiplier=0.2, mamba_n_heads=6, mamba_d_state=16, mamba_proj_bias=True, mamba_conv_bias=False,
        mamba_d_conv=3, position_embedding_type="rope", layer_types=["attention", "mamba", "attention"],
    )),
    "nemotron_h": ("nemotron_h", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, n_routed_experts=12, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=64, n_group=4, topk_group=2, routed_scaling_factor=1.7, ssm_state_size=20,
        mamba_num_heads=6, mamba_head_dim=12, n_groups=3, chunk_size=8, num_hidden_layers=6, **STEPS,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"],
    )),
    "nemotron_h-mlp": ("nemotron_h", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, n_routed_experts=7, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=96, intermediate_size=64, ssm_state_size=16, mamba_num_heads=4,
        mamba_head_dim=20, n_groups=1, conv_kernel=3, use_conv_bias=False, use_bias=True, num_hidden_layers=5, **STEPS,
        layers_block_type=["full_attention", "mlp", "linear_attention", "moe", "linear_attention"],
    )),
    "nemotron_h-latent": ("nemotron_h", settings(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, n_routed_experts=26, num_experts_per_tok=22,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=64, moe_latent_size=40, ssm_state_size=16,
        mamba_num_heads=4, mamba_head_dim=12, n_groups=2, num_hidden_layers=4, **STEPS,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
    )),
    "kimi_linear": ("kimi_linear", settings(
        num_attention_heads=5, num_key_value_heads=5, q_lora_rank=None, kv_lora_rank=42, qk_nope_head_dim=18,
        qk_rope_head_dim=12, v_head_dim=22, num_experts=12, num_shared_experts=2, moe_intermediate_size=28,
        intermediate_size=60, num_expert_group=4, topk_group=2, linear_head_dim=20, linear_num_heads=5,
        linear_conv_kernel_dim=4, num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    )),
    "kimi_linear-short": ("kimi_linear", settings(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=33, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, num_experts=7, num_shared_experts=1, moe_intermediate_size=20,
        intermediate_size=44, moe_renormalize=False, linear_head_dim=32, linear_num_heads=3, linear_conv_kernel_dim=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"],
    )),
    "bailing_hybrid": ("bailing_hybrid", settings(
        num_attention_heads=5, num_key_value_heads=5, q_lora_rank=38, kv_lora_rank=42, qk_nope_head_dim=18,
        qk_rope_head_dim=12, v_head_dim=22, num_local_experts=12, n_shared_experts=2, moe_intermediate_size=28,
        intermediate_size=60, first_k_dense_replace=1, n_group=4, topk_group=2, head_dim=20, short_conv_kernel_size=4,
        num_hidden_layers=4, layer_group_size=2, num_mtp_layers=0, rope_parameters=settings(
            rope_type="yarn", rope_theta=3000.0, factor=4.0, mscale=1.0, mscale_all_dim=0.8,
            original_max_position_embeddings=32, beta_fast=32, beta_slow=1),
    )),
    "bailing_hybrid-plain": ("bailing_hybrid", settings(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=33, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, num_local_experts=9, n_shared_experts=1, moe_intermediate_size=20,
        intermediate_size=44, first_k_dense_replace=0, n_group=1, topk_group=1, norm_topk_prob=False, head_dim=32,
        short_conv_kernel_size=3, layer_types=["full_attention", "linear_attention", "linear_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"], attention_bias=True, kda_lower_bound=-2.5, num_mtp_layers=0,
    )),
    "bailing_hybrid-unbounded": ("bailing_hybrid", settings(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=12,
        qk_rope_head_dim=8, v_head_dim=16, num_local_experts=8, n_shared_experts=1, moe_intermediate_size=20,
        intermediate_size=44, first_k_dense_replace=1, n_group=2, topk_group=1, num_experts_per_tok=2, head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"], kda_safe_gate=False, num_mtp_layers=0,
    )),
    "glm5_next": ("glm5_next_text", settings(
        num_attention_heads=5, num_key_value_heads=5, q_lora_rank=38, kv_lora_rank=42, qk_nope_head_dim=18,
        v_head_dim=22, n_routed_experts=12, n_shared_experts=2, moe_intermediate_size=28, intermediate_size=60,
        n_group=4, topk_group=2, num_hidden_layers=4, index_n_heads=12, index_head_dim=18, index_topk=12, index_kpool=4,
        linear_num_heads=3, linear_head_dim=20, linear_conv_kernel_dim=4, swiglu_limit=0.3, rms_norm_eps=1e-5,
        layer_types=["linear_attention", "indexed_attention"] * 2,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    )),
    "glm5_next-pools": ("glm5_next_text", settings(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=33, qk_nope_head_dim=16,
        v_head_dim=16, n_routed_experts=9, n_shared_experts=1, moe_intermediate_size=20, intermediate_size=44,
        num_hidden_layers=3, index_n_heads=16, index_head_dim=16, index_topk=4, index_kpool=2, linear_num_heads=2,
        linear_head_dim=32, linear_conv_kernel_dim=3, linear_lower_bound=None, hc_mult=3, hc_sinkhorn_iters=5,
        swiglu_limit=0.5, layer_types=["indexed_attention", "linear_attention", "indexed_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"],
    )),
    "lfm2_moe": ("lfm2_moe", settings(
        num_attention_heads=6, num_key_value_heads=2, num_experts=10, moe_intermediate_size=28, intermediate_size=60,
        num_dense_layers=1, conv_L_cache=3, num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
    )),
    "lfm2_moe-bias": ("lfm2_moe", settings(
        num_attention_heads=4, num_key_value_heads=4, num_experts=7, moe_intermediate_size=20, intermediate_size=44,
        num_dense_layers=0, conv_L_cache=4, conv_bias=True, use_expert_bias=False, num_experts_per_tok=7,
        tie_word_embeddings=False, layer_types=["full_attention", "conv", "conv"],
    )),
    "mixtral": ("mixtral", settings(
        num_attention_heads=6, num_key_value_heads=2, num_local_experts=5, intermediate_size=44,
    )),
    "mixtral-window": ("mixtral", settings(
        num_attention_heads=6, num_key_value_heads=2, num_local_experts=5, intermediate_size=44, sliding_window=7,
    )),
    "olmoe": ("olmoe", settings(
        num_attention_heads=6, num_key_value_heads=3, num_experts=8, intermediate_size=28, norm_topk_prob=False,
    )),
    "olmoe-clip": ("olmoe", settings(
        num_attention_heads=6, num_key_value_heads=6, num_experts=8, intermediate_size=28, norm_topk_prob=True,
        clip_qkv=0.7, attention_bias=True,
    )),
    "qwen3_next": ("qwen3_next", settings(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=9,
        moe_intermediate_size=20, shared_expert_intermediate_size=28, intermediate_size=44, linear_num_key_heads=2,
        linear_num_value_heads=6, linear_key_head_dim=12, linear_value_head_dim=20, linear_conv_kernel_dim=4,
    )),
    "qwen3_next-dense": ("qwen3_next", settings(
        num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3, head_dim=16, num_experts=7,
        moe_intermediate_size=24, shared_expert_intermediate_size=24, intermediate_size=44, linear_num_key_heads=3,
        linear_num_value_heads=3, linear_key_head_dim=16, linear_value_head_dim=72, linear_conv_kernel_dim=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"], mlp_only_layers=[1],
        norm_topk_prob=False,
    )),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", settings(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=24, num_experts=10,
        moe_intermediate_size=28, shared_expert_intermediate_size=36, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24, linear_conv_kernel_dim=4,
    )),
    "qwen4_exp": ("qwen4_exp_text", settings(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=24, num_experts=10,
        moe_intermediate_size=28, shared_expert_intermediate_size=36, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24, linear_conv_kernel_dim=4,
        output_gate_type="sigmoid", hc_count=4, hc_lowrank=18, indexer_n_heads=12, indexer_kv_heads=1,
        indexer_head_dim=20, indexer_budget=12, indexer_compress_ratio=4, ple_layer_ids=[2], ple_embed_dim=48,
        ngram_size=3, heads_per_ngram=4, ngram_vocab_size_base=97, split_ngram_parts=2,
        layer_types=["linear_attention", "linear_attention", "indexed_attention", "indexed_attention"],
        rope_parameters=settings(rope_type="default", rope_theta=3000.0, partial_rotary_factor=0.5),
    )),
    "qwen4_exp-tables": ("qwen4_exp_text", settings(
        num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3, head_dim=16, num_experts=7,
        moe_intermediate_size=20, shared_expert_intermediate_size=24, linear_num_key_heads=3,
        linear_num_value_heads=3, linear_key_head_dim=16, linear_value_head_dim=20, linear_conv_kernel_dim=3,
        hc_count=3, hc_lowrank=22, indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=4,
        indexer_compress_ratio=2, ple_layer_ids=[1, 3], ple_embed_dim=72, ple_conv_kernel_size=3, ngram_size=4,
        heads_per_ngram=3, ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=1,
        layer_types=["linear_attention", "indexed_attention", "linear_attention"], attention_bias=True,
        rope_parameters=settings(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.25),
    )),
    "qwen3_moe-yarn": ("qwen3_moe", settings(
        num_attention_heads=4, num_key_value_heads=2, head_dim=24, num_experts=8, moe_intermediate_size=28,
        intermediate_size=52, norm_topk_prob=True,
        rope_parameters=settings(rope_type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=32),
    )),
    "llama-linear": ("llama", settings(
        num_attention_heads=6, num_key_value_heads=2, intermediate_size=44,
        rope_parameters=settings(rope_type="linear", rope_theta=10000.0, factor=3.0),
    )),
    "llama-llama3": ("llama", settings(
        num_attention_heads=6, num_key_value_heads=2, intermediate_size=44,
        rope_parameters=settings(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                                 high_freq_factor=4.0, original_max_position_embeddings=32),
    )),
    "gpt_oss": ("gpt_oss", settings(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_local_experts=9, intermediate_size=44,
        sliding_window=7, swiglu_limit=0.4,
        rope_parameters=settings(rope_type="yarn", rope_theta=5000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0,
                                 truncate=False, original_max_position_embeddings=32),
    )),
    "gpt_oss-blocks": ("gpt_oss", settings(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=6, hidden_size=64,
        intermediate_size=32, sliding_window=9,
        rope_parameters=settings(rope_type="default", rope_theta=5000.0),
    )),
    "gpt_oss-plain": ("gpt_oss", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=24, num_local_experts=5, intermediate_size=28,
        sliding_window=16, num_hidden_layers=4, attention_bias=False,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=settings(rope_type="default", rope_theta=5000.0),
    )),
    "deepseek_v4": ("deepseek_v4", settings(
        num_hidden_layers=6, num_attention_heads=6, head_dim=40, q_lora_rank=44, n_routed_experts=12,
        moe_intermediate_size=28, sliding_window=7, o_groups=3, o_lora_rank=20, index_n_heads=10, index_head_dim=28,
        index_topk=3, num_hash_layers=2, partial_rotary_factor=0.3, swiglu_limit=0.7, hc_mult=4,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        rope_parameters=settings(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32,
                                 beta_slow=1),
    )),
    "deepseek_v4-hub": ("deepseek_v4", settings(
        num_hidden_layers=4, hidden_size=64, num_attention_heads=4, head_dim=64, q_lora_rank=48, n_routed_experts=8,
        moe_intermediate_size=32, sliding_window=8, o_groups=2, o_lora_rank=32, index_n_heads=16, index_head_dim=32,
        num_experts_per_tok=8, index_topk=64, num_hash_layers=1, qk_rope_head_dim=16, compress_ratios=[0, 4, 128, 4],
        rope_parameters=settings(rope_type="yarn", factor=16.0, original_max_position_embeddings=64, beta_fast=32,
                                 beta_slow=1),
    )),
    "deepseek_v4-every": ("deepseek_v4", settings(  # chooses all of few experts and entries
        num_hidden_layers=4, hidden_size=64, num_attention_heads=4, head_dim=32, q_lora_rank=40, n_routed_experts=4,
        num_experts_per_tok=4, moe_intermediate_size=24, sliding_window=6, o_groups=2, o_lora_rank=24, index_n_heads=4,
        index_head_dim=16, index_topk=64, num_hash_layers=1, qk_rope_head_dim=8,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 1
        + ["compressed_sparse_attention"], compress_rates={"compressed_sparse_attention": 4,
                                                           "heavily_compressed_attention": 8},
    )),
    "deepseek_v4-narrow": ("deepseek_v4", settings(
        num_hidden_layers=4, num_attention_heads=4, head_dim=32, q_lora_rank=40, n_routed_experts=9,
        moe_intermediate_size=20, sliding_window=16, o_groups=2, o_lora_rank=24, index_n_heads=8, index_head_dim=16,
        index_topk=100, num_hash_layers=0, qk_rope_head_dim=8, hc_mult=3, hc_sinkhorn_iters=5,
        compress_ratios=[0, 4, 128, 4], routed_scaling_factor=2.5,
    )),
    "llama": ("llama", settings(num_attention_heads=6, num_key_value_heads=2, intermediate_size=44)),
    "llama-bias": ("llama", settings(
        num_attention_heads=4, num_key_value_heads=4, head_dim=22, intermediate_size=44, attention_bias=True,
        tie_word_embeddings=True,
    )),
}  # fmt: skip


class TinyModels:
    """Model directories by variant, saved on first use. A plain family name is a variant, too. Threads of ranks may ask
    for one at the same time: none reads what another has half written."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._saving = directory, threading.RLock()

    def __getitem__(self, variant: str) -> Path:
        """As `save_pretrained` writes it: one tensor per expert and matrix."""
        path = self._directory / variant
        with self._saving:
            if not path.exists():
                save_tiny(variant, path)
        return path

    def fused(self, variant: str) -> Path:
        """The same weights with all experts of a layer in two 3-D tensors, the names Transformers has in memory."""
        path = self._directory / f"{variant}-fused"
        with self._saving:
            if not path.exists():
                save_fused(self[variant], path)
        return path

    def unchosen(self, variant: str) -> Path:
        """The same weights, of which every token uses all experts, and looks at all pools of tokens."""
        path = self._directory / f"{variant}-unchosen"
        if not path.exists():
            shutil.copytree(self[variant], path)
            config = json.loads((path / "config.json").read_text())
            chosen = next(key for key in CHOSEN if key in config)
            config[chosen] = next(config[key] for key in EXPERT_COUNTS if config.get(key))
            for groups in {"n_group", "num_expert_group"} & set(config):
                config["topk_group"] = config[groups]
            if "index_kpool" in config:
                config["index_topk"] = 64 * config["index_kpool"]
            if "indexer_compress_ratio" in config:
                config["indexer_budget"] = 64 * config["indexer_compress_ratio"]
            (path / "config.json").write_text(json.dumps(config))
        return path


CHOSEN = ("moe_k", "num_experts_per_token", "num_experts_per_tok")
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def save_tiny(variant: str, path: Path, **more: object) -> None:
    """more: keys of config.json that differ from the variant's."""
    model_type, changes = VARIANTS[variant]
    torch.manual_seed(sum(map(ord, variant)))
    config = reference_config(model_type, **(COMMON | changes | more))
    # Transformers 5.17 does not look at what was registered above
    model = Mistral4ForCausalLM(config) if model_type == "mistral4" else AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or name.endswith(("bias", "sinks", "base")):  # else all ones and zeros: tests nothing
                tensor.add_(torch.randn_like(tensor) * 0.1)
            if name.endswith(("A_log", "compress_ape", "compress_gate", "ple.conv1d.weight")) and _all_alike(tensor):
                tensor.copy_(torch.randn_like(tensor) * 0.3)
            if name.endswith(("router.scale", "expert_scale", "layer_scalar")):  # likewise
                tensor.mul_(1 + torch.randn_like(tensor) * 0.2)
            if name.endswith("tid2eid"):
                choices = torch.rand(len(tensor), model.config.n_routed_experts)
                tensor.copy_(choices.argsort(-1)[:, : tensor.shape[1]])
    model.to(torch.bfloat16).float().save_pretrained(path)  # every weight is exact in bf16, and stored as f32
    save_tokenizer(path)


def _all_alike(tensor: torch.Tensor) -> bool:
    return tensor.unique().numel() == 1


def save_fused(source: Path, path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    path.mkdir()
    tensors = {k: v.contiguous() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((source / name).read_bytes())


def save_tokenizer(path: Path) -> None:
    """One token per byte, so any text is any length and ids are easy to read."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<bos>", "<eos>")])
    tokenizer.save(str(path / "tokenizer.json"))
    saved = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
        "chat_template": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}",
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(saved))


def file_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory."""
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}
