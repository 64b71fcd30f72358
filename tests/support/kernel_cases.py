"""Shared by the kernel tests: tiers, formats, pools, and the error bound of a packed product."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import covering
from tandem import _core
from tandem.errors import CacheDamaged
from tandem.formats.codes import WeightCodes, join_nibbles
from tandem.formats.gguf_blocks import GGUF_CODES
from tandem.formats.reference import STORED, magnitudes, quantise, stored
from tandem.kernels.cpu import PackedExperts, PackedMatrix, WorkerPool, Workspace
from tandem.kernels.fit import as_packed
from tandem.kernels.packed.cache import PackedCache

TIERS = ["scalar", "avx2", "avx512", "avx512_bf16", "amx", "amx_standin"]
# Row results do not depend on the batch; AMX sums in the tile's own order.
INVARIANT_TIERS = TIERS[:4]
FORMATS = [
    ("f32", 0),
    ("bf16", 0),
    ("int8", 32),
    ("int8", 128),
    ("int8", 0),
    ("int4", 32),
    ("int4", 64),
    ("int4", 128),
    ("fp8", 128),
    ("fp8", 0),
    ("mxfp8", 32),
    ("mxfp4", 32),
    ("nvfp4", 16),
    ("int4_zeros", 32),
    ("int4_zeros", 128),
    ("int6", 16),
    ("int6", 128),
    ("int3", 16),
    ("int3", 32),
    ("int2_zeros", 16),
    ("int2_zeros", 64),
]
CODE_TYPES = {
    "mxfp8": "fp8",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
    "int4_zeros": "uint4",
    "int2_zeros": "uint2",
}  # what the core calls the format, where it differs
ALGORITHMS = {"dot_rows": 1 << 30, "tile_mm": 0}  # as Workspace's tile_from_rows

F32_UNIT, F16_UNIT, BF16_UNIT = 2.0**-24, 2.0**-11, 2.0**-8  # largest relative error of one rounding


def runs(tier: str) -> bool:
    stands_in = tier == "amx_standin" and tier in _core.built_tiers()
    return stands_in or tier in _core.supported_tiers()


PLAIN_TIER = "avx2" if runs("avx2") else "scalar"  # where any tier will do that rounds as float does


def invariant_tier(runnable: Iterable[str]) -> str:
    """The best of those tiers for tests that compare bits: an extension may have none but `scalar` and `amx`."""
    return [tier for tier in runnable if tier in INVARIANT_TIERS][-1]


INVARIANT_TIER = invariant_tier(_core.supported_tiers())


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """`covering.pairwise`, where tiers that are skipped here cover nothing."""
    return covering.pairwise(*axes, skipped=[tier for tier in TIERS if not runs(tier)])


def require_tier(tier: str) -> None:
    if not runs(tier):
        here = ", ".join(_core.supported_tiers())
        pytest.skip(f"tier {tier} was not built, or this CPU cannot run it: {here} can be run")


@functools.cache
def pool_of(threads: int) -> WorkerPool:
    return WorkerPool([-1] * threads, 20)


@functools.cache
def workspace_of(tier: str, algorithm: str = "auto", threads: int = 2) -> Workspace:
    """one_way: as the deterministic mode has it."""
    return Workspace(pool_of(threads), tier, ALGORITHMS.get(algorithm, -1), one_way=algorithm == "one_way")


def packed_matrix(
    workspace: Workspace, weight: Tensor, bias: Tensor | None, fmt: str, group: int
) -> PackedMatrix:
    """From numbers, or in formats that only checkpoints make, from codes."""
    if fmt in STORED:
        return PackedMatrix.from_codes(workspace, stored(weight, fmt, group), bias)
    return PackedMatrix(workspace, weight, bias, fmt, group)


def packed_experts(
    workspace: Workspace, experts: int, hidden: int, width: int, fmt: str, group: int
) -> PackedExperts:
    if fmt in STORED:
        return PackedExperts(workspace, experts, hidden, width)  # the codes decide
    return PackedExperts(workspace, experts, hidden, width, fmt, group=group)


def load_expert(
    layer: PackedExperts,
    expert: int,
    weights: tuple[Tensor, Tensor, Tensor],
    fmt: str,
    group: int,
) -> None:
    """gate, up and down, as numbers or as codes."""
    gate, up, down = (stored(w, fmt, group) for w in weights) if fmt in STORED else weights
    layer.load(expert, gate, up, down)


def magnitude_of(weight: Tensor, fmt: str, group: int) -> Tensor:
    """Magnitude that a product's rounding errors are relative to, per weight."""
    return magnitudes(stored(weight, fmt, group)) if fmt in STORED else as_packed(weight, fmt, group).abs()


