"""Batches of one layout: the bytes of the builders before it, which are kept here, for random chunks."""

from __future__ import annotations

import dataclasses
import re
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import tandem
from tandem.engine.graphs.inputs import GraphInputs, GraphPlan
from tandem.engine.graphs.prefill_graphs import SEQUENCES, ChunkInputs
from tandem.engine.sequence import Chunk
from tandem.engine.speculation.draft_batch import DraftRows, batch_of
from tandem.engine.step.batch import MANY_SINGLE, BatchArrays, moved
from tandem.models import ForwardBatch
from tandem.planner.host_memory import graph_input_bytes

PAGE, PAGES, MOST, CPU = 8, 12, 96, torch.device("cpu")


# -- as batches were made before ---


def old_batch(
    chunks: list[Chunk], *,
    row_per_sequence: bool = False, speculative: bool = False, windowed: bool = False, each_row: bool = False,
) -> ForwardBatch:
    """Of a step's chunks, in host memory."""
    rows_apart = each_row or (row_per_sequence and any(chunk.draft_tokens for chunk in chunks))
    settled = [not c.draft_tokens and c.sequence.state_len == c.sequence.computed_len for c in chunks]
    folds = speculative and (each_row or not all(settled))
    owners = [(chunk, i) for chunk in chunks for i in range(chunk.length)]
    ends = [(c, i + 1) for c, i in owners] if rows_apart else [(c, c.length) for c in chunks]
    positions = [c.sequence.computed_len + i for c, i in owners]
    width = max(c.sequence.num_pages for c in chunks)
    lasts = np.cumsum([c.length for c in chunks]).tolist()
    wanted = [row for c, last in zip(chunks, lasts, strict=True) for row in range(last - c.logits, last)]
    starts = range(len(owners) + 1) if rows_apart else [0, *lasts]

    def tables(name: str) -> Tensor:
        table = np.zeros((len(ends), width), dtype=np.int32)
        for row, (c, _) in zip(table, ends, strict=True):
            row[: c.sequence.num_pages] = getattr(c.sequence, name)[: c.sequence.num_pages]
        return torch.from_numpy(table)

    def places(name: str) -> Tensor:
        found = zip(owners, positions, strict=True)
        return torch.tensor([int(getattr(c.sequence, name)[p // PAGE]) * PAGE + p % PAGE for (c, _), p in found])

    batch = ForwardBatch(
        input_ids=torch.tensor([c.tokens[i] for c, i in owners]),
        positions=torch.tensor(positions),
        cache_slots=places("page_table"),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([c.sequence.computed_len + i for c, i in ends], dtype=torch.int32),
        block_tables=tables("page_table"),
        logits_rows=torch.tensor(wanted, dtype=torch.int64),
        slots=torch.tensor([c.sequence.slot for c, _ in ends], dtype=torch.int32),
        state_lens=torch.tensor([c.sequence.state_len for c, _ in ends], dtype=torch.int32) if folds else None,
        num_verified=(
            torch.tensor([c.num_verified for c, _ in ends], dtype=torch.int32)
            if folds and not row_per_sequence else None
        ),
        single_rows=len(ends) if rows_apart else sum(1 for _ in takewhile(lambda c: c.length == 1, chunks)),
    )
    if windowed:
        own = {"cache_slots": places("window_table"), "block_tables": tables("window_table")}
        batch.windows = dataclasses.replace(batch, **own)
    return batch


def old_image(source: ForwardBatch, size: int, kinds: int, speculative: bool) -> bytes:
    """What a decode graph's memory holds of a batch."""
    rows = len(source.seq_lens)
    index = torch.arange(size).clamp(max=rows - 1)
    wide = [source.input_ids[index], source.positions[index]]
    batches = [source, source.windowed][:kinds]
    wide += [batch.cache_slots[index] for batch in batches]
    tables = []
    for batch in batches:
        table = torch.zeros(size, PAGES, dtype=torch.int32)
        table[:, : batch.block_tables.shape[1]] = batch.block_tables[index]
        tables.append(table)
    slots = source.slots[index]
    slots[rows:] = 0
    lens = source.seq_lens[index]
    known = lens - 1 if source.state_lens is None else source.state_lens[index]
    state_lens = known if speculative else torch.zeros_like(lens)
    narrow = [lens, slots, state_lens, *tables, torch.tensor([rows], dtype=torch.int32)]
    first = b"".join(part.numpy().tobytes() for part in wide)
    return first + bytes(-len(first) % 128) + b"".join(part.numpy().tobytes() for part in narrow)


def old_chunk_image(source: ForwardBatch, rows: int) -> bytes:
    """What a prefill graph's memory holds of a batch that is its first."""
    index, sequences = torch.arange(rows).clamp(max=len(source.input_ids) - 1), len(source.seq_lens)
    places = source.cache_slots[index]
    places[len(source.input_ids) :] = -1
    wanted, starts = torch.zeros(SEQUENCES, dtype=torch.int64), torch.full((SEQUENCES + 1,), rows, dtype=torch.int32)
    wanted[: len(source.logits_rows)] = source.logits_rows
    starts[:sequences] = source.query_starts[:-1]
    table = torch.zeros(SEQUENCES, PAGES, dtype=torch.int32)
    table[:sequences, : source.block_tables.shape[1]] = source.block_tables
    lens, slots = (torch.zeros(SEQUENCES, dtype=torch.int32) for _ in range(2))
    lens[:sequences], slots[:sequences] = source.seq_lens, source.slots
    parts = [source.input_ids[index], source.positions[index], places, wanted, table, starts, lens, slots]
    return b"".join(part.numpy().tobytes() for part in parts)


def old_drawn(runs: list[DraftRows]) -> ForwardBatch:
    """Of a draft layer's rows."""
    starts = np.cumsum([0, *(len(run.tokens) for run in runs)])
    positions = np.concatenate([np.arange(run.first, run.first + len(run.tokens)) for run in runs])
    tables = np.zeros((len(runs), max(run.sequence.num_pages for run in runs)), dtype=np.int32)
    for table, run in zip(tables, runs, strict=True):
        table[: run.sequence.num_pages] = run.sequence.page_table[: run.sequence.num_pages]
    owners = np.repeat(np.arange(len(runs)), np.diff(starts))
    slots = tables[owners, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
    ends = [end - 1 for run, end in zip(runs, starts[1:], strict=True) if run.wanted]
    return ForwardBatch(
        input_ids=torch.tensor([token for run in runs for token in run.tokens], dtype=torch.int64),
        positions=torch.from_numpy(positions.astype(np.int64)),
        cache_slots=torch.from_numpy(slots),
        query_starts=torch.from_numpy(starts.astype(np.int32)),
        seq_lens=torch.tensor([run.first + len(run.tokens) for run in runs], dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        logits_rows=torch.tensor(ends, dtype=torch.int64),
        slots=torch.tensor([run.sequence.slot for run in runs], dtype=torch.int32),
    )  # fmt: skip


# -- random steps ---


def sequence_of(random: np.random.Generator, computed: int, tokens: int) -> Any:
    pages = -(-(computed + tokens + 4) // PAGE)
    tables = [random.integers(0, 1000, PAGES).astype(np.int32) for _ in range(2)]
    return SimpleNamespace(
        computed_len=computed, state_len=computed - int(random.integers(0, min(3, computed) + 1)),
        tokens=random.integers(0, 999, computed + tokens).tolist(), page_table=tables[0], window_table=tables[1],
        num_pages=min(PAGES, pages), slot=int(random.integers(1, 50)),
    )  # fmt: skip


def chunk_of(random: np.random.Generator, length: int, draft_tokens: int = 0) -> Chunk:
    sequence = sequence_of(random, int(random.integers(0, 40)), length)
    drafts = tuple(random.integers(0, 999, draft_tokens).tolist())
    logits = 1 + draft_tokens if draft_tokens else int(random.integers(0, 2))
    return Chunk(cast(Any, sequence), length + draft_tokens, logits, drafts)


def steps(seed: int, draft_tokens: bool) -> list[list[Chunk]]:
    """Of many shapes, some as many rows as the one before: tensors are used again."""
    random, found = np.random.default_rng(seed), []
    for _ in range(12):
        decoding = int(random.integers(0, 6))
        draws = [int(random.integers(0, 4)) if draft_tokens else 0 for _ in range(decoding)]
        prompts = random.integers(2, 17, int(random.integers(0 if decoding else 1, 3))).tolist()
        chunks = [chunk_of(random, 1, drafts) for drafts in draws] + [chunk_of(random, length) for length in prompts]
        found += [chunks] * int(random.integers(1, 3))
    many = [[chunk_of(random, 1) for _ in range(count)] for count in (MANY_SINGLE - 1, MANY_SINGLE, 30)]
    return found + many


def same(one: ForwardBatch, other: ForwardBatch) -> None:
    """Names, types, shapes and bytes of all tensors."""
    for field in dataclasses.fields(ForwardBatch):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, Tensor):
            assert isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape), field.name
            assert a.is_contiguous() == b.is_contiguous() and a.numpy().tobytes() == b.numpy().tobytes(), field.name
        elif field.name == "windows" and a is not None:
            assert b is not None
            same(a, b)
        else:
            assert a == b, field.name


KINDS = [
    {}, {"speculative": True}, {"row_per_sequence": True, "speculative": True}, {"windowed": True},
    {"each_row": True, "speculative": True},
    {"row_per_sequence": True, "speculative": True, "windowed": True},
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_steps_batch_has_the_bytes_it_had(seed: int, kind: dict[str, bool]) -> None:
    """On the host, and where it is moved to."""
    arrays = BatchArrays(PAGE, MOST, **kind)
    for chunks in steps(seed, draft_tokens=kind.get("speculative", False)):
        batch, old = arrays.fill(chunks), old_batch(chunks, **kind)
        same(batch, old)
        same(moved(batch, CPU), old)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("size", [6, 16, 20])
def test_a_decode_graphs_memory_has_the_bytes_it_had(size: int, speculative: bool, windowed: bool) -> None:
    inputs = GraphInputs(size, GraphPlan((size,), PAGES, speculative=speculative, windowed=windowed), CPU)
    arrays = BatchArrays(PAGE, MOST, row_per_sequence=True, speculative=speculative, windowed=windowed)
    for chunks in steps(size, draft_tokens=speculative):
        batch = arrays.fill([chunk for chunk in chunks if chunk.length <= 4] or [chunk_of(np.random.default_rng(1), 1)])
        if len(batch.seq_lens) != len(batch.input_ids) or len(batch.seq_lens) > size:
            continue
        inputs._host[:] = 0  # tables keep what longer ones have left behind
        inputs.fill(batch)
        inputs.send()
        wanted = old_image(batch, size, 1 + windowed, speculative)
        assert inputs._host.numpy().tobytes() == inputs._device_image.numpy().tobytes() == wanted
        same(inputs.image, inputs.batch)
        assert inputs.batch.query_starts.tolist() == list(range(size + 1)) and inputs.batch.single_rows == 0
        assert inputs.batch.logits_rows.tolist() == list(range(size)) and inputs.batch.num_verified is None
        assert (inputs.batch.state_lens is None) != speculative and (inputs.batch.windows is None) != windowed
        check_views(inputs)


def check_views(inputs: GraphInputs) -> None:
    """Each tensor lies where the graph's copy writes it."""
    block, batch = inputs._device_image, inputs.batch
    first, nbytes = block.data_ptr(), block.numel()
    names = ["input_ids", "positions", "cache_slots", "seq_lens", "slots", "block_tables"]
    tensors = [getattr(batch, name) for name in names] + [inputs.counted]
    tensors += [] if batch.windows is None else [batch.windows.cache_slots, batch.windows.block_tables]
    assert all(first <= each.data_ptr() < first + nbytes for each in tensors)
    assert len({each.data_ptr() for each in tensors}) == len(tensors)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_a_prefill_graphs_memory_has_the_bytes_it_had(rows: int) -> None:
    random = np.random.default_rng(rows)
    for _ in range(20):
        lengths = random.integers(2, 9, int(random.integers(1, 8))).tolist()
        while sum(lengths) > rows:
            lengths.pop()
        batch = BatchArrays(PAGE, MOST).fill([chunk_of(random, length) for length in lengths])
        inputs = ChunkInputs(rows, PAGES, CPU)
        inputs.fill(batch)
        inputs.send()
        wanted = old_chunk_image(batch, rows)
        assert inputs._host.numpy().tobytes() == inputs._device_image.numpy().tobytes() == wanted
        same(inputs.image, inputs.batch)
        assert inputs.batch.block_tables.shape == (SEQUENCES, PAGES) and inputs.batch.windows is None


@pytest.mark.parametrize("seed", range(6))
def test_a_draft_layers_batch_has_the_bytes_it_had(seed: int) -> None:
    random = np.random.default_rng(seed)
    runs = []
    for count in random.integers(1, 9, int(random.integers(1, 6))).tolist():
        first = int(random.integers(0, 40))
        tokens = random.integers(0, 99, count).tolist()
        runs.append(DraftRows(sequence_of(random, first, count), first, tokens, bool(count % 2)))
    same(batch_of(runs, PAGE), old_drawn(runs))


def test_rows_that_are_no_drafts_are_known_wherever_a_batch_goes() -> None:
    """Only their number says which rows a recurrent state may keep: `moved` had left it out."""
    random = np.random.default_rng(2)
    chunks = [chunk_of(random, 1, 2), chunk_of(random, 1), chunk_of(random, 9)]
    batch = BatchArrays(PAGE, MOST, speculative=True, windowed=True).fill(chunks)
    copy = moved(batch, CPU)
    for each in (batch, batch.windowed, copy, copy.windowed):
        assert each.num_verified is not None and each.num_verified.tolist() == [1, 1, 9]
        assert each.num_verified.dtype == torch.int32
    assert copy.num_verified.data_ptr() != batch.num_verified.data_ptr()
    assert BatchArrays(PAGE, MOST, speculative=True, row_per_sequence=True).fill(chunks).num_verified is None


def test_batches_are_made_in_one_place() -> None:
    source = Path(tandem.__file__).parent
    calls = [path.name for path in source.rglob("*.py") for _ in re.findall(r"\bForwardBatch\(", path.read_text())]
    assert calls == ["batch.py"]


def test_a_layout_is_as_large_as_plans_say() -> None:
    for size, windowed in ((1, False), (6, True), (32, False)):
        inputs = GraphInputs(size, GraphPlan((size,), PAGES, windowed=windowed), CPU)
        assert inputs._host.numel() == graph_input_bytes(size, PAGES, 1 + windowed)
