"""Rows that decode, in CUDA where a head's memory is 128 x 128: as `step.py`, with fewer exchanges
between warps.

On an H100 Triton's kernel takes 9.5 us for one row of 32 heads, of which reading and writing memory is 1.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.dependent_launch import can_overlap
from tandem.kernels.gpu.nvrtc import available, compiled, cuda_source, launch
from tandem.mechanisms.delta_net.gpu.parts import constants
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import UNIT_EPS, DeltaState, DeltaWeights

HEAD = 128
THREADS = 256
LANE_NUMBERS = 4  # neighbours that a thread reads at once
SOURCE = cuda_source(__file__)


def takes(shape: DeltaRule, weights: DeltaWeights, rows: Sequence[Tensor], state: DeltaState, hidden: int) -> bool:
    """Whether there is code for such rows. hidden: of gates that are made here."""
    (inputs, _, memory), device = state, state.memory.device
    if device.type != "cuda" or not (shape.k_dim == shape.v_dim == HEAD) or hidden % (2 * LANE_NUMBERS):
        return False
    if any(each.dtype != torch.bfloat16 for each in (*rows, weights.norm, inputs)):
        return False
    if memory.data_ptr() % 16 or inputs.data_ptr() % 8:
        return False
    if memory.stride(0) % LANE_NUMBERS or inputs.stride(0) % LANE_NUMBERS:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and available()


@cache
def kernel(shape: DeltaRule, places: int, hidden: int, device_index: int | None) -> Any:
    """Compiled on first use."""
    (step_kernel,) = compiled(source(shape, places, hidden), ("step",), device_index)
    return step_kernel


def source(shape: DeltaRule, places: int, hidden: int) -> str:
    sizes = {
        "V_HEADS": shape.v_heads, "CHANNELS": shape.channels, "PROJECTED": shape.channels + shape.values,
        "PLACES": places, "HIDDEN": hidden, **constants(shape),
    }  # fmt: skip
    return "".join(f"#define {name} {size}\n" for name, size in sizes.items()) + SOURCE


def step(
    shape: DeltaRule, weights: DeltaWeights, rows: tuple[Tensor, Tensor, Tensor, int], batch: KernelBatch, count: int,
    state: DeltaState, out: Tensor,
) -> None:  # fmt: skip
    """As `step.step`. rows: projections; gates, or their matrix, x and its length."""
    (projected, gates, x, hidden), (inputs, _, memory) = rows, state
    launch(
        kernel(shape, inputs.shape[1], hidden, out.device.index), (count, shape.v_heads), THREADS,
        int(torch.cuda.current_stream(out.device).cuda_stream),
        *(tensor.data_ptr() for tensor in (projected, gates, x, *weights, batch.seq_lens, batch.slots)),
        inputs.data_ptr(), memory.data_ptr(), out.data_ptr(), np.int32(count),
        np.uint64(inputs.stride(0)), np.uint64(memory.stride(0)),
        *map(np.float32, (shape.k_dim**-0.5, UNIT_EPS, shape.norm.eps)),
        overlap=can_overlap(out.device),
    )  # fmt: skip
