"""Indexers whose keys stand for several tokens, on a GPU (or interpreted): against plain torch in float32 on the CPU.

What is chosen may differ from the oracle's choice only where scores are as near as sums of heads * dim rounded products
are. So keys are compared, and then each choice with exact scores of the keys that the GPU has cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_cuda, needs_triton
from gpu_sessions import DECODED, PROMPT, ROWS, Session, by_row, on_the_cpu
from paged_batches import PAGE, Batch, make_batch, random_tables
from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.kernels.selected_keys import SelectedKeys
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.mechanisms.mean_index.torch import MeanWeights, normed_queries, turned
from tandem.mechanisms.token_index.pooled import KeyPoolWeights, PooledKeys
from tandem.mechanisms.token_index.shape import Index
from tandem.models.builder import rope_table
from tandem.models.passing import ForwardState
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope, still

if AVAILABLE:
    from tandem.kernels.gpu.ops import GpuOps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, needs_triton]
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
UNIT = 2.0**-20 if INTERPRETED else 2.0**-7  # of a key: its own rounding, and that of the weights of its tokens
DRAFT_TOKENS = 2
POOLS = {
    "fours": Index(12, 18, 12, still(0), pool=4),
    "pairs": Index(16, 16, 4, still(0), pool=2),
}
MEANS = {
    "means-of-fours": MeanIndex(12, 20, 12, Rope(100.0, 12), Norm(1e-6), 4),
    "means-of-pairs": MeanIndex(16, 16, 4, Rope(100.0, 16), Norm(1e-6), 2),
}
REAL = Index(32, 128, 2048, still(0), pool=4)
REAL_MEAN = MeanIndex(4, 128, 2048, Rope(1e7, 64), Norm(1e-6), 4)
MIXED = [[(0, 5), (0, 23), (0, 1)], [(5, 6), (23, 40), (1, 3)], [(6, 7), (40, 41), (3, 4)], [(7, 8), (41, 42), (4, 5)]]
"""Steps of three sequences: a prompt, cut ones, and rows that decode."""


@pytest.fixture(scope="module")
def ops() -> GpuOps:
    return GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))


class PoolCase:
    """Sequences of so many tokens in slots of their own, twice: on the device, and for the oracle in float32."""

    def __init__(self, shape: Any, lengths: list[int]) -> None:
        torch.manual_seed(1)
        self.shape, self.lengths = shape, lengths
        self.tables, self.pages = random_tables(len(lengths), max(lengths))
        self.given = [[torch.randn(n, width).to(kind) for width, kind in self.widths()] for n in lengths]
        self.there, self.here = self.cache(DTYPE, DEVICE), self.cache(torch.float32, torch.device("cpu"))

    def weights(self) -> Any:
        s, g = self.shape, torch.Generator().manual_seed(2)
        norm, bias = torch.rand(s.dim, generator=g) + 0.5, torch.randn(s.dim, generator=g) / 4
        return KeyPoolWeights(norm, bias, torch.randn(s.pool, s.dim, generator=g))

    def widths(self) -> list[tuple[int, torch.dtype]]:
        s = self.shape
        return [(s.heads * s.dim, DTYPE), (2 * s.dim, DTYPE), (s.heads, torch.float32)]

    query_error = 0.0  # of queries that are rounded in other places

    @property
    def ring_width(self) -> int:
        return 2 * self.shape.dim

    def cache(self, dtype: torch.dtype, device: torch.device) -> PooledKeys:
        """Numbers that were never written are none."""
        s, nan = self.shape, float("nan")
        ring = torch.full((len(self.lengths) + 1, s.pool + DRAFT_TOKENS, self.ring_width), nan, dtype=dtype)
        keys = torch.full((self.pages, PAGE // s.pool, 1, s.dim), nan, dtype=dtype)
        tokens = torch.empty(self.pages, PAGE, 1, 1, dtype=dtype)
        return PooledKeys(*(each.to(device) for each in (tokens, ring, keys)))

    def batch(self, spans: list[tuple[int, int]]) -> Batch:
        made = make_batch(spans, self.tables)
        made.slots = torch.arange(1, len(spans) + 1).int()
        return made

    def rows(self, spans: list[tuple[int, int]]) -> list[Tensor]:
        each = range(len(self.given[0]))
        return [torch.cat([x[i][slice(*span)] for x, span in zip(self.given, spans, strict=True)]) for i in each]

    def bound(self, ops: Any, device: torch.device | None = None) -> Any:
        weights = self.weights()
        return ops.bound(self.shape, weights if device is None else type(weights)(*(w.to(device) for w in weights)))

    def step(self, index: Any, spans: list[tuple[int, int]]) -> SelectedKeys | None:
        given = [x.to(DEVICE) for x in self.rows(spans)]
        return index(*given, ForwardState(self.batch(spans).there(DEVICE), torch.empty(0)), self.there)

    def exact_step(self, index: Any, spans: list[tuple[int, int]]) -> None:
        index(*(x.float() for x in self.rows(spans)), ForwardState(self.batch(spans), torch.empty(0)), self.here)

    def queries(self, spans: list[tuple[int, int]]) -> Tensor:
        """[T, heads, dim], as they meet keys, float64."""
        return self.rows(spans)[0].view(-1, self.shape.heads, self.shape.dim).double()

    def gates(self, spans: list[tuple[int, int]]) -> Tensor:
        return self.rows(spans)[2].double()

    def scores(self, spans: list[tuple[int, int]]) -> list[Tensor]:
        """Exact scores of each row's whole pools, of the keys on the device."""
        s, found, row = self.shape, [], 0
        queries, gates, keys = self.queries(spans), self.gates(spans), self.there.keys.cpu().double()
        for i, (start, end) in enumerate(spans):
            for position in range(start, end):
                at = torch.arange((position + 1) // s.pool) * s.pool
                own = keys[self.tables[i].long()[at // PAGE], at % PAGE // s.pool, 0]
                found.append(gates[row] @ (queries[row] @ own.T).relu())
                row += 1
        return found

    def positions(self, spans: list[tuple[int, int]], chosen: SelectedKeys) -> list[Tensor]:
        found, row = [], 0
        for i, (start, end) in enumerate(spans):
            slots = (self.tables[i].long()[:, None] * PAGE + torch.arange(PAGE)).flatten()
            order = torch.zeros(int(slots.max()) + 1, dtype=torch.int64)
            order[slots] = torch.arange(len(slots))
            for _ in range(start, end):
                found.append(order[chosen.rows[row, : int(chosen.counts[row])].cpu().long()])
                row += 1
        return found

    def check(self, spans: list[tuple[int, int]], chosen: SelectedKeys) -> None:
        """Whole pools in order, none worse than one that was left out; then all tokens behind the last whole pool."""
        s, terms = self.shape, self.shape.heads * self.shape.dim
        places = [p for start, end in spans for p in range(start, end)]
        for position, scores, got in zip(places, self.scores(spans), self.positions(spans, chosen), strict=True):
            whole, kept = (position + 1) // s.pool, min((position + 1) // s.pool, s.budget // s.pool)
            assert got[kept * s.pool :].tolist() == list(range(whole * s.pool, position + 1))
            pools = got[: kept * s.pool].view(kept, s.pool) // s.pool
            assert bool((pools == pools[:, :1]).all()) and bool((pools[:, 0].diff() > 0).all())
            left = torch.ones(whole, dtype=torch.bool)
            left[pools[:, 0]] = False
            if left.any():
                room = (terms * 2.0**-23 + self.query_error) * float(scores.abs().max())
                assert float(scores[~left].min()) >= float(scores[left].max()) - room


class MeanCase(PoolCase):
    """Blocks whose key is the mean of their tokens'. A key's numbers are rounded behind its norm and as it turns."""

    query_error = 0.0 if INTERPRETED else 2.0**-7

    def weights(self) -> MeanWeights:
        s, g = self.shape, torch.Generator().manual_seed(2)
        rope = rope_table(s.rope, max(self.lengths) + 1)
        query, key = (torch.rand(s.dim, generator=g) + 0.5 for _ in range(2))
        return MeanWeights(query, key, rope.cos, rope.sin)

    def widths(self) -> list[tuple[int, torch.dtype]]:
        return [(self.shape.heads * self.shape.dim, DTYPE), (self.shape.dim, DTYPE)]

    @property
    def ring_width(self) -> int:
        return self.shape.dim

    def queries(self, spans: list[tuple[int, int]]) -> Tensor:
        w, positions = self.weights(), self.batch(spans).positions
        return turned(normed_queries(self.rows(spans)[0], self.shape, w), positions, w).double()

    def gates(self, spans: list[tuple[int, int]]) -> Tensor:
        return torch.ones(len(self.batch(spans).positions), self.shape.heads, dtype=torch.float64)


def case_of(shape: Any, lengths: list[int]) -> PoolCase:
    return (MeanCase if isinstance(shape, MeanIndex) else PoolCase)(shape, lengths)


def run(case: PoolCase, ops: GpuOps, steps: list[list[tuple[int, int]]]) -> None:
    gpu, oracle = case.bound(ops, DEVICE), case.bound(TorchOps())
    for spans in steps:
        chosen = case.step(gpu, spans)
        case.exact_step(oracle, spans)
        assert chosen is not None
        case.check(spans, chosen)
        exact, got = case.here.keys, case.there.keys.cpu().float()
        written = ~exact.isnan()
        assert torch.equal(written, ~got.isnan())
        unit = 3 * UNIT if isinstance(case, MeanCase) else UNIT
        assert not written.any() or (got - exact)[written].abs().max() <= unit * exact[written].abs().max()


@pytest.mark.parametrize("pool", POOLS | MEANS)
def test_pools_close_and_are_chosen(ops: GpuOps, pool: str) -> None:
    run(case_of((POOLS | MEANS)[pool], [40, 60, 40]), ops, MIXED)


def test_a_row_that_sees_no_whole_pool_sees_its_own_tokens(ops: GpuOps) -> None:
    case = PoolCase(POOLS["fours"], [40, 40])
    gpu = case.bound(ops, DEVICE)
    for i in range(3):
        chosen = case.step(gpu, [(i, i + 1)] * 2)
        assert chosen is not None and chosen.counts.tolist() == [i + 1] * 2


def test_rows_of_drafts_are_sequences_of_one_slot(ops: GpuOps) -> None:
    """A rejected draft token that closed a pool is overwritten when it closes again."""
    case = PoolCase(POOLS["fours"], [60])
    gpu = case.bound(ops, DEVICE)
    case.step(gpu, [(0, 22)])
    exact = case.bound(TorchOps())
    case.exact_step(exact, [(0, 22)])
    case.exact_step(exact, [(22, 23)])
    rows = make_batch([(22, 23), (23, 24), (24, 25)], case.tables.expand(3, -1))
    rows.slots = torch.ones(3, dtype=torch.int32)
    wrong = [x[22:25].clone() for x in case.given[0]]
    wrong[1][1:] = 3.0
    for given in (wrong, [x[22:25] for x in case.given[0]]):
        gpu(*(x.to(DEVICE) for x in given), ForwardState(rows.there(DEVICE), torch.empty(0)), case.there)
    case.exact_step(exact, [(23, 25)])
    at, got = case.tables[0].long()[20 // PAGE], case.there.keys.cpu().float()
    place = 20 % PAGE // 4
    assert (got[at, place] - case.here.keys[at, place]).abs().max() <= UNIT * case.here.keys[at, place].abs().max()


@needs_cuda
@pytest.mark.parametrize("shape", [REAL, REAL_MEAN], ids=["glm", "qwen"])
@pytest.mark.parametrize("spans", [[(16383, 16384), (5000, 5001), (2047, 2048), (2051, 2052)], [(3000, 3300)]])
def test_the_index_of_the_real_model(ops: GpuOps, spans: list[tuple[int, int]], shape: Any) -> None:
    case = case_of(shape, [end for _, end in spans])
    gpu = case.bound(ops, DEVICE)
    case.step(gpu, [(0, start) for start, _ in spans])
    chosen = case.step(gpu, spans)
    assert chosen is not None
    case.check(spans, chosen)


@needs_cuda
@pytest.mark.parametrize("pool", POOLS | MEANS)
def test_a_choice_in_a_graph_is_that_of_the_sequence_at_its_replay(ops: GpuOps, pool: str) -> None:
    """Captured for one token; replayed for a sequence that grows, as steps without a graph have it."""
    steps = [(n, n + 1) for n in range(60, 80)]
    plain, case = (case_of((POOLS | MEANS)[pool], [90]) for _ in range(2))
    index = case.bound(ops, DEVICE)
    for each in (plain, case):
        each.step(index, [(0, 60)])
    batch, given = case.batch([(60, 61)]).there(DEVICE), [x.to(DEVICE) for x in case.rows([(60, 61)])]
    index(*given, ForwardState(batch, torch.empty(0)), case.there)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = index(*given, ForwardState(batch, torch.empty(0)), case.there)
    for span in steps:
        alone = plain.step(index, [span])
        now = case.batch([span])
        for to, x in zip(given, case.rows([span]), strict=True):
            to.copy_(x)
        for name in ("positions", "cache_slots", "seq_lens"):
            getattr(batch, name).copy_(getattr(now, name))
        graph.replay()
        assert torch.equal(chosen.rows, alone.rows) and torch.equal(chosen.counts, alone.counts)


# -- grouped-query attention over a choice ---


@pytest.mark.parametrize("kind", ["act", "fp8"])
def test_attention_over_chosen_rows(ops: GpuOps, kind: str) -> None:
    """As plain attention over the rows of each choice, gathered: more rows than go at a time, choices of any length.
    Weights and sums are rounded as those of rows that decode: 2^-7 of the largest value, relative to float32."""
    if kind == "fp8" and INTERPRETED:
        pytest.skip("the interpreter has no such numbers")
    torch.manual_seed(3)
    shape, rows, heads, groups, dim, scale = MEANS["means-of-fours"], 5 if INTERPRETED else 300, 6, 2, 24, 0.2
    index = ops.bound(shape, MeanWeights(*(w.to(DEVICE) for w in MeanCase(shape, [8]).weights())))
    q = torch.randn(rows, heads, dim).to(DTYPE)
    k, v = (torch.randn(12, PAGE, groups, dim).to(DTYPE) for _ in range(2))
    if kind == "fp8":
        k, v = (each.to(torch.float8_e4m3fn) for each in (k, v))
    counts = torch.randint(1, shape.most + 1, (rows,), dtype=torch.int32)
    lists = torch.stack([torch.randperm(12 * PAGE)[: shape.most].int() for _ in range(rows)])
    got = index.attend(*(x.to(DEVICE) for x in (q, k, v)), SelectedKeys(lists.to(DEVICE), counts.to(DEVICE)), scale)
    keys, values = (x.float().flatten(0, 1) for x in (k, v))
    for t in range(rows):
        at = lists[t, : int(counts[t])].long()
        own = keys[at].repeat_interleave(heads // groups, 1)
        weights = (torch.einsum("hd,nhd->hn", q[t].float(), own) * scale).softmax(-1)
        exact = torch.einsum("hn,nhd->hd", weights, values[at].repeat_interleave(heads // groups, 1)).flatten()
        assert (got[t].cpu().float() - exact).abs().max() <= (2.0**-18 if INTERPRETED else 2.0**-7) * values.abs().max()


# -- whole models, which choose ---

CHOOSING = ["glm5_next", "glm5_next-pools", "qwen4_exp", "qwen4_exp-tables"]


def check(path: Path, got: Tensor) -> None:
    """A choice is as sudden as a router's. So the median row counts, and its tolerance is twice the rounding error that
    bfloat16 has on the CPU."""
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    assert by_row(got, exact).median() < 2 * by_row(theirs, exact).median()


@needs_cuda
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["kernels", "graphs"])
@pytest.mark.parametrize("variant", CHOOSING)
def test_logits_of_models_that_choose(tiny_models, variant: str, graphs: tuple[int, ...]) -> None:
    check(tiny_models[variant], Session(tiny_models[variant], 0.5, graphs).logits(together=True))


@needs_cuda
@pytest.mark.parametrize("variant", CHOOSING)
def test_prompts_cut_and_anew(tiny_models, variant: str) -> None:
    """A prompt cut on a cached prefix; then all of it anew, as after preemption, in slots that hold something else."""
    path, everyone = tiny_models[variant], list(range(ROWS))
    session = Session(path, 0.5, (1, 8))
    parts = [session.step(everyone, first, count) for first, count in ((0, 3), (3, 9), (12, PROMPT - 12))]
    check(path, torch.cat([*parts, *session.decoded(everyone)], 1))
    again = torch.cat([session.step(everyone, 0, PROMPT + 4), session.step(everyone, PROMPT + 4, DECODED - 4)], 1)
    check(path, again)
