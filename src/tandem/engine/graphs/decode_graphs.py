"""`DecodeGraph`: a step whose rows all decode, captured as one CUDA graph, CPU experts included, by `DecodeCapture`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.engine.graphs.inputs import GraphInputs, GraphPlan
from tandem.engine.sampling.graph_masks import GraphMasks
from tandem.engine.sampling.logits import BestRows
from tandem.engine.step.hooks import BeginStep
from tandem.engine.step.streams import Streams
from tandem.experts.handoff import Handoff
from tandem.models.batch import ForwardBatch


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Garbage that frees GPU memory or pinned memory would spoil a graph that is being captured."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class ReplayedGraph(Protocol):
    """A CUDA graph, or several that follow each other."""

    def replay(self) -> None: ...

    def pool(self) -> Any:
        """Its memory, for other graphs."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """logits: float32 [rows, vocab]. best: of logits, in host memory: the last kernel writes it. masks: that the
    best of each row is chosen by. posts: hand-offs to the CPU's experts."""

    inputs: GraphInputs
    graph: ReplayedGraph
    logits: Tensor
    best: Tensor
    masks: GraphMasks
    posts: int


@dataclass(frozen=True, slots=True)
class DecodeCapture:
    """forward: of a batch on the device, and how many of its rows count, int32 [1] there."""

    plan: GraphPlan
    device: torch.device
    handoff: Handoff
    streams: Streams
    begin_step: BeginStep
    forward: Callable[[ForwardBatch, Tensor], Tensor]

    def inputs(self, size: int) -> GraphInputs:
        return GraphInputs(size, self.plan, self.device)

    def captured(self, inputs: GraphInputs, memory: Any, *, plain: bool = False) -> DecodeGraph:
        """memory: of the graphs before; None: it takes its own. plain: a step without drafts, and after such a step."""
        size = len(inputs.batch.seq_lens)
        batch = replace(inputs.batch, state_lens=None) if plain else inputs.batch
        fetched, masks = BestRows(size, self.device), GraphMasks(size, self.device)
        self.begin_step(inputs.image, True)
        with self.handoff.rehearsing(), self.streams.side_stream():  # whose memory later steps use again
            for _ in range(self.plan.warm_ups):
                fetched.fetch(self.forward(batch, inputs.counted), masks)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with (
            self.handoff.recording(inputs.counted) as posts,
            torch.cuda.graph(graph, pool=memory, stream=self.streams.steps, capture_error_mode="thread_local"),
        ):
            inputs.send()
            logits = self.forward(batch, inputs.counted)
            best = fetched.fetch(logits, masks)
        return DecodeGraph(inputs, graph, logits, best, masks, len(posts))
