"""Numbers from pinned memory of the host to the GPU, by a kernel of our own.

A copy of CUDA's waits for the engine that copies, where experts of a prompt may be on their way, and within a graph for
other streams' blocks. A kernel has its stream's priority.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # words of a program


@triton.jit(do_not_specialize=["words"])
def _read(source, target, words, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, i < words, volatile=True), i < words)


def read(source: Tensor, target: Tensor) -> None:
    """Copies uint8 [4 n] in pinned memory to uint8 [4 n] on the GPU."""
    words = source.numel() // 4
    _read[(triton.cdiv(words, BLOCK),)](
        source.view(torch.int32), target.view(torch.int32), words, BLOCK=BLOCK, num_warps=4
    )  # fmt: skip
