"""Planner costs of a gated delta net."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.mechanisms import cost
from tandem.mechanisms.cost import Limit, Output
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.stored import StoredFormats

MAX_DELTA_HEAD = 1 << 15  # elements of a head's memory that a program holds, padded to powers of two


class Cost(cost.Cost[DeltaRule]):
    """Cost of a constant-size memory."""

    has_plain_kernels = True
    kernels = 18

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        return step.rows * self.shape.chunk_row_bytes

    def flops(self, rows: int, before: int, per_head: bool) -> float:
        return 6.0 * rows * self.shape.v_heads * self.shape.k_dim * self.shape.v_dim

    def why_no_gpu(self) -> str:
        s = self.shape
        if s.padded_head > MAX_DELTA_HEAD:  # its memory fits in no registers
            return f"heads of gated delta nets may have 128 x 256 channels on a GPU, not {s.k_dim} x {s.v_dim}"
        return super().why_no_gpu()

    def cut(self, ranks: int) -> DeltaRule:
        s = self.shape
        return replace(s, k_heads=s.k_heads // ranks, v_heads=s.v_heads // ranks)

    def limits(self, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
        yield Limit(f"{self.shape.k_heads} heads of keys of delta nets", self.shape.k_heads)

    @property
    def output(self) -> Output:
        return Output("out_proj", self.shape.values)
