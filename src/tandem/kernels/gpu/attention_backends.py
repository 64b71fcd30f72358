"""`AttentionBackend`: what every attention backend of the GPU is, and the backends by name."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.attention_flashinfer import AttentionShape, FlashInferAttention
from tandem.kernels.gpu.attention_torch import TorchAttention


class AttentionBackend(Protocol):
    """Attention over paged keys and values, as `Ops.attention`."""

    pausable: bool  # what a step plans is not kept: other steps may run between two layers of one

    def begin(self, batch: KernelBatch, captured: bool) -> None:
        """Before a step's layers run; captured: before a CUDA graph of so many rows is captured or replayed, or where
        such graphs may run beside it. The batch is the step's, in CPU memory."""
        ...

    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: KernelBatch,
        scale: float,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D], pages [pages, page_size, G, D] -> [T, H * D]. May be captured in a CUDA graph where every
        sequence has one row: nothing is read back, and no shape depends on what tensors hold. sinks: only of Triton's
        kernels; `planner/attention_backend.py` refuses the others."""
        ...


def attention_of(
    name: str, shape: AttentionShape | None = None, device: torch.device | None = None
) -> AttentionBackend:
    """shape and device: for those that plan. Raises ConfigError when the backend's package cannot be used."""
    if name == "triton":  # imported where it is used: Triton may be missing
        from tandem.kernels.gpu.attention import TritonAttention
        from tandem.kernels.gpu.cudnn_attention.attention import PieceAttention

        return PieceAttention(TritonAttention())
    if name == "torch":
        return TorchAttention()
    if name == "flashinfer" and shape is not None and device is not None:
        return FlashInferAttention(shape, device)
    raise ConfigError(f"unknown attention backend {name!r}; triton, torch and flashinfer exist")
