"""Few rows through experts of codes on tensor cores: what `expert_rows` does, where its arithmetic, four instructions a
weight or more, takes longer than reading the weights.

Codes are taken as `mma_source.py` says. The row is one of the tile's eight columns; the others are zeros, which cost
nothing. `down` adds up a token's experts as well.

Not taken: weights through rings in shared memory (cp.async), in blocks that stay, with rows of a step that chose the
same expert in one tile. A layer of Qwen3-30B-A3B in int4 took 1.26 times as long for 1 token, 1.04 for 4, 0.87 for 16
(H200).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import can_overlap
from tandem.kernels.gpu.expert_rows import ExpertActivation, slots_of
from tandem.kernels.gpu.mma.activated import activation_steps
from tandem.kernels.gpu.mma.mma_source import (
    STEP,
    Kind,
    code_steps,
    group_shift,
    has_steps,
    kind_of,
)
from tandem.kernels.gpu.nvrtc import available, compiled, cuda_source, launch
from tandem.kernels.gpu.panels import Panels
from tandem.kernels.ops import Routing
from tandem.spec.activation import SILU, Activation

SHARING_WARPS = 4  # of a block of gate_up
ROW_UNITS = 2048  # its row is copied by so many numbers
MAX_DEPTH = 22528  # of a row: what lies in shared memory is 48 KB at most, the sums of the warps included
MAX_WARPS = 16  # of a block of down, which takes all experts of a token, some warps for each
# Steps of K that a warp has in flight together, of gate_up and of down. More and fewer were slower for int4. Codes of 8
# bits take as many registers in half the steps.
AHEAD = {"int4": (8, 12), "fp4": (8, 12), "int8": (4, 6), "fp8": (4, 6)}

SOURCE = cuda_source(__file__)


def reads(panels: Panels, device: torch.device) -> bool:
    """Whether these kernels read such a matrix on this device."""
    if not has_steps(panels) or panels.padded_depth > MAX_DEPTH or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and available()


@cache
def kernels(kind: Kind, activation: Activation, device_index: int | None) -> tuple[Any, Any]:
    """gate_up and down, compiled on first use."""
    gate_up, down = compiled(source(kind, activation), ("gate_up", "down"), device_index)
    return gate_up, down


def source(kind: Kind, activation: Activation = SILU) -> str:
    """CUDA source of both kernels for one kind of codes."""
    gate_up, down = AHEAD[kind.fmt]
    ahead = f"enum {{ kGateUpAhead = {gate_up}, kDownAhead = {down} }};\n"
    return code_steps(kind) + ahead + activation_steps(activation) + SOURCE


def gate_up(
    x: Tensor, pool: Tensor, panels: Panels, stride: int, routing: Routing, between: ExpertActivation
) -> Tensor:
    """As `expert_rows.gate_up`."""
    slots = slots_of(routing)
    hidden = x.new_empty((slots.numel(), between.width))
    kernel, _ = kernels(kind_of(panels), between.activation, x.device.index)
    launch(
        kernel, (slots.numel(), panels.panels // 2), 32 * SHARING_WARPS, _stream(x),
        x.data_ptr(), pool.data_ptr(), slots.data_ptr(), routing.ids.data_ptr(), _address(between.gate_up),
        hidden.data_ptr(), np.int32(slots.shape[1]), np.uint64(stride), *_matrix(panels, between.rows),
        overlap=can_overlap(x.device), shared_bytes=-(-panels.padded_depth // ROW_UNITS) * ROW_UNITS * 2,
    )  # fmt: skip
    return hidden


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def down(
    hidden: Tensor,
    pool: Tensor,
    offset: int,
    panels: Panels,
    stride: int,
    routing: Routing,
    between: ExpertActivation,
    out: Tensor,
) -> Tensor:
    """The weighted sum over a token's experts, those below slot 0 left out: out float32 or bfloat16 [T, columns]."""
    slots = slots_of(routing)
    tokens, top_k = slots.shape
    each = max(1, min(MAX_WARPS // top_k, -(-panels.padded_depth // (STEP * AHEAD[panels.fmt][1]))))
    _, kernel = kernels(kind_of(panels), between.activation, out.device.index)
    launch(
        kernel, (tokens, panels.panels), 32 * min(MAX_WARPS, top_k * each), _stream(out),
        hidden.data_ptr(), pool.data_ptr() + offset, slots.data_ptr(), routing.ids.data_ptr(), _address(between.down),
        routing.weights.data_ptr(), out.data_ptr(),
        *map(np.int32, (out.dtype is torch.bfloat16, top_k, each)), np.uint64(stride),
        *_matrix(panels, panels.columns), overlap=can_overlap(out.device),
    )  # fmt: skip
    return out


def _matrix(panels: Panels, columns: int) -> tuple[Any, ...]:
    sizes = panels.depth, panels.padded_depth // STEP, group_shift(panels), columns
    return np.uint64(panels.panel_bytes), np.uint64(panels.scale_offset), *map(np.int32, sizes)


def _stream(tensor: Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
