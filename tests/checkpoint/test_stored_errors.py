"""Quantised checkpoints that are incomplete, contradictory or unknown: an error naming file, tensor and a way out, when
the checkpoint is opened or the matrix asked for, never later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import stored_formats as formats
from tandem.checkpoint import open_checkpoint
from tandem.errors import CheckpointError

MODULE = "model.layers.0.mlp.experts.0.gate_proj"
WEIGHT = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) * 0.1


def opened(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, object] | None = None):
    tensors = {MODULE + k: v.contiguous().clone() for k, v in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return open_checkpoint(path)


def changed(name: str, **parts: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tensors of a format with some replaced, or left out where None."""
    tensors = dict(formats.MAKERS[name](WEIGHT).tensors)
    for key, value in parts.items():
        tensors.pop(f".{key}", None)
        if value is not None:
            tensors[f".{key}"] = value
    return tensors


U8 = torch.uint8
AT_OPEN = {
    "fp8 without scales": (changed("fp8 blocks", weight_scale_inv=None), r"F8_E4M3, but its weight_scale_inv"),
    "fp8 scales of another shape": (
        changed("fp8 blocks", weight_scale_inv=torch.ones(3, 2)),
        r"_inv has shape \(3, 2\), but its weight has \(128, 256\) and blocks of \[128, 128\] do not fit",
    ),
    "fp8 blocks of an unsaid size": (
        changed("fp8 blocks of 64"),
        r"try .*quantization_config\.weight_block_size = \[64, 64\]",
    ),
    "fp8 scales of a type that is none": (
        changed("fp8 blocks", weight_scale_inv=torch.ones(1, 2, dtype=torch.int32)),
        "is I32; scales here are F32",
    ),
    "int8 without scales": (changed("int8 per channel", weight_scale=None), "I8, but its weight_scale_inv"),
    "nvfp4 without its second scale": (changed("nvfp4 modelopt", weight_scale_2=None), "its weight_scale_2 is miss"),
    "nvfp4 with scales of another shape": (
        changed("nvfp4 modelopt", weight_scale=torch.ones(128, 8).to(torch.float8_e4m3fn)),
        r"has shape \(128, 8\); its weight implies \(128, 16\)",
    ),
    "nvfp4 with many second scales": (changed("nvfp4 modelopt", weight_scale_2=torch.ones(128)), "must be one number"),
    "mxfp4 with scales of another shape": (
        changed("mxfp4 packed", weight_scale=torch.ones(128, 4, dtype=U8)),
        r"has shape \(128, 4\); its weight implies \(128, 8\)",
    ),
    "gptq without zero points": (changed("gptq", qzeros=None), "I32, but its qzeros is missing"),
    "gptq with zero points of another shape": (
        changed("gptq", qzeros=torch.zeros(8, 15, dtype=torch.int32)),
        r"qzeros has shape \(8, 15\); its weight implies \(8, 16\)",
    ),
    "two scales": (changed("fp8 blocks", weight_scale=torch.ones(1, 2)), "are both the scale of"),
    "numbers beside scales": ({".weight": WEIGHT, ".weight_scale": torch.ones(128, 1)}, "one of them is a leftover"),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_OPEN)
def test_what_headers_show_is_an_error_at_open(name, tmp_path):
    tensors, message = AT_OPEN[name]
    with pytest.raises(CheckpointError, match=message) as error:
        opened(tmp_path, tensors)
    assert str(tmp_path / "model.safetensors") in str(error.value)
    assert MODULE in str(error.value)


WHEN_READ = {
    "gptq of either version": (
        changed("gptq zeros"),
        r'may be stored less 1 or not: say which in .*quantization_config\.checkpoint_format.*try "gptq"',
    ),
    "an order that points outside": (
        changed("gptq act-order", g_idx=torch.full((256,), 8, dtype=torch.int32)),
        "must hold the group, 0 to 7, of each of 256 inputs",
    ),
    "a shape that is another": (
        changed("int4 packed g32", weight_shape=torch.tensor([128, 255])),
        r"weight_shape says \(128, 255\), but config.json implies \(128, 256\)",
    ),
    "a smaller matrix": (changed("fp8 blocks", weight=torch.ones(128, 200).to(torch.float8_e4m3fn)),
                         r"has shape \(128, 200\), but config.json implies \(128, 256\)"),
    "packed words of a smaller matrix": (
        changed("int4 packed g32", weight_packed=torch.zeros(128, 31, dtype=torch.int32)),
        r"has shape \(128, 31\), but config.json implies a matrix of \(128, 256\) in 4 or 8 bits",
    ),
    "fp8 of the other kind": ({".weight": WEIGHT.to(torch.float8_e5m2)}, "is stored as F8_E5M2; readable are"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHEN_READ)
def test_what_only_data_or_the_model_show_is_an_error_when_read(name, tmp_path):
    tensors, message = WHEN_READ[name]
    checkpoint = opened(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.weight(MODULE, (128, 256))
    assert str(tmp_path) in str(error.value)


CONFIGS = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "'bitsandbytes' cannot be read; these can: fp8,"),
    "a list": ([], "not an object"),
    "gptq of 3 bits": ({"quant_method": "gptq", "bits": 3}, "3 bits cannot be read; 4 and 8 can"),
    "marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, 'try "gptq" or "gptq_v2"'),
    "sparse": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}},
        '"dense" can',
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_that_cannot_be_read_are_named(name, tmp_path):
    config, message = CONFIGS[name]
    if config == []:
        config = [1]
    with pytest.raises(CheckpointError, match=message) as error:
        opened(tmp_path, {".weight": WEIGHT}, config)
    assert str(tmp_path / "config.json") in str(error.value)


def test_experts_of_another_number_are_named(tmp_path):
    checkpoint = opened(tmp_path, {"": torch.zeros(3, 128, 256)})
    with pytest.raises(CheckpointError, match=r"has shape \(3, 128, 256\), but .* 4 experts"):
        checkpoint.expert_weight(MODULE, 0, (4, 128, 256))


def test_a_missing_module_is_named(tmp_path):
    checkpoint = opened(tmp_path, {".weight": WEIGHT})
    with pytest.raises(CheckpointError, match=r"has no tensor lm_head\.weight"):
        checkpoint.weight("lm_head", (1, 1))
