"""Few rows through one matrix of codes on tensor cores: what `code_tiles` does, where unpacking in Triton takes longer
than reading the weights.

Codes are taken as `mma_source.py` says, so scaled weights are not rounded. Warps share K and are added up in their
order: a row has the same bits beside any others.

A matrix of gate and up may end in the activation: then a block takes the panel of a gate and that of its up.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.gpu.code_tiles import PANEL
from tandem.kernels.gpu.dependent_launch import can_overlap
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
from tandem.spec.activation import Activation

MOST_ROWS = 32
MOST_PAIRED_ROWS = 16  # the sums of two panels' warps lie in shared memory
TILE_ROWS = 8  # of one mma
SMALL = 6  # blocks of four warps of a processor

SOURCE = cuda_source(__file__)


def reads(panels: Panels, device: torch.device) -> bool:
    """Whether these kernels read such a matrix on this device."""
    if not has_steps(panels) or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and available()


class MmaTiling(NamedTuple):
    """How a kernel divides a matrix."""

    panels: int  # of a block
    tiles: int  # of TILE_ROWS rows of x
    warps: int  # of a block, which share K
    ahead: int  # steps that a warp loads together, while it adds as many others
    resident: int  # blocks of a processor, at least: limits registers


@cache
def kernel(
    kind: Kind, blocks: MmaTiling, device_index: int | None, ending: Activation | None, ready: bool = False
) -> Any:
    """Compiled on first use. ending: the activation that panels of gate and up end in. ready: as `multiply` has it."""
    (function,) = compiled(source(kind, blocks, ending, ready), ("multiply",), device_index)
    return function


def source(kind: Kind, blocks: MmaTiling, ending: Activation | None = None, ready: bool = False) -> str:
    sizes = ", ".join(f"{name} = {value}" for name, value in {**_upper(blocks), "READY": int(ready)}.items())
    paired = "#define PAIRED 0\n" if ending is None else "#define PAIRED 1\n" + activation_steps(ending)
    return code_steps(kind) + paired + f"enum {{ {sizes} }};\n" + SOURCE


def _upper(blocks: MmaTiling) -> dict[str, int]:
    return {name.upper(): value for name, value in blocks._asdict().items()}


def blocks_of(panels: Panels, rows: int, processors: int) -> MmaTiling:
    """Every block reads the rows of x anew and adds up its warps. So a block takes two panels where all processors have
    blocks and registers hold the steps of both. Where a processor has only one block, more warps read for it; where
    it has more, they would take a third longer. Blocks of few warps, where all of them then run at once, and blocks of
    eight would come in two waves."""
    tiles = 1 if rows <= TILE_ROWS else 2 if rows <= 2 * TILE_ROWS else 4
    ahead = 4 if tiles == 1 else 2
    if panels.codes == 8 and 2 * processors < panels.panels <= SMALL * processors:
        return MmaTiling(1, tiles, 4, _ahead(panels, 4, ahead), SMALL if tiles == 1 else 4)
    two = tiles == 2 or (tiles == 1 and panels.codes == 8)
    each = 2 if two and panels.panels // 2 >= processors else 1
    one_block = panels.panels <= processors
    warps = 16 if one_block else 8
    return MmaTiling(each, tiles, warps, _ahead(panels, warps, ahead), 1 if one_block else 2)


def pairs_of(panels: Panels, rows: int, processors: int) -> MmaTiling:
    """As `blocks_of`, of a gate's panel and an up's: as many steps in flight as one panel has of twice the length."""
    one_block = panels.panels // 2 <= processors
    ahead, warps = 4 if panels.codes == 8 and rows <= TILE_ROWS else 2, 16 if one_block else 8
    return MmaTiling(2, 1 if rows <= TILE_ROWS else 2, warps, _ahead(panels, warps, ahead), 1 if one_block else 2)


def _ahead(panels: Panels, warps: int, most: int) -> int:
    """Two times as many steps are in flight: no more than a warp has."""
    each = -(-panels.padded_depth // (STEP * warps))
    return next(ahead for ahead in (1, 2, 4) if ahead == most or 2 * ahead >= each)


def pairs(panels: Panels, how: Activation) -> bool:
    """Whether a gate's panels and an up's are as many, and none has columns of both."""
    return how.gated and panels.columns % (2 * PANEL) == 0


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def prepare(panels: Panels, device: torch.device) -> None:
    """Compiles what any step of up to MOST_ROWS rows needs: the first one may be one that is captured."""
    for rows in (1, TILE_ROWS, 2 * TILE_ROWS, MOST_ROWS):
        kernel(kind_of(panels), blocks_of(panels, rows, _processors(device)), device.index, None)


def prepare_pairs(panels: Panels, how: Activation, device: torch.device) -> None:
    """As `prepare`, for `activate`."""
    for rows, ready in product((1, MOST_PAIRED_ROWS), (False, True)):
        kernel(kind_of(panels), pairs_of(panels, rows, _processors(device)), device.index, how, ready)


def activate(x: Tensor, pool: Tensor, panels: Panels, how: Activation, ready: bool = False) -> Tensor:
    """The activation of a product with gate and up, of up to MOST_ROWS rows, in x's type. ready: as `multiply` has it,
    of up to MOST_PAIRED_ROWS."""
    out = x.new_empty((len(x), panels.columns // 2))
    for part, to in zip(x.split(MOST_PAIRED_ROWS), out.split(MOST_PAIRED_ROWS), strict=True):
        multiply(part, pool, panels, None, to, how, ready)
    return out


def multiply(
    x: Tensor, pool: Tensor, panels: Panels, bias: Tensor | None, out: Tensor, ending: Activation | None = None,
    ready: bool = False,
) -> Tensor:  # fmt: skip
    """As `code_tiles.multiply`, of up to MOST_ROWS rows. ending: as `activate`, of up to MOST_PAIRED_ROWS. ready: x was
    there before the kernel before let this one start, so it runs beside that (`overlap.py`)."""
    division = blocks_of if ending is None else pairs_of
    blocks = division(panels, len(x), _processors(x.device))
    sizes = panels.panels, panels.depth, panels.padded_depth // STEP, group_shift(panels), panels.columns
    launch(
        kernel(kind_of(panels), blocks, x.device.index, ending, ready),
        -(-panels.panels // blocks.panels), 32 * blocks.warps,
        int(torch.cuda.current_stream(x.device).cuda_stream),
        x.data_ptr(), pool.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        *map(np.int32, (out.dtype is torch.bfloat16, len(x), out.stride(0))),
        np.uint64(panels.panel_bytes), np.uint64(panels.scale_offset), *map(np.int32, sizes),
        overlap=can_overlap(x.device),
    )  # fmt: skip
    return out
