"""Operations around the recurrence of delta nets with a decay for each channel (Kimi), in plain torch."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.delta_net.torch import UNIT_EPS
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.mechanisms.recurrence.torch import StateUpdates, TorchStateUpdates


class ChannelGates(NamedTuple):
    """Projected gates of T rows and H heads of D channels, all of one type."""

    forget: Tensor  # [T, H * D]: how each channel decays
    beta: Tensor  # [T, H]: how far is corrected; rows may lie apart
    behind: Tensor  # [T, H * D]: what the sigmoid of is multiplied with the result


class ChannelWeights(NamedTuple):
    """Weights that make logarithms of decays: decay * softplus(forget + bias). With a floor below 0 the logarithms stay
    above it: floor * sigmoid(-decay * (forget + bias))."""

    decay: Tensor  # float32 [H], below 0
    bias: Tensor  # float32 [H * D]
    norm: Tensor  # float32 [D]: of a head's result
    eps: float
    floor: float = 0.0


class ChannelStateUpdates(StateUpdates, Protocol):
    """`StateUpdates` of delta nets whose channels decay apart."""

    def corrected(
        self, mixed: Tensor, gates: ChannelGates, step: StepContext, memory: Tensor, weights: ChannelWeights
    ) -> Tensor:
        """[T, H * D], of the gates' type: from the convolution's result [T, 3 * H * D] to the last projection. memory
        as in `folded`."""
        ...


class TorchChannelStateUpdates(TorchStateUpdates):
    """`ChannelStateUpdates` in plain torch."""

    def corrected(
        self, mixed: Tensor, gates: ChannelGates, step: StepContext, memory: Tensor, weights: ChannelWeights
    ) -> Tensor:
        answers = self.folded(channel_tokens(mixed, gates, weights), step, memory)
        return channel_result(answers, gates.behind, weights)


def channel_tokens(mixed: Tensor, gates: ChannelGates, weights: ChannelWeights) -> RecurrentTokens:
    """mixed [T, 3 * H * D]: queries, keys and values as they come from the convolution."""
    heads, dim = len(weights.decay), len(weights.norm)
    q, k, v = mixed.unflatten(1, (3, heads, dim)).unbind(1)
    beta = gates.beta.sigmoid().to(mixed.dtype)
    return RecurrentTokens(_unit(q) * dim**-0.5, _unit(k), v, _logarithms(gates.forget.to(mixed.dtype), weights), beta)


def _logarithms(forget: Tensor, weights: ChannelWeights) -> Tensor:
    """Logarithms of decays, [T, H, D]."""
    biased = (forget + weights.bias).unflatten(1, (len(weights.decay), -1))
    if not weights.floor:
        return F.softplus(biased) * weights.decay[:, None]
    return weights.floor * torch.sigmoid(-weights.decay[:, None] * biased)


def channel_result(answers: Tensor, behind: Tensor, weights: ChannelWeights) -> Tensor:
    """[T, H * D] of what memories answer [T, H, D]: each head's norm, times the sigmoid of its gate."""
    y = answers.to(behind.dtype).to(answers.dtype)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + weights.eps) * weights.norm
    return (y.flatten(1) * behind.to(answers.dtype).sigmoid()).to(behind.dtype)


def _unit(x: Tensor) -> Tensor:
    unit: Tensor = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + UNIT_EPS)
    return unit


def bound(ops: object, shape: object) -> ChannelStateUpdates:
    return TorchChannelStateUpdates()
