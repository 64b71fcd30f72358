"""Batches of sequences in scattered pages, for tests of single operations."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tandem.kernels.selected_keys import SelectedKeys
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights, TorchTokenIndex

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
    state_lens: Tensor | None = None
    num_verified: Tensor | None = None
    turns: Tensor | None = None

    def there(self, device: torch.device) -> Batch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if torch.is_tensor(getattr(self, f.name))}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


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


@dataclass
class IndexCase:
    """Sequences whose first tokens are cached, as a step that chose for them has left them."""

    shape: Index
    spans: list[tuple[int, int]]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        s, longest = self.shape, max(end for _, end in self.spans)
        self.tables, self.pages = random_tables(len(self.spans), longest)
        angles = torch.rand(longest, s.rope.dims // 2) * 6.3
        self.weights = IndexWeights(
            torch.rand(s.dim) + 0.5, torch.randn(s.dim) / 4, angles.cos(), angles.sin()
        )
        self.q, self.k, self.gates = (
            [torch.randn(end, n).to(dtype) for _, end in self.spans]
            for n, dtype in ((s.heads * s.dim, self.dtype), (s.dim, self.dtype), (s.heads, torch.float32))
        )

    def batch(self, spans: list[tuple[int, int]]) -> Batch:
        return make_batch(spans, self.tables)

    def chosen(self, index, spans: list[tuple[int, int]], cache: Tensor) -> SelectedKeys | None:
        """cache: where `index` computes, as everything that it is given."""
        rows, at = [slice(*span) for span in spans], cache.device
        q, k, gates = (torch.cat([x[i][r] for i, r in enumerate(rows)]) for x in (self.q, self.k, self.gates))
        return index(q.to(at), k.to(at), gates.to(at), self.batch(spans).there(at), cache)

    def run(self, index, device: torch.device | None = None) -> tuple[SelectedKeys, Tensor]:
        """Choices of the last rows of the spans; pages, of which nothing that was never written may matter."""
        shape = self.pages, PAGE, 1, self.shape.dim
        cache, before = torch.full(shape, float("nan"), dtype=self.dtype), [(0, start) for start, _ in self.spans]
        known = torch.cat([k[:start] for k, (start, _) in zip(self.k, self.spans, strict=True)])
        TorchTokenIndex(self.shape, self.weights).store(known, self.batch(before), cache)
        cache = cache.to(device)
        chosen = self.chosen(index, self.spans, cache)
        assert chosen is not None
        return SelectedKeys(chosen.rows.cpu(), chosen.counts.cpu()), cache.cpu()

    def exact(self, cache: Tensor) -> list[Tensor]:
        """Scores in float64 of every token that a row sees, with the keys that are cached and queries that are rounded
        as activations are."""
        oracle = TorchTokenIndex(self.shape, self.weights)
        found = []
        for i, (start, end) in enumerate(self.spans):
            at = torch.arange(end)
            keys = cache[self.tables[i].long()[at // PAGE], at % PAGE, 0].double()
            q = oracle._turned(self.q[i].view(end, self.shape.heads, self.shape.dim), at).double()
            for t in range(start, end):
                found.append(self.gates[i][t].double() @ (q[t] @ keys[: t + 1].T).relu())
        return found

    def positions(self, chosen: SelectedKeys) -> list[Tensor]:
        """Positions of each row's choice, in its order."""
        batch, found = self.batch(self.spans), []
        for t, (rows, count) in enumerate(zip(chosen.rows.long(), chosen.counts.tolist(), strict=True)):
            s = int((batch.query_starts[1:] <= t).sum())
            slots = self.tables[s].long()[:, None] * PAGE + torch.arange(PAGE)
            found.append(torch.cat([(slots.flatten() == row).nonzero()[:, 0] for row in rows[:count]]))
        return found


def check_choice(case: IndexCase, chosen: SelectedKeys, cache: Tensor) -> None:
    """Each row has as many as it may, in order, and none is worse than one that was left out. Scores are sums of
    heads * dim products in float32."""
    budget, terms = case.shape.budget, case.shape.heads * case.shape.dim
    for scores, got in zip(case.exact(cache), case.positions(chosen), strict=True):
        assert len(got) == min(budget, len(scores)) and bool((got.diff() > 0).all())
        least = scores.sort(descending=True).values[len(got) - 1]
        assert scores[got].min() >= least - terms * 2.0**-24 * scores.abs().max()
