"""Choosing tokens, and latents of those alone, on a GPU (or interpreted): against float64, and inside whole models.

Scores are sums of heads * dim products in float32. What is chosen may differ from an exact choice only where scores are
that near. Attention over a choice has the tolerance of latent attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_cuda, needs_triton
from gpu_sessions import DECODED, PROMPT, ROWS, Session, by_row, on_the_cpu
from paged_batches import PAGE, IndexCase, check_choice, make_batch, random_tables
from sessions import Session as PlainSession
from sessions import ours, reference, worst
from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import RopeTables
from tandem.kernels.reference import TorchOps
from tandem.kernels.selected_keys import SelectedKeys
from tandem.mechanisms.latent.absorbed import LatentSizes, LatentWeights
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights
from tandem.spec.rope import Rope as RopeShape

if AVAILABLE:
    from tandem.kernels.gpu.ops import GpuOps
    from tandem.mechanisms.latent.gpu import decode, heads, prompt
    from tandem.mechanisms.token_index.gpu import best, index, scores

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, needs_triton]
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TOLERANCE = 2.0**-15 if INTERPRETED else 2.0**-5
SHAPE = Index(3 if INTERPRETED else 20, 18, 9, RopeShape(1e4, 12, pairs="halves"))
REAL = Index(64, 128, 2048, RopeShape(1e4, 64, pairs="neighbours"))


@pytest.fixture(scope="module")
def ops() -> GpuOps:
    return GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))


def chosen_by(ops: GpuOps, case: IndexCase) -> tuple[SelectedKeys, Tensor]:
    weights = IndexWeights(*(each.to(DEVICE) for each in case.weights))
    return case.run(ops.bound(case.shape, weights), DEVICE)


MIXED = [(1, 2), (30, 31), (0, 7), (5, 20), (8, 10), (75, 90)]


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize("spans", [[(99, 100), (0, 1), (8, 9), (9, 10), (40, 41)], MIXED])
def test_the_best_are_chosen(ops: GpuOps, spans: list[tuple[int, int]], pairs: str) -> None:
    """Rows that decode, and chunks: sequences that see all, some, and both; lists of several pieces."""
    shape = replace(SHAPE, rope=replace(SHAPE.rope, pairs=pairs))
    assert best.piece_of(shape.budget) == 64
    case = IndexCase(shape, spans, DTYPE)
    chosen, cache = chosen_by(ops, case)
    check_choice(case, chosen, cache)
    exact = case.run(TorchOps().bound(shape, case.weights))[1]
    written = ~exact.isnan()
    unit = 2.0**-20 if INTERPRETED else 2.0**-7
    assert torch.equal(written, ~cache.isnan())
    assert (cache[written] - exact[written]).abs().max() <= unit * exact[written].abs().max()


def test_a_list_shrinks_several_times(ops: GpuOps) -> None:
    assert best.lengths(1008, 9) == [1008, 144, 27] and best.lengths(1 << 17, 2048) == [1 << 17, 32768, 8192]
    case = IndexCase(SHAPE, [(999, 1000), (630, 631), (3, 4)], DTYPE)
    check_choice(case, *chosen_by(ops, case))


def test_rows_whose_scores_do_not_fit_go_in_turns(ops: GpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    case = IndexCase(SHAPE, MIXED, DTYPE)
    whole, _ = chosen_by(ops, case)
    monkeypatch.setattr(index, "SCORE_BYTES", 7 * 4 * 96)
    monkeypatch.setattr(scores, "PROGRAMS", 7)
    few, _ = chosen_by(ops, case)
    assert torch.equal(few.rows, whole.rows) and torch.equal(few.counts, whole.counts)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_of_equal_scores_the_earliest_count(ops: GpuOps, sign: float) -> None:
    """Zeros of both signs: negative weights times nothing."""
    case = IndexCase(SHAPE, [(99, 100)], DTYPE)
    case.gates[0][:] = 0.0 * sign
    chosen, _ = chosen_by(ops, case)
    assert torch.equal(case.positions(chosen)[0], torch.arange(9))


def test_scores_that_are_no_numbers_end(ops: GpuOps) -> None:
    case = IndexCase(SHAPE, [(99, 100), (40, 60)], DTYPE)
    case.gates[0][:, ::2] = float("nan")
    chosen, _ = chosen_by(ops, case)
    found = case.positions(chosen)
    assert [len(each.unique()) for each in found] == [min(9, t + 1) for t in [99, *range(40, 60)]]


def test_nothing_is_scored_where_all_are_seen(ops: GpuOps) -> None:
    """Chunks of sequences that are short: attention takes all keys, as without an indexer."""
    weights = IndexWeights(*(each.to(DEVICE) for each in IndexCase(SHAPE, [(0, 9)]).weights))
    made = ops.bound(SHAPE, weights)
    for spans in ([(0, 9), (0, 3)], [(8, 9)]):
        case = IndexCase(replace(SHAPE, budget=16), spans, DTYPE)
        cache = torch.zeros(case.pages, PAGE, 1, SHAPE.dim, dtype=DTYPE, device=DEVICE)
        chosen = case.chosen(made, spans, cache)
        assert chosen is None if len(spans) == 2 else chosen is not None  # one row may be in a graph
        assert case.chosen(ops.bound(case.shape, weights), spans, cache) is None  # a page has no more


@needs_cuda
@pytest.mark.parametrize("spans", [[(131071, 131072), (5000, 5001), (2047, 2048), (2048, 2049)], [(9000, 9300)]])
def test_the_indexers_of_real_models(ops: GpuOps, spans: list[tuple[int, int]]) -> None:
    case = IndexCase(REAL, spans, DTYPE)
    check_choice(case, *chosen_by(ops, case))


@needs_cuda
def test_a_choice_in_a_graph_is_that_of_the_sequence_at_its_replay(ops: GpuOps) -> None:
    """Captured for one token; replayed for sequences of other lengths."""
    shape, lengths = replace(REAL, budget=64), (1, 60, 64, 65, 700, 3000)
    case = IndexCase(shape, [(2999, 3000)], DTYPE)
    made = ops.bound(shape, IndexWeights(*(each.to(DEVICE) for each in case.weights)))
    cache = torch.zeros(case.pages, PAGE, 1, shape.dim, dtype=DTYPE, device=DEVICE)
    case.chosen(made, [(0, 3000)], cache)  # all keys
    batch = case.batch([(0, 1)]).there(DEVICE)
    given = [torch.zeros_like(x[0][:1], device=DEVICE) for x in (case.q, case.k, case.gates)]
    for _ in range(2):
        made(*given, batch, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = made(*given, batch, cache)
    for length in lengths:
        alone = case.chosen(made, [(length - 1, length)], cache)
        for to, x in zip(given, (case.q, case.k, case.gates), strict=True):
            to.copy_(x[0][length - 1 : length])
        now = case.batch([(length - 1, length)])
        for name in ("positions", "cache_slots", "seq_lens"):
            getattr(batch, name).copy_(getattr(now, name))
        graph.replay()
        assert torch.equal(chosen.rows, alone.rows) and torch.equal(chosen.counts, alone.counts)


# -- attention over a choice ---

AWKWARD = LatentSizes(heads=5, nope=18, rope=12, rank=42, value=22)
WIDE = LatentSizes(heads=20, nope=48, rope=16, rank=64, value=64)
STILL = LatentSizes(heads=5, nope=18, rope=0, rank=42, value=22)
GLM = LatentSizes(heads=64, nope=192, rope=64, rank=512, value=256)


def attended(
    ops: GpuOps, sizes: LatentSizes, spans: list[tuple[int, int]], single: int, budget: int
) -> tuple[Tensor, Tensor]:
    """Values, and what a definition of latent attention in float64 makes of random choices."""
    torch.manual_seed(0)
    s, longest = sizes, max(end for _, end in spans)
    tables, pages = random_tables(len(spans), longest)
    batch = replace(make_batch(spans, tables), single_rows=single)
    angles, rows = torch.rand(longest, s.rope // 2) * 6.3, len(batch.positions)
    made = [torch.randn(n).to(DTYPE) for n in ((s.heads, s.rank, s.nope), (s.heads, s.value, s.rank))]
    weights = LatentWeights(
        made[0] / s.nope**0.5, made[1] / s.rank**0.5, torch.ones(s.rank).to(DTYPE), 1e-6,
        RopeTables(angles.cos(), angles.sin()), 0.7 * (s.nope + s.rope) ** -0.5, True,
    )  # fmt: skip
    q, kv = torch.randn(rows, s.heads * (s.nope + s.rope)).to(DTYPE), torch.randn(rows, s.rank + s.rope).to(DTYPE)
    latents = torch.randn(pages, PAGE, 1, s.width).to(DTYPE)
    chosen = _random_choice(batch.positions, batch.query_starts, tables, budget)
    moved = LatentWeights(*(each.to(DEVICE) if isinstance(each, Tensor) else each for each in weights))
    moved = moved._replace(rope=RopeTables(angles.cos().to(DEVICE), angles.sin().to(DEVICE)))
    layer = ops.bound(sizes, moved, "f32" if DTYPE is torch.float32 else "bf16")
    there = latents.to(DEVICE)
    on_device = SelectedKeys(chosen.rows.to(DEVICE), chosen.counts.to(DEVICE))
    got = layer(q.to(DEVICE), kv.to(DEVICE), batch.there(DEVICE), there, on_device).cpu()
    exact = TorchOps().bound(sizes, _wide(weights), "f32")
    return got, exact(q.float(), kv.float(), batch, latents.float(), chosen)


def _wide(w: LatentWeights) -> LatentWeights:
    rope = RopeTables(*(table.to(DTYPE).float() for table in (w.rope.cos, w.rope.sin)))
    return w._replace(keys=w.keys.float(), values=w.values.float(), norm=w.norm.float(), rope=rope)


def _random_choice(positions: Tensor, starts: Tensor, tables: Tensor, budget: int) -> SelectedKeys:
    rows = torch.zeros(len(positions), budget, dtype=torch.int32)
    for t, position in enumerate(positions.tolist()):
        s = int((starts[1:] <= t).sum())
        some = torch.randperm(position + 1)[:budget].sort().values
        rows[t, : len(some)] = tables[s][some // PAGE] * PAGE + some % PAGE
    return SelectedKeys(rows, (positions + 1).clamp(max=budget).int())


def near(got: Tensor, expected: Tensor) -> None:
    assert got.isfinite().all()
    error = (got.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    assert error.max() < TOLERANCE, error


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are many, and go in turns."""
    monkeypatch.setattr(heads, "FEW_ROWS", 4)
    monkeypatch.setattr(heads, "MANY_ROWS", 12)
    for name, value in {"PIECE": 32, "SQUARE": 48, "ROUND_ROWS": 8, "ROUND_KEYS": 16}.items():
        monkeypatch.setattr(prompt, name, value)


