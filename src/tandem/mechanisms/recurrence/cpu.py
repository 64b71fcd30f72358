"""`StateUpdates` on the C++ core, token by token: results that no cut changes."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.mechanisms.recurrence.torch import Taps


class CpuStateUpdates:
    """`StateUpdates`."""

    def __init__(self, ops: CpuOps) -> None:
        self._ops, self._view_of = _core.RecurrentOps(ops.pool, ops.tier), ops.view_of

    def convolved(self, new: Tensor, step: StepContext, ring: Tensor, taps: Taps) -> Tensor:
        out = new.new_empty(new.shape, dtype=torch.float32)
        view = self._view_of(step.batch)
        self._ops.convolve(view, new, taps.rows, taps.biased, gated=False, ring=ring, out=out)
        return out

    def gated(self, projected: Tensor, step: StepContext, ring: Tensor, taps: Taps) -> Tensor:
        out = projected.new_empty((len(projected), taps.rows.shape[1]))
        view = self._view_of(step.batch)
        self._ops.convolve(view, projected, taps.rows, taps.biased, gated=True, ring=ring, out=out)
        return out

    def folded(self, tokens: RecurrentTokens, step: StepContext, memory: Tensor) -> Tensor:
        queries, written, values, decay = (part.contiguous() for part in tokens[:4])
        out, corrects = torch.empty_like(values), tokens.beta is not None
        beta = None if tokens.beta is None else tokens.beta.contiguous()
        view = self._view_of(step.batch)
        self._ops.fold(view, corrects, queries, written, values, decay.exp(), beta, memory, out)
        return out


def bound(ops: CpuOps, shape: object) -> CpuStateUpdates:
    return CpuStateUpdates(ops)
