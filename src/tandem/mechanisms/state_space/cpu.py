"""State spaces on the C++ core."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.recurrence.cpu import CpuStateUpdates
from tandem.mechanisms.state_space.torch import SpaceInputs, SpaceWeights


class CpuSpaceStateUpdates(CpuStateUpdates):
    """`SpaceStateUpdates`."""

    def spaced(self, inputs: SpaceInputs, step: StepContext, memory: Tensor, weights: SpaceWeights) -> Tensor:
        (mixed, gate, steps), (decay, bias, through, norm, groups, eps) = inputs, weights
        out, answers = gate.new_empty(gate.shape), mixed.new_empty(gate.shape)
        self._ops.state_space(
            self._view_of(step.batch), groups, mixed, gate, steps, decay, bias, through, norm, memory, answers, out, eps
        )
        return out


def bound(ops: CpuOps, shape: object) -> CpuSpaceStateUpdates:
    return CpuSpaceStateUpdates(ops)