@pytest.mark.parametrize("sizes", [AWKWARD, WIDE, STILL])
@pytest.mark.parametrize("spans, single", [
    ([(99, 100), (0, 1), (30, 31)], 3),
    ([(60, 61), (50, 53), (0, 3)], 1),  # few rows
    ([(75, 76), (0, 70), (3, 40), (60, 64), (40, 75)], 1),  # all seen, then chosen; chosen alone
])  # fmt: skip
def test_attention_over_a_choice(
    ops: GpuOps, small: None, sizes: LatentSizes, spans: list[tuple[int, int]], single: int
) -> None:
    near(*attended(ops, sizes, spans, single, 20))


@needs_cuda
@pytest.mark.parametrize("kernel", ["chosen", "triton"])
@pytest.mark.parametrize("sizes", [GLM, LatentSizes(128, 128, 64, 512, 128), LatentSizes(64, 256, 0, 512, 256)])
def test_the_sizes_of_real_models(
    ops: GpuOps, monkeypatch: pytest.MonkeyPatch, sizes: LatentSizes, kernel: str
) -> None:
    """Gluon's kernel on Hopper, and Triton's. Rows that decode, few, and many."""
    if kernel == "triton":
        monkeypatch.setattr(decode, "hopper_kernel", lambda device, sizes: None)
    near(*attended(ops, sizes, [(4999, 5000), (0, 1), (2048, 2049), (3000, 3030), (1900, 2300)], 3, 2048))


