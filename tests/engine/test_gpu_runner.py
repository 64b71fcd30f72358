"""What a CUDA graph reads: every step's batch, filled up with copies of its last row."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tandem.engine.gpu_runner import GpuRunner, _masks
from tandem.engine.graphs.inputs import GraphInputs, GraphPlan
from tandem.engine.graphs.pool import GraphPool
from tandem.engine.graphs.prefill_graphs import PrefillCapture
from tandem.engine.sampling.graph_masks import GraphMasks
from tandem.engine.sampling.logits import BestRows, HostRows, StepEnd, best_of
from tandem.engine.sampling.masks import bits_of
from tandem.engine.sequence import Chunk
from tandem.engine.step.batch import BatchArrays, moved, slots_of
from tandem.engine.step.streams import Streams
from tandem.errors import EngineError, KernelError
from tandem.models import ForwardBatch

SIZE, PAGES, VOCAB = 6, 5, 71
MASKS = GraphMasks(SIZE, torch.device("cpu"))


def batch(rows: int, pages: int, first: int) -> ForwardBatch:
    count = torch.arange(first, first + rows)
    return ForwardBatch(
        input_ids=count, positions=count + 100, cache_slots=count + 200,
        query_starts=torch.arange(rows + 1, dtype=torch.int32), seq_lens=(count + 101).int(),
        block_tables=(count[:, None] * 10 + torch.arange(pages)).int(), logits_rows=torch.arange(rows),
        slots=count.int() + 7,
    )  # fmt: skip


def check(inputs: GraphInputs, source: ForwardBatch) -> None:
    rows, width = source.block_tables.shape
    inputs.send()
    index = torch.arange(SIZE).clamp(max=rows - 1)
    for name in ("input_ids", "positions", "cache_slots", "seq_lens"):
        assert torch.equal(getattr(inputs.batch, name), getattr(source, name)[index]), name
    assert torch.equal(inputs.batch.block_tables[:, :width], source.block_tables[index])
    assert inputs.batch.slots.tolist() == source.slots.tolist() + [0] * (SIZE - rows)
    assert inputs.counted.tolist() == [rows]
    assert torch.equal(inputs.batch.query_starts, torch.arange(SIZE + 1, dtype=torch.int32))


def test_rows_that_are_left_over_copy_the_last_one() -> None:
    inputs = GraphInputs(SIZE, GraphPlan((SIZE,), PAGES), torch.device("cpu"))
    for rows, pages, first in ((6, 5, 0), (1, 2, 7), (4, 5, 20), (6, 1, 3)):
        source = batch(rows, pages, first)
        inputs.fill(source)
        check(inputs, source)


def test_memory_stays_where_a_graph_reads_it() -> None:
    inputs = GraphInputs(SIZE, GraphPlan((SIZE,), PAGES), torch.device("cpu"))
    before = [
        t.data_ptr() for t in (inputs.batch.input_ids, inputs.batch.seq_lens, inputs.batch.block_tables)
    ]
    inputs.fill(batch(3, 4, 1))
    inputs.send()
    after = [t.data_ptr() for t in (inputs.batch.input_ids, inputs.batch.seq_lens, inputs.batch.block_tables)]
    assert before == after


def test_an_idle_graph_reads_one_token_of_page_0() -> None:
    inputs = GraphInputs(SIZE, GraphPlan((SIZE,), PAGES), torch.device("cpu"))
    idle = inputs.batch
    assert inputs.counted.tolist() == [0]
    assert idle.seq_lens.eq(1).all() and idle.block_tables.eq(0).all() and idle.cache_slots.eq(0).all()


def chunk(computed: int, length: int) -> Chunk:
    sequence = SimpleNamespace(
        slot=0,
        computed_len=computed,
        tokens=np.arange(64),
        page_table=np.arange(4, dtype=np.int32),
        num_pages=4,
    )
    return Chunk(cast(Any, sequence), length, 1)


@pytest.mark.parametrize(
    ("lengths", "single"), [((1, 1, 1), 3), ((1, 1, 7, 1, 3), 2), ((5, 1), 0), ((1, 9), 1), ((4,), 0)]
)
def test_a_batch_says_how_many_rows_decode(lengths: tuple[int, ...], single: int) -> None:
    made = BatchArrays(16, 64).fill([chunk(10 * i, length) for i, length in enumerate(lengths)])
    assert made.single_rows == single
    assert made.query_starts.diff()[:single].eq(1).all()


def test_rows_of_drafts_are_sequences_of_one_row() -> None:
    """Each sees what is before it in its own sequence, as rows that decode do; a step without drafts is as ever."""
    two = [chunk(17, 1), chunk(30, 4)._replace(logits=4, draft_tokens=(5, 6, 7))]
    two[0].sequence.slot, two[1].sequence.slot = 3, 9
    two[1].sequence.tokens = two[1].sequence.tokens[:31]
    two[1].sequence.page_table = np.arange(10, 14, dtype=np.int32)
    arrays = BatchArrays(16, 64, row_per_sequence=True)
    made = arrays.fill(two)
    assert made.input_ids.tolist() == [17, 30, 5, 6, 7] and made.positions.tolist() == [17, 30, 31, 32, 33]
    assert made.seq_lens.tolist() == [18, 31, 32, 33, 34] and made.query_starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert made.slots.tolist() == [3, 9, 9, 9, 9] and made.logits_rows.tolist() == [0, 1, 2, 3, 4]
    assert made.block_tables.tolist() == [[0, 1, 2, 3]] + [[10, 11, 12, 13]] * 4 and made.single_rows == 5
    assert made.cache_slots.tolist() == [17, 11 * 16 + 14, 11 * 16 + 15, 12 * 16, 12 * 16 + 1]
    plain = arrays.fill([chunk(0, 5), chunk(30, 1)])
    assert plain.query_starts.tolist() == [0, 5, 6] and plain.seq_lens.tolist() == [5, 31]
    together = BatchArrays(16, 64).fill(two)
    assert together.query_starts.tolist() == [0, 1, 5] and together.seq_lens.tolist() == [18, 34]


def test_a_batch_that_is_moved_loses_nothing() -> None:
    """Rows that are no drafts, too: a recurrent state would take drafts for tokens."""
    chunks = [chunk(17, 1), chunk(30, 4)._replace(logits=4, draft_tokens=(5, 6, 7))]
    for each in chunks:
        each.sequence.state_len = each.sequence.computed_len
        each.sequence.window_table = np.arange(4, 8, dtype=np.int32)
    source = BatchArrays(16, 64, speculative=True, windowed=True).fill(chunks)
    assert source.num_verified is not None and source.state_lens is not None and source.windows is not None
    copy = moved(source, torch.device("cpu"))
    for one, other in ((source, copy), (source.windowed, copy.windowed)):
        for field in dataclasses.fields(ForwardBatch):
            value, same = getattr(one, field.name), getattr(other, field.name)
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, same) and value.data_ptr() != same.data_ptr(), field.name
            elif field.name != "windows":
                assert value == same, field.name


@pytest.mark.parametrize("first", range(12, 20))
@pytest.mark.parametrize("count", [1, 2, 3, 17, 33])
def test_rows_lie_where_their_pages_are(first: int, count: int) -> None:
    """In one page, up to its end, and over it."""
    table = np.array([7, 2, 9, 4], dtype=np.int32)
    wanted = [int(table[each // 16]) * 16 + each % 16 for each in range(first, first + count)]
    assert np.array_equal(np.atleast_1d(slots_of(table, first, count, 16)), wanted)


def test_a_row_s_mask_is_known_once_the_draft_before_it_is_accepted() -> None:
    masks = [bits_of({i}, VOCAB) for i in range(2)]
    two = [chunk(17, 1), chunk(30, 3)._replace(logits=3, draft_tokens=(5, 6))]
    for each, mask in zip(two, masks, strict=True):
        each.sequence.matcher = SimpleNamespace(place=mask)
    assert [None if m is None else m.tolist() for m in _masks(two)] == [
        *(m.tolist() for m in masks),
        None,
        None,
    ]
    scored = [two[0], chunk(0, 3)._replace(logits=3)]  # whose rows are sequences, too, in deterministic steps
    scored[1].sequence.matcher = two[1].sequence.matcher
    assert [m is None for m in _masks(scored)] == [False, True, True, False]
    two[0].sequence.matcher = two[1].sequence.matcher = None
    assert _masks(two) == ()


def test_experts_move_after_rejected_drafts_are_no_longer_counted() -> None:
    calls: list[tuple[str, int]] = []
    runner = runner_on("cpu")
    runner._rows, runner._handoff = (
        HostRows(torch.device("cpu")),
        cast(Any, SimpleNamespace(check=lambda: None)),
    )
    runner._live = cast(Any, SimpleNamespace(after_step=lambda over: calls.append(("moved", 0))))
    for speculative, tokens in ((False, 4), (True, 3)):
        runner._speculative = speculative
        runner._done(torch.zeros(4, VOCAB), torch.zeros(4, 2))
        calls.append(("done", 4))
        runner.commit(tokens)
        runner.commit(tokens)
    assert calls == [("moved", 0), ("done", 4), ("done", 4), ("moved", 0)]


def runner_on(device: str) -> GpuRunner:
    runner = GpuRunner.__new__(GpuRunner)
    runner._graphs = GraphPool()
    runner._device, runner._live, runner._speculative = torch.device(device), None, False
    runner._model, runner._states, runner._usage = cast(Any, SimpleNamespace()), [], None
    runner._streams, runner._launcher = Streams(torch.device("cpu"), overlap=False), None
    runner._plan = GraphPlan((SIZE,), PAGES)
    runner._best, runner._end = BestRows(1, torch.device("cpu")), StepEnd(torch.device("cpu"))
    return runner


def test_a_gpu_that_works_again_lets_the_engine_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    runner_on("cuda").after_failure()
    runner_on("cpu").after_failure()
    assert waited == [torch.device("cuda")]


def test_a_gpu_that_does_not_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(EngineError, match="the GPU stopped working: CUDA error: an illegal"):
        runner_on("cuda").after_failure()


def test_what_is_planned_outside_graphs_knows_the_steps_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's rows, copies included, before it is replayed; a step's own where there is no graph."""
    begun: list[tuple[list[int], bool]] = []
    runner, inputs = runner_on("cpu"), GraphInputs(SIZE, GraphPlan((SIZE,), PAGES), torch.device("cpu"))
    runner._begin_step = lambda batch, captured: begun.append((batch.seq_lens.tolist(), captured))
    replayed = SimpleNamespace(slot=0, replay=lambda: begun.append(([], True)))
    runner._graphs.decode = {
        SIZE: cast(
            Any,
            SimpleNamespace(slot=0, inputs=inputs, graph=replayed, posts=0, masks=MASKS, logits=[], best=[]),
        )
    }
    runner._handoff = cast(Any, SimpleNamespace(slot=0, begin=lambda posts: None, finish=lambda: None))
    monkeypatch.setattr(runner, "_done", lambda *result, masked=(): None)
    monkeypatch.setattr(runner, "_forward", lambda batch, counted, long: torch.zeros(1, 4))
    runner.logits(batch(4, 2, 7))
    assert begun == [([108, 109, 110, 111, 111, 111], True), ([], True)]
    begun.clear()
    runner.logits(batch(7, 2, 0))
    assert begun == [(list(range(101, 108)), False)]


