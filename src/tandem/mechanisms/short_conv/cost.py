"""Planner costs of a short convolution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.mechanisms import cost
from tandem.mechanisms.cost import Limit, Output
from tandem.mechanisms.short_conv.shape import ShortConv
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.stored import StoredFormats


class Cost(cost.Cost[ShortConv]):
    """Cost of a convolution between two gates."""

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        return step.rows * self.shape.chunk_row_bytes

    def flops(self, rows: int, before: int, per_head: bool) -> float:
        return 2.0 * rows * self.shape.channels * (self.shape.taps + 1)

    def prompt_seconds(self, rows: int, gpu_gbps: float) -> float:
        """Seconds to write and read what kernels leave each other."""
        return 2.0 * rows * self.shape.chunk_row_bytes / gpu_gbps / 1e9

    def cut(self, ranks: int) -> ShortConv:
        return replace(self.shape, channels=self.shape.channels // ranks)

    def limits(self, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
        yield Limit(f"{self.shape.channels} channels of convolutions", self.shape.channels)

    @property
    def output(self) -> Output:
        return Output("out_proj", self.shape.channels)
