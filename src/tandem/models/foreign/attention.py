"""Attention over Tandem's pages, as Transformers' modules ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.architectures.foreign.observe import AttentionCall
from tandem.kernels.ops import Ops
from tandem.models.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One layer's. Sinks, soft caps and values of another size than keys are computed by PyTorch, the rest by `ops`."""

    ops: Ops
    call: AttentionCall

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        pages: tuple[Tensor, ...],
        sinks: Tensor | None,
    ) -> Tensor:
        """q [1, H, T, D], k [1, G, T, D], v [1, G, T, E] of the new tokens, which are kept -> [1, T, H, E]."""
        k_pages, v_pages = pages
        for new, target in ((k, k_pages), (v, v_pages)):
            target.view(-1, *target.shape[2:])[batch.cache_slots] = _rows(new).to(target.dtype)
        q = _rows(q).to(k_pages.dtype).contiguous()
        call = self.call
        if not call.softcap and sinks is None and call.key_dim == call.value_dim:
            out = self.ops.attention(q, k_pages, v_pages, batch, call.scale, call.window)
        else:
            out = attend(q, k_pages, v_pages, batch, call, sinks)
        return out.view(1, len(q), call.heads, call.value_dim)


def _rows(x: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H, D]."""
    return x[0].transpose(0, 1)


def attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: ForwardBatch,
    call: AttentionCall,
    sinks: Tensor | None,
) -> Tensor:
    """q [T, H, D] over each row's own pages -> [T, H, E]; softmax in float32."""
    out = q.new_empty((len(q), call.heads, call.value_dim))
    starts = batch.query_starts.tolist()
    for s, length in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        if starts[s] == starts[s + 1]:
            continue
        first = max(0, int(batch.positions[starts[s]]) - call.window + 1) if call.window else 0
        k, v = (_rows_of(pages, batch.block_tables[s], first, length) for pages in (k_pages, v_pages))
        ages = batch.positions[rows, None] - torch.arange(first, length, device=q.device)
        out[rows] = _of_sequence(q[rows], k, v, ages, call, sinks)
    return out


def _rows_of(pages: Tensor, table: Tensor, first: int, length: int) -> Tensor:
    """Rows first … length - 1 of a sequence, [n, G, D]."""
    size = pages.shape[1]
    whole = pages[table[first // size : -(-length // size)].long()].flatten(0, 1)
    return whole[first % size : first % size + length - first]


def _of_sequence(
    q: Tensor, k: Tensor, v: Tensor, ages: Tensor, call: AttentionCall, sinks: Tensor | None
) -> Tensor:
    """q [t, H, D] over k, v [n, G, ·]; ages [t, n]: how far back each key is."""
    groups: Sequence[int] = (call.kv_heads, call.heads // call.kv_heads)
    scores = torch.einsum("tgsd,ngd->gstn", q.float().unflatten(1, groups), k.float()) * call.scale
    if call.softcap:
        scores = (scores / call.softcap).tanh() * call.softcap
    hidden = (ages < 0) | (ages >= call.window) if call.window else ages < 0
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(*groups, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    shares = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("gstn,nge->tgse", shares, v.float()).flatten(1, 2).to(q.dtype)
