"""`CompressedHeads`: compressed attention between its matrices, in torch; `Attend` differs by machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.kernels.ops import PerHead
from tandem.kernels.step_rows import BlockRows, StepRows
from tandem.mechanisms.compressed_attention.cost import COMPRESSED_KEY_BYTES
from tandem.mechanisms.compressed_attention.entries import Entries, VisibleEntries
from tandem.mechanisms.compressed_attention.shape import CompressedAttention
from tandem.mechanisms.compressed_attention.weights import CompressedWeights, turn


class Attend(Protocol):
    """Attention of rows to keys of their own."""

    def __call__(self, q: Tensor, keys: Tensor, counts: Tensor, scale: float, sinks: Tensor) -> Tensor:
        """q [b, H, D] over the first counts[i] of keys [b, K, D], which are values, too -> [b, H, D]. Softmax in
        float32; sinks float32 [H] count in it and have no value. Keys beyond may be anything."""
        ...


class Projected(NamedTuple):
    """Projections of T rows: q [T, H * D] and kv [T, D], normed; inputs of entries [T, n]; an index's q [T, Hi * Di]
    and weights [T, Hi]."""

    q: Tensor
    kv: Tensor
    inputs: Tensor | None = None
    index_q: Tensor | None = None
    index_weights: Tensor | None = None


class WindowKeys(NamedTuple):
    """Where `StepRows.joined` has the window of each row, how many keys it has in all, and the order in which those
    that count come first; None where they do so already."""

    window: Tensor
    counts: Tensor
    order: Tensor | None


class CompressedHeads:
    """From projected rows to the output's groups. Rows depend on their own sequence only, not on how it was cut."""

    def __init__(
        self, shape: CompressedAttention, weights: CompressedWeights, attend: Attend, groups: Callable[[Tensor], Tensor]
    ) -> None:
        """groups: multiplies [T, G, H * D / G] by each group's own matrix, to [T, G, rank]. `weights.groups` is not
        kept beside it: DeepSeek-V4-Flash's are 2.7 GiB."""
        weights = weights._replace(groups=weights.groups.new_empty(0))
        self.shape, self.weights, self._attend, self._groups = shape, weights, attend, groups
        self._entries = None if shape.compression is None else Entries(shape, shape.compression, weights)

    def __call__(self, p: Projected, rows: StepRows, ring: Tensor, compressed_kv: tuple[Tensor, ...]) -> Tensor:
        """-> [T, G * rank]. ring [slots, R, D], R >= window; compressed_kv: the ring of inputs, then pages of entries
        [pages, n, D] and of an index's. All of them go on. q and kv are changed."""
        shape, (cos, sin) = self.shape, rows.once(("turns", id(self.weights.cos)), lambda: self._turns(rows))
        q, kv = turn(p.q.view(len(p.q), shape.heads, shape.dim), cos[:, None], sin[:, None]), turn(p.kv, cos, sin)
        visible, entries = self._visible(p, rows, compressed_kv), compressed_kv[1] if compressed_kv else kv[None, :0]
        window = self._keys(rows, visible, ring.shape[1])
        if rows.row_per_sequence:  # they may follow each other in one ring
            rows.keep(ring, kv)
        out = self._attended(q, rows.joined(ring, kv), window, visible, entries.flatten(0, 1))
        if not rows.row_per_sequence:  # a ring has no room for all rows of a prompt beside those before
            rows.keep(ring, kv)
        turn(out, cos[:, None], -sin[:, None])
        return self._groups(out.view(len(out), shape.out_groups, shape.group_dim)).flatten(1)

    def keep(self, kv: Tensor, rows: StepRows, ring: Tensor) -> None:
        """Keys of rows [T, D], normed, go into the ring; nobody asks here. kv is changed."""
        cos, sin = rows.once(("turns", id(self.weights.cos)), lambda: self._turns(rows))
        rows.keep(ring, turn(kv, cos, sin))

    def block(self, p: Projected, at: BlockRows, ring: Tensor) -> Tensor:
        """-> [B * n, G * rank]. Every row sees all rows of its block, and the window that ends at `last`. The ring
        stays as it is; q and kv are changed. Tables of a short context have no turns for all positions: those rows'
        tokens come to nothing."""
        shape, places = self.shape, at.positions.clamp(max=len(self.weights.cos) - 1)
        cos, sin = self.weights.cos[places], self.weights.sin[places]
        q, kv = turn(p.q.view(len(p.q), shape.heads, shape.dim), cos[:, None], sin[:, None]), turn(p.kv, cos, sin)
        own = kv.view(len(at.last), -1, shape.dim)
        back = at.last[:, None] - torch.arange(shape.window, device=kv.device)
        keys = torch.cat((own, ring[at.slots[:, None], back % ring.shape[1]]), 1)
        rows, counts = own.shape[1], own.shape[1] + (at.last + 1).clamp(max=shape.window)
        each = keys.repeat_interleave(rows, 0), counts.repeat_interleave(rows)
        out = self._attend(q, *each, shape.scale, self.weights.sinks)
        turn(out, cos[:, None], -sin[:, None])
        return self._groups(out.view(len(out), shape.out_groups, shape.group_dim)).flatten(1)

    def _turns(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        return self.weights.cos[rows.positions], self.weights.sin[rows.positions]

    def _visible(self, p: Projected, rows: StepRows, compressed_kv: tuple[Tensor, ...]) -> VisibleEntries | None:
        """Entries that rows see, the new ones among them."""
        if self._entries is None:
            return None
        assert p.inputs is not None
        inputs, *pages = compressed_kv
        self._entries.compress(p.inputs, rows, inputs, tuple(pages))
        visible, index = self._entries.all_seen(rows, pages[0].shape[1]), self._entries.compression.index
        if index is None:
            return visible
        assert p.index_q is not None and p.index_weights is not None
        query = p.index_q.view(len(p.index_q), index.heads, index.dim), p.index_weights
        return self._entries.chosen(visible, index, query, rows, pages[1])

    def _attended(
        self, q: Tensor, tokens: Tensor, keys_of: WindowKeys, visible: VisibleEntries | None, entries: Tensor
    ) -> Tensor:
        """[T, H, D]. tokens: `StepRows.joined`; entries: all pages' rows."""
        window, counts, order = keys_of
        width = window.shape[1] + (0 if visible is None else visible.width)
        each = max(1, COMPRESSED_KEY_BYTES // (width * q.shape[2] * q.element_size()))
        out = torch.empty_like(q)
        for i in range(0, len(q), each):
            part = slice(i, i + each)
            keys = tokens[window[part]]
            if visible is not None:
                keys = torch.cat((keys, entries[visible.of(part)]), 1)
            if order is not None:
                keys = keys.gather(1, order[part][:, :, None].expand(-1, -1, keys.shape[2]))
            out[part] = self._attend(q[part], keys, counts[part], self.shape.scale, self.weights.sinks)
        return out

    def _keys(self, rows: StepRows, visible: VisibleEntries | None, size: int) -> WindowKeys:
        """size: of the ring."""
        compression, most = self.shape.compression, self.shape.window
        kind = "window", most, size, compression, None if visible is None else visible.width
        return rows.once(kind, lambda: _keys(rows, visible, most, size))


def _keys(rows: StepRows, visible: VisibleEntries | None, most: int, size: int) -> WindowKeys:
    own = (rows.positions + 1).clamp(max=most)
    width = most if rows.static else int(own.max())
    window = rows.keys_of(size, most)[:, :width]
    if visible is None:
        return WindowKeys(window, own, None)
    counts, entries = own + visible.counts, visible.width
    if not rows.static and (not entries or int(own.min()) == width):
        return WindowKeys(window, counts, None)
    each = torch.arange(width + entries, device=own.device)
    missing = width - own[:, None]
    order = torch.where(each < own[:, None], each, (each + missing).clamp(max=width + entries - 1))
    return WindowKeys(window, counts, order)


def plain_attend(q: Tensor, keys: Tensor, counts: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """`Attend` in plain torch, in float32."""
    outside = torch.arange(keys.shape[1], device=keys.device) >= counts[:, None]
    wide = keys.float().masked_fill(outside[:, :, None], 0.0)  # they may be NaN, which times 0 stays
    scores = torch.matmul(q.float(), wide.transpose(1, 2)) * scale
    scores = scores.masked_fill(outside[:, None], float("-inf"))
    column = sinks.to(scores)[None, :, None].expand(len(q), -1, 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.matmul(weights, wide).to(q.dtype)


class PerHeadOps(Protocol):
    """Operations that multiply groups of heads."""

    def per_head(self, weights: Tensor, fmt: str = "bf16") -> PerHead: ...


def bound(
    ops: PerHeadOps, shape: CompressedAttention, weights: CompressedWeights, fmt: str = "bf16"
) -> CompressedHeads:
    return CompressedHeads(shape, weights, plain_attend, ops.per_head(weights.groups, fmt))
