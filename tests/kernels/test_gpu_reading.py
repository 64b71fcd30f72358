"""What the planner believes the GPU kernels read is what they accept, for every format that checkpoints have."""

from __future__ import annotations

import json

import gguf
import pytest
import torch
from safetensors.torch import save_file

import kernel_cases as cases
import stored_formats as formats
from tandem.checkpoint import open_checkpoint
from tandem.checkpoint.survey import stored_formats
from tandem.config import StoredFormat
from tandem.errors import KernelError
from tandem.formats.codes import Weight
from tandem.formats.gguf_blocks import GGUF_CODES
from tandem.formats.gpu_reading import PACKED_KINDS, refusal
from tandem.formats.quant_format import BITS, FLOATS, QuantFormat
from tandem.kernels.cpu import PackedExperts

SIZE = 256  # gate, up and down alike
MODULE = "model.layers.3.mlp.experts.7.gate_proj"


def accepted(weight: Weight) -> bool:
    """As `GpuExperts` opens them: the core's layout, then `Panels`."""
    layer = PackedExperts(cases.workspace_of("scalar"), 1, SIZE, SIZE, "bf16")
    layer.load(0, weight, weight, weight)
    try:
        layouts = layer.layout()
    except KernelError:
        return False
    return not any(refusal(fmt, scale, depth, zeros > 0) for fmt, _, depth, *_, scale, _, zeros in layouts)


@pytest.mark.parametrize("name", formats.MAKERS)
def test_checkpoints(name: str, tmp_path) -> None:
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)) * 0.1
    made = formats.MAKERS[name](weight.to(torch.bfloat16).float())
    save_file(
        {MODULE + k: v.contiguous().clone() for k, v in made.tensors.items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": made.config}))
    checkpoint = open_checkpoint(tmp_path)
    stored = checkpoint.formats().experts
    assert (stored.not_on_gpu == "") == accepted(checkpoint.weight(MODULE, (SIZE, SIZE)))
    assert stored.not_on_gpu in ("", stored.name)
    dense = stored_formats([("model.layers.3.self_attn.o_proj", checkpoint.format(MODULE), 100)]).dense
    known = checkpoint.format(MODULE)  # only kernels of experts know zero points
    assert dense.not_on_gpu or not (known.zero_points and known.packable)


@pytest.mark.parametrize("kind", [kind for kind in BITS if kind.startswith("q")])
def test_gguf_files(kind: str) -> None:
    weights, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    raw = torch.zeros(SIZE, SIZE // weights * block_bytes, dtype=torch.uint8)
    assert QuantFormat(kind, "gguf").gpu_readable == accepted(GGUF_CODES[kind.upper()](raw))


def test_every_kind_is_decided() -> None:
    assert set(PACKED_KINDS) == set(BITS) - set(FLOATS)
    assert refusal("bf16", "f32", 3) == "the GPU kernels read k in pairs: a depth of 3 is odd"


def test_one_unreadable_format_among_several_is_named() -> None:
    """A K-quant file: gate and up in Q4_K, half of the downs in Q6_K, the others in Q8_0."""
    module = "model.layers.{}.mlp.experts.0.{}_proj"
    kinds = [
        (module.format(0, "gate"), "q4_k"),
        (module.format(0, "down"), "q6_k"),
        (module.format(1, "down"), "q8_0"),
    ]
    found = stored_formats((name, QuantFormat(kind, "gguf"), 100) for name, kind in kinds)
    assert found.experts.not_on_gpu == "q4_k, q6_k"
    assert (found.dense, found.shared.not_on_gpu) == (StoredFormat(), "")
