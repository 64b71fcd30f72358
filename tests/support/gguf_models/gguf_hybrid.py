"""Ling 3 and GLM-5.3-Flash as llama.cpp's converter writes them. Ling's decays are as they are, its gates under names
of small matrices."""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np

import gguf_kinds

LING = {
    "attention.f_proj.weight": "ssm_f_a.weight", "attention.b_proj.weight": "ssm_beta.weight",
    "attention.o_norm.weight": "ssm_norm.weight", "attention.dt_bias": "ssm_dt.bias",
    **{f"attention.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    **{f"attention.{kind}_{part}": f"attn_{kind}_{to}" for kind, part, to in (
        ("q", "a_proj.weight", "a.weight"), ("q", "a_layernorm.weight", "a_norm.weight"),
        ("q", "b_proj.weight", "b.weight"), ("kv", "a_proj_with_mqa.weight", "a_mqa.weight"),
        ("kv", "a_layernorm.weight", "a_norm.weight"))},
    "attention.dense.weight": "attn_output.weight", "mlp.gate.expert_bias": "exp_probs_b.bias",
}  # fmt: skip


def add_ling(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    gguf_kinds.add_sizes(writer, config | {"max_position_embeddings": config["model_max_length"]})
    full = [kind == "full_attention" for kind in config["layer_types"]]
    writer.add_head_count_kv([int(each) for each in full])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_bool("bailingmoe3.kda.safe_gate", True)
    writer.add_float32("bailingmoe3.kda.gate_lower_bound", config["kda_lower_bound"])
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_group_count(config["num_expert_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["moe_renormalize"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for key, list_key in (("exp", "expert"), ("shexp", "share_expert")):
        if limits := config.get(f"{list_key}_swiglu_limit_list"):
            writer.add_array(f"bailingmoe3.swiglu_clamp_{key}", [float(each) for each in limits])


def of_ling(name: str, array: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray] | None:
    """Of a layer's attention, what Kimi-Linear's converter calls otherwise; None for all else."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if config["model_type"] != "bailing_hybrid" or found is None:
        return None
    block, last = f"blk.{found[1]}.", found[2]
    if last.endswith("_conv1d.weight"):
        return f"{block}ssm_conv1d_{last.partition('.')[2][0]}.weight", array.reshape(1, len(array), 1, -1)
    if last == "attention.A_log":
        return f"{block}ssm_a", np.exp(array)[:, None]
    if last == "attention.g_proj.weight":
        attends = config["layer_types"][int(found[1])] == "full_attention"
        return f"{block}{'attn_gate' if attends else 'ssm_g_a'}.weight", array
    return (block + LING[last], array) if last in LING else None


INDEXER = {
    "head_count": "index_n_heads", "key_length": "index_head_dim", "top_k": "index_topk", "kpool": "index_kpool",
}  # fmt: skip


def add_glm5(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    gguf_kinds.add_sizes(writer, config)
    writer.add_head_count_kv([int(kind != "linear_attention") for kind in config["layer_types"]])
    writer.add_layer_norm_eps(1e-6)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    if config["linear_lower_bound"] is not None:
        writer.add_float32("glm5-next.kda.gate_lower_bound", config["linear_lower_bound"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(0)
    writer.add_key_length(config["kv_lora_rank"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    for key, ours in INDEXER.items():
        writer.add_uint32(f"glm5-next.attention.indexer.{key}", config[ours])
    writer.add_bool("glm5-next.attention.indexer.kpool_select_tail", True)
    writer.add_array("glm5-next.attention.indexer.types", [kind == "full" for kind in config["indexer_types"]])
    writer.add_uint32("glm5-next.hyper_connection.count", config["hc_mult"])
    writer.add_uint32("glm5-next.hyper_connection.sinkhorn_iterations", config["hc_sinkhorn_iters"])
    writer.add_float32("glm5-next.hyper_connection.epsilon", config["hc_eps"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for kind in ("exp", "shexp"):
        limits = [config["swiglu_limit"]] * config["num_hidden_layers"]
        writer.add_array(f"glm5-next.swiglu_clamp_{kind}", limits)


GLM5 = {
    "index_kpool_compress_gate": "indexer_compressor_gate.weight", "wq_b.weight": "indexer.attn_q_b.weight",
    "index_kpool_compress_ape": "indexer_compressor_ape.weight", "wk.weight": "indexer.attn_k.weight",
    "weights_proj.weight": "indexer.proj.weight", "k_norm.weight": "indexer.k_norm.weight",
    "k_norm.bias": "indexer.k_norm.bias",
}  # fmt: skip


def of_glm5(name: str, array: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray] | None:
    """Indexers and streams; None for all else, which is called as in Kimi-Linear."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if config["model_type"] != "glm5_next_text" or found is None:
        return None
    if found[2].startswith("hc_"):
        return f"blk.{found[1]}.{found[2]}.weight", array
    inner = found[2].removeprefix("self_attn.indexer.")
    return (f"blk.{found[1]}.{GLM5[inner]}", array) if inner != found[2] else None
