"""Operations around the recurrence of state spaces (Mamba 2), in plain torch."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.mechanisms.recurrence.torch import StateUpdates, TorchStateUpdates


class SpaceInputs(NamedTuple):
    """Projected inputs of T rows. Rows of gate and steps may lie apart."""

    mixed: Tensor  # [T, H * V + 2 * G * K]: values, written and asked, as they come from the convolution
    gate: Tensor  # [T, H * V]: what the silu of is multiplied with the result
    steps: Tensor  # [T, H], of the gate's type


class SpaceWeights(NamedTuple):
    """Weights of H heads in G groups, float32."""

    decay: Tensor  # [H]: times a step's length the logarithm of the decay
    bias: Tensor  # [H]: of a step's length, before softplus
    through: Tensor  # [H]: how much of a value is added to what the memory answers
    norm: Tensor  # [H * V]: of a group's results
    groups: int
    eps: float


class SpaceStateUpdates(StateUpdates, Protocol):
    """`StateUpdates` of state spaces."""

    def spaced(self, inputs: SpaceInputs, step: StepContext, memory: Tensor, weights: SpaceWeights) -> Tensor:
        """[T, H * V], of the gate's type: from the convolution's result to the last projection."""
        ...


class TorchSpaceStateUpdates(TorchStateUpdates):
    """`SpaceStateUpdates` in plain torch."""

    def spaced(self, inputs: SpaceInputs, step: StepContext, memory: Tensor, weights: SpaceWeights) -> Tensor:
        return space_result(self.folded(space_tokens(inputs, weights), step, memory), inputs, weights)


def space_tokens(inputs: SpaceInputs, weights: SpaceWeights) -> RecurrentTokens:
    mixed, inner = inputs.mixed, len(weights.norm)
    long = F.softplus(inputs.steps.to(mixed.dtype) + weights.bias)
    written, queries = mixed[:, inner:].unflatten(1, (2, weights.groups, -1)).unbind(1)
    values = mixed[:, :inner].unflatten(1, (len(weights.decay), -1)) * long[..., None]
    return RecurrentTokens(queries, written, values, (long * weights.decay)[..., None])


def space_result(answers: Tensor, inputs: SpaceInputs, weights: SpaceWeights) -> Tensor:
    """[T, H * V], of the gate's type, of what memories answer [T, H, V]."""
    values = inputs.mixed[:, : len(weights.norm)].unflatten(1, answers.shape[1:])
    y = (answers + values * weights.through[:, None]).flatten(1) * F.silu(inputs.gate.to(answers.dtype))
    parts = y.unflatten(1, (weights.groups, -1))
    parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + weights.eps)
    result: Tensor = (parts.flatten(1) * weights.norm).to(inputs.gate.dtype)
    return result


def bound(ops: object, shape: object) -> SpaceStateUpdates:
    return TorchSpaceStateUpdates()
