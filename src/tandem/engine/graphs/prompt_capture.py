"""`PrefillCapture`: prefill chunks become CUDA graphs, at the start."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.gpu_pass import PassStart, Streams
from tandem.engine.paused_pass import PausingModel
from tandem.engine.prompt_graphs import ChunkInputs, NoPromptGraphs, PromptGraphs
from tandem.engine.runner import StepModel
from tandem.experts.usage.expert_usage import ExpertUsage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillCapture:
    """Of a model, if passes over it can be overtaken. pages: of the longest sequence."""

    model: StepModel
    states: Rows[tuple[Tensor, ...]]
    pages: int
    start: PassStart | None
    streams: Streams
    device: torch.device
    usage: ExpertUsage | None

    def of(self, sizes: Rows[int], beside: PromptGraphs | None = None, spares: bool = False) -> PromptGraphs:
        """Of so many rows; none where that is not possible: such chunks are given kernel by kernel. beside: graphs that
        share their memory and whose layers the GPU computes alone; in those made here the CPU has a part. spares: as
        `Streams.aside`. A graph keeps the multiprocessors that it was captured with."""
        made = PromptGraphs(self.start, beside)
        try:
            for rows in sorted(sizes, reverse=True):
                self._capture(made, rows, beside is not None, spares)
        except Exception as error:  # too little memory, most of all; prompts are computed without them, too
            made, usual = PromptGraphs(None), isinstance(error, NoPromptGraphs)
            _log.log(logging.INFO if usual else logging.WARNING, "prompts are computed kernel by kernel: %s", error)
        return made

    def shared_sizes(self, sizes: Rows[int]) -> list[int]:
        """Of these, rows of chunks whose experts CPU and bus may share later."""
        return [] if self.start is None else [rows for rows in sizes if self.start.may_split(rows)]

    def shares(self, rows: int) -> bool:
        """Whether that is best for a chunk of so many rows now."""
        return self.start is not None and self.start.splits(rows)

    def _capture(self, made: PromptGraphs, rows: int, split: bool, spares: bool) -> None:
        start = self.start
        if start is None or self.streams.steps is None or not start.replayable(split):
            raise NoPromptGraphs("steps and prompts take turns, or too few experts fit on their way")
        if not isinstance(self.model, PausingModel):
            raise NoPromptGraphs("the model cannot stop between two layers")
        inputs = ChunkInputs(rows, self.pages, self.device)
        try:
            if not start.hold(inputs.image, split):
                raise NoPromptGraphs("the CPU computes a part of their experts")
            with self.streams.aside(spares=spares), self.streams.cut(spares):
                tallies = None if self.usage is None else self.usage.beside(0)
                made.capture(inputs, self.model, self.states, tallies)
        finally:
            start.release()
            self.streams.finish()
