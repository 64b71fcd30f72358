"""`PromptGraphs`: chunks of prompts as CUDA graphs, one a layer, so that Python does not give kernel after kernel.

That takes Python about a millisecond a layer, with its lock held. Beside steps of those who decode either they would
wait for it, or the GPU. A graph has a fixed number of rows. A smaller chunk is filled up with copies of its last row,
which write no keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.config.cuda_graphs import PROMPT_SEQUENCES as SEQUENCES
from tandem.config.cuda_graphs import prompt_graph_rows
from tandem.engine.paused_pass import PIECES_AHEAD, PausingModel
from tandem.engine.sampling.logits import BestRows
from tandem.engine.step.batch import BatchLayout, BatchSizes, to_gpu
from tandem.kernels.gpu.pieces.runs import is_heavy
from tandem.kernels.ops import Tally
from tandem.models.batch import ForwardBatch
from tandem.models.passing import Pass

GRAPHS_AHEAD = 12  # layers: a step beside a prompt takes as long as five, and who gives them may be late
NOWHERE = -1  # no place in pages: a copy's last bits may be others, where libraries divide sums by tiles
_ROWS = "input_ids", "positions", "cache_slots"
_IN_IMAGE = (*_ROWS, "logits_rows", "block_tables", "query_starts", "seq_lens", "slots")

States = Rows[tuple[Tensor, ...]]


class Work(Protocol):
    """A pass in pieces, which the GPU is given in their order."""

    @property
    def pieces(self) -> int: ...

    @property
    def ahead(self) -> int:
        """So many the GPU is given before it has computed them."""
        ...

    def give(self, index: int) -> None: ...

    def found(self) -> tuple[Tensor, Tensor]:
        """After the last: logits, and the best of each row in host memory. Filled when the GPU has computed it."""
        ...


class LayerWork:
    """Kernel by kernel: a piece is a layer, the last one makes logits."""

    def __init__(
        self,
        model: PausingModel,
        states: States,
        batch: ForwardBatch,
        tallies: Rows[Tally] | None,
        best: BestRows,
    ) -> None:
        """batch: on the GPU; best: for as many rows as have logits."""
        self._model, self._states, self._batch, self._tallies, self._best = (
            model,
            states,
            batch,
            tallies,
            best,
        )
        self._pass: Pass
        self._found: tuple[Tensor, Tensor] | None = None

    @property
    def pieces(self) -> int:
        return self._model.depth + 1

    @property
    def ahead(self) -> int:
        return PIECES_AHEAD

    def give(self, index: int) -> None:
        if index == 0:
            self._pass = self._model.begin(self._batch)
            self._pass.tallies = self._tallies
        if index < self._model.depth:
            self._model.layer(self._pass, index, self._states)
            return
        logits = self._model.logits(self._pass, self._states)
        self._found = logits, self._best.fetch(logits)

    def found(self) -> tuple[Tensor, Tensor]:
        assert self._found is not None, "pieces are left"
        return self._found


class ChunkInputs:
    """A chunk's batch on the GPU and its image in pinned memory, each in one array. At first all rows are of token 0,
    at a place that no sequence has yet."""

    def __init__(self, rows: int, pages: int, device: torch.device) -> None:
        self._rows = rows
        layout = BatchLayout(BatchSizes(rows, SEQUENCES, pages, logits=SEQUENCES), _IN_IMAGE)
        self._host = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.image = layout.batch(self._host)
        self.image.query_starts[1:] = rows
        self._there = self._host.to(device, copy=True)
        self.batch = layout.batch(self._there)

    @property
    def rows(self) -> int:
        return self._rows

    def fill(self, source: ForwardBatch) -> None:
        """The image, from host memory. The last sequence has the copies; those that are not there have no rows."""
        image, rows = self.image, len(source.input_ids)
        for name in _ROWS:
            to, values = getattr(image, name).numpy(), getattr(source, name).numpy()
            to[:rows], to[rows:] = values, NOWHERE if name == "cache_slots" else values[-1]
        sequences, wanted = len(source.seq_lens), len(source.logits_rows)
        image.query_starts[:sequences] = source.query_starts[:-1]
        image.query_starts[sequences:] = self._rows
        image.seq_lens[:sequences], image.slots[:sequences] = source.seq_lens, source.slots
        image.block_tables[:sequences, : source.block_tables.shape[1]] = source.block_tables
        image.logits_rows[:wanted] = source.logits_rows
        image.logits_rows[wanted:] = 0

    def send(self) -> None:
        to_gpu(self._host, self._there)


Step = Callable[[], object]


class Recorder:
    """Records graphs in one pool of memory. steps: their replays, and what the host does between them."""

    def __init__(self, pool: Any = None) -> None:
        """None: a new one."""
        self.pool, self.steps = pool, list[Step]()
        self._graph: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What is given to the current stream meanwhile is recorded."""
        self._begin()
        try:
            yield
        finally:
            if self._graph is not None:
                self._end()

    def cut(self, then: Step) -> None:
        """A graph ends here, and another begins; `then` is called between the two."""
        self._end()
        self.steps.append(then)
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self._graph = graph

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        graph.capture_end()
        self.pool = self.pool or graph.pool()
        self.steps.append(graph.replay)


