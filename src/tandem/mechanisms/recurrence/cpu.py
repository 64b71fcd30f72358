"""`Folds` on the C++ core, token by token: results that no cut changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem import _core
from tandem.kernels.batch_layout import BatchLayout
from tandem.kernels.step_rows import Step
from tandem.mechanisms.channel_delta.torch import ChannelGates, ChannelWeights
from tandem.mechanisms.recurrence.tokens import Tokens
from tandem.mechanisms.recurrence.torch import Taps
from tandem.mechanisms.state_space.torch import SpaceInputs, SpaceWeights


class CpuFolds:
    def __init__(self, ops: _core.RecurrentOps, view_of: Callable[[BatchLayout], _core.BatchView]) -> None:
        self._ops, self._view_of = ops, view_of

    def convolved(self, new: Tensor, step: Step, ring: Tensor, taps: Taps) -> Tensor:
        out = new.new_empty(new.shape, dtype=torch.float32)
        view = self._view_of(step.batch)
        self._ops.convolve(view, new, taps.rows, taps.biased, gated=False, ring=ring, out=out)
        return out

    def gated(self, projected: Tensor, step: Step, ring: Tensor, taps: Taps) -> Tensor:
        out = projected.new_empty((len(projected), taps.rows.shape[1]))
        view = self._view_of(step.batch)
        self._ops.convolve(view, projected, taps.rows, taps.biased, gated=True, ring=ring, out=out)
        return out

    def folded(self, tokens: Tokens, step: Step, memory: Tensor) -> Tensor:
        asked, written, values, decay = (part.contiguous() for part in tokens[:4])
        out, corrects = torch.empty_like(values), tokens.beta is not None
        beta = None if tokens.beta is None else tokens.beta.contiguous()
        view = self._view_of(step.batch)
        self._ops.fold(view, corrects, asked, written, values, decay.exp(), beta, memory, out)
        return out

    def corrected(
        self, mixed: Tensor, gates: ChannelGates, step: Step, memory: Tensor, weights: ChannelWeights
    ) -> Tensor:
        out, (forget, beta, behind) = torch.empty_like(gates.behind), gates
        decay, bias, norm, eps, floor = weights
        self._ops.channel_delta(
            self._view_of(step.batch), mixed, forget, beta, behind, decay, bias, norm, memory, out, eps, floor
        )
        return out

    def spaced(self, given: SpaceInputs, step: Step, memory: Tensor, weights: SpaceWeights) -> Tensor:
        (mixed, gate, steps), (decay, bias, through, norm, groups, eps) = given, weights
        out, between = gate.new_empty(gate.shape), mixed.new_empty(gate.shape)
        self._ops.state_space(
            self._view_of(step.batch), groups, mixed, gate, steps, decay, bias, through, norm, memory, between, out, eps
        )
        return out
