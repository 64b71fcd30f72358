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
ROW_BLOCK = 256  # words of 8 bytes of a program that reads a row


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


@triton.jit(do_not_specialize=["words"])
def _read_rows(table, ids, out, words, BLOCK: tl.constexpr):
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + tl.program_id(0)).to(tl.int64)
    values = tl.load(table + row * words + i, i < words)
    tl.store(out + tl.program_id(0).to(tl.int64) * words + i, values, i < words)


def read_rows(table: Tensor, ids: Tensor) -> Tensor:
    """bfloat16 [N, 4 n] in pinned memory, and ids [T] on the GPU -> [T, 4 n] there: each row is read over the bus."""
    out = torch.empty((len(ids), table.shape[1]), dtype=table.dtype, device=ids.device)
    if not len(ids):
        return out
    words = table.shape[1] // 4
    grid = (len(ids), triton.cdiv(words, ROW_BLOCK))
    _read_rows[grid](table.view(torch.int64), ids, out.view(torch.int64), words, BLOCK=ROW_BLOCK, num_warps=4)
    return out
