"""Triton's attention over paged keys and values: split over the keys for decoding, blocks of queries for prefill.

Online softmax in float32; the query heads that share a key head are rows of one tile. A row's result depends on its own
length and on whether it decodes, not on the batch.
"""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.attention_decode import decode
from tandem.kernels.gpu.attention_prefill import prefill
from tandem.spec.gpu_scratch import DECODED_ROWS


class TritonAttention:
    """Tandem's own kernels."""

    pausable = True

    def begin(self, batch: KernelBatch, captured: bool) -> None:
        """Nothing is planned."""

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
        """Any mixture of chunks: q [T, H, D] -> [T, H * E]. The first sequences with one row each are decoded: a tile
        of queries would walk all keys of such a row alone."""
        rows, sequences = q.shape[0], batch.seq_lens.shape[0]
        single = sequences if rows == sequences else batch.single_rows
        out = q.new_empty((rows, q.shape[1] * v_pages.shape[3]))
        for first in range(0, single, DECODED_ROWS):
            some = slice(first, min(first + DECODED_ROWS, single))
            decode(q, (k_pages, v_pages), batch, (scale, window, sinks), some, out)
        if single < sequences:
            prefill(q, (k_pages, v_pages), batch, (scale, window, sinks), single, out)
        return out
