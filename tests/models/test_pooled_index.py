"""Indexers whose keys stand for several tokens each: the C++ core and plain torch against float64, at every cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from kernel_cases import TIERS, require_tier
from paged_batches import PAGE, Batch, make_batch, random_tables
from tandem import _core
from tandem.errors import ConfigError, KernelError
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.kernels.selected_keys import SelectedKeys
from tandem.mechanisms.token_index.pooled import KeyPoolWeights, PooledIndex, PooledKeys
from tandem.mechanisms.token_index.shape import Index
from tandem.models.passing import ForwardState
from tandem.spec.rope import still

DRAFT_TOKENS = 3  # rows that a ring has room for beside those that are asked for


def shape_of(heads: int = 12, dim: int = 18, budget: int = 12, pool: int = 4) -> Index:
    return Index(heads, dim, budget, still(0), pool=pool)


def ops(tier: str) -> CpuOps | TorchOps:
    if tier == "torch":
        return TorchOps()
    require_tier(tier)
    return CpuOps(_core.WorkerPool([-1, -1]), tier)


class Case:
    """Sequences of so many tokens, in slots of their own; what was never written is no number."""

    def __init__(self, shape: Index, lengths: list[int], dtype: torch.dtype = torch.float32) -> None:
        g, s = torch.Generator().manual_seed(1), shape
        torch.manual_seed(1)
        self.shape, self.lengths, self.dtype = shape, lengths, dtype
        self.tables, pages = random_tables(len(lengths), max(lengths))
        self.weights = KeyPoolWeights(
            torch.rand(s.dim, generator=g) + 0.5, torch.randn(s.dim, generator=g) / 4,
            torch.randn(s.pool, s.dim, generator=g),
        )  # fmt: skip
        widths = (s.heads * s.dim, dtype), (2 * s.dim, dtype), (s.heads, torch.float32)
        self.given = [
            [torch.randn(n, width, generator=g).to(kind) for width, kind in widths] for n in lengths
        ]  # of each sequence
        ring = torch.full((len(lengths) + 1, s.pool + DRAFT_TOKENS, 2 * s.dim), float("nan"), dtype=dtype)
        keys = torch.full((pages, PAGE // s.pool, 1, s.dim), float("nan"), dtype=dtype)
        self.kept = PooledKeys(torch.empty(pages, PAGE, 1, 1, dtype=dtype), ring, keys)

    def batch(self, spans: list[tuple[int, int]]) -> Batch:
        made = make_batch(spans, self.tables)
        made.slots = torch.arange(1, len(spans) + 1).int()
        return made

    def step(self, index: PooledIndex, spans: list[tuple[int, int]]) -> SelectedKeys:
        """What rows [start, end) of each sequence choose."""
        q, made, gates = (
            torch.cat([given[i][slice(*span)] for given, span in zip(self.given, spans, strict=True)]) for i in range(3)
        )
        return index(q, made, gates, ForwardState(self.batch(spans), torch.empty(0)), self.kept)  # type: ignore[arg-type]

    def whole(self, index: PooledIndex) -> SelectedKeys:
        return self.step(index, [(0, n) for n in self.lengths])

    def keys(self, which: int) -> Tensor:
        """Of a sequence's whole pools, as they are kept."""
        at = torch.arange(self.lengths[which] // self.shape.pool) * self.shape.pool
        return self.kept.keys[self.tables[which].long()[at // PAGE], at % PAGE // self.shape.pool, 0]

    def exact_keys(self, which: int) -> Tensor:
        s, w = self.shape, self.weights
        made = self.given[which][1][: self.lengths[which] // s.pool * s.pool].double()
        x, gates = made.split(s.dim, 1)
        x = layer_norm(x, (s.dim,), w.norm.double(), w.bias.double(), s.eps).unflatten(0, (-1, s.pool))
        return ((gates.unflatten(0, (-1, s.pool)) + w.places.double()).softmax(1) * x).sum(1)

    def positions(self, which: int, rows: Tensor) -> Tensor:
        slots = (self.tables[which].long()[:, None] * PAGE + torch.arange(PAGE)).flatten()
        return torch.stack([(slots == row).nonzero()[0, 0] for row in rows.long()]) if len(rows) else rows.long()


def check(case: Case, which: int, rows: Tensor, counts: Tensor) -> None:
    """Each row of a sequence has as many tokens as it may, in order: whole pools, none of which is worse than one that
    was left out, and what is behind them. Scores are sums of heads * dim products in float32."""
    s, (q, _, gates) = case.shape, case.given[which]
    terms = s.heads * s.dim
    for t, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
        whole = (t + 1) // s.pool
        kept = min(whole, s.budget // s.pool)
        got = case.positions(which, row[:count])
        assert count == kept * s.pool + (t + 1) % s.pool and not row[count:].any()
        assert got[kept * s.pool :].tolist() == list(range(whole * s.pool, t + 1))
        pools = got[: kept * s.pool].unflatten(0, (kept, s.pool)) if kept else got[:0].view(0, s.pool)
        assert torch.equal(pools, pools[:, :1] + torch.arange(s.pool)) and bool((pools[:, 0].diff() > 0).all())
        if not kept:
            continue
        queries, keys = q[t].view(s.heads, s.dim).double(), case.keys(which)[:whole].double()
        scores = gates[t].double() @ (queries @ keys.T).relu()
        least = scores.sort(descending=True).values[kept - 1]
        assert scores[pools[:, 0] // s.pool].min() >= least - terms * 2.0**-24 * scores.abs().max()


WAYS = [*TIERS[:5], "torch"]
SHAPES = [shape_of(), shape_of(9, 32, 4, 2), shape_of(10, 16, 64, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=["4", "2", "16"])
@pytest.mark.parametrize("tier", WAYS)
def test_the_best_pools_are_chosen(tier: str, shape: Index, dtype: torch.dtype) -> None:
    case = Case(shape, [70, 1, 33, 16], dtype)
    chosen, at = case.whole(ops(tier).bound(shape, case.weights)), 0
    for which, n in enumerate(case.lengths):
        check(case, which, chosen.rows[at : at + n], chosen.counts[at : at + n])
        at += n
        kept, exact = case.keys(which).double(), case.exact_keys(which)
        unit = shape.dim * 2.0**-24 if dtype is torch.float32 else 2.0**-9
        if len(exact):  # roundings: norm, weights, the sum; in float32 sums of the norm
            assert (kept - exact).abs().max() <= 4 * unit * max(1.0, float(exact.abs().max()) * 4)
    written = sum(n // shape.pool for n in case.lengths)
    assert int((~case.kept.keys.isnan()).flatten(2).any(2).sum()) == written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS[:5])
def test_no_cut_changes_a_choice_or_what_is_kept(tier: str, dtype: torch.dtype) -> None:
    """Of one sequence, beside another that goes on row by row."""
    one, two = (Case(shape_of(), [50, 20], dtype) for _ in range(2))
    index = ops(tier).bound(one.shape, one.weights)
    whole = one.whole(index)
    cuts, rows, counts = [0, 1, 8, 9, 10, 26, 42, 43, 50], list[Tensor](), list[Tensor]()
    for i, span in enumerate(pairwise(cuts)):
        found = two.step(index, [span, (i, i + 1)])
        rows.append(found.rows[: span[1] - span[0]])
        counts.append(found.counts[: span[1] - span[0]])
    assert torch.equal(torch.cat(rows), whole.rows[:50]) and torch.equal(torch.cat(counts), whole.counts[:50])
    assert torch.equal(one.keys(0), two.keys(0)) and torch.equal(one.kept.ring[1], two.kept.ring[1])


@pytest.mark.parametrize("tier", WAYS)
def test_many_pools_are_several_chunks(tier: str) -> None:
    shape = shape_of(9, 16, 40, 4)
    case = Case(shape, [3000])
    case.step(ops(_core.supported_tiers()[-1]).bound(shape, case.weights), [(0, 2990)])
    _check_last(case, case.step(ops(tier).bound(shape, case.weights), [(2990, 3000)]), 2990)


def _check_last(case: Case, found: SelectedKeys, first: int) -> None:
    s, (q, _, gates) = case.shape, case.given[0]
    for i, (row, count) in enumerate(zip(found.rows, found.counts.tolist(), strict=True)):
        t = first + i
        whole, got = (t + 1) // s.pool, case.positions(0, row[:count])
        assert count == s.budget + (t + 1) % s.pool
        scores = gates[t].double() @ (q[t].view(s.heads, s.dim).double() @ case.keys(0)[:whole].double().T).relu()
        least = scores.sort(descending=True).values[s.budget // s.pool - 1]
        chosen = scores[got[: s.budget : s.pool] // s.pool]
        assert chosen.min() >= least - s.heads * s.dim * 2.0**-24 * scores.abs().max()


@pytest.mark.parametrize("tier", WAYS)
def test_of_equal_scores_the_earliest_count(tier: str) -> None:
    case = Case(shape_of(), [60])
    case.given[0][2][:] = 0
    chosen = case.whole(ops(tier).bound(case.shape, case.weights))
    assert torch.equal(case.positions(0, chosen.rows[58, :15]), torch.tensor([*range(12), 56, 57, 58]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_end(bad: float) -> None:
    """Weights of a broken checkpoint: something is chosen, of the row's own tokens."""
    case = Case(shape_of(), [60])
    case.given[0][2][40:, ::2] = bad
    chosen = case.whole(ops(_core.supported_tiers()[-1]).bound(case.shape, case.weights))
    for t, (row, count) in enumerate(zip(chosen.rows, chosen.counts.tolist(), strict=True)):
        got = case.positions(0, row[:count])
        assert len(got.unique()) == count and got.max() <= t


def test_a_pool_that_a_rejected_draft_has_closed_is_closed_again() -> None:
    """Rows of draft tokens have places of their own, so what came before is still there."""
    one, two = Case(shape_of(), [30]), Case(shape_of(), [30])
    index = ops(_core.supported_tiers()[-1]).bound(one.shape, one.weights)
    whole = one.whole(index)
    two.step(index, [(0, 18)])
    right = two.given[0][1].clone()
    two.given[0][1][19:22] += 3.0  # row 18 comes, with three draft tokens; one of them closes pool 4
    two.step(index, [(18, 22)])
    two.given[0][1] = right
    rest = two.step(index, [(19, 30)])
    assert torch.equal(rest.rows, whole.rows[19:]) and torch.equal(two.keys(0), one.keys(0))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="index_kpool 5 does not divide index_topk 12; try 4 and 2048"):
        shape_of(pool=5)
    with pytest.raises(KernelError, match="a pool's tokens must divide the budget"):
        _core.TokenIndex(_core.WorkerPool([-1]), "scalar", 2, 4, 0, 10, False, 4)
    case, own = Case(shape_of(), [20]), ops("scalar")
    (q, _, gates), still_tables, w = case.given[0], torch.empty(1, 0), case.weights
    chosen, view = torch.zeros(20, 14).int(), own.view_of(case.batch([(0, 20)]), case.kept.tokens)
    for tokens, keys, why in ((3, None, "a page has no whole pools"), (1, None, "keys of pools are stored before")):
        index = _core.TokenIndex(own.pool, "scalar", 12, 18, 0, 12, False, tokens)
        with pytest.raises(KernelError, match=why):
            weights = w.norm, w.bias, still_tables, still_tables
            index.choose(view, q, keys, gates, *weights, case.kept.keys, chosen, chosen, w.norm.numel())
