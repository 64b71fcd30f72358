"""Small random checkpoints for `kt convert`: two MoE layers after a dense one, in the names and formats people have."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.formats.codes import join_nibbles

HIDDEN, WIDTH, EXPERTS, LAYERS = 256, 128, 3, 3
MATRICES = ("gate_proj", "up_proj", "down_proj")


def expert_modules() -> list[str]:
    return [
        f"model.layers.{layer}.mlp.experts.{expert}.{matrix}"
        for layer in range(1, LAYERS)
        for expert in range(EXPERTS)
        for matrix in MATRICES
    ]


def dense_modules() -> list[str]:
    attention = [f"model.layers.{layer}.self_attn.{p}_proj" for layer in range(LAYERS) for p in "qkvo"]
    return attention + [f"model.layers.0.mlp.{matrix}" for matrix in MATRICES]


def plain_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Every matrix under its Hugging Face name, with outliers as trained weights have."""
    return dict(_made(dtype))


@cache
def _made(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def matrix(n: int, k: int) -> Tensor:
        heavy = torch.randn(n, k, generator=generator) * (0.3 * torch.randn(n, k, generator=generator)).exp()
        return (0.02 * heavy).to(dtype)

    tensors = {"model.embed_tokens.weight": matrix(40, HIDDEN), "lm_head.weight": matrix(40, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=dtype)
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(HIDDEN, dtype=dtype)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
    for name in [*dense_modules(), *expert_modules()]:
        shape = (HIDDEN, WIDTH) if name.endswith("down_proj") else (WIDTH, HIDDEN)
        tensors[f"{name}.weight"] = matrix(*shape)
    return tensors


def save(path: Path, tensors: dict[str, Tensor], quantization: object = None, files: int = 2) -> Path:
    """A model directory of `files` shards."""
    path.mkdir(parents=True)
    names = sorted(tensors)
    for i in range(files):
        part = {name: tensors[name].contiguous() for name in names[i::files]}
        save_file(part, path / f"model-{i + 1:05}-of-{files:05}.safetensors")
    config = {"model_type": "qwen3_moe", "hidden_size": HIDDEN}
    if quantization is not None:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.bin").write_text("weights of another kind")
    return path


def save_plain(path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    return save(path, plain_tensors(dtype))


def save_fp8(path: Path) -> Path:
    """As DeepSeek publishes: every linear layer in fp8 with blocks of 128 x 128."""
    tensors = plain_tensors(torch.float32)
    for name in [*dense_modules(), *expert_modules()]:
        weight = tensors.pop(f"{name}.weight")
        n, k = weight.shape
        blocks = weight.view(n // 128, 128, k // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors |= {f"{name}.weight": codes.view(n, k), f"{name}.weight_scale_inv": scale}
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    return save(path, tensors, config)


def save_int4(path: Path) -> Path:
    """As Kimi-K2-Thinking is published: experts in pack-quantized int4, group 32, the rest in bf16."""
    tensors = plain_tensors()
    for name in expert_modules():
        weight = tensors.pop(f"{name}.weight").float()
        n, k = weight.shape
        groups = weight.view(n, -1, 32)
        scale = (groups.abs().amax(-1, keepdim=True) / 7).to(torch.bfloat16)
        codes = (groups / scale.float()).round().clamp(-8, 7).view(n, k) + 8
        tensors |= {
            f"{name}.weight_packed": join_nibbles(codes.to(torch.uint8)).view(torch.int32),
            f"{name}.weight_scale": scale.squeeze(-1),
            f"{name}.weight_shape": torch.tensor([n, k]),
        }
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return save(path, tensors, config)


def save_fused(path: Path) -> Path:
    """All experts of a layer in two 3-D tensors, as Transformers 5 holds them."""
    tensors = plain_tensors()
    for layer in range(1, LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{expert}.{matrix}.weight") for expert in range(EXPERTS)])
            for matrix in MATRICES
        )
        tensors |= {f"{prefix}gate_up_proj": torch.cat((gate, up), 1), f"{prefix}down_proj": down}
    return save(path, tensors)
