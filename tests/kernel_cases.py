"""What the kernel tests share: tiers, formats, pools, and the error bound of a packed product."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tandem import _core
from tandem.kernels.cpu import WorkerPool, Workspace

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
]
ALGORITHMS = {"dot_rows": 1 << 30, "tile_mm": 0}  # as Workspace's tile_from_rows

F32_UNIT, BF16_UNIT = 2.0**-24, 2.0**-8  # largest relative error of one rounding


def require_tier(tier: str) -> None:
    if tier != "amx_standin" and tier not in _core.supported_tiers():
        pytest.skip(f"this CPU cannot run tier {tier}: it has {', '.join(_core.supported_tiers())}")


@functools.cache
def pool_of(threads: int) -> WorkerPool:
    return WorkerPool([-1] * threads, 20)


@functools.cache
def workspace_of(tier: str, algorithm: str = "auto", threads: int = 2) -> Workspace:
    return Workspace(pool_of(threads), tier, ALGORITHMS.get(algorithm, -1))


def product_bound(magnitude: Tensor, depth: int, fmt: str, group: int, tier: str) -> Tensor:
    """Largest error of a float32 sum of `depth` products, where magnitude = sum of |x * w| per output.

    Each step rounds at most twice (product and sum, tiers without FMA; group sums and scales add a few). AMX rounds
    weights once more to bfloat16 when their group scales are multiplied in.
    """
    bound = (2 * depth + 16) * F32_UNIT * magnitude
    if group and tier.startswith("amx"):
        bound = bound + BF16_UNIT * magnitude
    return bound


def activations(rows: int, length: int, fmt: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, generator=generator)
    return x if fmt == "f32" else x.bfloat16()
