"""`PrefillGraphs`: chunks of prompts as CUDA graphs, one a layer, so that Python does not give kernel after kernel.

That takes Python about a millisecond a layer, with its lock held. Beside steps of those who decode either they would
wait for it, or the GPU. A graph has a fixed number of rows. A smaller chunk is filled up with copies of its last row,
which write no keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.engine.cpu_runner import StepModel
from tandem.engine.sampling.logits import BestRows
from tandem.engine.step.batch import BatchLayout, BatchSizes, to_gpu
from tandem.engine.step.hooks import HostWork, Recorder, StepHooks
from tandem.engine.step.prefill import LayerPieces, PausingModel, States
from tandem.engine.step.streams import Streams
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.gpu.cudnn_attention.runs import is_heavy
from tandem.kernels.ops import ExpertCounts
from tandem.models.batch import ForwardBatch
from tandem.planner.cuda_graphs import PROMPT_SEQUENCES as SEQUENCES
from tandem.planner.cuda_graphs import prefill_graph_rows

GRAPHS_AHEAD = 12  # layers: a step beside a prompt takes as long as five, and who gives them may be late
NOWHERE = -1  # no place in pages: a copy's last bits may be others, where libraries divide sums by tiles
_log = logging.getLogger(__name__)

_ROWS = "input_ids", "positions", "cache_slots"
_IN_IMAGE = (*_ROWS, "logits_rows", "block_tables", "query_starts", "seq_lens", "slots")


class ChunkInputs:
    """A chunk's batch on the GPU and its image in pinned memory, each in one array. At first all rows are of token 0,
    at a place that no sequence has yet."""

    def __init__(self, rows: int, pages: int, device: torch.device, turning: bool = False) -> None:
        """turning: rows may turn by others than their positions."""
        self._rows, turns = rows, ("turns",) if turning else ()
        self._each = (*_ROWS, *turns)
        layout = BatchLayout(BatchSizes(rows, SEQUENCES, pages, logits=SEQUENCES), (*_IN_IMAGE, *turns))
        self._host = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.image = layout.batch(self._host)
        self.image.query_starts[1:] = rows
        self._device_image = self._host.to(device, copy=True)
        self.batch = layout.batch(self._device_image)

    @property
    def rows(self) -> int:
        return self._rows

    def fill(self, source: ForwardBatch) -> None:
        """The image, from host memory. The last sequence has the copies; those that are not there have no rows."""
        image, rows = self.image, len(source.input_ids)
        for name in self._each:
            tensor = source.turning if name == "turns" else getattr(source, name)
            to, values = getattr(image, name).numpy(), tensor.numpy()
            to[:rows], to[rows:] = values, NOWHERE if name == "cache_slots" else values[-1]
        sequences, logits_count = len(source.seq_lens), len(source.logits_rows)
        image.query_starts[:sequences] = source.query_starts[:-1]
        image.query_starts[sequences:] = self._rows
        image.seq_lens[:sequences], image.slots[:sequences] = source.seq_lens, source.slots
        image.block_tables[:sequences, : source.block_tables.shape[1]] = source.block_tables
        image.logits_rows[:logits_count] = source.logits_rows
        image.logits_rows[logits_count:] = 0

    def send(self) -> None:
        to_gpu(self._host, self._device_image)


@dataclass(frozen=True, slots=True)
class GraphPiece:
    """Replays of graphs, and what the host does between them."""

    steps: Rows[HostWork]

    def give(self) -> None:
        for step in self.steps:
            step()


class PrefillGraph:
    """CUDA graphs of a prefill chunk with a fixed number of rows."""

    def __init__(self, inputs: ChunkInputs, pieces: Rows[GraphPiece], result: tuple[Tensor, Tensor]) -> None:
        """pieces: of a `LayerPieces`, which made `result`."""
        self._inputs, self._pieces, self._result = inputs, pieces, result

    def of(self, batch: ForwardBatch) -> Replayed:
        """Sends a chunk to the GPU. The one before has been computed, so its image is free."""
        self._inputs.fill(batch)
        self._inputs.send()
        logits, best = self._result
        count = len(batch.logits_rows)
        return Replayed(self._pieces, (logits[:count], best[:count]))


class Replayed:
    """`PrefillPieces` of graphs."""

    def __init__(self, pieces: Rows[GraphPiece], result: tuple[Tensor, Tensor]) -> None:
        self._pieces, self._result = pieces, result

    @property
    def count(self) -> int:
        return len(self._pieces)

    @property
    def ahead(self) -> int:
        return GRAPHS_AHEAD

    def give(self, index: int) -> None:
        self._pieces[index].give()

    def result(self) -> tuple[Tensor, Tensor]:
        return self._result


class NoPrefillGraphs(Exception):
    """Why there are none, although there is memory for them."""


class PrefillGraphs:
    """By rows. One chunk at a time: they share their memory."""

    def __init__(self, hooks: StepHooks | None, sibling: PrefillGraphs | None = None) -> None:
        """hooks: needed where any are captured. sibling: graphs whose memory these use, too: no pass has both."""
        self._graphs: dict[int, PrefillGraph] = {}
        self._pool: Any = None if sibling is None else sibling._pool
        self._hooks = hooks

    def graph_of(self, batch: ForwardBatch, exclusive: bool = False) -> PrefillGraph | None:
        """None where a chunk fits none, or has rows that decode; or where nothing runs beside it, and it is sooner
        ready kernel by kernel."""
        rows, sequences = len(batch.input_ids), len(batch.seq_lens)
        if exclusive and is_heavy(batch):
            return None
        if batch.single_rows or max(sequences, len(batch.logits_rows)) > SEQUENCES:
            return None
        size = prefill_graph_rows(tuple(sorted(self._graphs)), rows)
        return self._graphs[size] if size else None

    def capture(
        self, inputs: ChunkInputs, model: PausingModel, states: States, tallies: Rows[ExpertCounts] | None
    ) -> None:
        """On the current stream, the largest first. All is run once before, which compiles kernels and lets libraries
        allocate."""
        device = inputs.batch.input_ids.device
        work = LayerPieces(model, states, inputs.batch, tallies, BestRows(SEQUENCES, device))
        for index in range(work.count):
            work.give(index)
        torch.cuda.synchronize(device)
        pieces = [self._captured(work, index) for index in range(work.count)]
        self._graphs[inputs.rows] = PrefillGraph(inputs, pieces, work.result())

    def _captured(self, work: LayerPieces, index: int) -> GraphPiece:
        assert self._hooks is not None
        recorder = Recorder(self._pool)
        with self._hooks.recording(recorder), recorder.recording():
            work.give(index)
        self._pool = recorder.pool
        return GraphPiece(recorder.steps)


@dataclass(frozen=True, slots=True)
class PrefillCapture:
    """Captures prefill graphs of a model, if tasks can be overtaken. pages: of the longest sequence."""

    model: StepModel
    states: Rows[tuple[Tensor, ...]]
    pages: int
    start: StepHooks | None
    streams: Streams
    device: torch.device
    usage: ExpertUsage | None
    turning: bool = False

    def of(self, sizes: Rows[int], sibling: PrefillGraphs | None = None, reserve_sms: bool = False) -> PrefillGraphs:
        """Graphs for chunks of these numbers of rows. None are captured where that is not possible: such chunks are
        given kernel by kernel. sibling: graphs that share their memory and whose layers the GPU computes alone; in
        those made here the CPU has a part. reserve_sms: as `Streams.side_stream`. A graph keeps the multiprocessors it
        was captured with."""
        graphs = PrefillGraphs(self.start, sibling)
        try:
            for rows in sorted(sizes, reverse=True):
                self._capture(graphs, rows, sibling is not None, reserve_sms)
        except Exception as error:  # too little memory, most of all; prompts are computed without them, too
            graphs, usual = PrefillGraphs(None), isinstance(error, NoPrefillGraphs)
            _log.log(logging.INFO if usual else logging.WARNING, "prompts are computed kernel by kernel: %s", error)
        return graphs

    def shared_sizes(self, sizes: Rows[int]) -> list[int]:
        """Those of `sizes`, in rows of a chunk, whose experts CPU and bus may share later."""
        return [] if self.start is None else [rows for rows in sizes if self.start.may_split(rows)]

    def shares(self, rows: int) -> bool:
        """Whether that is best for a chunk of so many rows now."""
        return self.start is not None and self.start.splits(rows)

    def _capture(self, graphs: PrefillGraphs, rows: int, split: bool, reserve_sms: bool) -> None:
        start = self.start
        if start is None or self.streams.steps is None or not start.replayable(split):
            raise NoPrefillGraphs("steps and prompts take turns, or too few experts fit on their way")
        if not isinstance(self.model, PausingModel):
            raise NoPrefillGraphs("the model cannot stop between two layers")
        inputs = ChunkInputs(rows, self.pages, self.device, self.turning)
        try:
            if not start.begin_task(inputs.image, split):
                raise NoPrefillGraphs("the CPU computes a part of their experts")
            with self.streams.side_stream(reserve_sms=reserve_sms), self.streams.cut(reserve_sms):
                tallies = None if self.usage is None else self.usage.overlap_tallies(0)
                graphs.capture(inputs, self.model, self.states, tallies)
        finally:
            start.end_task()
            self.streams.finish()
