"""Every format × both key styles: read exactly as independent decoders read it (`stored_formats.py`)."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import save_file

import stored_formats as formats
from tandem.checkpoint import open_checkpoint
from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.reference import decoded

N, K = 128, 256
PROJECTIONS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@cache
def made(name: str, seed: int = 0) -> formats.Made:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.1
    return formats.MAKERS[name](weight.to(torch.bfloat16).float())


def numbers(weight: Weight) -> torch.Tensor:
    return decoded(weight) if isinstance(weight, WeightCodes) else weight.float()


def save(path, tensors, config):
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return open_checkpoint(path)


def configs(one: formats.Made):
    """With the configuration, and without it where tensors alone say enough."""
    return [one.config] + ([] if one.needs_config else [{}])


@pytest.mark.parametrize("name", formats.MAKERS)
def test_hugging_face_names(name, tmp_path):
    one, module = made(name), "model.layers.3.mlp.experts.7.gate_proj"
    for config in configs(one):
        checkpoint = save(tmp_path, {module + k: v for k, v in one.tensors.items()}, config)
        assert torch.equal(numbers(checkpoint.weight(module, (N, K))), one.expected)


@pytest.mark.parametrize("name", formats.MAKERS)
def test_deepseek_inference_names(name, tmp_path):
    one, other = made(name), {}
    for k, v in one.tensors.items():
        for w in PROJECTIONS.values():
            other[f"layers.3.ffn.experts.7.{w}" + formats.SPELLINGS["deepseek"].get(k, k)] = v
    for config in configs(one):
        checkpoint = save(tmp_path, other, config)
        for projection in PROJECTIONS:
            read = checkpoint.weight(f"model.layers.3.mlp.experts.7.{projection}", (N, K))
            assert torch.equal(numbers(read), one.expected)


UNUSED = {".input_scale", ".weight_shape"}  # nothing is lost without them
FUSED = [n for n in formats.MAKERS if set(made(n).tensors) - UNUSED <= set(formats.SPELLINGS["fused"])]


@pytest.mark.parametrize("name", FUSED)
def test_fused_tensors(name, tmp_path):
    """Experts in one 3-D tensor: all rows, the gate half, every other row (gpt-oss interleaves gate and up)."""
    experts = [made(name, seed) for seed in range(3)]
    spelling, module = formats.SPELLINGS["fused"], "model.layers.3.mlp.experts.gate_up_proj"
    tensors = {
        module + spelling[k]: torch.stack([e.tensors[k] for e in experts])
        for k in experts[0].tensors if k in spelling
    }  # fmt: skip
    for config in configs(experts[0]):
        checkpoint = save(tmp_path, tensors, config)
        for i, expert in enumerate(experts):
            for rows in (slice(None), slice(0, 40), slice(40, 128), slice(1, None, 2)):
                read = checkpoint.expert_weight(module, i, (3, N, K), rows)
                assert torch.equal(numbers(read), expert.expected[rows])


def test_gpt_oss_blocks(tmp_path):
    weights = [torch.randn(N, K, generator=torch.Generator().manual_seed(s)) for s in range(2)]
    experts, module = [formats.fp4_gpt_oss(w) for w in weights], "model.layers.0.mlp.experts.down_proj"
    tensors = {module + k: torch.stack([e.tensors[k] for e in experts]) for k in ("_blocks", "_scales")}
    for config in ({"quant_method": "mxfp4"}, {}):
        checkpoint = save(tmp_path, tensors, config)
        for i, expert in enumerate(experts):
            assert torch.equal(numbers(checkpoint.expert_weight(module, i, (2, N, K))), expert.expected)


def test_int4_in_bytes_is_known_before_sizes_are(tmp_path):
    """W4AFP8, for the planner: the configuration says what [N, K / 2] bytes are."""
    one, module = made("int4 bytes"), "model.layers.3.mlp.experts.7.gate_proj"
    tensors = {module + k: v for k, v in one.tensors.items()}
    assert save(tmp_path, tensors, one.config).formats().experts.name == "int4 g128"
    assert "RAWINT4" in save(tmp_path, tensors, one.config).formats().experts.methods
    assert save(tmp_path, tensors, one.config).shape(module) == (N, K)
