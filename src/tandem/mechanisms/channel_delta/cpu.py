"""Delta nets whose channels decay apart, on the C++ core."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.channel_delta.torch import ChannelGates, ChannelState, ChannelWeights
from tandem.mechanisms.recurrence.cpu import CpuStateUpdates


class CpuChannelStateUpdates(CpuStateUpdates):
    """`ChannelStateUpdates`."""

    def corrected(
        self, mixed: Tensor, gates: ChannelGates, step: StepContext, state: ChannelState, weights: ChannelWeights
    ) -> Tensor:
        out, (forget, beta, behind) = torch.empty_like(gates.behind), gates
        decay, bias, norm, eps, floor = weights
        self._ops.channel_delta(
            self._view_of(step.batch), mixed, forget, beta, behind, decay, bias, norm, *state, out, eps, floor
        )
        return out


def bound(ops: CpuOps, shape: object) -> CpuChannelStateUpdates:
    return CpuChannelStateUpdates(ops)
