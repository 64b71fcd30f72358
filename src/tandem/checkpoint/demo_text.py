"""The demo model's JSON files: configuration, tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tandem.checkpoint.gguf_model import GGUFModel
from tandem.checkpoint.gguf_tokenizer import gguf_texts, gguf_tokenizer

BOS, EOS = 1, 2

CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "dtype": "bfloat16",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "partial_rotary_factor": 1.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 1.0},
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "use_qk_norm": False,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "n_shared_experts": 4,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 4.0,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "use_cache": True,
}

# Greedy: at temperatures above it a model of this size gives wrong answers to simple questions.
GENERATION = {
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "do_sample": False,
}
# Of the files that are not made from the GGUF: a demo model built with others is built anew.
RECIPE = hashlib.sha256(json.dumps([CONFIG, GENERATION]).encode()).hexdigest()


def write_text_files(gguf: GGUFModel, directory: Path) -> None:
    """config.json, generation_config.json, tokenizer.json and tokenizer_config.json."""
    _write_json(directory / "config.json", CONFIG)
    _write_json(directory / "generation_config.json", GENERATION)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **gguf_texts(gguf),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )
    (directory / "tokenizer.json").write_text(gguf_tokenizer(gguf).to_str(), encoding="utf-8")


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
