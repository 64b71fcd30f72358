"""Operations between a tower's products on a pool, beside torch on one thread."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem import _core
from tandem.errors import KernelError
from tandem.kernels.cpu_images import ImageThreads, OnThreads
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.images import ImageShape, PatchRotation
from tandem.kernels.reference import TorchOps

F32, BF16 = (torch.float32, 1e-6), (torch.bfloat16, 2**-7)
TIERS = _core.supported_tiers()
DENSE_TIERS = [tier for tier in ("scalar", "avx2", "avx512", "avx512_bf16") if tier in TIERS]


def rotation(patches: int, channels: int) -> PatchRotation:
    angles = torch.randn(patches, channels // 2).repeat(1, 2)
    return PatchRotation(angles.cos(), angles.sin())


def ops_of(
    threads: int, shape: ImageShape, dtype: torch.dtype, turns: PatchRotation, tier: str = "scalar"
) -> OnThreads:
    return CpuOps(_core.WorkerPool([-1] * threads), tier).image_ops(shape, dtype, turns)


@pytest.mark.parametrize(("dtype", "near"), [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 4, 1), (70, 3, 18, 16), (129, 2, 72, 128)], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_patch_sees_all(threads: int, shape: tuple[int, ...], dtype: torch.dtype, near: float) -> None:
    """near: of values of about 1; an average of them has their rounding at most, and that of scores, which grows with
    them."""
    torch.manual_seed(0)
    own, (patches, heads, channels, tile) = ImageShape(*shape), shape
    turns, qkv = rotation(patches, channels), torch.randn(patches, 3, heads, channels).to(dtype)
    tiles = [slice(first, min(first + tile, patches)) for first in range(0, patches, tile)]
    for scale in (1.0, 30.0):  # of scores that are far apart, too
        qkv[:, 0] *= scale
        core, plain = ops_of(threads, own, dtype, turns), TorchOps().image_ops(own, torch.float32, turns)
        queries = [core.split(qkv[rows], rows) for rows in tiles]
        got = torch.cat([core.attend(q) for q in queries])
        whole = slice(0, patches)
        wanted = plain.attend(plain.split(qkv.float(), whole))
        assert (got.float() - wanted).abs().max() < 4 * near * scale * qkv[:, 2].abs().max()


@pytest.mark.parametrize("tier", DENSE_TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_and_keys_turn_in_float_and_are_rounded_once(dtype: torch.dtype, tier: str) -> None:
    """A product and a sum of float32 have 2^-23 of error, what is kept half a unit of its type."""
    torch.manual_seed(1)
    shape, rows = ImageShape(40, 3, 72, 16), slice(8, 27)
    turns, qkv = rotation(40, 72), torch.randn(19, 3, 3, 72).to(dtype)
    core = ops_of(2, shape, dtype, turns, tier)
    q = core.split(qkv, rows)
    for got, x in ((q, qkv[:, 0]), (core._kv[0][:, rows], qkv[:, 1])):
        wide, cos, sin = x.double(), turns.cos[rows, None].double(), turns.sin[rows, None].double()
        first, second = wide.chunk(2, -1)
        wanted = (wide * cos + torch.cat([-second, first], -1) * sin).transpose(0, 1)
        near = 2**-22 * wide.abs().max() + torch.finfo(dtype).eps / 2 * wanted.abs()
        assert ((got.double() - wanted).abs() <= near).all()
    assert torch.equal(core._kv[1][:, rows], qkv[:, 2].transpose(0, 1))


@pytest.mark.parametrize("tier", DENSE_TIERS)
@pytest.mark.parametrize("width", [1, 16, 68, 1152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_take_the_mean_away(dtype: torch.dtype, width: int, tier: str) -> None:
    """A mean a hundred times the deviation costs as many digits of float32, and no more."""
    torch.manual_seed(2)
    x = (torch.randn(37, width) + 100).to(dtype)
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    ops = ops_of(2, ImageShape(4, 1, 4, 4), dtype, rotation(4, 4), tier)
    got = ops.layer_norm(x, weight, bias, 1e-6)
    wanted = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-6)
    near = 2**-23 * 100 * 8 * weight.abs().max() + torch.finfo(dtype).eps / 2 * wanted.abs()
    assert ((got.double() - wanted).abs() <= near).all()


@pytest.mark.parametrize("tier", DENSE_TIERS)
@pytest.mark.parametrize("rows", [1, 4, 37])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_gelu_of_rows_is_torch_s_own(threads: int, rows: int, tier: str) -> None:
    x = 3 * torch.randn(rows, 68, generator=torch.Generator().manual_seed(1))
    wanted = F.gelu(x.double(), approximate="tanh")
    ops = ops_of(threads, ImageShape(64, 2, 8, 32), torch.float32, rotation(64, 8), tier)
    assert torch.allclose(ops.gelu(x).double(), wanted, rtol=2**-19, atol=1e-7)


@pytest.mark.parametrize("wrong", ["rows", "width", "type"])
def test_other_arrays_are_refused(wrong: str) -> None:
    ops = ops_of(1, ImageShape(8, 2, 6, 4), torch.float32, rotation(8, 6))
    shapes = {"rows": (3, 3, 2, 6), "width": (2, 3, 2, 4), "type": (2, 3, 2, 6)}
    qkv: Tensor = torch.zeros(shapes[wrong], dtype=torch.bfloat16 if wrong == "type" else torch.float32)
    with pytest.raises(KernelError):
        ops.split(qkv, slice(6, 6 + len(qkv)))


def test_threads_may_run_where_the_engines_thread_could() -> None:
    """It has one CPU once it runs steps."""
    threads = ImageThreads(_core.WorkerPool([-1] * 2), "scalar")
    all_cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(all_cpus)})
    assert threads.pool().submit(os.sched_getaffinity, 0).result() == all_cpus
