"""`ForwardBatch`: every tensor of one step, passed explicitly."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class ImageRowBatch:
    """Rows of a batch that stand for pieces of images. Their embedding is given, and they turn by three positions.

    Row i of them turns by row `first` + i of the rotary tables, which is made when a pass begins. What follows the
    first of a feature's levels is added behind the first layers, a level each.
    """

    rows: Tensor  # int64 [n]: of the batch
    features: Tensor  # [n, levels, hidden]
    places: Tensor  # int64 [n, 3]: in time, downwards, across
    first: int


@dataclass(slots=True)
class ForwardBatch:
    """T new tokens of S sequences, packed one after the other; prefill chunks and decode tokens alike.

    Sequence s owns rows query_starts[s] : query_starts[s+1]; after this step it has seq_lens[s] tokens, the last of
    which are those rows. Its token at position p lives in KV page block_tables[s, p // page_size], row p % page_size.
    """

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    cache_slots: Tensor  # int64 [T]: page * page_size + offset, where each new token's K and V go
    query_starts: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S]: cached + new tokens
    block_tables: Tensor  # int32 [S, P]: padded with 0
    logits_rows: Tensor  # int64 [R]: rows of [0, T) whose logits are wanted
    slots: Tensor  # int32 [S]: of what is kept of each sequence beside pages; 0 is nobody's
    single_rows: int = (
        0  # so many first sequences have one row each, as a step's decoding ones do; 0: not known
    )
    state_lens: Tensor | None = (
        None  # int32 [S]: tokens that a slot's folds hold; None: all before the step. Later ones are folded again
    )
    num_verified: Tensor | None = (
        None  # int32 [S]: rows that are tokens for certain; None: all, or the first of a slot's where rows are apart
    )
    turns: Tensor | None = None  # int64 [T]: rows of the rotary tables; None: they are the positions
    image_rows: ImageRowBatch | None = None  # None: all rows are tokens
    windows: ForwardBatch | None = (
        None  # the same rows, in the pages of layers that see a window; None: in those of all layers
    )

    @property
    def turning(self) -> Tensor:
        """int64 [T]: by which rows of the rotary tables they turn."""
        return self.positions if self.turns is None else self.turns

    @property
    def windowed(self) -> ForwardBatch:
        """For layers that see a window."""
        return self if self.windows is None else self.windows
