"""Each row times its expert's panels, whose codes become operands of tensor cores in registers.

For experts of up to some two hundred rows: unpacking them to bfloat16 takes longer than the product. bfloat16 itself is
taken as it lies there, of fewer rows (`PLAIN_PAIRS`). Codes are taken as `mma_source.py` says:
scaled weights are not rounded. A program has a tile of one expert's rows, whose panels its warps divide; rows come
through shared memory, in chunks. Nothing is asked back from the GPU, nor kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.gpu.expert_rows import ExpertActivation
from tandem.kernels.gpu.mma.activated import activation_steps
from tandem.kernels.gpu.mma.mma_source import (
    STEP,
    Kind,
    code_steps,
    group_shift,
    has_plain_steps,
    has_steps,
    kind_of,
)
from tandem.kernels.gpu.nvrtc import available, compiled, cuda_source, launch
from tandem.kernels.gpu.panels import Panels
from tandem.kernels.gpu.prompts.unpack import Packed
from tandem.spec.activation import Activation

TILE_FILE = str(Path(__file__).with_name("code_tile.cu"))
SOURCE = cuda_source(TILE_FILE) + cuda_source(__file__)

WARPS = 4
# Rows of an expert on average, up to which tiles have 16 and 32. Both products of a layer of Qwen3-30B-A3B took with 8,
# 32 and 128 rows and tiles of 16: 149, 313 and 1038 us; of 32: 158, 284 and 866; of 64: 234, 293 and 779 (int4, H100;
# more in docs/lab/products-from-codes.md).
SMALL, MIDDLE = 16, 40


class ProductTiling(NamedTuple):
    """How a kernel divides a product."""

    rows: int  # of a tile, at most
    steps: int  # of 32 k that a warp loads together
    stages: int  # of rows in shared memory
    warps: int  # of a block, two panels each
    resident: int  # blocks of a processor, at least: limits registers


def reads(panels: Panels, device: torch.device) -> bool:
    """Whether this kernel reads such a matrix on this device."""
    if not (has_steps(panels) or has_plain_steps(panels)) or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and available()


def blocks_of(panels: Panels, mean_rows: float) -> ProductTiling:
    """mean_rows: of an expert, about."""
    few = 4 if panels.codes == 8 else 2
    if mean_rows <= SMALL:
        return ProductTiling(16, few, 8, WARPS, 4)
    return ProductTiling(32, few, 4, WARPS, 3) if mean_rows <= MIDDLE else ProductTiling(64, 2, 3, WARPS, 2)


@cache
def kernel(
    kind: Kind, blocks: ProductTiling, scale_steps: int, ending: Activation | None, device_index: int | None
) -> Any:
    """Compiled on first use. ending: the activation that panels of gate and up end in."""
    (function,) = compiled(source(kind, blocks, scale_steps, ending), ("multiply_codes",), device_index)
    return function


def source(kind: Kind, blocks: ProductTiling, scale_steps: int, ending: Activation | None) -> str:
    sizes = {**blocks._asdict(), "scale_steps": min(scale_steps, blocks.steps)}
    return header(kind, sizes, ending) + SOURCE


def header(kind: Kind, sizes: Mapping[str, int], ending: Activation | None) -> str:
    """Source before that of a product: how its codes are read, its sizes as constants, and what it ends in."""
    constants = {**sizes, "ends": int(ending is not None)}
    defined = "".join(f"#define {name.upper()} {value}\n" for name, value in constants.items())
    return code_steps(kind) + defined + ("#define KIND 0\n" if ending is None else activation_steps(ending))


def activated(
    x: Tensor,
    packed: Packed,
    gate_up: Panels,
    ends: Tensor,
    mean_rows: float,
    between: ExpertActivation,
    whose: Tensor,
) -> Tensor:
    """bfloat16 [R, width]: the activation of row r of x bfloat16 [R, depth] and its expert's gate and up, whose panels
    alternate from the first byte of each expert on; rows of nobody stay unwritten.

    packed: its expert 0 has rows up to ends[0], int32 [E]. whose int32 [R]: numbers of the biases' experts, if any.
    """
    out = x.new_empty((len(x), between.width))
    launcher = _launcher(gate_up, mean_rows, between.activation, x.device)
    biases = 0 if between.gate_up is None else between.gate_up.data_ptr()
    launcher(x, packed, 0, ends, (whose.data_ptr(), biases, out.data_ptr()), between.rows)
    return out


def multiplied(
    x: Tensor, packed: Packed, offset: int, panels: Panels, ends: Tensor, mean_rows: float
) -> Tensor:
    """bfloat16 [R, columns]: row r of x times its expert's matrix, from byte `offset` on; as `activated`."""
    out = x.new_empty((len(x), panels.columns))
    launcher = _launcher(panels, mean_rows, None, x.device)
    launcher(x, packed, offset, ends, (0, 0, out.data_ptr()), panels.columns)
    return out


def _launcher(
    panels: Panels, mean_rows: float, ending: Activation | None, device: torch.device
) -> Callable[[Tensor, Packed, int, Tensor, tuple[int, int, int], int], None]:
    how = blocks_of(panels, mean_rows)
    function = kernel(kind_of(panels), how, 1 << group_shift(panels), ending, device.index)

    def start(
        x: Tensor, packed: Packed, offset: int, ends: Tensor, pointers: tuple[int, int, int], columns: int
    ) -> None:
        grid = -(-panels.panels // (2 * how.warps)), len(x) // how.rows + len(ends)
        sizes = panels.depth, panels.padded_depth // STEP, group_shift(panels), columns, panels.panels
        launch(
            function, grid, 32 * how.warps, int(torch.cuda.current_stream(device).cuda_stream),
            x.data_ptr(), packed.pool.data_ptr() + packed.slot * packed.stride + offset, ends.data_ptr(), *pointers,
            np.int32(len(ends)), *map(np.uint64, (packed.stride, panels.panel_bytes, panels.scale_offset)),
            *map(np.int32, sizes),
        )  # fmt: skip

    return start
