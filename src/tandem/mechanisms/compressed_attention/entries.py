"""Entries that stand for several tokens: how they are made, which of them a token sees, and where they lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.step_rows import StepRows
from tandem.mechanisms.compressed_attention.cost import COMPRESSED_KEY_BYTES
from tandem.mechanisms.compressed_attention.shape import CompressedAttention, Compression, EntryIndex
from tandem.mechanisms.compressed_attention.weights import CompressedWeights, CompressionWeights, turn
from tandem.spec.state import LANES


class VisibleEntries(NamedTuple):
    """Entries that rows see: `places` int64 [·, E] are rows of the flattened pages, of which the first counts [T] are
    meant. whose [T]: which line of `places` is a row's; None: its own."""

    places: Tensor
    counts: Tensor
    whose: Tensor | None = None

    @property
    def width(self) -> int:
        return int(self.places.shape[1])

    def of(self, rows: slice) -> Tensor:
        """[b, E] of some of the rows."""
        return self.places[rows if self.whose is None else self.whose[rows]]


class Entries:
    """Compresses the tokens of a layer, and chooses what each row sees."""

    def __init__(self, shape: CompressedAttention, compression: Compression, weights: CompressedWeights) -> None:
        self.shape, self.compression, self.weights = shape, compression, weights

    def compress(self, inputs: Tensor, rows: StepRows, ring: Tensor, pages: tuple[Tensor, ...]) -> None:
        """inputs [T, n]: of the new tokens. Entries whose last token is among them are written into `pages`; on a GPU
        also those that are still open, which nobody reads before they are written again."""
        stride = self.compression.stride
        closing = rows.once(("closing", stride), lambda: _ends_of_entries(rows, stride))
        if len(closing):
            sources = rows.keys_of(ring.shape[1], self.compression.rows).flip(1)[closing]
            tokens = rows.joined(ring, inputs)[sources]
            last, target = rows.positions[closing], rows.cache_slots[closing] // stride
            for part, weights, page in zip(self._parts(tokens), self.weights.compressions, pages, strict=True):
                page.flatten(0, 1)[target] = self._entry(*part, weights, last).to(page.dtype)
        rows.keep(ring, inputs)

    def _parts(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Inputs and gates [C, rows, D] of entries, and of an index's, out of [C, rows, all of them]."""
        widths = self.compression.widths(self.shape.dim)
        sizes = [w * self.compression.series for w in widths for _ in range(2)]
        parts = [self._own(part, w) for part, w in zip(tokens.split(sizes, -1), _twice(widths), strict=True)]
        return list(zip(parts[::2], parts[1::2], strict=True))

    def _own(self, part: Tensor, width: int) -> Tensor:
        """With an overlap the window before counts by the first series, and the own one by the second."""
        if not self.compression.overlap:
            return part
        return torch.cat((part[:, : self.compression.stride, :width], part[:, self.compression.stride :, width:]), 1)

    def _entry(self, kv: Tensor, gates: Tensor, weights: CompressionWeights, last: Tensor) -> Tensor:
        """float32 [C, D]. Tokens before the sequence's beginning count for nothing."""
        back = torch.arange(self.compression.rows - 1, -1, -1, device=last.device)
        outside = last[:, None] < back
        gates = (gates.float() + weights.bias).masked_fill(outside[:, :, None], float("-inf"))
        summed = (kv.float() * _shares(gates)).sum(1)
        normed = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + self.shape.eps) * weights.norm
        at = (last + 1 - self.compression.stride).clamp(min=0)
        return turn(normed, self.weights.cos[at], self.weights.sin[at])

    def all_seen(self, rows: StepRows, page: int) -> VisibleEntries:
        """Places of every closed entry; `page`: entries of a page."""
        return rows.once(("seen", self.compression.stride), lambda: _all_seen(rows, self.compression.stride, page))

    def chosen(
        self, visible: VisibleEntries, index: EntryIndex, query: tuple[Tensor, Tensor], rows: StepRows, keys: Tensor
    ) -> VisibleEntries:
        """The best of `visible` for each row, in their own order, so that rounding does not depend on scores. query: q
        [T, Hi, Di] and weights [T, Hi], as projected; keys [pages, entries, Di]."""
        if visible.width <= index.budget:
            return visible
        cos, sin = (table[rows.positions][:, None] for table in (self.weights.cos, self.weights.sin))
        q, weights = turn(query[0].float(), cos, sin), query[1].float() * (index.dim * index.heads) ** -0.5
        visible = _whole_vectors(visible)
        index_keys, best = keys.flatten(0, 1), []
        each = max(1, COMPRESSED_KEY_BYTES // (4 * visible.width * (index.heads + index.dim)))
        for i in range(0, len(q), each):
            part = slice(i, i + each)
            places = visible.of(part)
            order = _best(index_keys[places], q[part], weights[part], visible.counts[part], index.budget)
            best.append(places.gather(1, order))
        return VisibleEntries(torch.cat(best), visible.counts.clamp(max=index.budget))


def _shares(gates: Tensor) -> Tensor:
    """Softmax of [C, rows, D] over rows. Of whole vectors: torch computes what is left over in another way, and with it
    an entry's bits would depend on how many are closed together."""
    width = gates.shape[2]
    return F.pad(gates, (0, -width % (2 * LANES))).softmax(1)[:, :, :width]


def _whole_vectors(entries: VisibleEntries) -> VisibleEntries:
    """Filled up: else the last entries' scores, and so what is chosen, would depend on how many others there are."""
    return entries._replace(places=F.pad(entries.places, (0, -entries.width % (2 * LANES))))


def _best(keys: Tensor, q: Tensor, weights: Tensor, counts: Tensor, budget: int) -> Tensor:
    """int64 [b, budget], ascending; those that do not count come last. keys [b, E, Di]; equal scores: the first."""
    products = torch.matmul(q, keys.float().transpose(1, 2)).relu_()
    scores = torch.matmul(weights[:, None], products)[:, 0]
    width, column = scores.shape[1], torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill(column >= counts[:, None], float("-inf"))
    order = torch.sort(scores, stable=True, descending=True).indices[:, :budget]
    order = order.masked_fill(order >= counts[:, None], width)
    return order.sort().values.clamp(max=width - 1)


def _ends_of_entries(rows: StepRows, stride: int) -> Tensor:
    """Rows that are the last of an entry; on a GPU, where that is not asked, all."""
    if rows.static:
        return torch.arange(len(rows.positions), device=rows.positions.device)
    return ((rows.positions + 1) % stride == 0).nonzero().flatten()


def _all_seen(rows: StepRows, stride: int, page: int) -> VisibleEntries:
    counts = (rows.positions + 1) // stride
    width = rows.tables.shape[1] * page if rows.static else int(counts.max())
    each = torch.arange(width, device=counts.device)
    places = rows.tables[:, each // page] * page + each % page
    return VisibleEntries(places, counts, rows.sequence)


def _twice(widths: tuple[int, ...]) -> list[int]:
    return [width for width in widths for _ in range(2)]
