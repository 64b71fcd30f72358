"""`KernelBatch`: which row of a step is which position of which sequence."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KernelBatch(Protocol):
    """The part of `models.ForwardBatch` that kernels read: which row is which position of which sequence."""

    @property
    def positions(self) -> Tensor: ...  # int64 [T]
    @property
    def turns(self) -> Tensor | None: ...  # int64 [T]: by which rows of rotary tables they turn; None: positions
    @property
    def cache_slots(self) -> Tensor: ...  # int64 [T]
    @property
    def query_starts(self) -> Tensor: ...  # int32 [S + 1]
    @property
    def seq_lens(self) -> Tensor: ...  # int32 [S]
    @property
    def block_tables(self) -> Tensor: ...  # int32 [S, P]
    @property
    def slots(self) -> Tensor: ...  # int32 [S]
    @property
    def single_rows(self) -> int: ...  # so many first sequences surely have one row each
    @property
    def state_lens(self) -> Tensor | None: ...  # int32 [S]
    @property
    def num_verified(self) -> Tensor | None: ...  # int32 [S]
    @property
    def windowed(self) -> KernelBatch: ...  # in the pages of layers that see a window


class TokenBatch(KernelBatch, Protocol):
    """Rows with the tokens that they are."""

    @property
    def input_ids(self) -> Tensor: ...  # int64 [T]
