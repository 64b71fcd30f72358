"""Attention of all patches of an image to all, on the C++ core."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem import _core
from tandem.kernels.images import ImageShape

PAGE = 64
UNSEEN = -1e30


class ByCore:
    """By the kernel of prompts, whose rows see what lies before them, on all workers.

    The last of some rows sees the image's keys, and as many more as there are rows before it. Those are hidden by a
    channel of their own: queries are 1 in it, the image's keys 0, and the others far below what a softmax sees.
    """

    def __init__(self, dense: _core.DenseOps, shape: ImageShape, dtype: torch.dtype) -> None:
        self._dense, self._shape = dense, shape
        pages = -(-(shape.patches + shape.tile - 1) // PAGE)
        self._k = torch.zeros(pages, PAGE, shape.heads, shape.channels + 1, dtype=dtype)
        self._v = torch.zeros(pages, PAGE, shape.heads, shape.channels, dtype=dtype)
        self._k.flatten(0, 1)[shape.patches :, :, shape.channels] = UNSEEN

    def show(self, k: Tensor, v: Tensor) -> None:
        self._k.flatten(0, 1)[: self._shape.patches, :, : self._shape.channels] = k
        self._v.flatten(0, 1)[: self._shape.patches] = v

    def seen(self, q: Tensor) -> Tensor:
        s, out = self._shape, q.new_empty((len(q), q.shape[1] * q.shape[2]))
        heads, asking = _core.Heads(s.heads, s.heads, s.channels + 1, 0, 0, s.channels), F.pad(q, (0, 1), value=1.0)
        self._dense.attention(
            self._view(len(q)), heads, asking, self._k, self._v, out, s.channels**-0.5, 0, None
        )
        return out

    def _view(self, rows: int) -> _core.BatchView:
        """Rows of which the first lies behind all other patches."""
        first, pages = self._shape.patches - 1, len(self._k)
        places = torch.arange(first, first + rows)
        return _core.BatchView(
            positions=places, cache_slots=places, query_starts=torch.tensor([0, rows], dtype=torch.int32),
            seq_lens=torch.tensor([first + rows], dtype=torch.int32),
            block_tables=torch.arange(pages, dtype=torch.int32)[None], page_size=PAGE, num_pages=pages,
            slots=torch.zeros(1, dtype=torch.int32),
        )  # fmt: skip
