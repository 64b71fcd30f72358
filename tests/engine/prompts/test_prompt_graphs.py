"""What graphs of prompts' chunks read, which chunks fit one, and the order in which experts are streamed for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.graphs.pool import GraphPool
from tandem.engine.graphs.prefill_graphs import (
    SEQUENCES,
    ChunkInputs,
    GraphPiece,
    PrefillGraph,
    PrefillGraphs,
    Replayed,
)
from tandem.engine.sampling.logits import HostRows
from tandem.engine.step.hooks import Recorder
from tandem.engine.step.prefill import GpuPlace, PrefillTask
from tandem.engine.step.streams import Streams
from tandem.models import ForwardBatch

ROWS, PAGES, CPU = 16, 5, torch.device("cpu")


def batch(lengths: list[int], firsts: list[int], wanted: list[int], pages: int = 3) -> ForwardBatch:
    """Sequence s has rows at firsts[s] and after; its pages are 10 s + 1 …"""
    positions = torch.cat([torch.arange(f, f + n) for f, n in zip(firsts, lengths, strict=True)])
    ends = torch.tensor(lengths).cumsum(0)
    count = len(lengths)
    return ForwardBatch(
        input_ids=positions + 1000, positions=positions, cache_slots=positions + 500,
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int(),
        seq_lens=(torch.tensor(firsts) + torch.tensor(lengths)).int(),
        block_tables=(torch.arange(count)[:, None] * 10 + 1 + torch.arange(pages)).int(),
        logits_rows=torch.tensor(wanted, dtype=torch.int64), slots=torch.arange(count).int() + 1,
    )  # fmt: skip


def graphs(*sizes: int) -> PrefillGraphs:
    made = PrefillGraphs(None)
    made._graphs = {size: PrefillGraph(ChunkInputs(size, PAGES, CPU), (), found(SEQUENCES)) for size in sizes}
    return made


def found(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows * 7.0).view(rows, 7), torch.zeros(rows, 2, dtype=torch.float64)


def test_a_chunk_is_filled_up_with_copies_of_its_last_row() -> None:
    inputs = ChunkInputs(ROWS, PAGES, CPU)
    places = [t.data_ptr() for t in (inputs.batch.input_ids, inputs.batch.query_starts, inputs.batch.block_tables)]
    for source in (batch([9, 4], [0, 30], [8, 12]), batch([16], [7], []), batch([8], [3], [7], pages=5)):
        inputs.fill(source)
        inputs.send()
        rows, sequences, there = len(source.input_ids), len(source.seq_lens), inputs.batch
        index = torch.arange(ROWS).clamp(max=rows - 1)
        for name in ("input_ids", "positions"):
            assert torch.equal(getattr(there, name), getattr(source, name)[index]), name
        assert there.cache_slots.tolist() == source.cache_slots.tolist() + [-1] * (ROWS - rows)
        starts = source.query_starts.tolist()[:-1] + [ROWS] * (SEQUENCES + 1 - sequences)
        assert there.query_starts.tolist() == starts
        assert torch.equal(there.block_tables[:sequences, : source.block_tables.shape[1]], source.block_tables)
        assert torch.equal(there.seq_lens[:sequences], source.seq_lens)
        assert there.logits_rows.tolist() == source.logits_rows.tolist() + [0] * (SEQUENCES - len(source.logits_rows))
    after = [t.data_ptr() for t in (inputs.batch.input_ids, inputs.batch.query_starts, inputs.batch.block_tables)]
    assert places == after


def test_before_any_chunk_all_rows_are_one_sequence_of_page_0() -> None:
    idle = ChunkInputs(ROWS, PAGES, CPU).batch
    assert idle.query_starts.tolist() == [0] + [ROWS] * SEQUENCES
    assert not idle.cache_slots.any() and not idle.block_tables.any() and not idle.positions.any()


def test_tables_and_starts_are_aligned_as_kernels_like_them() -> None:
    made = ChunkInputs(ROWS, 7, CPU)
    for tensor in (made.batch.positions, made.batch.cache_slots, made.batch.block_tables, made.batch.query_starts):
        assert (tensor.data_ptr() - made.batch.input_ids.data_ptr()) % 16 == 0


@pytest.mark.parametrize(
    ("rows", "size"), [(7, None), (8, 16), (16, 16), (17, None), (32, 64), (64, 64), (65, None), (1, None)]
)
def test_a_chunk_takes_the_smallest_graph_that_it_fills_by_half(rows: int, size: int | None) -> None:
    made = graphs(64, 16)
    assert made.graph_of(batch([rows], [0], [rows - 1])) is made._graphs.get(size or 0)


def test_chunks_that_no_graph_computes() -> None:
    made, many = graphs(16), SEQUENCES + 1
    assert made.graph_of(batch([1] * many, [0] * many, [])) is None
    assert made.graph_of(batch([16], [0], list(range(many)))) is None  # a prompt that is scored
    decoding = batch([1, 15], [9, 0], [0])
    decoding.single_rows = 1
    assert made.graph_of(decoding) is None
    assert made.graph_of(batch([2] * SEQUENCES, [0] * SEQUENCES, list(range(SEQUENCES)))) is not None


@dataclass
class ScriptedSetup:
    """Graphs and start of a pass, in the order of calls."""

    calls: list[str] = field(default_factory=list)

    def end_task(self) -> None:
        self.calls.append("release")

    def step(self, name: str) -> Any:
        return lambda: self.calls.append(name)


class FakeGraph:
    """What is captured is the calls that were made meanwhile."""

    told: ScriptedSetup
    failing = False

    def __init__(self) -> None:
        self._first = self._last = 0

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.told.calls.append(f"begin {pool}")
        self._first = len(self.told.calls)

    def capture_end(self) -> None:
        if self.failing:
            raise ValueError("a capture failed")
        self._last = len(self.told.calls)
        self.told.calls.append("end")

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self.told.calls.append(", ".join(self.told.calls[self._first : self._last]))


def test_a_graph_is_cut_where_the_host_has_something_to_do(monkeypatch) -> None:
    """Graphs of one pool; at each replay the host does its part between them."""
    told, recorder = ScriptedSetup(), Recorder()
    monkeypatch.setattr(FakeGraph, "told", told, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    with recorder.recording():
        told.calls.append("router")
        recorder.cut(told.step("arrive"))
        told.calls.append("experts")
        recorder.cut(told.step("leave"))
        told.calls.append("sum")
    assert told.calls[::3] == ["begin None", "begin pool", "begin pool"] and recorder.pool == "pool"
    before = len(told.calls)
    GraphPiece(recorder.steps).give()
    assert told.calls[before:] == ["router", "arrive", "experts", "leave", "sum"]


def test_a_capture_that_fails_at_a_cut_ends_once(monkeypatch) -> None:
    told, recorder = ScriptedSetup(), Recorder()
    monkeypatch.setattr(FakeGraph, "told", told, raising=False)
    monkeypatch.setattr(FakeGraph, "failing", True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    with pytest.raises(ValueError, match="a capture failed"), recorder.recording():
        recorder.cut(told.step("arrive"))
    assert told.calls == ["begin None"] and recorder.steps == []


def task_of(pieces: Replayed, told: ScriptedSetup) -> PrefillTask:
    return PrefillTask(pieces, GpuPlace(cast(Any, told), Streams(CPU, overlap=False), None, HostRows(CPU)))


def test_a_pass_gives_its_pieces_in_order_and_has_the_rows_that_were_wanted(monkeypatch) -> None:
    told = ScriptedSetup()
    pieces = [GraphPiece([told.step(f"piece {i}")]) for i in range(3)]
    graph = PrefillGraph(ChunkInputs(ROWS, PAGES, CPU), pieces, found(SEQUENCES))
    monkeypatch.setattr(torch.cuda, "Event", Done)
    work = graph.of(batch([9, 4], [0, 30], [8, 12]))
    made = task_of(work, told)
    assert made.go_on(0.0, whole=True) and made.pieces_left() == 0
    logits = made.logits()
    assert told.calls == ["piece 0", "piece 1", "piece 2", "release"]
    assert torch.equal(logits.logits, found(SEQUENCES)[0][:2]) and len(logits.best) == 2


class Done:
    """An event that has come."""

    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


def test_what_a_graph_reads_stays_where_it_is(monkeypatch) -> None:
    """Steps in which other shares of the experts are streamed have other parts, each of which is kept a while."""
    order = pytest.importorskip("tandem.kernels.gpu.prompts.order")
    monkeypatch.setattr(order, "_recorded", {})
    monkeypatch.setattr(order, "_is_recorded", lambda device: True)
    read = order._heads((3, 5), CPU)
    monkeypatch.setattr(order, "_is_recorded", lambda device: False)
    others = [order._heads((1, more), CPU) for more in range(1, 400)]
    assert order._heads((3, 5), CPU) is read and read.tolist() == [0] * 3 + [3] * 5
    assert order._heads((1, 1), CPU) is not others[0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_prompt_that_fails_in_a_step_lets_go_of_what_it_held(monkeypatch, error) -> None:
    """What comes after it prepares its own; `LLM` is stopped with Ctrl+C, and asked again."""
    told, runner = ScriptedSetup(), GpuRunner.__new__(GpuRunner)
    runner._graphs = GraphPool()
    runner._graphs.prefill = graphs(16)
    graph = PrefillGraph(ChunkInputs(ROWS, PAGES, CPU), [GraphPiece([told.step("piece")])], found(SEQUENCES))
    monkeypatch.setattr(torch.cuda, "Event", Done)
    chunk = batch([9, 4], [0, 30], [8, 12])
    made = task_of(graph.of(chunk), told)
    monkeypatch.setattr(runner, "paused", lambda *_: made)

    def broken() -> None:
        raise error("a grammar failed")

    with pytest.raises(error, match="a grammar failed"):
        runner.logits(chunk, make=broken)
    assert told.calls == ["piece", "release"]
