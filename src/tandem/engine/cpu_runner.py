"""`CpuRunner`: runs a step's chunks through the model, where this process computes. A GPU has `gpu_runner.py`."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.sampling.logits import HostLogits
from tandem.engine.sequence import Chunk
from tandem.engine.step.batch import BatchArrays, regions
from tandem.engine.step.prefill import PausingModel, PrefillTask, host_task
from tandem.engine.step.step import Running, Step, StepOutput
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.models.batch import ForwardBatch


class StepModel(Protocol):
    """Part of a model's interface that the engine calls."""

    def forward(self, batch: ForwardBatch, states: Rows[tuple[Tensor, ...]]) -> Tensor:
        """float32 logits [len(batch.logits_rows), vocab]."""
        ...


class CpuRunner:
    """Runs the model where this process computes."""

    def __init__(
        self,
        model: StepModel,
        states: list[tuple[Tensor, ...]],
        *,
        page_size: int,
        max_step_tokens: int,
        usage: ExpertUsage | None = None,
        speculative: bool = False,
        windowed: bool = False,
        images_from: int = 0,
    ) -> None:
        """speculative: steps may have rows of drafts. windowed: layers that see a window have pages of their own.
        images_from: as of `BatchArrays`; those of a chunk between steps lie behind a step's."""
        self._model, self._states, self._usage = model, states, usage
        arrays = partial(BatchArrays, page_size, max_step_tokens, speculative=speculative, windowed=windowed)
        own, paused = regions(images_from, max_step_tokens)
        self._arrays, self._paused = arrays(images_from=own), arrays(images_from=paused)

    def start(self, step: Step, overlaps: bool = False) -> Running[StepOutput]:
        """Computes when the result is wanted: no device does while the host does something else."""
        return Running(partial(self._output, step))

    def _output(self, step: Step) -> StepOutput:
        """Logits rows of all chunks, in order."""
        batch = self._arrays.fill(step.chunks)
        with torch.inference_mode():
            if self._usage is not None:
                self._usage.begin(len(batch.input_ids))
            logits = self._model.forward(batch, self._states)
            return StepOutput(step, HostLogits(logits.to(device="cpu", dtype=torch.float32).numpy()))

    def commit(self, tokens: int) -> None:
        """As `GpuRunner.commit`; nothing has waited for it."""

    def pause(self, chunks: list[Chunk]) -> PrefillTask | None:
        """A task of these chunks, one at a time; steps may run between its pieces. None: this model cannot stop."""
        if not isinstance(self._model, PausingModel):
            return None
        return host_task(self._model, self._states, self._paused.fill(chunks), self._usage)

    def runs_beside(self, chunks: list[Chunk]) -> bool:
        """Whether a step of these chunks can run while a pass is under way."""
        return True

    def step_ended(self) -> bool:
        return True

    def after_failure(self) -> None:
        """Nothing that a step leaves behind keeps the next one from working."""