def test_experts_move_beside_a_step_and_nothing_that_it_sends_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    runner, inputs = runner_on("cpu"), GraphInputs(SIZE, GraphPlan((SIZE,), PAGES), torch.device("cpu"))
    monkeypatch.setattr(inputs, "fill", lambda batch: calls.append("inputs"))
    runner._begin_step = lambda batch, captured: None
    replayed = SimpleNamespace(slot=0, replay=lambda: calls.append("graph"))
    results = {"logits": torch.zeros(SIZE, 4), "best": torch.zeros(SIZE, 2)}
    runner._graphs.decode = {
        SIZE: cast(
            Any, SimpleNamespace(slot=0, inputs=inputs, graph=replayed, posts=0, masks=MASKS, **results)
        )
    }
    runner._handoff = cast(
        Any,
        SimpleNamespace(
            slot=0,
            begin=lambda posts: calls.append("begin"),
            finish=lambda: calls.append("finish"),
            check=lambda: calls.append("check"),
        ),
    )
    names = ("beside_step", "after_step")
    runner._live = cast(
        Any, SimpleNamespace(slot=0, **{name: lambda *_, name=name: calls.append(name) for name in names})
    )
    runner._rows, runner._best = HostRows(torch.device("cpu")), BestRows(8, torch.device("cpu"))
    monkeypatch.setattr(runner._end, "mark", lambda: calls.append("mark"))
    monkeypatch.setattr(runner._end, "wait", lambda: calls.append("end"))
    runner.logits(batch(4, 2, 7))
    assert calls == [
        "begin",
        "inputs",
        "graph",
        "mark",
        "beside_step",
        "finish",
        "after_step",
        "end",
        "check",
    ]
    calls.clear()
    monkeypatch.setattr(
        runner, "_forward", lambda batch, counted, long: calls.append("layers") or torch.zeros(1, 4)
    )
    runner.logits(batch(7, 2, 0))
    assert calls == ["layers", "mark", "beside_step", "after_step", "end", "check"]


