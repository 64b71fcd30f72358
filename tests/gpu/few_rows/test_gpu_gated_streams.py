"""Gated residual streams, and n-grams that add to them, on a GPU (or interpreted): against plain torch in float32.

In bfloat16 a number of the result passes some ten roundings of 2^-9, each relative to what it is added to: 2^-5 of the
largest number holds them all. In float32 sums of n * hidden products have 2^-24 each: 2^-17.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_cuda, needs_triton
from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.kernels.step_rows import step_rows
from tandem.mechanisms.gated_streams.shape import GatedStreams
from tandem.mechanisms.gated_streams.torch import GatedWeights, ReturningRows, Shares
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.ngrams.torch import Hashes, NgramWeights
from tandem.models.batch import ForwardBatch
from tandem.spec.norm import Norm
from tandem.spec.stored import RowTable

if AVAILABLE:
    from tandem.kernels.gpu.ops import GpuOps
    from tandem.mechanisms.gated_streams import gpu as gated

pytestmark = [pytest.mark.gpu, needs_triton]
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TOLERANCE = 2.0**-17 if INTERPRETED else 2.0**-5
FMT = "f32" if INTERPRETED else "bf16"


@pytest.fixture(scope="module")
def ops() -> GpuOps:
    return GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1]), "scalar"))


def near(got: Tensor, exact: Tensor, scale: float = 1.0) -> None:
    got = got.cpu().float()
    assert got.isfinite().all() and (got - exact).abs().max() <= scale * TOLERANCE * exact.abs().max()


def matrices(ops: Any, shape: GatedStreams, hidden: int, inject: bool, fmt: str) -> GatedWeights:
    g, wide = torch.Generator().manual_seed(1), shape.streams * hidden
    rows = shape.rank + (shape.streams if inject else 0)
    down = (torch.randn(rows, wide, generator=g) / wide**0.5 * shape.streams).bfloat16()
    up = (torch.randn(wide, shape.rank, generator=g) / shape.rank**0.5).bfloat16()
    return GatedWeights(ops.linear(down, fmt=fmt), ops.linear(up, fmt=fmt), inject)


@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("shape, hidden", [(GatedStreams(4, 18), 72), (GatedStreams(3, 22), 40)])
def test_streams_join_and_pass_gates(
    ops: GpuOps, shape: GatedStreams, hidden: int, rows: int, inject: bool
) -> None:
    """Few rows, whose gates are made where they are used, and more; with a result that joins, and without."""
    g, n = torch.Generator().manual_seed(2), shape.streams
    norm = torch.rand(n * hidden, generator=g) + 0.5
    streams = torch.randn(rows, n, hidden, generator=g).to(DTYPE)
    y, share = torch.randn(rows, hidden, generator=g).to(DTYPE), torch.rand(rows, n, generator=g).to(DTYPE)
    gpu = ops.bound(shape, matrices(ops, shape, hidden, inject, FMT))
    exact = TorchOps().bound(shape, matrices(TorchOps(), shape, hidden, inject, "f32"))
    for joins in (True, False):
        there = ReturningRows(y.to(DEVICE), Shares(share.to(DEVICE))) if joins else None
        here = ReturningRows(y.float(), Shares(share.float())) if joins else None
        before = streams.to(DEVICE)
        got = gpu.advanced(before, there, norm.to(DEVICE), 1e-6)
        expected = exact.advanced(streams.float(), here, norm, 1e-6)
        assert torch.equal(before.cpu(), streams)
        near(got[0], expected[0])
        near(got[1], expected[1])
        assert (got[2] is None) == (not inject)
        if inject:
            near(got[2].share, expected[2].share)
    near(gpu.normed(streams.to(DEVICE), norm.to(DEVICE), 1e-6), exact.normed(streams.float(), norm, 1e-6))


@needs_cuda
@pytest.mark.parametrize("rows", [1, 4, 16, 300])
def test_the_streams_of_the_real_model(ops: GpuOps, rows: int) -> None:
    shape, hidden, g = GatedStreams(4, 320), 2560, torch.Generator().manual_seed(2)
    norm, streams = torch.rand(4 * hidden, generator=g) + 0.5, torch.randn(rows, 4, hidden, generator=g).bfloat16()
    got = ops.bound(shape, matrices(ops, shape, hidden, True, "bf16")).advanced(
        streams.to(DEVICE), None, norm.to(DEVICE), 1e-6
    )
    exact = TorchOps().bound(shape, matrices(TorchOps(), shape, hidden, True, "f32"))
    expected = exact.advanced(streams.float(), None, norm, 1e-6)
    near(got[1], expected[1])
    near(got[2].share, expected[2].share)


def test_rows_of_other_matrices_go_the_long_way(ops: GpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """As matrices that are codes do: the same, but for the order of sums."""
    shape, hidden, g = GatedStreams(4, 18), 72, torch.Generator().manual_seed(2)
    mix = ops.bound(shape, matrices(ops, shape, hidden, True, FMT))
    streams, norm = torch.randn(2, 4, hidden, generator=g).to(DEVICE, DTYPE), torch.ones(4 * hidden).to(DEVICE)
    few = mix.advanced(streams, None, norm, 1e-6)
    monkeypatch.setattr(gated, "FEW_ROWS", 0)
    many = mix.advanced(streams, None, norm, 1e-6)
    near(many[1], few[1].cpu().float())
    near(many[2].share, few[2].share.cpu().float())


# -- n-grams ---

SHAPE = Ngram(3, 4, RowTable(3200, 6), 4, 4, 16, 5, Norm(1e-6, plus_one=True))
OTHER = Ngram(4, 2, RowTable(3200, 8), 3, 3, 20, 5, Norm(1e-6, plus_one=True))
SLOTS, DRAFT_TOKENS = 4, 2
STEPS = [[(0, 5), (0, 23), (0, 1)], [(5, 6), (23, 40), (1, 3)], [(6, 7), (40, 41), (3, 4)], [(7, 8), (41, 42), (4, 5)]]


class NgramCase:
    """Three sequences; what was never written is no number."""

    def __init__(self, shape: Ngram) -> None:
        g, self.shape = torch.Generator().manual_seed(4), shape
        self.texts = [torch.randint(12, (60,), generator=g) for _ in range(3)]
        self.table = torch.randn(shape.table.rows, shape.table.width, generator=g).bfloat16()
        sizes = 97 + 4 * torch.arange(shape.hashes)
        self.hashes = Hashes(torch.randint(1 << 60, (shape.longest,), generator=g) * 2 + 1, sizes, sizes.cumsum(0) - 97)
        self.norms = [torch.rand(shape.channels, generator=g) + 0.5 for _ in range(2)]
        self.taps = torch.randn(shape.taps, shape.channels, generator=g)
        each = [torch.randn(60, n, generator=g).to(DTYPE) for n in (shape.channels + shape.hidden, shape.channels)]
        self.given = [[x.roll(i, 0) for x in each] for i in range(3)]

    def bound(self, ops: Any, device: torch.device) -> Any:
        mix = ops.bound(GatedStreams(self.shape.streams, 0))
        floats = [x.to(device) for x in (*self.norms, self.taps)]
        find = lambda numbers: self.table.index_select(0, numbers)  # noqa: E731
        return ops.bound(self.shape, NgramWeights(self.hashes, find, *floats, mix, 128))

    def states(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        s = self.shape
        ids = torch.full((SLOTS, s.longest + DRAFT_TOKENS, 1), float("nan"))
        ring = torch.full((SLOTS, s.span + DRAFT_TOKENS, s.channels), float("nan"), dtype=dtype)
        return ids.to(device), ring.to(device)

    def batch(self, spans: list[tuple[int, int]], device: torch.device) -> ForwardBatch:
        positions = torch.cat([torch.arange(*span) for span in spans])
        ids = torch.cat([text[slice(*span)] for text, span in zip(self.texts, spans, strict=False)])
        starts = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0).int()
        lens = torch.tensor([b for _, b in spans], dtype=torch.int32)
        tensors = ids, positions, positions, starts, lens, torch.zeros(len(spans), 1, dtype=torch.int32), positions
        slots = torch.arange(1, len(spans) + 1, dtype=torch.int32)
        return ForwardBatch(*(x.to(device) for x in tensors), slots.to(device))

    def rows(self, spans: list[tuple[int, int]]) -> list[Tensor]:
        each = list(zip(self.given, spans, strict=True))
        projected, x = (torch.cat([own[i][slice(*span)] for own, span in each]) for i in range(2))
        return [projected, x.view(len(x), self.shape.streams, -1)]


@pytest.mark.parametrize("shape", [SHAPE, OTHER], ids=["threes", "fours"])
def test_what_n_grams_give_at_every_cut(ops: GpuOps, shape: Ngram) -> None:
    """Prompts, cut ones, and rows that decode: rows of the table to the bit, and what streams are given of them."""
    case, cpu = NgramCase(shape), torch.device("cpu")
    gpu, exact = case.bound(ops, DEVICE), case.bound(TorchOps(), cpu)
    there, here = case.states(DTYPE, DEVICE), case.states(torch.float32, cpu)
    for spans in STEPS:
        host, batch = case.batch(spans, cpu), case.batch(spans, DEVICE)
        gpu.staged.begin(host, captured=False)
        rows, batch_rows = step_rows(host), step_rows(batch)
        entries = gpu.entries(batch, batch_rows, there[0])
        assert torch.equal(entries.cpu().float(), exact.entries(host, rows, here[0]).float())
        projected, x = case.rows(spans)
        got = gpu.additions(projected.to(DEVICE), x.to(DEVICE), batch_rows, there[1])
        near(got, exact.additions(projected.float(), x.float(), rows, here[1]))


@needs_cuda
def test_a_graph_reads_the_rows_of_its_replay(ops: GpuOps) -> None:
    """Two rows in a graph of three: the third is a copy of the second."""
    case = NgramCase(SHAPE)
    gpu, cpu = case.bound(ops, DEVICE), torch.device("cpu")
    spans = [(20, 21), (30, 31), (0, 1)]
    gpu.staged.begin(case.batch([(0, 20), (0, 30), (0, 0)], cpu), captured=False)
    host, batch = case.batch(spans, cpu), case.batch(spans, DEVICE)
    host.slots[2], batch.slots[2] = 0, 0
    gpu.staged.begin(host, captured=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        entries = gpu.staged.rows(3)
    exact, ids = case.bound(TorchOps(), cpu), case.states(torch.float32, cpu)[0]
    first = case.batch([(0, 20), (0, 30)], cpu)
    exact.entries(first, step_rows(first), ids)
    for i in range(20, 26):
        now = case.batch([(i, i + 1), (i + 10, i + 11)], cpu)
        for name in ("input_ids", "positions"):
            getattr(host, name)[:2] = getattr(now, name)
        gpu.staged.begin(host, captured=True)
        graph.replay()
        expected = exact.entries(now, step_rows(now), ids)
        assert torch.equal(entries.cpu()[:2], expected) and torch.equal(entries[1], entries[2])