def product_bound(magnitude: Tensor, depth: int, fmt: str, group: int, tier: str) -> Tensor:
    """Largest error of a float32 sum of `depth` products, where magnitude = sum of |x * w| per output.

    Each step rounds at most twice (product and sum, tiers without FMA; group sums and scales add a few). AMX rounds
    weights once more to bfloat16 when their group scales are multiplied in, after rounding scale and product to half
    (csrc/isa/avx512_fp16.h). Weights with offsets are rounded relative to their group's largest; random ones keep this.
    """
    bound = (2 * depth + 16) * F32_UNIT * magnitude
    if group and tier.startswith("amx"):
        bound = bound + (BF16_UNIT + 2 * F16_UNIT) * magnitude
    return bound


def activations(rows: int, length: int, fmt: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, generator=generator)
    return x if fmt == "f32" else x.bfloat16()


def opened(cache: PackedCache) -> bool:
    """Mapped and verified, as a start does. False when there is no file that can be used."""
    with suppress(CacheDamaged):
        cache.begin()
        cache.confirm(lambda _done, _total: None)
    return cache.mapped


# Weights and bytes of a block, and its halves by place: of a size that makes weights of about 0.05.
GGUF_BLOCKS = {
    "q4_0": (32, 18, {0: 1.1e-2}), "q4_1": (32, 20, {0: 1.1e-2, 2: -8e-2}), "q5_0": (32, 22, {0: 5.4e-3}),
    "q5_1": (32, 24, {0: 5.4e-3, 2: -8e-2}), "q8_0": (32, 34, {0: 7e-4}), "q2_k": (256, 84, {80: 4e-3, 82: 4e-3}),
    "q3_k": (256, 110, {108: 1.5e-3}), "q4_k": (256, 144, {0: 2e-4, 2: 2e-4}),
    "q5_k": (256, 176, {0: 1e-4, 2: 1e-4}), "q6_k": (256, 210, {208: 4e-5}),
    "iq4_nl": (32, 18, {0: 6e-4}), "iq4_xs": (256, 136, {0: 3e-5}), "tq2_0": (256, 66, {64: 4e-2}),
    "iq2_xxs": (256, 66, {0: 9e-4}), "iq2_xs": (256, 74, {0: 9e-4}), "iq2_s": (256, 82, {0: 9e-4}),
    "iq3_xxs": (256, 98, {0: 3e-4}), "iq3_s": (256, 110, {0: 3e-4}), "iq1_s": (256, 50, {0: 7e-3}),
    "iq1_m": (256, 56, {}),
}  # fmt: skip
CODEBOOKS = [kind for kind in GGUF_BLOCKS if kind.startswith(("iq1", "iq2", "iq3"))]


def gguf_codes(kind: str, columns: int, depth: int, seed: int = 1) -> WeightCodes:
    """Random codes and scales of one of GGUF's blocks."""
    weights, block, halves = GGUF_BLOCKS[kind]
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (columns, depth // weights, block), dtype=torch.uint8, generator=generator)
    for at, size in halves.items():
        values = (torch.rand(*raw.shape[:2], 1, generator=generator) + 0.5) * size
        raw[..., at : at + 2] = values.half().view(torch.uint8)
    if kind == "iq1_m":  # of 2^-7: a quarter of the half ends each of the last four words
        raw[..., 49::2] = raw[..., 49::2] & 15 | torch.tensor([0, 0, 0, 0x20], dtype=torch.uint8)
    return GGUF_CODES[kind.upper()](raw.flatten(1))


DENSE_FORMATS = ["int8", "int8 rows", "int4", "int4 f16", "fp8", "fp8 rows", "mxfp8", "mxfp4", "nvfp4"]


@functools.cache
def coded(columns: int, depth: int, fmt: str) -> WeightCodes:
    """A random matrix in a format that the GPU's dense kernels read."""
    weight = torch.randn(columns, depth, generator=torch.Generator().manual_seed(1)) / depth**0.5
    kind, _, how = fmt.partition(" ")
    if not kind.startswith("int"):
        return stored(weight, kind, 0 if how else 128)
    codes, scales = quantise(weight, kind, 0 if how == "rows" else 32)
    bits = codes.flatten(1)[:, :depth].to(torch.int8).view(torch.uint8)
    kept = scales[..., 0] if how == "rows" else scales[..., 0].to(torch.float16 if how else torch.bfloat16)
    bits = join_nibbles(bits & 15) if kind == "int4" else bits
    return WeightCodes(bits.contiguous(), kept, kind, 0 if how == "rows" else 32, depth)
