"""Each row times its expert's panels by `wgmma`, Hopper's products of whole warpgroups, for experts of many rows.

As in `code_product.py`, codes become operands in registers, and scaled weights are not rounded. A weight is decoded
once for up to MOST_ROWS rows. Rows are operands in shared memory, where wgmma takes k in its own order (`REORDERED`):
whoever gathers rows for it writes them so, with MOST_ROWS behind the last that may be read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.gpu.cuda_driver import cuda_driver
from tandem.kernels.gpu.expert_rows import ExpertActivation
from tandem.kernels.gpu.mma.mma_source import SCALE_BYTES, STEP, Kind, group_shift, kind_of
from tandem.kernels.gpu.nvrtc import compiled, cuda_source, launch
from tandem.kernels.gpu.panels import Panels
from tandem.kernels.gpu.prompts import code_product
from tandem.kernels.gpu.prompts.unpack import Packed
from tandem.spec.activation import Activation
from tandem.spec.gpu_scratch import HOPPER

FOLDER = Path(__file__).parent
SOURCE = "".join(map(cuda_source, (code_product.TILE_FILE, str(FOLDER / "wgmma_ring.cu"), __file__)))
MOST_ROWS = 144  # of a tile: sums of more leave too few registers
CHUNK = 64  # k that lie in shared memory together
PANELS, THREADS = 8, 384  # of a block at a time; of a block
TURNS = 6  # blocks of a multiprocessor, one after the other: kernels of a step beside a prompt wait for them to end
STAGES_BYTES = 184 << 10  # of a block's shared memory, at most, beside what its two groups exchange
REORDERED = tuple(c // 2 % 4 * 8 + c // 8 % 4 * 2 + c % 2 for c in range(STEP))
"""Place of each of 32 k among them."""


class WarpgroupTiling(NamedTuple):
    """How a kernel divides a product, and sizes of its matrix that are constants there."""

    rows: int  # of a tile, at most: 128 and more, in 16s
    stages: int  # chunks of 64 k in shared memory
    depth: int
    panel_bytes: int


def reads(panels: Panels, device: torch.device) -> bool:
    """True where this kernel reads such a matrix on this device."""
    chunks = panels.depth % max(CHUNK, panels.group) == panels.padded_depth - panels.depth == 0
    whole = chunks and panels.panel_bytes % 16 == panels.scale_offset % 16 == 0
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
    return whole and hopper and code_product.reads(panels, device)


def blocks_of(panels: Panels, rows: int = MOST_ROWS) -> WarpgroupTiling:
    """As many stages as there is room for."""
    staged = stage_bytes(kind_of(panels), 1 << group_shift(panels), rows)
    return WarpgroupTiling(rows, STAGES_BYTES // staged, panels.depth, panels.panel_bytes)


def stage_bytes(kind: Kind, scale_steps: int, rows: int) -> int:
    """Shared memory of 64 k: rows, and a panel of each warp."""
    step = {"int4": 256, "fp4": 256, "bf16": 1024}.get(kind.fmt, 512)
    scales = (2 if scale_steps == 1 else 1) * 16 * SCALE_BYTES[kind.scale] if kind.grouped else 0
    return -(-(128 * rows + PANELS * (2 * step + scales)) // 1024) * 1024


@cache
def kernel(
    kind: Kind, blocks: WarpgroupTiling, scale_steps: int, ending: Activation | None, device_index: int | None
) -> tuple[Any, int]:
    """Compiled on first use, and its shared memory. ending: the activation that panels of gate and up end in."""
    text = source(kind, blocks, scale_steps, ending)
    (function,) = compiled(text, ("multiply_by_warpgroups",), device_index, features="a")
    exchange = blocks.rows // 2 * 128 * 4 if ending is not None else 0
    shared = blocks.stages * stage_bytes(kind, scale_steps, blocks.rows) + exchange
    _allow_shared(function, shared, device_index)
    return function, shared


def _allow_shared(function: Any, nbytes: int, device_index: int | None) -> None:
    """Raises RuntimeError where a block cannot have so much."""
    driver = cuda_driver()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = driver.CUdevice(torch.cuda.current_device() if device_index is None else device_index)
    (status,) = driver.cuKernelSetAttribute(attribute, nbytes, function.handle, device)
    if int(status):
        raise RuntimeError(f"{nbytes} bytes of shared memory for a block: {status}")


def source(kind: Kind, blocks: WarpgroupTiling, scale_steps: int, ending: Activation | None) -> str:
    sizes = {**blocks._asdict(), "scale_steps": scale_steps}
    row_counts = _row_counts(blocks, kind.grouped and scale_steps == 1)
    return code_product.header(kind, sizes, ending) + "".join(map(_instruction, row_counts)) + SOURCE


def _row_counts(blocks: WarpgroupTiling, in_halves: bool) -> list[int]:
    """Rows of a product: a tile's, or halves of them."""
    counts = {32, 48, 64, 96, 128, blocks.rows}  # as `blocks_of` of the source
    return sorted({count // 2 for count in counts} if in_halves else counts)


def _instruction(rows: int) -> str:
    """`wgmma` of 64 columns (a0 ... a3 of each warp: 16 of them), 16 k and so many rows."""
    count = rows // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    return (
        f"__device__ inline void wgmma(float (&d)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, u64 rows, int adds) {{\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0; "\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{sums}}}, {{{a}}}, "\n'
        f'    "%{count + 4}, p, 1, 1, 0; }}"\n'
        f'    : {outputs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(rows), "r"(adds));\n'
        "}\n"
    )


def activated(
    x: Tensor,
    packed: Packed,
    gate_up: Panels,
    ends: Tensor,
    between: ExpertActivation,
    whose: Tensor,
) -> Tensor:
    """As `code_product.activated`, x and the result REORDERED."""
    out = x.new_empty((len(x), between.width))
    launcher = _launcher(gate_up, between.activation, x.device)
    biases = 0 if between.gate_up is None else between.gate_up.data_ptr()
    launcher(x, packed, 0, ends, (whose.data_ptr(), biases, out.data_ptr()), between.rows)
    return out


def multiplied(x: Tensor, packed: Packed, offset: int, panels: Panels, ends: Tensor) -> Tensor:
    """As `code_product.multiplied`, x REORDERED."""
    out = x.new_empty((len(x), panels.columns))
    launcher = _launcher(panels, None, x.device)
    launcher(x, packed, offset, ends, (0, 0, out.data_ptr()), panels.columns)
    return out


def _launcher(
    panels: Panels, ending: Activation | None, device: torch.device
) -> Callable[[Tensor, Packed, int, Tensor, tuple[int, int, int], int], None]:
    kind, scale_steps = kind_of(panels), 1 << group_shift(panels)
    function, shared = kernel(kind, blocks_of(panels), scale_steps, ending, device.index)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def start(
        x: Tensor, packed: Packed, offset: int, ends: Tensor, pointers: tuple[int, int, int], columns: int
    ) -> None:
        launch(
            function, TURNS * multiprocessors, THREADS, int(torch.cuda.current_stream(device).cuda_stream),
            x.data_ptr(), packed.pool.data_ptr() + packed.slot * packed.stride + offset, ends.data_ptr(), *pointers,
            np.int32(len(ends)), *map(np.uint64, (packed.stride, panels.scale_offset)),
            *map(np.int32, (columns, panels.panels)), shared_bytes=shared,
        )  # fmt: skip

    return start