def test_masks_stay_where_a_graph_reads_them_and_go_with_their_rows() -> None:
    """The best of each row, as the graph's last kernels find it from what was sent, step after step."""
    masks, logits = GraphMasks(SIZE, torch.device("cpu")), torch.randn(SIZE, VOCAB)
    place = masks.device_addresses.data_ptr()
    for given in (
        [None, {3, 40}, None, {70}],
        [],
        [{0, 31, 32}, None],
        [None] * 6,
        [None, None, {5}, None, {64}, {1}],
    ):
        masks.send([None if ids is None else bits_of(ids, VOCAB) for ids in given])
        assert masks.device_addresses.data_ptr() == place
        wanted = [
            range(VOCAB) if ids is None else sorted(ids) for ids in (*given, *[None] * (SIZE - len(given)))
        ]
        best = best_of(logits, masks)
        for row, (found, value), ids in zip(logits, best.tolist(), wanted, strict=True):
            assert value == row[list(ids)].max() and row[int(found)] == value and int(found) in ids
    logits[2, 9] = torch.nan
    assert best_of(logits, masks)[2, 1].isnan()


def test_a_step_without_masks_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = GraphMasks(SIZE, torch.device("cpu"))
    sent: list[int] = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking: sent.append(len(source)))
    one, other = bits_of({1}, VOCAB), bits_of({2}, VOCAB)
    for given in ([], [None, None], [one, None], [one, None], [None, one], [other, one], [], []):
        masks.send(given)
    assert sent == [SIZE + 1] * 4  # a mask, that it moved, another, and that they are gone


