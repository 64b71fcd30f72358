"""Delta nets whose channels decay apart, on a GPU."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.channel_delta.gpu.channels import keyed, normed
from tandem.mechanisms.channel_delta.torch import ChannelGates, ChannelState, ChannelWeights
from tandem.mechanisms.recurrence.gpu.folds import GpuStateUpdates, answered, is_alone


class GpuChannelStateUpdates(GpuStateUpdates):
    """`ChannelStateUpdates`."""

    def corrected(
        self, mixed: Tensor, gates: ChannelGates, step: StepContext, state: ChannelState, weights: ChannelWeights
    ) -> Tensor:
        answers = answered(keyed(mixed, gates, weights), step.batch, state.memory)
        return normed(answers, gates.behind, step.rows.copied if is_alone(step.batch, answers) else None, weights)


def bound(ops: object, shape: object) -> GpuChannelStateUpdates:
    return GpuChannelStateUpdates()
