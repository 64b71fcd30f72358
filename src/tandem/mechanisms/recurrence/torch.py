"""`StateUpdates`: what layers compute whose memory of a sequence has a constant size, between their projections."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.step_rows import StepContext, StepRows
from tandem.mechanisms.recurrence.convolution import convolved
from tandem.mechanisms.recurrence.tokens import RecurrentTokens

CHUNK = 64  # rows of a prompt that are multiplied together


class Taps(NamedTuple):
    """Weights of a convolution of C channels, float32."""

    rows: Tensor  # [taps, C], oldest token first; biased: then one that is added
    biased: bool = False

    @property
    def weights(self) -> Tensor:
        return self.rows[:-1] if self.biased else self.rows

    @property
    def bias(self) -> Tensor | None:
        return self.rows[-1] if self.biased else None


def taps_of(conv: Tensor, bias: Tensor | None) -> Taps:
    """conv [C, taps] and bias [C], as checkpoints have them."""
    weights = conv.T.contiguous()
    if bias is None:
        return Taps(weights)
    bias = bias.to(weights.device)  # of a model of headers alone it is elsewhere
    return Taps(torch.cat([weights, bias[None]]), biased=True)


class StateUpdates(Protocol):
    """A sequence without tokens starts from zeros; a row depends on its own sequence only."""

    def convolved(self, new: Tensor, step: StepContext, ring: Tensor, taps: Taps) -> Tensor:
        """silu of a causal convolution of each channel, rounded to the type of `new` [T, C]; float32 [T, C]. ring
        [slots, R, C] takes in the new rows."""
        ...

    def gated(self, projected: Tensor, step: StepContext, ring: Tensor, taps: Taps) -> Tensor:
        """[T, C] of projected [T, 3 C]: a gate before, a gate behind, and values. Values times the gate before are what
        ring [slots, R, C] takes in; their convolution, rounded, is multiplied with the gate behind. Rows may be
        draft tokens."""
        ...

    def folded(self, tokens: RecurrentTokens, step: StepContext, memory: Tensor) -> Tensor:
        """float32 [T, H, V]: what each row's memory answers once it has decayed and taken the row in. memory [slots, H,
        K, V] goes on."""
        ...


class TorchStateUpdates:
    """In plain torch: prompts in chunks, rows that correct one by one."""

    def convolved(self, new: Tensor, step: StepContext, ring: Tensor, taps: Taps) -> Tensor:
        mixed = convolved(new.contiguous(), step.rows, ring, taps.weights, taps.bias)
        return F.silu(mixed.to(new.dtype)).float()

    def gated(self, projected: Tensor, step: StepContext, ring: Tensor, taps: Taps) -> Tensor:
        before, behind, values = projected.chunk(3, dim=1)
        mixed = convolved(before * values, step.rows, ring, taps.weights, taps.bias)
        return behind * mixed.to(projected.dtype)

    def folded(self, tokens: RecurrentTokens, step: StepContext, memory: Tensor) -> Tensor:
        shared = tokens.values.shape[1] // tokens.queries.shape[1]
        whole = tokens._replace(
            queries=tokens.queries.repeat_interleave(shared, 1), written=tokens.written.repeat_interleave(shared, 1)
        )
        return torch.cat([_sequence(whole, step.rows, s, memory) for s in range(len(step.rows.slots))])


def _sequence(whole: RecurrentTokens, rows: StepRows, index: int, memory: Tensor) -> Tensor:
    """Results of one sequence's rows, which its memory takes in."""
    begin, known = int(rows.begins[index]), int(rows.first[index])
    end, own = begin + int(rows.last[index]) + 1 - known, memory[rows.slots[index]]
    if known == 0:
        own.zero_()
    if whole.beta is not None:
        return torch.stack([corrected_row(whole, row, own) for row in range(begin, end)])
    pieces = (slice(at, min(at + CHUNK, end)) for at in range(begin, end, CHUNK))
    return torch.cat([_added(whole, piece, own) for piece in pieces])


def corrected_row(whole: RecurrentTokens, row: int, memory: Tensor) -> Tensor:
    """The memory's answer to one row, [H, V]. memory [H, K, V]: before and behind the row."""
    assert whole.beta is not None
    memory *= whole.decay[row].exp()[..., None]
    written, query = whole.written[row][..., None], whole.queries[row][..., None]
    error = whole.values[row] - (memory * written).sum(1)
    memory += written * (error * whole.beta[row][:, None])[:, None]
    answer: Tensor = (memory * query).sum(1)
    return answer


def _added(whole: RecurrentTokens, piece: slice, memory: Tensor) -> Tensor:
    """Rows of one sequence at once, where a head decays as one."""
    queries, written, values = (part[piece].transpose(0, 1) for part in whole[:3])
    passed = whole.decay[piece, :, 0].T.cumsum(1)
    answers = torch.bmm(queries, memory) * passed.exp()[..., None]
    fade = (passed[:, :, None] - passed[:, None, :]).tril_().exp_().tril_()
    answers.baddbmm_(torch.bmm(queries, written.transpose(1, 2)).mul_(fade), values)
    memory.mul_(passed[:, -1, None, None].exp())
    left = (passed[:, -1:] - passed).exp_()
    memory.baddbmm_((written * left[..., None]).transpose(1, 2), values)
    return answers.transpose(0, 1)


def bound(ops: object, shape: object) -> TorchStateUpdates:
    return TorchStateUpdates()
