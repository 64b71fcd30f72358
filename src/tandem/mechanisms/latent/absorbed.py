"""`AbsorbedHeads`: latent attention in absorbed form, written in other operations of `Ops`.

Keys and values of a head are matrices times one latent per token: k = W_K c, v = W_V c. Since q·(W_K c) = (W_K' q)·c
and sum p (W_V c) = W_V (sum p c), all heads attend to the latents themselves (DeepSeek-V2, arXiv 2405.04434, section
2.1). Only the latents are cached: one kv head of [rotary key | latent], which is key and value in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.ops import ColumnCopy, ColumnRun, Ops, PerHead, RopeTables
from tandem.kernels.selected_keys import SelectedKeys


class LatentSizes(NamedTuple):
    """Latent attention: H heads; a head's channels that are not turned and that are; a latent's and a value's."""

    heads: int
    nope: int
    rope: int
    rank: int
    value: int

    @property
    def width(self) -> int:
        """Numbers that are cached of a token: the rotary key, then the latent."""
        return self.rope + self.rank


class LatentWeights(NamedTuple):
    """Weights between the matrices of latent attention. norm [rank]: of the latent, with `eps`; rope turns pairs of
    neighbours (0, 1), (2, 3) … , or halves; `scale` multiplies scores."""

    keys: Tensor  # W_K' of each head, [H, rank, nope]
    values: Tensor  # W_V of each head, [H, value, rank]
    norm: Tensor
    eps: float
    rope: RopeTables
    scale: float
    neighbours: bool = True


class LatentHeads(Protocol):
    """Latent attention between its matrices."""

    def __call__(
        self, q: Tensor, kv: Tensor, batch: KernelBatch, pages: Tensor, chosen: SelectedKeys | None = None
    ) -> Tensor:
        """q [T, H * (nope + rope)] and kv [T, rank + rope], before norm and rotation -> values [T, H * value].

        Keys of row t, [rotary | latent], go to row batch.cache_slots[t] of pages [num_pages, page_size, 1, width].
        chosen: what rows attend to; None: all tokens up to themselves.
        """
        ...


class HeadOps(Ops, Protocol):
    """Operations that absorbed heads are written in."""

    def per_head(self, weights: Tensor, fmt: str = "bf16") -> PerHead:
        """Packs weights [H, N, K] once. The tensor is not kept."""
        ...

    def columns(self, runs: Sequence[ColumnRun]) -> ColumnCopy:
        """Copies these columns wherever it is called."""
        ...


class AttendChosen(Protocol):
    """`Ops.attention` of one kv head, whose keys are values, too, over what rows have chosen."""

    def __call__(
        self, q: Tensor, pages: Tensor, batch: KernelBatch, scale: float, chosen: SelectedKeys
    ) -> Tensor: ...


class AbsorbedHeads:
    """`LatentHeads` where there are no kernels of its own."""

    def __init__(
        self, ops: HeadOps, attend: AttendChosen, sizes: LatentSizes, weights: LatentWeights, fmt: str
    ) -> None:
        self._ops, self._attend_chosen, self._sizes = ops, attend, sizes
        self._norm, self._eps = weights.norm, weights.eps
        self._rope, self._scale = weights.rope, weights.scale
        self._absorb, self._values = ops.per_head(weights.keys, fmt), ops.per_head(weights.values, fmt)
        self._moves = _Moves(ops, sizes, 2 if weights.neighbours else 1)

    def __call__(
        self, q: Tensor, kv: Tensor, batch: KernelBatch, pages: Tensor, chosen: SelectedKeys | None = None
    ) -> Tensor:
        s, rows = self._sizes, len(q)
        turned = self._ops.rope_store(self._queries_and_key(q, kv), self._rope, batch, pages, pages, s.heads)
        attended, scale = q.new_empty((rows, s.heads * s.rank)), self._scale
        if chosen is None:
            absorbed = self._ops.attention(turned, pages, pages, batch, scale)
        else:
            absorbed = self._attend_chosen(turned, pages, batch, scale, chosen)
        self._moves.rope_last(absorbed, attended)
        return self._values(attended.view(rows, s.heads, s.rank)).flatten(1)

    def _queries_and_key(self, q: Tensor, kv: Tensor) -> Tensor:
        """[T, (H + 1) * width]: absorbed queries of all heads, then the key, all before the rotation."""
        s, rows, move = self._sizes, len(q), self._moves
        both = q.new_empty((rows, (s.heads + 1) * s.width))
        straight, latent = q.new_empty((rows, s.heads * s.nope)), q.new_empty((rows, s.rank))
        move.straight(q, straight)
        move.turned(q, both)
        move.turned_key(kv, both)
        move.latent(kv, latent)
        absorbed = self._absorb(straight.view(rows, s.heads, s.nope))
        move.absorbed(absorbed.flatten(1), both)
        move.key(self._ops.rms_norm(latent, self._norm, self._eps), both)
        return both


class _Moves:
    """Column copies between the matrices. A row of queries and key is H + 1 times [rotary | latent]."""

    def __init__(self, ops: HeadOps, s: LatentSizes, step: int) -> None:
        row, head, each = s.width, s.nope + s.rope, range(s.heads)
        self.straight = ops.columns([ColumnRun(h * head, h * s.nope, s.nope) for h in each])
        turned = [run for h in each for run in _halves(h * head + s.nope, h * row, s.rope, step)]
        self.turned = ops.columns(turned) if turned else _nothing
        self.turned_key = ops.columns(_halves(s.rank, s.heads * row, s.rope, step)) if turned else _nothing
        self.latent = ops.columns([ColumnRun(0, 0, s.rank)])
        self.absorbed = ops.columns([ColumnRun(h * s.rank, h * row + s.rope, s.rank) for h in each])
        self.key = ops.columns([ColumnRun(0, s.heads * row + s.rope, s.rank)])
        self.rope_last = ops.columns([ColumnRun(h * row + s.rope, h * s.rank, s.rank) for h in each])


def _nothing(x: Tensor, out: Tensor) -> None:
    """No columns."""


def _halves(source: int, target: int, width: int, step: int) -> list[ColumnRun]:
    """Rotary pairs of neighbours (step 2) as halves: 0, 2, … 1, 3, … (Transformers' rope_interleave). [] where nothing
    turns."""
    half = width // 2
    if not half:
        return []
    first = (0, 1) if step == 2 else (0, half)
    return [ColumnRun(source + at, target + i * half, half, step) for i, at in enumerate(first)]
