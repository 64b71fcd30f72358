"""Planner costs of a state space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.mechanisms import cost
from tandem.mechanisms.cost import Limit, Output
from tandem.mechanisms.state_space.shape import SCAN_CHUNK, StateSpace
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.stored import StoredFormats

SCAN_SECONDS = 2.2e-5
"""Seconds that a prompt's chunk waits for the one before, on an H100: between Nemotron-3-Nano's, 17 us, and
Granite-4.0-H-Small's, 30 us."""


class Cost(cost.Cost[StateSpace]):
    """Cost of a constant-size memory with a convolution before it."""

    kernels, launches = 4, 16

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        return step.rows * self.shape.chunk_row_bytes

    def flops(self, rows: int, before: int, per_head: bool) -> float:
        """Operations of writing and reading the memory, and the convolution. Rows of a GPU's chunk see each other in
        products."""
        s = self.shape
        chunk_products = min(rows, SCAN_CHUNK) * (s.groups * s.state + s.inner) if per_head else 0
        return 2.0 * rows * (2 * s.inner * s.state + s.channels * s.taps + chunk_products)

    def prompt_seconds(self, rows: int, gpu_gbps: float) -> float:
        """Seconds to write and read what kernels leave each other, plus the memory's walk from chunk to chunk."""
        traffic_seconds = 2.0 * rows * self.shape.chunk_row_bytes / gpu_gbps / 1e9
        return traffic_seconds + -(-rows // SCAN_CHUNK) * SCAN_SECONDS

    def cut(self, ranks: int) -> StateSpace:
        s = self.shape
        return replace(s, heads=s.heads // ranks, groups=s.groups // ranks)

    def limits(self, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
        yield Limit(f"{self.shape.groups} groups of heads of state spaces", self.shape.groups)

    @property
    def output(self) -> Output:
        return Output("out_proj", self.shape.inner)
