"""Ling 3, GLM-5.3-Flash and Qwen3.8-Flash-Next as llama.cpp's converter writes them. Ling's decays are as they are, its
gates under names of small matrices."""

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


QWEN4 = {
    **{f"{kind}_hyper_connection.{ours}": f"hc_{theirs}_{last}" for kind, theirs in (("attn", "attn"), ("mlp", "ffn"))
       for ours, last in (("hc_norm", "norm"), ("input_mix_weight_down", "down"), ("input_mix_weight_up", "up"),
                          ("block_inject_weight", "inject"))},
    **{f"self_attn.indexer.{x}_layernorm": f"indexer.{x}_norm" for x in "qk"},
    "ple.key_proj": "ple_key", "ple.value_proj": "ple_value", "ple.conv1d": "ple_conv1d",
    **{f"ple.norm_{which}": f"ple_norm_{which}" for which in ("key", "query", "conv")},
}  # fmt: skip
QWEN4_LAST = {"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up"}
PLE = "ple.ple_embedding."


def add_qwen4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What Qwen3.5's converter does not write."""
    writer.add_array("qwen4exp.attention.recurrent_layers", [k == "linear_attention" for k in config["layer_types"]])
    ratio = config["indexer_compress_ratio"]
    ratios = [1 if kind == "linear_attention" else ratio for kind in config["layer_types"]]
    hashes = (config["ngram_size"] - 1) * config["heads_per_ngram"]
    numbers = {
        "hyper_connection.count": config["hc_count"], "hyper_connection.low_rank": config["hc_lowrank"],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"],
        "attention.indexer.top_k": config["indexer_budget"], "ple.ngram_size": config["ngram_size"],
        "ple.heads_per_ngram": config["heads_per_ngram"], "ple.conv_kernel": config["ple_conv_kernel_size"],
        "ple.eos_token_id": config["eos_token_id"],
        "embedding_length_per_layer_input": config["ple_embed_dim"] // hashes,
    }  # fmt: skip
    for key, number in numbers.items():
        writer.add_uint32(f"qwen4exp.{key}", number)
    writer.add_array("qwen4exp.attention.compress_ratios", ratios)
    writer.add_array("qwen4exp.ple.layers", [number - 1 for number in config["ple_layer_ids"]])


def add_hashes(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
    """What a checkpoint has as tensors of whole numbers."""
    keys = {
        "layer_multipliers": "layer_multipliers", "ngram_heads_vocab_sizes": "head_vocab_sizes",
        "ngram_heads_offsets": "head_offsets",
    }  # fmt: skip
    for name, tensor in tensors.items():
        if PLE in name and (key := keys.get(name.rpartition(".")[2])):
            values = [int(value) for value in tensor.flatten()]
            writer.add_key_value(f"qwen4exp.ple.{key}", values, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)


def of_qwen4(tensors: dict[str, np.ndarray], keys: int) -> dict[str, np.ndarray]:
    """Streams, indexers and n-grams, and the last norm: norms as 1 + w, the table's pieces in one, an indexer's matrix
    in two. keys: its last rows, which make keys."""
    made, pieces = dict[str, np.ndarray](), dict[int, np.ndarray]()
    for name, array in tensors.items():
        module = name.removesuffix(".weight")
        array = array + 1 if re.search(r"norm(_\w+)?$", module) else array
        if found := re.search(r"ngram_embedding\.shard_(\d+)", module):
            pieces[int(found[1])] = array
        elif found := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.indexer\.index_qk_proj", module):
            made[f"blk.{found[1]}.indexer.q_proj.weight"] = array[:-keys]
            made[f"blk.{found[1]}.indexer.k_proj.weight"] = array[-keys:]
        elif found := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module):
            made[f"blk.{found[1]}.{QWEN4[found[2]]}.weight"] = array.squeeze(1) if array.ndim == 3 else array
        else:
            made[f"output_hc_{QWEN4_LAST[module.rpartition('.')[2]]}.weight"] = array
    return made | {"per_layer_token_embd.weight": np.concatenate([pieces[i] for i in range(len(pieces))])}


def is_qwen4(name: str) -> bool:
    return "hyper_connection" in name or ".indexer." in name or ".ple." in name
