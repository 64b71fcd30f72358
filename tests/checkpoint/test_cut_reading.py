"""Rows and columns of a matrix, out of every stored format: the numbers of the whole, from nothing but their bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import stored_formats as formats
import tiny
from gguf_files import Kind, matrices_as, write_gguf
from tandem.checkpoint import checkpoint as safetensors
from tandem.checkpoint import open_checkpoint
from tandem.checkpoint.layouts import detect
from tandem.checkpoint.mapped.cut import read_part
from tandem.formats.codes import WeightCodes
from tandem.formats.cut import numbers
from tiny import settings

N, K, MODULE = 256, 512, "model.layers.0.mlp.experts.3.up_proj"
CUTS = (
    (0, 128, 0, 512), (128, 256, 0, 512), (0, 256, 0, 256), (0, 256, 256, 512), (128, 256, 128, 384), (8, 40, 0, 128),
)  # fmt: skip
KINDS = (Kind.F32, Kind.F16, Kind.MXFP4, Kind.Q4_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q4_K, Kind.Q6_K)
WIDE = settings(
    hidden_size=512, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4,
    moe_intermediate_size=512, intermediate_size=256,
)  # fmt: skip


def saved(name: str, path: Path) -> formats.Made:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(7)) * 0.1
    made = formats.MAKERS[name](weight.to(torch.bfloat16).float())
    save_file({MODULE + k: v.contiguous().clone() for k, v in made.tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": made.config} if made.config else {}))
    return made


@pytest.mark.parametrize("name", formats.MAKERS)
def test_a_part_has_the_numbers_of_the_whole(name, tmp_path) -> None:
    made = saved(name, tmp_path)
    for first, last, left, right in CUTS:
        rows, columns = slice(first, last), slice(left, right)
        read = open_checkpoint(tmp_path).weight(MODULE, (N, K), rows, columns)
        assert torch.equal(numbers(read).float(), made.expected[rows, columns])


class Mapped:
    """A mapped tensor of which parts can be had, but not the whole."""

    def __init__(self, tensor: torch.Tensor, seen: list[int]) -> None:
        self._tensor, self._seen = tensor, seen

    def __getitem__(self, cut: tuple[slice, ...]) -> torch.Tensor:
        part = self._tensor[cut]
        self._seen.append(part.nbytes)
        return part


@pytest.mark.parametrize("name", [name for name in formats.MAKERS if "act-order" not in name])
def test_codes_stay_codes_and_only_their_part_is_read(name, tmp_path) -> None:
    """A quarter of a matrix takes a quarter of its bytes; what belongs to a row or to all of it is read as a whole."""
    made, checkpoint = saved(name, tmp_path), safetensors.open_checkpoint(tmp_path)
    parts = checkpoint.modules()[MODULE]
    found, seen = detect(parts, checkpoint._hints, (N, K)), []
    tensors = {role: Mapped(checkpoint.mapped(part), seen) for role, part in parts.items()}
    read = read_part(found, parts, tensors.__getitem__, slice(128, 256), slice(256, 512))
    assert isinstance(read, WeightCodes) == isinstance(checkpoint.weight(MODULE, (N, K)), WeightCodes)
    assert torch.equal(numbers(read).float(), made.expected[128:256, 256:512])
    large = max(tensor.nbytes for tensor in made.tensors.values())
    small = sum(tensor.nbytes for tensor in made.tensors.values()) - large
    assert large // 4 <= sum(seen) <= large // 4 + small


@pytest.mark.parametrize("name", formats.MAKERS)
def test_a_cut_through_groups_of_128_keeps_codes(name, tmp_path) -> None:
    """The scale of such a group is that of both halves. Rows may end anywhere."""
    made, checkpoint = saved(name, tmp_path), open_checkpoint(tmp_path)
    whole = checkpoint.weight(MODULE, (N, K))
    cuts = (slice(None), slice(64, 192)), (slice(96, 192), slice(192, 512)), (slice(None, 32), slice(None, 64))
    for rows, columns in cuts:
        read = checkpoint.weight(MODULE, (N, K), rows, columns)
        assert torch.equal(numbers(read).float(), made.expected[rows, columns])
        assert isinstance(read, WeightCodes) == isinstance(whole, WeightCodes)


def test_a_finer_cut_is_numbers(tmp_path) -> None:
    made = saved("fp8 blocks", tmp_path)
    read = open_checkpoint(tmp_path).weight(MODULE, (N, K), slice(32, 64), slice(32, 192))
    assert isinstance(read, torch.Tensor) and torch.equal(read, made.expected[32:64, 32:192])


def test_of_a_cut_through_groups_no_others_are_read(tmp_path) -> None:
    made, checkpoint = saved("fp8 blocks", tmp_path), safetensors.open_checkpoint(tmp_path)
    parts = checkpoint.modules()[MODULE]
    found, seen = detect(parts, checkpoint._hints, (N, K)), []
    tensors = {role: Mapped(checkpoint.mapped(part), seen) for role, part in parts.items()}
    read = read_part(found, parts, tensors.__getitem__, slice(64, 128), slice(192, 256))
    assert isinstance(read, WeightCodes) and read.group == 64
    assert torch.equal(numbers(read), made.expected[64:128, 192:256])
    assert max(seen) == 128 * 128  # the block of codes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_gguf_blocks(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(tiny.VARIANTS, "wide", ("qwen3_moe", WIDE))
    tiny.save_tiny("wide", tmp_path / "source")
    checkpoint = open_checkpoint(write_gguf(tmp_path / "source", tmp_path / "m.gguf", matrices_as(kind)))
    whole = checkpoint.weight(MODULE, (512, 512))
    for rows, columns in ((slice(0, 256), slice(None)), (slice(None), slice(256, 512)), (slice(3, 9), slice(0, 256))):
        read = checkpoint.weight(MODULE, (512, 512), rows, columns)
        assert isinstance(read, WeightCodes) == isinstance(whole, WeightCodes)
        assert torch.equal(numbers(read), numbers(whole)[rows, columns])
    through = checkpoint.weight(MODULE, (512, 512), columns=slice(8, 24))
    assert torch.equal(numbers(through), numbers(whole)[:, 8:24])
