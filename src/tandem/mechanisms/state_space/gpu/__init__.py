"""State spaces on a GPU."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.recurrence.gpu.folds import GpuStateUpdates, answered, is_alone
from tandem.mechanisms.state_space.gpu.spaces import left, stepped
from tandem.mechanisms.state_space.torch import SpaceInputs, SpaceWeights


class GpuSpaceStateUpdates(GpuStateUpdates):
    """`SpaceStateUpdates`."""

    def spaced(self, inputs: SpaceInputs, step: StepContext, memory: Tensor, weights: SpaceWeights) -> Tensor:
        answers = answered(stepped(inputs, weights), step.batch, memory)
        return left(answers, inputs, step.rows.copied if is_alone(step.batch, answers) else None, weights)


def bound(ops: object, shape: object) -> GpuSpaceStateUpdates:
    return GpuSpaceStateUpdates()
