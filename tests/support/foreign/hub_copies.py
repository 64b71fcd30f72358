"""Tiny models as other families' checkpoints have them: other keys, names and parts beside the text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from every_type import tiny_config
from tandem.architectures.foreign.registry import model_class
from tiny import file_tensors, save_tokenizer

LING_NAMES = {
    "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
}  # fmt: skip
LING_KEYS = {
    "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias",
}  # fmt: skip


def keys_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found


def saved(path: Path, tensors: Mapping[str, Tensor], keys: Mapping[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(keys))
    save_tokenizer(path)
    return path


def nested(source: Path, path: Path, model_type: str, inner: str) -> Path:
    """The text of `source` beside a vision tower."""
    tensors = {f"language_model.{name}": tensor for name, tensor in file_tensors(source).items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(4, 4)
    tensors["mm_projector.proj.0.weight"] = torch.zeros(4, 4)
    text = keys_of(source) | {"model_type": inner}
    return saved(path, tensors, {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 4}})


def omni(source: Path, path: Path) -> Path:
    """Qwen3-Omni's names: what thinks, beside what speaks."""
    text = keys_of(source) | {"model_type": "qwen3_omni_moe_text"}
    tensors = {f"thinker.{name}": tensor for name, tensor in file_tensors(source).items()}
    tensors["talker.model.layers.0.input_layernorm.weight"] = torch.zeros(4)
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": text, "audio_config": {"d_model": 4}}
    keys = {"model_type": "qwen3_omni_moe", "thinker_config": thinker, "talker_config": {"hidden_size": 4}}
    return saved(path, tensors, keys)


def ling_keys(source: Path) -> dict[str, Any]:
    """Keys of a tiny GLM-4.5, as Ling 2.0's checkpoints have them."""
    theirs = keys_of(source)
    said = {ling: theirs.pop(glm) for ling, glm in LING_KEYS.items()}
    rope = theirs.pop("rope_parameters")
    return theirs | said | {
        "model_type": "bailing_moe_v2", "use_bias": False, "use_rmsnorm": True, "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "rope_theta": rope["rope_theta"], "rope_scaling": None,
        "partial_rotary_factor": rope["partial_rotary_factor"], "router_dtype": "fp32", "num_nextn_predict_layers": 0,
        "moe_shared_expert_intermediate_size": theirs["moe_intermediate_size"],
    }  # fmt: skip


def ling(source: Path, path: Path) -> Path:
    """A tiny GLM-4.5, as Ling 2.0 has it."""
    tensors, made = file_tensors(source), {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            made[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            for theirs, lings in LING_NAMES.items():
                name = name.replace(theirs, lings)
            made[name] = tensor
    return saved(path, made, ling_keys(source))


GRANITE_FUSED = {
    "block_sparse_moe.input_linear": ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "block_sparse_moe.output_linear": ("mlp.experts.{e}.down_proj",),
    "shared_mlp.input_linear": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_mlp.output_linear": ("mlp.shared_experts.down_proj",),
}
"""Granite's matrices, and whose rows they hold in turn, of each expert `e`."""


def plain_names(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Under the usual names of modules."""
    for theirs, names in GRANITE_FUSED.items():
        if theirs in name:
            each = tensor if tensor.dim() == 3 else tensor[None]
            return {
                name.replace(theirs, part.format(e=e)): rows.contiguous()
                for e, matrix in enumerate(each) for part, rows in zip(names, matrix.chunk(len(names)), strict=True)
            }  # fmt: skip
    return {name.replace("block_sparse_moe.router.layer", "mlp.gate"): tensor}


def ling_one_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under Ling's names, q, k and v in one matrix."""
    made = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            tensor = torch.cat([tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
            name = name.replace("self_attn.q_proj", "attention.query_key_value")
        elif ".k_proj." in name or ".v_proj." in name:
            continue
        name = name.replace("self_attn.o_proj", "attention.dense")
        made[name.replace("model.embed_tokens", "model.word_embeddings")] = tensor
    return made


def ling_one_keys(granite: Mapping[str, Any], unit_head: bool = False) -> dict[str, Any]:
    """Keys of a Granite without scales, whose shared expert is as wide as some."""
    rope, width = granite["rope_parameters"], granite["intermediate_size"]
    kept = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "eos_token_id",
        "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "num_experts_per_tok",
    )  # fmt: skip
    return {key: granite[key] for key in kept} | {
        "model_type": "bailing_moe", "num_experts": granite["num_local_experts"], "moe_intermediate_size": width,
        "num_shared_experts": granite["shared_intermediate_size"] // width, "intermediate_size": 44,
        "first_k_dense_replace": 0, "norm_topk_prob": True, "norm_head": unit_head, "norm_softmax": False,
        "use_bias": False, "use_qkv_bias": False, "hidden_act": "silu", "rope_theta": rope["rope_theta"],
        "rope_scaling": None, "embedding_dropout": 0.0, "output_dropout": 0.0,
    }  # fmt: skip


def ling_one(source: Path, path: Path) -> Path:
    """A tiny Granite 3 without scales, as Ling 1 has it."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in file_tensors(source).items():
        tensors |= plain_names(name, tensor)
    return saved(path, ling_one_names(tensors), ling_one_keys(keys_of(source)))


def step(path: Path) -> Path:
    """Step-3.7-Flash as Transformers saves it, under the hub's names of tensors."""
    torch.manual_seed(7)
    cls, config = model_class(tiny_config("step3p7"))
    model = cls._from_config(config).float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "language_model" in name and ("norm" in name or name.endswith("bias")):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.to(torch.bfloat16).float().save_pretrained(path)
    save_tokenizer(path)
    return path


def step_text(whole: Path, path: Path) -> Path:
    """Step-3.5-Flash's configuration of the same weights."""
    read = {name: tensor for name, tensor in file_tensors(whole).items() if "vi" not in name.partition(".")[0]}
    return saved(path, read, keys_of(whole)["text_config"])
