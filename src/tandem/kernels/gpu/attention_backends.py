"""`Attention`: what every attention backend of the GPU is, and the backends by name."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tandem.errors import ConfigError
from tandem.kernels.ops import BatchLayout


class Attention(Protocol):
    """Attention over paged keys and values, as `Ops.attention`."""

    def __call__(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: BatchLayout, scale: float, window: int
    ) -> Tensor:
        """q [T, H, D], pages [pages, page_size, G, D] -> [T, H * D]. May be captured in a CUDA graph where every
        sequence has one row: nothing is read back, and no shape depends on what tensors hold."""
        ...


def attention_of(name: str) -> Attention:
    """Raises ConfigError when the backend's package cannot be used."""
    if name == "triton":
        from tandem.kernels.gpu.attention import attention

        return attention
    if name == "torch":
        from tandem.kernels.gpu.attention_torch import TorchAttention

        return TorchAttention()
    raise ConfigError(f"unknown attention backend {name!r}; triton and torch exist")