class Travel(Protocol):
    """Of experts to the GPU, for layers that are graphs."""

    def recording(self, recorder: Recorder) -> AbstractContextManager[None]:
        """Around the capture of one, which it cuts where it has something to do at each replay."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Replays of graphs, and what the host does between them."""

    steps: Rows[Step]

    def give(self) -> None:
        for step in self.steps:
            step()


class PromptGraph:
    """Of so many rows."""

    def __init__(self, inputs: ChunkInputs, pieces: Rows[Piece], found: tuple[Tensor, Tensor]) -> None:
        """pieces: of a `LayerWork`, which made `found`."""
        self._inputs, self._pieces, self._found = inputs, pieces, found

    def of(self, batch: ForwardBatch) -> Replayed:
        """Sends a chunk to the GPU. The one before has been computed, so its image is free."""
        self._inputs.fill(batch)
        self._inputs.send()
        logits, best = self._found
        wanted = len(batch.logits_rows)
        return Replayed(self._pieces, (logits[:wanted], best[:wanted]))


class Replayed:
    """`Work` of graphs."""

    def __init__(self, pieces: Rows[Piece], found: tuple[Tensor, Tensor]) -> None:
        self._pieces, self._found = pieces, found

    @property
    def pieces(self) -> int:
        return len(self._pieces)

    @property
    def ahead(self) -> int:
        return GRAPHS_AHEAD

    def give(self, index: int) -> None:
        self._pieces[index].give()

    def found(self) -> tuple[Tensor, Tensor]:
        return self._found


class NoPromptGraphs(Exception):
    """Why there are none, although there is memory for them."""


class PromptGraphs:
    """By rows. One chunk at a time: they share their memory."""

    def __init__(self, travel: Travel | None, beside: PromptGraphs | None = None) -> None:
        """travel: needed where any are captured. beside: graphs whose memory these use, too: no pass has both."""
        self._graphs: dict[int, PromptGraph] = {}
        self._pool: Any = None if beside is None else beside._pool
        self._travel = travel

    def graph_of(self, batch: ForwardBatch, alone: bool = False) -> PromptGraph | None:
        """None where a chunk fits none, or has rows that decode; or where nothing runs beside it, and it is sooner
        ready kernel by kernel."""
        rows, sequences = len(batch.input_ids), len(batch.seq_lens)
        if alone and is_heavy(batch):
            return None
        if batch.single_rows or max(sequences, len(batch.logits_rows)) > SEQUENCES:
            return None
        size = prompt_graph_rows(tuple(sorted(self._graphs)), rows)
        return self._graphs[size] if size else None

    def capture(
        self, inputs: ChunkInputs, model: PausingModel, states: States, tallies: Rows[Tally] | None
    ) -> None:
        """On the current stream, the largest first. All is run once before, which compiles kernels and lets libraries
        allocate."""
        device = inputs.batch.input_ids.device
        work = LayerWork(model, states, inputs.batch, tallies, BestRows(SEQUENCES, device))
        for index in range(work.pieces):
            work.give(index)
        torch.cuda.synchronize(device)
        pieces = [self._captured(work, index) for index in range(work.pieces)]
        self._graphs[inputs.rows] = PromptGraph(inputs, pieces, work.found())

    def _captured(self, work: LayerWork, index: int) -> Piece:
        assert self._travel is not None
        recorder = Recorder(self._pool)
        with self._travel.recording(recorder), recorder.recording():
            work.give(index)
        self._pool = recorder.pool
        return Piece(recorder.steps)
