"""Grouped-query attention over chosen rows of a cache: each query is a sequence of its own, whose pages hold one token
each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.selected_keys import SelectedKeys


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """`KernelBatch` of T rows that look at what they have chosen, in pages of one token."""

    positions: Tensor
    cache_slots: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slots: Tensor
    single_rows: int
    state_lens: Tensor | None = None
    num_verified: Tensor | None = None
    turns: Tensor | None = None

    @property
    def windowed(self) -> ChosenLayout:
        return self


def layout_of(chosen: SelectedKeys) -> ChosenLayout:
    """Nothing is written, so it does not matter where to."""
    count, device = len(chosen.counts), chosen.counts.device
    return ChosenLayout(
        positions=chosen.counts.long() - 1, cache_slots=torch.zeros(count, dtype=torch.int64, device=device),
        query_starts=torch.arange(count + 1, dtype=torch.int32, device=device), seq_lens=chosen.counts,
        block_tables=chosen.rows, slots=torch.zeros(count, dtype=torch.int32, device=device), single_rows=count,
    )  # fmt: skip


def as_sequences(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, chosen: SelectedKeys
) -> tuple[Tensor, Tensor, Tensor, ChosenLayout]:
    """Arguments of `Ops.attention`, up to its scale."""
    return q, by_row(k_pages), by_row(v_pages), layout_of(chosen)


def by_row(pages: Tensor) -> Tensor:
    """Pages [num_pages, page_size, …] as pages of one row."""
    return pages.flatten(0, 1)[:, None]