def test_a_mask_changes_where_a_graph_reads_it() -> None:
    """Its answer goes on: nothing is sent, and the next replay reads what is there then."""
    masks, one = GraphMasks(2, torch.device("cpu")), bits_of({1}, VOCAB)
    logits = torch.zeros(2, VOCAB)
    masks.send([None, one])
    assert masks.device_addresses[:2].tolist() == [0, one.ctypes.data]
    assert best_of(logits, masks)[:, 0].tolist() == [0, 1]
    one[:] = bits_of({40}, VOCAB)
    masks.send([None, one])
    assert best_of(logits, masks)[:, 0].tolist() == [0, 40]


def test_a_mask_that_a_gpu_cannot_read_is_an_error() -> None:
    masks = GraphMasks(2, torch.device("cpu"))
    masks._pinned = True
    with pytest.raises(ValueError, match="pinned"):
        masks.send([bits_of({1}, VOCAB)])


def word_of(masks: GraphMasks) -> int | None:
    """What a graph reads before it reads a mask; None: it does not look."""
    address = int(masks.device_addresses[-1])
    return int(ctypes.c_int32.from_address(address).value) if address else None


def test_a_graph_waits_until_its_masks_are_made() -> None:
    masks, one = GraphMasks(2, torch.device("cpu")), bits_of({1}, VOCAB)
    seen: list[int | None] = []
    for given in ([], [None, one], [None, one], [one], [None, None]):
        masks.send(given)
        masks.make(lambda: seen.append(word_of(masks)))
        seen.append(word_of(masks))
    assert seen == [None, None, *[0, 1] * 3, None, None]


