"""FlashInfer's attention over our pages, which lie as it wants them ("NHD"): its kernels for chunks do decoding, too.

FlashInfer plans each step on the CPU, from lengths and pages: `begin`, outside CUDA graphs. A graph has a plan of its
own, in memory that stays, and it is made anew before the graph is replayed. How a row's keys are split depends on the
batch, and so may the last bits of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.errors import ConfigError, KernelError
from tandem.kernels.batch_layout import KernelBatch

WORKSPACE_BYTES = 128 << 20  # for partial sums; what FlashInfer's documentation advises


class AttentionShape(NamedTuple):
    """Sizes that all layers have in common. scale: of scores; window: last keys that are seen, 0 for all; page_size:
    tokens; pages: of the longest sequence."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    page_size: int
    pages: int


class FlashInferAttention:
    """`wrapper` stands in for FlashInfer's class in tests."""

    pausable = False  # all steps share its workspace

    def __init__(
        self, shape: AttentionShape, device: torch.device, wrapper: Callable[..., Any] | None = None
    ) -> None:
        """Raises ConfigError where FlashInfer cannot be imported."""
        self._shape, self._device = shape, device
        self._wrapper = wrapper or _paged_wrapper()
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._eager = self._wrapper(self._workspace, "NHD", backend="fa2")
        self._captured: dict[int, Any] = {}
        self._current = self._eager

    def begin(self, batch: KernelBatch, captured: bool) -> None:
        shape = self._shape
        self._current = self._of_graph(len(batch.seq_lens)) if captured else self._eager
        pages = (batch.seq_lens + (shape.page_size - 1)) // shape.page_size
        first = torch.zeros(len(pages) + 1, dtype=torch.int32)
        torch.cumsum(pages, 0, dtype=torch.int32, out=first[1:])
        mask = torch.arange(batch.block_tables.shape[1])[None, :] < pages[:, None]
        self._current.plan(
            batch.query_starts, first, batch.block_tables[mask], batch.seq_lens - (pages - 1) * shape.page_size,
            shape.heads, shape.kv_heads, shape.head_dim, shape.page_size, causal=True, sm_scale=shape.scale,
            window_left=shape.window - 1, q_data_type=torch.bfloat16,
        )  # fmt: skip

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
        """As `begin` has planned it. Raises KernelError for another scale or window than the model's."""
        assert sinks is None
        if (scale, window) != (self._shape.scale, self._shape.window):
            raise KernelError(
                f"FlashInfer has planned scale and window of {self._shape}, not {scale}, {window}"
            )
        out: Tensor = self._current.run(q, (k_pages, v_pages))
        return out.view(len(q), -1)

    def _of_graph(self, rows: int) -> Any:
        """Reads its lengths and pages where they are now whenever the graph is replayed."""
        if rows not in self._captured:

            def buffer(size: int) -> Tensor:
                return torch.zeros(size, dtype=torch.int32, device=self._device)

            self._captured[rows] = self._wrapper(
                self._workspace, "NHD", use_cuda_graph=True, qo_indptr_buf=buffer(rows + 1),
                paged_kv_indptr_buf=buffer(rows + 1), paged_kv_indices_buf=buffer(rows * self._shape.pages),
                paged_kv_last_page_len_buf=buffer(rows), backend="fa2",
            )  # fmt: skip
        return self._captured[rows]


def _paged_wrapper() -> Callable[..., Any]:
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ImportError as error:
        raise ConfigError(
            f"--attention-backend flashinfer: {error}; pip install flashinfer-python, or take "
            "--attention-backend triton"
        ) from error
    wrapper: Callable[..., Any] = BatchPrefillWithPagedKVCacheWrapper
    return wrapper
