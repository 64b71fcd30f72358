"""Planner costs of a delta net with a decay for each channel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.mechanisms import cost
from tandem.mechanisms.channel_delta.shape import CORRECT_CHUNK, ChannelDelta
from tandem.mechanisms.cost import Limit, Output
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.stored import StoredFormats

CORRECT_SECONDS = 2.1e-5
"""Seconds that a prompt's chunk waits for the one before, on an H100 with Kimi-Linear. Traffic between kernels is
extra."""


class Cost(cost.Cost[ChannelDelta]):
    """Cost of a constant-size memory with a convolution before it."""

    kernels, launches = 10, 13

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        return step.rows * self.shape.chunk_row_bytes

    def flops(self, rows: int, before: int, per_head: bool) -> float:
        """Operations of correcting, writing and reading the memory. Rows of a GPU's chunk see each other in
        products."""
        s = self.shape
        chunk_products = min(rows, CORRECT_CHUNK) * 4 * s.inner if per_head else 0
        return 2.0 * rows * (3 * s.inner * (s.dim + s.taps) + chunk_products)

    def prompt_seconds(self, rows: int, gpu_gbps: float) -> float:
        """Seconds to write and read what kernels leave each other, plus the memory's walk from chunk to chunk."""
        traffic_seconds = 2.0 * rows * self.shape.chunk_row_bytes / gpu_gbps / 1e9
        return traffic_seconds + -(-rows // CORRECT_CHUNK) * CORRECT_SECONDS

    def cut(self, ranks: int) -> ChannelDelta:
        return replace(self.shape, heads=self.shape.heads // ranks)

    def limits(self, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
        yield Limit(f"{self.shape.heads} heads", self.shape.heads)

    @property
    def output(self) -> Output:
        return Output("o_proj", self.shape.inner)
