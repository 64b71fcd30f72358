"""Batches of sequences in scattered pages, for tests of single operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 16


@dataclass
class Batch:
    positions: Tensor
    cache_slots: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slots: Tensor
    single_rows: int = 0


def make_batch(spans: list[tuple[int, int]], tables: Tensor) -> Batch:
    """Sequence s contributes tokens [start, end) of spans[s]; tables [S, P] are its pages."""
    positions = torch.cat([torch.arange(a, b) for a, b in spans])
    rows = torch.cat([torch.full((b - a,), s) for s, (a, b) in enumerate(spans)])
    starts = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0).int()
    slots = tables[rows, positions // PAGE].long() * PAGE + positions % PAGE
    return Batch(positions, slots, starts, torch.tensor([b for _, b in spans]).int(), tables,
                 torch.zeros(len(spans), dtype=torch.int32))  # fmt: skip


def random_tables(sequences: int, tokens: int) -> tuple[Tensor, int]:
    """Scattered pages: position order must come from the table, not from memory."""
    pages = -(-tokens // PAGE)
    return torch.randperm(sequences * pages).view(sequences, pages).int(), sequences * pages
