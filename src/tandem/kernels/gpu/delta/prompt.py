"""Chunks of several rows, of any sequences together: five kernels, one after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tandem.config.layers import DeltaRule
from tandem.kernels.batch_layout import BatchLayout
from tandem.kernels.delta import UNIT_EPS, DeltaWeights
from tandem.kernels.gpu.attention_prefill import SEQUENCES
from tandem.kernels.gpu.delta.chunk import CHUNK, SMALL, within
from tandem.kernels.gpu.delta.convolve import convolve, keep
from tandem.kernels.gpu.delta.parts import constants
from tandem.kernels.gpu.delta.walk import gated_norm, walk
from tandem.kernels.gpu.shared_memory import shared_bytes

COLUMNS = 32  # of a head's memory in a program: with 32 heads of 128 one sequence fills a large GPU
CONV_ROWS, NORM_ROWS = 32, 16


class Between(NamedTuple):
    """What the kernels leave each other, of all T rows; a row that decodes leaves nothing."""

    qk: Tensor  # [T, 2 K, k_dim]
    v: Tensor  # [T, V, v_dim]
    solved: Tensor  # [T, V, CHUNK]
    seen: Tensor  # [T, V, CHUNK]
    logs: Tensor  # float32 [T, V]
    betas: Tensor  # float32 [T, V]
    read: Tensor  # [T, V, v_dim]

    @classmethod
    def of(cls, shape: DeltaRule, projected: Tensor) -> Between:
        rows, heads = len(projected), shape.v_heads

        def empty(*sizes: int, dtype: torch.dtype = projected.dtype) -> Tensor:
            return projected.new_empty((rows, *sizes), dtype=dtype)

        return cls(
            empty(2 * shape.k_heads, shape.k_dim), empty(heads, shape.v_dim), empty(heads, CHUNK), empty(heads, CHUNK),
            empty(heads, dtype=torch.float32), empty(heads, dtype=torch.float32), empty(heads, shape.v_dim),
        )  # fmt: skip


def prompt(
    shape: DeltaRule, weights: DeltaWeights, rows: tuple[Tensor, Tensor], batch: BatchLayout, first: int,
    states: tuple[Tensor, Tensor], out: Tensor,
) -> None:  # fmt: skip
    """All sequences from `first` on; those before have one row each. rows: projections and gates; states: inputs and
    memory."""
    (projected, gates), (inputs, memory) = rows, states
    named, between, heads = constants(shape), Between.of(shape, projected), shape.v_heads
    sequences, widths = len(batch.seq_lens), {"CHANNELS": shape.channels, "PROJECTED": projected.shape[1]}
    blocks = (len(projected) - first) // CHUNK + sequences - first
    runs = 2 * shape.k_heads + heads  # of channels
    exact = {"PRECISION": "ieee" if projected.dtype is torch.float32 else "tf32"}
    where = batch.query_starts, batch.seq_lens, batch.slots
    convolve[((len(projected) - first) // CONV_ROWS + sequences - first, runs)](
        projected, weights.conv, *where, inputs, between.qk, between.v, first, sequences, inputs.stride(0),
        shape.k_dim**-0.5, UNIT_EPS, ROWS=CONV_ROWS, AT_ONCE=SEQUENCES, **widths, **named, num_warps=4,
    )  # fmt: skip
    keep[(sequences - first, runs)](projected, *where, inputs, first, inputs.stride(0), **widths, **named, num_warps=1)
    of_gates = {name: named[name] for name in ("B_FIRST", "B_STEP", "A_FIRST", "A_STEP")}
    sizes = {name: named[name] for name in ("K_HEADS", "GROUP", "K_DIM", "KB")} | {"V_HEADS": heads}
    within[(blocks, heads)](
        between.qk, gates, weights.decay, weights.dt_bias, batch.query_starts, *between[2:6], first, sequences,
        CHUNK=CHUNK, SMALL=SMALL, AT_ONCE=SEQUENCES, GATES=gates.shape[1], **of_gates, **sizes, **exact,
        EXACT="ieee" if projected.dtype is torch.float32 else "tf32x3", num_warps=4,
    )  # fmt: skip
    columns = min(COLUMNS, named["VB"])
    walk[(triton.cdiv(shape.v_dim, columns), heads, sequences - first)](
        *between[:6], *where, memory, between.read, first, memory.stride(0), CHUNK=CHUNK, COLUMNS=columns,
        V_DIM=shape.v_dim, **sizes, **exact, num_warps=4, num_stages=_stages(projected, named["KB"], columns),
    )  # fmt: skip
    of_z = {name: named[name] for name in ("GROUP", "V_DIM", "Z_FIRST", "Z_STEP", "VB")}
    gated_norm[(triton.cdiv(len(projected) - first, NORM_ROWS), heads)](
        between.read, projected, weights.norm, out, first, len(projected), shape.norm.eps,
        PROJECTED=projected.shape[1], V_HEADS=heads, **of_z, ROWS=NORM_ROWS, num_warps=4,
    )  # fmt: skip


def _stages(x: Tensor, keys: int, columns: int) -> int:
    """Chunks that `walk` has in shared memory at a time."""
    chunk = CHUNK * (2 * keys + columns + 2 * CHUNK)
    memory = keys * columns + 2 * CHUNK * columns  # as operands
    return 2 if (2 * chunk + memory) * x.element_size() <= shared_bytes(x.device) else 1
