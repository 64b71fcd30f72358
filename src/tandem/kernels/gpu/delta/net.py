"""`GpuDelta`: a gated delta net on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.config.gpu_plan import MAX_DELTA_HEAD
from tandem.config.layers import DeltaRule
from tandem.errors import KernelError
from tandem.kernels.batch_layout import BatchLayout
from tandem.kernels.delta import DeltaWeights
from tandem.kernels.gpu.delta.prompt import Chunks, prompt
from tandem.kernels.gpu.delta.step import step


class GpuDelta:
    """`Delta` in Triton. Rows that decode are the same in every batch; of prompts, the last bits depend on where chunks
    of 64 rows begin."""

    def __init__(self, shape: DeltaRule, weights: DeltaWeights) -> None:
        """weights: in the GPU's memory. Raises KernelError where a head is too large."""
        if shape.padded_head > MAX_DELTA_HEAD:
            raise KernelError(f"a head of {shape.k_dim} x {shape.v_dim} does not fit a GPU's registers")
        self._shape, self._weights = shape, weights._replace(conv=weights.conv.contiguous())

    def warm_up(self) -> None:
        """Compiles what prompts need, or loads it from Triton's cache: two rows of nobody. Else the first prompt would
        wait for it. Rows that decode are warmed up by the graphs' captures."""
        s, device = self._shape, self._weights.conv.device

        def zeros(*sizes: int, dtype: torch.dtype = self._weights.norm.dtype) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        memory = zeros(1, s.v_heads, s.k_dim, s.v_dim, dtype=torch.float32)
        nobody = Chunks(*(torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0, 2], [2], [0])))
        both = zeros(2, s.channels + s.values), zeros(2, 2 * s.v_heads)
        prompt(s, self._weights, both, nobody, 0, (zeros(1, s.conv, s.channels), memory), zeros(2, s.values))

    def __call__(
        self, projected: Tensor, gates: Tensor, batch: BatchLayout, inputs: Tensor, memory: Tensor
    ) -> Tensor:
        """As `Delta`. The first sequences with one row each are decoded."""
        rows, sequences = len(projected), len(batch.seq_lens)
        single = sequences if rows == sequences else batch.single_rows
        out = projected.new_empty((rows, self._shape.values))
        both, states = (projected.contiguous(), gates.contiguous()), (inputs, memory)
        if single:
            step(self._shape, self._weights, both, batch, single, states, out)
        if single < sequences:
            chunks = Chunks(batch.query_starts, batch.seq_lens, batch.slots)
            prompt(self._shape, self._weights, both, chunks, single, states, out)
        return out
