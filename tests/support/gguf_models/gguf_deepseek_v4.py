"""DeepSeek-V4 as llama.cpp's converter writes it. The `gguf` package that is installed does not know it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from gguf_files import ChooseKind, add_tensor, add_tokenizer, finish, only_f32
from tiny import file_tensors

ARCHITECTURE = "deepseek4"
OUTER = {
    "head.weight": "output", "model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm",
    "model.hc_head.hc_fn": "output_hc_fn", "model.hc_head.hc_base": "output_hc_base",
    "model.hc_head.hc_scale": "output_hc_scale",
}  # fmt: skip
LAYER = {
    "attn.attn_sink": "attn_sinks", "attn.norm.weight": "attn_kv_a_norm", "attn.q_norm.weight": "attn_q_a_norm",
    "attn.wkv.weight": "attn_kv", "attn.wo_a.weight": "attn_output_a", "attn.wo_b.weight": "attn_output_b",
    "attn.wq_a.weight": "attn_q_a", "attn.wq_b.weight": "attn_q_b", "attn_norm.weight": "attn_norm",
    "attn.compressor.ape": "attn_compressor_ape", "attn.compressor.norm.weight": "attn_compressor_norm",
    "attn.compressor.wgate.weight": "attn_compressor_gate", "attn.compressor.wkv.weight": "attn_compressor_kv",
    "attn.indexer.compressor.ape": "indexer_compressor_ape",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv",
    "attn.indexer.weights_proj.weight": "indexer.proj", "attn.indexer.wq_b.weight": "indexer.attn_q_b",
    "ffn.gate.weight": "ffn_gate_inp", "ffn.gate.tid2eid": "ffn_gate_tid2eid", "ffn_norm.weight": "ffn_norm",
    "ffn.shared_experts.w1.weight": "ffn_gate_shexp", "ffn.shared_experts.w2.weight": "ffn_down_shexp",
    "ffn.shared_experts.w3.weight": "ffn_up_shexp",
}  # fmt: skip
EXPERT = re.compile(r"(model\.layers\.\d+)\.ffn\.experts\.(\d+)\.(w\d)\.weight")
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def write_deepseek_v4(source: Path, path: Path, choose: ChooseKind = only_f32, drafts: int = 0) -> Path:
    """The model directory `source` as one GGUF file. drafts: layers that it names and does not have."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, value in keys(config, drafts).items():
        add_key(writer, f"{ARCHITECTURE}.{key}", value)
    add_tokenizer(writer, source, "gpt-2")
    for name, array in gguf_tensors(source).items():
        if array.dtype == np.int32:
            writer.add_tensor(name, array)
        else:
            add_tensor(writer, name, array, choose(name, array))
    return finish(writer, path)


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def keys(config: dict[str, Any], drafts: int) -> dict[str, Any]:
    layers, rope = config["num_hidden_layers"], config["rope_parameters"]["compress"]
    rates = config["compress_rates"] | {"sliding_attention": 0}
    hashed = config["mlp_layer_types"].count("hash_moe")
    yarn = {} if rope["rope_type"] == "default" else {
        "rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
    }  # fmt: skip
    return yarn | {
        "block_count": layers, "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1, "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"], "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
        "rope.freq_base": float(config["rope_parameters"]["main"]["rope_theta"]),
        "attention.compress_rope_freq_base": float(rope["rope_theta"]), "vocab_size": config["vocab_size"],
        "attention.q_lora_rank": config["q_lora_rank"], "attention.output_lora_rank": config["o_lora_rank"],
        "attention.output_group_count": config["o_groups"], "attention.sliding_window": config["sliding_window"],
        "attention.compress_ratios": [rates[kind] for kind in config["layer_types"]] + [0] * drafts,
        "attention.indexer.head_count": config["index_n_heads"], "expert_gating_func": 4,
        "attention.indexer.key_length": config["index_head_dim"], "attention.indexer.top_k": config["index_topk"],
        "expert_count": config["n_routed_experts"], "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": 1, "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": config["routed_scaling_factor"], "expert_weights_norm": True,
        "hash_layer_count": hashed, "swiglu_clamp_exp": [float(config["swiglu_limit"])] * layers,
        "nextn_predict_layers": drafts, "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": config["hc_eps"],
    }  # fmt: skip


def gguf_tensors(source: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    experts: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for name, tensor in file_tensors(source).items():
        array = tensor.to(torch.int32 if tensor.dtype == torch.int64 else torch.float32).numpy()
        if expert := EXPERT.fullmatch(name):
            experts.setdefault((expert[1], expert[3]), {})[int(expert[2])] = array
        elif name in OUTER:
            found[f"{OUTER[name]}.weight"] = array
        else:
            layer, inner = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name).groups()
            stem = LAYER.get(inner, inner)  # hc_attn_fn and its like keep their names
            ending = "exp_probs_b.bias" if inner == "ffn.gate.bias" else f"{stem}.weight"
            found[f"blk.{layer}.{ending}"] = array
    for (layer, matrix), each in experts.items():
        stacked = np.stack([each[i] for i in range(len(each))])
        found[f"blk.{layer.split('.')[2]}.{EXPERTS[matrix]}.weight"] = stacked
    return found