# -- whole models ---

VARIANTS = ["deepseek_v32", "deepseek_v32-short", "glm_moe_dsa", "glm_moe_dsa-every"]


@pytest.mark.skipif(not INTERPRETED, reason="bfloat16 on a GPU")
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_equal_transformers(
    tiny_models, monkeypatch: pytest.MonkeyPatch, small: None, variant: str
) -> None:
    """Prompts in chunks on a cached prefix, several sequences together, decode steps; experts are plain torch's."""
    monkeypatch.setattr(decode, "PARTS", 16)
    ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1]), "scalar"))
    for name in ("experts", "mlp"):
        monkeypatch.setattr(ops, name, getattr(TorchOps(), name))
    session = PlainSession(tiny_models[variant], ops=ops)
    assert worst(ours(session), reference(tiny_models[variant])) < 1e-4


def check(path: Path, got: Tensor) -> None:
    """A choice is as sudden as a router's: one token more or less of nine changes a row. So the median row counts, and
    its tolerance is twice the rounding error that bfloat16 has on the CPU."""
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    assert by_row(got, exact).median() < 2 * by_row(theirs, exact).median()


@needs_cuda
@pytest.mark.parametrize("together", [True, False], ids=["batch8", "batch1"])
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["kernels", "graphs"])
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_placement_does_not_change_the_logits(tiny_models, variant, share, graphs, together) -> None:
    check(tiny_models[variant], Session(tiny_models[variant], share, graphs).logits(together))


@needs_cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_cut_and_anew(tiny_models, small: None, variant: str) -> None:
    """A prompt at once, and cut on a cached prefix; then all of it anew, as after preemption, while others decode."""
    path, everyone = tiny_models[variant], list(range(ROWS))
    session = Session(path, 0.5, (1, 8))
    parts = [session.step(everyone, first, count) for first, count in ((0, 3), (3, 9), (12, PROMPT - 12))]
    check(path, torch.cat([*parts, *session.decoded(everyone)], 1))
    again = torch.cat(
        [session.step(everyone, 0, PROMPT + 4), session.step(everyone, PROMPT + 4, DECODED - 4)], 1
    )
    check(path, again)
