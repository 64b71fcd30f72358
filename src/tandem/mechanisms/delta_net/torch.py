"""Shape and small weights of gated delta nets, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.mechanisms.delta_net.shape import DeltaRule

UNIT_EPS = 1e-6  # of the norms of q and k


class DeltaWeights(NamedTuple):
    """C = channels of the convolution, V = value heads."""

    conv: Tensor  # float32 [conv, C], oldest token first
    decay: Tensor  # float32 [V]: -exp(A_log)
    dt_bias: Tensor  # float32 [V]
    norm: Tensor  # [v_dim], in the activations' dtype


class DeltaState(NamedTuple):
    """State of each sequence, in its slot. Inputs and gates of the token at position p lie in place p % places."""

    inputs: Tensor  # [slots, places, C], in the activations' dtype
    gates: Tensor  # [slots, places, 2 V], likewise
    memory: Tensor  # float32 [slots, V, k_dim, v_dim]


class Product(NamedTuple):
    """Rows times a matrix, for a kernel that may multiply by itself."""

    x: Tensor
    matrix: Callable[[Tensor], Tensor]


Gates = Tensor | Product


def gate_matrix(gates: Gates) -> Tensor:
    return gates.matrix(gates.x) if isinstance(gates, Product) else gates


class DeltaOperator(Protocol):
    """A gated delta net between its projections."""

    def __call__(self, projected: Tensor, gates: Gates, batch: KernelBatch, state: DeltaState) -> Tensor:
        """projected [T, C + V * v_dim] and gates [T, 2 V] as the layout of the shape has them → [T, V * v_dim].

        The state of each sequence's slot goes on; a sequence without tokens starts from zeros. A row depends on its own
        sequence only, not on how that was cut (last bits on a GPU).

        The memory takes in what is sure: tokens since `batch.state_lens` from their places, then `batch.num_verified`
        rows of this step. Draft tokens behind them see each other, and leave only their inputs and gates. """
        ...


class HeadColumns(NamedTuple):
    """Where a row has what of key head h: from first + h * step on."""

    first: int
    step: int


def columns_of(shape: DeltaRule) -> tuple[HeadColumns, ...]:
    """Columns of q, k, v, z in a row of projections, and of beta and decay in a row of gates."""
    group = shape.v_heads // shape.k_heads
    values, keys = group * shape.v_dim, shape.k_heads * shape.k_dim
    if shape.layout == "heads":
        step = 2 * shape.k_dim + 2 * values
        firsts = 0, shape.k_dim, 2 * shape.k_dim, 2 * shape.k_dim + values
        gates = HeadColumns(0, 2 * group), HeadColumns(group, 2 * group)
        return (*(HeadColumns(first, step) for first in firsts), *gates)
    return (
        HeadColumns(0, shape.k_dim), HeadColumns(keys, shape.k_dim), HeadColumns(2 * keys, values),
        HeadColumns(shape.channels, values),
        HeadColumns(0, group), HeadColumns(shape.v_heads, group),
    )  # fmt: skip


class TorchDelta:
    """`DeltaOperator` in plain torch, token by token: the oracle. It computes in the type of the convolution's
    weights."""

    def __init__(self, shape: DeltaRule, weights: DeltaWeights) -> None:
        self.shape, self.weights, self.wide = shape, weights, weights.conv.dtype

    def __call__(self, projected: Tensor, gates: Gates, batch: KernelBatch, state: DeltaState) -> Tensor:
        out, gates = projected.new_empty((len(projected), self.shape.values)), gate_matrix(gates)
        starts, lens = batch.query_starts.tolist(), batch.seq_lens.tolist()
        for s, slot in enumerate(batch.slots.tolist()):
            rows = slice(starts[s], starts[s + 1])
            known = lens[s] - (rows.stop - rows.start)
            state_len = known if batch.state_lens is None else int(batch.state_lens[s])
            sure_rows = rows.stop - rows.start if batch.num_verified is None else int(batch.num_verified[s])
            own = DeltaState(*(each[slot] for each in state))
            out[rows] = self._sequence(projected[rows], gates[rows], own, (state_len, known, known + sure_rows))
        return out

    def _sequence(
        self, projected: Tensor, gates: Tensor, own: DeltaState, lengths: tuple[int, int, int]
    ) -> Tensor:
        """lengths: tokens that the memory holds, those before the step, and with rows that are sure."""
        (state_len, known, sure_length), places = lengths, len(own.inputs)
        q, k, v, z = self._kinds(projected, columns_of(self.shape)[:4])
        new = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1)
        first = state_len - (self.shape.conv - 1)
        old = torch.arange(max(0, first), known) % places
        mixed = torch.cat([new.new_zeros((max(0, -first), new.shape[1])), own.inputs[old], new])
        both = torch.cat([own.gates[torch.arange(state_len, known) % places], gates])
        if state_len == 0:
            own.memory.zero_()
        settled = self._reads(mixed[: sure_length - first], both, own.memory)
        answers = torch.cat([settled, self._reads(mixed[len(settled) :], both[len(settled) :], own.memory.clone())])
        last = torch.arange(max(0, len(new) - places), len(new))
        own.inputs[(known + last) % places], own.gates[(known + last) % places] = new[last], gates[last]
        return self._normed(answers[known - state_len :].to(z.dtype), z).flatten(1)

    def _reads(self, mixed: Tensor, gates: Tensor, memory: Tensor) -> Tensor:
        """Rows' reads from memory. mixed: inputs of conv - 1 tokens before, and theirs; gates: of these or more."""
        s, w = self.shape, self.weights
        if len(mixed) < s.conv:
            return memory.new_empty((0, s.v_heads, s.v_dim))
        beta, decay = self._gates(gates[: len(mixed) - s.conv + 1])
        convolved = F.silu(
            F.conv1d(mixed.to(self.wide).T[None], w.conv.T[:, None], groups=s.channels)[0].T.to(mixed.dtype)
        )
        sizes = [s.k_heads * s.k_dim, s.k_heads * s.k_dim, s.values]
        q, k, v = (part.to(self.wide) for part in convolved.split(sizes, 1))
        q, k = (self._unit(part) for part in (q, k))
        values = v.unflatten(1, (s.v_heads, s.v_dim))
        return self._recurrence(q / s.k_dim**0.5, k, values, beta, decay, memory)

    def _kinds(self, rows: Tensor, columns: tuple[HeadColumns, ...]) -> list[Tensor]:
        """q, k [T, K, k_dim], v, z [T, K, group * v_dim]."""
        s = self.shape
        widths = s.k_dim, s.k_dim, *[s.values // s.k_heads] * 2
        return [
            torch.stack([rows[:, c.first + h * c.step :][:, :width] for h in range(s.k_heads)], 1)
            for c, width in zip(columns, widths, strict=True)
        ]

    def _gates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """beta and decay, float32 [T, V]."""
        s, (b, a) = self.shape, columns_of(self.shape)[4:]
        group = s.v_heads // s.k_heads
        beta, dt = (
            torch.cat([gates[:, c.first + h * c.step :][:, :group] for h in range(s.k_heads)], 1).to(
                self.wide
            )
            for c in (b, a)
        )
        return beta.sigmoid(), (self.weights.decay * F.softplus(dt + self.weights.dt_bias)).exp()

    def _unit(self, x: Tensor) -> Tensor:
        """Heads scaled to unit length, [T, V, k_dim]: value heads of a group share a key head."""
        s = self.shape
        heads = x.unflatten(1, (s.k_heads, s.k_dim))
        heads = heads * torch.rsqrt(heads.pow(2).sum(-1, keepdim=True) + UNIT_EPS)
        shared: Tensor = heads.repeat_interleave(s.v_heads // s.k_heads, 1)
        return shared

    @staticmethod
    def _recurrence(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, memory: Tensor) -> Tensor:
        answers = torch.empty_like(v)
        for t in range(len(v)):
            memory *= decay[t][:, None, None]
            known = (memory * k[t][:, :, None]).sum(1)
            memory += k[t][:, :, None] * ((v[t] - known) * beta[t][:, None])[:, None]
            answers[t] = (memory * q[t][:, :, None]).sum(1)
        return answers

    def _normed(self, answers: Tensor, z: Tensor) -> Tensor:
        s = self.shape
        y = answers.to(self.wide)
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + s.norm.eps)).to(answers.dtype)
        gates = z.reshape(len(z), s.v_heads, s.v_dim).to(self.wide)
        gate = F.silu(gates) if s.gate == "silu" else gates.sigmoid()
        return ((self.weights.norm.to(answers.dtype) * y) * gate).to(answers.dtype)


def bound(ops: object, shape: DeltaRule, weights: DeltaWeights) -> DeltaOperator:
    return TorchDelta(shape, weights)
