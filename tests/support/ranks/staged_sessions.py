"""A tiny model in stages: on one CPU, with graphs that are run again at each replay, or on GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sessions import PAGES, Session, plan
from tandem.checkpoint import open_checkpoint
from tandem.engine.graphs.inputs import GraphPlan
from tandem.engine.stages import capture
from tandem.engine.stages.hooks import StagedStart
from tandem.engine.stages.runner import StagedRunner
from tandem.engine.stages.states import allocate_stages
from tandem.engine.step.batch import StepShape, moved
from tandem.experts.handoff_counts import HandoffSizes
from tandem.experts.stage_handoffs import StageHandoffs
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.experts.usage.staged_usage import StagedUsage
from tandem.kernels.ops import Ops
from tandem.models.staged import Stage, StagedBuilder, StagedModel

CPU = torch.device("cpu")


def borders(layers: int, stages: int) -> list[int]:
    """First layers of each, and the end."""
    return [layers * number // stages for number in range(stages + 1)]


class StagedSession(Session):
    """As a `Session`, in so many stages, each with its own operations."""

    def __init__(self, path: Path, stages: int, ops: list[Ops], dtype: str = "float32", counted: bool = False) -> None:
        super().__init__(path, dtype, ops=ops[0])
        ends = borders(len(self.config.layers), stages)
        made = tuple(Stage(a, b, own, CPU) for a, b, own in zip(ends, ends[1:], ops, strict=False))
        chosen = replace(plan(dtype, True, self.page * PAGES), page_size=self.page, num_pages=3 * PAGES, num_slots=4)
        moe, experts = self.config.moe_layers, self.config.moe.experts.count
        counts = [len([layer for layer in moe if each.first <= layer < each.end]) for each in made]
        parts = [ExpertUsage(count, experts, padded=True) for count in counts]
        self.usage = StagedUsage(parts, torch.zeros(len(moe), experts, dtype=torch.bool)) if counted else None
        builder = StagedBuilder(made, self.config, chosen, open_checkpoint(path), ops[0], usage=self.usage)
        self.model, self.chosen = StagedModel(builder), chosen
        self.states = allocate_stages(chosen, self.config, made).arrays
        for array in (array for arrays in self.states for array in arrays):
            array.fill_(float("nan"))

    def runner(self, sizes: tuple[int, ...]) -> StagedRunner:
        """Replays steps of up to so many rows; `without_gpu` comes before it."""
        sizes_of = HandoffSizes(8, 64, self.config.expert_channels, 2)
        handoffs = StageHandoffs(sizes_of, [CPU] * len(self.model.stages), 1.0)
        graphs = GraphPlan(sizes, PAGES, one_stream=True)
        return StagedRunner(
            self.model, self.states, handoffs, graphs, StepShape(self.page, 64), usage=self.usage,
            begin_step=StagedStart(self.model.stages),
        )  # fmt: skip


class NotedGraph:
    """`torch.cuda.CUDAGraph`, whose replay is given later."""

    def pool(self) -> str:
        return "memory"

    def replay(self) -> None: ...


def without_gpu(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """A stage's graph is computed again at each replay, from what the stage before has left, into the
    same tensors."""
    patch.setattr(torch.cuda, "CUDAGraph", NotedGraph)
    patch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    layers = capture._Capturing._layers

    def replaying(self: Any, number: int, best: Any) -> Any:
        before = None if self._pass is None else replace(self._pass)
        out = layers(self, number, best)
        left = replace(self._pass)

        def replay() -> None:
            calls.append(f"stage {number}")
            self._inputs.send()
            self._pass = None if before is None else replace(before, batch=self._inputs.on(CPU)[0])
            again = layers(self, number, best)
            copied(left, self._pass)
            if out is not None:
                for old, new in zip(out, again, strict=True):
                    old.copy_(new)

        self.replays = [*getattr(self, "replays", []), replay]
        return out

    stage = capture._Capturing.stage

    def noted(self: Any, number: int, *arguments: Any) -> Any:
        out = stage(self, number, *arguments)
        self.graphs[number].graph.replay = self.replays[number]
        return out

    def fresh(self: Any, device: torch.device) -> Any:
        return moved(self.batch, device), self.counted

    patch.setattr(capture.StagedInputs, "on", fresh)  # a CPU's operations remember what a batch said
    patch.setattr(capture._Capturing, "_layers", replaying)
    patch.setattr(capture._Capturing, "stage", noted)


def copied(left: Any, again: Any) -> None:
    """Where the next stage reads it."""
    left.residual.copy_(again.residual)
    if left.pending is not None:
        left.pending.copy_(again.pending)
    if left.addend is not None:
        left.addend.x.copy_(again.addend.x)
        if left.addend.gate is not None:
            left.addend.gate.copy_(again.addend.gate)


def logits_of(runner: StagedRunner, batch: Any) -> Tensor:
    """Logits of a batch in host memory."""
    with torch.inference_mode():
        return runner.logits(batch).logits.clone()


