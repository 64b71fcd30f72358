"""`StagedRunner`: a `GpuRunner` of a model whose layers are divided among GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.graphs.decode_graphs import DecodeCapture
from tandem.engine.graphs.inputs import GraphPlan
from tandem.engine.sampling.logits import DeviceLogits
from tandem.engine.sequence import Chunk, make_masks
from tandem.engine.stages.capture import StagedCapture
from tandem.engine.stages.hooks import StagedStart
from tandem.engine.stages.pipeline import Pipeline, joined
from tandem.engine.step.batch import BatchArrays, StepShape
from tandem.engine.step.path import Choice, stages_path_of
from tandem.engine.step.step import Running, Step, StepOutput
from tandem.errors import EngineError
from tandem.experts.stage_handoffs import StageHandoffs
from tandem.experts.usage.staged_usage import StagedUsage
from tandem.models.batch import ForwardBatch
from tandem.models.staged import StagedModel


def _nothing() -> None:
    """Makes no masks, where no row of a batch has one."""


class StagedRunner(GpuRunner):
    """Its own device is the last stage's, which chooses tokens. Whatever that has done, all stages have done."""

    def __init__(
        self,
        model: StagedModel,
        states: Any,
        handoffs: StageHandoffs,
        graphs: GraphPlan,
        shape: StepShape,
        *,
        begin_step: StagedStart,
        **named: Any,
    ) -> None:
        """named: as a `GpuRunner`'s."""
        self._devices = list(dict.fromkeys(stage.device for stage in model.stages))
        self._shape, self._staged, self._hooks = shape, model, begin_step
        self._chunk_arrays: list[BatchArrays] = []  # of a pipelined step's chunks, which are all under way at once
        self._pipeline: Pipeline | None = None
        if handoffs.device.type == "cuda":
            torch.cuda.set_device(handoffs.device)
        super().__init__(model, states, handoffs, graphs, shape, begin_step=begin_step, **named)

    def start(self, step: Step, overlaps: bool = False) -> Running[StepOutput]:
        """As a `GpuRunner`'s. A step of more rows than a chunk has is pipelined: one prompt, in several chunks."""
        pipelined: Choice[object, object] | None = stages_path_of(step.num_tokens, self._shape.max_tokens)
        if pipelined is None:
            return super().start(step, overlaps)
        pipelined.log(step.num_tokens)
        return Running(partial(self._pipelined, step))

    @property
    def pipeline(self) -> Pipeline:
        """It has memory once a prompt has used it."""
        if self._pipeline is None:
            usage: Any = self._usage
            rows = self._shape.max_tokens
            self._pipeline = Pipeline(self._staged, self._states, self._hooks, usage, rows)
        return self._pipeline

    def prompt_logits(self, chunks: Iterable[ForwardBatch], make: Callable[[], None] = _nothing) -> DeviceLogits:
        """Logits of one prompt's chunks, which stages compute one behind the other. chunks: in pinned memory that stays
        as it is, each asked for when there is room for it. make: called while GPUs compute."""
        logits = []
        with torch.inference_mode():
            for batch in chunks:
                logits.append(self.pipeline.give(batch))
                self.pipeline.wait_for_room()
            every_row = joined(logits)
            best = self._best.fetch(every_row)
            self._end.mark()
            make()
            return self._done(every_row, best)

    def _pipelined(self, step: Step) -> StepOutput:
        """The step is shorter than it was asked for, in whole chunks, where a request arrives meanwhile."""
        (whole,), rows = step.chunks, list[int]()

        def batches() -> Iterator[ForwardBatch]:
            for chunk in whole.cut(self._shape.max_tokens):
                if rows and step.has_new_request():
                    return
                rows.append(chunk.length)
                yield self._filled(len(rows) - 1, chunk)

        logits = self.prompt_logits(batches(), partial(make_masks, [whole.sequence]))
        part = whole if sum(rows) == whole.length else Chunk(whole.sequence, sum(rows), 0)
        return StepOutput(Step((part,)), logits)

    def _filled(self, number: int, chunk: Chunk) -> ForwardBatch:
        """The chunk in pinned memory of its own, which GPUs read when its turn comes."""
        if number == len(self._chunk_arrays):
            plan, pinned = self._plan, self._device.type == "cuda"
            self._chunk_arrays.append(BatchArrays(*self._shape, windowed=plan.windowed, pinned=pinned))
        return self._chunk_arrays[number].fill([chunk])

    def _decode_capture(self) -> StagedCapture:
        model, handoffs, usage = self._model, self._handoff, self._usage
        assert isinstance(model, StagedModel) and isinstance(handoffs, StageHandoffs)
        assert usage is None or isinstance(usage, StagedUsage)
        common: DecodeCapture = super()._decode_capture()
        streams = {device: torch.cuda.Stream(device) for device in self._devices if device.type == "cuda"}
        return StagedCapture(
            common.plan, common.device, handoffs, common.streams, common.begin_step, common.forward,
            model, self._states, handoffs, usage, streams,
        )  # fmt: skip

    def after_failure(self) -> None:
        """As a `GpuRunner`'s, of every GPU."""
        for device in self._devices:
            if device.type != "cuda":
                continue
            try:
                torch.cuda.synchronize(device)
            except Exception as error:
                raise EngineError(f"{device} stopped working: {error}") from error
