"""DeepSeek-V4 as the hub's checkpoints store it: MXFP4 experts, FP8 matrices in blocks, DeepSeek's own names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from stored_formats import Made, fp4_deepseek, fp8_blocks

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "main_proj")


def on_the_hub(name: str) -> str:
    """What Transformers saves as … → DeepSeek's own name."""
    plain = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return plain.replace(".attn.norm.", ".attn.kv_norm.")


def as_stored(name: str, tensor: Tensor) -> Made:
    """A tensor of the hub's name as the hub's checkpoint has it, and the numbers it stands for."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    if ".ffn.experts." in name:
        return fp4_deepseek(tensor)
    if module in FP8 and "compressor" not in name:
        return in_blocks(tensor)
    wide = "norm" in name or not name.endswith(".weight") or tensor.dtype is torch.int64
    kept = tensor if wide else tensor.bfloat16()
    return Made({".weight": kept}, kept if wide else kept.float())


def in_blocks(weight: Tensor) -> Made:
    """The last blocks are cut off at the matrix's edge."""
    n, k = weight.shape
    made = fp8_blocks(F.pad(weight, (0, -k % 128, 0, -n % 128)), power=True)
    codes = made.tensors[".weight"][:n, :k].contiguous()
    return Made(made.tensors | {".weight": codes}, made.expected[:n, :k].contiguous())


def hub_config(source: Path) -> dict[str, object]:
    config = json.loads((source / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"):
        del config[key]
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    return config | {
        "compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1, "rope_scaling": YARN, "expert_dtype": "fp4",
        "qk_rope_head_dim": 16, "quantization_config": quantised, "topk_method": "noaux_tc",
    }  # fmt: skip


def both_forms(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As stored, by the hub's names; and the numbers that those stand for, by the names given."""
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        there = on_the_hub(name)
        made = as_stored(there, tensor)
        stem = there.removesuffix(".weight") if len(made.tensors) > 1 else there
        endings = made.tensors if len(made.tensors) > 1 else {"": made.tensors[".weight"]}
        packed |= {stem + ending.replace("_scale_inv", "_scale").replace("weight_scale", "scale"): part.clone()
                   for ending, part in endings.items()}  # fmt: skip
        plain[name] = made.expected.clone()
    return packed, plain


def saved(path: Path, tensors: dict[str, Tensor], source: Path, config: dict[str, object] | None = None) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path
