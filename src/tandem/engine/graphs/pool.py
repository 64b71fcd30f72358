"""`GraphPool`: every CUDA graph of an engine, by its rows: in which order they are captured, and in whose memory.

Graphs of decode steps share one block of GPU memory, those of prefill chunks another: no two of a kind run at once. The
largest is captured first, so the smaller ones fit into its memory.
"""

from __future__ import annotations

import logging
from typing import Any

from tandem.engine.graphs.decode_graphs import DecodeCapture, DecodeGraph
from tandem.engine.graphs.inputs import GraphPlan
from tandem.engine.graphs.prefill_graphs import PrefillCapture, PrefillGraph, PrefillGraphs
from tandem.models.batch import ForwardBatch

_log = logging.getLogger(__name__)


class GraphPool:
    """`Facts` of a step's path, of batches in host memory.

    decode: of all steps whose rows decode. plain: of those that neither have drafts nor follow some. prefill: of chunks
    while no other step runs; background: of chunks while decode graphs are replayed, often the same; shared: of chunks
    whose experts CPU and bus share.
    """

    def __init__(self) -> None:
        self.decode: dict[int, DecodeGraph] = {}
        self.plain: dict[int, DecodeGraph] = {}
        self.prefill = self.background = self.shared = PrefillGraphs(None)
        self._prefill_replays = True  # while no other step runs
        self._capture: PrefillCapture | None = None

    def capture_decode(self, plan: GraphPlan, capture: DecodeCapture) -> None:
        graphs, plain = dict[int, DecodeGraph](), dict[int, DecodeGraph]()
        memory: Any = None
        for size in reversed(plan.sizes):
            graph = capture.captured(capture.inputs(size), memory)
            memory = memory or graph.graph.pool()
            graphs[size] = graph
            if size in plan.plain_sizes:
                plain[size] = capture.captured(graph.inputs, memory, plain=True)
        if graphs:
            _log.info("captured CUDA graphs of %s rows", ", ".join(map(str, sorted(graphs))))
        self.decode, self.plain = dict(sorted(graphs.items())), dict(sorted(plain.items()))

    def capture_prefill(self, plan: GraphPlan, capture: PrefillCapture) -> None:
        """Some kinds have none where that is not possible: the log says why."""
        self._prefill_replays, self._capture = plan.no_decodes, capture
        self.background = capture.of(plan.prompts, reserve_sms=True)
        own = plan.reserved_sms > 0 and plan.no_decodes
        self.prefill = capture.of(plan.prompts) if own else self.background
        self.shared = capture.of(capture.shared_sizes(plan.splits), sibling=self.prefill)

    def runs_beside_prefill(self, rows: int) -> bool:
        """Whether a decode step of so many rows is replayed."""
        return rows <= max(self.decode, default=0)

    # -- `step.path.Facts` ---

    def sees(self, step: ForwardBatch) -> bool:
        return step.image_rows is not None

    def decode_graph(self, step: ForwardBatch) -> DecodeGraph | None:
        rows = step.seq_lens.shape[0]
        if step.input_ids.shape[0] != rows or step.logits_rows.shape[0] != rows:
            return None
        plain = self.plain if step.state_lens is None else {}
        sizes = [size for graphs in (plain, self.decode) for size in graphs if size >= rows]
        return None if not sizes else plain.get(sizes[0], self.decode[sizes[0]])

    def shared_graph(self, step: ForwardBatch) -> PrefillGraph | None:
        graph = self.shared.graph_of(step, exclusive=True)
        if graph is None or self._capture is None or not self._capture.shares(len(step.input_ids)):
            return None
        return graph

    def prefill_graph(self, step: ForwardBatch) -> PrefillGraph | None:
        return self.prefill.graph_of(step, exclusive=True) if self._prefill_replays else None

    def background_graph(self, step: ForwardBatch) -> PrefillGraph | None:
        return self.background.graph_of(step)
