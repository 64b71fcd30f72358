"""Which graphs an engine captures, in which order and memory, and which one a step gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tandem.engine.graphs.decode_graphs import DecodeCapture
from tandem.engine.graphs.inputs import GraphInputs, GraphPlan
from tandem.engine.graphs.pool import GraphPool
from tandem.engine.graphs.prefill_graphs import PrefillCapture, PrefillGraphs
from tandem.models import ForwardBatch

CPU, PAGES = torch.device("cpu"), 3


class Captures:
    """Graphs that are only told apart, in the order of their capture."""

    device = CPU

    def __init__(self, plan: GraphPlan) -> None:
        self.plan = plan
        self.order: list[tuple[Any, ...]] = []

    def inputs(self, size: int) -> GraphInputs:
        return GraphInputs(size, self.plan, self.device)

    def captured(self, inputs: GraphInputs, memory: Any, *, plain: bool = False) -> Any:
        rows = len(inputs.batch.seq_lens)
        self.order.append((rows, plain, memory))
        return SimpleNamespace(inputs=inputs, plain=plain, graph=SimpleNamespace(pool=lambda: f"memory of {rows}"))


class PrefillCaptures:
    """Of sets of graphs."""

    def __init__(self, start: Any = None) -> None:
        self.order: list[tuple[Any, ...]] = []
        self._own = PrefillCapture(cast(Any, None), [], PAGES, start, cast(Any, None), CPU, None)
        self.shared_sizes, self.shares = self._own.shared_sizes, self._own.shares

    def of(self, sizes: Any, sibling: PrefillGraphs | None = None, reserve_sms: bool = False) -> PrefillGraphs:
        self.order.append((tuple(sizes), sibling, reserve_sms))
        return PrefillGraphs(None, sibling)


def pool_of(plan: GraphPlan) -> tuple[GraphPool, Captures]:
    pool, captures = GraphPool(), Captures(plan)
    pool.capture_decode(plan, cast(DecodeCapture, captures))
    return pool, captures


def batch(rows: int, *, wanted: int | None = None, drafts: bool = False) -> ForwardBatch:
    one = torch.zeros(rows, dtype=torch.int32)
    return ForwardBatch(
        input_ids=one.long(), positions=one.long(), cache_slots=one.long(), seq_lens=one, slots=one,
        query_starts=torch.arange(rows + 1, dtype=torch.int32), block_tables=one[:, None],
        logits_rows=torch.arange(rows if wanted is None else wanted), state_lens=one if drafts else None,
    )  # fmt: skip


def test_the_largest_is_captured_first_and_lends_its_memory() -> None:
    pool, captures = pool_of(GraphPlan((1, 2, 8), PAGES, plain_sizes=(1, 8)))
    own = "memory of 8"
    assert captures.order == [(8, False, None), (8, True, own), (2, False, own), (1, False, own), (1, True, own)]
    assert list(pool.decode) == [1, 2, 8] and list(pool.plain) == [1, 8]
    assert pool.plain[8].inputs is pool.decode[8].inputs  # one image of both


def test_a_step_gets_the_smallest_graph_that_it_fits() -> None:
    pool, _ = pool_of(GraphPlan((1, 2, 8), PAGES))
    assert [pool.decode_graph(batch(rows)) is pool.decode[size] for rows, size in ((1, 1), (2, 2), (3, 8), (8, 8))]
    assert pool.decode_graph(batch(9)) is None and pool.decode_graph(batch(3, wanted=1)) is None
    assert [pool.runs_beside_prefill(rows) for rows in (1, 8, 9)] == [True, True, False]
    assert GraphPool().decode_graph(batch(1)) is None and not GraphPool().runs_beside_prefill(1)


def test_steps_without_drafts_have_graphs_of_their_own() -> None:
    """And those of all steps where there are none of their size."""
    pool, _ = pool_of(GraphPlan((1, 2, 8), PAGES, plain_sizes=(1, 2), speculative=True))
    assert pool.decode_graph(batch(2)) is pool.plain[2]
    assert pool.decode_graph(batch(2, drafts=True)) is pool.decode[2]
    assert pool.decode_graph(batch(3)) is pool.decode[8]


@pytest.mark.parametrize(("reserved", "alone"), [(0, True), (8, True), (8, False), (0, False)])
def test_prefills_have_two_sets_of_graphs_only_where_the_background_has_fewer_multiprocessors(
    reserved: int, alone: bool
) -> None:
    pool, start = GraphPool(), SimpleNamespace(may_split=lambda rows: rows > 16, splits=lambda rows: True)
    captures = PrefillCaptures(start)
    plan = GraphPlan((), PAGES, prompts=(16, 32), splits=(16, 32), no_decodes=alone, reserved_sms=reserved)
    pool.capture_prefill(plan, cast(PrefillCapture, captures))
    own = bool(reserved) and alone
    assert (pool.prefill is not pool.background) == own
    assert captures.order == [((16, 32), None, True), *[((16, 32), None, False)] * own, ((32,), pool.prefill, False)]


def test_a_chunks_experts_are_shared_where_that_is_best_now() -> None:
    asked: list[int] = []
    start = SimpleNamespace(may_split=lambda rows: True, splits=lambda rows: asked.append(rows) or len(asked) > 1)
    pool, graph = GraphPool(), object()
    assert pool.shared_graph(batch(16)) is None
    pool.capture_prefill(GraphPlan((), PAGES, splits=(16,), no_decodes=False), cast(Any, PrefillCaptures(start)))
    assert pool.shared_graph(batch(16)) is None and asked == []  # none was captured: nobody looks
    for graphs in (pool.shared, pool.prefill):
        graphs.graph_of = lambda step, exclusive=False: graph  # type: ignore[assignment, method-assign]
    assert pool.shared_graph(batch(16)) is None and pool.shared_graph(batch(16)) is graph and asked == [16, 16]
    assert pool.prefill_graph(batch(16)) is None  # experts are on their way: no chunk is replayed that has all of them
