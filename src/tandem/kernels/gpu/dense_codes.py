"""`GpuCodes`: `Linear` on the GPU over codes and scales as they are stored, in packed panels (`panels.py`).

A decode step reads every dense matrix once, so it is as fast as its bytes are few. Few rows are multiplied straight
from the codes: by CUDA kernels on tensor cores (`mma/code_mma.py`), or where these cannot, by Triton's
(`code_tiles.py`). For more rows the matrix is unpacked into scratch, some columns at a time, and PyTorch multiplies it.
Triton's tiles of 64 rows that unpack for themselves were slower on an H200 from 32 rows on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem._core import WorkerPool
from tandem.errors import KernelError
from tandem.formats.codes import WeightCodes
from tandem.formats.gpu_reading import refusal
from tandem.kernels.cpu import PackedMatrix
from tandem.kernels.gpu import code_tiles
from tandem.kernels.gpu.linear import multiplied
from tandem.kernels.gpu.mma import code_mma
from tandem.kernels.gpu.panels import Panels
from tandem.kernels.gpu.uploads import uploaded_bytes
from tandem.kernels.packed.packable import scale_type
from tandem.spec.activation import Activation

FEW_ROWS = 16
SCRATCH_BYTES = 128 << 20  # of unpacked weights at a time


def readable(weight: WeightCodes) -> bool:
    """Whether the kernels take such codes; others are to be decoded."""
    if weight.zeros is not None or weight.offsets is not None:
        return False
    return not refusal(weight.fmt, scale_type(weight), weight.depth, experts=False)


class GpuCodes:
    """A matrix [N, K] in GPU memory, in the bytes that the CPU's kernels read. x is bfloat16."""

    def __init__(
        self,
        packed: PackedMatrix,
        bias: Tensor | None,
        device: torch.device,
        workers: WorkerPool,
        fixed: bool = False,
    ) -> None:
        """packed: of which `workers` make a copy. fixed: a row has the same bits beside any others."""
        self._fixed = fixed
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self.panels = Panels(*packed.layout())
        self.pool = uploaded_bytes(packed.parts()[0], device, workers)
        self._mma = code_mma.reads(self.panels, self.pool.device)
        if self._mma:
            code_mma.prepare(self.panels, self.pool.device)
        self.bias = None if bias is None else bias.detach().to(device, torch.float32, copy=True)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """out: its rows may lie apart."""
        if x.dtype != torch.bfloat16:
            raise KernelError(f"codes on the GPU are multiplied with bfloat16, not {x.dtype}")
        if out is None:
            out = x.new_empty((len(x), self.out_features), dtype=out_dtype)
        if not len(x):  # a step may want no logits
            return out
        if self._fixed:
            return self._by_few(x.contiguous(), out)
        if self._mma and len(x) <= code_mma.MOST_ROWS:
            return code_mma.multiply(x.contiguous(), self.pool, self.panels, self.bias, out)
        if len(x) <= FEW_ROWS:
            return code_tiles.multiply(x.contiguous(), self.pool, self.panels, self.bias, out)
        return self._unpacked(x, out)

    def _by_few(self, x: Tensor, out: Tensor) -> Tensor:
        """By the kernels of few rows, of which Triton's has another for one."""
        if not self._mma and len(x) == 1:
            return out.copy_(self._by_few(x.repeat(2, 1), out.new_empty((2, self.out_features)))[:1])
        kernel, most = (code_mma, code_mma.MOST_ROWS) if self._mma else (code_tiles, len(x))
        for part, out_part in zip(x.split(most), out.split(most), strict=True):
            kernel.multiply(part, self.pool, self.panels, self.bias, out_part)
        return out

    def activated(self, x: Tensor, how: Activation, ready: bool = False) -> Tensor | None:
        """As `Activating`."""
        if not self._mma or self.bias is not None or not code_mma.pairs(self.panels, how):
            return None
        most = len(x) if self._fixed else code_mma.MOST_ROWS
        if x.dtype != torch.bfloat16 or not 0 < len(x) <= most:
            return None
        ready = ready and x.is_contiguous() and len(x) <= code_mma.MOST_PAIRED_ROWS
        return code_mma.activate(x.contiguous(), self.pool, self.panels, how, ready)

    def prepare(self, how: Activation) -> None:
        """Compiles what `activated` needs: the first step may be one that is captured."""
        if self._mma and code_mma.pairs(self.panels, how):
            code_mma.prepare_pairs(self.panels, how, self.pool.device)

    def _unpacked(self, x: Tensor, out: Tensor) -> Tensor:
        depth = self.in_features
        each = max(1, SCRATCH_BYTES // (2 * depth * code_tiles.PANEL)) * code_tiles.PANEL
        for first in range(0, self.out_features, each):
            last = min(first + each, self.out_features)
            bias = None if self.bias is None else self.bias[first:last]
            weight = x.new_empty((last - first, depth))
            code_tiles.unpack(self.pool, self.panels, first, weight)
            out[:, first:last] = multiplied(x, weight, bias, out.dtype)
        return out
