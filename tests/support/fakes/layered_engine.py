"""An engine whose long chunks run as on a GPU, layer by layer, without one."""

from __future__ import annotations

from typing import Any, cast

from fake_model import fake_engine
from pausing_model import PausingFake
from plans import gpu_plan
from tandem.engine.cpu_runner import CpuRunner
from tandem.engine.engine import Engine
from tandem.engine.sampling.logits import HostLogits
from tandem.engine.step.prefill import in_layers
from tandem.engine.step.step import ShrinkingStep, Step, StepOutput
from tandem.planner.gpu_plan import GpuPlan

SHARED, MOST = 8, 64
GPU = gpu_plan(graph_sizes=(1,), prompt_sizes=(SHARED,), step_tokens=MOST, shared_tokens=SHARED)


class LayeredRunner(CpuRunner):
    """Long chunks as a GPU computes them."""

    ran: list[tuple[int, int]]

    def _output(self, step: Step) -> StepOutput:
        if not step.shrinks:
            output = super()._output(step)
        else:
            batch, model, shrinking = (
                self._arrays.fill(step.chunks),
                cast(Any, self._model),
                ShrinkingStep(step),
            )
            shrunk = lambda step: self._arrays.fill(step.chunks)  # noqa: E731
            logits = HostLogits(in_layers(model, batch, self._states, shrinking, shrunk).numpy())
            output = StepOutput(shrinking.step, logits)
        self.ran.append((len(output.step.chunks), output.step.num_tokens))
        return output


def engine_of(gpu: GpuPlan | None = GPU) -> Engine:
    engine = fake_engine(PausingFake(), max_step_tokens=MOST, gpu=gpu)
    runner = engine._runner
    runner.__class__, runner.ran = LayeredRunner, []  # type: ignore[assignment, union-attr]
    return engine


def ran(engine: Engine) -> list[tuple[int, int]]:
    return cast(LayeredRunner, engine._runner).ran
