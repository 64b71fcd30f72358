"""Tensors of any shape and type under the names of quantised parts: a CheckpointError or a matrix, nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save_file

import stored_formats as formats
from tandem.checkpoint import open_checkpoint
from tandem.errors import CheckpointError
from tandem.formats.cut import numbers

N, K, ROUNDS = 32, 128, 25
DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip
NAMES = [name for name in formats.MAKERS if "blocks" not in name and "g128" not in name]


def mutated(tensors: dict[str, torch.Tensor], chance: random.Random) -> dict[str, torch.Tensor]:
    """One part left out, of another type, or of another shape."""
    name = chance.choice(sorted(tensors))
    kind, part = chance.randrange(3), tensors[name]
    if kind == 0:
        return {k: v for k, v in tensors.items() if k != name}
    if kind == 1:
        other = torch.randint(0, 256, (part.numel() * 8,), dtype=torch.uint8).view(chance.choice(DTYPES))
        return tensors | {name: other[: part.numel()].view(part.shape)}
    shape = [chance.choice((0, 1, 2, 7, 8, N, K)) for _ in range(chance.randrange(4))]
    return tensors | {name: torch.zeros(shape).to(part.dtype)}


@pytest.mark.parametrize("name", NAMES)
def test_any_part_may_be_anything(name, tmp_path):
    chance = random.Random(name)
    torch.manual_seed(0)
    whole = formats.MAKERS[name](torch.randn(N, K)).tensors
    read = 0
    for _ in range(ROUNDS):
        tensors = {f"m{k}": v.contiguous().clone() for k, v in mutated(whole, chance).items()}
        save_file(tensors, tmp_path / "model.safetensors")
        try:
            matrix = numbers(open_checkpoint(tmp_path).weight("m", (N, K)))
        except CheckpointError as error:
            assert "m" in str(error) and str(tmp_path) in str(error)
        else:
            assert matrix.shape == (N, K)
            read += 1
    assert read < ROUNDS
