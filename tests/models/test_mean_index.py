"""Indexers whose blocks of tokens have the mean of their keys: the C++ core and plain torch against float64, at every
cut; and attention over what they choose."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernel_cases import TIERS, require_tier
from paged_batches import PAGE, Batch, make_batch, random_tables
from tandem import _core
from tandem.errors import ConfigError
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.kernels.selected_keys import SelectedKeys
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.mechanisms.mean_index.torch import ChooseBlocks, MeanWeights
from tandem.mechanisms.token_index.pooled import PooledKeys
from tandem.models.builder import rope_table
from tandem.models.passing import ForwardState
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope

DRAFT_TOKENS = 3  # rows that a ring has room for beside those that are asked for


def shape_of(heads: int = 12, dim: int = 20, budget: int = 12, pool: int = 4, turned: int = 12) -> MeanIndex:
    return MeanIndex(heads, dim, budget, Rope(100.0, turned), Norm(1e-6, plus_one=True), pool)


def ops(tier: str) -> CpuOps | TorchOps:
    if tier == "torch":
        return TorchOps()
    require_tier(tier)
    return CpuOps(_core.WorkerPool([-1, -1]), tier)


class Case:
    """Sequences of so many tokens, in slots of their own; what was never written is no number."""

    def __init__(self, shape: MeanIndex, lengths: list[int], dtype: torch.dtype = torch.float32) -> None:
        g, s = torch.Generator().manual_seed(1), shape
        torch.manual_seed(1)
        self.shape, self.lengths, self.dtype = shape, lengths, dtype
        self.tables, pages = random_tables(len(lengths), max(lengths))
        rope = rope_table(s.rope, max(lengths))
        norms = [torch.rand(s.dim, generator=g) + 0.5 for _ in range(2)]
        self.weights = MeanWeights(norms[0], norms[1], rope.cos, rope.sin)
        self.given = [
            [torch.randn(n, width, generator=g).to(dtype) for width in (s.heads * s.dim, s.dim)] for n in lengths
        ]  # of each sequence
        ring = torch.full((len(lengths) + 1, s.pool + DRAFT_TOKENS, s.dim), float("nan"), dtype=dtype)
        keys = torch.full((pages, PAGE // s.pool, 1, s.dim), float("nan"), dtype=dtype)
        self.kept = PooledKeys(torch.empty(pages, PAGE, 1, 1, dtype=dtype), ring, keys)

    def batch(self, spans: list[tuple[int, int]]) -> Batch:
        made = make_batch(spans, self.tables)
        made.slots = torch.arange(1, len(spans) + 1).int()
        return made

    def step(self, index: ChooseBlocks, spans: list[tuple[int, int]]) -> SelectedKeys:
        """What rows [start, end) of each sequence choose."""
        q, k = (
            torch.cat([given[i][slice(*span)] for given, span in zip(self.given, spans, strict=True)]) for i in range(2)
        )
        return index(q, k, ForwardState(self.batch(spans), torch.empty(0)), self.kept)  # type: ignore[arg-type]

    def whole(self, index: ChooseBlocks) -> SelectedKeys:
        return self.step(index, [(0, n) for n in self.lengths])

    def keys(self, which: int) -> Tensor:
        """Of a sequence's whole blocks, as they are kept."""
        at = torch.arange(self.lengths[which] // self.shape.pool) * self.shape.pool
        return self.kept.keys[self.tables[which].long()[at // PAGE], at % PAGE // self.shape.pool, 0]

    def turned(self, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        """x [n, …, dim] normed and turned in float64, from the definition: pairs of channels as complex numbers."""
        half = self.shape.rope.dims // 2
        x = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
        speed = 100.0 ** (-torch.arange(half).double() / half)
        turn = torch.polar(torch.ones(()).double(), positions.double()[:, None] * speed)
        turn = turn.view(len(x), *[1] * (x.dim() - 2), half)
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)

    def exact_keys(self, which: int) -> Tensor:
        s = self.shape
        means = self.given[which][1][: self.lengths[which] // s.pool * s.pool].double().unflatten(0, (-1, s.pool))
        return self.turned(means.mean(1), self.weights.key, torch.arange(len(means)) * s.pool)

    def scores(self, which: int, t: int, keys: Tensor) -> Tensor:
        q = self.given[which][0][t].view(1, self.shape.heads, self.shape.dim)
        asked = self.turned(q, self.weights.query, torch.tensor([t]))[0]
        return (asked @ keys.double().T).relu().sum(0)

    def positions(self, which: int, rows: Tensor) -> Tensor:
        slots = (self.tables[which].long()[:, None] * PAGE + torch.arange(PAGE)).flatten()
        return torch.stack([(slots == row).nonzero()[0, 0] for row in rows.long()]) if len(rows) else rows.long()


def check(case: Case, which: int, rows: Tensor, counts: Tensor) -> None:
    """Each row has as many tokens as it may, in order: whole blocks, none of which is worse than one that was left out,
    and what is behind them. Scores are sums of heads * dim products in float32; in bfloat16 a query is rounded twice,
    which each of dim products of a head feels."""
    s = case.shape
    unit = s.heads * s.dim * 2.0**-24 if case.dtype is torch.float32 else 4 * 2.0**-9
    for t, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
        whole = (t + 1) // s.pool
        kept = min(whole, s.budget // s.pool)
        got = case.positions(which, row[:count])
        assert count == kept * s.pool + (t + 1) % s.pool and not row[count:].any()
        assert got[kept * s.pool :].tolist() == list(range(whole * s.pool, t + 1))
        blocks = got[: kept * s.pool].unflatten(0, (kept, s.pool)) if kept else got[:0].view(0, s.pool)
        assert torch.equal(blocks, blocks[:, :1] + torch.arange(s.pool)) and bool((blocks[:, 0].diff() > 0).all())
        if not kept:
            continue
        scores = case.scores(which, t, case.keys(which)[:whole])
        least = scores.sort(descending=True).values[kept - 1]
        assert scores[blocks[:, 0] // s.pool].min() >= least - unit * scores.abs().max()


WAYS = [*TIERS[:5], "torch"]
SHAPES = [shape_of(), shape_of(9, 32, 4, 2, 32), shape_of(10, 16, 64, 16, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=["4", "2", "16"])
@pytest.mark.parametrize("tier", WAYS)
def test_the_best_blocks_are_chosen(tier: str, shape: MeanIndex, dtype: torch.dtype) -> None:
    case = Case(shape, [70, 1, 33, 16], dtype)
    chosen, at = case.whole(ops(tier).bound(shape, case.weights)), 0
    for which, n in enumerate(case.lengths):
        check(case, which, chosen.rows[at : at + n], chosen.counts[at : at + n])
        at += n
        kept, exact = case.keys(which).double(), case.exact_keys(which)
        unit = shape.dim * 2.0**-24 if dtype is torch.float32 else 2.0**-9
        if len(exact):  # roundings: mean, norm, tables, products, sum
            assert (kept - exact).abs().max() <= 5 * unit * max(1.0, float(exact.abs().max()))
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


def test_rejected_drafts_leave_no_key_behind() -> None:
    """What they closed is closed again, and what came before is still there."""
    one, two = Case(shape_of(), [30]), Case(shape_of(), [30])
    index = ops(_core.supported_tiers()[-1]).bound(one.shape, one.weights)
    whole = one.whole(index)
    two.step(index, [(0, 18)])
    right = two.given[0][1].clone()
    two.given[0][1][19:22] += 3.0  # row 18 comes, with three draft tokens; one of them closes block 4
    two.step(index, [(18, 22)])
    two.given[0][1] = right
    rest = two.step(index, [(19, 30)])
    assert torch.equal(rest.rows, whole.rows[19:]) and torch.equal(two.keys(0), one.keys(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", WAYS)
def test_rows_attend_to_what_they_have_chosen(tier: str, dtype: torch.dtype) -> None:
    """Against float64: a softmax of head_dim products; other rows of the cache are no numbers. A row alone has the same
    bits."""
    g, (rows, heads, groups, dim, most, places) = torch.Generator().manual_seed(2), (9, 6, 2, 24, 700, 1024)
    q = torch.randn(rows, heads, dim, generator=g).to(dtype)
    k, v = (torch.full((places // 16, 16, groups, dim), float("nan"), dtype=dtype) for _ in range(2))
    chosen, counts = torch.zeros(rows, most, dtype=torch.int32), torch.tensor([1, 2, 16, 65, 300, 512, 513, 699, 700])
    for t, count in enumerate(counts.tolist()):
        chosen[t, :count] = torch.randperm(places, generator=g)[:count].int()
    used = torch.cat([row[:count] for row, count in zip(chosen, counts.tolist(), strict=True)]).long()
    for pages in (k, v):
        pages.view(places, groups, dim)[used] = torch.randn(len(used), groups, dim, generator=g).to(dtype)
    case = Case(shape_of(), [4])
    way, asked = ops(tier).bound(case.shape, case.weights), SelectedKeys(chosen, counts.int())
    got = way.attend(q, k, v, asked, 0.2).view(rows, heads, dim)
    for t, count in enumerate(counts.tolist()):
        there = chosen[t, :count].long()
        keys, values = (pages.view(places, groups, dim)[there].double() for pages in (k, v))
        keys, values = (x.repeat_interleave(heads // groups, 1) for x in (keys, values))
        shares = (torch.einsum("hd,nhd->hn", q[t].double(), keys) * 0.2).softmax(-1)
        exact = torch.einsum("hn,nhd->hd", shares, values)
        unit = dim * 2.0**-22 if dtype is torch.float32 else 2.0**-8
        assert (got[t].double() - exact).abs().max() <= 4 * unit * max(1.0, float(exact.abs().max()))
        alone = way.attend(q[t : t + 1], k, v, SelectedKeys(chosen[t : t + 1], asked.counts[t : t + 1]), 0.2)
        assert tier == "torch" or torch.equal(alone.view(heads, dim), got[t])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="indexer_compress_ratio 5 does not divide indexer_budget 12"):
        shape_of(pool=5)
    with pytest.raises(ConfigError, match="24 rotary channels do not fit into indexer_head_dim 20"):
        shape_of(turned=24)
