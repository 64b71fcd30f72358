"""Rows of raw GGUF blocks, and the halves in them."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.errors import KernelError


def gguf_rows(data: Tensor, block_bytes: int) -> Tensor:
    """Rows of raw GGUF blocks, uint8 [N, bytes], as [N, blocks, block_bytes]."""
    if data.dim() != 2 or data.dtype is not torch.uint8 or data.shape[1] % block_bytes:
        raise KernelError(f"GGUF rows must be uint8 [N, blocks * {block_bytes}], not {list(data.shape)}")
    return data.view(data.shape[0], -1, block_bytes)


def half_at(blocks: Tensor, at: int) -> Tensor:
    """The half at byte `at` of every block, float16 [N, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].contiguous()
