"""What state spaces are bound to, and their recurrence in torch: prompts in chunks, decoding rows one by one."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.config.mechanisms.state_space import StateSpace
from tandem.kernels.recurrent.convolution import convolved
from tandem.kernels.shared_kv.rows import StepRows

CHUNK = 64  # rows of a prompt that are multiplied together


class StateSpaceWeights(NamedTuple):
    """H heads, C channels of the convolution. All but the norm's float32."""

    conv: Tensor  # [taps, C], oldest token first
    conv_bias: Tensor | None  # [C]
    decay: Tensor  # [H]: -exp(A_log)
    step_bias: Tensor  # [H]
    through: Tensor  # [H]: of the input, beside the memory
    norm: Tensor  # [H * head_dim]


class Chunk(NamedTuple):
    """Rows of one sequence, float32."""

    x: Tensor  # [H, n, head_dim]
    steps: Tensor  # [H, n]
    written: Tensor  # [H, n, state]
    asked: Tensor  # [H, n, state]


class TorchStateSpace:
    """A state space between its projections."""

    def __init__(self, shape: StateSpace, weights: StateSpaceWeights) -> None:
        self.shape, self.weights = shape, weights

    def __call__(self, projected: Tensor, rows: StepRows, ring: Tensor, memory: Tensor) -> Tensor:
        """projected [T, inner + C + H]: gate, what is convolved, time steps → [T, inner]. ring [slots, R, C] and memory
        float32 [slots, H, head_dim, state] of each sequence go on; one without tokens starts from zeros."""
        s, w = self.shape, self.weights
        gate, new, steps = projected.split([s.inner, s.channels, s.heads], dim=1)
        mixed = F.silu(convolved(new.contiguous(), rows, ring, w.conv, w.conv_bias)).to(projected.dtype).float()
        whole = self._chunk(mixed, F.softplus(steps.float() + w.step_bias))
        seen = torch.cat([self._sequence(whole, rows, index, memory) for index in range(len(rows.slots))], dim=1)
        y = seen + whole.x * w.through[:, None, None]
        return self._normed(y.transpose(0, 1).flatten(1), gate)

    def _chunk(self, mixed: Tensor, steps: Tensor) -> Chunk:
        """All rows: [T, C] and [T, H]."""
        s, wide = self.shape, self.shape.groups * self.shape.state
        x, written, asked = mixed.split([s.inner, wide, wide], dim=1)
        shared = (part.unflatten(1, (s.groups, s.state)).transpose(0, 1) for part in (written, asked))
        of_heads = [part.repeat_interleave(s.heads // s.groups, 0) for part in shared]
        return Chunk(x.unflatten(1, (s.heads, s.head_dim)).transpose(0, 1), steps.T, *of_heads)

    def _sequence(self, whole: Chunk, rows: StepRows, index: int, memory: Tensor) -> Tensor:
        """What the rows of one sequence read, [H, n, head_dim]. Its memory takes them in."""
        begin, known = int(rows.begins[index]), int(rows.first[index])
        end = begin + int(rows.last[index]) + 1 - known
        own = memory[rows.slots[index]]
        if known == 0:
            own.zero_()
        pieces = (slice(at, min(at + CHUNK, end)) for at in range(begin, end, CHUNK))
        chunks = (Chunk(*(part[:, piece] for part in whole)) for piece in pieces)
        return torch.cat([self._folded(chunk, own) for chunk in chunks], dim=1)

    def _folded(self, chunk: Chunk, memory: Tensor) -> Tensor:
        """memory [H, head_dim, state]: before and behind these rows."""
        x, steps, written, asked = chunk
        passed = (steps * self.weights.decay[:, None]).cumsum(1)  # of time, times the decay, [H, n]
        seen = torch.bmm(asked, memory.transpose(1, 2)) * passed.exp()[..., None]
        between = (passed[:, :, None] - passed[:, None, :]).tril_().exp_().tril_()
        seen.baddbmm_(torch.bmm(asked, written.transpose(1, 2)).mul_(between * steps[:, None, :]), x)
        left = (passed[:, -1:] - passed).exp_() * steps
        memory.mul_(passed[:, -1, None, None].exp())
        memory.baddbmm_((x * left[..., None]).transpose(1, 2), written)
        return seen

    def _normed(self, y: Tensor, gate: Tensor) -> Tensor:
        s = self.shape
        gated = (y * F.silu(gate.float())).unflatten(1, (s.groups, -1))
        y = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + s.norm.eps)
        return (self.weights.norm * y.flatten(1)).to(gate.dtype)
