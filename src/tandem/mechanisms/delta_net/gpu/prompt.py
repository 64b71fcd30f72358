"""Chunks of several rows, of any sequences together: five kernels, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tandem.kernels.gpu.attention_prefill import SEQUENCES
from tandem.kernels.gpu.shared_memory import shared_bytes
from tandem.mechanisms.delta_net.gpu.chunk import CHUNK, SMALL, within
from tandem.mechanisms.delta_net.gpu.convolve import convolve, keep
from tandem.mechanisms.delta_net.gpu.parts import constants
from tandem.mechanisms.delta_net.gpu.walk import gated_norm, walk
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import UNIT_EPS, DeltaState, DeltaWeights

COLUMNS = 32  # of a head's memory in a program: with 32 heads of 128 one sequence fills a large GPU
CONV_ROWS, NORM_ROWS = 32, 16


class Chunks(NamedTuple):
    """The part of `KernelBatch` that the kernels read, int32."""

    query_starts: Tensor  # [S + 1]
    seq_lens: Tensor  # [S]
    slots: Tensor  # [S]


class DeltaIntermediates(NamedTuple):
    """Tensors between the kernels, for all T rows; a row that decodes leaves nothing."""

    qk: Tensor  # [T, 2 K, k_dim]
    v: Tensor  # [T, V, v_dim]
    solved: Tensor  # [T, V, CHUNK]
    query_scores: Tensor  # [T, V, CHUNK]
    logs: Tensor  # float32 [T, V]
    betas: Tensor  # float32 [T, V]
    read: Tensor  # [T, V, v_dim]

    @classmethod
    def of(cls, shape: DeltaRule, projected: Tensor) -> DeltaIntermediates:
        rows, heads = len(projected), shape.v_heads

        def empty(*sizes: int, dtype: torch.dtype = projected.dtype) -> Tensor:
            return projected.new_empty((rows, *sizes), dtype=dtype)

        return cls(
            empty(2 * shape.k_heads, shape.k_dim), empty(heads, shape.v_dim), empty(heads, CHUNK), empty(heads, CHUNK),
            empty(heads, dtype=torch.float32), empty(heads, dtype=torch.float32), empty(heads, shape.v_dim),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Arguments of each kernel that do not differ between calls."""

    convolve: dict[str, Any]
    keep: dict[str, Any]
    within: dict[str, Any]
    walk: dict[str, Any]
    norm: dict[str, Any]


@cache
def options(shape: DeltaRule, dtype: torch.dtype, device: torch.device) -> KernelOptions:
    """For projections of `dtype`."""

    def named(*names: str) -> dict[str, Any]:
        return {name: constants(shape)[name] for name in names}

    projected, exact = shape.channels + shape.values, dtype is torch.float32
    heads = {"V_HEADS": shape.v_heads, **named("K_HEADS", "GROUP", "K_DIM", "KB")}
    runs = named("K_HEADS", "GROUP", "K_DIM", "V_DIM", "CONV", "KB", "VB", *_columns("Q", "K", "V"))
    runs |= {"CHANNELS": shape.channels, "PROJECTED": projected}
    columns, precision = min(COLUMNS, constants(shape)["VB"]), "ieee" if exact else "tf32"
    return KernelOptions(
        convolve={**runs, "ROWS": CONV_ROWS, "AT_ONCE": SEQUENCES, "num_warps": 4},
        keep={**runs, "num_warps": 1},
        within={
            **heads, **named(*_columns("B", "A")), "GATES": 2 * shape.v_heads, "CHUNK": CHUNK, "SMALL": SMALL,
            "AT_ONCE": SEQUENCES, "PRECISION": precision, "EXACT": "ieee" if exact else "tf32x3", "num_warps": 4,
        },
        walk={
            **heads, "V_DIM": shape.v_dim, "CHUNK": CHUNK, "COLUMNS": columns, "PRECISION": precision, "num_warps": 4,
            "num_stages": _stages(dtype.itemsize, heads["KB"], columns, device),
        },
        norm={
            **named("GROUP", "V_DIM", "VB", "SIGMOID", *_columns("Z")), "V_HEADS": shape.v_heads,
            "PROJECTED": projected, "ROWS": NORM_ROWS, "num_warps": 4,
        },
    )  # fmt: skip


def _columns(*kinds: str) -> list[str]:
    return [f"{kind}_{part}" for kind in kinds for part in ("FIRST", "STEP")]


def prompt(
    shape: DeltaRule, weights: DeltaWeights, rows: tuple[Tensor, Tensor], where: Chunks, first: int,
    state: DeltaState, out: Tensor,
) -> None:  # fmt: skip
    """All sequences from `first` on; those before have one row each. rows: projections and gates. Gates are not
    kept: all these rows are sure."""
    (projected, gates), (inputs, _, memory), chosen = rows, state, options(shape, out.dtype, out.device)
    between = DeltaIntermediates.of(shape, projected)
    new, sequences = len(projected) - first, len(where.seq_lens)
    others, heads = sequences - first, shape.v_heads
    runs = 2 * shape.k_heads + heads  # of channels
    convolve[(new // CONV_ROWS + others, runs)](
        projected, weights.conv, *where, inputs, between.qk, between.v, first, sequences, inputs.stride(0),
        shape.k_dim**-0.5, UNIT_EPS, PLACES=inputs.shape[1], **chosen.convolve,
    )  # fmt: skip
    keep[(others, runs)](projected, *where, inputs, first, inputs.stride(0), PLACES=inputs.shape[1], **chosen.keep)
    within[(new // CHUNK + others, heads)](
        between.qk, gates, weights.decay, weights.dt_bias, where.query_starts, *between[2:6], first, sequences,
        **chosen.within,
    )  # fmt: skip
    walk[(triton.cdiv(shape.v_dim, chosen.walk["COLUMNS"]), heads, others)](
        *between[:6], *where, memory, between.read, first, memory.stride(0), **chosen.walk
    )
    gated_norm[(triton.cdiv(new, NORM_ROWS), heads)](
        between.read, projected, weights.norm, out, first, len(projected), shape.norm.eps, **chosen.norm
    )


def _stages(item_bytes: int, keys: int, columns: int, device: torch.device) -> int:
    """Chunks that `walk` has in shared memory at a time."""
    chunk = CHUNK * (2 * keys + columns + 2 * CHUNK)
    memory = keys * columns + 2 * CHUNK * columns  # as operands
    return 2 if (2 * chunk + memory) * item_bytes <= shared_bytes(device) else 1
