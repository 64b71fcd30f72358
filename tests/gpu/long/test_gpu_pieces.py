"""Long chunks piece by piece (on a GPU in cuDNN, or in Triton's interpreter around plain torch); other rows as ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, needs_cuda, needs_triton
from paged_batches import PAGE, Batch, make_batch, random_tables
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.grouped_query.cost import gqa_scratch_bytes
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.spec.gpu_scratch import StepSize, gqa_rows
from tandem.spec.rope import Rope

if AVAILABLE:
    from tandem.kernels.gpu.attention import TritonAttention
    from tandem.kernels.gpu.cudnn_attention import attention, runs
    from tandem.kernels.gpu.cudnn_attention.attention import Heads, PieceAttention, attend_for
    from tandem.kernels.gpu.cudnn_attention.runs import is_heavy, runs_of

pytestmark = [pytest.mark.gpu, needs_triton]
HEADS, KV_HEADS, DIM, VALUE = 6, 2, 16, 16
MIXED = [(30, 31), (0, 5), (700, 720), (1300, 1400), (9, 10), (3, 12)]  # tokens of sequences; two chunks are long


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """As cuDNN's, in float32."""
    share = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(share, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if causal:
        scores += torch.full(scores.shape[1:], float("-inf"), device=q.device).triu(1)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out.to(q.dtype), scores.logsumexp(-1)


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 20 rows are long, pieces have 512 tokens."""
    monkeypatch.setattr(runs, "LEAST_ROWS", 20)
    monkeypatch.setattr(runs, "LEAST_WORK", 0)
    monkeypatch.setattr(attention, "PIECES", (512, 256, 128))
    monkeypatch.setattr(attention, "ROUND", 64)


def case(spans: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> tuple[Batch, Tensor, Tensor, Tensor]:
    """A batch, queries and pages."""
    torch.manual_seed(0)
    tables, pages = random_tables(len(spans), max(end for _, end in spans))
    batch = make_batch(spans, tables)
    k, v = (torch.randn(pages, PAGE, KV_HEADS, n).to(dtype) for n in (DIM, VALUE))
    return batch, torch.randn(len(batch.positions), HEADS, DIM).to(dtype), k, v


def attended(batch: Batch, *tensors: Tensor, captured: bool = False) -> Tensor:
    made = PieceAttention(TritonAttention(), lambda shape, device: plain)
    made.begin(batch, captured)
    return made(*(t.to(DEVICE) for t in tensors), batch.there(DEVICE), 0.25, 0).cpu()


@pytest.mark.parametrize(
    "span", [(0, 20), (0, 256), (512, 768), (1024, 1060), (1300, 1400), (511, 1025)], ids=str
)
def test_a_long_chunk(some: None, span: tuple[int, int]) -> None:
    """From nothing, after whole pieces, after what is none."""
    batch, q, k, v = case([span])
    expected = TorchOps().attention(q.double(), k.double(), v.double(), batch, 0.25)
    torch.testing.assert_close(attended(batch, q, k, v).double(), expected, rtol=1e-5, atol=1e-5)


def test_more_rows_than_have_room(some: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "gqa_rows", lambda *sizes: 512)
    batch, q, k, v = case([(200, 900)])
    expected = TorchOps().attention(q.double(), k.double(), v.double(), batch, 0.25)
    torch.testing.assert_close(attended(batch, q, k, v).double(), expected, rtol=1e-5, atol=1e-5)


def test_other_rows_have_their_own_bits(some: None) -> None:
    """Rows that decode, and short chunks, before, between and behind long ones."""
    batch, q, k, v = case(MIXED)
    batch = replace(batch, single_rows=1)
    got = attended(batch, q, k, v)
    ours = TritonAttention()(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), batch.there(DEVICE), 0.25, 0).cpu()
    starts = batch.query_starts.tolist()
    for s, (begin, end) in enumerate(MIXED):
        rows = slice(starts[s], starts[s + 1])
        if end - begin < 20:
            assert torch.equal(got[rows], ours[rows])
        else:
            assert not torch.equal(got[rows], ours[rows])
    torch.testing.assert_close(got, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("captured", [True, False])
def test_where_graphs_run_ours_computes_all(some: None, captured: bool) -> None:
    batch, q, k, v = case([(100, 140)])
    ours = TritonAttention()(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), batch.there(DEVICE), 0.25, 0).cpu()
    assert torch.equal(attended(batch, q, k, v, captured=captured), ours) == captured


@pytest.mark.parametrize("how", ["window", "sinks", "heads"])
def test_what_cudnn_does_not_have_is_ours(some: None, how: str) -> None:
    batch, q, k, v = (t if isinstance(t, Batch) else t.to(DEVICE) for t in case([(100, 140)]))
    window, sinks = 7 if how == "window" else 0, torch.randn(HEADS).to(DEVICE) if how == "sinks" else None
    made = PieceAttention(TritonAttention(), lambda shape, device: None if how == "heads" else plain)
    made.begin(batch, False)
    there = batch.there(DEVICE)
    got = made(q, k, v, there, 0.25, window, sinks)
    assert torch.equal(got, TritonAttention()(q, k, v, there, 0.25, window, sinks))


def test_keys_of_fp8(some: None) -> None:
    batch, q, k, v = case([(600, 640)])
    k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
    expected = TorchOps().attention(q.double(), k.double(), v.double(), batch, 0.25)
    torch.testing.assert_close(attended(batch, q, k, v).double(), expected, rtol=1e-5, atol=1e-5)


def test_which_chunks_are_long() -> None:
    long = 4096  # from nothing it is just long enough
    batch, *_ = case([(4, 5), (4, 5), (0, 9)])
    assert runs_of(batch) == ()
    batch.query_starts = torch.tensor([0, 1, 1 + long, 3 + long]).int()
    batch.seq_lens, batch.positions = torch.tensor([8, long - 1, 7]).int(), torch.zeros(3 + long)
    assert runs_of(batch) == () and not is_heavy(batch)
    batch.seq_lens[1] = 100 + long
    found = runs_of(batch)
    assert is_heavy(batch)
    assert [run.before for run in found] == [None, 100, None]
    assert [(run.rows.start, run.rows.stop) for run in found] == [(0, 1), (1, 1 + long), (1 + long, 3 + long)]
    few = replace(batch, query_starts=torch.tensor([0, 1, 1001, 1003]).int(), seq_lens=torch.tensor([8, 1 << 20, 7]))
    assert runs_of(few) == ()


def test_rows_of_a_square_have_room() -> None:
    rope = Rope(10000.0, 128)
    assert gqa_rows(32, 128, 128) == 8192 and gqa_rows(128, 256, 256) % 512 == 0
    step = StepSize(8192, 32768, 16)
    assert gqa_scratch_bytes(Gqa(32, 4, 128, rope, window=128), step) == 0
    assert 1 << 27 < gqa_scratch_bytes(Gqa(32, 4, 128, rope), step) < 1 << 30


@needs_cuda
@pytest.mark.parametrize("spans", [[(0, 2048)], [(3000, 5048)], [(40000, 42048)], [(50, 51), (2048, 4196)]], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 4, 128), (16, 8, 64)])
def test_cudnn(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, dim: int, spans: list[tuple[int, int]]
) -> None:
    """Scores in float32; their exponentials and each piece's result are rounded to bfloat16, as in our own kernel."""
    if attend_for(Heads(heads, kv_heads, dim, dim), DEVICE) is None:
        pytest.skip("cuDNN does not take these heads here")
    monkeypatch.setattr(runs, "LEAST_WORK", 0)
    torch.manual_seed(0)
    tables, pages = random_tables(len(spans), max(end for _, end in spans))
    batch = make_batch(spans, tables)
    batch = replace(batch, single_rows=sum(end - begin == 1 for begin, end in spans))
    k, v = torch.randn(2, pages, PAGE, kv_heads, dim, device=DEVICE).bfloat16()
    q = torch.randn(len(batch.positions), heads, dim, device=DEVICE).bfloat16()
    made, there = PieceAttention(TritonAttention()), batch.there(DEVICE)
    made.begin(batch, False)
    got = made(q, k, v, there, dim**-0.5, 0)
    ours = TritonAttention()(q, k, v, there, dim**-0.5, 0)
    assert not torch.equal(got, ours)
    # both are rounded to bfloat16 (0.29 * 2^-8 each, root mean square of uniform errors), and so are exponentials
    assert (got.float() - ours.float()).norm() <= 2.0**-8 * ours.float().norm()
    s, (_, end) = len(spans) - 1, spans[-1]  # the last sequence's row before 16 others, against float32
    keys, values = (t[tables[s].long().to(DEVICE)].flatten(0, 1)[: end - 16].double() for t in (k, v))
    row = slice(len(q) - 17, len(q) - 16)
    exact, _ = plain(q[row].double(), keys, values, dim**-0.5, False)
    assert (got[row].view(1, heads, dim).double() - exact).norm() <= 2.0**-7 * exact.norm()
