"""What the planner believes the GPU kernels read is what they accept, for every format that checkpoints have."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import kernel_cases as cases
import stored_formats as formats
from tandem.checkpoint import open_checkpoint
from tandem.checkpoint.gguf_file import BLOCK_TYPES
from tandem.checkpoint.survey import stored_formats
from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.gguf_blocks import GGUF_CODES
from tandem.formats.gpu_reading import PACKED_KINDS, refusal
from tandem.formats.quant_format import BITS, FLOATS, QuantFormat
from tandem.kernels.cpu import PackedExperts, PackedMatrix
from tandem.spec.stored import StoredFormat

SIZE = 256  # gate, up and down alike
MODULE = "model.layers.3.mlp.experts.7.gate_proj"


def accepted(weight: Weight) -> bool:
    """As `GpuExperts` opens them: the core's layout, then `Panels`."""
    layer = PackedExperts(cases.workspace_of("scalar"), 1, SIZE, SIZE, "bf16")
    layer.load(0, weight, weight, weight)
    return not any(refusal(fmt, scale, depth) for fmt, _, depth, *_, scale, _, _ in layer.layout())


def accepted_dense(weight: WeightCodes) -> bool:
    """As `GpuCodes` does."""
    fmt, _, depth, *_, scale, _, _ = PackedMatrix.from_codes(cases.workspace_of("scalar"), weight).layout()
    return not refusal(fmt, scale, depth, experts=False)


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
    assert (stored.unread_by_gpu == "") == accepted(checkpoint.weight(MODULE, (SIZE, SIZE)))
    assert stored.unread_by_gpu in ("", stored.name)
    dense = stored_formats([("model.layers.3.self_attn.o_proj", checkpoint.format(MODULE), 100)]).dense
    known = checkpoint.format(MODULE)  # only kernels of experts know zero points
    assert dense.unread_by_gpu or not (known.zero_points and known.packable)


@pytest.mark.parametrize("kind", [kind for kind in BITS if kind.startswith(("q", "iq", "tq"))])
def test_gguf_files(kind: str) -> None:
    [(weights, block_bytes)] = [sizes for name, *sizes in BLOCK_TYPES.values() if name == kind.upper()]
    raw = torch.zeros(SIZE, SIZE // weights * block_bytes, dtype=torch.uint8)
    codes, fmt = GGUF_CODES[kind.upper()](raw), QuantFormat(kind, "gguf")
    assert fmt.gpu_expert and accepted(codes)
    assert fmt.gpu_readable == accepted_dense(codes) == (kind in ("q4_0", "q8_0"))


def test_every_kind_is_decided() -> None:
    assert set(PACKED_KINDS) == set(BITS) - set(FLOATS)
    assert refusal("bf16", "f32", 3) == "the GPU kernels read k in pairs: a depth of 3 is odd"


def test_unreadable_formats_among_several_are_named() -> None:
    """A K-quant file: matrices in Q4_K, half of the downs in Q6_K, the others in Q8_0. Experts are read in all."""
    kinds = [
        ("0.mlp.experts.0.gate_proj", "q4_k"), ("0.mlp.experts.0.down_proj", "q6_k"),
        ("1.mlp.experts.0.down_proj", "q8_0"), ("0.self_attn.q_proj", "q4_k"), ("1.self_attn.v_proj", "q8_0"),
    ]  # fmt: skip
    found = stored_formats((f"model.layers.{name}", QuantFormat(kind, "gguf"), 100) for name, kind in kinds)
    assert (found.experts.unread_by_gpu, found.dense.unread_by_gpu, found.shared) == ("", "q4_k", StoredFormat())
