"""`StagedCapture`: a decode step as one CUDA graph for each stage, which are replayed one after the other.

Graphs cannot reach from one GPU to another. So rows are copied between two of them by the driver, from one GPU to the
next or through CPU memory, as the machine can. Stages on one GPU copy nothing: the second graph reads what the first
one has written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.engine.graphs.decode_graphs import DecodeCapture, DecodeGraph
from tandem.engine.graphs.inputs import GraphInputs, GraphPlan
from tandem.engine.sampling.graph_masks import GraphMasks
from tandem.engine.sampling.logits import BestRows
from tandem.engine.step.batch import to_gpu
from tandem.experts.stage_handoffs import StageHandoffs
from tandem.experts.usage.staged_usage import StagedUsage
from tandem.models.batch import ForwardBatch
from tandem.models.passing import States
from tandem.models.staged import StagedModel, StagedPass

Memories = dict[torch.device, Any]
"""Memory of graphs, by GPU."""


class StagedInputs(GraphInputs):
    """A graph's batch on each GPU; one image in pinned memory, which all of them read."""

    def __init__(self, size: int, plan: GraphPlan, devices: list[torch.device]) -> None:
        """devices: of the stages."""
        super().__init__(size, plan, devices[-1])
        self._memories = {devices[-1]: self._device_image}
        self._batches = {devices[-1]: (self.batch, self.counted)}
        for device in devices:
            if device not in self._memories:
                self._memories[device] = memory = self._host.to(device, copy=True)
                self._batches[device] = self._views(memory), self._layout.counted(memory)

    def on(self, device: torch.device) -> tuple[ForwardBatch, Tensor]:
        """The batch there, and how many of its rows are no copies."""
        return self._batches[device]

    def send_to(self, device: torch.device) -> None:
        """As `send`, in the graph of the first stage there."""
        to_gpu(self._host, self._memories[device])


class Carried:
    """Rows that a stage leaves to the next one. `copies`: (target, source), before each replay; none on one GPU."""

    def __init__(self, device: torch.device) -> None:
        """device: of the next stage."""
        self._device = device
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __call__(self, source: Tensor) -> Tensor:
        if source.device == self._device:
            return source
        target = torch.empty_like(source, device=self._device)
        self.copies.append((target, source))
        return target


@dataclass(frozen=True, slots=True)
class StageGraph:
    """copies: rows (target, source) that are brought before each replay; before: what else comes before it."""

    copies: list[tuple[Tensor, Tensor]]
    before: Callable[[], None]
    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        for target, source in self.copies:
            target.copy_(source, non_blocking=True)  # in the order of what both GPUs were given
        self.before()
        self.graph.replay()


class StagedGraph:
    """The graphs of all stages, as one."""

    def __init__(self, stages: list[StageGraph], after: Callable[[], None], memories: Memories) -> None:
        """after: given to the GPUs behind the last graph."""
        self._stages, self._after, self._memories = stages, after, memories

    def replay(self) -> None:
        for stage in self._stages:
            stage.replay()
        self._after()

    def pool(self) -> Memories:
        return self._memories


@dataclass(frozen=True, slots=True)
class StagedCapture(DecodeCapture):
    """A `DecodeCapture` of a model with stages. usage: counts who was chosen; None: nobody does."""

    model: StagedModel
    states: States
    handoffs: StageHandoffs
    usage: StagedUsage | None
    capture_streams: dict[torch.device, torch.cuda.Stream]  # one on each GPU

    @property
    def devices(self) -> list[torch.device]:
        """GPU of each stage."""
        return [stage.device for stage in self.model.stages]

    def inputs(self, size: int) -> StagedInputs:
        return StagedInputs(size, self.plan, self.devices)

    def captured(self, inputs: GraphInputs, memory: Memories | None, *, plain: bool = False) -> DecodeGraph:
        """memory: of the graphs before, by GPU."""
        assert isinstance(inputs, StagedInputs) and not plain, "stages have no drafts"
        size = len(inputs.batch.seq_lens)
        fetched, masks = BestRows(size, self.device), GraphMasks(size, self.device)
        self._warm_up(inputs, fetched, masks)
        capture, memories = _Capturing(self, inputs), dict(memory or {})
        for number in range(len(self.model.stages) - 1):
            capture.stage(number, memories)
        logits, best = capture.stage(len(self.model.stages) - 1, memories, lambda rows: fetched.fetch(rows, masks))
        graph = StagedGraph(capture.graphs, partial(self.take_over, 0, -1), memories)
        return DecodeGraph(inputs, graph, logits, best, masks, capture.posts)

    def _warm_up(self, inputs: StagedInputs, fetched: BestRows, masks: GraphMasks) -> None:
        self.begin_step(inputs.image, True)
        with self.handoffs.rehearsing(), self.streams.side_stream():  # whose memory later steps use again
            for _ in range(self.plan.warm_ups):
                fetched.fetch(self.forward(inputs.batch, inputs.counted), masks)
        for device in self.capture_streams:
            torch.cuda.synchronize(device)

    def take_over(self, number: int, before: int) -> None:
        """The count of posts follows a step from stage to stage, and back to the first."""
        own, other = (self.handoffs.stages[each].mailbox for each in (number, before))
        if own is not None and other is not None:
            own.take_over(other)


class _Capturing:
    """Graphs of one number of rows, stage by stage."""

    def __init__(self, capture: StagedCapture, inputs: StagedInputs) -> None:
        self._capture, self._inputs = capture, inputs
        self._pass: StagedPass | None = None
        self.graphs: list[StageGraph] = []
        self.posts = 0

    def stage(self, number: int, memories: Memories, best: Callable[[Tensor], Tensor] | None = None) -> Any:
        """Captures one. best: of the logits, behind the last stage; returns logits and that then."""
        capture, stage = self._capture, self._capture.model.stages[number]
        carried, graph = self._carry(number), torch.cuda.CUDAGraph()
        stream, counted = capture.capture_streams.get(stage.device), self._inputs.on(stage.device)[1]
        with (
            stage.current(),
            capture.handoffs.stages[number].recording(counted) as posted,
            torch.cuda.graph(graph, memories.get(stage.device), stream, capture_error_mode="thread_local"),
        ):
            out = self._layers(number, best)
        memories.setdefault(stage.device, graph.pool())
        before = partial(capture.take_over, number, number - 1) if number else _nothing
        self.graphs.append(StageGraph(carried.copies, before, graph))
        self.posts += len(posted)
        return out

    def _carry(self, number: int) -> Carried:
        device = self._capture.devices[number]
        carried = Carried(device)
        if self._pass is not None:
            self._pass.carry(number, self._inputs.on(device)[0], carried)
        return carried

    def _layers(self, number: int, best: Callable[[Tensor], Tensor] | None) -> Any:
        capture, device = self._capture, self._capture.devices[number]
        batch, counted = self._inputs.on(device)
        if device not in capture.devices[:number]:
            self._inputs.send_to(device)
        if capture.usage is not None:
            capture.usage.begin_part(number, counted)
        if self._pass is None:
            self._pass = capture.model.begin(batch)
        capture.model.run_stage(self._pass, capture.states)
        if best is None:
            return None
        logits = capture.model.logits(self._pass, capture.states)
        return logits, best(logits)


def _nothing() -> None:
    """Before the first stage."""
