"""`GpuDelta`: a gated delta net on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.errors import KernelError
from tandem.kernels.batch_layout import KernelBatch
from tandem.mechanisms.delta_net.cost import MAX_DELTA_HEAD
from tandem.mechanisms.delta_net.gpu.prompt import Chunks, prompt
from tandem.mechanisms.delta_net.gpu.step import multiplies, step
from tandem.mechanisms.delta_net.gpu.verify import verify
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import DeltaState, DeltaWeights, Gates, gate_matrix


class GpuDelta:
    """`DeltaOperator` in Triton. Rows that decode are the same in every batch; of prompts, the last bits depend on
    where chunks of 64 rows begin."""

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
        no_chunks = Chunks(*(torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0, 2], [2], [0])))
        both = zeros(2, s.channels + s.values), zeros(2, 2 * s.v_heads)
        state = DeltaState(zeros(1, s.conv, s.channels), zeros(1, s.conv, 2 * s.v_heads), memory)
        prompt(s, self._weights, both, no_chunks, 0, state, zeros(2, s.values))

    def __call__(self, projected: Tensor, gates: Gates, batch: KernelBatch, state: DeltaState) -> Tensor:
        """As `DeltaOperator`, with rows of draft tokens as sequences of their own: neighbours of one slot. The first
        sequences with one row each are decoded."""
        rows, sequences = len(projected), len(batch.seq_lens)
        single = sequences if rows == sequences else batch.single_rows
        out, projected = projected.new_empty((rows, self._shape.values)), projected.contiguous()
        if single and batch.state_lens is None:
            gates = gates if multiplies(gates) else gate_matrix(gates).contiguous()
            step(self._shape, self._weights, (projected, gates), batch, single, state, out)
            if single == sequences:
                return out
        bound = self._shape, self._weights, (projected, gate_matrix(gates).contiguous())
        if single and batch.state_lens is not None:
            verify(*bound, batch, range(single), state, out)
        if single < sequences:
            if batch.state_lens is not None:
                verify(*bound, batch, range(single, sequences), state, out, before=True)
            chunks = Chunks(batch.query_starts, batch.seq_lens, batch.slots)
            prompt(*bound, chunks, single, state, out)
        return out
