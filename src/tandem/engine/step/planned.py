"""`PlannedFacts`: graphs that a plan will have captured, by their rows: paths of steps without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.planner.cuda_graphs import PROMPT_SEQUENCES, prefill_graph_rows, split_sizes
from tandem.planner.gpu_plan import GpuPlan


class StepSizes(NamedTuple):
    """tokens: rows of the model. sequences: 1 or more of them; as many as tokens where all decode."""

    tokens: int
    sequences: int = 1

    @property
    def decodes(self) -> bool:
        return self.tokens == self.sequences


@dataclass(frozen=True, slots=True)
class PlannedFacts:
    """`Facts` of a plan. Whether CPU and bus share a prefill's experts is measured at the start: here they do."""

    gpu: GpuPlan

    def sees(self, step: StepSizes) -> bool:
        return False

    def decode_graph(self, step: StepSizes) -> int | None:
        sizes = self.gpu.graph_sizes if step.decodes else ()
        return next((size for size in sizes if size >= step.tokens), None)

    def shared_graph(self, step: StepSizes) -> int | None:
        return self._prefill(step, split_sizes(self.gpu.sizes.prompt_sizes)) if self.gpu.streams_experts else None

    def prefill_graph(self, step: StepSizes) -> int | None:
        return None if self.gpu.streams_experts else self._prefill(step, self.gpu.sizes.prompt_sizes)

    def background_graph(self, step: StepSizes) -> int | None:
        return self._prefill(step, self.gpu.sizes.prompt_sizes)

    def _prefill(self, step: StepSizes, sizes: tuple[int, ...]) -> int | None:
        if step.decodes or step.sequences > PROMPT_SEQUENCES:
            return None
        return prefill_graph_rows(sizes, step.tokens) or None
