"""`StagedRunner`: a `GpuRunner` of a model whose layers are divided among GPUs."""

from __future__ import annotations

from typing import Any

import torch

from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.graphs.decode_graphs import DecodeCapture
from tandem.engine.stages.capture import StagedCapture
from tandem.errors import EngineError
from tandem.experts.stage_handoffs import StageHandoffs
from tandem.experts.usage.staged_usage import StagedUsage
from tandem.models.staged import StagedModel


class StagedRunner(GpuRunner):
    """Its own device is the last stage's, which chooses tokens. Whatever that has done, all stages have done."""

    def __init__(self, model: StagedModel, states: Any, handoffs: StageHandoffs, *arguments: Any, **named: Any) -> None:
        self._devices = list(dict.fromkeys(stage.device for stage in model.stages))
        if handoffs.device.type == "cuda":
            torch.cuda.set_device(handoffs.device)
        super().__init__(model, states, handoffs, *arguments, **named)

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
