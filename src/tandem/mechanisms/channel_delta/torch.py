"""Operations around the recurrence of delta nets with a decay for each channel (Kimi), in plain torch."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.delta_net.torch import UNIT_EPS
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.mechanisms.recurrence.torch import StateUpdates, TorchStateUpdates, corrected_row


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


class ChannelState(NamedTuple):
    """State of each sequence, in its slot. Rows of draft tokens as they were given; that of the token at position p
    lies in place p % places. There are no places where nothing is drafted."""

    mixed: Tensor  # float32 [slots, places, 3 * H * D]
    forget: Tensor  # [slots, places, H * D], of the gates' type
    beta: Tensor  # [slots, places, H], likewise
    memory: Tensor  # float32 [slots, H, D, D]


class ChannelStateUpdates(StateUpdates, Protocol):
    """`StateUpdates` of delta nets whose channels decay apart."""

    def corrected(
        self, mixed: Tensor, gates: ChannelGates, step: StepContext, state: ChannelState, weights: ChannelWeights
    ) -> Tensor:
        """[T, H * D], of the gates' type: from the convolution's result [T, 3 * H * D] to the last projection.

        The memory takes in what is sure: tokens since `batch.state_lens` from their places, then `batch.num_verified`
        rows of this step. Draft tokens behind them see each other, and leave only what they were given.
        """
        ...


class TorchChannelStateUpdates(TorchStateUpdates):
    """`ChannelStateUpdates` in plain torch."""

    def corrected(
        self, mixed: Tensor, gates: ChannelGates, step: StepContext, state: ChannelState, weights: ChannelWeights
    ) -> Tensor:
        if step.batch.state_lens is None and step.batch.num_verified is None:
            answers = self.folded(channel_tokens(mixed, gates, weights), step, state.memory)
        else:
            sequences = range(len(step.rows.slots))
            answers = torch.cat([_answers_with_drafts(mixed, gates, step, state, weights, s) for s in sequences])
        return channel_result(answers, gates.behind, weights)


def _answers_with_drafts(
    mixed: Tensor, gates: ChannelGates, step: StepContext, state: ChannelState, weights: ChannelWeights, index: int
) -> Tensor:
    """Answers of one sequence's rows [n, H, D], of which the last may be draft tokens."""
    batch, rows = step.batch, step.rows
    own = ChannelState(*(each[rows.slots[index]] for each in state))
    begin, known = int(rows.begins[index]), int(rows.first[index])
    count = int(rows.last[index]) + 1 - known
    state_len = known if batch.state_lens is None else int(batch.state_lens[index])
    num_verified = count if batch.num_verified is None else int(batch.num_verified[index])
    new = [part[begin : begin + count] for part in (mixed, gates.forget, gates.beta)]
    if state_len == 0:
        own.memory.zero_()
    again = (known - torch.arange(known - state_len, 0, -1)) % max(1, own.mixed.shape[0])
    parts = [torch.cat((memory[again].to(part.dtype), part)) for memory, part in zip(own[:3], new, strict=True)]
    tokens = channel_tokens(parts[0], ChannelGates(parts[1], parts[2], parts[1]), weights)
    verified_end, draft_memory, answers = len(again) + num_verified, own.memory.clone(), list[Tensor]()
    for row in range(len(again) + count):
        if row == verified_end:
            draft_memory.copy_(own.memory)
        answers.append(corrected_row(tokens, row, own.memory if row < verified_end else draft_memory))
    places = (known + torch.arange(num_verified, count)) % max(1, own.mixed.shape[0])
    for memory, part in zip(own[:3], new, strict=True):
        memory[places] = part[num_verified:].to(memory.dtype)
    return torch.stack(answers[len(again) :])


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
