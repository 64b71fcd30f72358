"""While the CPU computes a layer's experts, the GPU has nothing to read. So it fetches the dense weights that follow
into its cache, from where a kernel reads them about twice as fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.gpu.nvrtc import available, compiled, cuda_source, launch
from tandem.kernels.gpu.overlap import can_overlap
from tandem.kernels.ops import SureRead, Waiting

BLOCKS, THREADS = 64, 32
SHARE = 0.5  # of the cache
UNIT = 16  # bytes
SOURCE = cuda_source(__file__)


def plan_ahead(reads: Sequence[SureRead], device: torch.device) -> None:
    """reads: weights in the order in which a step reads them. Those that wait for others are told what to fetch."""
    if device.type != "cuda" or not can_overlap(device) or not available():
        return
    most = int(torch.cuda.get_device_properties(device).L2_cache_size * SHARE)
    for i, read in enumerate(reads):
        if not isinstance(read.weights, Waiting) or not read.weights.elsewhere:
            continue
        if ranges := _first(_following(reads, i), most):
            read.weights.meanwhile = partial(_fetch, torch.tensor(ranges, device=device))


def _following(reads: Sequence[SureRead], index: int) -> Iterator[Tensor]:
    """What is read after these weights, up to the next that wait."""
    for read in reads[index + 1 :]:
        if isinstance(read.weights, Waiting):
            return
        for name in ("pool", "weight"):  # of codes, and of numbers
            if isinstance(memory := getattr(read.weights, name, None), Tensor):
                yield memory


def _first(memory: Iterator[Tensor], most: int) -> list[tuple[int, int]]:
    """Address and bytes of each, so many in all."""
    found: list[tuple[int, int]] = []
    for each in memory:
        nbytes = min(each.nbytes, most) // UNIT * UNIT
        if each.data_ptr() % UNIT == 0 and nbytes:
            found.append((each.data_ptr(), nbytes))
            most -= nbytes
    return found


def _fetch(ranges: Tensor) -> None:
    stream = int(torch.cuda.current_stream(ranges.device).cuda_stream)
    numbers = ranges.data_ptr(), np.int32(len(ranges))
    launch(_kernel(ranges.device.index), BLOCKS, THREADS, stream, *numbers, overlap=True)


@cache
def _kernel(device_index: int | None) -> Any:
    return compiled(SOURCE, ("ahead",), device_index)[0]