def test_a_graph_goes_on_where_making_its_masks_went_wrong() -> None:
    masks = GraphMasks(1, torch.device("cpu"))
    masks.send([bits_of({1}, VOCAB)])
    with pytest.raises(ZeroDivisionError):
        masks.make(lambda: 1 // 0)
    assert word_of(masks) == 1


def test_a_replayed_graph_gets_its_masks_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    runner, inputs = runner_on("cpu"), GraphInputs(SIZE, GraphPlan((SIZE,), PAGES), torch.device("cpu"))
    runner._begin_step = lambda batch, captured: None
    graph = SimpleNamespace(slot=0, replay=lambda: calls.append("graph"))
    masks = SimpleNamespace(
        slot=0, send=lambda masks: calls.append(f"{len(masks)} masks"), make=lambda make: make(), check=lambda: None
    )  # fmt: skip
    results = {"logits": torch.zeros(SIZE, 4), "best": torch.zeros(SIZE, 2)}
    runner._graphs.decode = {
        SIZE: cast(Any, SimpleNamespace(slot=0, inputs=inputs, graph=graph, posts=0, masks=masks, **results))
    }
    begin, finish = lambda posts: calls.append("begin"), lambda: calls.append("experts")
    runner._handoff = cast(Any, SimpleNamespace(slot=0, begin=begin, finish=finish, check=lambda: None))
    runner._rows = HostRows(torch.device("cpu"))
    made = runner.logits(batch(2, 2, 7), [None, bits_of({1}, VOCAB)], lambda: calls.append("made"))
    assert calls == ["begin", "2 masks", "graph", "made", "experts"] and made._masked == [False, True]


def test_masks_that_were_late_once_are_not_late_again() -> None:
    """The step may have ended with another error, so that nobody looked."""
    masks, one = GraphMasks(2, torch.device("cpu")), bits_of({1}, VOCAB)
    masks.send([one])
    masks._word[1] = 1
    masks.send([one])
    masks.check()
    masks._word[1] = 1
    with pytest.raises(EngineError, match="too late"):
        masks.check()
    masks.check()


@pytest.mark.parametrize("where", ["begin", "graph", "make"])
def test_a_graph_gets_what_it_waits_for_when_its_step_is_interrupted(monkeypatch, where: str) -> None:
    """It would wait for ever, or answer the next step's posts, where `LLM` is stopped with Ctrl+C."""
    calls: list[str] = []

    def noted(name: str) -> None:
        calls.append(name)
        if name == where:
            raise KeyboardInterrupt

    runner, inputs = runner_on("cpu"), GraphInputs(SIZE, GraphPlan((SIZE,), PAGES), torch.device("cpu"))
    masks, graph = GraphMasks(SIZE, torch.device("cpu")), SimpleNamespace(replay=lambda: noted("graph"))
    runner._begin_step = lambda batch, captured: None
    runner._graphs.decode = {SIZE: cast(Any, SimpleNamespace(inputs=inputs, graph=graph, posts=7, masks=masks))}
    runner._handoff = cast(Any, SimpleNamespace(
        begin=lambda posts: noted("begin") if where == "begin" else calls.append(f"{posts} posts"),
        finish=lambda: calls.append("answered"), cancel=lambda: calls.append("cancelled"),
    ))  # fmt: skip
    monkeypatch.setattr(runner._end, "wait", lambda: calls.append("end"))
    with pytest.raises(KeyboardInterrupt):
        runner.logits(batch(1, 2, 7), [bits_of({1}, VOCAB)], lambda: noted("make"))
    between = {
        "begin": ["cancelled"],
        "graph": ["graph", "cancelled"],
        "make": ["graph", "make", "answered"],
    }[where]
    assert calls == ["begin" if where == "begin" else "7 posts", *between, "end"]
    assert where == "begin" or word_of(masks) == 1


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), KernelError("no such tile")])
def test_an_engine_starts_without_graphs_of_prompts_that_cannot_be_captured(
    monkeypatch, caplog, error
) -> None:
    def fails(self: object, made: object, rows: int, split: bool, reserve_sms: bool) -> None:
        captured.append(rows)
        raise error

    runner, captured = runner_on("cpu"), list[int]()
    runner._plan = GraphPlan((SIZE,), PAGES, prompts=(16, 32))
    runner._start = cast(Any, SimpleNamespace(replayable=lambda: True))
    runner._streams = cast(Any, SimpleNamespace(steps=object()))
    monkeypatch.setattr(PrefillCapture, "_capture", fails)
    runner._capture_prompts()
    assert captured == [32] and str(error) in caplog.text
    assert runner._graphs.prefill.graph_of(batch(4, 2, 0)) is None


@pytest.mark.parametrize("why", ["take turns", "cannot stop", "CPU computes a part"])
def test_the_log_says_once_why_prompts_are_no_graphs(caplog, why: str) -> None:
    runner = runner_on("cpu")
    runner._plan = GraphPlan((SIZE,), PAGES, prompts=(16, 32))
    runner._start = cast(Any, SimpleNamespace(
        replayable=lambda split: why != "take turns", begin_task=lambda batch, split: False, end_task=lambda: None,
    ))  # fmt: skip
    runner._streams = cast(Any, SimpleNamespace(steps=object(), finish=lambda: None))
    pausing = SimpleNamespace(depth=1, begin=print, layer=print, logits=print)
    runner._model = cast(Any, pausing if why == "CPU computes a part" else SimpleNamespace())
    with caplog.at_level(logging.INFO):
        runner._capture_prompts()
    assert [(record.levelname, why in record.message) for record in caplog.records] == [("INFO", True)]
