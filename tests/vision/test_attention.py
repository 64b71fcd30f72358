"""Attention of an image's patches on several threads, beside torch on one."""

from __future__ import annotations

import os

import pytest
import torch

from tandem import _core
from tandem.kernels.cpu_images import ImageThreads
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.images import ImageShape
from tandem.kernels.reference import TorchOps

F32, BF16 = (torch.float32, 1e-6), (torch.bfloat16, 2**-7)


@pytest.mark.parametrize(("dtype", "near"), [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 4, 1), (70, 3, 18, 16), (129, 2, 72, 128)], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_patch_sees_all(threads: int, shape: tuple[int, ...], dtype: torch.dtype, near: float) -> None:
    """near: of values of about 1; an average of them has their rounding at most, and that of scores, which grows with
    them."""
    torch.manual_seed(0)
    own, (patches, heads, channels, tile) = ImageShape(*shape), shape
    q, k, v = torch.randn(3, patches, heads, channels).to(dtype).unbind()
    core = CpuOps(_core.WorkerPool([-1] * threads), "scalar").image_attention(own, dtype)
    plain = TorchOps().image_attention(own, torch.float32)
    plain.show(k.float(), v.float())
    for scale in (1.0, 30.0):  # of scores that are far apart, too
        core.show(k, v)
        got = torch.cat([core.attend(scale * q[first : first + tile]) for first in range(0, patches, tile)])
        wanted = plain.attend((scale * q).float())
        assert (got.float() - wanted).abs().max() < 4 * near * scale * v.abs().max()


def test_threads_may_run_where_the_engines_thread_could() -> None:
    """It has one CPU once it runs steps."""
    threads = ImageThreads(2)
    all_cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(all_cpus)})
    assert threads.pool().submit(os.sched_getaffinity, 0).result() == all_cpus
