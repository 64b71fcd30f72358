"""PyTorch's variable-length attention over our pages (`torch.nn.attention.varlen`, PyTorch 2.13 or newer).

Its kernels are FlashAttention 2's. Pages are multiples of 256 tokens (`planner/attention_backend.py` checks it before
anything is loaded). Keys are not split, because split keys in pages give wrong rows there (pytorch issue 194167). So a
row's result does not depend on the batch, but few long sequences leave most of a GPU idle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import varlen

from tandem.errors import ConfigError
from tandem.kernels.batch_layout import KernelBatch

EVERYTHING = (-1, -1)  # window of a single row: all keys are its past
CAUSAL = (-1, 0)


class TorchAttention:
    """`attend` stands in for PyTorch's function in tests."""

    pausable = True

    def __init__(self, attend: Callable[..., Tensor] | None = None) -> None:
        """Raises ConfigError where PyTorch's function is missing or reads no pages."""
        self._attend = attend or _varlen_attn()

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
        assert sinks is None
        rows, sequences = q.shape[0], batch.seq_lens.shape[0]
        single = sequences if rows == sequences else batch.single_rows
        pages = k_pages, v_pages
        parts = []
        if single:
            parts.append(self._run(q[:single], pages, batch, slice(0, single), scale, window))
        if single < sequences:
            parts.append(self._run(q[single:], pages, batch, slice(single, sequences), scale, window))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(rows, -1)

    def _run(
        self,
        q: Tensor,
        pages: tuple[Tensor, Tensor],
        batch: KernelBatch,
        which: slice,
        scale: float,
        window: int,
    ) -> Tensor:
        """The sequences `which`, whose rows q are; those before have one row each."""
        tables = batch.block_tables[which]
        starts = batch.query_starts[which.start : which.stop + 1]
        starts = starts - which.start if which.start else starts
        decoding = q.shape[0] == tables.shape[0]
        whole = (
            EVERYTHING if decoding else CAUSAL
        )  # the former also lets it put a group's heads into one tile
        return self._attend(
            q, *pages, starts, starts,  # the latter is for keys that are not in pages, but may not be left out
            1 if decoding else q.shape[0], tables.shape[1] * pages[0].shape[1],
            scale=scale, window_size=(window - 1, 0) if window else whole, enable_gqa=True,
            seqused_k=batch.seq_lens[which], block_table=tables, num_splits=1,
        )  # fmt: skip


def _varlen_attn() -> Callable[..., Tensor]:
    attend: Callable[..., Tensor] | None = getattr(varlen, "varlen_attn", None)
    if attend is None or "block_table" not in inspect.signature(attend).parameters:
        raise ConfigError(
            f"--attention-backend torch: torch.nn.attention.varlen of PyTorch {torch.__version__} reads no pages; "
            "pip install 'torch>=2.13', or take --attention-backend triton"
        )
    return attend
